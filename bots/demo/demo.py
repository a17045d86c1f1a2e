"""The demo run: real jobs on six bots, with every result checked.

Each module of this Python's standard library is one job of one of three instances. Bots of two kinds compile the
modules, each in a process of its own. The demo compares every result with one that it computes itself. Before these
jobs arrive, background jobs of a fourth instance take the whole pool; see `tenants`.
"""

import platform
import random
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leasehold.client import Client
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from bots.cli import output
from bots.demo import workload
from bots.demo.report import Board, Report, Result, read_result, report
from bots.demo.tenants import Tenancy, Tenants
from bots.demo.workload import Module
from schema import clock, readable

#: Unfinished jobs count as lost if no job became final for this many seconds. It is longer than the longest job may run
#: and than the session of a lost bot may live.
STALLED = 180.0
#: Seconds within which the bots must open their sessions.
BOTS_WITHIN = 60.0
#: Results that are fetched and checked in parallel.
CHECKERS = 4
#: Seconds for which a job of an instance below its minimum waits before preemption; short, because the demo is short.
PREEMPTION_DELAY = 1.0


@dataclass(frozen=True)
class Pool:
    """The pool that the demo runs on, which the caller of `run` starts and stops.

    url: of the gateway. token: an operator's. data: the data directory of the pool.
    """

    url: str
    token: str
    data: Path


@dataclass(frozen=True)
class BotSpec:
    """A bot for the demo, in a process of its own. `capacity`: units. `priority`: lower = preferred."""

    name: str
    capacity: int
    properties: Mapping[str, str]
    priority: int = 0


@dataclass(frozen=True)
class Options:
    """Options of the demo.

    jobs: the most jobs; None = all. json: print one JSON object and nothing else on standard output. keep: leave the
    pool up afterwards, until Ctrl-C.
    """

    jobs: int | None = None
    json: bool = False
    keep: bool = False


def bots_wanted() -> list[BotSpec]:
    """Return the demo's bots: six of two kinds, with two units each."""
    common = {"os": sys.platform, "python": platform.python_version()}
    small = [BotSpec(f"demo-small-{n}", 2, common | {"size": "small"}) for n in (1, 2, 3)]
    large = [BotSpec(f"demo-large-{n}", 2, common | {"size": "large"}) for n in (1, 2, 3)]
    return small + large


def run(pool: Pool, options: Options, *, chance: random.Random) -> Report:
    """Run the demo's jobs on `pool` and print the report. Raises LeaseholdError if a result is wrong or missing."""
    console = Console(stderr=options.json, highlight=False)
    wanted = bots_wanted()
    with Client(pool.url, pool.token, chance=chance) as client:
        _wait_for_bots(client, {bot.name for bot in wanted})
        units = sum(bot.capacity for bot in wanted)
        with Tenants(client, workload.find_modules(), units=units, console=console) as tenants:
            found = work(client, workload.find_modules(options.jobs), console=console)
            tenancy = tenants.finish()
    if options.json:
        readable.print_json(
            asdict(found)
            | {"preemptions": tenancy.preemptions, "quota_max_exceeded": tenancy.exceeded, "tenancy": asdict(tenancy)}
        )
    else:
        _print(found, console)
        _print_tenancy(tenancy, console)
    if options.keep:
        _linger(pool, console)
    _judge(found, tenancy)
    return found


def _judge(found: Report, tenancy: Tenancy) -> None:
    """Raise LeaseholdError if a result is wrong or missing, or an instance exceeded its maximum."""
    if not found.good:
        raise LeaseholdError(
            f"{found.jobs - found.verified} of {found.jobs} results are wrong or missing: " + ", ".join(found.wrong[:5])
        )
    if tenancy.scrubs_verified != tenancy.scrubs:
        raise LeaseholdError(
            f"{tenancy.scrubs - tenancy.scrubs_verified} of {tenancy.scrubs} scrubs are wrong or missing"
        )
    if tenancy.exceeded:
        raise LeaseholdError(f"an instance was seen above its maximum {tenancy.exceeded} times")


