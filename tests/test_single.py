"""A statement that is a transaction of its own, and what becomes of it when the connection or a lock is not there."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from schema import single
from schema.engine import Database, DatabaseSettings
from schema.errors import NotReady
from tests.patience import MINUTE
from tests.pool import Pool

DOUBLED = b"SELECT 2 * CAST($1 AS integer), CAST(NULL AS text), $2"
BACKEND = b"SELECT pg_backend_pid()"
WRITTEN = b"INSERT INTO queue_limits (label, max_queued) VALUES ($1, 1 / CAST($2 AS integer)) RETURNING label"


def limits(pool: Pool) -> int:
    found: int = pool.row("SELECT count(*) AS n FROM queue_limits").n
    return found


def test_a_row_comes_as_text(database: Database) -> None:
    assert database.run_alone(lambda driver: single.row(driver, DOUBLED, b"21", "é".encode())) == [
        b"42",
        None,
        "é".encode(),
    ]


def test_a_statement_commits_by_itself_and_leaves_nothing_when_it_fails(pool: Pool) -> None:
    def written(label: bytes, divisor: bytes) -> list[bytes | None]:
        return pool.database.run_alone(lambda driver: single.row(driver, WRITTEN, label, divisor))

    assert written(b"a", b"1") == [b"a"]
    with pytest.raises(DBAPIError) as failed:
        written(b"b", b"0")
    assert isinstance(failed.value.orig, psycopg.errors.DivisionByZero)
    assert limits(pool) == 1


def test_a_statement_that_the_session_has_forgotten_is_prepared_again(database: Database) -> None:
    def doubled(driver: "psycopg.Connection[object]") -> list[bytes | None]:
        return single.row(driver, DOUBLED, b"1", b"")

    for forgetting in (b"DEALLOCATE ALL", b"DISCARD ALL; SET search_path TO leasehold"):
        assert [database.run_alone(doubled) for _ in range(2)] == [[b"2", None, b""]] * 2
        database.run_alone(lambda driver, forgetting=forgetting: driver.pgconn.exec_(forgetting))
    with pytest.raises(DBAPIError):
        database.run(lambda connection: connection.execute(text("SELECT 1 / 0")))
    assert database.run_alone(doubled) == [b"2", None, b""]


def test_a_connection_that_comes_back_within_a_transaction_is_not_lent_again(database: Database) -> None:
    def backend(driver: "psycopg.Connection[object]") -> bytes | None:
        return single.row(driver, BACKEND)[0]

    first = database.run_alone(backend)
    assert database.run_alone(backend) == first
    database.run_alone(lambda driver: driver.pgconn.exec_(b"BEGIN"))
    assert database.run_alone(backend) != first


def test_statements_alone_and_transactions_share_one_pool(empty_url: str) -> None:
    narrow = Database(empty_url, DatabaseSettings(pool=1), role="test", chance=random.Random(0))
    backends = set()
    for _ in range(3):
        backends.add(narrow.run_alone(lambda driver: single.row(driver, BACKEND)[0]))
        found = narrow.run(lambda connection: connection.execute(text(BACKEND.decode())).scalar_one())
        backends.add(str(found).encode())
    narrow.close()
    assert len(backends) == 1


def test_whoever_waits_for_a_connection_gets_the_one_that_comes_back(empty_url: str) -> None:
    narrow = Database(empty_url, DatabaseSettings(pool=1), role="test", chance=random.Random(0))
    asked = threading.Event()

    def waiting() -> bytes | None:
        asked.set()
        return narrow.run_alone(lambda driver: single.row(driver, BACKEND)[0])

    with ThreadPoolExecutor(1) as threads:
        with narrow.engine.connect() as held:
            backend = held.execute(text(BACKEND.decode())).scalar_one()
            waits = threads.submit(waiting)
            assert asked.wait(MINUTE)
            assert not waits.done()
        assert waits.result(MINUTE) == str(backend).encode()
    narrow.close()


def test_connections_that_were_lost_are_replaced(database: Database) -> None:
    with database.engine.connect() as one, database.engine.connect() as other:
        backends = [each.execute(text("SELECT pg_backend_pid()")).scalar_one() for each in (one, other)]
    ended = text("SELECT pg_terminate_backend(pid, 5000) FROM unnest(CAST(:pids AS integer[])) AS t (pid)")
    database.run(lambda connection: connection.execute(ended, {"pids": backends}).all(), urgent=True)
    tries: list[int] = []

    def counted(driver: "psycopg.Connection[object]") -> bytes | None:
        tries.append(1)
        return single.row(driver, BACKEND)[0]

    assert int(database.run_alone(counted) or 0) not in backends
    assert len(tries) <= 3


def test_a_lock_that_cannot_be_had_in_time_is_tried_for_again(pool: Pool) -> None:
    tries: list[int] = []

    with pool.database.engine.connect() as holder:
        holder.execute(text("LOCK TABLE queue_limits IN ACCESS EXCLUSIVE MODE"))

        def written(driver: "psycopg.Connection[object]") -> list[bytes | None]:
            tries.append(1)
            if len(tries) == 2:
                holder.rollback()
            return single.row(driver, WRITTEN, b"a", b"1")

        assert pool.database.run_alone(written) == [b"a"]
    assert len(tries) == 2
    assert limits(pool) == 1


def test_a_database_that_is_away_is_an_outage_and_not_an_error_of_the_driver() -> None:
    away = Database(
        "postgresql://nobody@127.0.0.1:1/none", DatabaseSettings(outage_seconds=0), role="test", chance=random.Random(0)
    )
    with pytest.raises(NotReady):
        away.run_alone(lambda driver: single.row(driver, BACKEND))
