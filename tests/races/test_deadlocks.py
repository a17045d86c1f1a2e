"""The lock order, as a property: everything at once on the same few bots, and nobody ever deadlocks."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from leasehold.errors import Conflict, NotFound

from bots.protocol import LeaseReport, Sync
from schema import clock
from schema.accounting import quotas
from schema.diagnostics import invariants
from schema.postgres.engine import Database, DatabaseSettings
from schema.timing import Timing
from tests.support import plans
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Bot, Pool, active, completed, count
from tests.support.race import BACKENDS, DEADLOCK_TIMEOUT, DEADLOCKS, ask_stop, cancel, drain, expire, retention
from tests.support.sync import together
from tests.support.tenancy import EAGER, Tenancy

SECONDS = 5.0
SAMPLE = 0.25
MOVES = {"submit", "grant", "acknowledge", "finish", "cancel"}
FAILURES = "SELECT EXISTS (SELECT FROM bot_success WHERE failures > 0) AS noted"
BOTS = ("bot-0", "bot-1", "bot-2")
CREW = ("bot-2", "bot-3", "bot-4", "bot-5")
VERDICTS = ("succeeded", "failed", "error", "stopped", "released")
# What the passing of time would do, without getting in anybody's way.
AGE_BOTS = """
WITH aged AS MATERIALIZED (
    SELECT id FROM bots WHERE status <> 'gone' AND random() < 0.3 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE bots b SET expires_at = now() - interval '1 s' FROM aged s WHERE b.id = s.id"""
AGE_LEASES = """
WITH aged AS MATERIALIZED (
    SELECT job_id, fence FROM leases WHERE ended_at IS NULL AND random() < 0.5 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE leases l SET due_at = now() - interval '1 s' FROM aged s WHERE l.job_id = s.job_id AND l.fence = s.fence"""
SOME_JOBS = "SELECT public_id FROM jobs WHERE finished_at IS NULL AND random() < 0.2 ORDER BY random() LIMIT 12"


Kind = Callable[[Pool, random.Random], Callable[[], None]]


def syncing(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """Bots that start anew, acknowledge, finish, forget and leave, many leases to a call."""
    sync_service = pool.sync_service(to_capacity=True)
    bots: dict[str, Bot] = {}

    def report(work: dict[str, Any]) -> LeaseReport:
        return active(work) if chance.random() < 0.5 else completed(work, chance.choice(VERDICTS))

    def once() -> None:
        name = chance.choice(BOTS)
        try:
            if name not in bots:
                bots[name] = pool.bot(name, sync_service=sync_service, capacity=chance.randint(2, 12))
            works = bots[name].sync()["leases"]
            bots[name].sync(*[report(work) for work in works if chance.random() < 0.95])
            if chance.random() < 0.03:
                bots.pop(name).sync(status="gone")
        except Conflict:
            bots.pop(name, None)

    return once


def settling(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """The same of a crew, whose calls are settled together in any order."""
    sync_service = pool.sync_service(to_capacity=True)
    bots: dict[str, Bot] = {}
    works: dict[str, list[dict[str, Any]]] = {}

    def report(work: dict[str, Any]) -> LeaseReport:
        return active(work) if chance.random() < 0.5 else completed(work, chance.choice(VERDICTS))

    def message(name: str) -> Sync:
        reports = [report(work) for work in works.get(name, []) if chance.random() < 0.95]
        return bots[name].message(*reports, status="gone" if chance.random() < 0.03 else "ok")

    def once() -> None:
        for name in CREW:
            # Another thread may open a session of the same bot, or end this one, before its first sync.
            while name not in bots:
                with suppress(Conflict):
                    bots[name] = pool.bot(name, sync_service=sync_service, capacity=chance.randint(2, 12))
        names = chance.sample(CREW, len(CREW))
        for name, answer in zip(names, together(sync_service, *map(message, names)), strict=True):
            if isinstance(answer, str):
                bots.pop(name)
            works[name] = [] if isinstance(answer, str) else answer["leases"]

    return once


def cancelling(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """Batches of jobs in no order at all."""
    return lambda: cancel(pool, *[str(row.public_id) for row in pool.rows(SOME_JOBS)]).clear()


def upkeep(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """Sessions expire and leases are overdue, far more often than they should."""

    def once() -> None:
        if chance.random() < 0.3:
            pool.change(AGE_BOTS)
        pool.change(AGE_LEASES)
        expire(pool)
        ask_stop(pool)
        ask_stop(pool, from_state="active", reason="timeout")
        pool.upkeep().run_once()
        if chance.random() < 0.2:
            retention(pool)

    return once


def assigning(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """Assigners with the shortest backoff, which keep postponing and promoting."""
    assigner = pool.assigner(failure_backoff=0.05, failure_backoff_cap=0.1)

    def once() -> None:
        assigner.run_once()

    return once


def submitting(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """Jobs of all sizes, keys that come again, requirement sets and instances that are new; drains in between."""

    def once() -> None:
        pool.submit(chance.randint(1, 12), units=chance.randint(1, 3), retry_failed=chance.random() < 0.5)
        for key in chance.sample(range(200), 3):
            pool.submit(key=f"key-{key}", instance=f"tenant-{key}", properties={"size": str(key)} if key % 2 else {})
        name = chance.choice(BOTS)
        if pool.rows("SELECT id FROM bots WHERE name = :name", name=name):
            drain(pool, draining=chance.random() < 0.3, bot=name)

    return once


def governing(pool: Pool, chance: random.Random) -> Callable[[], None]:
    """Quotas come, change and go, minimums are reclaimed at once, and counters are compared."""
    tenancy = Tenancy(pool)
    assigner = tenancy.assigner(EAGER)

    def once() -> None:
        instance, minimum = chance.choice(("default", "tenant-1", "tenant-2", "tenant-3")), chance.randint(0, 3)
        if chance.random() < 0.2:
            with suppress(NotFound):
                pool.database.run(lambda c: quotas.remove_quotas(c, [("default", instance)], actor="test"))
        else:
            tenancy.quota(instance, minimum=minimum, maximum=chance.choice((None, minimum, minimum + 3)))
        pool.submit(instance=instance, priority=chance.randint(-5, 0))
        assigner.run_once()
        assert pool.database.run(quotas.reconcile_quotas) == []

    return once


KINDS: tuple[Kind, ...] = (syncing, settling, cancelling, upkeep, assigning, submitting, governing, governing)


@pytest.fixture
def crowd(database_url: str, timing: Timing, chance: random.Random) -> Iterator[Pool]:
    """A pool with connections for all of the threads, on a server that finds deadlocks at once.

    Otherwise a deadlock would be found no sooner than the lock timeout, which would hide it.
    """
    settings = DatabaseSettings(pool=10, reserve=8)
    database = Database(database_url, settings, role="crowd", chance=chance)
    pool = Pool(database, timing, chance)
    pool.change(DEADLOCK_TIMEOUT)
    database.close()
    yield pool
    database.close()


@pytest.mark.parametrize("counting", [False, True], ids=["plain", "counting"])
@pytest.mark.long
def test_mixed_calls_on_the_same_few_bots_never_deadlock(crowd: Pool, chance: random.Random, counting: bool) -> None:
    count(crowd, statistics=counting, probation_failures=1)
    turns, over = Counter[str](), threading.Event()

    def keep_on(kind: Kind, own: random.Random) -> None:
        once = kind(Pool(crowd.database, crowd.timing, own), own)
        while not over.is_set():
            once()
            turns[kind.__name__] += 1

    with plans.errors() as failed, ThreadPoolExecutor(len(KINDS)) as threads:
        loops = [threads.submit(keep_on, kind, random.Random(chance.getrandbits(32))) for kind in KINDS]
        try:
            watched(crowd, loops, seconds=SECONDS, counting=counting)
        finally:
            over.set()
    for loop in loops:
        loop.result()
    errors = [error.sqlstate for error in failed]
    print(f"turns: {dict(turns)}, errors: {Counter(errors)}", *failed, sep="\n")
    assert "40P01" not in errors
    assert crowd.row(FAILURES).noted == counting
    # A backend's counters are certain to be written once it has gone.
    crowd.database.close()
    eventually(lambda: crowd.row(BACKENDS).others == 0)
    assert crowd.row(DEADLOCKS).deadlocks == 0


def watched(pool: Pool, loops: Sequence["Future[None]"], *, seconds: float, counting: bool) -> None:
    """Verify the database again and again for `seconds`, and until every move was seen, or until a loop has failed."""
    began, moved, broken = clock.monotonic(), set[str](), list[invariants.Finding]()

    def over() -> bool:
        broken.extend(finding for finding in invariants.verify(pool.database) if finding.rows)
        moved.update(row.move for row in pool.rows("SELECT DISTINCT move FROM job_events"))
        enough = moved >= MOVES and (not counting or pool.row(FAILURES).noted)
        failed = broken or any(loop.done() for loop in loops)
        return bool(failed) or (enough and clock.monotonic() - began > seconds)

    eventually(over, seconds + MINUTE, every=SAMPLE)
    assert broken == []
