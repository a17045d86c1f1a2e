"""A server that is lost behind a proxy: old connections stay silent, new ones work, and every wait ends."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from schema import clock
from schema.moves.submit import submit_at_once
from schema.postgres import engine, notify, waits
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.notify import Wakeups
from schema.postgres.statements import Statement
from tests.support.lossy_proxy import LossyProxy
from tests.support.patience import MINUTE, eventually

REQUEST = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}}
ANSWER = Statement("SELECT 42")


@contextmanager
def behind_a_proxy(url: str, **settings: Any) -> Iterator[tuple[Database, LossyProxy]]:
    proxy = LossyProxy(url)
    there = proxy.url
    values = {"statement_timeout": 0.5, "pool": 2, **settings}
    if values.get("pooler"):
        values["listen_url"] = SecretStr(there)
    database = Database(there, DatabaseSettings(**values), role="test", chance=random.Random(0))
    try:
        yield database, proxy
    finally:
        database.close()
        proxy.close()


WORK: dict[str, Callable[[Database], object]] = {
    "plain": lambda database: database.run(lambda c: c.execute(ANSWER).scalar_one()),
    "kept plans": lambda database: database.run(lambda c: c.execute(ANSWER).scalar_one(), kept_plans=True),
    "kept plans, several at once": lambda database: database.run(_several, kept_plans=True),
    "urgent": lambda database: database.run(lambda c: c.execute(ANSWER).scalar_one(), urgent=True),
    "alone": lambda database: database.run_alone(lambda driver: submit_at_once(driver, [REQUEST], actor="test")),
}


def _several(connection: Connection) -> object:
    engine_text = Statement("SELECT 43")
    connection.execute(engine_text)
    return connection.execute(ANSWER).scalar_one()


@pytest.mark.parametrize(
    ("name", "pooler"), [*((name, "none") for name in WORK), ("plain", "transaction"), ("alone", "transaction")]
)
def test_work_on_a_connection_that_is_lost_begins_anew_on_another(database_url: str, name: str, pooler: str) -> None:
    work = WORK[name]
    with behind_a_proxy(database_url, pooler=pooler) as (database, proxy):
        work(database)
        work(database)
        proxy.lose()
        began = clock.monotonic()
        assert work(database)
        assert clock.monotonic() - began < MINUTE / 2


def test_a_transaction_in_the_midst_of_which_its_connection_is_lost_is_repeated(database_url: str) -> None:
    with behind_a_proxy(database_url) as (database, proxy):
        tries: list[int] = []

        def twice(connection: Connection) -> int:
            connection.execute(ANSWER)
            if not tries:
                proxy.lose()
            tries.append(1)
            return int(connection.execute(ANSWER).scalar_one())

        assert (database.run(twice), len(tries)) == (42, 2)


def test_a_statement_that_may_take_longer_is_waited_for_and_the_next_transaction_is_not(database_url: str) -> None:
    with behind_a_proxy(database_url) as (database, _):

        def slow(connection: Connection) -> str:
            connection.execute(Statement("SET LOCAL statement_timeout = 0"))
            connection.allow(30.0)
            connection.execute(Statement("SELECT pg_sleep(2.5)"))
            return _patience(connection)

        assert float(database.run(slow)) == 60.0
        assert float(database.run(_patience)) == 1.0


def _patience(connection: Connection) -> str:
    return str(connection.session.patience)


def test_wake_ups_come_again_after_a_lost_connection(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "PROBE", 0.2)
    monkeypatch.setattr(engine, "LISTEN_PATIENCE", 1.0)
    with behind_a_proxy(database_url) as (database, proxy):
        wakeups = Wakeups(database, chance=random.Random(0))
        wakeups.start()
        try:
            woken = threading.Event()
            wakeups.subscribe("jobs", lambda _: woken.set())
            eventually(lambda: wakeups.connected)
            proxy.lose()
            woken.clear()

            def sent() -> bool:
                database.run(lambda c: c.execute(Statement("SELECT pg_notify('leasehold_jobs', '')")))
                return woken.is_set()

            eventually(sent, every=0.2, what="a wake-up arrives on a new connection")
        finally:
            wakeups.stop()


def test_a_look_for_a_pooler_waits_no_longer_than_others(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LISTEN_PATIENCE", 1.0)
    with behind_a_proxy(database_url) as (database, proxy), database._connect() as connection:
        proxy.lose()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_a_connection_whose_number_belongs_to_a_file_by_now_is_left_alone(tmp_path: Path) -> None:
    waits_for_ever: Any = SimpleNamespace(waits_since=1.0, patience=1.0)
    with (tmp_path / "file").open("wb") as file:
        waits_for_ever.pgconn = SimpleNamespace(socket=file.fileno())
        before = os.listdir("/proc/self/fd")
        waits._cut(waits_for_ever, 1.0)
        assert os.listdir("/proc/self/fd") == before
