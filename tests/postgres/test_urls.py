"""URLs of servers: several hosts for pools and LISTEN alike, and mistakes that are named without showing a password."""

import random
from collections.abc import Iterator

import psycopg
import pytest
from leasehold.errors import NotReady
from psycopg import sql
from sqlalchemy import make_url

from schema.postgres import urls
from schema.postgres.engine import Database, DatabaseSettings, single_row
from schema.postgres.notify import Wakeups
from schema.postgres.statements import Statement
from tests.support.patience import eventually
from tests.support.servers import serving_in_memory

WHERE = b"SELECT current_setting('transaction_read_only'), current_setting('data_directory')"


@pytest.fixture(scope="module")
def standby_url(server_url: str) -> Iterator[str]:
    """A server that refuses writes, as a standby does. It has the role by which the tests' server is reached."""
    with serving_in_memory() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            wanted = make_url(server_url).username
            if wanted != make_url(url).username:
                connection.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN").format(sql.Identifier(wanted or "")))
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
        yield url


def hosts_of(*given: str, database: str | None, more: str = "") -> str:
    """A URL with the hosts of several URLs."""
    parsed = [make_url(url) for url in given]
    hosts = ",".join(str(each.query.get("host") or each.host).replace("/", "%2F") for each in parsed)
    ports = ",".join(str(each.query.get("port") or each.port or 5432) for each in parsed)
    user = parsed[-1].username
    return f"postgresql://{user}@/{database}?host={hosts}&port={ports}{more}"


def named(url: str) -> Database:
    return Database(url, DatabaseSettings(outage_seconds=0), role="test", chance=random.Random(0))


def test_of_several_hosts_the_one_that_accepts_writes_serves_transactions_single_statements_and_listening(
    database_url: str, standby_url: str
) -> None:
    name = make_url(database_url).database
    with psycopg.connect(standby_url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f'CREATE DATABASE "{name}"')
    dead = "postgresql://nobody@127.0.0.1:1/none"
    database = named(hosts_of(dead, standby_url, database_url, database=name))
    wakeups = Wakeups(database)
    try:
        database.run(lambda connection: connection.execute(Statement("UPDATE cohorts SET name = name")))
        alone = database.run_alone(lambda driver: single_row(driver, WHERE))
        assert alone[0] == b"off"
        with database.listen() as listening:
            row = listening.execute(WHERE).fetchone()
        assert [str(value).encode() for value in row or ()] == alone
        wakeups.start()
        eventually(lambda: wakeups.connected, what="wake-ups arrive")
    finally:
        wakeups.stop()
        database.close()
    reading = named(hosts_of(standby_url, database_url, database=name, more="&target_session_attrs=any"))
    found = reading.run(lambda connection: connection.execute_sql(WHERE.decode()).one())
    reading.close()
    assert found[0] == "on", "the URL chooses otherwise than the default"


def test_without_a_host_that_accepts_writes_the_database_cannot_be_reached(standby_url: str) -> None:
    database = named(hosts_of(standby_url, standby_url, database=make_url(standby_url).database))
    with pytest.raises(NotReady):
        database.run(lambda connection: connection.execute_sql("SELECT 1"))
    database.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://u:hunter2@h/d", "must be a postgresql:// URL"),
        ("hunter2", "must be a postgresql:// URL"),
        ("postgresql://u:hunter2/x@h/d", "a character that has to be encoded"),
        ("postgresql://u:1/hunter2@h/d", "a character that has to be encoded"),
        ("postgresql://u:hunter2%zz@h/d", "is not a URL that libpq can read"),
        ("postgresql://h/d?hunter2=1", "is not a URL that libpq can read"),
        ("postgresql://u:hunter2@h:port/d", "has a port that is not a number"),
        ("postgresql://u:hunter2@h:70000/d", "has a port outside 1 to 65535"),
        ("postgresql://u:hunter2@/d?host=h1,h2,h3&port=1,2", "has not as many ports as hosts"),
        ("postgresql://u:hunter2@/d?host=h1:5432&host=h2:5432", "write postgresql://host1:port1,host2:port2/database"),
        ("postgresql://u:hunter2@/d?host=h1:5432", "write postgresql://host1:port1,host2:port2/database"),
    ],
)
def test_a_url_that_libpq_does_not_take_is_refused_and_nothing_of_it_is_shown(url: str, said: str) -> None:
    mistake = urls.find_mistake(url)
    assert mistake is not None
    assert said in mistake
    assert "hunter2" not in mistake
    assert urls.without_password(url) == "***"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hunter2@h1:1,h2:2/d", "postgresql://u:***@h1:1,h2:2/d"),
        ("postgresql://u:hunter2?@h/d", "postgresql://u:***@h/d"),
        ("postgres://h/d?user=u&pass%77ord=hunter2", "postgres://h/d?user=u&pass%77ord=***"),
        (
            "postgresql+psycopg://u@[::1]:5432/d?sslpassword=hunter2",
            "postgresql+psycopg://u@[::1]:5432/d?sslpassword=***",
        ),
        ("postgresql://u@/d?host=%2Fvar%2Frun%2Fpostgresql", "postgresql://u@/d?host=%2Fvar%2Frun%2Fpostgresql"),
        ("postgresql://", "postgresql://"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert urls.find_mistake(url) is None
    assert urls.without_password(url) == shown


def test_several_hosts_mean_one_that_accepts_writes_unless_the_url_says_otherwise() -> None:
    assert urls.libpq_url("postgresql+psycopg://h/d") == "postgresql://h/d"
    assert urls.libpq_url("postgresql://h1,h2:5433") == "postgresql://h1,h2:5433?target_session_attrs=read-write"
    assert urls.libpq_url("postgresql:///d?host=h1,h2").endswith("host=h1,h2&target_session_attrs=read-write")
    standby = "postgresql://h1,h2/d?target_session_attrs=standby"
    assert urls.libpq_url(standby) == standby
