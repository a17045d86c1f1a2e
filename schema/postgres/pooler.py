"""Poolers that give each transaction another session of the server, such as PgBouncer in transaction mode.

Through such a pooler nothing may rely on a session: neither prepared statements, of which those of different clients
share their names, nor settings made when connecting. So a session that is not our own (`Session.is_own`) prepares
nothing and sends its settings with every transaction, in the round trip that begins it.

A process that was not told of the pooler would run statements of others, so every process looks for one when it
starts. A pooler invents the process id that it tells its clients. Where that id is not the server's, transactions on
two connections show whether they share sessions. A pooler that passes the server's own id on is not found, nor one that
is put before the server later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from schema.postgres.connection import Connection
from schema.postgres.session import Message
from schema.postgres.statements import Statement

#: How often the sessions of two connections are compared. An idle pooler is found at the first time.
ROUNDS = 5

_SEEN = Statement("""
SELECT pg_backend_pid() AS pid, CAST(current_user AS text) AS role,
    jsonb_object_agg(lower(name), setting) AS settings
FROM pg_settings WHERE lower(name) = ANY (CAST(:names AS text[]))
""")
_PID = "SELECT pg_backend_pid()"


def local_settings(settings: Mapping[str, str]) -> list[str]:
    """The statements that make settings until the end of a transaction, which has begun.

    None of them takes a snapshot, so that the transaction may still choose its isolation. A `SELECT` would, and would
    cost the server twice as much.
    """
    return [f"SET LOCAL {name} = {_literal(name, value)}" for name, value in settings.items()]


def settings_alone(settings: Mapping[str, str]) -> Message:
    """A statement that makes settings for the one that is sent with it outside a transaction."""
    made = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items())
    return Message(f"SELECT {made}".encode())


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
    return Seen(connection.session.info.backend_pid == row.pid, row.role, row.settings)


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
    lost = [name for name, value in wanted.items() if _plain(name, seen.settings.get(name, "")) != _plain(name, value)]
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


def _plain(name: str, value: str) -> str:
    plain = value.replace(" ", "").replace('"', "").lower()
    # The order of day and month is for dates that are no ISO dates, of which none are sent.
    return plain.partition(",")[0] if name == "datestyle" else plain


def _literal(name: str, value: str) -> str:
    # A quoted list would be one name.
    return ", ".join(value.split(",")) if name == "search_path" else f"'{value}'"
