"""Rows of quotas, counters and rates that somebody holds: what depends on them is left, and everything else goes on.

A grant takes of these rows as its last act. A transaction that somebody has left open on one of them, such as a change
by hand, would make every grant fail that has one job among its jobs that needs the row. In the same way one job that
needs a held or wrong row would make a move of many jobs fail.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import psycopg
import structlog

from schema.postgres.connection import Connection
from schema.postgres.failures import HINDRANCES
from schema.postgres.statements import Statement

T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger()

#: The quota of an instance in a cohort.
Quota = tuple[int, int | str]

#: Seconds for which a move waits for a lock when one could not be had lately; and a move that was hindered before, or
#: that follows another one which has waited in vain in the same transaction.
_SHORT, _BRIEF = 0.1, 0.01
#: The first of them for the rest of a transaction.
SHORT_WAIT = Statement("SELECT set_config('lock_timeout', '100ms', true)")
_QUOTAS = Statement("""
WITH free AS MATERIALIZED (SELECT cohort, instance FROM quotas FOR NO KEY UPDATE SKIP LOCKED)
SELECT DISTINCT instance FROM quotas q
WHERE NOT EXISTS (SELECT FROM free f WHERE f.cohort = q.cohort AND f.instance = q.instance)
""")
# Resources of bots are left out: who takes of them has locked the bot, and there may be tens of thousands.
_NAMES = Statement("""
WITH free AS MATERIALIZED (SELECT name FROM counters WHERE name NOT LIKE 'bot:%' FOR NO KEY UPDATE SKIP LOCKED),
    free_rates AS MATERIALIZED (SELECT name FROM rate_buckets FOR NO KEY UPDATE SKIP LOCKED)
SELECT name FROM counters WHERE name NOT LIKE 'bot:%' AND name NOT IN (SELECT name FROM free)
UNION ALL SELECT name FROM rate_buckets WHERE name NOT IN (SELECT name FROM free_rates)
""")
_OTHERS = Statement("""
SELECT id FROM instances WHERE id <> ALL (CAST(:held AS integer[]))
    AND (CAST(:instances AS integer[]) IS NULL OR id = ANY (CAST(:instances AS integer[])))
""")


@dataclass(frozen=True)
class HeldRows:
    """instances: their quotas are held, or some of them. names: those of held counters and rates."""

    instances: frozenset[int]
    names: frozenset[str]


@dataclass
class Trials:
    """Moves of one transaction that somebody who holds a row, or a wrong row, may hinder.

    Such moves may take locks out of their order. They wait so shortly that nobody waits long in a circle.

    held: the quotas that could not be had. has_waited: a lock could not be had. A quota is given by its cohort and
    instance; callers choose whether by id or by name.
    """

    connection: Connection
    held: set[Quota] = field(default_factory=set)
    has_waited: bool = False

    def hindrance(
        self, move: Callable[[], object], *, quota: Quota | None = None, briefly: bool = False
    ) -> psycopg.Error | None:
        """Make a move if it can be made now. Return what hinders it, None if it is made.

        A move that is made stays made, so that the next one is judged after it: moves that can be made one by one may
        not be possible together. Who only wants to know makes them in a savepoint, and undoes it.

        quota: the only one that the move needs. briefly: wait for a lock for a hundredth of a second, not for a tenth.
        Who has waited in vain once waits briefly from then on, and not at all for a quota that could not be had.
        """
        if quota in self.held:
            return psycopg.errors.LockNotAvailable()
        try:
            wait = _BRIEF if briefly or self.has_waited else _SHORT
            with self.connection.savepoint(), self.connection.waiting_for_locks(wait):
                move()
        except HINDRANCES as error:
            if isinstance(error, psycopg.errors.LockNotAvailable):
                self.has_waited = True
                # The first line of the context names the table of the row that is held, in any language. A row of
                # another table belongs to one lease or to few, so that others of the instance may end.
                if quota is not None and "quotas" in (error.diag.context or "").partition("\n")[0]:
                    self.held.add(quota)
            return error
        return None


#: The most parts that `move_rows` tries. One that waits for a lock gives up after a hundredth of a second, the first
#: after a tenth, so that none waits in a deadlock. And the most rows that the log names.
MOST_PARTS, SHOWN = 100, 10


def move_rows(connection: Connection, rows: Sequence[T], move: Callable[[Sequence[T]], R], *, tries: bool) -> list[R]:
    """Move these rows, which the caller has locked, all at once; return what `move` returns, or nothing without rows.

    tries: some may not be movable now. If not all are, both halves are moved, then the halves of a half that could not
    be, down to single rows; so a few rows that cannot be moved keep hardly any others waiting. What has been moved
    stays, because rows may be movable one by one and not together. What `MOST_PARTS` leave is left out. Returns what
    `move` returns for each part.
    """
    if not tries:
        return [move(rows)] if rows else []
    parts, moved, results = deque([range(len(rows))] if rows else []), set[int](), list[R]()
    wait, reason = _SHORT, ""
    for _ in range(MOST_PARTS):
        if not parts:
            break
        part = parts.popleft()
        try:
            with connection.savepoint(), connection.waiting_for_locks(wait):
                result = move([rows[nth] for nth in part])
        except HINDRANCES as error:
            reason = type(error).__name__
            if isinstance(error, psycopg.errors.LockNotAvailable):
                wait = _BRIEF
            if len(part) > 1:
                middle = len(part) // 2
                parts += part[:middle], part[middle:]
        else:
            moved.update(part)
            results.append(result)
    if left := [row for nth, row in enumerate(rows) if nth not in moved]:
        told = {"rows": len(left), "first": left[:SHOWN], "error": reason}
        connection.on_commit(
            partial(log.warning, "rows are left that need another one, which is held or wrong", **told)
        )
    return results


def held_rows(connection: Connection) -> HeldRows:
    """Return the rows that others hold now. All others of these tables are locked for a moment."""
    with connection.savepoint() as locked:
        instances = frozenset(connection.execute(_QUOTAS).scalars())
        names = frozenset(connection.execute(_NAMES).scalars())
        locked.rollback()
    return HeldRows(instances, names)


def other_instances(
    connection: Connection, held: HeldRows | None, instances: Sequence[int] | None
) -> Sequence[int] | None:
    """Return those of the instances whose quotas nobody holds. instances: None = all."""
    if held is None or not held.instances:
        return instances
    values = {"held": list(held.instances), "instances": None if instances is None else list(instances)}
    return [*connection.execute(_OTHERS, values).scalars()]
