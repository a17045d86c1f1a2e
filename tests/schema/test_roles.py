"""What roles of the database need, and no more: the owner, processes of the pool, programs that submit."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import structlog
from leasehold.errors import Forbidden, NotReady
from psycopg import sql
from sqlalchemy import make_url
from structlog.testing import capture_logs

from assigner import logs
from schema.moves.waiting.requeue import requeue
from schema.postgres import migrate
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.tenancy.restored import continue_fences
from schema.tenancy.roles import grant_process, grant_submit
from schema.timing import Timing
from tests.support.http import audited
from tests.support.pool import Pool, completed
from tests.support.race import cancel
from tests.support.servers import Console

SUBMIT = "SELECT count(*) FROM leasehold.submit(%s)"
JOBS = json.dumps([{"command": ["true"]}, {"command": ["true"], "dedup_key": "a", "label": "x"}])


@contextmanager
def role(url: str, *grants: str) -> Iterator[tuple[str, str]]:
    """A role with these rights on the database, and the URL with which a session is its own."""
    name = f"leasehold_test_{uuid4().hex[:12]}"
    with psycopg.connect(libpq_url(url), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        for grant in grants:
            admin.execute(sql.SQL(grant).format(sql.Identifier(name)))  # type: ignore[arg-type]
        database = sql.Identifier(str(make_url(url).database))
        try:
            yield name, url
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(name)))
            admin.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM {}").format(database, sql.Identifier(name)))
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@contextmanager
def role_of_processes(database: Database) -> Iterator[str]:
    """A role as gateways and assigners may have it, and a table that the owner makes later, as an upgrade does."""
    with role(database.url) as (name, _):
        database.run(lambda c: grant_process(c, name, actor="test"))
        database.run(lambda c: c.execute_sql(f"GRANT EXECUTE ON FUNCTION submit TO {name}"))
        database.run(lambda c: c.execute_sql("CREATE TABLE of_an_upgrade (id bigint GENERATED ALWAYS AS IDENTITY)"))
        yield name


@contextmanager
def opened_as(url: str, name: str, chance: random.Random) -> Iterator[Database]:
    """Connections that have only the rights of the role."""
    connect = psycopg.Connection.connect.__func__  # type: ignore[attr-defined]

    def become(cls: "type[psycopg.Connection[Any]]", *args: Any, **named: Any) -> "psycopg.Connection[Any]":
        made: psycopg.Connection[Any] = connect(cls, *args, **named)
        made.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(name)))
        if not made.autocommit:
            made.commit()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Connection, "connect", classmethod(become))
        database = Database(url, DatabaseSettings(), role="test", chance=chance)
        try:
            yield database
        finally:
            database.close()


def test_the_owner_of_the_schema_upgrades_it_without_other_rights(empty_url: str, chance: random.Random) -> None:
    with role(empty_url) as (name, url), opened_as(url, name, chance) as database:
        with pytest.raises(Exception, match="permission denied for database"):
            migrate.upgrade(database)
        with psycopg.connect(libpq_url(empty_url), autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE SCHEMA leasehold AUTHORIZATION {}").format(sql.Identifier(name)))
        assert migrate.upgrade(database).ready
        assert migrate.upgrade(database).ready


def test_processes_need_no_more_than_rights_on_rows(database: Database, timing: Timing, chance: random.Random) -> None:
    with role_of_processes(database) as name, opened_as(database.url, name, chance) as limited:
        limited.run(lambda c: c.execute_sql("INSERT INTO of_an_upgrade DEFAULT VALUES"))
        pool = Pool(limited, timing, chance)
        pool.submit(2, label="a", properties={"os": "linux"})
        pool.submit(dedup_key="d")
        bot = pool.bot(capacity=4, properties={"os": "linux"})
        pool.assigner().run_once()
        bot.sync(*[completed(work) for work in bot.take()])
        (gone,) = pool.submit()
        cancel(pool, gone)
        (again,) = limited.run(
            lambda c: requeue(c, [gone], instances=None, ceiling=None, key=None, reason=None, actor="test")
        )
        assert again.changed
        pool.change("UPDATE scheduling SET max_queue_size = 5")
        with capture_logs() as logs:
            pool.upkeep().run_once()
        assert logs == []
        pool.retention(keep_succeeded=0).run_once()
        with pytest.raises(Exception, match="must be owner"):
            pool.change("DROP TABLE jobs")


def test_who_does_not_own_the_schema_is_told_so_by_an_upgrade(empty_url: str, tmp_path: Path, leasehold: Path) -> None:
    with role(empty_url, "ALTER ROLE {} LOGIN") as (name, _), psycopg.connect(libpq_url(empty_url)) as admin:
        admin.execute("CREATE SCHEMA leasehold")
        admin.commit()
        url = make_url(empty_url).set(username=name).render_as_string(hide_password=False)
        console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=url)
        told = console.run("db", "upgrade").stderr
        assert told.startswith("error: database: permission denied for ")
        assert told.endswith("; run this as the role that owns the schema\n")


def test_the_log_names_the_right_that_is_missing_and_no_value(
    database: Database, chance: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    before = structlog.get_config()
    with role(database.url) as (name, url), opened_as(url, name, chance) as limited:
        try:
            logs.to_stderr("ERROR")
            for refused in ("SELECT FROM leasehold.jobs", "SELECT CAST('secret' AS integer)"):
                try:
                    limited.run(lambda c, text=refused: c.execute_sql(text))  # type: ignore[misc]
                except psycopg.Error:
                    structlog.get_logger().exception("refused")
        finally:
            structlog.configure(**before)
    told = capsys.readouterr().err
    assert "SQLSTATE 42501, permission denied for schema leasehold" in told
    assert "SQLSTATE 22P02" in told
    assert "secret" not in told


def test_a_role_that_may_submit_does_nothing_else(database: Database, tmp_path: Path, leasehold: Path) -> None:
    console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=database.url)
    with role(database.url) as (name, url), psycopg.connect(libpq_url(url), autocommit=True) as program:
        program.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(name)))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            program.execute(SUBMIT, (JOBS,))
        told = console.good("db", "grant-submit", name)
        assert told.startswith("database postgresql://")
        assert told.endswith(f"\n{name} may call leasehold.submit\n")
        assert program.execute(SUBMIT, (JOBS,)).fetchone() == (2,)
        assert program.execute(SUBMIT, (JOBS,)).fetchone() == (2,)
        program.execute("SET search_path = leasehold")
        for forbidden in (
            "SELECT FROM leasehold.jobs",
            "DELETE FROM leasehold.jobs",
            'SELECT leasehold.submit_graph(\'{"name": "g", "nodes": [{"node": 1, "command": ["true"]}]}\')',
            'SELECT leasehold.submit_alone(\'{"payload": {"command": ["true"]}}\', \'x\')',
            "SELECT leasehold.intern_instance('mine')",
            "SELECT last_value FROM leasehold.jobs_id_seq",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                program.execute(forbidden.encode())
    assert "no role 'nobody-at-all'" in console.refused("db", "grant-submit", "nobody-at-all")


def test_who_may_not_grant_is_told_so_and_grants_nothing(database: Database, chance: random.Random) -> None:
    """The server itself only warns a role that has the right and may not pass it on."""
    with (
        role_of_processes(database) as name,
        role(database.url) as (program, url),
        opened_as(url, name, chance) as limited,
    ):
        with pytest.raises(Forbidden, match=f"{program} may still not call leasehold.submit: .* the owner of the"):
            limited.run(lambda c: grant_submit(c, program, actor="local"))
        with pytest.raises(Forbidden, match=r"only the owner of the schema leasehold, .*, can grant this"):
            limited.run(lambda c: grant_process(c, program, actor="local"))
        with pytest.raises(Forbidden, match=r"only the owner of the schema leasehold, .*, can do this"):
            limited.run(lambda c: continue_fences(c, actor="local"))
    assert not {"db.grant_submit", "db.restored"} & {*audited(database)}


def test_a_server_that_is_too_old_is_told_so_before_anything_is_made(
    empty_url: str, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "OLDEST", 99)
    database = Database(empty_url, DatabaseSettings(), role="test", chance=chance)
    with pytest.raises(NotReady, match=r"the server is PostgreSQL \d+.*, need 99 or newer; upgrade the server first"):
        migrate.upgrade(database)
    assert migrate.status(database).current is None
    database.close()
