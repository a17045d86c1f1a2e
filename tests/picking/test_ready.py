"""Jobs that fit are found behind any number of jobs that do not, at a cost that those do not decide."""

import random

import pytest

from schema import clock
from schema.moves.submit import submit
from schema.picking import for_bot, ready
from schema.picking.for_bot import FetchingBot
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import LEAST_HEADS, Order, ReadyJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.explain import explained
from tests.support.plans import watching
from tests.support.pool import Pool
from tests.support.requests import PLAIN
from tests.support.tenancy import EAGER, Tenancy, put_cohort

KINDS = ("free",)
LARGE = 3_000
#: Heads that are looked through, what of each of them is read once more, and a few rows of everything else.
BOUND = 2000


@pytest.fixture
def filled(pool: Pool) -> Pool:
    """Three thousand jobs of four units, and behind them one of two units and one of one; two bots of four units."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=KINDS)
        filling.fill_jobs(connection, LARGE, instances=1, kinds=KINDS, units=4, priority=0)
        for units in (2, 1):
            filling.fill_jobs(connection, 1, instances=1, kinds=KINDS, units=units, priority=5)
        filling.fill_bots(connection, {"free": 2}, capacity=4)

    pool.database.run(fill)
    return pool


def small(pool: Pool, units: int) -> str:
    return str(pool.row("SELECT public_id FROM jobs WHERE units = :units", units=units).public_id)


@pytest.mark.parametrize("urgent_first", [100, 0])
def test_a_job_that_fits_into_what_a_quota_leaves_is_placed_behind_many_that_do_not(
    filled: Pool, urgent_first: int
) -> None:
    tenancy = Tenancy(filled)
    tenancy.quota("i-0", maximum=2)
    assert explained(filled, small(filled, 2)).sentence.startswith("nothing stands in its way")
    tenancy.assigner(EAGER, priority_percentage=urgent_first).run_once()
    assert filled.job(small(filled, 2)).state == "leased"
    assert filled.job(small(filled, 1)).state == "queued", "the other one has used the quota up"


def test_a_bot_fetches_what_fits_behind_many_jobs_that_do_not(filled: Pool) -> None:
    for free_units, maximum, found in ((1, None, [1]), (3, None, [2, 1]), (4, 1, [1])):
        Tenancy(filled).quota("i-0", maximum=maximum)
        with filled.database.connect() as connection:
            assert [job.units for job in fetch(connection, free_units=free_units)] == found


def fetch(connection: Connection, *, free_units: int) -> list[ReadyJob]:
    bot = connection.execute(Statement("SELECT min(id) FROM bots")).scalar_one()
    fetcher = FetchingBot(bot, "bot", 1, 0, None, None, 1, free_units)
    return for_bot.pick_for_bot(connection, fetcher, limit=5, any_wait=False, literal=False)


@pytest.mark.parametrize("analysed", [False, True])
def test_jobs_that_do_not_fit_cost_nothing(filled: Pool, analysed: bool) -> None:
    Tenancy(filled).quota("i-0", maximum=1)
    if analysed:
        filled.change("ANALYZE")
    with filled.database.connect() as connection:
        for order in Order:
            with watching(connection) as picked:
                jobs = ready.pick(connection, Scope(), order=order, batch=5)
            assert [job.units for job in jobs] == [1]
            assert picked.touched <= BOUND, str(picked)
        with watching(connection) as looked:
            fetch(connection, free_units=1)
        assert looked.touched <= BOUND, str(looked)
        connection.rollback()


# Picks among many queues: none is read whole, and the order over all of them is kept.


QUEUES, EACH = 40, 30
BATCH = 25


def fill(pool: Pool, chance: random.Random, *, urgent: int) -> None:
    """Jobs of random urgency in every queue, and so many in one queue that come before all others."""
    requests = [
        PLAIN | {"properties": {"kind": [f"kind-{number}"]}, "priority": priority}
        for number in range(QUEUES)
        for priority in sorted({chance.randint(-5, 5) for _ in range(6)})
        for _ in range(EACH // 6)
    ]
    requests += [PLAIN | {"properties": {"kind": ["kind-7"]}, "priority": -20}] * urgent
    pool.database.run(lambda c: submit(c, requests, actor="test"))
    pool.change("UPDATE jobs SET queued_at = queued_at - id * 37 % 101 * interval '1 s'")


@pytest.mark.parametrize(
    "urgent", [0, BATCH, 3 * LEAST_HEADS * BATCH], ids=["mixed", "a few urgent", "one queue first"]
)
def test_what_is_picked_comes_first_over_all_queues(pool: Pool, urgent: int) -> None:
    """Queue by queue, and from the front."""
    fill(pool, random.Random(urgent), urgent=urgent)
    pool.bot(capacity=1000, properties={"kind": [f"kind-{number}" for number in range(QUEUES)]})
    for order in Order:
        first = [row.id for row in pool.rows(f"SELECT id FROM jobs ORDER BY {order.value} LIMIT {BATCH}")]
        for cursor in (None, HeadCursor(clock.monotonic)):
            with pool.database.begin() as connection:
                found = [job.id for job in ready.pick(connection, Scope(), order=order, batch=BATCH, cursor=cursor)]
            assert found == first[: len(found)], (order, cursor)
            assert len(found) >= BATCH // 2


def test_jobs_behind_those_that_others_hold_are_found_among_many_queues(pool: Pool) -> None:
    fill(pool, random.Random(3), urgent=4 * BATCH)
    pool.bot(capacity=1000, properties={"kind": [f"kind-{number}" for number in range(QUEUES)]})
    with pool.database.begin() as other:
        held = {job.id for job in ready.pick(other, Scope(), order=Order.PRIORITY, batch=BATCH)}
        found = pool.database.run(lambda connection: ready.pick(connection, Scope(), order=Order.PRIORITY, batch=BATCH))
    assert held
    assert found
    assert not held & {job.id for job in found}
    assert {job.priority for job in found} == {-20}


@pytest.mark.parametrize("constrained", [False, True], ids=["plain", "constrained"])
def test_idle_bots_of_one_cohort_however_many_keep_no_other_cohort_waiting(pool: Pool, constrained: bool) -> None:
    for name in ("crowd", "lone"):
        put_cohort(pool, name, f"pool={name}")
    pool.database.run(lambda c: filling.fill_bots(c, {"free": BATCH + 1}))
    pool.change("UPDATE bots SET cohort = (SELECT id FROM cohorts WHERE name = 'crowd')")
    bot = pool.bot("zz", properties={"pool": "lone"})
    (job,) = pool.submit(properties={"pool": "lone"}, **({"terms": {"owner": "ann"}} if constrained else {}))
    lone = pool.row("SELECT id FROM cohorts WHERE name = 'lone'").id
    pool.change("UPDATE bots SET cohort = :lone WHERE name = 'zz'", lone=lone)
    pool.change("UPDATE jobs SET cohort = :lone", lone=lone)
    pool.change("UPDATE queues SET cohort = :lone", lone=lone)
    pool.assigner(batch=BATCH).run_once()
    assert [lease["job"] for lease in bot.take()] == [job]
