"""The checks of `db doctor`. For each a `check_…` reads the database and a pure `judge_…` decides the verdict.

One module because each check is short, and all share the verdicts and the printing of names and durations.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import psycopg
from leasehold.wire import escaped
from psycopg import sql

from schema import clock
from schema.policy.schedules import FAILING, HELD_UP
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.notify import PREFIX
from schema.postgres.statements import Statement
from schema.readable import duration
from schema.sql import SCHEMA

#: The most characters shown of a name that comes from the server.
MAX_NAME_SHOWN = 80


class Verdict(StrEnum):
    """The result of a check, least grave first. `unknown`: the check could not run."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    found: one sentence. remedy: what to do; None if nothing needs doing. figures: the numbers behind them, with their
    units in the names.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None
    figures: Mapping[str, object] = field(default_factory=dict)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest of the verdicts, ok if there are none."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.OK)


def printable_name(name: object) -> str:
    """A name from the server, shortened and escaped for printing."""
    return escaped(str(name), MAX_NAME_SHOWN)


def printable_session(pid: int | None, name: str, owner: str | None, state: str | None) -> str:
    """A session for printing. owner: None of a process of the server. state: None if this role may not see it."""
    told = [printable_name(name) or "unnamed", owner and f"user {printable_name(owner)}", state]
    return f"session {pid} ({', '.join(each for each in told if each)})"


def quoted(text: str) -> str:
    """The text as an SQL literal, for the statements of a remedy."""
    return "'" + printable_name(text).replace("'", "''") + "'"


# Settings of the server: durability, number of connections, memory, timeline.


#: Parts of the allowed connections in use from which the verdict is warning, and bad.
CROWDED, FULL = 0.8, 0.95
#: Seconds for which a session of this role may idle inside a transaction. Leasehold's own processes are cut off sooner.
IDLE = 10.0
#: The most sessions named in an answer.
NAMED = 3
#: PostgreSQL's defaults of shared_buffers and of work_mem, bytes.
SMALL_BUFFERS, SMALL_WORK = 128 * 1024**2, 4 * 1024**2

#: The risk while a setting is off.
LOSSES: Mapping[str, str] = {
    "fsync": "the whole database may be damaged when the host loses power",
    "full_page_writes": "pages may be damaged when the host loses power while they are written",
    "synchronous_commit": "a submit that was acknowledged may be lost when the server crashes",
}
_RESET: Mapping[str, str] = {
    "fsync": "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf()",
    "full_page_writes": "ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf()",
    "synchronous_commit": "set synchronous_commit = on where it was switched off: ALTER SYSTEM, DATABASE or ROLE",
}

_DURABILITY = Statement("SELECT name, setting FROM pg_settings WHERE name = ANY (CAST(:names AS text[])) ORDER BY name")
# A background process, such as the launcher of logical replication, may have the name of a role too.
_CONNECTIONS = Statement("""
SELECT current_setting('max_connections')::integer AS most,
    current_setting('superuser_reserved_connections')::integer
        + coalesce(current_setting('reserved_connections', true)::integer, 0) AS reserved,
    (SELECT sum(numbackends)::integer FROM pg_stat_database WHERE datid <> 0) AS in_use,
    (SELECT count(*) FROM pg_stat_activity
     WHERE usename = current_user AND backend_type = 'client backend' AND pid <> pg_backend_pid()) AS ours
""")
_IDLE = Statement("""
SELECT pid, coalesce(application_name, '') AS name,
    extract(epoch FROM clock_timestamp() - state_change)::float AS seconds
FROM pg_stat_activity
WHERE usename = current_user AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()
ORDER BY state_change
""")
_MEMORY = Statement(f"""
SELECT pg_size_bytes(current_setting('shared_buffers')) AS buffers, pg_size_bytes(current_setting('work_mem')) AS work,
    (SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
     WHERE relnamespace = to_regnamespace('{SCHEMA}') AND relkind = 'r') AS size
""")
_WAL_FUNCTIONS = Statement("""
SELECT pg_is_in_recovery() AS is_standby, CAST(current_user AS text) AS role,
    has_function_privilege('pg_catalog.pg_walfile_name(pg_lsn)', 'EXECUTE')
        AND has_function_privilege('pg_catalog.pg_current_wal_insert_lsn()', 'EXECUTE') AS is_allowed,
    has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE') AS is_identified
""")
# As schema/sql/functions/first_fence.sql reads it.
_TIMELINE = Statement("SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)")


