"""Class reserves: how much of the pool's limit of running jobs is kept for the jobs of a class.

The pool runs at most so many constrained jobs at once, the limit of the counter `pool:jobs`. Of these a reserve keeps
some for one class: jobs of others start only while the limit also leaves room for what the class has not used of its
reserve. What a class runs is counted by `class:NAME:jobs`.
"""

from collections.abc import Collection
from dataclasses import dataclass

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped

from schema import audit
from schema.accounting.counters import JOBS_OF_CLASS
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.validation import check_name

#: The condition that any reserve is set, for use inside another statement.
ANY_RESERVE = "EXISTS (SELECT FROM class_reserves)"

READ = Statement("SELECT name, jobs FROM class_reserves ORDER BY name")
LIST = Statement(r"""
SELECT r.name, r.jobs, coalesce(c.used, 0)::double precision AS running
FROM class_reserves r LEFT JOIN counters c ON c.name = 'class\:' || r.name || '\:jobs' ORDER BY r.name
""")
# Operators who change reserves or the limit take turns, so that all reserves together fit into the limit.
HOLD_POOL = Statement("SELECT most::double precision FROM counters WHERE name = 'pool\\:jobs' FOR NO KEY UPDATE")
HOLD_CLASS = Statement("SELECT FROM job_classes WHERE name = :name FOR KEY SHARE")
OTHERS = Statement("SELECT coalesce(sum(jobs), 0)::bigint FROM class_reserves WHERE name <> :name")
PUT = Statement("""
INSERT INTO class_reserves (name, jobs) VALUES (:name, :jobs) ON CONFLICT (name) DO UPDATE SET jobs = :jobs
""")
REMOVE = Statement("DELETE FROM class_reserves WHERE name = :name RETURNING jobs")
KEEP = Statement("SELECT keep_reserves(CAST(:started AS text[]))")


@dataclass(frozen=True)
class ClassReserve:
    """How many jobs of the pool's limit are kept for a class, and how many jobs of the class run."""

    name: str
    jobs: int
    running: float


def read(connection: Connection) -> dict[str, int]:
    """Class → how many jobs of the pool's limit are kept for it."""
    return {row.name: row.jobs for row in connection.execute(READ)}


def running_counter(name: str) -> str:
    """The name of the counter of what a class runs."""
    return JOBS_OF_CLASS.counter([name])


def reserves(connection: Connection) -> list[ClassReserve]:
    """Every reserve, by the name of its class."""
    return [ClassReserve(**row) for row in connection.execute(LIST).mappings()]


def keep_reserves(connection: Connection, started: Collection[str | None]) -> None:
    """Fail if jobs that this transaction has started and charged have taken what is kept for another class.

    started: the classes of these jobs; None stands for jobs without a class. Then this raises psycopg.Error with the
    SQLSTATE of a serialization failure, and `Database.run` repeats the transaction.
    """
    connection.execute(KEEP, {"started": list(started)})


def put_reserve(connection: Connection, name: str, *, jobs: int, actor: str, reason: str = "") -> None:
    """Keep so many jobs of the pool's limit for a class. What runs, or starts in a cycle that is under way, goes on.

    Raises NotFound for an unknown class, and BadInput if the pool has no limit or all reserves together exceed it.
    """
    check_name("name", name)
    if jobs < 1:
        raise BadInput("jobs", "must be at least 1")
    most = connection.execute(HOLD_POOL).scalar_one_or_none()
    if connection.execute(HOLD_CLASS, {"name": name}).one_or_none() is None:
        raise NotFound(f"class: there is no class '{name}'")
    if most is None:
        raise BadInput("jobs", "can be kept only of a limit: set one with `pool-limit set --max-concurrent`")
    total = jobs + connection.execute(OTHERS, {"name": name}).scalar_one()
    if total > most:
        raise BadInput("jobs", f"with the other reserves would be {total}, and the pool runs at most {most:g} jobs")
    connection.execute(PUT, {"name": name, "jobs": jobs})
    audit.write(connection, "class_reserve.set", actor=actor, subject=name, details={"jobs": jobs, "reason": reason})
    wake(connection, "jobs")


def remove_reserve(connection: Connection, name: str, *, actor: str, reason: str = "") -> None:
    """Keep nothing for a class any more. Raises NotFound if nothing was kept for it."""
    connection.execute(HOLD_POOL)
    kept = connection.execute(REMOVE, {"name": name}).scalar_one_or_none()
    if kept is None:
        raise NotFound(f"class: nothing is kept for '{escaped(name, 63)}'")
    details = {"before": kept, "reason": reason}
    audit.write(connection, "class_reserve.rm", actor=actor, subject=name, details=details)
    wake(connection, "jobs")
