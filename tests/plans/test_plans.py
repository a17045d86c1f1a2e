"""The hot statements read what they need and no more, however deep the queue, with any statistics or none."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from uuid import uuid4

import pytest
from leasehold.states import JobState

from assigner.maintenance import needs, upkeep
from assigner.queries import jobs as job_queries
from bots.gateway import held_calls
from bots.sync.leases import DUE_LEASES, HELD_LEASES, NEWS_LEASES
from schema import checkpoints, clock, outputs
from schema.diagnostics import invariants, tracing
from schema.fleet import candidates, kinds, members
from schema.fleet.candidates import MAX_BOTS_READ, CandidateRequest
from schema.moves import end as end_moves
from schema.moves import grant as grant_moves
from schema.moves import retention, sessions
from schema.moves.acknowledge import Start, acknowledge
from schema.moves.cancel import ask_stop, cancel
from schema.moves.end import AttemptEnd, Verdict
from schema.moves.grant import Placement
from schema.moves.retention import delete_finished
from schema.moves.sessions import close_overdue, renew
from schema.moves.submissions import LOCK_JOBS
from schema.moves.waiting.backoff import promote, rest_queues, wake_queues_for_bots, wake_served
from schema.moves.waiting.timeouts import stop_drained, time_out
from schema.picking import for_bot, ready
from schema.picking.for_bot import FetchingBot
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import WIDTHS, Order
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import Acts, Watch, filled, watched
from tests.support.servers import Databases

#: Kinds of bots: all are free; one in a hundred is; none is; the pool has three bots of the kind; it has none.
FREE, SCARCE, FULL, RARE, ABSENT = KINDS = ("free", "scarce", "full", "rare", "absent")
BATCH, SAMPLE_SIZE = 10, 5


@dataclass(frozen=True)
class Known:
    """Ids of rows that the statements use; in an empty pool, ids that do not exist."""

    platforms: dict[str, int]
    bots: dict[str, int]
    kind: int
    jobs: list[int]
    public: list[str]
    held: list[tuple[int, int, int, int]]
    held_by: str
    free: list[int]

    def fetch(
        self, connection: Connection, *, any_wait: bool = False, literal: bool = False, cursor: HeadCursor | None = None
    ) -> None:
        for_bot.pick_for_bot(
            connection,
            FetchingBot(self.bots[FREE], FREE, self.kind, 0, None, None, BATCH, BATCH, returned=[1]),
            limit=BATCH,
            any_wait=any_wait,
            literal=literal,
            cursor=cursor,
        )

    def end(self, connection: Connection, verdict: Verdict, *, result: str | None = None) -> None:
        endings = [AttemptEnd(*each, verdict, result=result) for each in self.held]
        end_moves.end(connection, endings, actor="test")

    def grant(self, connection: Connection) -> None:
        requests = [Placement(job, bot, {}) for job, bot in zip(self.jobs, self.free, strict=False)]
        grant_moves.grant(connection, requests, assigner="test", strategy="test", ack=1)

    def fences(self) -> list[tuple[int, int]]:
        return [(job, fence) for job, fence, _, _ in self.held]

    def live_leases(self, connection: Connection, query: Statement, *, brief: bool) -> None:
        empty: dict[str, list[int]] = {name: [] for name in ("known_bots", "known_jobs", "known_fences", "found")}
        _, _, bot, epoch = self.held[0]
        asked = {"bot_ids": [bot], "epochs": [epoch], "held": [1], "brief": [brief], **empty}
        connection.execute(query, asked).all()


Act = Callable[[Known, Connection], object]

#: The snapshot of the transaction.
NOW_SEEN = Statement("SELECT CAST(pg_current_snapshot() AS text)")


def _pick(order: Order) -> Act:
    return lambda _, connection: ready.pick(connection, Scope(), order=order, batch=BATCH)


def _pick_from_front(_: Known, connection: Connection) -> None:
    """Pick twice: from the start of the index, and from the place that the head cursor remembers."""
    cursor = HeadCursor(partial(next, count(0.0, 1000.0)))
    for _walk in range(2):
        ready.pick(connection, Scope(), order=Order.PRIORITY, batch=BATCH, cursor=cursor)


def _look_for(kind: str, look: Callable[[Connection, CandidateRequest], object]) -> Act:
    return lambda known, c: look(c, CandidateRequest(0, 1, known.platforms[kind], 1, SAMPLE_SIZE))


ACTS: dict[str, Act] = {
    "pick by priority": _pick(Order.PRIORITY),
    "pick by age": _pick(Order.AGE),
    "pick from the front": _pick_from_front,
    "pick in an instance": lambda _, c: ready.pick(c, Scope(instances=[1]), order=Order.PRIORITY, batch=BATCH),
    "unserved queues": lambda _, c: ready.unserved_queues(c, Scope(), limit=BATCH),
    "fetch": lambda known, c: known.fetch(c),
    "fetch from the front": lambda known, c: known.fetch(c, cursor=HeadCursor(clock.monotonic)),
    "fetch to capacity": lambda known, c: known.fetch(c, any_wait=True),
    "fetch literally": lambda known, c: known.fetch(c, literal=True),
    **{f"any free {kind}": _look_for(kind, candidates.any_free) for kind in KINDS},
    **{f"is any free {kind}": _look_for(kind, candidates.is_any_free) for kind in KINDS},
    "free among": lambda known, c: candidates.free_among(c, [*known.bots.values(), *known.free]),
    "pools": lambda _, c: candidates.pools_of(c, [1, 2]),
    "changed members": lambda _, c: members.read_changes(c, c.execute(NOW_SEEN).scalar_one()),
    "kinds": lambda known, c: kinds.offers(c, [known.kind]),
    "requirement sets": lambda known, c: kinds.platform_clauses(c, known.platforms.values()),
    "grant": lambda known, c: known.grant(c),
    "acknowledge": lambda known, c: acknowledge(c, [Start(*each, "test") for each in known.held], sync=1),
    "lock jobs": lambda known, c: c.execute(LOCK_JOBS, {"ids": [job for job, *_ in known.held]}),
    "finish": lambda known, c: known.end(c, Verdict.SUCCEEDED),
    "lose": lambda known, c: known.end(c, Verdict.LOST),
    "finish with results": lambda known, c: known.end(c, Verdict.SUCCEEDED, result="1"),
    "store checkpoints": lambda known, c: checkpoints.store_checkpoints(
        c, [checkpoints.Checkpoint(1, 1, job, 1, 1, "1") for job in known.public]
    ),
    "append output": lambda known, c: outputs.append(
        c, [outputs.Written(1, 1, job, 1, 0, b"x") for job in known.public]
    ),
    "due leases": lambda known, c: known.live_leases(c, DUE_LEASES, brief=False),
    "due leases that have changed": lambda known, c: known.live_leases(c, DUE_LEASES, brief=True),
    "results": lambda known, c: job_queries.results(c, known.public, instances=None, room=100),
    "trace": lambda known, c: c.execute(
        tracing.ATTEMPTS, {"jobs": [job for job, *_ in known.held], "key": "traceparent"}
    ).all(),
    "cancel": lambda known, c: cancel(c, known.public, instances=None, sync=1, actor="test"),
    "states": lambda known, c: job_queries.submission_states(c, known.public, instances=None),
    "progress": lambda known, c: c.execute(job_queries.PROGRESS, {"ids": known.public}).all(),
    "ask to stop": lambda known, c: ask_stop(c, known.fences(), from_state="active", reason="timeout", sync=1),
    "news of held calls": lambda known, c: c.execute(NEWS_LEASES, {"names": [known.held_by]}).all(),
    "held by the bot": lambda known, c: known.live_leases(c, HELD_LEASES, brief=False),
    "held and changed": lambda known, c: known.live_leases(c, HELD_LEASES, brief=True),
    "held by lost bots": lambda known, c: c.execute(
        sessions.HELD_BY, {"bot_ids": [bot for _, _, bot, _ in known.held]}
    ).all(),
    "look for news": lambda known, c: c.execute(
        held_calls.BOT_NEWS, {"ids": [bot for _, _, bot, _ in known.held], "epochs": [1], "draining": [], "late": 1.0}
    ).all(),
    "renew": lambda known, c: renew(c, [each[2:4] for each in known.held], ttl=1e9),
    "overdue leases": lambda _, c: c.execute(upkeep.OVERDUE, {"limit": BATCH, "since": upkeep.EVER}).all(),
    "needs of upkeep": lambda _, c: c.execute(needs.NEEDED, {"since": upkeep.EVER}).all(),
    "time out": lambda _, c: time_out(c, BATCH, actor="plan"),
    "stop drained": lambda _, c: stop_drained(c, BATCH, sync=1.0, actor="plan"),
    "forget evictions": lambda _, c: retention.delete_old_evictions(c, age=0, limit=BATCH),
    "close the overdue": lambda _, c: close_overdue(c, BATCH),
    "promote": lambda _, c: promote(c, BATCH),
    "rest": lambda _, c: rest_queues(c, [1], reason="test", base=5, cap=60),
    "wake served": lambda _, c: wake_served(c, [1]),
    "wake for bots": lambda known, c: wake_queues_for_bots(c, {known.bots[FREE]: 10}),
    "retention": lambda _, c: delete_finished(c, JobState.SUCCEEDED, age=0, limit=BATCH),
}


def settle(connection: Connection, acts: Acts, times: int) -> None:
    """Run each act so often with generic plans, unwatched, that the server keeps its plan for this connection.

    The pool is empty, so nothing has to be undone.
    """
    connection.execute(Statement("SET LOCAL plan_cache_mode = 'force_generic_plan'"))
    for _ in range(times):
        for act in acts.values():
            act(connection)
    kept = connection.execute(
        Statement("SELECT count(*) FROM pg_prepared_statements WHERE generic_plans > 0")
    ).scalar_one()
    assert kept > len(acts) / 2, "acts share statements, but most have some of their own"
    connection.commit()


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
HOLDER = Statement("SELECT name FROM bots WHERE id = :bot")
FREE_BOTS = Statement("SELECT id FROM bots WHERE free ORDER BY id LIMIT :limit")


@dataclass(frozen=True)
class Size:
    """Queued jobs (and as many finished ones, and a tenth in backoff), and bots."""

    jobs: int
    bots: int


SMALL, SHALLOW, DEEP = SIZES = (Size(500, 100), Size(500, 5_000), Size(15_000, 5_000))


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
#: Tables that never have more than a few rows, and are read whole.
WHOLE = {"grant": {"server_identity"}, "needs of upkeep": {"ceilings", "policy_in_force", "scheduling"}}


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
    held = [tuple(row) for row in connection.execute(HELD, {"limit": BATCH})] or [(1, 1, 1, 1)]
    holder = connection.execute(HOLDER, {"bot": held[0][2]}).one_or_none()
    return Known(
        platforms=dict.fromkeys(KINDS, 1) | {row.kind: row.platform for row in rows},
        bots=dict.fromkeys(KINDS, 1) | {row.kind: row.bot_id for row in rows if row.bot_id},
        kind=1,
        jobs=[row.id for row in jobs] or [1],
        public=[str(row.public_id) for row in jobs] or [str(uuid4())],
        held=held,
        held_by="nobody" if holder is None else holder.name,
        free=[row.id for row in connection.execute(FREE_BOTS, {"limit": BATCH})] or [1],
    )


def _acts(connection: Connection) -> Acts:
    known = _known(connection)
    return {name: partial(act, known) for name, act in ACTS.items()}


def _watch_all(connection: Connection, size: Size, knowledge: str, found: Measured, *, kept: bool = False) -> None:
    for name, watch in watched(connection, _acts(connection), kept=kept).items():
        found.watches[size, knowledge, name] = watch


@pytest.mark.parametrize("name", ACTS)
def test_a_statement_reads_rows_in_proportion_to_its_batch_only(measured: Measured, name: str) -> None:
    for size, knowledge in product(SIZES, KNOWLEDGE):
        watch = measured[size, knowledge, name]
        assert watch.plans, "it was not executed"
        assert watch.whole_scans() <= WHOLE.get(name, set()), f"{size}, {knowledge}: {watch}"
        assert watch.touched <= BOUNDS.get(name, BOUND), f"{size}, {knowledge}: {watch}"


@pytest.mark.parametrize("name", [name for name in ACTS if not name.startswith("fetch")])
def test_a_statement_costs_the_same_with_thirty_times_the_jobs(measured: Measured, name: str) -> None:
    for knowledge in KNOWLEDGE:
        # Whether the front suffices, or each queue is looked into, depends on what the free bots offer.
        looks = LOOKS + RANKS if name.startswith("pick") else 0
        _same_cost(measured[SHALLOW, knowledge, name], measured[DEEP, knowledge, name], knowledge, looks=looks)


@pytest.mark.parametrize("name", ["free among", "changed members", "is any free free", "is any free full", "grant"])
def test_a_look_at_bots_costs_the_same_with_fifty_times_the_bots(measured: Measured, name: str) -> None:
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
