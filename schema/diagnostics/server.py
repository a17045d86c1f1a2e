"""Checks of `db doctor` on what the server as a whole has: collations, notifications, and compilation of statements.

Also whether it takes writes, how much room its disk has, and who holds others up by a lock.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from schema import sql
from schema.diagnostics.checks import NAMED, Check, Verdict, gravest, printable_name, printable_session
from schema.postgres.connection import Connection
from schema.postgres.engine import SEARCH_PATH
from schema.postgres.statements import Statement
from schema.readable import duration, plural
from schema.sql import SCHEMA

#: Seconds that a transaction for whose locks others wait may be open, from which the verdict is warning, and bad.
HELD_SECONDS = (5.0, 60.0)
#: Parts of the queue of notifications in use from which the verdict is bad: at 1 the server refuses each commit that
#: notifies.
FILLED = 0.5
#: MB left on the server's disk below which the verdict is warning, and bad: the log alone takes 16 MB at a time.
ROOM_MB = (1024, 64)

_FUNCTIONS = Statement("""
SELECT format('%s.%s(%s)', pronamespace::regnamespace, proname, oidvectortypes(proargtypes)) AS name,
    coalesce(proconfig, '{}') AS settings FROM pg_proc
WHERE pronamespace = CAST(:schema AS regnamespace) AND proname = ANY (CAST(:names AS text[])) ORDER BY 1
""")
_COMPILES = Statement("SELECT pg_jit_available() AS jit")
# The function also takes away what every listener has read, which a server that is full does not do by itself.
_NOTIFICATIONS = Statement("""
SELECT pg_notification_queue_usage() AS used, a.pid, a.datname, a.application_name,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float AS seconds
FROM (SELECT) one LEFT JOIN LATERAL (
    SELECT * FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
    ORDER BY xact_start LIMIT 1) a ON true
""")
# A session that waits itself is not the cause. Of a prepared transaction the server tells the process id 0.
_LOCKS = Statement("""
WITH RECURSIVE waiting AS MATERIALIZED (
    SELECT w.pid, holder FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) holder
    WHERE w.datname = current_database() AND w.wait_event_type = 'Lock'),
line AS (SELECT pid, holder FROM waiting UNION SELECT l.pid, w.holder FROM line l JOIN waiting w ON w.pid = l.holder)
SELECT l.holder AS pid, coalesce(a.application_name, '') AS name, a.usename::text AS owner, a.state,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float AS seconds, count(*)::integer AS waiting
FROM line l LEFT JOIN pg_stat_activity a ON a.pid = l.holder
WHERE l.holder NOT IN (SELECT pid FROM waiting)
GROUP BY l.holder, a.application_name, a.usename, a.state, a.xact_start
ORDER BY waiting DESC, seconds DESC NULLS LAST
""")
_WRITES = Statement("""
SELECT pg_is_in_recovery() AS standby, current_setting('default_transaction_read_only')::boolean AS read_only
""")
# Only the private server has this name. A role that may not see where its files are gets no row.
_DISK = Statement("""
SELECT (SELECT setting FROM pg_settings WHERE name = 'data_directory') AS directory
WHERE inet_server_addr() IS NULL AND current_setting('cluster_name') = 'leasehold'
""")
_COLLATION = Statement("""
SELECT datname AS name, datcollversion AS made, pg_database_collation_actual_version(oid) AS library
FROM pg_database WHERE datname = current_database()
""")


@dataclass(frozen=True)
class Listener:
    """The session with the oldest open transaction, which may be what keeps notifications in their queue."""

    pid: int
    database: str
    application: str
    seconds: float


@dataclass(frozen=True)
class LockHolder:
    """A session for whose locks `waiting` others wait; pid 0 is a prepared transaction.

    seconds: for how long its transaction is open, None if this role may not see it.
    """

    pid: int
    name: str
    owner: str | None
    state: str | None
    seconds: float | None
    waiting: int


def check_locks(connection: Connection) -> Check:
    """Check who holds locks for which others wait at this moment: somebody else's open transaction, most of all."""
    return judge_locks([LockHolder(**row._asdict()) for row in connection.execute(_LOCKS)])


