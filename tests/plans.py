"""The plans PostgreSQL really used: auto_explain reports them to the connection that ran the statements."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from sqlalchemy import Connection, text

from schema import verify
from schema.engine import Database, DatabaseSettings
from tests.databases import Databases

#: What the planner knows of the tables: nothing or everything, with plans for the values at hand or for any values.
KNOWLEDGE = ("none", "none, kept plan", "current", "current, kept plan")
#: Statements to watch, by name.
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
    """One node of a plan with what it did: `touched` is the rows it read, kept or not, over all its loops."""

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
    """One statement as it was executed. `buffers` counts pages touched, in memory or not."""

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
    """The plans of what ran inside `watching`, in order."""

    plans: list[Plan] = field(default_factory=list)

    @property
    def buffers(self) -> int:
        """Pages of all of them."""
        return sum(plan.buffers for plan in self.plans)

    @property
    def touched(self) -> float:
        """Rows of all of them."""
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
    """Report the plan of every statement on this connection; its transaction must end after the block."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    watch = Watch()

    def noticed(diagnostic: psycopg.errors.Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        _, found, document = message.partition("plan:\n")
        if found:
            watch.plans.append(_plan(json.loads(document)))

    for setting in SETTINGS:
        connection.execute(text(setting))
    driver.add_notice_handler(noticed)
    try:
        yield watch
        # A plan is reported when its portal closes, which the next statement does.
        connection.execute(text("SET LOCAL auto_explain.log_min_duration = -1"))
    finally:
        driver.remove_notice_handler(noticed)


def watched(connection: Connection, acts: Acts, *, kept: bool) -> dict[str, Watch]:
    """What each of the acts did, every one undone before the next; `kept`: by plans that are for any values."""
    connection.execute(text(f"SET LOCAL plan_cache_mode = {'force_generic_plan' if kept else 'auto'}"))
    found = {}
    for name, act in acts.items():
        with connection.begin_nested() as undone:
            with watching(connection) as found[name]:
                act(connection)
            undone.rollback()
    connection.rollback()
    return found


@dataclass(frozen=True)
class Measured:
    """What every statement did, by knowledge and name, and what was not sound in the pool."""

    watches: dict[tuple[str, str], Watch]
    findings: list[verify.Finding]


@contextmanager
def filled(databases: Databases, template: str, tables: Iterable[str]) -> Iterator[Database]:
    """A migrated database of its own for many rows, in whose tables only the test decides what statistics there are."""
    url = databases.make(template=template)
    settings = DatabaseSettings(statement_timeout=600, idle_in_transaction_timeout=600)
    database = Database(url, settings, role="test", chance=random.Random(0))
    try:
        for table in tables:
            change = text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
            database.run(lambda connection, change=change: connection.execute(change))
        yield database
    finally:
        database.close()
        databases.give_back(url)


def measured_acts(database: Database, acts: Callable[[Connection], Acts]) -> Measured:
    """What each of the acts does in this database; they are asked for anew for every knowledge."""
    found = Measured({}, [])
    for knowledge in KNOWLEDGE:
        if knowledge == "current":
            database.run(lambda connection: connection.execute(text("ANALYZE")))
        with database.engine.connect() as connection:
            for name, watch in watched(connection, acts(connection), kept=knowledge.endswith("kept plan")).items():
                found.watches[knowledge, name] = watch
    found.findings.extend(finding for finding in verify.verify(database) if finding.rows)
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
