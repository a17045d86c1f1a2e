"""The demo's tenants: one that fills the pool, one with a minimum quota, and one with a maximum quota.

Background jobs, the scrubs, take every unit. Then the other jobs arrive. The pool stops scrubs until the most urgent
instance has its minimum; the stopped scrubs return to the queue and finish later. The instance with a maximum stays
below it. A thread observes the quotas during the demo.

A scrub does what a file store does at night: it reads files slowly and compares them with their digests. It uses
little processor time, takes a unit of a bot for some seconds, and may be stopped at any moment. That makes it a good
job to evict.
"""

import hashlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from leasehold.client import Client
from leasehold.errors import LeaseholdError, NotFound
from leasehold.states import JobState
from rich.console import Console

from bots.demo.workload import Module
from schema import clock

# Scrubs


INSTANCE = "scrub"
#: The priority of scrubs, the least urgent jobs of the demo.
PRIORITY = 100
#: Files of one scrub, and seconds of pause after each file: a scrub takes about six seconds.
FILES, PAUSE = 60, 0.1

#: The program of a job: `python -c PROGRAM PAUSE PATH...` prints `DIGEST FILES`.
PROGRAM = """
import sys
from hashlib import sha256
from time import sleep

digest = sha256()
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        digest.update(file.read())
    sleep(float(sys.argv[1]))
print(digest.hexdigest(), len(sys.argv) - 2)
"""


@dataclass(frozen=True)
class Scrub:
    """One background job, which reads these files in this order."""

    files: tuple[Module, ...]

    def request(self) -> dict[str, Any]:
        """Return the job request."""
        paths = [str(file.path) for file in self.files]
        return {
            "command": [sys.executable, "-I", "-S", "-c", PROGRAM, str(PAUSE), *paths],
            "instance": INSTANCE,
            "priority": PRIORITY,
            "properties": {"os": sys.platform},
            "timeout_seconds": 120.0,
        }

    def expected_output(self) -> bytes:
        """Compute the output that the job must write."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.path.read_bytes())
        return f"{digest.hexdigest()} {len(self.files)}\n".encode()


def scrubs(files: Sequence[Module], count: int) -> list[Scrub]:
    """Make `count` scrubs, each of different files as long as there are enough."""
    return [Scrub(tuple(files[(nth * FILES + i) % len(files)] for i in range(FILES))) for nth in range(count)]


COHORT = "default"
#: Instances with a quota in the demo: their minimum and maximum, in units; None = no maximum.
QUOTAS: Mapping[str, tuple[int, int | None]] = {"web": (2, None), "tools": (0, 4), INSTANCE: (0, 12)}
#: The number of scrubs: more than the bots have units, so that some wait.
SCRUBS = 14
#: Seconds within which the scrubs must start, and must finish after all other jobs have.
START_WITHIN, END_WITHIN = 60.0, 180.0
#: Seconds between two reads of the quotas.
WATCH_INTERVAL = 0.25


@dataclass(frozen=True)
class QuotaObservation:
    """A quota and its observed usage, in units.

    peak: the largest observed usage. exceeded: how often the usage was observed above the maximum.
    """

    min: int
    max: int | None
    peak: int
    exceeded: int


@dataclass(frozen=True)
class Tenancy:
    """The demo's observations of its tenants.

    minimum_met_seconds: the time from when the scrubs held every unit until the instance with a minimum was observed
    to have it; None if it never was. receipt: the receipt of the first preemption.
    """

    quotas: dict[str, QuotaObservation]
    preemptions: int
    minimum_met_seconds: float | None
    receipt: dict[str, Any] | None
    scrubs: int
    scrubs_verified: int

    @property
    def exceeded(self) -> int:
        """How often any instance was observed above its maximum."""
        return sum(seen.exceeded for seen in self.quotas.values())


class Tenants:
    """Fills the pool with scrubs on entry and observes the quotas; `finish` waits for the scrubs."""

    def __init__(self, client: Client, files: Sequence[Module], *, units: int, console: Console) -> None:
        self._client, self._units, self._console = client, units, console
        self._scrubs = scrubs(files, SCRUBS)
        self._jobs: list[str] = []
        self._peaks = dict.fromkeys(QUOTAS, 0)
        self._exceeded = dict.fromkeys(QUOTAS, 0)
        self._short_since: float | None = None
        self._met_after: float | None = None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="demo-quotas", daemon=True)

    def __enter__(self) -> Self:
        for instance, (minimum, maximum) in QUOTAS.items():
            self._client.set_quota(COHORT, instance, minimum=minimum, maximum=maximum, create=True)
        self._jobs = [job.id for job in self._client.submit(each.request() for each in self._scrubs)]
        self._wait_until_full()
        self._short_since = clock.monotonic()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for instance in QUOTAS:
            try:
                self._client.remove_quota(COHORT, instance)
            except NotFound:
                continue

    def finish(self) -> Tenancy:
        """Wait for the scrubs, check them, and return the observations. Raises LeaseholdError if one does not end."""
        wanted = dict(zip(self._jobs, self._scrubs, strict=True))
        verified = 0
        for job in self._client.wait(self._jobs, timeout=END_WITHIN):
            written = b"".join(piece.data for piece in self._client.written(job["id"]))
            verified += job["state"] == JobState.SUCCEEDED and written == wanted[job["id"]].expected_output()
        stories = [event for job in self._jobs for event in self._client.show(job)["events"]]
        receipts = [event["details"] for event in stories if event["move"] == "preempted"]
        return Tenancy(
            quotas={
                name: QuotaObservation(minimum, maximum, self._peaks[name], self._exceeded[name])
                for name, (minimum, maximum) in QUOTAS.items()
            },
            preemptions=len(receipts),
            minimum_met_seconds=self._met_after,
            receipt=receipts[0] if receipts else None,
            scrubs=len(self._scrubs),
            scrubs_verified=verified,
        )

    def _wait_until_full(self) -> None:
        deadline = clock.monotonic() + START_WITHIN
        while self._usage().get(INSTANCE, 0) < self._units:
            if clock.monotonic() >= deadline:
                raise LeaseholdError(f"the scrubs did not fill {self._units} units within {START_WITHIN:.0f} s")
            clock.sleep(WATCH_INTERVAL)
        self._console.print(f"{self._units} scrubs hold all {self._units} units, {SCRUBS - self._units} more wait")

    def _usage(self) -> dict[str, int]:
        return {quota["instance"]: quota["usage"] for quota in self._client.quotas() if quota["cohort"] == COHORT}

    def _watch(self) -> None:
        while not clock.wait(self._stop, WATCH_INTERVAL):
            try:
                usage = self._usage()
            except LeaseholdError:
                continue
            for name, (minimum, maximum) in QUOTAS.items():
                used = usage.get(name, 0)
                self._peaks[name] = max(self._peaks[name], used)
                self._exceeded[name] += maximum is not None and used > maximum
                if minimum and used >= minimum and self._short_since is not None and self._met_after is None:
                    self._met_after = round(clock.monotonic() - self._short_since, 3)