def work(client: Client, found: Sequence[Module], *, console: Console, stalled: float = STALLED) -> Report:
    """Submit a job for each module, check the results, and report. `stalled`: see STALLED."""
    began = clock.monotonic()
    taken = client.submit(workload.request_for(module) for module in found)
    pending = {job.id: module for job, module in zip(taken, found, strict=True)}
    results: list[Result] = []
    looks: set[Future[Result]] = set()

    def note(checked: Iterable[Future[Result]]) -> None:
        for look in checked:
            results.append(look.result())
            board.finished(results[-1].module.instance, results[-1].bot, right=results[-1].verified)

    crew = ThreadPoolExecutor(CHECKERS)
    try:
        with Board(workload.shares(found), console=console) as board:
            board.say(f"{len(pending)} jobs submitted in {clock.monotonic() - began:.2f} s")
            came = True
            while pending and came:
                came = False
                for job in client.wait(list(pending), timeout=stalled):
                    came = True
                    looks.add(crew.submit(read_result, client, job["id"], pending.pop(job["id"])))
                    checked = {look for look in looks if look.done()}
                    looks -= checked
                    note(checked)
            note(as_completed(looks))
    finally:
        crew.shutdown(wait=False, cancel_futures=True)
    return report(results, missing=list(pending.values()), seconds=clock.monotonic() - began)


def _wait_for_bots(client: Client, names: set[str]) -> None:
    """Wait until all these bots have a session, so that the measured waits do not include their start."""
    deadline = clock.monotonic() + BOTS_WITHIN
    missing = names
    while missing := missing - {bot["name"] for bot in client.bots() if bot["status"] == "ok"}:
        if clock.monotonic() >= deadline:
            raise LeaseholdError(
                f"these bots opened no session within {BOTS_WITHIN:.0f} s: {', '.join(sorted(missing))}"
            )
        clock.sleep(0.2)


def _print(found: Report, console: Console) -> None:
    for title, shares in (("instance", found.by_instance), ("bot", found.by_bot)):
        table = Table(title, "jobs", "verified", "wait p50", "wait p99", "locality hits", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, share in shares.items():
            table.add_row(
                name,
                f"{share.jobs}",
                f"{share.verified}",
                _milliseconds(share.wait_p50_ms),
                _milliseconds(share.wait_p99_ms),
                f"{share.locality_hits}",
            )
        console.print(table)
        console.print()
    console.print(
        f"{found.jobs} jobs on {found.bots} bots, {found.jobs_per_second:.1f} a second: "
        f"{found.succeeded} succeeded, {found.failed} failed, {found.lost} lost",
        soft_wrap=True,
    )
    console.print(
        f"waits from submit to grant: p50 {_milliseconds(found.wait_p50_ms)}, p99 "
        f"{_milliseconds(found.wait_p99_ms)}; {found.locality_hits} locality hits, {found.retries} retries; placed by: "
        + ", ".join(f"{name} {count}" for name, count in sorted(found.by_strategy.items())),
        soft_wrap=True,
    )
    console.print(
        f"{found.verified} of {found.jobs} results verified against a computation of our own in {found.seconds:.1f} s",
        soft_wrap=True,
    )


def _print_tenancy(tenancy: Tenancy, console: Console) -> None:
    table = Table("quota", "minimum", "maximum", "peak", "seen above", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, seen in tenancy.quotas.items():
        maximum = "-" if seen.max is None else f"{seen.max}"
        table.add_row(name, f"{seen.min}", maximum, f"{seen.peak}", f"{seen.exceeded}")
    console.print()
    console.print(table)
    console.print()
    if tenancy.minimum_met_seconds is not None:
        console.print(f"the minimum was met {tenancy.minimum_met_seconds:.1f} s after the work came", soft_wrap=True)
    console.print(
        f"{tenancy.preemptions} preemptions; {tenancy.scrubs_verified} of {tenancy.scrubs} scrubs verified, the "
        "stopped ones after another run",
        soft_wrap=True,
    )
    if tenancy.receipt is not None:
        console.print(f"the first one's receipt: {_receipt(tenancy.receipt)}", soft_wrap=True)


def _receipt(receipt: Mapping[str, Any]) -> str:
    taker, victims = receipt["preemptor"], receipt["victims"]
    stopped = ", ".join(f"{victim['instance']} (priority {victim['priority']})" for victim in victims)
    waited = output.seconds(taker["waited_seconds"])
    return (
        f"a job of {taker['instance']} (priority {taker['priority']}) had waited {waited}, its "
        f"instance used {taker['usage']} of its minimum of {taker['min_quota']}; by the rule {receipt['rule']} bot "
        f"{receipt['bot']} stopped {len(victims)} job of {stopped}"
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else output.seconds(value / 1000)


def _linger(pool: Pool, console: Console) -> None:
    """Leave the pool up until Ctrl-C."""
    console.print(f"\nThe pool is still up at {pool.url}. Try in another terminal:")
    console.print(f"  export LEASEHOLD_DATA={pool.data}")
    for line in ("status", "bots list", "list --limit 5", "submit --wait -- uname -a", "bots drain demo-small-1"):
        console.print(f"  leasehold {line}")
    console.print("Ctrl-C stops it.")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
