"""What an error of the database means: a lost conflict, an outage, or a server that has run out of something.

Conflicts and outages are repeated, each within a budget of its own (`schema/postgres/engine.py`). What the server has
run out of is told to the caller, who may come again later.
"""

import psycopg
from leasehold.wire import escaped

#: Serialization failure, deadlock, lock timeout, a prepared statement that the session has lost: the transaction was
#: rolled back and may be repeated at once.
CONFLICTS = frozenset({"40001", "40P01", "55P03", "26000"})
#: A table has other columns than when a statement was prepared, as the file of the server's that says so tells. The
#: session prepares it anew.
REFUSED, KEPT_PLANS = "0A000", "plancache.c"
#: The server takes no writes: it is a standby, or an operator has set it so. Another server may be the primary now.
READ_ONLY = "25006"
#: Too many connections; the server stops or starts; it has ended an idle session, or a transaction that took too long.
#: Connection errors have codes of class 08 and are not listed.
OUTAGES = frozenset({"53300", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", READ_ONLY})
#: What the server has run out of, by SQLSTATE. To repeat such a transaction at once would make it worse.
EXHAUSTED = {
    "53000": "resources",
    "53100": "disk space",
    "53200": "memory",
}
#: A limit of the server. That the queue of notifications is full, because some session on the server listens and reads
#: nothing, is told apart from others by the server's file that says so.
LIMIT_EXCEEDED, NOTIFICATIONS = "54000", "async.c"
#: What hinders a move that others need not wait for: a row that somebody holds, or one that is wrong.
HINDRANCES = (psycopg.errors.LockNotAvailable, psycopg.DataError, psycopg.IntegrityError)


def is_conflict(error: BaseException) -> bool:
    """True if the transaction lost against another one and may be repeated at once."""
    if not isinstance(error, psycopg.Error):
        return False
    return error.sqlstate in CONFLICTS or (error.sqlstate == REFUSED and error.diag.source_file == KEPT_PLANS)


def is_outage(error: BaseException) -> bool:
    """True if the server could not be reached, or the process's pool had no free connection in time."""
    if not isinstance(error, psycopg.Error):
        return False
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError)
    return code.startswith("08") or code in OUTAGES


def describe_outage(error: BaseException) -> str:
    """Say in one clause why `error`, which `is_outage`, is one."""
    read_only = isinstance(error, psycopg.Error) and error.sqlstate == READ_ONLY
    return "the database is read-only" if read_only else "the database cannot be reached"


def said_of_outage(error: BaseException | None) -> str | None:
    """Return what the server or the system said of an outage, in a line without values of rows; None of others."""
    if error is None or not is_outage(error):
        return None
    return escaped(next(iter(str(error).strip().splitlines()), type(error).__name__), 300)


def cannot_notify(error: BaseException) -> bool:
    """True if the transaction was not committed because its notifications have no room."""
    if not isinstance(error, psycopg.Error) or error.sqlstate != LIMIT_EXCEEDED:
        return False
    return error.diag.source_file == NOTIFICATIONS


def find_exhausted(error: BaseException) -> str | None:
    """Return what the server has run out of, such as disk space; None if that is not the error."""
    return EXHAUSTED.get(error.sqlstate or "") if isinstance(error, psycopg.Error) else None