@dataclass(frozen=True)
class Connections:
    """Connections that the server allows, reserves for superusers and has; `ours` are the others of this role."""

    most: int
    reserved: int
    in_use: int
    ours: int


@dataclass(frozen=True)
class Idler:
    """A session of this role that has idled inside a transaction for `seconds`."""

    pid: int
    name: str
    seconds: float


def check_durability(connection: Connection) -> Check:
    """Check that acknowledged writes survive a crash of the server."""
    rows = connection.execute(_DURABILITY, {"names": list(LOSSES)})
    return judge_durability({row.name: row.setting for row in rows})


def judge_durability(settings: Mapping[str, str]) -> Check:
    """Judge the durability settings: any that is off is bad."""
    found = ", ".join(f"{name} {value}" for name, value in sorted(settings.items()))
    off = sorted(name for name, value in settings.items() if value == "off")
    if not off:
        return Check("durability", Verdict.OK, found, None, dict(settings))
    said = "; ".join(f"{name} is off: {LOSSES[name]}" for name in off)
    return Check("durability", Verdict.BAD, said, "; ".join(_RESET[name] for name in off), dict(settings))


def check_connections(connection: Connection) -> Check:
    """Check how many connections are left, and whether sessions of this role idle inside transactions."""
    row = connection.execute(_CONNECTIONS).one()
    idlers = [Idler(**each._asdict()) for each in connection.execute(_IDLE)]
    return judge_connections(Connections(**row._asdict()), idlers)


def judge_connections(counted: Connections, idlers: Sequence[Idler]) -> Check:
    """Judge the connections.

    With few left, processes that reconnect may be refused. A session that idles in a transaction holds locks and keeps
    dead rows.
    """
    allowed = counted.most - counted.reserved
    used = counted.in_use / max(allowed, 1)
    figures = {
        "max_connections": counted.most,
        "reserved": counted.reserved,
        "in_use": counted.in_use,
        "of_this_role": counted.ours + 1,
        "idle_in_transaction": [idler.pid for idler in idlers if idler.seconds >= IDLE],
    }
    found = f"{counted.in_use} of {allowed} in use, {counted.ours + 1} of them of this role"
    remedies = []
    verdict = Verdict.BAD if used >= FULL else Verdict.WARNING if used >= CROWDED else Verdict.OK
    if verdict is not Verdict.OK:
        remedies.append("raise max_connections, lower database.pool, or put a pooler before the server")
    for idler in [idler for idler in idlers if idler.seconds >= IDLE][:NAMED]:
        verdict = Verdict.BAD if verdict is Verdict.BAD else Verdict.WARNING
        found += (
            f"; session {idler.pid} ({printable_name(idler.name)}) idles in a transaction for {duration(idler.seconds)}"
        )
        remedies.append(f"SELECT pg_terminate_backend({idler.pid})")
    return Check("connections", verdict, found, "; ".join(remedies) or None, figures)


def check_memory(connection: Connection) -> Check:
    """Check the server's memory settings against the size of the pool's tables."""
    row = connection.execute(_MEMORY).one()
    return judge_memory(buffers=row.buffers, work=row.work, size=row.size)


def judge_memory(*, buffers: int, work: int, size: int) -> Check:
    """Judge memory settings, all sizes in bytes. The default of shared_buffers is enough while the tables fit in it."""
    figures = {"shared_buffers_bytes": buffers, "work_mem_bytes": work, "tables_bytes": size}
    found = f"shared_buffers {_megabytes(buffers)}, work_mem {_megabytes(work)}, tables {_megabytes(size)}"
    remedies = []
    if buffers <= SMALL_BUFFERS and size > buffers:
        remedies.append("raise shared_buffers to about a quarter of the memory, and restart the server")
    if work < SMALL_WORK:
        remedies.append("raise work_mem to 4 MB or more")
    verdict = Verdict.WARNING if remedies else Verdict.OK
    return Check("memory", verdict, found, "; ".join(remedies) or None, figures)


def check_fences(connection: Connection) -> Check:
    """Check that this role can read the server's timeline, with which every fence begins."""
    row = connection.execute(_WAL_FUNCTIONS).one()
    if row.is_standby:
        return judge_fences(role=row.role, timeline=None, refusal=None)
    if not row.is_allowed:
        return judge_fences(role=row.role, timeline=None, refusal="permission denied")
    try:
        with connection.savepoint():
            timeline = int(connection.execute(_TIMELINE).scalar_one(), 16)
    except psycopg.Error as error:  # some managed servers refuse these functions to everybody
        return judge_fences(role=row.role, timeline=None, refusal=str(error).strip().partition("\n")[0])
    return judge_fences(role=row.role, timeline=timeline, refusal=None, is_identified=row.is_identified)


