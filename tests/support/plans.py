"""Plans that PostgreSQL used, as auto_explain reports them to the connection, and what is sent to the server."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from schema.diagnostics import invariants
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
def watching(connection: Connection, *, nested: bool = False) -> Iterator[Watch]:
    """Record the plan of every statement on this connection. End its transaction after the block.

    nested: also of the statements inside of functions. Their pages count twice then, but not their rows.
    """
    watch = Watch()

    def noticed(diagnostic: psycopg.errors.Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        _, found, document = message.partition("plan:\n")
        if found:
            watch.plans.append(_plan(json.loads(document)))

    for setting in (*SETTINGS, f"SET LOCAL auto_explain.log_nested_statements = {'on' if nested else 'off'}"):
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
def round_trips() -> Iterator[list[list[str]]]:
    """Record the statements of each round trip of pooled connections inside the block, as the server takes them."""
    sent: list[list[str]] = []
    with _watched(lambda messages: sent.append([each.text.decode() for each in messages]), lambda _: None):
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
