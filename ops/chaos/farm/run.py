"""The command of kill runs of builds: `python -m ops.chaos.farm.run --actions 5000 --seed 1`.

ops/chaos/README.md explains it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc

from bots.farm.client import Client, Work
from bots.farm.storage.programs import BUBBLEWRAP, RUNNER, STORAGE, require
from bots.farm.storage.upstream import Digest
from ops.chaos.farm.workers import PASSES, Worker
from schema import clock

#: Parts of a farm that are killed, by a word of their command lines. The door takes its storage with it.
PARTS = {"door": " farm ", "storage": "buildbox-casd ", "assigner": " assign ", "gateway": " gateway", "bot": " bot "}
CLIENTS, WORKERS = 40, 6
#: Seconds between two kills, and after which a client asks again.
PAUSE, AGAIN = (5.0, 15.0), 0.5
#: Seconds within which the pool is up, in which the last results are stored, and in which all ends: at least and each.
UP_WITHIN, STORED_WITHIN, DONE_WITHIN, DONE_WITHIN_EACH = 120.0, 60.0, 300.0, 1.0
#: Each action is wanted by so many clients.
WANTED = 2


@dataclass
class Report:
    """What a run has found: numbers by name, and what must not be."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def line(self) -> str:
        """Return the one line that tells of the run."""
        told = [f"{number} {name}" for name, number in sorted(self.counts.items())]
        return f"{', '.join(told)}; {len(self.violations)} violations; {self.seconds:.0f} s; seed {self.seed}"


class Clients:
    """Clients that want actions, each until it has the result."""

    def __init__(self, address: str, actions: int, seed: int, report: Report) -> None:
        self._address, self._actions, self._seed, self._report = address, actions, seed, report
        self.wanted: dict[Digest, str] = {}
        self._threads = [threading.Thread(target=self._ask, args=(nth,), daemon=True) for nth in range(CLIENTS)]

    def start(self) -> None:
        """Begin."""
        for each in self._threads:
            each.start()

    @property
    def waiting(self) -> int:
        """How many clients have not ended."""
        return sum(each.is_alive() for each in self._threads)

    def _ask(self, first: int) -> None:
        with Client(self._address) as client:
            for nth in range(first, self._actions * WANTED, CLIENTS):
                word = f"{self._seed}-{nth // WANTED}"
                work = Work(arguments=["/bin/sh", "-c", 'printf %s "$1"', "-", word])
                self.wanted[Digest.of(work.blobs()[0])] = word
                self._have(client, work, word)

    def _have(self, client: Client, work: Work, word: str) -> None:
        while True:
            try:
                response = client.run(work)
                break
            except grpc.RpcError as error:
                if error.code() not in PASSES:
                    self._report.violations.append(f"{word}: {error.code().name} {error.details()}")
                    return
                self._report.counts["calls that clients repeated"] += 1
                clock.sleep(AGAIN)
        self._report.counts["answers"] += 1
        said = printed(client, response.result)
        if response.status.code or said != word:
            self._report.violations.append(f"{word}: code {response.status.code} {response.status.message}, {said!r}")


def printed(client: Client, result: object) -> str:
    """Return what an action has printed, whether the result holds it or the storage does."""
    raw: bytes = getattr(result, "stdout_raw", b"")
    digest = getattr(result, "stdout_digest", None)
    if not raw and digest is not None and digest.size_bytes:
        raw = client.download(Digest(digest.hash, digest.size_bytes))
    return raw.decode(errors="replace")


def run(address: str, kill: Callable[[str], bool], *, actions: int, seed: int) -> Report:
    """Let clients want actions while parts of the farm are killed; return what was seen. kill: by the part's name."""
    chance, report, began = random.Random(seed), Report(seed), clock.monotonic()
    clients = Clients(address, actions, seed, report)
    workers = [Worker(address, f"w{n}", random.Random(seed + n), report.counts) for n in range(WORKERS)]
    clients.start()
    for each in workers:
        each.start()
    until = began + DONE_WITHIN + DONE_WITHIN_EACH * actions
    while clients.waiting and clock.monotonic() < until:
        clock.sleep(chance.uniform(*PAUSE))
        part = chance.choice(list(PARTS))
        report.counts[f"kills of {part}"] += kill(part)
    if clients.waiting:
        report.violations.append(f"{clients.waiting} clients still wait")
    with Client(address) as client:
        for digest, word in clients.wanted.items():
            found = _stored(client, digest)
            if found is None:
                report.counts["results that were not stored"] += 1
            elif (said := printed(client, found)) != word:
                report.violations.append(f"{word}: {said!r} is stored")
    for each in workers:
        each.stop()
    report.counts["actions"] = len(clients.wanted)
    report.seconds = clock.monotonic() - began
    return report


def _stored(client: Client, digest: Digest) -> object:
    until = clock.monotonic() + STORED_WITHIN
    while True:
        try:
            return client.cached(digest)
        except grpc.RpcError as error:
            if error.code() not in PASSES or clock.monotonic() > until:
                raise
            clock.sleep(AGAIN)


@contextmanager
def farm(directory: Path) -> Iterator[str]:
    """Run a pool with a farm door and one bot for actions, and give the door's address."""
    # Accounts of jobs may not be able to run this Python.
    own = {"LEASEHOLD_FARM_ANONYMOUS_WORKERS": "true", "LEASEHOLD_BOT_JOB_USER": "agent"}
    programs = Path(sys.executable).parent
    environment = {**os.environ, **own, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [str(programs / "leasehold"), "--data", str(directory), "up", "--bots", "0"]
    with (directory / "up.log").open("w") as log:
        up = subprocess.Popen(
            [*command, "--assigners", "1", "--port", "0", "--farm", "0", "--json"],
            env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        assert up.stdout is not None
        told = up.stdout.readline()
        if not told:
            raise click.ClickException(f"the pool did not start; see {directory / 'up.log'}")
        yield json.loads(told)["farm"]
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(UP_WITHIN)


def killer(directory: Path) -> Callable[[str], bool]:
    """Return what kills a part of the farm in this directory; it returns whether there was one."""

    def kill(part: str) -> bool:
        for entry in Path("/proc").iterdir():
            try:
                said = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if entry.name.isdecimal() and str(directory) in said and PARTS[part] in f"{said} ":
                    os.kill(int(entry.name), signal.SIGKILL)
                    return True
            except OSError:
                continue  # it has ended meanwhile
        return False

    return kill


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--actions", type=click.IntRange(1, 1_000_000), default=5000, show_default=True, help="Actions.")
@click.option("--seed", type=int, help="Seed of all chance [default: drawn].")
def main(actions: int, seed: int | None) -> None:
    """Kill parts of a farm at random while clients want actions, and check each result and what is stored.

    Exits with 1 on any violation.
    """
    require(STORAGE, RUNNER, BUBBLEWRAP)
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="leasehold-chaos-farm-"))
    directory.chmod(0o711)
    with farm(directory) as address:
        report = run(address, killer(directory), actions=actions, seed=seed)
    for violation in report.violations[:20]:
        click.echo(violation)
    if report.violations:
        click.echo(f"logs: {directory}", err=True)
    click.echo(report.line())
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