def judge_fences(*, role: str, timeline: int | None, refusal: str | None, is_identified: bool = True) -> Check:
    """Judge whether fences can be made. A refusal is bad, for no job can start. Without both it is a standby.

    is_identified: this role may read the system identifier of the server, which shows that a dump was restored.
    """
    name = '"' + printable_name(role).replace('"', '""') + '"'
    if refusal is not None:
        found = f"no job can start, because the server's timeline cannot be read: {printable_name(refusal)}"
        functions = "pg_walfile_name(pg_lsn), pg_current_wal_insert_lsn()"
        return Check("fences", Verdict.BAD, found, f"as a superuser: GRANT EXECUTE ON FUNCTION {functions} TO {name}")
    if timeline is None:
        return Check("fences", Verdict.UNKNOWN, "this server is a standby, which makes no fences")
    figures = {"timeline": timeline}
    if not is_identified:
        found = "a restored dump may not be noticed, because the server's system identifier cannot be read"
        remedy = f"as a superuser: GRANT EXECUTE ON FUNCTION pg_control_system() TO {name}"
        return Check("fences", Verdict.WARNING, found, remedy, figures)
    return Check("fences", Verdict.OK, f"they begin with timeline {timeline}", None, figures)


def _megabytes(size: int) -> str:
    return f"{size / 1024**2:.0f} MB"


# The connection to the server: arrival of wake-ups, difference of the clocks.


#: Seconds after which a wake-up counts as lost, and as slow.
WAKEUP_TIMEOUT, SLOW = 2.0, 0.5
#: Seconds by which the clocks may differ.
OFFSET = 1.0
#: How often the database's clock is read. The quickest answer counts.
CLOCK_READS = 5

_DIRECT = "set database.listen_url to a direct address of the same database if database.url goes through a pooler"
_NOTIFY = Statement("SELECT pg_notify(:channel, ''), current_database() AS database")
_NOW = Statement("SELECT extract(epoch FROM clock_timestamp())::float")


