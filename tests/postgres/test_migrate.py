"""Upgrades are repeatable, safe side by side, all or nothing, and refuse what they do not know."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.script import ScriptDirectory
from leasehold.errors import NotReady

from schema import clock
from schema.moves.submit import submit_at_once
from schema.postgres import migrate
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, completed
from tests.support.race import cancel, retention

IMPATIENT = DatabaseSettings(statement_timeout=0.1, lock_timeout=0.05)
WAITED = Statement(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    " AND clock_timestamp() - query_start > interval '300 ms'"
)
LEFT = Statement(
    "SELECT relname FROM pg_class WHERE relnamespace = 'leasehold'::regnamespace"
    " UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'leasehold'::regnamespace ORDER BY 1"
)
TABLES = Statement("SELECT relname FROM pg_class WHERE relnamespace = 'leasehold'::regnamespace AND relkind = 'r'")


@pytest.fixture
def empty(empty_url: str) -> Iterator[Database]:
    opened = Database(empty_url, IMPATIENT, role="test", chance=random.Random(0))
    yield opened
    opened.close()


def claim_version(database: Database, version: str) -> None:
    change = Statement("UPDATE alembic_version SET version_num = :version")
    database.run(lambda connection: connection.execute(change, {"version": version}))


def test_the_files_of_the_steps_begin_with_their_versions(empty: Database) -> None:
    steps = ScriptDirectory.from_config(migrate.alembic_config()).walk_revisions()
    assert list(migrate._known()) == [step.revision for step in steps]
    assert migrate.status(empty).needed == migrate._known()[0]


def test_an_empty_database_is_not_ready_and_the_refusal_says_what_to_run(empty: Database) -> None:
    version = migrate.status(empty)
    assert version.current is None
    assert not version.ready
    with pytest.raises(NotReady, match=rf"^schema none, need {version.needed}; run: leasehold db upgrade$"):
        migrate.require(empty)


def test_an_upgrade_makes_the_database_ready_and_may_be_repeated(empty: Database) -> None:
    version = migrate.upgrade(empty)
    assert version.ready
    migrate.require(empty)
    assert migrate.upgrade(empty) == version == migrate.status(empty)


def test_upgrades_that_run_at_once_all_end_well(empty_url: str) -> None:
    databases = [Database(empty_url, DatabaseSettings(), role="test", chance=random.Random(n)) for n in range(4)]
    with ThreadPoolExecutor(len(databases)) as threads:
        versions = list(threads.map(migrate.upgrade, databases))
    assert all(version.ready for version in versions)
    for database in databases:
        database.close()


def test_an_upgrade_is_not_killed_by_the_timeouts_of_everyday_work(empty: Database) -> None:
    with empty.listen() as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT pg_advisory_lock(hashtext('leasehold.migrate'))")
        upgrading = threads.submit(migrate.upgrade, empty)
        end = clock.monotonic() + 20
        while not empty.run(lambda connection: connection.execute(WAITED).scalar_one()):
            assert not upgrading.done()
            assert clock.monotonic() < end
            clock.sleep(0.02)
        other.execute("SELECT pg_advisory_unlock(hashtext('leasehold.migrate'))")
        assert upgrading.result(MINUTE).ready
    shown = empty.run(
        lambda connection: connection.execute(Statement("SHOW statement_timeout")).scalar_one(), urgent=True
    )
    assert shown == "100ms"


def test_an_upgrade_that_fails_leaves_nothing(empty: Database) -> None:
    empty.run(lambda connection: connection.execute_sql("CREATE SCHEMA leasehold; CREATE TABLE leasehold.audit ()"))
    with pytest.raises(psycopg.ProgrammingError, match="audit"):
        migrate.upgrade(empty)
    assert empty.run(lambda connection: connection.execute(TABLES).scalars().all()) == ["audit"]
    assert migrate.status(empty).current is None


def test_a_downgrade_drops_everything_and_an_upgrade_makes_it_again(empty: Database) -> None:
    version = migrate.upgrade(empty)
    with migrate.begin(empty) as connection:
        config = migrate.alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert empty.run(lambda c: c.execute(LEFT).scalars().all()) == ["alembic_version", "alembic_version_pkc"]
    assert migrate.status(empty).current is None
    assert migrate.upgrade(empty) == version


def test_a_database_of_the_first_version_keeps_its_jobs_and_takes_results(pool: Pool) -> None:
    """A job that ran before the upgrade leaves a result after it."""
    job, bot, work = pool.running()
    pool.change("DROP TABLE job_results, job_checkpoints")
    claim_version(pool.database, "0001")
    with pytest.raises(NotReady, match=r"^schema 0001, need "):
        migrate.require(pool.database)

    assert migrate.upgrade(pool.database).ready
    assert pool.job(job).state == "running"
    bot.sync(completed(work, result='{"answer": 42}'))
    assert pool.row("SELECT fence, result FROM job_results") == (work["fence"], {"answer": 42})


#: Makes of a database one in which every event has a row of its own, in a table.
_STORE_ALL_EVENTS = """
    CREATE TEMP TABLE told AS SELECT * FROM job_events WHERE id NOT IN (SELECT id FROM stored_events);
    DROP VIEW job_events;
    ALTER TABLE stored_events RENAME TO job_events;
    ALTER INDEX stored_events_pkey RENAME TO job_events_pkey;
    ALTER SEQUENCE stored_events_id_seq RENAME TO job_events_id_seq;
    INSERT INTO job_events OVERRIDING SYSTEM VALUE SELECT * FROM told;
    DROP TABLE told;
    UPDATE leases SET granted_event = NULL, acknowledged_event = NULL, ended_event = NULL;
    UPDATE job_payloads SET submitted_by = NULL
