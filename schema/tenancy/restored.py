"""A database that has come to another server: its fences continue above all that were granted before.

A dump brings back the fences of its moment, and a server made by `initdb` or pg_upgrade counts timelines from 1. The
server of the dump has granted further fences since, and so may have another one, into which the same dump was restored
before. Neither can be read from a dump, so what the fences begin with is taken from the clock: the seconds since 2020
times 2^21. This suffices:

- A timeline has 2^32 fences, the clock's step in 34 minutes. So the fences of a server are behind the clock unless it
  has failed over more often than that on average: since 2020, or since it was restored itself.
- Within a timeline a job would have to be granted two million times a second to keep up with the clock.
- Fences are below 2^53 until the year 2156.

No job is written: each grant takes `fences_from + first_fence()` if the job's own next fence is lower. A lease that
was live in the dump keeps its fence: its bot was told of this grant. Where nothing was restored, fences only rise.
"""

from dataclasses import asdict, dataclass

from leasehold.errors import NotReady

from schema import audit
from schema.postgres import migrate
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.tenancy import roles

#: Fences for each second since 2020.
FENCES_PER_SECOND = 2**21

# The row may be missing in what somebody has restored in parts.
_ADD = Statement("""
INSERT INTO server_identity (system_identifier, table_oid, at)
VALUES (NULL, 0, 'epoch') ON CONFLICT DO NOTHING
""")
_CLOCK = Statement("""
SELECT at > clock_timestamp() AS is_behind, at, clock_timestamp() AS now FROM server_identity FOR UPDATE
""")
# `first_fence() - 1` is what the timeline adds. It is taken off, or a server that has been promoted before would be
# ahead of the clock.
_MOVE = Statement(f"""
UPDATE server_identity SET system_identifier = server_identifier(), table_oid = CAST(tableoid AS bigint),
    at = clock_timestamp(),
    fences_from = greatest(fences_from, 1 - first_fence() + CAST(
        extract(epoch FROM clock_timestamp() - timestamptz '2020-01-01 00:00Z') * {FENCES_PER_SECOND} AS bigint))
""")
_FOUND = Statement("""
SELECT CAST(system_identifier AS text), fences_from + first_fence() AS first_fence FROM server_identity
""")


@dataclass(frozen=True)
class Continued:
    """What `continue_fences` did.

    moved: the database had come to another server, or from a dump. system_identifier: of the server, None if this role
    may not read it. first_fence: the least fence of grants from now on.
    """

    moved: bool
    system_identifier: str | None
    first_fence: int


def continue_fences(connection: Connection, *, actor: str) -> Continued:
    """Let fences continue above all that were granted before, and take this server for the home of the database.

    For the owner of the schema, and harmless when repeated. Raises Forbidden for others. Raises NotReady if the schema
    is not of the needed version, or if the clock of the server is behind the time at which this was last done.
    """
    version = migrate.read(connection)
    if version.current != version.needed:
        migrate.must_be_ready(version)
    roles.require_owner(connection, "do this")
    connection.execute(_ADD)
    time = connection.execute(_CLOCK).one()
    if time.is_behind:
        raise NotReady(
            f"the clock of the server says {time.now:%Y-%m-%d %H:%M:%S%z}, but fences were set at"
            f" {time.at:%Y-%m-%d %H:%M:%S%z}; set the clock"
        )
    connection.execute(_MOVE)
    found = connection.execute(_FOUND).one()
    result = Continued(version.moved, found.system_identifier, found.first_fence)
    audit.write(connection, "db.restored", actor=actor, subject="database", details=asdict(result))
    return result