def judge_locks(holders: Sequence[LockHolder]) -> Check:
    """Judge the holders by how long they are at it: the transactions of the pool's own processes are short."""
    if not holders:
        return Check("locks", Verdict.OK, "nobody waits for the lock of another session", None, {"waiting": 0})
    figures = {"waiting": sum(each.waiting for each in holders), "holders": [vars(each) for each in holders[:NAMED]]}
    verdict = gravest(map(_judge_lock_holder, holders))
    named = [each for each in holders if _judge_lock_holder(each) is verdict][:NAMED]
    found = "; ".join(map(_describe_lock_holder, named))
    remedy = None if verdict is Verdict.OK else "; ".join(map(_end_of_lock_holder, named))
    return Check("locks", verdict, found, remedy, figures)


def _judge_lock_holder(holder: LockHolder) -> Verdict:
    if holder.seconds is None:
        return Verdict.WARNING
    warning, bad = HELD_SECONDS
    return Verdict.BAD if holder.seconds >= bad else Verdict.WARNING if holder.seconds >= warning else Verdict.OK


def _describe_lock_holder(holder: LockHolder) -> str:
    waits = f"{plural(holder.waiting, 'session')} {'waits' if holder.waiting == 1 else 'wait'} for a lock of "
    if holder.pid == 0:
        return f"{waits}a prepared transaction"
    who = printable_session(holder.pid, holder.name, holder.owner, holder.state)
    since = "of unknown age" if holder.seconds is None else f"open for {duration(holder.seconds)}"
    return f"{waits}{who}, whose transaction is {since}"


def _end_of_lock_holder(holder: LockHolder) -> str:
    if holder.pid == 0:
        return "end it as the check snapshots says, which names prepared transactions"
    return f"end session {holder.pid}: SELECT pg_terminate_backend({holder.pid})"


def check_callers(connection: Connection) -> Check:
    """Check that functions which callers call fix the search path, and that the server compiles none of them."""
    rows = connection.execute(_FUNCTIONS, {"schema": SCHEMA, "names": list(sql.OF_CALLERS)}).all()
    compiles = bool(connection.execute(_COMPILES).scalar_one())
    return judge_callers({row.name: row.settings for row in rows}, compiles=compiles)


def judge_callers(found: Mapping[str, Sequence[str]], *, compiles: bool) -> Check:
    """Judge the settings of these functions. compiles: the server has what it needs to compile statements."""
    wanted = {"search_path": f"search_path={SEARCH_PATH}", "jit": "jit=off"}
    missing = [
        (function, name)
        for function, settings in found.items()
        for name, setting in wanted.items()
        if setting not in [each.replace(", ", ",") for each in settings]
    ]
    figures = {"jit_available": compiles}
    if missing:
        values = {"search_path": SEARCH_PATH, "jit": "off"}
        told = ", ".join(f"{name} of {function}" for function, name in missing)
        remedy = "; ".join(f"ALTER FUNCTION {function} SET {name} = {values[name]}" for function, name in missing)
        return Check("callers", Verdict.BAD, f"callers' settings are in force instead of ours: {told}", remedy, figures)
    told = "leasehold.submit and submit_graph read Leasehold's tables only, and run without JIT compilation"
    return Check("callers", Verdict.OK, told, None, figures)


def check_notifications(connection: Connection) -> Check:
    """Check that the queue of notifications has room. Asking also takes out of it what every session has read."""
    row = connection.execute(_NOTIFICATIONS).one()
    oldest = None if row.pid is None else Listener(row.pid, row.datname, row.application_name, row.seconds)
    return judge_notifications(row.used, oldest)


