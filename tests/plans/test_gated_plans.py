"""The statements of gates, quotas and counts read what they need and no more, with any statistics or none.

Each case fills a pool of its own: jobs that wait at gates, bots with counts of successes, and cohorts with quotas.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from assigner.admission.controller import AdmissionController, AdmissionMemory
from assigner.admission.ordering import OrderingSettings
from assigner.admission.rules import Rules
from schema import clock
from schema.accounting import accounts, counters, rates
from schema.accounting.accounts import Account
from schema.accounting.counters import Settlement
from schema.fleet import success
from schema.moves import preempt as preempt_moves
from schema.moves.end import AttemptEnd, Verdict, end
from schema.moves.grant import Placement, grant
from schema.moves.preempt import release_kept_units
from schema.moves.reassign import add_constraints, remove_constraints
from schema.moves.submit import submit
from schema.moves.waiting.overflow import defer
from schema.moves.waiting.priority import reprice, review_waiting
from schema.picking import for_bot, preemption, queues, ready
from schema.picking.constrained import MOST_IN_WINDOWS
from schema.picking.for_bot import FetchingBot
from schema.picking.pick import WIDTHS, Order
from schema.picking.preemption import MAX_VICTIM_BOTS, StarvedJob
from schema.picking.ready import Scope
from schema.policy import priority_classes
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support import filling
from tests.support import pool as pools
from tests.support.plans import Acts, filled, measured_acts, watching
from tests.support.servers import Databases

BATCH = 10
TABLES = ("jobs", "job_constraints", "leases", "bots", "kind_platforms", "bot_success", "blames", "evictions", "quotas")
#: Tables with one row for each thing that an operator has set or that many jobs share; nothing else is read whole.
SETTINGS = {
    *("account_totals", "accounts", "cohorts", "counters", "constraint_sets", "instances", "job_classes", "meters"),
    *("quotas", "pauses", "limit_patterns", "policy_in_force", "rates", "scheduling", "success_policy", "windows"),
    "server_identity",
}
LIVE = Statement("SELECT job_id, fence, bot_id, bot_epoch FROM live WHERE cohort = :cohort ORDER BY job_id LIMIT 10")
FREE = Statement("SELECT id FROM bots WHERE free AND cohort = :cohort ORDER BY id LIMIT 10")

Held = list[tuple[int, int, int, int]]


def held_of(connection: Connection, cohort: int) -> Held:
    return [tuple(row) for row in connection.execute(LIVE, {"cohort": cohort})]  # type: ignore[misc]


def free_of(connection: Connection, cohort: int) -> list[int]:
    return list(connection.execute(FREE, {"cohort": cohort}).scalars())


def ending(held: Held, verdict: Verdict) -> Callable[[Connection], object]:
    return lambda connection: end(connection, [AttemptEnd(*each, verdict) for each in held], actor="test")


# Jobs that wait at gates. Few queues with many jobs each: where there are many queues, a statement that reads all jobs
# is seldom chosen.

GATED, TENANTS, RANKS, ENDED = 8_000, 2, 21, 1_000


def request(number: int) -> dict[str, Any]:
    """Some jobs have a class, some a resource whose rate is limited, and most a deadline. Those that come first are
    anywhere among the others."""
    more: dict[str, Any] = {1: {"job_class": "build"}, 2: {"resource_class": "model"}}.get(number % 20, {})
    return JobRequest(
        command=["true"],
        instance=f"i-{number % TENANTS}",
        properties={"kind": ["free"]},
        priority=number * 7919 % RANKS - 10,
        deadline_seconds=3600.0 if number % 5 else None,
        estimated_cost=1.0 + number % 7,
        **more,
    ).normal()


def start(connection: Connection, **ordering: Any) -> None:
    rules = Rules(OrderingSettings.model_validate(ordering))
    controller = AdmissionController(rules, AdmissionMemory(), name="test", now=clock.monotonic)
    admitted = pools.admitted(connection, controller, batch=BATCH, chance=random.Random(1))
    assert len(admitted.heads) == BATCH
    bots = free_of(connection, 0)
    placements = [Placement(head.job.id, bot, {}) for head, bot in zip(admitted.heads, bots, strict=True)]
    taken = controller.amounts(admitted)
    assert len(grant(connection, placements, assigner="test", strategy="test", ack=60.0, taken=taken)) == BATCH
    controller.charge(connection, admitted, [*taken.items()])


def fill_gated(connection: Connection) -> None:
    filling.fill_queues(connection, instances=TENANTS, kinds=["free"])
    filling.fill_bots(connection, {"free": 1_000}, capacity=4)
    priority_classes.put_classes(connection, {"build": 40}, actor="test")
    rates.set_rates(connection, {"model": rates.RateTerms(1000.0, 1000)}, actor="test")
    for number in range(TENANTS):
        account = Account(weight=number + 1.0, budget=1e9, max_concurrent=GATED)
        accounts.put_account(connection, f"i-{number}", account, actor="test")
    submit(connection, [request(number) for number in range(GATED)], actor="test")
    for _ in range(10):
        start(connection)


def fill_ended(connection: Connection) -> None:
    """Some gated jobs run in a pool that keeps many jobs which have ended."""
    filling.fill_queues(connection, instances=TENANTS, kinds=["free"])
    filling.fill_bots(connection, {"free": BATCH}, capacity=4)
    filling.fill_jobs(connection, ENDED, instances=TENANTS, kinds=["free"], state="succeeded")
    for number in range(TENANTS):
        account = Account(weight=number + 1.0, budget=1e9, max_concurrent=GATED)
        accounts.put_account(connection, f"i-{number}", account, actor="test")
    submit(connection, [request(5 * number) for number in range(BATCH)], actor="test")
    start(connection)


def gated(connection: Connection) -> Acts:
    held = held_of(connection, 0)
    return {
        "start": start,
        "start, aged": partial(start, ageing_rate=2.0),
        "start, by score": partial(start, kind="score"),
        "succeed": ending(held, Verdict.SUCCEEDED),
        "lose": ending(held, Verdict.LOST),
        "watch": lambda c: review_waiting(c, BATCH, actor="test"),
        "reprice": lambda c: reprice(c, limit=BATCH, actor="test"),
        "defer": lambda c: defer(c, BATCH, normal=-1, most=GATED, actor="test"),
        "adopt": lambda c: add_constraints(c, BATCH),
        "dismiss": lambda c: remove_constraints(c, BATCH),
    }


# Every busy bot has counts for ten labels; every tenth of the jobs that run failed somewhere before.

BLAMES = 5_000
COUNTS = (
    "INSERT INTO success_policy (memory, probation_failures, probation_seconds) VALUES (100, 3, 600)",
    "INSERT INTO bot_success (bot_id, label, successes, failures)"
    " SELECT b.id, CASE n WHEN 0 THEN '' ELSE 'l-' || n END, 3, 1 FROM bots b CROSS JOIN generate_series(0, 9) n",
    "INSERT INTO blames (job_id, bot_id) SELECT j.id, b.id FROM (SELECT id FROM jobs WHERE state = 'queued' ORDER BY id"
    f" LIMIT {BLAMES}) j CROSS JOIN (SELECT min(id) AS id FROM bots) b",
    "INSERT INTO blames (job_id, bot_id) SELECT l.job_id, l.bot_id + 1 FROM (SELECT job_id, bot_id FROM live ORDER BY"
    " job_id LIMIT 10) l WHERE l.job_id % 2 = 0",
    "UPDATE blames m SET upheld_at = now(), bot_id = 1 + m.job_id % 5"
    " WHERE job_id IN (SELECT job_id FROM blames ORDER BY job_id DESC LIMIT 20)",
)


def fill_counted(connection: Connection) -> None:
    filling.fill_queues(connection, instances=1, kinds=["full"])
    filling.fill_jobs(connection, 3 * BLAMES, instances=1, kinds=["full"])
    filling.fill_bots(connection, {"full": 3_000})
    filling.occupy(connection, "full", leaving=0)
    for statement in COUNTS:
        connection.execute(Statement(statement))


def counted(connection: Connection) -> Acts:
    held = held_of(connection, 0)
    return {
        "succeed": ending(held, Verdict.SUCCEEDED),
        "fail": ending(held, Verdict.FAILED),
        "lose": ending(held, Verdict.LOST),
        "labels": lambda c: success.job_labels(c, [job for job, *_ in held]),
        "rates": lambda c: success.success_rates(c, [bot for *_, bot, _ in held], ["", "l-1"]),
        "review": lambda c: success.review_probation(c),
    }


# Three cohorts; every instance has a quota in each, below the minimum but for i-0, whose jobs hold the full bots.

COHORTS, INSTANCES, KEPT, KINDS = 3, 5, 50, ("free", "full")
#: Of two sizes of jobs each.
QUEUES = 2 * COHORTS * INSTANCES * len(KINDS)
QUOTAS = (
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
    f" WHERE id = ANY (ARRAY(SELECT id FROM bots WHERE free ORDER BY id DESC LIMIT {KEPT}))",
)
READY = Statement(
    "SELECT j.id FROM jobs j JOIN platforms p ON p.id = j.platform WHERE j.state = 'queued' AND j.cohort = 1"
    " AND j.schedule_after IS NULL AND p.properties->'kind'->>0 = 'free' ORDER BY j.id LIMIT 10"
)


def fill_cohorts(connection: Connection) -> None:
    filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
    filling.fill_jobs(connection, 18_000, instances=INSTANCES, kinds=KINDS)
    filling.fill_jobs(connection, 1_800, instances=INSTANCES, kinds=KINDS, units=2, backoff=60.0)
    filling.fill_bots(connection, dict.fromkeys(KINDS, 3_000))
    filling.occupy(connection, "full", leaving=0)
    for statement in QUOTAS:
        connection.execute(Statement(statement))


def starved_job(connection: Connection) -> StarvedJob:
    waiting, _ = preemption.starved_jobs(connection, Scope(cohorts=[1]), delay=0, sync=1, limit=20)
    full = Statement("SELECT id FROM platforms WHERE properties->'kind'->>0 = 'full'")
    platform = connection.execute(full).scalar_one()
    return next(job for job in waiting if job.platform == platform)


def cohorts(connection: Connection) -> Acts:
    starved, held, free = starved_job(connection), held_of(connection, 1), free_of(connection, 1)
    jobs = list(connection.execute(READY).scalars())
    placements = [Placement(job, bot, {}) for job, bot in zip(jobs, free, strict=True)]
    fetcher = FetchingBot(free[0], "bot", 1, starved.cohort, None, None, 1, 1)
    victim, fence, bot, _ = held[0]
    eviction: dict[str, Any] = {
        **{"preemptor": starved.id, "units": 1, "cohort": starved.cohort, "instance": starved.instance},
        **{"seen": starved.kept_until, "bot_id": bot, "victims": [(victim, fence)], "rule": "any", "receipt": {}},
        **{"sync": 1, "patience": 1, "actor": "test"},
    }
    return {
        "pick by priority": lambda c: ready.pick(c, Scope(), order=Order.PRIORITY, batch=BATCH),
        "pick by age": lambda c: ready.pick(c, Scope(), order=Order.AGE, batch=BATCH),
        "pick in a cohort": lambda c: ready.pick(c, Scope(cohorts=[2]), order=Order.PRIORITY, batch=BATCH),
        "fetch": lambda c: for_bot.pick_for_bot(c, fetcher, limit=BATCH, any_wait=False, literal=False),
        "grant": lambda c: grant(c, placements, assigner="test", strategy="test", ack=1),
        "grant again": lambda c: grant(c, placements, assigner="test", strategy="test", ack=1, again=True),
        "finish": ending(held, Verdict.SUCCEEDED),
        "chores": lambda c: queues.pending_work(c, quiet=True),
        "starved": lambda c: preemption.starved_jobs(c, Scope(), delay=0, sync=1, limit=20),
        "holders": lambda c: preemption.occupied_bots(c, starved, patience=1, sync=1),
        "preempt": lambda c: preempt_moves.preempt(c, **eviction),
        "release kept units": lambda c: release_kept_units(c, BATCH),
    }


@dataclass(frozen=True)
class Case:
    """A pool, its statements, and the rows that each may read: by default `bound`."""

    fill: Callable[[Connection], None]
    acts: Callable[[Connection], Acts]
    bound: float
    bounds: Mapping[str, float]


#: As many queues, jobs and bots as are looked through at most; elsewhere a few rows for each of the batch.
LOOKED = QUEUES * (2 + BATCH * WIDTHS[0]) + QUEUES * 10 + 2 * BATCH * WIDTHS[0]
CASES = {
    # Where waiting counts, a few jobs of each rank of each queue are looked at. Where the order is not that of reading,
    # a window of each queue is read: a job, its constraints, and both again when they are sorted.
    "gates": Case(fill_gated, gated, 200 * BATCH, {"start, by score": 4 * MOST_IN_WINDOWS}),
    "counts": Case(fill_counted, counted, 60 * BATCH, {}),
    "cohorts": Case(
        fill_cohorts,
        cohorts,
        40 * BATCH,
        {
            "pick by priority": LOOKED,
            # By age, each of the 21 ranks of a queue is looked into.
            "pick by age": LOOKED + QUEUES * RANKS * 6,
            "pick in a cohort": LOOKED,
            "fetch": 2 * QUEUES * (2 + BATCH * WIDTHS[0]),
            "starved": 4 * QUEUES * KEPT + 2 * QUEUES * preemption.MAX_JOBS_READ,
            "holders": 8 * MAX_VICTIM_BOTS,
            # Every eviction within the cooldown counts, 200 in 15 quotas; and each bot that keeps units.
            "preempt": 20 * BATCH + 3 * KEPT,
            "release kept units": 20 * BATCH + 3 * KEPT,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_statement_reads_rows_in_proportion_to_its_batch_only(databases: Databases, template: str, name: str) -> None:
    case = CASES[name]
    with filled(databases, template, TABLES) as database:
        database.run(case.fill)
        measured = measured_acts(database, case.acts)
    for (knowledge, act), watch in measured.watches.items():
        assert watch.plans, f"{act} was not executed"
        assert watch.whole_scans() <= SETTINGS, f"{act}, {knowledge}: {watch}"
        worst = max(plan.touched for plan in watch.plans) if name == "gates" else watch.touched
        assert worst <= case.bounds.get(act, case.bound), f"{act}, {knowledge}: {watch}"
    assert measured.findings == [] or name == "counts"


def test_ends_of_gated_jobs_read_only_these_also_by_a_plan_that_was_made_in_an_empty_pool(
    databases: Databases, template: str
) -> None:
    """Its function keeps the plans of its statements, each with the sizes that its tables had."""
    with filled(databases, template, TABLES) as database, database.connect(kept_plans=True) as early:
        counters.settle(early, [Settlement(1, 1, {}, None, True)])
        early.commit()
        database.run(fill_ended)
        held = held_of(early, 0)
        assert len(held) == BATCH
        with watching(early, nested=True) as watch:
            ending(held, Verdict.SUCCEEDED)(early)
        worst = max(watch.plans, key=lambda plan: plan.touched)
        assert worst.touched <= 20 * BATCH, worst
