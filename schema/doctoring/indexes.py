"""Indexes that the tables should have: those that are missing, and those that PostgreSQL cannot use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Dialect, PrimaryKeyConstraint, UniqueConstraint, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from schema.columns import SCHEMA
from schema.doctoring.findings import Check, Verdict, shown
from schema.tables import metadata

DIALECT: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]

_INDEXES = text(f"""
SELECT i.relname::text AS name, x.indisvalid AND x.indisready AND x.indislive AS usable,
    EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = x.indexrelid) AS building
FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
WHERE t.relnamespace = to_regnamespace('{SCHEMA}') ORDER BY 1
""")


@dataclass(frozen=True)
class Index:
    """One that is there; `building` tells that somebody makes it right now."""

    name: str
    usable: bool
    building: bool = False


def expected() -> dict[str, str]:
    """The names of all indexes, those of constraints included, and the statement that makes each."""
    made = {}
    for table in metadata.tables.values():
        for index in table.indexes:
            statement = " ".join(str(CreateIndex(index).compile(dialect=DIALECT)).split())
            made[str(index.name)] = statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
        for constraint in table.constraints:
            if isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint):
                kind = "PRIMARY KEY" if isinstance(constraint, PrimaryKeyConstraint) else "UNIQUE"
                columns = ", ".join(column.name for column in constraint.columns)
                made[str(constraint.name)] = (
                    f"ALTER TABLE {table.fullname} ADD CONSTRAINT {constraint.name} {kind} ({columns})"
                )
    return made


def check(connection: Connection, *, is_current: bool) -> Check:
    """Compare the tables' description with the server; `is_current` tells whether the schema is of this version."""
    found = [Index(**row._mapping) for row in connection.execute(_INDEXES)]
    return judge(expected(), found, is_current=is_current)


def judge(wanted: Mapping[str, str], found: Sequence[Index], *, is_current: bool) -> Check:
    """A wanted index that is missing or unusable is bad; any other that is unusable only costs its upkeep."""
    there = {index.name for index in found}
    missing = sorted(wanted.keys() - there)
    building = sorted(index.name for index in found if not index.usable and index.building)
    unusable = sorted(index.name for index in found if not index.usable and not index.building)
    broken, left_over = [n for n in unusable if n in wanted], [n for n in unusable if n not in wanted]
    figures = {"expected": len(wanted), "missing": missing, "invalid": unusable, "building": building}
    kinds = (("missing", missing), ("invalid", broken), ("invalid and not ours", left_over), ("being built", building))
    said = [f"{what}: {', '.join(map(shown, names))}" for what, names in kinds if names]
    if not said:
        return Check("indexes", Verdict.OK, f"all {len(wanted)} are there and valid", None, figures)
    remedies = [f"REINDEX INDEX CONCURRENTLY {SCHEMA}.{name}" for name in broken]
    remedies += [f"DROP INDEX CONCURRENTLY {SCHEMA}.{shown(name)}" for name in left_over]
    remedies += [wanted[name] for name in missing] if is_current else ["leasehold db upgrade"] if missing else []
    remedies += ["look again when they are built"] if building else []
    verdict = Verdict.BAD if missing or broken else Verdict.WARNING
    return Check("indexes", verdict, "; ".join(said), "; ".join(remedies), figures)
