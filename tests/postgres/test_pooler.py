"""A pooler in transaction mode: safe when it is named, found and refused when it is not. Runs a real PgBouncer."""

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from leasehold.errors import NotReady
from pydantic import SecretStr

from ops.bench import pgbouncer
from schema.diagnostics import invariants
from schema.moves import submit as submit_moves
from schema.postgres import migrate, pooler
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings, libpq_url, session_settings, single_row
from schema.postgres.notify import Wakeups
from schema.postgres.statements import Statement
from tests.support.patience import eventually
from tests.support.servers import Console

pytestmark = pytest.mark.skipif(not pgbouncer.is_installed(), reason="PgBouncer is not installed")

#: Connections that the pooler has to the server, for many more clients.
SERVERS = 3
PID = "SELECT pg_backend_pid()"


@pytest.fixture(scope="module")
def directory(server_url: str) -> Iterator[str]:
    """Where the socket of a PgBouncer in transaction mode is, with a few connections to the server."""
    with pgbouncer.pooled(server_url, servers=SERVERS) as url:
        yield pgbouncer.directory_of(url)


@pytest.fixture
def pooled_url(directory: str, database_url: str) -> str:
    """The URL of the test's own database through that PgBouncer."""
    return pgbouncer.through(directory, database_url)


def through(url: str, direct: str, **settings: Any) -> Database:
    """The database through a pooler that the settings name."""
    named = {"pooler": "transaction", "listen_url": SecretStr(direct), "outage_seconds": 0} | settings
    return Database(url, DatabaseSettings(**named), role="test", chance=random.Random(0))


def test_a_transaction_through_a_pooler_makes_no_setting_that_counts_between_transactions(database_url: str) -> None:
    with closing(through(database_url, database_url)) as database:
        made = database.settings_for_steps()
    assert any("idle_in_transaction_session_timeout" in each for each in made)
    assert not any("idle_session_timeout" in each for each in made)


def unnamed(url: str) -> Database:
    """The database at `url` as if no pooler were there."""
    return Database(url, DatabaseSettings(outage_seconds=0), role="test", chance=random.Random(0))


@contextmanager
def in_session_mode(
    server_url: str, database_url: str, *, role: str | None = None, more: str = ""
) -> Iterator[Database]:
    with pgbouncer.pooled(server_url, servers=20, mode="session", more=more, role=role) as url:
        host = pgbouncer.directory_of(url)
        with closing(unnamed(pgbouncer.through(host, database_url))) as database:
            yield database


def test_many_clients_with_statements_of_their_own_get_their_own_answers(pooled_url: str, database_url: str) -> None:
    wrong: list[object] = []

    def work(client: int) -> None:
        chance = random.Random(client)
        with closing(through(pooled_url, database_url, pool=2)) as database:
            for _ in range(120):
                kind = chance.randrange(12)
                said = f"statement {client} {kind}"
                try:
                    if kind % 4 == 0:
                        (got,) = database.run_alone(
                            lambda driver, said=said: single_row(driver, f"SELECT '{said}' || $1".encode(), b"!")
                        )
                        answer = (got or b"").decode().removesuffix("!")
                    else:
                        more = "".join(f", CAST(:v{n} AS integer)" for n in range(kind % 3))
                        statement, values = Statement(f"SELECT '{said}'{more}"), {"v0": 1, "v1": 2}
                        answer = database.run(lambda c, s=statement, v=values: c.execute(s, v).first(), repeat=False)[0]
                    if answer != said:
                        wrong.append((said, answer))
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"{len(wrong)}, such as {wrong[:3]}"


def test_an_upgrade_goes_through_a_pooler_too(pooled_url: str, empty_url: str) -> None:
    ours = "SELECT DISTINCT pronamespace::regnamespace::text FROM pg_proc WHERE proname IN ('submit', 'submit_graph')"
    path = "SELECT replace(proconfig::text, ' ', '') FROM pg_proc WHERE proname = 'submit_graph'"
    with closing(through(pooled_url, empty_url)) as database:
        assert migrate.upgrade(database).ready
        assert database.run(lambda c: c.execute_sql(ours).scalars().all()) == ["leasehold"]
        assert "search_path=leasehold,pg_temp" in database.run(lambda c: c.execute_sql(path).scalar_one())


