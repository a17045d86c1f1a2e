"""The statements of jobs that wait at gates read what they need and no more, with any statistics or none."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from assigner.admission.controller import AdmissionController, AdmissionMemory
from assigner.admission.ordering import OrderingSettings
from assigner.admission.rules import Rules
from schema import clock
from schema.accounting import accounts, rates
from schema.accounting.accounts import Account
from schema.moves.end import AttemptEnd, Verdict, end
from schema.moves.grant import Placement, grant
from schema.moves.hold import defer
from schema.moves.priority import reprice, review_waiting
from schema.moves.reassign import add_constraints, remove_constraints
from schema.moves.submit import submit
from schema.picking.constrained import MOST_IN_WINDOWS
from schema.policy import priority_classes
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support import filling
from tests.support import pool as pools
from tests.support.plans import KNOWLEDGE, Acts, Measured, filled, measured_acts
from tests.support.servers import Databases

#: Few queues with many jobs each: where there are many queues, a statement that reads all jobs is seldom chosen.
BATCH, BOTS, JOBS, TENANTS, RANKS, HELD = 10, 1_000, 12_000, 2, 21, 100
#: Tables with one row for each thing that an operator has set or that many jobs share.
SETTINGS = {
    "account_totals",
    "accounts",
    "cohorts",
    "counters",
    "constraint_sets",
    "instances",
    "job_classes",
    "meters",
    "quotas",
    "rates",
    "scheduling",
    "windows",
}
TABLES = ("jobs", "job_constraints", "leases", "bots", "kind_platforms")
LIVE = Statement("SELECT job_id, fence, bot_id, bot_epoch FROM live ORDER BY job_id LIMIT :limit")
FREE = Statement("SELECT id FROM bots WHERE free ORDER BY id LIMIT :limit")

Held = list[tuple[int, int, int, int]]
Act = Callable[[Held, Connection], object]


def _request(number: int) -> dict[str, Any]:
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


def _controller(**ordering: Any) -> AdmissionController:
    rules = Rules(OrderingSettings.model_validate(ordering))
    return AdmissionController(rules, AdmissionMemory(), name="test", now=clock.monotonic)


def _start(_: Held, connection: Connection, **ordering: Any) -> None:
    controller = _controller(**ordering)
    admitted = pools.admitted(connection, controller, batch=BATCH, chance=random.Random(1))
    assert len(admitted.heads) == BATCH
    bots = connection.execute(FREE, {"limit": BATCH}).scalars()
    placements = [Placement(head.job.id, bot, {}) for head, bot in zip(admitted.heads, bots, strict=True)]
    taken = controller.amounts(admitted)
    granted = grant(connection, placements, assigner="test", strategy="test", ack=60.0, taken=taken)
    assert len(granted) == BATCH
    controller.charge(connection, admitted, [*taken.items()])


def _end(verdict: Verdict) -> Act:
    return lambda held, connection: end(connection, [AttemptEnd(*each, verdict) for each in held], actor="test")


ACTS: dict[str, Act] = {
    "start": _start,
    "start, aged": lambda held, connection: _start(held, connection, ageing_rate=2.0),
    "start, by score": lambda held, connection: _start(held, connection, kind="score"),
    "succeed": _end(Verdict.SUCCEEDED),
    "lose": _end(Verdict.LOST),
    "watch": lambda _, connection: review_waiting(connection, BATCH, actor="test"),
    "reprice": lambda _, connection: reprice(connection, limit=BATCH, actor="test"),
    "defer": lambda _, connection: defer(connection, BATCH, normal=-1, most=JOBS, actor="test"),
    "adopt": lambda _, connection: add_constraints(connection, BATCH),
    "dismiss": lambda _, connection: remove_constraints(connection, BATCH),
}
# Where waiting counts, a few jobs of each rank of each queue are looked at. Where the order is another one than that of
# reading, a window of each queue is read: a job, its constraints, and both again when they are sorted.
BOUND, WINDOWS = 200 * BATCH, 4 * MOST_IN_WINDOWS


def _fill(connection: Connection) -> None:
    filling.fill_queues(connection, instances=TENANTS, kinds=["free"])
    filling.fill_bots(connection, {"free": BOTS}, capacity=4)
    priority_classes.put_class(connection, "build", points=40, actor="test")
    rates.set_rate(connection, "model", per_second=1000.0, burst=1000, actor="test")
    for number in range(TENANTS):
        account = Account(credit_weight=number + 1.0, budget=1e9, max_concurrent=JOBS)
        accounts.put_account(connection, f"i-{number}", account, actor="test")
    submit(connection, [_request(number) for number in range(JOBS)], actor="test")


@pytest.fixture(scope="module")
def measured(databases: Databases, template: str) -> Iterator[Measured]:
    """Fill a pool whose jobs all wait at gates but for some that run, and watch every statement."""
    with filled(databases, template, TABLES) as database:
        database.run(_fill)
        for _ in range(HELD // BATCH):
            database.run(lambda connection: _start([], connection))
        yield measured_acts(database, _acts)


def _acts(connection: Connection) -> Acts:
    held: Held = [tuple(row) for row in connection.execute(LIVE, {"limit": BATCH})]  # type: ignore[misc]
    return {name: partial(act, held) for name, act in ACTS.items()}


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", ACTS)
def test_a_statement_of_gated_jobs_reads_no_table_whole_and_rows_in_proportion_to_its_batch(
    measured: Measured, name: str, knowledge: str
) -> None:
    watch = measured.watches[knowledge, name]
    assert watch.plans, "it was not executed"
    assert watch.whole_scans() <= SETTINGS, watch
    worst = max(watch.plans, key=lambda plan: plan.touched)
    assert worst.touched <= (WINDOWS if name == "start, by score" else BOUND), worst


def test_the_filled_pool_is_sound(measured: Measured) -> None:
    assert measured.findings == []