def check_wakeups(database: Database) -> Check:
    """Send a notification over a work connection and wait for it on a listen connection."""
    channel = f"{PREFIX}doctor_{secrets.token_hex(8)}"
    try:
        with database.listen() as listener:
            listener.execute(f"SET statement_timeout = {int(WAKEUP_TIMEOUT * 1000)}")
            listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            there = listener.execute("SELECT current_database()").fetchone()
            began = clock.monotonic()
            try:
                sent = database.run(lambda connection: connection.execute(_NOTIFY, {"channel": channel}).one())
            except psycopg.Error as error:
                failed = str(error).strip().partition("\n")[0]
                return Check(
                    "wake-ups", Verdict.UNKNOWN, f"could not be checked: {printable_name(failed)}", "try again"
                )
            arrived = any(True for _ in listener.notifies(timeout=WAKEUP_TIMEOUT, stop_after=1))
            seconds = clock.monotonic() - began
    except psycopg.Error as error:
        reason = printable_name(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        return Check("wake-ups", Verdict.BAD, f"the listen connection does not work: {reason}", _DIRECT)
    listening = there[0] if there else None
    if not arrived:
        where = "" if listening == sent.database else (
            f"; work is on database {printable_name(sent.database)}, listening on {printable_name(listening)}"
        )  # fmt: skip
        found = f"a notification did not arrive within {WAKEUP_TIMEOUT:g} s, so work waits for the next poll{where}"
        return Check("wake-ups", Verdict.BAD, found, _DIRECT)
    return judge_wakeup(seconds)


def check_pooler(database: Database) -> Check:
    """Check that no pooler on the way to the server gives our transactions sessions of others, or drops settings."""
    problem = database.find_pooler_problem()
    if problem is not None:
        return Check("pooler", Verdict.BAD, problem.found, problem.remedy)
    if database.is_pooled:
        return Check("pooler", Verdict.OK, 'database.pooler is "transaction": each transaction brings its settings')
    return Check("pooler", Verdict.OK, "no pooler shares sessions; the settings of the connection are in effect")


def judge_wakeup(seconds: float) -> Check:
    """Judge a notification that arrived after `seconds`."""
    found, figures = (
        f"a notification arrived after {seconds * 1000:.1f} ms",
        {"round_trip_ms": round(seconds * 1000, 3)},
    )
    if seconds > SLOW:
        remedy = "look for a slow network or a server without free processor time"
        return Check("wake-ups", Verdict.WARNING, found, remedy, figures)
    return Check("wake-ups", Verdict.OK, found, None, figures)


def check_clocks(connection: Connection) -> Check:
    """Compare this host's clock with that of the database."""
    looks = []
    for _ in range(CLOCK_READS):
        before, start = clock.wall(), clock.monotonic()
        now = float(connection.execute(_NOW).scalar_one())
        half = (clock.monotonic() - start) / 2
        looks.append((half, now - before - half))
    uncertainty, offset = min(looks)
    return judge_clocks(offset, uncertainty)


def judge_clocks(offset: float, uncertainty: float) -> Check:
    """Judge a database clock that is `offset` ± `uncertainty` seconds ahead of this host's."""
    figures = {"offset_ms": round(offset * 1000, 3) + 0.0, "uncertainty_ms": round(uncertainty * 1000, 3)}
    way = "ahead of" if offset >= 0 else "behind"
    size = f"{abs(offset) * 1000:.1f} ms" if abs(offset) < 1 else duration(abs(offset))
    found = f"the database's clock is {size} {way} this host's, ± {uncertainty * 1000:.1f} ms"
    if abs(offset) - uncertainty <= OFFSET:
        return Check("clocks", Verdict.OK, found, None, figures)
    remedy = "let both hosts follow NTP: stored times are the database's, so logs and histories do not match"
    return Check("clocks", Verdict.WARNING, found, remedy, figures)


# Snapshots. VACUUM cannot remove rows that died after the oldest snapshot was taken.


#: Ages of a snapshot in seconds from which the verdict is warning, and bad.
WARNING_SECONDS, BAD_SECONDS = 60.0, 600.0
#: The same in transactions, for slots and standbys. The server does not know their age in seconds.
WARNING_TRANSACTIONS, BAD_TRANSACTIONS = 10_000, 1_000_000

# A transaction that has written holds back removal in every database, because no snapshot may be newer than it. One
# that only reads does so in its own database. VACUUM itself does not count.
_SESSIONS = Statement("""
SELECT 'session' AS kind, a.pid, coalesce(a.application_name, '') AS name, a.usename::text AS owner, a.state,
    a.datname::text AS database, extract(epoch FROM clock_timestamp() - a.xact_start)::float AS seconds,
    greatest(CASE WHEN a.datname = current_database() THEN age(a.backend_xmin) END, age(a.backend_xid)) AS transactions
FROM pg_stat_activity a
WHERE a.pid <> pg_backend_pid() AND a.backend_type IS DISTINCT FROM 'walsender'
    AND (a.datname = current_database() AND a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
    AND a.pid NOT IN (SELECT v.pid FROM pg_stat_progress_vacuum v)
""")
_PREPARED = Statement("""
SELECT 'prepared' AS kind, NULL AS pid, p.gid AS name, p.owner::text, NULL AS state, p.database::text AS database,
    extract(epoch FROM clock_timestamp() - p.prepared)::float AS seconds, age(p.transaction) AS transactions
FROM pg_prepared_xacts p
""")
_SLOTS = Statement("""
SELECT 'slot' AS kind, s.active_pid AS pid, s.slot_name::text AS name, NULL AS owner,
    CASE WHEN s.active THEN 'active' ELSE 'inactive' END AS state, s.database::text AS database,
    NULL AS seconds, age(s.xmin) AS transactions
FROM pg_replication_slots s WHERE s.xmin IS NOT NULL
""")
_STANDBYS = Statement("""
SELECT 'standby' AS kind, r.pid, coalesce(r.application_name, '') AS name, r.usename::text AS owner, r.state,
    NULL AS database, NULL AS seconds, age(r.backend_xmin) AS transactions
FROM pg_stat_replication r WHERE r.backend_xmin IS NOT NULL
""")


@dataclass(frozen=True)
class SnapshotHolder:
    """A session, prepared transaction, replication slot or standby that keeps dead rows from being removed.

    transactions: the age of its snapshot in transactions. seconds: how long it has held the snapshot, None if unknown.
    """

    kind: str
    pid: int | None
    name: str
    owner: str | None
    state: str | None
    database: str | None
    seconds: float | None
    transactions: int


def check_snapshots(connection: Connection) -> Check:
    """Check all sessions, prepared transactions, replication slots and standbys that hold snapshots."""
    found = []
    for statement in (_SESSIONS, _PREPARED, _SLOTS, _STANDBYS):
        found += [SnapshotHolder(**row._asdict()) for row in connection.execute(statement)]
    return judge_snapshots(found)


def judge_snapshots(holders: Sequence[SnapshotHolder]) -> Check:
    """Judge the holders: the gravest decides the verdict. They are named gravest first, then by age."""
    if not holders:
        return Check("snapshots", Verdict.OK, "no session, slot or standby holds a snapshot")
    ordered = sorted(holders, key=_weight, reverse=True)
    verdict, oldest = gravest(map(judge_holder, holders)), ordered[0]
    figures: dict[str, object] = {
        "oldest_seconds": None if oldest.seconds is None else round(oldest.seconds, 3),
        "oldest_transactions": max(each.transactions for each in holders),
        "holders": [
            {"kind": each.kind, "pid": each.pid, "name": each.name, "owner": each.owner, "state": each.state,
             "age_seconds": each.seconds, "age_transactions": each.transactions}
            for each in ordered[:NAMED]
        ],
    }  # fmt: skip
    if verdict is Verdict.OK:
        return Check("snapshots", verdict, f"the oldest is held by {describe_holder(oldest)}", None, figures)
    if verdict is Verdict.UNKNOWN:
        hidden = "; ".join(describe_holder(each) for each in ordered if judge_holder(each) is verdict)
        remedy = "let this role see the sessions of others: GRANT pg_monitor TO it"
        return Check("snapshots", verdict, f"this role may not see the age of: {hidden}", remedy, figures)
    named = [each for each in ordered if judge_holder(each) in (Verdict.WARNING, Verdict.BAD)][:NAMED]
    found = f"dead rows stay because of {'; '.join(map(describe_holder, named))}"
    return Check("snapshots", verdict, found, "; ".join(map(holder_remedy, named)), figures)


def judge_holder(holder: SnapshotHolder) -> Verdict:
    """The verdict on one holder, by its age."""
    match holder.kind, holder.seconds:
        case "slot" | "standby", _:
            return _beyond(holder.transactions, WARNING_TRANSACTIONS, BAD_TRANSACTIONS)
        case _, None:
            return Verdict.UNKNOWN
        case _, seconds:
            return _beyond(seconds, WARNING_SECONDS, BAD_SECONDS)


def describe_holder(holder: SnapshotHolder) -> str:
    """The holder and its age as text for people."""
    age = f"{holder.transactions} transactions"
    if holder.seconds is not None:
        age = f"{duration(holder.seconds)}, {age}"
    match holder.kind:
        case "session":
            who = printable_session(holder.pid, holder.name, holder.owner, holder.state)
        case "prepared":
            who = f"prepared transaction {quoted(holder.name)} of user {printable_name(holder.owner)}"
        case "slot":
            who = f"replication slot {quoted(holder.name)}, {holder.state}"
        case _:
            who = f"the standby {printable_name(holder.name) or 'unnamed'} by its feedback (walsender {holder.pid})"
    return f"{who}: {age}"


def holder_remedy(holder: SnapshotHolder) -> str:
    """The action that makes the holder release its snapshot."""
    match holder.kind:
        case "session":
            return f"end session {holder.pid}: SELECT pg_terminate_backend({holder.pid})"
        case "prepared":
            database = printable_name(holder.database)
            return f"in database {database}: COMMIT PREPARED or ROLLBACK PREPARED {quoted(holder.name)}"
        case "slot" if holder.state == "inactive":
            return f"if the slot is not needed: SELECT pg_drop_replication_slot({quoted(holder.name)})"
        case "slot":
            return f"end the long query of the client that uses slot {quoted(holder.name)} (pid {holder.pid})"
        case _:
            return (
                f"end the long query on standby {printable_name(holder.name)}, or set hot_standby_feedback = off there"
            )


def _beyond(age: float, warning: float, bad: float) -> Verdict:
    return Verdict.BAD if age >= bad else Verdict.WARNING if age >= warning else Verdict.OK


def _weight(holder: SnapshotHolder) -> tuple[int, float, int]:
    return list(Verdict).index(judge_holder(holder)), holder.seconds or 0.0, holder.transactions


# Indexes: missing ones, and those that PostgreSQL cannot use.


_INDEXES = Statement(f"""
SELECT i.relname::text AS name, x.indisvalid AND x.indisready AND x.indislive AS usable,
    EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = x.indexrelid) AS building
FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
WHERE t.relnamespace = to_regnamespace('{SCHEMA}') ORDER BY 1
""")


@dataclass(frozen=True)
class Index:
    """An existing index. `building`: it is being created at this moment."""

    name: str
    usable: bool
    building: bool = False


def expected() -> dict[str, str]:
    """The names of all indexes, including those of constraints, and the statement that creates each."""
    from sqlalchemy import PrimaryKeyConstraint, UniqueConstraint
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.schema import CreateIndex

    from schema.tables import metadata

    made, dialect = {}, postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in metadata.tables.values():
        for index in table.indexes:
            statement = " ".join(str(CreateIndex(index).compile(dialect=dialect)).split())
            made[str(index.name)] = statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
        for constraint in table.constraints:
            # A table without a primary key has one without columns in the metadata.
            if isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint) and len(constraint.columns):
                kind = "PRIMARY KEY" if isinstance(constraint, PrimaryKeyConstraint) else "UNIQUE"
                columns = ", ".join(column.name for column in constraint.columns)
                made[str(constraint.name)] = (
                    f"ALTER TABLE {table.fullname} ADD CONSTRAINT {constraint.name} {kind} ({columns})"
                )
    return made


