"""A storm: two instances whose demand flips back and forth lose next to nothing to evictions."""

import random
import threading
from contextlib import ExitStack

import pytest

from assigner.quotas import QuotaSettings
from bots.fetch import FetchSettings
from schema import clock
from schema.engine import Database, DatabaseSettings
from schema.timing import Timing
from tests.assigners import assigning
from tests.pool import Pool
from tests.swarm import Behaviour, Swarm
from tests.tenancy import Tenancy

BOTS, FLIP, FLIPS = 8, 2.0, 6
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


@pytest.mark.parametrize(("maximum", "demand", "fetching"), [(None, 2 * BOTS, False), (BOTS, BOTS - 3, True)])
def test_a_29_two_instances_that_flip_demand_lose_no_more_than_a_twentieth_of_the_bots_time(
    pool: Pool, database_url: str, chance: random.Random, maximum: int | None, demand: int, fetching: bool
) -> None:
    """Jobs run for longer than a flip, so that there is always one that could be stopped; with and without a maximum,
    with more work than the bots can do and with just so much."""
    timing = Timing(sync=0.5, ttl=20, reap=0.2, ack=10, poll=0.1)
    pool.change("UPDATE cohorts SET reclaim_min = 'any'")
    tenancy = Tenancy(pool)
    for team in ("team-a", "team-b"):
        tenancy.quota(team, minimum=BOTS // 2, maximum=maximum)
    database = Database(database_url, DatabaseSettings(pool=4), role="storm", chance=chance)
    over = threading.Event()
    with ExitStack() as running:
        running.callback(database.close)
        swarm = Swarm(
            database,
            timing,
            BOTS,
            behaviour=Behaviour(seconds=lambda _: RUNS),
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
    share = float(lost.seconds) / (BOTS * seconds)
    finished = pool.row("SELECT count(*) AS n FROM jobs WHERE state = 'succeeded'").n
    print(
        f"{lost.evictions} evictions, {share:.1%} of the bots' time lost, {most} of one job, {finished} jobs finished"
    )
    assert share <= 0.05
    assert most <= 3
