"""Assigners that run in the background, in threads of the test's process or in other processes."""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event, Semaphore
from typing import Any

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Loop
from assigner.preemption.plan import QuotaSettings
from schema import clock
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.notify import Wakeups
from schema.timing import Timing
from tests.support.servers import READY_WITHIN

#: The cohort that each thread serves; None for all cohorts.
Threads = Sequence[int | None]


@contextmanager
def assigning(
    database: Database,
    timing: Timing,
    chance: random.Random,
    threads: Threads = (None,),
    *,
    name: str = "assigner",
    wakeups: bool = False,
    quotas: QuotaSettings | None = None,
    **settings: Any,
) -> Iterator[None]:
    """Run assigners in threads, which serve minimums first. They sleep for their interval or, with `wakeups`, until
    they are woken."""
    source = Wakeups(database, chance=chance, enabled=wakeups)
    source.start()
    loops = []
    for nth, cohort in enumerate(threads):
        own = random.Random(chance.random())
        chosen = AssignerSettings(
            kind="priority-age" if cohort is None else "cohort", **{"minimums_first": True, **settings}
        )
        assigner = PriorityAgeAssigner(
            database,
            chosen,
            timing=timing,
            chance=own,
            name=f"{name}/{nth}",
            now=clock.monotonic,
            quotas=quotas,
            cohorts=None if cohort is None else (cohort,),
        )
        waits: dict[str, Any] = (
            {"signal": source.signal("jobs"), "idle": lambda: source.idle("jobs")} if wakeups else {}
        )
        loops.append(Loop(f"{name}-{nth}", assigner.run_once, chance=own, **waits))
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.stop()
        source.stop()


def _assign(
    url: str, timing: Timing, seed: int, threads: Threads, ready: Semaphore, stop: Event, how: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    database = Database(url, DatabaseSettings(), role="assigner", chance=chance)
    with assigning(database, timing, chance, threads, **how):
        ready.release()
        stop.wait()
    database.close()


@contextmanager
def assigner_processes(
    url: str, timing: Timing, chance: random.Random, processes: Sequence[Threads], **how: Any
) -> Iterator[None]:
    """Run one process for each group of threads, and wait until all have begun. They share only the database.

    They are forks of one process that has imported all this, and has neither threads nor connections.
    """
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([__name__])
    ready, stop = forking.Semaphore(0), forking.Event()
    started = []
    for number, threads in enumerate(processes):
        given = {**how, "name": f"assigner-{number}"}
        arguments = (url, timing, chance.getrandbits(32), threads, ready, stop, given)
        started.append(forking.Process(target=_assign, args=arguments, daemon=True))
    for process in started:
        process.start()
    try:
        assert all(ready.acquire(timeout=READY_WITHIN) for _ in started)
        yield
    finally:
        stop.set()
        for process in started:
            process.join()
    assert [process.exitcode for process in started] == [0] * len(started)