"""
_HISTORY = (
    "SELECT job_id, id, at, move, from_state, to_state, fence, actor, details FROM job_events ORDER BY job_id, id"
)


def test_a_database_with_stored_events_keeps_its_history_and_goes_on(pool: Pool) -> None:
    _, bot, work = pool.running()
    before = pool.rows(_HISTORY)
    assert [event.move for event in before] == ["submit", "grant", "acknowledge"]
    pool.change(_STORE_ALL_EVENTS)
    claim_version(pool.database, "0010")
    assert migrate.upgrade(pool.database).ready
    assert pool.rows(_HISTORY) == before
    bot.sync(completed(work))
    after = pool.rows(_HISTORY)
    assert after[:3] == before
    assert (after[3].move, after[3].details["verdict"]) == ("finish", "succeeded")


def test_a_process_of_the_version_before_writes_and_deletes_events_as_it_did(pool: Pool) -> None:
    pool.submit()
    pool.change("""
        WITH moved AS (UPDATE jobs SET state = 'parked' RETURNING id, fence)
        INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
        SELECT id, 'hold', 'queued', 'parked', fence, 'old', '{"reason": "a test"}' FROM moved""")
    told = pool.row("SELECT * FROM job_events ORDER BY id DESC LIMIT 1")
    assert (told.move, told.actor, told.details) == ("hold", "old", {"reason": "a test"})
    assert told == pool.row("SELECT * FROM stored_events")
    pool.change("""
        WITH old AS (SELECT id FROM jobs), payloads AS (DELETE FROM job_payloads), gone AS (DELETE FROM jobs)
        DELETE FROM job_events WHERE job_id = ANY (ARRAY(SELECT id FROM old))""")
    assert pool.rows("SELECT id FROM stored_events") == []
    assert pool.rows("SELECT id FROM job_events") == []


def test_a_database_of_a_newer_program_is_refused_by_name(database: Database) -> None:
    needed = migrate.status(database).needed
    claim_version(database, "9999")
    assert not migrate.status(database).ready
    for refused in (migrate.require, migrate.upgrade):
        with pytest.raises(NotReady, match=f"schema 9999 was made by a newer leasehold, need {needed}"):
            refused(database)
    assert migrate.status(database).current == "9999"


def test_a_database_that_cannot_be_reached_is_not_ready(tmp_path: object) -> None:
    settings = DatabaseSettings(outage_seconds=0)
    nowhere = Database(f"postgresql://nobody@/nothing?host={tmp_path}", settings, role="test", chance=random.Random(0))
    with pytest.raises(NotReady, match="cannot be reached"):
        migrate.require(nowhere)


def test_a_database_from_before_the_processes_of_bots_gets_their_columns(empty: Database) -> None:
    def columns(connection: Connection) -> list[Any]:
        return list(
            connection.execute(
                Statement("""
                SELECT column_name, data_type FROM information_schema.columns
                WHERE table_name = 'bots' AND column_name IN ('host', 'pid') ORDER BY 1""")
            )
        )

    needed = migrate.upgrade(empty).needed
    new = empty.run(columns)
    assert [tuple(column) for column in new] == [("host", "text"), ("pid", "integer")]
    empty.run(lambda c: c.execute(Statement("ALTER TABLE bots DROP COLUMN host, DROP COLUMN pid")))
    empty.run(lambda c: c.execute(Statement("UPDATE alembic_version SET version_num = '0001'")))
    assert migrate.upgrade(empty).current == needed
    assert empty.run(columns) == new
    with pytest.raises(psycopg.IntegrityError, match="bots_pid_positive"):
        empty.run(lambda c: c.execute(Statement("INSERT INTO bots (name, pid) VALUES ('b', 0)")))


def test_slots_of_a_database_from_before_move_into_the_row_of_running_jobs(empty: Database) -> None:
    migrate.upgrade(empty)
    for change in (
        "ALTER TABLE counters DROP COLUMN slots",
        "INSERT INTO counters (name, most) VALUES ('instance:a\\:jobs', 9), ('instance:a\\:slots', 4),"
        " ('instance:b\\:slots', 5), ('instance:c\\:slots', NULL), ('lock:a\\:slots', 3)",
        "UPDATE alembic_version SET version_num = '0010'",
    ):
        empty.run(lambda c, change=change: c.execute(Statement(change)))
    migrate.upgrade(empty)
    rows = empty.run(lambda c: c.execute(Statement("SELECT name, most, slots FROM counters ORDER BY name")).all())
    assert [tuple(row) for row in rows] == [
        ("instance:a:jobs", 9, 4),
        ("instance:a:slots", None, None),
        ("instance:b:jobs", None, 5),
        ("instance:b:slots", None, None),
        ("instance:c:slots", None, None),
        ("lock:a:slots", 3, None),
    ]


def test_requirement_sets_of_a_database_from_before_need_no_second_look(pool: Pool) -> None:
    pool.submit(properties={"os": "linux"})
    pool.change("ALTER TABLE platforms DROP COLUMN linked")
    claim_version(pool.database, "0018")
    assert migrate.upgrade(pool.database).ready
    pool.submit(properties={"os": "plan9"})
    assert [row.linked for row in pool.rows("SELECT linked FROM platforms ORDER BY id")] == [True, False]


def keep_keys_with_jobs(pool: Pool) -> None:
    """Make of a database one in which keys leave with their jobs."""
    for change in (
        "ALTER TABLE submit_keys ALTER COLUMN public_id DROP NOT NULL, DROP COLUMN created_at",
        "ALTER TABLE submit_keys RENAME COLUMN public_id TO follower",
        "UPDATE submit_keys SET follower = NULL",
        "CREATE INDEX submit_keys_of_job ON submit_keys (job_id)",
    ):
        pool.change(change)
    claim_version(pool.database, "0032")


def test_keys_of_a_database_from_before_outlive_their_jobs_too(pool: Pool) -> None:
    (job,) = pool.submit(key="a")
    keep_keys_with_jobs(pool)
    assert migrate.upgrade(pool.database).ready
    cancel(pool, job)
    assert retention(pool) == 1
    assert pool.submit(key="a") == [job]


def test_keys_of_submits_that_are_open_during_the_upgrade_outlive_their_jobs_too(pool: Pool) -> None:
    (job,) = pool.submit(key="a")
    keep_keys_with_jobs(pool)
    insert = """
        INSERT INTO submit_keys (instance, key, request_hash, job_id)
        SELECT instance, :key, request_hash, {} FROM submit_keys WHERE key = 'a'"""
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with pool.database.connect() as submitting, ThreadPoolExecutor(1) as threads:
        for key, job_id in (("open", "job_id"), ("orphan", "0")):
            submitting.execute(Statement(insert.format(job_id)), {"key": key})
        upgrading = threads.submit(migrate.upgrade, pool.database)
        eventually(lambda: upgrading.done() or bool(pool.rows(waiting)))
        submitting.commit()
        assert upgrading.result(MINUTE).ready
    rows = pool.rows("SELECT key, public_id::text AS job FROM submit_keys ORDER BY key")
    assert [tuple(row) for row in rows] == [("a", job), ("open", job)]


@pytest.mark.parametrize("version", ["0005", "0009", "0010", "0013"])
def test_functions_that_submit_are_loaded_before_those_that_they_call(
    empty: Database, empty_url: str, version: str
) -> None:
    """As in a database of an earlier version, which has only some of them."""
    migrate.upgrade(empty)
    for change in (
        "DROP FUNCTION submit",
        "DROP FUNCTION submit_many",
        "DROP FUNCTION read_requests",
        "DROP FUNCTION known_queue",
        "DROP FUNCTION bulk_public_id",
        "DROP FUNCTION new_public_id",
        f"UPDATE alembic_version SET version_num = '{version}'",
    ):
        empty.run(lambda c, change=change: c.execute(Statement(change)))
    migrate.upgrade(empty)
    # The first submit of a session plans for as long as an impatient one waits.
    with closing(Database(empty_url, DatabaseSettings(), role="test", chance=random.Random(0))) as database:
        requests = '[{"command": ["true"]}, {"command": ["false"]}]'
        submitted = Statement("SELECT count(*) FROM submit(CAST(:requests AS jsonb))")
        assert database.run(lambda c: c.execute(submitted, {"requests": requests}).scalar_one()) == 2
        two = [{"payload": {"command": ["true"]}}] * 2
        for requests_ in (two, two[:1]):
            made = database.run_alone(
                lambda driver, requests_=requests_: submit_at_once(driver, requests_, actor="test")
            )
            assert len(made) == len(requests_)
