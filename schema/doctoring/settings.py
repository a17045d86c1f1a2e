"""What the server's settings promise: durability, room for connections, memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.columns import SCHEMA
from schema.doctoring.findings import Check, Verdict, duration, shown

#: Parts of the connections in use that are a warning, and bad.
CROWDED, FULL = 0.8, 0.95
#: Seconds a session of ours may sit inside a transaction; our own processes are cut off after less.
IDLE = 10.0
#: Sessions that are named.
NAMED = 3
#: The default of shared_buffers, bytes, and of work_mem.
SMALL_BUFFERS, SMALL_WORK = 128 * 1024**2, 4 * 1024**2

#: What is lost while a setting is off.
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

_DURABILITY = text("SELECT name, setting FROM pg_settings WHERE name = ANY (CAST(:names AS text[])) ORDER BY name")
_CONNECTIONS = text("""
SELECT current_setting('max_connections')::integer AS most,
    current_setting('superuser_reserved_connections')::integer
        + coalesce(current_setting('reserved_connections', true)::integer, 0) AS reserved,
    (SELECT sum(numbackends)::integer FROM pg_stat_database WHERE datid <> 0) AS in_use,
    (SELECT count(*) FROM pg_stat_activity WHERE usename = current_user AND pid <> pg_backend_pid()) AS ours
""")
_IDLE = text("""
SELECT pid, coalesce(application_name, '') AS name,
    extract(epoch FROM clock_timestamp() - state_change)::float AS seconds
FROM pg_stat_activity
WHERE usename = current_user AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()
ORDER BY state_change
""")
_MEMORY = text(f"""
SELECT pg_size_bytes(current_setting('shared_buffers')) AS buffers, pg_size_bytes(current_setting('work_mem')) AS work,
    (SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
     WHERE relnamespace = to_regnamespace('{SCHEMA}') AND relkind = 'r') AS size
""")


@dataclass(frozen=True)
class Connections:
    """How many the server allows, keeps for superusers and has, and how many beside this one are of our role."""

    most: int
    reserved: int
    in_use: int
    ours: int


@dataclass(frozen=True)
class Idler:
    """A session of our role that has sat inside a transaction for so many seconds."""

    pid: int
    name: str
    seconds: float


def durability(connection: Connection) -> Check:
    """Whether what was acknowledged survives a crash."""
    rows = connection.execute(_DURABILITY, {"names": list(LOSSES)})
    return judge_durability({row.name: row.setting for row in rows})


def judge_durability(settings: Mapping[str, str]) -> Check:
    """Anything that is off is bad."""
    found = ", ".join(f"{name} {value}" for name, value in sorted(settings.items()))
    off = sorted(name for name, value in settings.items() if value == "off")
    if not off:
        return Check("durability", Verdict.OK, found, None, dict(settings))
    said = "; ".join(f"{name} is off: {LOSSES[name]}" for name in off)
    return Check("durability", Verdict.BAD, said, "; ".join(_RESET[name] for name in off), dict(settings))


def connections(connection: Connection) -> Check:
    """How many are left, and whether sessions of our role sit inside transactions."""
    row = connection.execute(_CONNECTIONS).one()
    idlers = [Idler(**each._mapping) for each in connection.execute(_IDLE)]
    return judge_connections(Connections(**row._mapping), idlers)


def judge_connections(counted: Connections, idlers: Sequence[Idler]) -> Check:
    """Few that are left are a danger to every process that reconnects; one that idles holds locks and rows."""
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
        found += f"; session {idler.pid} ({shown(idler.name)}) idles in a transaction for {duration(idler.seconds)}"
        remedies.append(f"SELECT pg_terminate_backend({idler.pid})")
    return Check("connections", verdict, found, "; ".join(remedies) or None, figures)


def memory(connection: Connection) -> Check:
    """What the server may keep in memory, against the size of our tables."""
    row = connection.execute(_MEMORY).one()
    return judge_memory(buffers=row.buffers, work=row.work, size=row.size)


def judge_memory(*, buffers: int, work: int, size: int) -> Check:
    """Sizes in bytes. The default of shared_buffers is enough for as long as the tables fit."""
    figures = {"shared_buffers_bytes": buffers, "work_mem_bytes": work, "tables_bytes": size}
    found = f"shared_buffers {_megabytes(buffers)}, work_mem {_megabytes(work)}, tables {_megabytes(size)}"
    remedies = []
    if buffers <= SMALL_BUFFERS and size > buffers:
        remedies.append("raise shared_buffers to about a quarter of the memory, and restart the server")
    if work < SMALL_WORK:
        remedies.append("raise work_mem to 4 MB or more")
    verdict = Verdict.WARNING if remedies else Verdict.OK
    return Check("memory", verdict, found, "; ".join(remedies) or None, figures)


def _megabytes(size: int) -> str:
    return f"{size / 1024**2:.0f} MB"
