"""Plans that PostgreSQL used, as auto_explain reports them to the connection, and the hot statements to watch."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import psycopg
import pytest
from leasehold.states import JobState

from assigner.maintenance import upkeep
from assigner.queries import jobs as job_queries
from bots.gateway import long_poll
from bots.sync.leases import DUE_LEASES, HELD_LEASES
from schema import checkpoints, clock, outputs
from schema.diagnostics import invariants, tracing
from schema.fleet import candidates, kinds, members
from schema.fleet.candidates import CandidateRequest
from schema.moves import end as end_moves
from schema.moves import grant as grant_moves
from schema.moves import retention, sessions
from schema.moves.acknowledge import LOCK_FOR_MOVES, Start, acknowledge
from schema.moves.backoff import promote, rest_queues, wake_queues_for_bots
from schema.moves.cancel import ask_stop, cancel
from schema.moves.end import AttemptEnd, Verdict
from schema.moves.grant import Placement
from schema.moves.retention import delete_finished
from schema.moves.sessions import close_overdue, renew
from schema.moves.timeouts import stop_drained, time_out
from schema.picking import for_bot, ready
from schema.picking.for_bot import FetchingBot
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import Order
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.session import Message, Session
from schema.postgres.statements import Statement
from tests.support.servers import Databases

#: Planner statistics: none or current; each with plans for the given values, and with generic (kept) plans.
KNOWLEDGE = ("none", "none, kept plan", "current", "current, kept plan")
#: Name → function that executes a statement to watch.
Acts = Mapping[str, Callable[[Connection], object]]
SETTINGS = (
    "LOAD 'auto_explain'",
    "SET LOCAL auto_explain.log_min_duration = 0",
    "SET LOCAL auto_explain.log_analyze = on",
    "SET LOCAL auto_explain.log_buffers = on",
    "SET LOCAL auto_explain.log_timing = off",
    "SET LOCAL auto_explain.log_format = json",
    "SET LOCAL auto_explain.log_level = notice",
)


@dataclass(frozen=True)
class Node:
    """A node of an executed plan. `touched`: rows that it read over all its loops, including those it filtered out."""

    kind: str
    relation: str | None
    index: str | None
    loops: float
    rows: float
    touched: float

    def __str__(self) -> str:
        where = f" on {self.relation}" if self.relation else ""
        how = f" by {self.index}" if self.index else ""
        return f"{self.kind}{where}{how}: {self.loops:g} loops, {self.rows:g} rows, {self.touched:g} touched"


@dataclass(frozen=True)
class Plan:
    """The plan of an executed statement. `buffers`: pages that it read, from memory or disk."""

    query: str
    buffers: int
    nodes: tuple[Node, ...]

    @property
    def touched(self) -> float:
        """Rows read from tables and indexes."""
        return sum(node.touched for node in self.nodes if node.relation or node.index)

    def indexes(self) -> set[str]:
        """Every index that was really used."""
        return {node.index for node in self.nodes if node.index and node.loops}

    def whole_scans(self) -> set[str]:
        """Tables that were read from one end to the other."""
        return {node.relation for node in self.nodes if node.kind == "Seq Scan" and node.relation and node.loops}

    def __str__(self) -> str:
        return f"{self.buffers} buffers, {self.touched:g} rows\n" + "\n".join(f"  {node}" for node in self.nodes)


@dataclass
class Watch:
    """The plans of all statements inside `watching`, in order."""

    plans: list[Plan] = field(default_factory=list)

    @property
    def buffers(self) -> int:
        """Pages read by all statements."""
        return sum(plan.buffers for plan in self.plans)

    @property
    def touched(self) -> float:
        """Rows read by all statements."""
        return sum(plan.touched for plan in self.plans)

    def indexes(self) -> set[str]:
        """Every index that was really used."""
        return set().union(*(plan.indexes() for plan in self.plans))

    def whole_scans(self) -> set[str]:
        """Tables that were read from one end to the other."""
        return set().union(*(plan.whole_scans() for plan in self.plans))

    def __str__(self) -> str:
        return "\n".join(map(str, self.plans))


@contextmanager
def watching(connection: Connection) -> Iterator[Watch]:
    """Record the plan of every statement on this connection. End its transaction after the block."""
    watch = Watch()

    def noticed(diagnostic: psycopg.errors.Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        _, found, document = message.partition("plan:\n")
        if found:
            watch.plans.append(_plan(json.loads(document)))

    for setting in SETTINGS:
        connection.execute(Statement(setting))
    connection.session.add_notice_handler(noticed)
    try:
        yield watch
        # A plan is reported when its portal closes, and the next statement closes it.
        connection.execute(Statement("SET LOCAL auto_explain.log_min_duration = -1"))
    finally:
        connection.session.remove_notice_handler(noticed)


def watched(connection: Connection, acts: Acts, *, kept: bool) -> dict[str, Watch]:
    """Run each act, and undo it before the next. Returns name → plans. `kept`: use generic plans."""
    connection.execute(Statement(f"SET LOCAL plan_cache_mode = {'force_generic_plan' if kept else 'auto'}"))
    found = {}
    for name, act in acts.items():
        with connection.savepoint() as undone:
            with watching(connection) as found[name]:
                act(connection)
            undone.rollback()
    connection.rollback()
    return found


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


@dataclass(frozen=True)
class Measured:
    """Plans by planner statistics and name of the statement, and violations of invariants."""

    watches: dict[tuple[str, str], Watch]
    findings: list[invariants.Finding]


@contextmanager
def filled(databases: Databases, template: str, tables: Iterable[str]) -> Iterator[Database]:
    """A new migrated database for many rows. Autovacuum is off for `tables`, so the test controls their statistics."""
    url = databases.make(template=template)
    settings = DatabaseSettings(statement_timeout=600, idle_in_transaction_timeout=600)
    database = Database(url, settings, role="test", chance=random.Random(0))
    try:
        for table in tables:
            change = Statement(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
            database.run(lambda connection, change=change: connection.execute(change))
        yield database
    finally:
        database.close()
        databases.give_back(url)


def measured_acts(database: Database, acts: Callable[[Connection], Acts]) -> Measured:
    """Run the acts in this database with every kind of planner statistics. `acts` is called once for each kind."""
    found = Measured({}, [])
    for knowledge in KNOWLEDGE:
        if knowledge == "current":
            database.run(lambda connection: connection.execute(Statement("ANALYZE")))
        with database.connect() as connection:
            for name, watch in watched(connection, acts(connection), kept=knowledge.endswith("kept plan")).items():
                found.watches[knowledge, name] = watch
    found.findings.extend(finding for finding in invariants.verify(database) if finding.rows)
    return found


def _plan(document: dict[str, Any]) -> Plan:
    root = document["Plan"]
    buffers = root.get("Shared Hit Blocks", 0) + root.get("Shared Read Blocks", 0)
    return Plan(document["Query Text"], buffers, tuple(_nodes(root)))


def _nodes(found: dict[str, Any]) -> Iterator[Node]:
    loops = found.get("Actual Loops", 0)
    rows = found.get("Actual Rows", 0) * loops
    dropped = sum(value for name, value in found.items() if name.startswith("Rows Removed by")) * loops
    relation = found.get("Relation Name") if found["Node Type"] != "ModifyTable" else None
    yield Node(found["Node Type"], relation, found.get("Index Name"), loops, rows, rows + dropped)
    for child in found.get("Plans", ()):
        yield from _nodes(child)


# The hot statements, each on rows of a filled pool


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

    def live_leases(self, connection: Connection, query: Statement, *, changed: bool) -> None:
        empty: dict[str, list[int]] = {name: [] for name in ("known_bots", "known_jobs", "known_fences", "fetched")}
        connection.execute(query, {"bot_ids": [self.held[0][2]], "held": [1], "changed": changed, **empty}).all()


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


def _any_free(kind: str) -> Act:
    return lambda known, connection: candidates.any_free(
        connection, CandidateRequest(0, 1, known.platforms[kind], 1, SAMPLE_SIZE)
    )


def _is_any_free(kind: str) -> Act:
    return lambda known, connection: candidates.is_any_free(
        connection, CandidateRequest(0, 1, known.platforms[kind], 1, SAMPLE_SIZE)
    )


ACTS: dict[str, Act] = {
    "pick by priority": _pick(Order.PRIORITY),
    "pick by age": _pick(Order.AGE),
    "pick from the front": _pick_from_front,
    "pick in an instance": lambda _, connection: ready.pick(
        connection, Scope(instances=[1]), order=Order.PRIORITY, batch=BATCH
    ),
    "unserved queues": lambda _, connection: ready.unserved_queues(connection, Scope(), limit=BATCH),
    "fetch": lambda known, connection: known.fetch(connection),
    "fetch from the front": lambda known, connection: known.fetch(connection, cursor=HeadCursor(clock.monotonic)),
    "fetch to capacity": lambda known, connection: known.fetch(connection, any_wait=True),
    "fetch literally": lambda known, connection: known.fetch(connection, literal=True),
    **{f"any free {kind}": _any_free(kind) for kind in KINDS},
    **{f"is any free {kind}": _is_any_free(kind) for kind in KINDS},
    "free among": lambda known, connection: candidates.free_among(connection, [*known.bots.values(), *known.free]),
    "pools": lambda _, connection: candidates.pools_of(connection, [1, 2]),
    "changed members": lambda _, connection: members.read_changes(
        connection, connection.execute(NOW_SEEN).scalar_one()
    ),
    "kinds": lambda known, connection: kinds.offers(connection, [known.kind]),
    "requirement sets": lambda known, connection: kinds.platform_clauses(connection, known.platforms.values()),
    "grant": lambda known, connection: known.grant(connection),
    "acknowledge": lambda known, connection: acknowledge(
        connection, [Start(*each, "test") for each in known.held], sync=1
    ),
    "lock for moves": lambda known, connection: connection.execute(
        LOCK_FOR_MOVES, {"job_ids": [job for job, *_ in known.held], "public_ids": known.public}
    ),
    "finish": lambda known, connection: known.end(connection, Verdict.SUCCEEDED),
    "finish by public ids": lambda known, connection: end_moves.end(
        connection, [AttemptEnd(job, 1, 1, 1, Verdict.SUCCEEDED) for job in known.public], actor="test", capacities={}
    ),
    "lose": lambda known, connection: known.end(connection, Verdict.LOST),
    "finish with results": lambda known, connection: known.end(connection, Verdict.SUCCEEDED, result="1"),
    "store checkpoints": lambda known, connection: checkpoints.store_checkpoints(
        connection, [checkpoints.Checkpoint(1, 1, job, 1, 1, "1") for job in known.public]
    ),
    "append output": lambda known, connection: outputs.append(
        connection, [outputs.Written(1, 1, job, 1, 0, b"x") for job in known.public]
    ),
    "due leases": lambda known, connection: known.live_leases(connection, DUE_LEASES, changed=False),
    "due leases that have changed": lambda known, connection: known.live_leases(connection, DUE_LEASES, changed=True),
    "results": lambda known, connection: job_queries.results(connection, known.public, instances=None, room=100),
    "trace": lambda known, connection: connection.execute(
        tracing.ATTEMPTS, {"jobs": [job for job, *_ in known.held], "key": "traceparent"}
    ).all(),
    "cancel": lambda known, connection: cancel(connection, known.public, instances=None, sync=1, actor="test"),
    "states": lambda known, connection: job_queries.submission_states(connection, known.public, instances=None),
    "progress": lambda known, connection: connection.execute(job_queries.PROGRESS, {"ids": known.public}).all(),
    "ask to stop": lambda known, connection: ask_stop(
        connection, known.fences(), from_state="active", reason="timeout", sync=1
    ),
    "held by the bot": lambda known, connection: known.live_leases(connection, HELD_LEASES, changed=False),
    "held and changed": lambda known, connection: known.live_leases(connection, HELD_LEASES, changed=True),
    "held by lost bots": lambda known, connection: connection.execute(
        sessions.HELD_BY, {"bot_ids": [bot for _, _, bot, _ in known.held]}
    ).all(),
    "look for news": lambda known, connection: connection.execute(
        long_poll.BOT_NEWS, {"ids": [bot for _, _, bot, _ in known.held], "epochs": [1], "draining": [False]}
    ).all(),
    "renew": lambda known, connection: renew(connection, [each[2:4] for each in known.held], ttl=1e9),
    "overdue leases": lambda _, connection: connection.execute(
        upkeep.OVERDUE, {"limit": BATCH, "since": upkeep.EVER}
    ).all(),
    "time out": lambda _, connection: time_out(connection, BATCH, actor="plan"),
    "stop drained": lambda _, connection: stop_drained(connection, BATCH, sync=1.0, actor="plan"),
    "forget evictions": lambda _, connection: retention.delete_old_evictions(connection, age=0, limit=BATCH),
    "close the overdue": lambda _, connection: close_overdue(connection, BATCH),
    "promote": lambda _, connection: promote(connection, BATCH),
    "rest": lambda _, connection: rest_queues(connection, [1], reason="test", base=5, cap=60),
    "wake for bots": lambda known, connection: wake_queues_for_bots(connection, {known.bots[FREE]: 10}),
    "retention": lambda _, connection: delete_finished(connection, JobState.SUCCEEDED, age=0, limit=BATCH),
}


# What is sent to the server, and the errors that come back

#: Statements that hold others together, which no test counts.
_AROUND = (b"BEGIN", b"COMMIT", b"SET LOCAL", b"SAVEPOINT", b"ROLLBACK", b"RELEASE")


@contextmanager
def statements() -> Iterator[list[str]]:
    """Record the statements that pooled connections are given inside the block, as the server takes them."""
    sent: list[str] = []

    def note(messages: Sequence[Message]) -> None:
        sent.extend(each.text.decode() for each in messages if not each.text.startswith(_AROUND))

    with _watched(note, lambda _: None):
        yield sent


@contextmanager
def errors() -> Iterator[list[psycopg.Error]]:
    """Record the errors of pooled connections inside the block, also those after which work is repeated."""
    found: list[psycopg.Error] = []
    with _watched(lambda _: None, found.append):
        yield found


@contextmanager
def _watched(before: Callable[[Sequence[Message]], None], failed: Callable[[psycopg.Error], None]) -> Iterator[None]:
    send = Session.send

    def watched(session: Session, messages: Sequence[Message]) -> Any:
        before(messages)
        try:
            return send(session, messages)
        except psycopg.Error as error:
            failed(error)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "send", watched)
        yield
