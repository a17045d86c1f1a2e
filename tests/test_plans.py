"""The hot statements read what they need and no more, however deep the queue, with any statistics or none."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from uuid import uuid4

import pytest
from sqlalchemy import Connection, text

from assigner import queries, upkeep
from bots import leases, vigil
from schema import candidates, fetching, forgetting, moves, ready, verify
from schema.candidates import LOOK, RING, Wanted
from schema.engine import Database, DatabaseSettings
from schema.fetching import Fetcher
from schema.moves import Alike, Ending, Placement, Start, Verdict, sessions
from schema.ready import JOBS_LOOK, REACHES, Order, Scope
from tests import filling
from tests.databases import Databases
from tests.plans import Watch, watching

INSTANCES = 2
#: Requirement sets: all its bots free; one in a hundred; none; three bots in the whole pool; no bot at all.
FREE, SCARCE, FULL, RARE, ABSENT = KINDS = ("free", "scarce", "full", "rare", "absent")
QUEUES = INSTANCES * len(KINDS)
BATCH = 10
SAMPLE_SIZE = 5
#: Executions after which both the driver and the server keep the plan of a statement.
SETTLED = 12
TABLES = ("jobs", "job_payloads", "job_events", "leases", "bots", "bot_platforms", "instances", "platforms")
IDS = text("""
SELECT p.properties->'kind'->>0 AS kind, p.id AS platform,
    (SELECT min(bp.bot_id) FROM bot_platforms bp WHERE bp.platform = p.id) AS bot_id FROM platforms p
