"""The members of the fleet: the healthy bots with what says which jobs they may have, and what has changed of them.

A reader remembers the members and asks from time to time for those that have changed. Each change is stored with the
number of its transaction, and each read returns its snapshot. The next read finds what that snapshot could not see,
however long the transaction was open that made it. What it cannot find is that a bot's row was deleted: such a bot has
been no member for long, and a reader that has not asked in the meantime forgets it when it reads all bots again. Nor
does it find what follows a crash of the server, after which the numbers of lost transactions are used again.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_version
from schema.postgres.statements import Statement
from schema.predicates import HEALTHY


class Service(NamedTuple):
    """A cohort, and the instances that a bot serves in it: every one (None, None), this one, or those of this pool."""

    cohort: int
    instance: int | None
    pool: str | None


class Member(NamedTuple):
    """What of a healthy bot says which jobs it may have."""

    service: Service
    kind: int


@dataclass(frozen=True)
class Changes:
    """Bots by their ids, each with what it is now, None for one that is no healthy bot any more.

    is_complete: these are all healthy bots, and others are none. snapshot: what to pass to the next read.
    """

    bots: dict[int, Member | None]
    is_complete: bool
    snapshot: str


_NUMBER = "CAST(CAST(pg_snapshot_{}({}) AS text) AS bigint)"
_COLUMNS = "b.cohort, b.instance, b.pool, b.kind"
ALL = Statement(f"""
SELECT CAST(s.now AS text), b.id, true AS healthy, {_COLUMNS} FROM (SELECT pg_current_snapshot() AS now) s
LEFT JOIN LATERAL (SELECT * FROM bots b WHERE b.status <> 'gone' AND {HEALTHY.of(bot="b")} OFFSET 0) b ON true
""")
# A number that no transaction has had yet comes from the database that this one was restored from.
CHANGED = Statement(f"""
SELECT CAST(s.now AS text), c.bot_id, coalesce({HEALTHY.of(bot="b")}, false) AS healthy, {_COLUMNS}
FROM (SELECT CAST(:seen AS pg_snapshot) AS seen, pg_current_snapshot() AS now OFFSET 0) s
LEFT JOIN LATERAL (
    SELECT bot_id FROM bot_changes
    WHERE transaction >= {_NUMBER.format("xmin", "s.seen")} AND transaction < {_NUMBER.format("xmax", "s.now")}
        AND NOT pg_visible_in_snapshot(CAST(CAST(transaction AS text) AS xid8), s.seen)
    OFFSET 0) c ON true
LEFT JOIN LATERAL {newest_version("bots", "id", "c.bot_id")} b ON true
""")


def read_changes(connection: Connection, seen: str | None) -> Changes:
    """The bots that have changed since an earlier read returned this snapshot; None reads all bots."""
    rows = connection.execute(ALL if seen is None else CHANGED, {} if seen is None else {"seen": seen}).all()
    now = rows[0][0]
    if seen is not None and _next(now) < _next(seen):
        # The numbers go backwards only if this is another database.
        return read_changes(connection, None)
    services: dict[tuple[int, int | None, str | None], Service] = {}
    bots: dict[int, Member | None] = {}
    for _, bot_id, healthy, cohort, instance, pool, kind in rows:
        if healthy and bot_id is not None:
            key = cohort, instance, pool
            bots[bot_id] = Member(services.setdefault(key, Service(*key)), kind)
        elif bot_id is not None:
            bots[bot_id] = None
    return Changes(bots, seen is None, now)


def _next(snapshot: str) -> int:
    """The number of the first transaction that had not begun yet."""
    return int(snapshot.split(":")[1])
