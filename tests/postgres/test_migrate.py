"""Upgrades are repeatable, safe side by side, all or nothing, and refuse what they do not know."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from alembic import command
from alembic.script import ScriptDirectory
from leasehold.errors import NotReady

from schema import clock
from schema.postgres import migrate
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from tests.support.patience import MINUTE
from tests.support.pool import Pool, completed

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


def test_an_upgrade_makes_an_empty_database_ready_may_be_repeated_and_be_taken_back(empty: Database) -> None:
    version = migrate.status(empty)
    assert (version.current, version.ready) == (None, False)
    with pytest.raises(NotReady, match=rf"^schema none, need {version.needed}; run: leasehold db upgrade$"):
        migrate.require(empty)
    version = migrate.upgrade(empty)
    assert version.ready
    migrate.require(empty)
    assert migrate.upgrade(empty) == version == migrate.status(empty)
    with migrate.begin(empty) as connection:
        config = migrate.alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert empty.run(lambda c: c.execute(LEFT).scalars().all()) == ["alembic_version", "alembic_version_pkc"]
    assert migrate.status(empty).current is None
    assert migrate.upgrade(empty) == version


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


def test_an_upgrade_whose_program_stands_still_for_a_while_goes_on(empty_url: str) -> None:
    impatient = DatabaseSettings(idle_in_transaction_timeout=0.05)
    with migrate.begin(Database(empty_url, impatient, role="test", chance=random.Random(0))) as connection:
        clock.sleep(0.2)
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1


def test_an_upgrade_that_fails_leaves_nothing(empty: Database) -> None:
    empty.run(lambda connection: connection.execute_sql("CREATE SCHEMA leasehold; CREATE TABLE leasehold.audit ()"))
    with pytest.raises(psycopg.ProgrammingError, match="audit"):
        migrate.upgrade(empty)
    assert empty.run(lambda connection: connection.execute(TABLES).scalars().all()) == ["audit"]
    assert migrate.status(empty).current is None


def test_a_database_of_the_last_revision_before_the_baseline_is_taken_over_as_it_is(pool: Pool) -> None:
    job, bot, work = pool.running()
    claim_version(pool.database, migrate.LAST_BEFORE)
    with pytest.raises(NotReady, match=rf"^schema {migrate.LAST_BEFORE}, need .*; run: leasehold db upgrade$"):
        migrate.require(pool.database)
    assert migrate.upgrade(pool.database).ready
    bot.sync(completed(work))
    assert pool.job(job).state == "succeeded"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        *((older, f"schema {older} was made before 0.2.0, which upgrades 0035 only") for older in ("0001", "0034")),
        ("9999", "schema 9999 was made by a newer leasehold, need 00"),
    ],
)
def test_a_database_that_is_too_old_or_too_new_is_left_as_it_is(database: Database, version: str, said: str) -> None:
    claim_version(database, version)
    assert not migrate.status(database).ready
    for refused in (migrate.require, migrate.upgrade):
        with pytest.raises(NotReady, match=said):
            refused(database)
    assert migrate.status(database).current == version


def test_a_database_that_cannot_be_reached_is_not_ready(tmp_path: object) -> None:
    settings = DatabaseSettings(outage_seconds=0)
    nowhere = Database(f"postgresql://nobody@/nothing?host={tmp_path}", settings, role="test", chance=random.Random(0))
    with pytest.raises(NotReady, match="cannot be reached"):
        migrate.require(nowhere)
