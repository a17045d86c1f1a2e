"""One rate, four assigner processes: never above it by the times of the grants, and hardly below it."""

import multiprocessing
import random
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import pytest

from assigner.cycle import PriorityAgeAssigner
from assigner.loops import Loop
from assigner.tuning import AssignerSettings
from schema import clock, rates
from schema.engine import Database, DatabaseSettings
from schema.timing import Timing
from tests.patience import eventually
from tests.pool import Pool

PROCESSES = 4
PER_SECOND, BURST = 50, 25
#: Jobs of the limited class, a bit more than start while the test looks, and of another one.
LIMITED, FREE = 420, 300
SECONDS = 6.0
#: Part of the rate that has to be used.
USED = 0.95

GRANTED = """
SELECT extract(epoch FROM l.granted_at)::float AS at FROM leases l JOIN jobs j ON j.id = l.job_id
JOIN constraint_sets g ON g.id = j.constraint_set WHERE g.terms->>'resource_class' = :resource ORDER BY 1"""


def _assign(url: str, timing: Timing, seed: int, name: str, stop: Event) -> None:
    chance = random.Random(seed)
    database = Database(url, DatabaseSettings(), role="assigner", chance=chance)
    assigner = PriorityAgeAssigner(
        database, AssignerSettings(), timing=timing, chance=chance, name=name, now=clock.monotonic
    )
    loop = Loop(name, assigner.run_once, chance=random.Random(seed + 1))
    loop.start()
    stop.wait()
    loop.stop()
    database.close()


@contextmanager
def assigners(url: str, timing: Timing, chance: random.Random) -> Iterator[None]:
    spawning = multiprocessing.get_context("spawn")
    stop = spawning.Event()
    processes = [
        spawning.Process(target=_assign, args=(url, timing, chance.getrandbits(32), f"assigner-{n}", stop), daemon=True)
        for n in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES


def grants(pool: Pool, resource: str) -> list[float]:
    return [row.at for row in pool.rows(GRANTED, resource=resource)]


@pytest.mark.timeout(120)
def test_ma_20_a_rate_shared_by_four_processes_is_kept_in_every_second_and_used(
    pool: Pool, database_url: str, chance: random.Random
) -> None:
    """interval is a second and more: nothing but the bucket itself can bring assigners back in time."""
    pool.database.run(lambda c: rates.set_rate(c, "claude_cli", per_second=PER_SECOND, burst=BURST, actor="test"))
    for nth in range(20):
        pool.bot(f"bot-{nth}", capacity=500)
    pool.submit(LIMITED, terms={"resource_class": "claude_cli"}, priority=-10)
    with assigners(database_url, pool.timing, chance):
        eventually(lambda: grants(pool, "claude_cli"), within=60.0)
        pool.submit(FREE, terms={"resource_class": "codex"})

        def over() -> bool:
            found = grants(pool, "claude_cli")
            return found[-1] - found[0] >= SECONDS

        eventually(over, within=60.0, every=0.25)
    found, free = grants(pool, "claude_cli"), grants(pool, "codex")

    most = max(bisect_left(found, at + 1.0) - nth for nth, at in enumerate(found))
    assert most <= PER_SECOND + BURST
    span = found[-1] - found[0] - 1.0
    used = (len(found) - bisect_left(found, found[0] + 1.0)) / (span * PER_SECOND)
    assert used >= USED
    assert len(free) == FREE
    assert free[-1] - free[0] < SECONDS, "jobs of another class do not wait for this one"
    print(f"{used:.1%} of the rate, at most {most} in a second; {FREE} others in {free[-1] - free[0]:.2f} s")