def check_indexes(connection: Connection, *, is_current: bool) -> Check:
    """Compare the declared indexes with the server's. `is_current`: the schema has the version of this code."""
    found = [Index(**row._asdict()) for row in connection.execute(_INDEXES)]
    return judge_indexes(expected(), found, is_current=is_current)


def judge_indexes(wanted: Mapping[str, str], found: Sequence[Index], *, is_current: bool) -> Check:
    """Judge the indexes: a wanted one that is missing or unusable is bad. Any other unusable one only slows writes."""
    there = {index.name for index in found}
    missing = sorted(wanted.keys() - there)
    building = sorted(index.name for index in found if not index.usable and index.building)
    unusable = sorted(index.name for index in found if not index.usable and not index.building)
    broken, left_over = [n for n in unusable if n in wanted], [n for n in unusable if n not in wanted]
    figures = {"expected": len(wanted), "missing": missing, "invalid": unusable, "building": building}
    kinds = (("missing", missing), ("invalid", broken), ("invalid and not ours", left_over), ("being built", building))
    said = [f"{what}: {', '.join(map(printable_name, names))}" for what, names in kinds if names]
    if not said:
        return Check("indexes", Verdict.OK, f"all {len(wanted)} are there and valid", None, figures)
    remedies = [f"REINDEX INDEX CONCURRENTLY {SCHEMA}.{name}" for name in broken]
    remedies += [f"DROP INDEX CONCURRENTLY {SCHEMA}.{printable_name(name)}" for name in left_over]
    remedies += [wanted[name] for name in missing] if is_current else ["leasehold db upgrade"] if missing else []
    remedies += ["run the check again when they are built"] if building else []
    verdict = Verdict.BAD if missing or broken else Verdict.WARNING
    return Check("indexes", verdict, "; ".join(said), "; ".join(remedies), figures)


