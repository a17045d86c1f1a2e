"""Many jobs: the hopeless ones delay nobody, and the others are each done exactly once."""

import os
import random
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from assigner.preemption.plan import QuotaSettings
from bots.sync.fetch import FetchSettings
from schema import clock
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.timing import Timing
from tests.support import filling
from tests.support.assigners import assigner_processes, assigning
from tests.support.model import Watching
from tests.support.patience import eventually
from tests.support.pool import Pool
from tests.support.swarm import Swarm
from tests.support.tenancy import Tenancy

HOPELESS = 3_000
JOBS_VARIABLE = "LEASEHOLD_TEST_JOBS"
JOBS = int(os.environ.get(JOBS_VARIABLE) or 400)
PROCESSES, THREADS, BOTS = 2, 2, 30
#: So many of the bots never fetch, so that the assigners have work from the first job to the last.
WAITING = 10


#: Jobs that nobody can run: their kinds, and what else is special.
HOPELESS_JOBS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "no bot offers it": (("absent",), {}),
    "a thousand kinds that no bot offers": (tuple(f"absent-{n}" for n in range(1000)), {}),
    "larger than any bot": (("present",), {"units": 3}),
    "larger than any bot and back from their rest": (("present",), {"units": 3, "backoff": -1000.0}),
    "of an instance without bots": (("present",), {"first": 1}),
}


@pytest.mark.parametrize(("kinds", "fields"), HOPELESS_JOBS.values(), ids=HOPELESS_JOBS)
def test_thousands_of_urgent_jobs_that_nobody_can_run_do_not_delay_the_one_behind_them(
    pool: Pool, kinds: tuple[str, ...], fields: dict[str, Any]
) -> None:
    """They are in the last of the instances i-0 and i-1; the bot serves the first."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1 + fields.get("first", 0), kinds=kinds)
        filling.fill_jobs(connection, HOPELESS, instances=1, kinds=kinds, priority=-10, **fields)

    pool.database.run(fill)
    (job,) = pool.submit(instance="i-0", properties={"kind": "present"})
    pool.bot(capacity=2, instance="i-0", properties={"kind": "present"})
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_hundreds_of_jobs_are_each_finished_exactly_once(pool: Pool, database_url: str) -> None:
    """400 of them; `LEASEHOLD_TEST_JOBS=20000` takes a longer look."""
    # Sessions outlive the moments in which two busy cores let a simulated bot wait.
    timing = Timing(sync=1, ttl=20, reap=1, ack=5, poll=0.1)
    kinds = [{}, {"os": "linux"}, {"os": "mac"}]
    fetching, waiting = (
        Swarm(
            pool.database,
            timing,
            count,
            capacity=4,
            properties=lambda n: {"os": "linux" if n % 5 else "mac"},
            fetch=FetchSettings(enabled=enabled),
            threads=2,
            prefix=prefix,
        )
        for prefix, count, enabled in (("fetching", BOTS - WAITING, True), ("waiting", WAITING, False))
    )
    log = waiting.log = fetching.log
    for number in range(JOBS // 50):
        pool.submit(50, properties=kinds[number % 3], instance=f"i-{number % 4}", priority=number % 7 - 3)
    crew = assigner_processes(database_url, timing, pool.chance, [[None] * THREADS] * PROCESSES, wakeups=True)
    began = clock.monotonic()
    with Watching(database_url) as watching, crew, fetching, waiting:
        eventually(
            lambda: len(log.entries()) >= JOBS and _finished(pool) == JOBS, within=1000, what="all jobs are final"
        )
        seconds = clock.monotonic() - began
    print(f"{JOBS} jobs in {seconds:.1f} s: {JOBS / seconds:.0f} jobs/s; {watching.looks} looks at the invariants")
    ends = pool.rows("SELECT job_id, count(*) AS times FROM job_events WHERE move = 'finish' GROUP BY job_id")
    assert Counter(row.times for row in ends) == {1: JOBS}
    assert Counter(row.state for row in pool.rows("SELECT state FROM jobs")) == {"succeeded": JOBS}
    by_assigners = pool.row("SELECT count(*) AS jobs FROM job_events WHERE move = 'grant' AND actor LIKE 'assigner-%'")
    print(f"{by_assigners.jobs} placed by assigners, the others fetched")
    assert by_assigners.jobs > 0
    assert log.overlaps() == []
    assert len({entry.job for entry in log.entries()}) == JOBS


def _finished(pool: Pool) -> int:
    return int(pool.row("SELECT count(*) AS jobs FROM jobs WHERE finished_at IS NOT NULL").jobs)


# A storm: two instances whose demand flips back and forth lose next to nothing to evictions.


BOTS_STORM, FLIP, FLIPS = 8, 2.0, 3
#: How long each job runs, seconds.
RUNS = 3.0
#: The defaults, ten times faster like the timing of the tests.
RULES = QuotaSettings(preemption_delay=2.0, eviction_cooldown=60.0, reservation=1.0)
# From its grant until it was gone, and from then until the bot had work again, or to the end.
LOST = """
SELECT count(*) AS evictions, coalesce(sum(extract(epoch FROM
    greatest(l.ended_at, coalesce(n.granted_at, clock_timestamp())) - l.granted_at)), 0) AS seconds
