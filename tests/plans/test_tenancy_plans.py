"""The hot statements of quotas and preemption read what they need and no more, with any statistics or none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from schema.accounting import quotas
from schema.moves import grant as grant_moves
from schema.moves import preempt as preempt_moves
from schema.moves.end import AttemptEnd, Verdict, end
from schema.moves.grant import Placement
from schema.moves.preempt import release_kept_units
from schema.picking import for_bot, preemption, queues, ready
from schema.picking.for_bot import FetchingBot
from schema.picking.pick import WIDTHS, Order
from schema.picking.preemption import MAX_VICTIM_BOTS, StarvedJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import KNOWLEDGE, Acts, Measured, filled, measured_acts
from tests.support.servers import Databases

COHORTS, INSTANCES, BATCH = 3, 5, 10
FREE, FULL = KINDS = ("free", "full")
#: Of two sizes of jobs each.
QUEUES = 2 * COHORTS * INSTANCES * len(KINDS)
JOBS, BOTS, KEPT = 30_000, 6_000, 50
#: Tables with one row for each thing that an operator has set; everything else is never read whole.
SETTINGS = {"quotas", "cohorts", "instances"}
# Three cohorts; every instance has a quota in each, below the minimum but for i-0, whose jobs hold the full bots.
PART = (
    "INSERT INTO cohorts (id, name, position, reclaim_min) SELECT n, 'c-' || n, n, 'any' FROM generate_series(1, 3) n",
    "UPDATE jobs SET cohort = 1 + id / 10 % 3, queue = queue_in_cohort(queue, (1 + id / 10 % 3)::integer)"
    " WHERE state = 'queued'",
    "UPDATE bots SET cohort = 1 + id % 3",
    "UPDATE leases l SET cohort = b.cohort FROM bots b WHERE b.id = l.bot_id AND l.ended_at IS NULL",
    "UPDATE jobs j SET cohort = l.cohort, queue = queue_in_cohort(queue, l.cohort)"
    " FROM leases l WHERE l.job_id = j.id AND l.ended_at IS NULL",
    "INSERT INTO quotas (cohort, instance, min_quota, max_quota, usage)"
    " SELECT c.id, i.id, CASE i.name WHEN 'i-0' THEN 0 ELSE 20 END, 100000, coalesce((SELECT sum(l.units) FROM live l"
    " WHERE l.cohort = c.id AND l.instance = i.id), 0) FROM cohorts c CROSS JOIN instances i WHERE c.id > 0",
    "INSERT INTO evictions (cohort, instance, job_id, fence, bot_id, preemptor, preemptor_instance, rule, details)"
    " SELECT 1 + n % 3, 1 + n % 5, n, 1, n, n, 1, 'any', '{}' FROM generate_series(1, 10000) n",
    "UPDATE evictions SET at = at - interval '1 h' WHERE id % 50 > 0",
    "UPDATE bots SET kept_units = 1, kept_for = 1 + id % 5, kept_until = now() + interval '1 h'"
    " WHERE id = ANY (ARRAY(SELECT id FROM bots WHERE free ORDER BY id DESC LIMIT 50))",
)


@dataclass(frozen=True)
class Known:
    """Rows to work on: a starved job, what is held where it could run, ready jobs and free bots of its cohort."""

    starved: StarvedJob
    held: list[tuple[int, int, int, int]]
    jobs: list[int]
    free: list[int]

    def grant(self, connection: Connection, *, again: bool = False) -> None:
        requests = [Placement(job, bot, {}) for job, bot in zip(self.jobs, self.free, strict=True)]
        grant_moves.grant(connection, requests, assigner="test", strategy="test", ack=1, again=again)

    def preempt(self, connection: Connection) -> None:
        job, (victim, fence, bot, _) = self.starved, self.held[0]
        preempt_moves.preempt(
            connection,
            preemptor=job.id,
            units=1,
            cohort=job.cohort,
            instance=job.instance,
            seen=job.kept_until,
            bot_id=bot,
            victims=[(victim, fence)],
            rule="any",
            receipt={},
            sync=1,
            patience=1,
            actor="test",
        )

    def fetch(self, connection: Connection) -> None:
        fetcher = FetchingBot(self.free[0], "bot", 1, self.starved.cohort, None, None, 1, 1)
        for_bot.pick_for_bot(connection, fetcher, limit=BATCH, any_wait=False, literal=False)


Act = Callable[[Known, Connection], object]


def _pick(order: Order, cohorts: list[int] | None = None) -> Act:
    return lambda _, connection: ready.pick(
        connection,
        Scope(cohorts=cohorts),
        order=order,
        batch=BATCH,
    )


ACTS: dict[str, Act] = {
    "pick by priority": _pick(Order.PRIORITY),
    "pick by age": _pick(Order.AGE),
    "pick in a cohort": _pick(Order.PRIORITY, [2]),
    "fetch": lambda known, connection: known.fetch(connection),
    "grant": lambda known, connection: known.grant(connection),
    "grant again": lambda known, connection: known.grant(connection, again=True),
    "finish": lambda known, connection: end(
        connection, [AttemptEnd(*each, Verdict.SUCCEEDED) for each in known.held], actor="test"
    ),
    "chores": lambda _, connection: queues.pending_work(connection, quiet=True),
    "starved": lambda _, connection: preemption.starved_jobs(connection, Scope(), delay=0, sync=1, limit=20),
    "holders": lambda known, connection: preemption.occupied_bots(connection, known.starved, patience=1, sync=1),
    "preempt": lambda known, connection: known.preempt(connection),
    "release kept units": lambda _, connection: release_kept_units(connection, BATCH),
}
#: As many queues, jobs and bots as are looked through at most; elsewhere a few rows for each of the batch.
HEADS, LOOKS = QUEUES * (2 + BATCH * WIDTHS[0]), QUEUES * 10
#: By age, each of the 21 ranks of a queue is looked into.
RANKS = QUEUES * 21 * 6
BOUNDS = {
    **{name: HEADS + LOOKS + 2 * BATCH * WIDTHS[0] for name in ACTS if name.startswith("pick")},
    "pick by age": HEADS + LOOKS + RANKS + 2 * BATCH * WIDTHS[0],
    "fetch": 2 * HEADS,
    "starved": 4 * QUEUES * KEPT + 2 * QUEUES * preemption.MAX_JOBS_READ,
    "holders": 8 * MAX_VICTIM_BOTS,
    # Every eviction within the cooldown counts, of which there are 200 in 15 quotas; and each bot that keeps units.
    "preempt": 20 * BATCH + 3 * KEPT,
    "release kept units": 20 * BATCH + 3 * KEPT,
}
BOUND = 40 * BATCH
TABLES = ("jobs", "leases", "bots", "kind_platforms", "evictions", "quotas")


def _fill(connection: Connection) -> None:
    filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
    filling.fill_jobs(connection, JOBS, instances=INSTANCES, kinds=KINDS)
    filling.fill_jobs(connection, JOBS // 10, instances=INSTANCES, kinds=KINDS, units=2, backoff=60.0)
    filling.fill_bots(connection, {FREE: BOTS // 2, FULL: BOTS // 2})
    filling.occupy(connection, FULL, leaving=0)
    for statement in PART:
        connection.execute(Statement(statement))


def _known(connection: Connection) -> Known:
    waiting, _ = preemption.starved_jobs(connection, Scope(cohorts=[1]), delay=0, sync=1, limit=20)
    full = Statement("SELECT id FROM platforms WHERE properties->'kind'->>0 = 'full'")
    platform = connection.execute(full).scalar_one()
    starved = next(job for job in waiting if job.platform == platform)
    held = Statement("SELECT job_id, fence, bot_id, bot_epoch FROM live WHERE cohort = 1 ORDER BY job_id LIMIT :limit")
    jobs = Statement(
        "SELECT j.id FROM jobs j JOIN platforms p ON p.id = j.platform WHERE j.state = 'queued' AND j.cohort = 1"
        " AND j.schedule_after IS NULL AND p.properties->'kind'->>0 = 'free' ORDER BY j.id LIMIT :limit"
    )
    free = Statement("SELECT id FROM bots WHERE free AND cohort = 1 ORDER BY id LIMIT :limit")
    return Known(
        starved,
        [tuple(row) for row in connection.execute(held, {"limit": BATCH})],
        [row.id for row in connection.execute(jobs, {"limit": BATCH})],
        [row.id for row in connection.execute(free, {"limit": BATCH})],
    )


@pytest.fixture(scope="module")
def measured(databases: Databases, template: str) -> Iterator[Measured]:
    """Fill a pool of three cohorts and watch every statement."""
    with filled(databases, template, TABLES) as database:
        database.run(_fill)
        yield measured_acts(database, _acts)


def _acts(connection: Connection) -> Acts:
    known = _known(connection)
    return {name: partial(act, known) for name, act in ACTS.items()}


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", ACTS)
def test_a_statement_of_quotas_reads_no_table_whole_and_rows_in_proportion_to_its_batch(
    measured: Measured, name: str, knowledge: str
) -> None:
    watch = measured.watches[knowledge, name]
    assert watch.plans, "it was not executed"
    assert watch.whole_scans() <= SETTINGS, watch
    assert watch.touched <= BOUNDS.get(name, BOUND), watch


def test_the_filled_cohorts_are_sound(measured: Measured) -> None:
    assert measured.findings == []
    assert quotas.EVICTION_COOLDOWN.seconds == 600, "which some of the evictions are within and most are not"