# Removal of dead rows: autovacuum, its settings, and the number of dead rows.


#: A table with this many more dead rows than live ones is slow to read.
MANY_DEAD = 5_000
#: A table that needs a vacuum is overdue after this many seconds, and at least this many rounds of autovacuum.
OVERDUE, OVERDUE_ROUNDS = 600.0, 10

_TABLES = Statement(f"""
SELECT c.relname::text AS name, coalesce(c.reloptions, '{{}}') AS options, s.n_live_tup AS live, s.n_dead_tup AS dead,
    extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float AS vacuumed
FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.relnamespace = to_regnamespace('{SCHEMA}') AND c.relkind = 'r' ORDER BY 1
""")
_AUTOVACUUM_SETTINGS = Statement("""
SELECT current_setting('autovacuum')::boolean AS autovacuum, current_setting('track_counts')::boolean AS track_counts,
    current_setting('autovacuum_max_workers')::integer AS workers,
    extract(epoch FROM current_setting('autovacuum_naptime')::interval)::float AS naptime,
    current_setting('autovacuum_vacuum_threshold')::integer AS threshold,
    current_setting('autovacuum_vacuum_scale_factor')::float AS scale_factor
""")


@dataclass(frozen=True)
class TableStatistics:
    """One table of the pool: storage parameters, rows as the server estimates them, seconds since its last vacuum."""

    name: str
    options: Mapping[str, str]
    live: int
    dead: int
    vacuumed: float | None

    @property
    def is_excluded(self) -> bool:
        """True if autovacuum is switched off for this table."""
        return self.options.get("autovacuum_enabled", "true").lower() in ("off", "false", "no", "0")