def test_each_transaction_brings_its_settings_and_leaves_none_behind(pooled_url: str, database_url: str) -> None:
    settings = DatabaseSettings(statement_timeout=7.5)
    wanted = session_settings(settings)
    with (
        closing(through(pooled_url, database_url, statement_timeout=7.5)) as database,
        psycopg.connect(pooled_url, autocommit=True) as other,
    ):
        seen = database.run(lambda connection: pooler.look(connection, list(wanted)))
        assert pooler.find_lost(seen, wanted) is None
        rows = "SELECT string_agg(setting, ';' ORDER BY lower(name)) FROM pg_settings WHERE lower(name) = ANY ($1)"
        names = ("{" + ",".join(wanted) + "}").encode()
        (alone,) = database.run_alone(lambda driver: single_row(driver, rows.encode(), names))
        assert (alone or b"").decode().split(";") == [wanted[name] for name in sorted(wanted)]
        assert other.execute("SELECT current_setting('search_path')").fetchone() == ('"$user", public',)
        assert database.find_pooler_problem() is None


def test_transactions_through_a_pooler_are_as_any_other_and_the_database_is_verified_in_one_snapshot(
    pooled_url: str, database_url: str
) -> None:
    def shown(connection: Connection, *names: str) -> list[str]:
        return [connection.execute(Statement(f"SHOW {name}")).scalar_one() for name in names]

    def isolation(connection: Connection) -> list[str]:
        connection.execute(invariants.SNAPSHOT)
        return shown(connection, "transaction_isolation", "transaction_read_only", "search_path")

    with closing(through(pooled_url, database_url, pool=1)) as database:
        for kept_plans in (True, False) * 6:
            found = database.run(lambda c: shown(c, "plan_cache_mode", "enable_seqscan"), kept_plans=kept_plans)
            assert found == ["auto", "off"]
        assert not any(finding.rows for finding in invariants.verify(database))
        assert database.run(isolation) == ["repeatable read", "on", "leasehold, pg_temp"]


def test_a_single_statement_that_fails_is_undone_and_the_connection_goes_on(pooled_url: str, database_url: str) -> None:
    with closing(through(pooled_url, database_url, pool=1, statement_timeout=0.2)) as database:
        for statement, code in ((b"SELECT 1 / $1::integer", "22012"), (b"SELECT pg_sleep(60 + $1::integer)", "57014")):
            with pytest.raises(psycopg.Error) as raised:
                database.run_alone(lambda driver, statement=statement: single_row(driver, statement, b"0"))
            assert getattr(raised.value, "sqlstate", None) == code
        request = {"instance": "i", "properties": {}, "payload": {"command": ["true"]}, "key": "k"}
        both = [
            database.run_alone(lambda driver: submit_moves.submit_alone(driver, request, actor="test"))
            for _ in range(2)
        ]
        assert [each.created for each in both] == [True, False]
        alike = [request | {"key": key} for key in "ab"]
        twice = [
            database.run_alone(lambda driver: submit_moves.submit_at_once(driver, alike, actor="test"))
            for _ in range(2)
        ]
        assert [[each.created for each in answers] for answers in twice] == [[True, True], [False, False]]


def test_a_session_that_ends_costs_a_repetition(pooled_url: str, database_url: str) -> None:
    with closing(through(pooled_url, database_url, pool=1, outage_seconds=30)) as database:
        tries: list[int] = []

        def ended_once(connection: Any) -> int:
            tries.append(connection.execute_sql(PID).scalar_one())
            if len(tries) == 1:
                with psycopg.connect(libpq_url(database_url), autocommit=True) as direct:
                    direct.execute("SELECT pg_terminate_backend(%s, 10000)", (tries[0],))
            return int(connection.execute_sql("SELECT 1").scalar_one())

        assert database.run(ended_once) == 1
        assert len(tries) == 2
        (answer,) = database.run_alone(lambda driver: single_row(driver, b"SELECT 'on'"))
        assert answer == b"on"


def test_wake_ups_come_by_the_direct_way(pooled_url: str, database_url: str) -> None:
    with closing(through(pooled_url, database_url)) as database:
        wakeups = Wakeups(database)
        woken = threading.Event()
        wakeups.subscribe("pooled", lambda _: woken.set())
        wakeups.start()
        eventually(lambda: wakeups.connected, what="wake-ups arrive")
        with wakeups.idle("pooled"):
            database.run(lambda connection: connection.execute(Statement("SELECT leasehold.wake('pooled', '')")))
            assert woken.wait(60)
        wakeups.stop()