""")
READY = text(
    "SELECT id, public_id FROM jobs WHERE state = 'queued' AND schedule_after IS NULL ORDER BY id LIMIT :limit"
)
HELD = text("SELECT job_id, fence, bot_id, bot_epoch FROM live ORDER BY job_id LIMIT :limit")
FREE_BOTS = text("SELECT id FROM bots WHERE free ORDER BY id LIMIT :limit")


@dataclass(frozen=True)
class Size:
    """Queued jobs (and as many finished ones, and a tenth in backoff), and bots."""

    jobs: int
    bots: int


SMALL, SHALLOW, DEEP = SIZES = (Size(1_000, 100), Size(1_000, 10_000), Size(100_000, 10_000))


@dataclass(frozen=True)
class Known:
    """Rows to work on; an empty pool has none, and statements then run on ids that do not exist."""

    platforms: dict[str, int]
    bots: dict[str, int]
    jobs: list[int]
    public: list[str]
    held: list[tuple[int, int, int, int]]
    free: list[int]

    def sample(self, connection: Connection, kind: str) -> None:
        wanted = [Wanted(0, 1, self.platforms[kind], 1, SAMPLE_SIZE)]
        candidates.sample(connection, wanted, chance=random.Random(7))

    def fetch(self, connection: Connection, *, any_wait: bool = False, literal: bool = False) -> None:
        fetching.pick_for_bot(
            connection,
            Fetcher(self.bots[FREE], FREE, 0, None, None, BATCH, BATCH, returned=[1]),
            limit=BATCH,
            any_wait=any_wait,
            literal=literal,
            cooldown=600,
        )

    def end(self, connection: Connection, verdict: Verdict) -> None:
        moves.end(connection, [Ending(*each, verdict) for each in self.held], actor="test")

    def grant(self, connection: Connection) -> None:
        wishes = [Placement(job, bot, {}) for job, bot in zip(self.jobs, self.free, strict=False)]
        moves.grant(connection, wishes, assigner="test", strategy="test", ack=1)

    def fences(self) -> list[tuple[int, int]]:
        return [(job, fence) for job, fence, _, _ in self.held]


Act = Callable[[Known, Connection], object]


def _pick(order: Order) -> Act:
    return lambda _, connection: ready.pick(connection, Scope(), order=order, batch=BATCH, chance=random.Random(7))


def _sample(kind: str) -> Act:
    return lambda known, connection: known.sample(connection, kind)


def _any_free(kind: str) -> Act:
    return lambda known, connection: candidates.any_free(
        connection, Wanted(0, 1, known.platforms[kind], 1, SAMPLE_SIZE)
    )


ACTS: dict[str, Act] = {
    "pick by priority": _pick(Order.PRIORITY),
    "pick by age": _pick(Order.AGE),
    "pick in an instance": lambda _, connection: ready.pick(
        connection, Scope(instances=[1]), order=Order.PRIORITY, batch=BATCH, chance=random.Random(7)
    ),
    "unserved queues": lambda _, connection: ready.unserved(connection, Scope(), limit=BATCH),
    "fetch": lambda known, connection: known.fetch(connection),
    "fetch to capacity": lambda known, connection: known.fetch(connection, any_wait=True),
    "fetch literally": lambda known, connection: known.fetch(connection, literal=True),
    **{f"sample {kind}": _sample(kind) for kind in KINDS},
    **{f"any free {kind}": _any_free(kind) for kind in KINDS},
    "grant": lambda known, connection: known.grant(connection),
    "acknowledge": lambda known, connection: moves.acknowledge(
        connection, [Start(*each, "test") for each in known.held], sync=1
    ),
    "finish": lambda known, connection: known.end(connection, Verdict.SUCCEEDED),
    "lose": lambda known, connection: known.end(connection, Verdict.LOST),
    "cancel": lambda known, connection: moves.cancel(connection, known.public, instances=None, sync=1, actor="test"),
    "states": lambda known, connection: queries.states(connection, known.public, instances=None),
    "progress": lambda known, connection: connection.execute(queries.PROGRESS, {"ids": known.public}).all(),
    "ask to stop": lambda known, connection: moves.ask_stop(
        connection, known.fences(), from_state="active", reason="timeout", sync=1
    ),
    "held by the bot": lambda known, connection: connection.execute(leases.HELD, {"bot_ids": [known.held[0][2]]}).all(),
    "held by lost bots": lambda known, connection: connection.execute(
        sessions.HELD_BY, {"bot_ids": [bot for _, _, bot, _ in known.held]}
    ).all(),
    "look for news": lambda known, connection: connection.execute(
        vigil.BOT_NEWS, {"ids": [bot for _, _, bot, _ in known.held], "epochs": [1], "draining": [False]}
    ).all(),
    "renew": lambda known, connection: moves.renew(connection, [each[2:4] for each in known.held], ttl=1e9),
    "overdue leases": lambda _, connection: connection.execute(upkeep.OVERDUE, {"limit": BATCH}).all(),
    "time out": lambda _, connection: moves.time_out(connection, BATCH, actor="plan"),
    "stop drained": lambda _, connection: moves.stop_drained(connection, BATCH, sync=1.0, actor="plan"),
    "forget evictions": lambda _, connection: forgetting.forget_evictions(connection, age=0, limit=BATCH),
    "close the overdue": lambda _, connection: moves.close_overdue(connection, BATCH),
    "promote": lambda _, connection: moves.promote(connection, BATCH),
    "postpone": lambda known, connection: moves.postpone(
        connection, [Alike(0, 1, known.platforms[ABSENT], 1)], reason="test", base=5, cap=60, limit=BATCH
    ),
    "release": lambda known, connection: moves.release(connection, {known.bots[FREE]: 10}, limit=BATCH),
    "retention": lambda _, connection: moves.delete_finished(
        connection, succeeded=0, failed=0, cancelled=0, dead=0, limit=BATCH
    ),
}
#: What the planner may know: plans made while the pool was empty and kept, no statistics at all, and current ones.
#: With these it makes a plan for the values or keeps one for all values; what it settles for is one of the two.
KNOWLEDGE = ("grown from nothing", "none", "current", "current, kept plan")

#: Rows one execution may read, from the batch alone. Queues cost one step each, heads are read per served queue.
HEADS = QUEUES * (1 + BATCH * REACHES[0])
LOOKS = QUEUES * 4 * LOOK
BOUNDS = {
    **{name: HEADS + LOOKS + 2 * BATCH * REACHES[0] for name in ACTS if name.startswith("pick")},
    "unserved queues": 10 * QUEUES,
    # More jobs than a shallow queue holds, so that this bound is the one that counts.
    **{name: 2 * INSTANCES * JOBS_LOOK + HEADS for name in ACTS if name.startswith("fetch")},
    **{f"sample {kind}": 8 * RING * SAMPLE_SIZE for kind in KINDS},
    **{f"any free {kind}": 8 * LOOK for kind in KINDS},
    "postpone": 5 * BATCH,
    "release": 5 * BATCH + 2 * INSTANCES,
}
#: A few rows of each of the small tables, and those of the batch in each of the tables that a move writes.
BOUND = 20 * BATCH


@dataclass(frozen=True)
class Measured:
    """What every statement did, by size, knowledge and name."""

    watches: dict[tuple[Size, str, str], Watch]
    findings: list[verify.Finding]

    def __getitem__(self, key: tuple[Size, str, str]) -> Watch:
        return self.watches[key]


@pytest.fixture(scope="module")
def measured(databases: Databases, template: str) -> Measured:
    """Fill three pools and watch every statement in each of them."""
    found = Measured({}, [])
    settings = DatabaseSettings(statement_timeout=120, idle_in_transaction_timeout=120)
    for size in SIZES:
        url = databases.make(template=template)
        database = Database(url, settings, role="test", chance=random.Random(0))
        try:
            _measure(database, size, found)
        finally:
            database.close()
            databases.give_back(url)
    return found


def _measure(database: Database, size: Size, found: Measured) -> None:
    database.run(_no_autovacuum)
    with database.engine.connect() as early:
        _watch_all(early, size, "grown from nothing", found, kept=True, unwatched=SETTLED)
        database.run(lambda connection: _fill(connection, size))
        _watch_all(early, size, "grown from nothing", found, kept=True)
    with database.engine.connect() as connection:
        _watch_all(connection, size, "none", found)
    database.run(lambda connection: connection.execute(text("ANALYZE")))
    with database.engine.connect() as connection:
        _watch_all(connection, size, "current", found)
        _watch_all(connection, size, "current, kept plan", found, kept=True)
    found.findings.extend(finding for finding in verify.verify(database) if finding.rows)


def _no_autovacuum(connection: Connection) -> None:
    for table in TABLES:
        connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))


def _fill(connection: Connection, size: Size) -> None:
    each = (size.bots - 3) // 3
    filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
    for state, jobs, backoff in (
        ("succeeded", size.jobs, None),
        ("queued", size.jobs, None),
        ("queued", size.jobs // 20, 60.0),
        ("queued", size.jobs // 20, -10_000.0),
    ):
        filling.fill_jobs(connection, jobs, instances=INSTANCES, kinds=KINDS, state=state, backoff=backoff)
    filling.fill_bots(connection, {FREE: each, SCARCE: each, FULL: each, RARE: 3})
    filling.occupy(connection, SCARCE, leaving=max(1, each // 100))
    filling.occupy(connection, FULL, leaving=0)


def _known(connection: Connection) -> Known:
    rows = connection.execute(IDS).all()
    jobs = connection.execute(READY, {"limit": BATCH}).all()
    return Known(
        platforms=dict.fromkeys(KINDS, 1) | {row.kind: row.platform for row in rows},
        bots=dict.fromkeys(KINDS, 1) | {row.kind: row.bot_id for row in rows if row.bot_id},
        jobs=[row.id for row in jobs] or [1],
        public=[str(row.public_id) for row in jobs] or [str(uuid4())],
        held=[tuple(row) for row in connection.execute(HELD, {"limit": BATCH})] or [(1, 1, 1, 1)],
        free=[row.id for row in connection.execute(FREE_BOTS, {"limit": BATCH})] or [1],
    )


def _watch_all(
    connection: Connection, size: Size, knowledge: str, found: Measured, *, kept: bool = False, unwatched: int = 0
) -> None:
    """Run every statement and undo it, `unwatched` times to settle its plan or else once under watch."""
    known = _known(connection)
    connection.execute(text(f"SET LOCAL plan_cache_mode = {'force_generic_plan' if kept else 'auto'}"))
    for name, act in ACTS.items():
        for _ in range(unwatched):
            with connection.begin_nested() as undone:
                act(known, connection)
                undone.rollback()
        if not unwatched:
            with connection.begin_nested() as undone:
                with watching(connection) as watch:
                    act(known, connection)
                undone.rollback()
            found.watches[size, knowledge, name] = watch
    connection.rollback()


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
def test_a_statement_costs_the_same_with_a_hundred_times_the_jobs(measured: Measured, name: str) -> None:
    for knowledge in KNOWLEDGE:
        _same_cost(measured[SHALLOW, knowledge, name], measured[DEEP, knowledge, name], knowledge)


@pytest.mark.parametrize("name", [name for name in ACTS if name.startswith("sample") or name == "grant"])
def test_a_sample_costs_the_same_with_a_hundred_times_the_bots(measured: Measured, name: str) -> None:
    for knowledge in KNOWLEDGE:
        _same_cost(measured[SMALL, knowledge, name], measured[SHALLOW, knowledge, name], knowledge)


def _same_cost(few: Watch, many: Watch, knowledge: str) -> None:
    """Equal but for where on the ring it began, and for indexes that are a level or two higher."""
    assert many.touched <= 1.25 * few.touched + 2 * BATCH, f"{knowledge}\n{few}\n{many}"
    assert many.buffers <= 2 * few.buffers + 20 * BATCH, f"{knowledge}\n{few}\n{many}"


@pytest.mark.parametrize(("order", "index"), [("priority", "jobs_ready_priority"), ("age", "jobs_ready_age")])
def test_a_pick_reads_the_index_of_its_order(measured: Measured, order: str, index: str) -> None:
    for size, knowledge in product(SIZES, KNOWLEDGE):
        (plan,) = measured[size, knowledge, f"pick by {order}"].plans
        assert index in plan.indexes(), f"{size}, {knowledge}: {plan}"
        assert not [node for node in plan.nodes if node.kind == "Sort" and node.rows > QUEUES * BATCH * REACHES[0]], (
            plan
        )


def test_the_filled_pools_are_sound(measured: Measured) -> None:
    assert measured.findings == []
