"""Poolers that give each transaction another session of the server, such as PgBouncer in transaction mode.

Through such a pooler nothing may rely on a session: neither prepared statements, of which those of different clients
share their names, nor settings made when connecting. A `TransactionConnection` prepares nothing and sends its settings
with every transaction, in the round trip that begins it.

A process that was not told of the pooler would run statements of others, so every process looks for one when it
starts. A pooler invents the process id that it tells its clients. Where that id is not the server's, transactions on
two connections show whether they share sessions. A pooler that passes the server's own id on is not found, nor one that
is put before the server later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq
from sqlalchemy import Connection, text

from schema.postgres.waits import WatchedConnection

#: How often the sessions of two connections are compared. An idle pooler is found at the first time.
ROUNDS = 5

_SEEN = text("""
SELECT pg_backend_pid() AS pid, CAST(current_user AS text) AS role,
    jsonb_object_agg(lower(name), setting) AS settings
FROM pg_settings WHERE lower(name) = ANY (CAST(:names AS text[]))
""")
_PID = "SELECT pg_backend_pid()"


class TransactionConnection(WatchedConnection):
    """A connection through a transaction pooler. It is made in autocommit mode.

    begin_with: the statements that have to begin each transaction.
    settings: the statement that makes the same settings for one that is executed alone.
    """

    begin_with: str
    settings: bytes

    def execute_alone(self, statement: bytes, values: Sequence[bytes | None]) -> pq.abc.PGresult:
        """Execute a statement with parameters $1, $2 and so on after the settings, in one round trip; its result.

        Both are one transaction, because statements of a pipeline are one until it is synchronised. Raises
        psycopg.Error.
        """
        try:
            with self.pipeline():
                self.execute(self.settings)
                cursor = psycopg.RawCursor(self)
                cursor.execute(statement, [None if value is None else value.decode() for value in values])
        except psycopg.OperationalError as error:
            # The driver cannot leave the pipeline if only the commit at its end has failed.
            if isinstance(refused := error.__context__, psycopg.Error) and refused.sqlstate is not None:
                self.pgconn.finish()
                raise refused from None
            raise
        result = cursor.pgresult
        assert result is not None
        return result


def begin_with(settings: Mapping[str, str]) -> str:
    """The statements, sent together, that begin a transaction with these settings.

    None of them takes a snapshot, so that the transaction may still choose its isolation. A `SELECT` would, and would
    cost the server twice as much.
    """
    made = (f"SET LOCAL {name} = {_literal(name, value)}" for name, value in settings.items())
    return "; ".join(["BEGIN ISOLATION LEVEL READ COMMITTED", *made])


def local_settings(settings: Mapping[str, str]) -> bytes:
    """One statement that sets the settings until the end of the transaction."""
    return b"SELECT " + b", ".join(
        f"set_config('{name}', '{value}', true)".encode() for name, value in settings.items()
    )


#: Goes behind the settings of a statement that is to send no notification.
SILENTLY = b", set_config('leasehold.wake', 'off', true)"


@dataclass(frozen=True)
class Problem:
    """Why the way to the server may not be used, and what to do; one sentence each, without a full stop."""

    found: str
    remedy: str


SHARED = Problem(
    "database.url leads through a pooler that gives each transaction another session, in which statements of other "
    "clients are executed",
    'set database.pooler = "transaction" and database.listen_url = a URL of the server itself, or let database.url '
    "lead to the server itself or to a pooler in session mode",
)
REFUSED = Problem(
    "a pooler refuses the settings of the connection",
    'set database.pooler = "transaction" and database.listen_url = a URL of the server itself',
)
LISTEN_SHARED = Problem(
    "database.listen_url leads through a pooler that gives each transaction another session, and drops notifications",
    "set database.listen_url to a URL of the server itself",
)


@dataclass(frozen=True)
class Seen:
    """What a transaction sees of its session. `is_direct`: the server's process id is the one told when connecting."""

    is_direct: bool
    role: str
    settings: Mapping[str, str]


def look(connection: Connection, names: Sequence[str]) -> Seen:
    """Read the session of the transaction, with the settings of these names."""
    row = connection.execute(_SEEN, {"names": list(names)}).one()
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return Seen(driver.info.backend_pid == row.pid, row.role, row.settings)


def is_shared(connect: Callable[[], "psycopg.Connection[Any]"]) -> bool:
    """True if two connections that `connect` makes, in autocommit mode, are seen to share sessions of the server.

    An idle pooler gives the session that was used last, so that the second connection receives the one of the first, or
    it goes through its sessions in turn, so that the first connection receives two. A busy one does either by chance.
    """
    with connect() as first, connect() as second:
        if _pid(first) == first.info.backend_pid:
            return False
        of_first, of_second = set[int](), set[int]()
        for _ in range(ROUNDS):
            of_first |= {_pid(first), _pid(first)}
            of_second.add(_pid(second))
            if len(of_first) > 1 or len(of_second) > 1 or of_first & of_second:
                return True
    return False


def is_refusal(error: psycopg.OperationalError) -> bool:
    """True if a pooler refused the connection because of its settings."""
    return "unsupported startup parameter" in str(error)


def find_lost(seen: Seen, wanted: Mapping[str, str]) -> Problem | None:
    """The settings that are not in effect as wanted, with the statements that store them for the role."""
    lost = [name for name, value in wanted.items() if _plain(seen.settings.get(name, "")) != _plain(value)]
    if not lost:
        return None
    role = '"' + seen.role.replace('"', '""') + '"'
    statements = "; ".join(f"ALTER ROLE {role} SET {name} = {_literal(name, wanted[name])}" for name in lost)
    return Problem(
        f"settings of the connection are not in effect, as behind a pooler that drops them: {', '.join(lost)}",
        f"run: {statements}; then let the pooler connect again (in PgBouncer: RECONNECT)",
    )


def _pid(connection: "psycopg.Connection[Any]") -> int:
    row = connection.execute(_PID).fetchone()
    assert row is not None
    return int(row[0])


def _plain(value: str) -> str:
    return value.replace(" ", "").replace('"', "").lower()


def _literal(name: str, value: str) -> str:
    # A quoted list would be one name.
    return ", ".join(value.split(",")) if name == "search_path" else f"'{value}'"