@dataclass(frozen=True)
class AutovacuumSettings:
    """Autovacuum's settings in the server; naptime in seconds, threshold in rows, scale_factor of the live rows."""

    autovacuum: bool = True
    track_counts: bool = True
    workers: int = 3
    naptime: float = 60.0
    threshold: int = 50
    scale_factor: float = 0.2


def read_tables(connection: Connection) -> list[TableStatistics]:
    """All tables of the pool, ordered by name."""
    return [
        TableStatistics(row.name, dict(each.split("=", 1) for each in row.options), row.live, row.dead, row.vacuumed)
        for row in connection.execute(_TABLES)
    ]


def check_autovacuum(connection: Connection) -> Check:
    """Check autovacuum in the settings of the server and of the tables."""
    row = connection.execute(_AUTOVACUUM_SETTINGS).one()
    return judge_autovacuum(AutovacuumSettings(**row._asdict()), read_tables(connection))


def judge_autovacuum(settings: AutovacuumSettings, found: Sequence[TableStatistics]) -> Check:
    """Judge whether autovacuum removes dead rows in time."""
    problems: list[tuple[Verdict, str, str]] = []
    for name, is_on in (("autovacuum", settings.autovacuum), ("track_counts", settings.track_counts)):
        if not is_on:
            problems.append((Verdict.BAD, f"{name} is off", f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()"))
    for table in found:
        if table.is_excluded:
            said = f"autovacuum is off for {table.name}"
            problems.append((Verdict.BAD, said, f"ALTER TABLE {SCHEMA}.{table.name} RESET (autovacuum_enabled)"))
        problems += [(Verdict.WARNING, *each) for each in _different(table)]
        if _is_overdue(table, settings):
            when = "never" if table.vacuumed is None else f"{duration(table.vacuumed)} ago"
            said = f"{table.name} has {table.dead} dead rows and was last vacuumed {when}"
            problems.append((Verdict.WARNING, said, f"VACUUM {SCHEMA}.{table.name}, and find out why it did not run"))
    # The gateway loads this module for the words of a verdict, and the tables take long to import.
    from schema.tables.columns import STORAGE

    figures = {
        "workers": settings.workers,
        "naptime_seconds": settings.naptime,
        "vacuumed_seconds_ago": {table.name: table.vacuumed for table in found if table.name in STORAGE},
    }
    if not problems:
        said = f"on, {settings.workers} workers, every {settings.naptime:g} s; the tables have their parameters"
        return Check("autovacuum", Verdict.OK, said, None, figures)
    verdict = gravest(verdict for verdict, _, _ in problems)
    said, remedies = ("; ".join(each[n] for each in problems) for n in (1, 2))
    return Check("autovacuum", verdict, said, remedies, figures)


def check_dead_rows(connection: Connection, *, oldest: Check) -> Check:
    """Check the number of dead rows. `oldest` is the check of snapshots, which may be the cause."""
    return judge_dead_rows(read_tables(connection), oldest=oldest)


def judge_dead_rows(found: Sequence[TableStatistics], *, oldest: Check) -> Check:
    """Judge the tables: one with thousands more dead rows than live ones is slow to read."""
    figures = {table.name: {"live_rows": table.live, "dead_rows": table.dead} for table in found if table.dead}
    many = [table for table in found if table.dead > table.live + MANY_DEAD]
    if not many:
        most = max((table.dead for table in found), default=0)
        return Check("dead rows", Verdict.OK, f"at most {most} in a table", None, figures)
    said = "; ".join(f"{table.name} has {table.dead} dead rows and {table.live} live ones" for table in many)
    vacuum = "; ".join(f"VACUUM {SCHEMA}.{table.name}" for table in many)
    if oldest.verdict in (Verdict.WARNING, Verdict.BAD):
        said, vacuum = f"{said}; {oldest.found}", f"first {oldest.remedy}; then {vacuum}"
    return Check("dead rows", Verdict.WARNING, said, vacuum, figures)


# Schedules whose jobs are refused.


_FAILING = Statement(f"""
SELECT i.name || '/' || s.name AS name, s.failures, s.last_error FROM schedules s JOIN instances i ON i.id = s.instance
WHERE s.failures >= {FAILING} ORDER BY s.failures DESC, 1
""")


_HELD_UP = Statement(f"""
SELECT i.name || '/' || s.name AS name, s.left_out, j.public_id
FROM schedules s JOIN instances i ON i.id = s.instance JOIN jobs j ON j.id = s.last_job
WHERE {HELD_UP} ORDER BY s.left_out DESC, 1
""")


def check_schedules(connection: Connection) -> Check:
    """Check that the jobs of schedules are accepted, and that none waits for a previous one that does not start."""
    return judge_schedules(
        [(row.name, row.failures, row.last_error) for row in connection.execute(_FAILING)],
        [(row.name, row.left_out, str(row.public_id)) for row in connection.execute(_HELD_UP)],
    )


def judge_schedules(failing: Sequence[tuple[str, int, str]], held_up: Sequence[tuple[str, int, str]]) -> Check:
    """Judge the schedules whose job was refused several times in a row: name, refusals and last error of each; and
    those that are held up: name, ticks left out, and the job that has not started."""
    figures = {"failing": len(failing), "held_up": len(held_up)}
    if not failing and not held_up:
        return Check("schedules", Verdict.OK, "no job of a schedule is refused again and again", None, figures)
    told = [f"{name} was refused {times} times: {printable_name(error)}" for name, times, error in failing]
    told += [f"{name} has left out {ticks} ticks, because job {job} has not started" for name, ticks, job in held_up]
    others = [f"and {len(told) - NAMED} more"] if len(told) > NAMED else []
    told = told[:NAMED]
    remedy = (
        "remove the cause, or change the schedule with leasehold schedule add; schedule show prints the whole error,"
        " and leasehold explain JOB why a job does not start"
    )
    return Check("schedules", Verdict.WARNING, "; ".join(told + others), remedy, figures)


# Of processes with different settings those decide that keep jobs for the longest time.
_KEPT = Statement("""
SELECT s.state, s.keep, extract(epoch FROM now() - (
    SELECT finished_at FROM jobs WHERE state = s.state AND finished_at IS NOT NULL ORDER BY state, finished_at LIMIT 1
    ))::double precision AS oldest
FROM (
    SELECT k.state, max((a.settings->'upkeep'->>('keep_' || k.state))::double precision) AS keep
    FROM assigners a CROSS JOIN unnest(ARRAY['succeeded', 'failed', 'cancelled', 'dead']) AS k (state)
    WHERE a.stopped_at IS NULL AND a.seen_at > now() - interval '1 minute' GROUP BY k.state) s
WHERE s.keep IS NOT NULL ORDER BY 1
""")
#: Seconds for which finished jobs may outlive their age.
LATE = 600.0


def check_retention(connection: Connection) -> Check:
    """Check that finished jobs are deleted as fast as they come of age."""
    return judge_retention([(row.state, row.keep, row.oldest) for row in connection.execute(_KEPT)])


def judge_retention(kept: Sequence[tuple[str, float, float | None]]) -> Check:
    """Judge the final states: the name, the seconds for which its jobs are kept, and those since its oldest ended."""
    late = {state: oldest - keep for state, keep, oldest in kept if oldest is not None and oldest - keep > LATE}
    figures = {f"late_seconds_{state}": round(seconds) for state, seconds in late.items()}
    if not late:
        return Check("retention", Verdict.OK, "no finished jobs are kept for too long", None, figures)
    told = ", ".join(f"{state} jobs for {duration(seconds)}" for state, seconds in late.items())
    remedy = (
        "look at leasehold_upkeep_duty_failures and the log of leasehold assign for a duty that fails; if none does,"
        " the server is too slow for what the pool ends"
    )
    return Check("retention", Verdict.WARNING, f"jobs are kept longer than they should be: {told}", remedy, figures)


def _different(table: TableStatistics) -> list[tuple[str, str]]:
    """Each wrong storage parameter of one table, with the statement that corrects it."""
    from schema.tables.columns import STORAGE

    found = []
    for name, wanted in STORAGE.get(table.name, {}).items():
        is_now = table.options.get(name)
        if is_now is None or float(is_now) != wanted:
            said = f"{name} of {table.name} is {is_now or 'not set'}, not {wanted:g}"
            found.append((said, f"ALTER TABLE {SCHEMA}.{table.name} SET ({name} = {wanted:g})"))
    return found


def _is_overdue(table: TableStatistics, settings: AutovacuumSettings) -> bool:
    """True if the table needs a vacuum by its own settings and has had none for long."""
    scale = float(table.options.get("autovacuum_vacuum_scale_factor", settings.scale_factor))
    base = float(table.options.get("autovacuum_vacuum_threshold", settings.threshold))
    since = float("inf") if table.vacuumed is None else table.vacuumed
    many = table.dead > max(MANY_DEAD, base + scale * table.live)
    return many and since > max(OVERDUE, OVERDUE_ROUNDS * settings.naptime)