def judge_notifications(used: float, oldest: Listener | None) -> Check:
    """Judge a queue of which the part `used` is in use, 0 to 1."""
    figures = {"used": used}
    found = f"{used:.0%} of the queue of notifications is in use"
    if used <= FILLED:
        return Check("notifications", Verdict.OK, found, None, figures)
    found += "; when it is full, wake-ups are not sent"
    if oldest is None:
        remedy = "end the session that listens and has not read for long; it is not visible to this role"
    else:
        found += (
            f"; the oldest transaction is of session {oldest.pid} ({printable_name(oldest.application)}, database"
            f" {printable_name(oldest.database)}), {oldest.seconds:.0f} s old"
        )
        remedy = f"end it, if it listens: SELECT pg_terminate_backend({oldest.pid})"
    return Check("notifications", Verdict.BAD, found, remedy, figures)


def check_writes(connection: Connection) -> Check:
    """Check that transactions of this role may write."""
    row = connection.execute(_WRITES).one()
    return judge_writes(standby=row.standby, read_only=row.read_only)


def judge_writes(*, standby: bool, read_only: bool) -> Check:
    """Judge a server that is a standby, and one whose transactions begin as read-only."""
    figures = {"standby": standby, "read_only": read_only}
    if standby:
        remedy = "let database.url lead to the primary, or promote this server"
        return Check("writes", Verdict.BAD, "the server is a standby and takes no writes", remedy, figures)
    if read_only:
        remedy = "set default_transaction_read_only to off where it is on: for the server, the database or the role"
        return Check(
            "writes", Verdict.BAD, "transactions are read-only: nothing starts and nothing ends", remedy, figures
        )
    return Check("writes", Verdict.OK, "the server takes writes", None, figures)


def check_disk(connection: Connection) -> Check:
    """Check how much room the private server's disk has left; that of any other server is not seen from here."""
    directory: str | None = connection.execute(_DISK).scalar_one_or_none()
    return judge_disk(directory, left_mb=None if directory is None else room_mb(Path(directory)))


def room_mb(directory: Path) -> int | None:
    """Return how many MB the server can still write below its directory; None if that is not seen here."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // 2**20


def judge_disk(directory: str | None, *, left_mb: int | None) -> Check:
    """Judge the room that is left where the server's directory is; None = it is not known."""
    figures = {"directory": directory, "left_mb": left_mb}
    if directory is None or left_mb is None:
        found = "how much room the server's disk has left is not seen from here"
        remedy = "look on its host; once it is full, commands say: the database has no disk space left"
        return Check("disk", Verdict.UNKNOWN, found, remedy, figures)
    found = f"{left_mb:,} MB are left for the server's directory, {printable_name(directory)}"
    warning, bad = ROOM_MB
    if left_mb >= warning:
        return Check("disk", Verdict.OK, found, None, figures)
    remedy = "make room there; until then, submits and bots are refused once it is full, and go on by themselves after"
    return Check("disk", Verdict.BAD if left_mb < bad else Verdict.WARNING, found, remedy, figures)


def check_collation(connection: Connection) -> Check:
    """Check that the order of text in the indexes is that of the server's library."""
    row = connection.execute(_COLLATION).one()
    return judge_collation(row.name, made=row.made, library=row.library)


def judge_collation(name: str, *, made: str | None, library: str | None) -> Check:
    """Judge the version of the library with which the database was made, and that of now; null if it has none."""
    figures = {"made": made, "library": library}
    if made is None or made == library:
        return Check("collation", Verdict.OK, "indexes of text are in the library's order", None, figures)
    found = (
        f"the database was made with version {printable_name(made)} of the collation library, and the server has"
        f" {printable_name(library)}: indexes of text may be in the wrong order, and keys may be taken twice"
    )
    database = '"' + printable_name(name).replace('"', '""') + '"'
    remedy = f"REINDEX DATABASE {database}; ALTER DATABASE {database} REFRESH COLLATION VERSION"
    return Check("collation", Verdict.BAD, found, remedy, figures)