def test_a_pooler_that_is_not_named_is_found_idle_or_busy(server_url: str, pooled_url: str, database_url: str) -> None:
    with psycopg.connect(libpq_url(database_url), autocommit=True) as connection:
        name = connection.info.dbname
        for setting, value in session_settings(DatabaseSettings()).items():
            connection.execute(
                psycopg.sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                    psycopg.sql.Identifier(name),
                    psycopg.sql.Identifier(setting),
                    psycopg.sql.SQL(value) if setting == "search_path" else psycopg.sql.Literal(value),
                )
            )
    drops = "ignore_startup_parameters = options"
    for more in (drops, f"{drops}\nserver_round_robin = 1"):
        with pgbouncer.pooled(server_url, servers=SERVERS, more=more) as url:
            host = pgbouncer.directory_of(url)
            for _ in range(2):  # the first process leaves prepared statements in the sessions
                with closing(unnamed(pgbouncer.through(host, database_url))) as database:
                    assert database.find_pooler_problem() == pooler.SHARED, "idle"
            with closing(unnamed(pgbouncer.through(host, database_url))) as database:
                with psycopg.connect(pgbouncer.through(host, database_url)) as busy:
                    busy.execute(PID)
                    assert database.find_pooler_problem() == pooler.SHARED, "another transaction is open"
    with closing(unnamed(database_url)) as direct:
        assert direct.find_pooler_problem() is None


def test_a_pooler_that_refuses_options_is_named_at_once(pooled_url: str) -> None:
    with closing(Database(pooled_url, DatabaseSettings(), role="test", chance=random.Random(0))) as database:
        with pytest.raises(NotReady, match=r"set database\.pooler"):
            database.run(lambda connection: connection.execute_sql("SELECT 1"))


def test_listening_through_a_transaction_pooler_is_refused(server_url: str, pooled_url: str, database_url: str) -> None:
    with closing(through(pooled_url, pooled_url)) as database:
        assert database.find_pooler_problem() == pooler.LISTEN_SHARED, "it refuses options"
    with pgbouncer.pooled(server_url, servers=SERVERS, more="ignore_startup_parameters = options") as url:
        host = pgbouncer.directory_of(url)
        with closing(through(pooled_url, pgbouncer.through(host, database_url))) as database:
            assert database.find_pooler_problem() == pooler.LISTEN_SHARED, "it drops options"
    with closing(through(pooled_url, "postgresql://nobody@127.0.0.1:1/none")) as database:
        assert database.find_pooler_problem() is None, "the listener tries again by itself"


def test_in_session_mode_lost_settings_are_named_with_how_to_store_them(server_url: str, database_url: str) -> None:
    role = f"leasehold_test_{uuid4().hex}"
    with psycopg.connect(libpq_url(database_url), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
        try:
            drops = "ignore_startup_parameters = options"
            with in_session_mode(server_url, database_url, role=role, more=drops) as database:
                problem = database.find_pooler_problem()
                assert problem is not None
                assert "search_path" in problem.found
                for statement in problem.remedy.removeprefix("run: ").split("; ")[:-1]:
                    assert statement.startswith(f'ALTER ROLE "{role}" SET ')
                    connection.execute(statement)
            with in_session_mode(server_url, database_url, role=role, more=drops) as database:
                assert database.find_pooler_problem() is None
        finally:
            connection.execute(f"DROP ROLE {role}")


def test_no_process_starts_on_a_pooler_that_is_not_named_and_the_doctor_says_why(
    tmp_path: Path, leasehold: Path, pooled_url: str, database_url: str
) -> None:
    console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=pooled_url)
    for command in (["gateway"], ["assign"], ["db", "upgrade"]):
        done = console.run(*command)
        assert done.returncode == 3
        assert 'set database.pooler = "transaction"' in done.stderr
    console = Console(
        tmp_path,
        leasehold,
        LEASEHOLD_DATABASE_URL=pooled_url,
        LEASEHOLD_DATABASE_POOLER="transaction",
        LEASEHOLD_DATABASE_LISTEN_URL=database_url,
    )
    said = console.run("db", "doctor").stdout
    assert 'ok       pooler         database.pooler is "transaction"' in said
    assert "ok       wake-ups" in said
