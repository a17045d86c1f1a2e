"""Transactions that send no wake-ups: while the queue of notifications is full, and with two-phase commit."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest
from structlog.testing import capture_logs

from schema import clock
from schema.diagnostics import server as server_checks
from schema.diagnostics.checks import Verdict
from schema.moves.submit import submit_at_once
from schema.postgres import embedded, engine, migrate, notify
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.postgres.failures import find_exhausted
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.patience import eventually
from tests.support.pool import Pool, completed
from tests.support.servers import opened

#: Pages of the queue, the fewest that the server allows: 512 KiB.
PAGES = 64
REQUEST = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}, "key": "k"}


@pytest.fixture(scope="module")
def small_queue() -> Iterator[str]:
    """The URL of a server with a small queue of notifications."""
    data = embedded.scratch("leasehold-tests-")
    try:
        with (
            embedded.serve(data, durable=False) as first,
            psycopg.connect(libpq_url(first.url), autocommit=True) as connection,
        ):
            connection.execute(f"ALTER SYSTEM SET max_notify_queue_pages = {PAGES}".encode())
            connection.execute("ALTER SYSTEM SET max_prepared_transactions = 5")
        with embedded.serve(data, durable=False) as server:
            database = opened(server.url)
            migrate.upgrade(database)
            database.close()
            yield server.url
    finally:
        shutil.rmtree(data)


@pytest.fixture
def forgotten(small_queue: str) -> Iterator["psycopg.Connection"]:
    """A session that has forgotten a transaction in which it listens, until the queue is full."""
    with psycopg.connect(libpq_url(small_queue)) as listener, psycopg.connect(libpq_url(small_queue)) as sender:
        listener.execute("LISTEN forgotten")
        listener.commit()
        listener.execute("SELECT 1")
        sender.autocommit = True
        for channel, size in (("forgotten", 7900), ("forgotten", 100), ("f", 0)):
            sender.execute(engine.QUEUE_USAGE.text.encode())
            with suppress(psycopg.errors.ProgramLimitExceeded):
                for _ in range(PAGES * 100):
                    sender.execute("SELECT pg_notify(%s, %s)", (channel, " " * size))
        yield listener


def test_submits_syncs_and_cancels_go_on_without_wake_ups_and_wake_ups_come_back(
    small_queue: str, forgotten: "psycopg.Connection", timing: Timing, chance: random.Random
) -> None:
    database = Database(small_queue, DatabaseSettings(), role="test", chance=chance)
    pool = Pool(database, timing, chance)
    with database.listen() as sleeper:
        for topic in ("jobs", "done", "bots"):
            sleeper.execute(notify.RAISE, (topic,))
        with capture_logs() as told:
            pool.submit()
        assert [each["event"] for each in told] == ["the server has no room for notifications, so work waits for polls"]
        made = database.run_alone(lambda driver: submit_at_once(driver, [REQUEST], actor="test"))
        assert made[0].created
        bot = pool.bot(capacity=2)
        pool.assigner().run_once()
        bot.sync(*[completed(work) for work in bot.take()])
        assert [row.state for row in pool.rows("SELECT state FROM jobs")] == ["succeeded"] * 2
        found = database.run(server_checks.check_notifications)
        assert found.verdict is Verdict.BAD
        assert f"SELECT pg_terminate_backend({forgotten.info.backend_pid})" in str(found.remedy)
        forgotten.close()  # its server process ends a moment later
        eventually(lambda: database.run(server_checks.check_notifications).verdict is Verdict.OK)
        database._silent_until = clock.monotonic()
        sleeper.execute("LISTEN leasehold_jobs")
        pool.submit()
        assert any(True for _ in sleeper.notifies(timeout=60, stop_after=1)), "a wake-up comes again"
    database.close()


def test_urgent_work_has_its_own_connections(
    small_queue: str, forgotten: "psycopg.Connection", chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(small_queue, DatabaseSettings(), role="test", chance=chance)
    with database.listen() as sleeper:
        sleeper.execute(notify.RAISE, ("jobs",))
        monkeypatch.setattr(database, "work", None)
        assert not database.run(
            lambda c: c.execute(notify.WAKE, {"topic": "jobs", "keys": ""}).scalar_one(), urgent=True
        )
        monkeypatch.undo()
    database.close()
    del forgotten


def test_another_limit_of_the_server_is_told_as_it_is(database: Database) -> None:
    tries = []

    def work(connection: Connection) -> None:
        tries.append(1)
        connection.execute(Statement("DO $$ BEGIN RAISE EXCEPTION 'too large' USING ERRCODE = '54000'; END $$"))

    with capture_logs() as told, pytest.raises(psycopg.Error, match="too large") as refused:
        database.run(work)
    assert (len(tries), told, find_exhausted(refused.value)) == (1, [], None)


def test_a_pooled_statement_is_repeated_silently(
    small_queue: str, forgotten: "psycopg.Connection", chance: random.Random
) -> None:
    settings = DatabaseSettings(pooler="transaction", listen_url=small_queue)  # type: ignore[arg-type]
    database = Database(small_queue, settings, role="test", chance=chance)
    with database.listen() as sleeper:
        sleeper.execute(notify.RAISE, ("jobs",))
        request = REQUEST | {"key": "pooled"}
        assert database.run_alone(lambda driver: submit_at_once(driver, [request], actor="test"))[0].created
        assert database.run(lambda c: c.execute(Statement("SHOW leasehold.wake")).scalar_one()) == "off"
    assert engine.SILENCE < 10
    database.close()
    del forgotten


def test_a_submit_without_a_wake_up_may_have_two_phases(
    small_queue: str, timing: Timing, chance: random.Random
) -> None:
    database = Database(small_queue, DatabaseSettings(), role="test", chance=chance)
    request = json.dumps([{"command": ["true"], "label": "two-phase"}] * 2)
    jobs = "SELECT count(*) FROM leasehold.jobs WHERE label = 'two-phase'"
    with database.listen() as sleeper, psycopg.connect(libpq_url(small_queue), autocommit=True) as caller:
        sleeper.execute(notify.RAISE, ("jobs",))
        for silent in (False, True):
            caller.execute("BEGIN")
            if silent:
                caller.execute("SET LOCAL leasehold.wake = off")
            caller.execute("SELECT leasehold.submit(%s)", (request,))
            if silent:
                caller.execute("PREPARE TRANSACTION 'orders-1'")
            else:
                with pytest.raises(psycopg.errors.FeatureNotSupported):
                    caller.execute("PREPARE TRANSACTION 'orders-1'")
        assert caller.execute(jobs).fetchone() == (0,)
        Pool(database, timing, chance).submit(label="another")
        caller.execute("COMMIT PREPARED 'orders-1'")
        assert caller.execute(jobs).fetchone() == (2,)
        assert caller.execute("SELECT current_setting('leasehold.wake', true)").fetchone() in (("",), (None,))
    database.close()
