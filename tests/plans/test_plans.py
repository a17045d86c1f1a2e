"""The hot statements read what they need and no more, however deep the queue, with any statistics or none."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from uuid import uuid4

import pytest

from schema.diagnostics import invariants
from schema.fleet.candidates import MAX_BOTS_READ
from schema.picking.pick import WIDTHS
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import (
    ACTS,
    BATCH,
    FREE,
    FULL,
    KINDS,
    RARE,
    SCARCE,
    Known,
    Watch,
    filled,
    settle,
    watched,
)
from tests.support.servers import Databases

INSTANCES = 2
#: Of three sizes of jobs each.
QUEUES = 3 * INSTANCES * len(KINDS)
#: Executions after which the driver has prepared a statement, and the server keeps the generic plan that it is told to.
SETTLED = 7
TABLES = ("jobs", "job_payloads", "stored_events", "leases", "bots", "kind_platforms", "instances", "platforms")
IDS = Statement("""
SELECT p.properties->'kind'->>0 AS kind, p.id AS platform,
    (SELECT min(b.id) FROM kind_platforms o JOIN bots b ON b.kind = o.kind WHERE o.platform = p.id) AS bot_id
FROM platforms p
""")
READY = Statement(
    "SELECT id, public_id FROM jobs WHERE state = 'queued' AND schedule_after IS NULL ORDER BY id LIMIT :limit"
)
HELD = Statement("SELECT job_id, fence, bot_id, bot_epoch FROM live ORDER BY job_id LIMIT :limit")
FREE_BOTS = Statement("SELECT id FROM bots WHERE free ORDER BY id LIMIT :limit")


@dataclass(frozen=True)
class Size:
    """Queued jobs (and as many finished ones, and a tenth in backoff), and bots."""

    jobs: int
    bots: int


SMALL, SHALLOW, DEEP = SIZES = (Size(1_000, 100), Size(1_000, 10_000), Size(30_000, 10_000))


#: What the planner may know: plans made while the pool was empty and kept, no statistics at all, and current ones.
#: With these it makes a plan for the values or keeps one for all values; what it settles for is one of the two.
KNOWLEDGE = ("grown from nothing", "none", "current", "current, kept plan")

#: Rows one execution may read, from the batch alone. Queues cost one step each, heads are read per served queue, and a
#: look for a free bot reads the kinds that offer what the queue requires, and a bot of each.
HEADS = QUEUES * (1 + BATCH * WIDTHS[0])
LOOKS = QUEUES * 10
#: By age, each of the 21 ranks of a queue is looked into.
RANKS = QUEUES * 21 * 3
BOUNDS = {
    **{name: HEADS + LOOKS + 2 * BATCH * WIDTHS[0] for name in ACTS if name.startswith("pick")},
    "pick by age": HEADS + LOOKS + RANKS + 2 * BATCH * WIDTHS[0],
    "pick from the front": 2 * (HEADS + LOOKS + 2 * BATCH * WIDTHS[0]),
    "unserved queues": 10 * QUEUES,
    **{name: 2 * HEADS for name in ACTS if name.startswith("fetch")},
    **{f"any free {kind}": 8 * MAX_BOTS_READ for kind in KINDS},
    **{f"is any free {kind}": 20 for kind in KINDS},
    "wake for bots": 10 * QUEUES,
}
#: A few rows of each of the small tables, and those of the batch in each of the tables that a move writes.
BOUND = 20 * BATCH


@dataclass(frozen=True)
class Measured:
    """What every statement did, by size, knowledge and name."""

    watches: dict[tuple[Size, str, str], Watch]
    findings: list[invariants.Finding]

    def __getitem__(self, key: tuple[Size, str, str]) -> Watch:
        return self.watches[key]


@pytest.fixture(scope="module")
def measured(databases: Databases, template: str) -> Measured:
    """Fill three pools and watch every statement in each of them."""
    found = Measured({}, [])
    for size in SIZES:
        with filled(databases, template, TABLES) as database:
            _measure(database, size, found)
    return found


def _measure(database: Database, size: Size, found: Measured) -> None:
    with database.connect() as early:
        settle(early, _acts(early), SETTLED)
        database.run(lambda connection: _fill(connection, size))
        _watch_all(early, size, "grown from nothing", found, kept=True)
    with database.connect() as connection:
        _watch_all(connection, size, "none", found)
    database.run(lambda connection: connection.execute(Statement("ANALYZE")))
    with database.connect() as connection:
        _watch_all(connection, size, "current", found)
        _watch_all(connection, size, "current, kept plan", found, kept=True)
    found.findings.extend(finding for finding in invariants.verify(database) if finding.rows)


def _fill(connection: Connection, size: Size) -> None:
    each = (size.bots - 3) // 3
    filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
    for state, jobs, units, backoff in (
        ("succeeded", size.jobs, 1, None),
        ("queued", size.jobs, 1, None),
        ("queued", size.jobs // 20, 2, 60.0),
        ("queued", size.jobs // 20, 3, -10_000.0),
    ):
        filling.fill_jobs(connection, jobs, instances=INSTANCES, kinds=KINDS, state=state, units=units, backoff=backoff)
    filling.fill_bots(connection, {FREE: each, SCARCE: each, FULL: each, RARE: 3})
    filling.occupy(connection, SCARCE, leaving=max(1, each // 100))
    filling.occupy(connection, FULL, leaving=0)


def _known(connection: Connection) -> Known:
    rows = connection.execute(IDS).all()
    jobs = connection.execute(READY, {"limit": BATCH}).all()
    return Known(
        platforms=dict.fromkeys(KINDS, 1) | {row.kind: row.platform for row in rows},
        bots=dict.fromkeys(KINDS, 1) | {row.kind: row.bot_id for row in rows if row.bot_id},
        kind=1,
        jobs=[row.id for row in jobs] or [1],
        public=[str(row.public_id) for row in jobs] or [str(uuid4())],
        held=[tuple(row) for row in connection.execute(HELD, {"limit": BATCH})] or [(1, 1, 1, 1)],
        free=[row.id for row in connection.execute(FREE_BOTS, {"limit": BATCH})] or [1],
    )


def _acts(connection: Connection) -> dict[str, Callable[[Connection], object]]:
    known = _known(connection)
    return {name: partial(act, known) for name, act in ACTS.items()}


def _watch_all(connection: Connection, size: Size, knowledge: str, found: Measured, *, kept: bool = False) -> None:
    for name, watch in watched(connection, _acts(connection), kept=kept).items():
        found.watches[size, knowledge, name] = watch


@pytest.mark.parametrize("name", ACTS)
def test_a_statement_reads_no_table_whole(measured: Measured, name: str) -> None:
    for size, knowledge in product(SIZES, KNOWLEDGE):
        watch = measured[size, knowledge, name]
        assert watch.plans, "it was not executed"
        assert not watch.whole_scans(), f"{size}, {knowledge}: {watch}"


@pytest.mark.parametrize("name", ACTS)
def test_a_statement_reads_rows_in_proportion_to_its_batch(measured: Measured, name: str) -> None:
    bound = BOUNDS.get(name, BOUND)
    for size, knowledge in product(SIZES, KNOWLEDGE):
        watch = measured[size, knowledge, name]
        assert watch.touched <= bound, f"{size}, {knowledge}: {watch}"


@pytest.mark.parametrize("name", [name for name in ACTS if not name.startswith("fetch")])
def test_a_statement_costs_the_same_with_thirty_times_the_jobs(measured: Measured, name: str) -> None:
    for knowledge in KNOWLEDGE:
        # Whether the front suffices, or each queue is looked into, depends on what the free bots offer.
        looks = LOOKS + RANKS if name.startswith("pick") else 0
        _same_cost(measured[SHALLOW, knowledge, name], measured[DEEP, knowledge, name], knowledge, looks=looks)


@pytest.mark.parametrize("name", ["free among", "changed members", "is any free free", "is any free full", "grant"])
def test_a_look_at_bots_costs_the_same_with_a_hundred_times_the_bots(measured: Measured, name: str) -> None:
    for knowledge in KNOWLEDGE:
        _same_cost(measured[SMALL, knowledge, name], measured[SHALLOW, knowledge, name], knowledge)


def _same_cost(few: Watch, many: Watch, knowledge: str, *, looks: int = 0) -> None:
    """Equal but for indexes that are a level or two higher."""
    assert many.touched <= 1.25 * few.touched + 2 * BATCH + looks, f"{knowledge}\n{few}\n{many}"
    assert many.buffers <= 2 * few.buffers + 20 * BATCH + 4 * looks, f"{knowledge}\n{few}\n{many}"


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("pick by priority", "jobs_of_queue"),
        ("pick by age", "jobs_of_queue"),
        ("pick from the front", "jobs_front"),
        ("fetch", "jobs_of_queue"),
        ("fetch from the front", "jobs_front"),
    ],
)
def test_a_pick_reads_the_index_of_its_order(measured: Measured, name: str, index: str) -> None:
    for size, knowledge in product(SIZES, KNOWLEDGE):
        plan = measured[size, knowledge, name].plans[0]
        assert plan.indexes() & {"jobs_front", "jobs_of_queue"} == {index}, f"{knowledge}: {plan}"
        most = max((node.rows for node in plan.nodes if node.kind == "Sort"), default=0)
        assert most <= 8 * HEADS, f"{knowledge}: {plan}"


def test_the_filled_pools_are_sound(measured: Measured) -> None:
    assert measured.findings == []
