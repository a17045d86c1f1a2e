"""A migrated database has the tables that the metadata describes, whatever revisions came after the baseline."""

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from schema.postgres import migrate
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.sql import SCHEMA
from schema.tables.columns import STORAGE, metadata
from tests.support.pool import Pool

OURS = f"relnamespace = '{SCHEMA}'::regnamespace AND relname <> 'alembic_version'"

COLUMNS = f"""
SELECT relname, attname, format_type(atttypid, atttypmod) AS type, attnotnull, attidentity, attgenerated,
       pg_get_expr(adbin, adrelid) AS default_or_formula
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND attnum > 0 AND NOT attisdropped
LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE {OURS} AND relkind IN ('r', 'p') ORDER BY relname, attname
"""
# A column's NOT NULL is compared with the column; newer servers list it as a constraint as well.
CONSTRAINTS = f"""
SELECT relname, conname, pg_get_constraintdef(k.oid) AS definition
FROM pg_class c JOIN pg_constraint k ON conrelid = c.oid AND contype <> 'n'
WHERE {OURS} ORDER BY relname, conname
"""
INDEXES = f"""
SELECT relname, indexrelid::regclass::text AS name, pg_get_indexdef(indexrelid) AS definition
FROM pg_class c JOIN pg_index ON indrelid = c.oid
WHERE {OURS} ORDER BY relname, name
"""
# The functions that constraints call.
FUNCTIONS = f"""
SELECT DISTINCT proname, pg_get_functiondef(p.oid) AS definition
FROM pg_depend JOIN pg_proc p ON refclassid = 'pg_proc'::regclass AND refobjid = p.oid
WHERE classid = 'pg_constraint'::regclass AND pronamespace = '{SCHEMA}'::regnamespace ORDER BY proname
"""
STORED = f"SELECT relname, unnest(reloptions) AS option FROM pg_class c WHERE {OURS} AND relkind = 'r'"


@pytest.fixture
def described(empty_url: str) -> Iterator[Database]:
    """A database made from the description alone."""
    opened = Database(empty_url, DatabaseSettings(), role="test", chance=random.Random(0))

    with migrate.begin(opened) as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA}")
        metadata.create_all(connection)
    yield opened
    opened.close()


def rows(database: Database, query: str) -> list[Any]:
    return list(database.run(lambda connection: connection.execute(Statement(query)).all()))


def test_a_migrated_database_has_the_described_tables_and_checks(database: Database, described: Database) -> None:
    for query in (COLUMNS, CONSTRAINTS, INDEXES, FUNCTIONS):
        assert rows(database, query) == rows(described, query)
    assert {row[0] for row in rows(database, COLUMNS)} == {table.name for table in metadata.tables.values()}
    assert [found.proname for found in rows(database, FUNCTIONS)] == ["job_is_sound"]


def test_a_migrated_database_has_the_storage_parameters_that_the_doctor_wants(database: Database) -> None:
    found: dict[str, dict[str, float]] = {}
    for table, option in rows(database, STORED):
        name, _, value = option.partition("=")
        found.setdefault(table, {})[name] = float(value)
    assert found == STORAGE


# A job's row that is not sound is refused, by the name of what it breaks.


BROKEN = {
    "state = 'lost'": "jobs_finished_at_iff_final",
    "finished_at = now()": "jobs_finished_at_iff_final",
    "state = 'succeeded'": "jobs_finished_at_iff_final",
    "state = 'lost', finished_at = now()": "jobs_finished_at_iff_final",
    "state = 'running', schedule_after = now()": "jobs_backoff_only_waiting",
    "state = 'dead', finished_at = now(), schedule_after = now()": "jobs_backoff_only_waiting",
    "fence = -1": "jobs_fence_positive",
    "result_fence = 7": "jobs_result_is_current",
    "priority = 1001": "jobs_priority_range",
    "priority = -1001": "jobs_priority_range",
    "label = repeat('é', 33)": "jobs_label_bounded",
    "locality_hint = repeat('x', 201)": "jobs_locality_hint_bounded",
    "units = 0": "jobs_units_positive",
    "max_attempts = 0": "jobs_max_attempts_positive",
    "attempts = -1": "jobs_attempts_bounded",
    "attempts = max_attempts + 1": "jobs_attempts_bounded",
    "kills = 101": "jobs_kills_bounded",
    "evictions = -1": "jobs_evictions_positive",
    "dedup_key = ''": "jobs_dedup_key_bounded",
    "dedup_key = repeat('x', 201)": "jobs_dedup_key_bounded",
    "timeout_seconds = 0": "jobs_timeout_finite",
    "timeout_seconds = 'NaN'": "jobs_timeout_finite",
    "timeout_seconds = 'Infinity'": "jobs_timeout_finite",
}
SOUND = [
    "state = 'cancelled', finished_at = now()",
    "state = 'parked', schedule_after = now()",
    "fence = 7, result_fence = 7",
    "priority = -1000, label = repeat('é', 32), locality_hint = repeat('x', 200), dedup_key = repeat('x', 200)",
    "attempts = max_attempts, kills = 100, timeout_seconds = 31536000",
]


def test_a_row_that_is_not_sound_is_refused_and_one_at_its_bounds_is_taken(pool: Pool) -> None:
    pool.submit()
    for change, name in [*BROKEN.items(), *((change, None) for change in SOUND)]:
        with pool.database.connect() as connection:
            broken, said = None, ""
            try:
                connection.execute_sql(f"UPDATE jobs SET {change}")
            except psycopg.errors.CheckViolation as refused:
                broken, said = refused.diag.constraint_name, str(refused)
            connection.rollback()
        assert (change, broken) == (change, name)
        assert broken is None or f'row for relation "jobs" violates check constraint "{name}"' in said


def test_a_name_of_a_bot_or_its_pool_is_taken_only_if_it_is_legal(pool: Pool) -> None:
    for name in ("a", "0", "a" * 63, "a.b_c-d", "9-"):
        pool.change(f"INSERT INTO bots (name, pool) VALUES ('{name}', '{name}')")
    for name in ("", "a" * 64, "-a", ".a", "_", "A", "a b", "é", "a\n", "a\nb"):
        for columns, values, broken in (("name", f"'{name}'", "name"), ("name, pool", f"'b', '{name}'", "pool")):
            with pytest.raises(psycopg.Error, match=f'violates check constraint "bots_{broken}_form"'):
                pool.change(f"INSERT INTO bots ({columns}) VALUES ({values})")


#: Changes of a bot → whether assigners remember what is changed.
CHANGES = {
    **dict.fromkeys(("kind = kind + 1", "cohort = cohort + 1", "instance = 7", "pool = 'p'", "sync_seq = 0"), True),
    **dict.fromkeys(("status = 'unhealthy'", "draining = true", "closing = true"), True),
    **dict.fromkeys(("sync_seq = sync_seq + 1, status = status", "in_use = 1, held = 1"), False),
}


def test_every_change_of_what_assigners_remember_of_a_bot_is_recorded(pool: Pool) -> None:
    pool.bot("b", capacity=2)
    for change, is_one in CHANGES.items():
        with pool.database.connect() as connection:
            before = connection.execute_sql("SELECT transaction FROM bot_changes").scalar_one()
            connection.execute_sql(f"UPDATE bots SET {change}")
            after = connection.execute_sql("SELECT transaction FROM bot_changes").scalar_one()
            connection.rollback()
        assert (change, before != after) == (change, is_one)