FROM leases l
LEFT JOIN LATERAL (
    SELECT min(granted_at) AS granted_at FROM leases n
    WHERE n.bot_id = l.bot_id AND n.granted_at > l.granted_at) n ON true
WHERE l.stop_reason = 'preempt' AND l.state = 'cancelled'"""


@pytest.mark.parametrize(
    ("maximum", "demand", "fetching"), [(None, 2 * BOTS_STORM, False), (BOTS_STORM, BOTS_STORM - 3, True)]
)
def test_two_instances_that_flip_demand_lose_no_more_than_a_twentieth_of_the_bots_time(
    pool: Pool, database_url: str, chance: random.Random, maximum: int | None, demand: int, fetching: bool
) -> None:
    """Jobs run for longer than a flip, so that there is always one that could be stopped; with and without a maximum,
    with more work than the bots can do and with just so much."""
    timing = Timing(sync=0.5, ttl=20, reap=0.2, ack=10, poll=0.1)
    pool.change("UPDATE cohorts SET reclaim_min = 'any'")
    tenancy = Tenancy(pool)
    for team in ("team-a", "team-b"):
        tenancy.quota(team, minimum=BOTS_STORM // 2, maximum=maximum)
    database = Database(database_url, DatabaseSettings(pool=4), role="storm", chance=chance)
    over = threading.Event()
    with ExitStack() as running:
        running.callback(database.close)
        swarm = Swarm(
            database,
            timing,
            BOTS_STORM,
            seconds=lambda _: RUNS,
            fetch=FetchSettings(enabled=fetching),
            pace=0.2,
            threads=1,
        )
        running.enter_context(swarm)
        running.enter_context(assigning(database, timing, chance, [None, None], quotas=RULES, interval=0.1, jitter=0.1))
        began = clock.monotonic()
        for flip in range(FLIPS):
            team = ("team-a", "team-b")[flip % 2]
            pool.submit(demand, instance=team)
            clock.wait(over, began + (flip + 1) * FLIP - clock.monotonic())
        seconds = clock.monotonic() - began
        lost = pool.row(LOST)
    most = pool.row("SELECT max(evictions) AS n FROM jobs").n
    share = float(lost.seconds) / (BOTS_STORM * seconds)
    finished = pool.row("SELECT count(*) AS n FROM jobs WHERE state = 'succeeded'").n
    print(
        f"{lost.evictions} evictions, {share:.1%} of the bots' time lost, {most} of one job, {finished} jobs finished"
    )
    assert share <= 0.05
    assert most <= 3
