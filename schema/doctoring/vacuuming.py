"""Whether dead rows are removed: autovacuum and its settings, and how many dead rows there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.columns import SCHEMA
from schema.doctoring.findings import Check, Verdict, duration, gravest
from schema.storage import STORAGE

#: A table with so many more dead rows than live ones is slow to read.
MANY_DEAD = 5_000
#: Seconds after which a table that needs a vacuum should have had one, and at least so many rounds of autovacuum.
OVERDUE, OVERDUE_ROUNDS = 600.0, 10

_TABLES = text(f"""
SELECT c.relname::text AS name, coalesce(c.reloptions, '{{}}') AS options, s.n_live_tup AS live, s.n_dead_tup AS dead,
    extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float AS vacuumed
FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.relnamespace = to_regnamespace('{SCHEMA}') AND c.relkind = 'r' ORDER BY 1
""")
_SETTINGS = text("""
SELECT current_setting('autovacuum')::boolean AS autovacuum, current_setting('track_counts')::boolean AS track_counts,
    current_setting('autovacuum_max_workers')::integer AS workers,
    extract(epoch FROM current_setting('autovacuum_naptime')::interval)::float AS naptime,
    current_setting('autovacuum_vacuum_threshold')::integer AS threshold,
    current_setting('autovacuum_vacuum_scale_factor')::float AS scale_factor
""")


@dataclass(frozen=True)
class Table:
    """One of our tables: storage parameters, rows as the server estimates them, seconds since its last vacuum."""

    name: str
    options: Mapping[str, str]
    live: int
    dead: int
    vacuumed: float | None

    @property
    def is_excluded(self) -> bool:
        """Whether autovacuum is switched off for it."""
        return self.options.get("autovacuum_enabled", "true").lower() in ("off", "false", "no", "0")


@dataclass(frozen=True)
class Settings:
    """Autovacuum's settings in the server; naptime in seconds, threshold in rows, scale_factor of the live rows."""

    autovacuum: bool = True
    track_counts: bool = True
    workers: int = 3
    naptime: float = 60.0
    threshold: int = 50
    scale_factor: float = 0.2


def tables(connection: Connection) -> list[Table]:
    """All of our tables, by name."""
    return [
        Table(row.name, dict(each.split("=", 1) for each in row.options), row.live, row.dead, row.vacuumed)
        for row in connection.execute(_TABLES)
    ]


def autovacuum(connection: Connection) -> Check:
    """Look at the settings of the server and of the tables."""
    row = connection.execute(_SETTINGS).one()
    return judge_autovacuum(Settings(**row._mapping), tables(connection))


def judge_autovacuum(settings: Settings, found: Sequence[Table]) -> Check:
    """Whether dead rows will be removed in time."""
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
            problems.append((Verdict.WARNING, said, f"VACUUM {SCHEMA}.{table.name}, and look why it does not happen"))
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


def dead_rows(connection: Connection, *, oldest: Check) -> Check:
    """Count them; `oldest` is what was found about snapshots, which may be why they are there."""
    return judge_dead_rows(tables(connection), oldest=oldest)


def judge_dead_rows(found: Sequence[Table], *, oldest: Check) -> Check:
    """A table with thousands more dead rows than live ones is slow."""
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


def _different(table: Table) -> list[tuple[str, str]]:
    """What is wrong with the parameters of one table, and the statement that puts it right."""
    found = []
    for name, wanted in STORAGE.get(table.name, {}).items():
        is_now = table.options.get(name)
        if is_now is None or float(is_now) != wanted:
            said = f"{name} of {table.name} is {is_now or 'not set'}, not {wanted:g}"
            found.append((said, f"ALTER TABLE {SCHEMA}.{table.name} SET ({name} = {wanted:g})"))
    return found


def _is_overdue(table: Table, settings: Settings) -> bool:
    """Whether it needs a vacuum by its own measure and has had none for long."""
    scale = float(table.options.get("autovacuum_vacuum_scale_factor", settings.scale_factor))
    base = float(table.options.get("autovacuum_vacuum_threshold", settings.threshold))
    since = float("inf") if table.vacuumed is None else table.vacuumed
    many = table.dead > max(MANY_DEAD, base + scale * table.live)
    return many and since > max(OVERDUE, OVERDUE_ROUNDS * settings.naptime)
