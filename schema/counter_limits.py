"""Limits of counters that operators set by name: of classes, of owners and projects of an instance, of its locks."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema import audit, counters
from schema.errors import BadInput, NotFound
from schema.limits import check_name, escaped
from schema.wakeups import wake

#: The largest cost, and the largest number of jobs, that a limit may be.
MAX_COST, MAX_JOBS = 1e12, 1_000_000_000

# Names hold no colon, so that each part of a counter's name is one of the parts by which operators name it.
_LIST = text("""
SELECT name, used::double precision, most::double precision FROM counters
WHERE name LIKE :pattern AND (most IS NOT NULL OR :unlimited) ORDER BY name COLLATE "C"
""")
_HELD = text("SELECT most::double precision FROM counters WHERE name = :name FOR NO KEY UPDATE")


@dataclass(frozen=True)
class Kind:
    """What is limited. `noun`: in sentences. `first`, `last`: around the names in that of the counter.
    `unnamed`: the limit of one that nobody has set; None = any amount."""

    noun: str
    first: str
    names: int
    last: str = ""
    unnamed: float | None = None

    def counter(self, names: Sequence[str]) -> str:
        """The counter of what has these names."""
        return ":".join([self.first, *names, *([self.last] if self.last else [])])

    def named(self, counter: str) -> tuple[str, ...]:
        """The names in that of a counter."""
        return tuple(counter.split(":")[1 : 1 + self.names])


JOBS_OF_CLASS = Kind("class", "class", 1, "jobs")
COST_OF_OWNER = Kind("owner", "owner", 2, "cost")
COST_OF_PROJECT = Kind("project", "project", 2, "cost")
#: A lock has one slot unless it is given more.
SLOTS_OF_LOCK = Kind("lock", "lock", 2, unnamed=1.0)


@dataclass(frozen=True)
class CounterLimit:
    """How much of something is in use, with what is reserved for what runs, and how much may be; None = any amount."""

    names: tuple[str, ...]
    used: float
    most: float | None


def limits(connection: Connection, kind: Kind) -> list[CounterLimit]:
    """Every limit of a kind, by name; of locks also those that jobs have used without one."""
    pattern = kind.counter(["%"] * kind.names)
    rows = connection.execute(_LIST, {"pattern": pattern, "unlimited": kind.unnamed is not None})
    return [CounterLimit(kind.named(row.name), row.used, row.most) for row in rows]


def set_limit(
    connection: Connection, kind: Kind, names: Sequence[str], most: float | None, *, actor: str, reason: str = ""
) -> None:
    """Limit what has these names; None = any amount. What is in use above the limit stays. Raises BadInput."""
    for name in names:
        check_name("name", name)
    if most is not None and not 0 <= most <= MAX_COST:
        raise BadInput("limit", f"must be between 0 and {MAX_COST:g}")
    _write(connection, kind.counter(names), most, "limit.set", actor=actor, reason=reason)


def remove_limit(connection: Connection, kind: Kind, names: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Limit it no more than what nobody has set a limit for. Raises NotFound if nobody has."""
    counter = kind.counter(names)
    held = connection.execute(_HELD, {"name": counter}).one_or_none()
    if held is None or held.most == kind.unnamed:
        raise NotFound(f"{kind.noun}: '{escaped('/'.join(names), 127)}' has no limit")
    _write(connection, counter, kind.unnamed, "limit.rm", actor=actor, reason=reason)


def _write(connection: Connection, counter: str, most: float | None, action: str, *, actor: str, reason: str) -> None:
    counters.limit(connection, counter, most)
    audit.write(connection, action, actor=actor, subject=counter, details={"most": most, "reason": reason})
    wake(connection, "jobs")
