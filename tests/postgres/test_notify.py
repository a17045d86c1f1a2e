"""Wake-ups on real connections: sent only while somebody sleeps, coalesced, and never the only way to know."""

import queue
import random
import threading
from collections.abc import Iterator

import psycopg
import pytest
from structlog.testing import capture_logs

from schema import clock
from schema.moves.submit import submit_at_once
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.notify import WAKE, SignalGroup, Wakeups, wake
from schema.postgres.statements import Statement
from tests.support.patience import MINUTE, eventually, wait_instead

LISTENERS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'leasehold-listen' AND pid <> pg_backend_pid()"
    " AND datname = current_database()"
)
#: When each of them sent its last statement.
LAST = LISTENERS.replace("SELECT pid", "SELECT pid, query_start")
FLAGS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted AND pid = ANY(%s)"


@pytest.fixture
def wakeups(database: Database) -> Iterator[Wakeups]:
    wakeups = Wakeups(database, linger=0.05)
    wakeups.start()
    yield wakeups
    wakeups.stop()


@pytest.fixture
def onlooker(database: Database) -> Iterator[psycopg.Connection]:
    """A connection that hears every notification that anybody sends, without being idle."""
    with psycopg.connect(database.url, autocommit=True) as connection:
        for topic in ("jobs", "bots", "done"):
            connection.execute(f"LISTEN leasehold_{topic}")
        yield connection


def heard(onlooker: psycopg.Connection) -> list[tuple[str, str]]:
    """Everything sent so far: what is committed now arrives behind all that was committed before."""
    onlooker.execute("NOTIFY leasehold_jobs, 'end of what was sent'")
    sent = []
    for notify in onlooker.notifies(timeout=MINUTE):
        if notify.payload == "end of what was sent":
            return sent
        sent.append((notify.channel, notify.payload))
    raise AssertionError("the last notification never arrived")


def count(connection: psycopg.Connection, query: str, *parameters: object) -> int:
    return connection.execute(query, parameters).fetchone()[0]


def sent(connection: Connection, topic: str, *keys: str) -> bool:
    return connection.execute(WAKE, {"topic": topic, "keys": ",".join(keys)}).scalar_one()


def send(database: Database, topic: str, *keys: str) -> bool:
    """Send what `wake` sends; returns whether it was sent, which `wake` does not wait for."""
    return database.run(lambda connection: sent(connection, topic, *keys))


def test_nothing_is_sent_if_nobody_is_idle(database: Database, wakeups: Wakeups, onlooker: psycopg.Connection) -> None:
    wakeups.signal("jobs")
    assert not any(send(database, topic) for topic in ("jobs", "bots", "done") for _ in range(5))
    assert heard(onlooker) == []


def test_a_wake_up_is_sent_while_somebody_is_idle_and_only_for_that_topic(
    database: Database, wakeups: Wakeups, onlooker: psycopg.Connection
) -> None:
    signal = wakeups.signal("jobs")
    other = wakeups.signal("bots")
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        assert send(database, "jobs")
        assert not send(database, "bots")
        assert signal.wait(MINUTE)
    assert heard(onlooker) == [("leasehold_jobs", "")]
    assert not other.wait(0)


@pytest.mark.parametrize("count", [1, 2])
def test_submits_at_once_send_a_wake_up_while_an_assigner_is_idle(
    database: Database, wakeups: Wakeups, onlooker: psycopg.Connection, count: int
) -> None:
    request = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}}
    database.run_alone(lambda driver: submit_at_once(driver, [request], actor="test"))
    wakeups.signal("jobs")
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        database.run_alone(lambda driver: submit_at_once(driver, [request] * count, actor="test"))
        assert heard(onlooker) == [("leasehold_jobs", "")]


def test_the_flag_is_lowered_by_its_last_holder(
    database: Database, wakeups: Wakeups, onlooker: psycopg.Connection
) -> None:
    eventually(lambda: wakeups.connected)
    pids = [row[0] for row in onlooker.execute(LISTENERS)]
    with wakeups.idle("jobs"):
        with wakeups.idle("jobs"):
            eventually(lambda: count(onlooker, FLAGS, pids) == 1)
        assert send(database, "jobs")
    eventually(lambda: count(onlooker, FLAGS, pids) == 0)
    assert not send(database, "jobs")


def test_a_busy_process_does_not_toggle_its_flag(database: Database, onlooker: psycopg.Connection) -> None:
    wakeups = Wakeups(database, linger=60.0)
    wakeups.start()
    try:
        eventually(lambda: wakeups.connected)
        with wakeups.idle("jobs"):
            pass
        last = onlooker.execute(LAST).fetchall()
        for _ in range(1000):
            with wakeups.idle("jobs"):
                pass
        assert onlooker.execute(LAST).fetchall() == last, "it sent a statement"
        assert send(database, "jobs"), "the flag is still up for a while"
    finally:
        wakeups.stop()
    # The server notices the end of a connection a moment later.
    eventually(lambda: not send(database, "jobs"), what="a process that stopped is not idle")


def test_a_wake_up_sets_one_signal_of_a_group_in_each_process(database: Database, wakeups: Wakeups) -> None:
    second = Wakeups(database)
    second.start()
    groups = [wakeups.group("jobs"), second.group("jobs")]
    woken: queue.Queue[tuple[int, int]] = queue.Queue()
    signals = {(process, nth): group.signal() for process, group in enumerate(groups) for nth in range(2)}

    def wait(name: tuple[int, int]) -> None:
        if signals[name].wait(MINUTE):
            woken.put(name)

    threads = [threading.Thread(target=wait, args=(name,), daemon=True) for name in signals]
    try:
        eventually(lambda: wakeups.connected)
        eventually(lambda: second.connected)
        for thread in threads:
            thread.start()
        eventually(lambda: all(len(group._resting) == 2 for group in groups))
        with wakeups.idle("jobs"), second.idle("jobs"):
            send(database, "jobs")
            assert {woken.get(timeout=MINUTE)[0] for _ in range(2)} == {0, 1}
            assert [len(group._resting) for group in groups] == [1, 1]
            for group in groups:
                group.wake_next()
            for thread in threads:
                thread.join()
    finally:
        for group in groups:
            group.close()
            group.close()
        second.stop()


def test_a_wake_up_makes_those_of_a_group_that_work_look_again() -> None:
    group = SignalGroup()
    working, also_working = group.signal(), group.signal()
    group.wake()
    assert working.wait(0)
    assert also_working.wait(0)
    working.clear()
    assert not working.wait(0)


def test_a_wake_up_of_a_thread_whose_time_is_just_up_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of the wait and the moment at which the group knows of it. It looks next, and reads what was
    announced. Until then the wake-up stays."""
    group = SignalGroup()
    late = group.signal()

    def wait(_event: threading.Event, _seconds: float) -> bool:
        group.wake()
        return False

    with monkeypatch.context() as patch:
        wait_instead(patch, "wait", wait)
        late.wait(0.0)
    assert late.wait(0)
    late.clear()
    assert not late.wait(0)
    group.wake()
    assert late.wait(0)


def test_the_next_one_is_not_somebody_who_only_pauses_between_two_runs() -> None:
    group = SignalGroup()
    busy, idle = group.signal(), group.signal()
    resting = [
        threading.Thread(target=signal.wait, args=(MINUTE,), kwargs={"busy": signal is busy}, daemon=True)
        for signal in (idle, busy)
    ]
    for nth, thread in enumerate(resting, 1):
        thread.start()
        eventually(lambda nth=nth: len(group._resting) == nth)
    group.wake_next()
    resting[0].join()
    group.wake_next()
    assert resting[1].is_alive(), "its pause is not cut short"
    group.wake()
    resting[1].join()


def test_notifications_that_arrive_together_are_one_callback(database: Database, wakeups: Wakeups) -> None:
    calls: queue.Queue[frozenset[str]] = queue.Queue()
    entered, go_on = threading.Event(), threading.Event()

    def callback(keys: frozenset[str]) -> None:
        calls.put(keys)
        entered.set()
        assert go_on.wait(MINUTE)

    wakeups.subscribe("bots", callback)
    eventually(lambda: wakeups.connected)
    with wakeups.idle("bots"):
        send(database, "bots", "1")
        assert entered.wait(MINUTE)
        database.run(lambda connection: [wake(connection, "bots", keys) for keys in (["2", "3"], ["3", "4"])])
        go_on.set()
        assert calls.get(timeout=MINUTE) == {"1"}
        assert calls.get(timeout=MINUTE) == {"2", "3", "4"}
        assert calls.empty()


def test_no_keys_or_more_than_fit_a_notification_mean_look_yourself(database: Database, wakeups: Wakeups) -> None:
    calls: queue.Queue[frozenset[str]] = queue.Queue()
    for topic in ("bots", "done"):
        wakeups.subscribe(topic, calls.put)
    eventually(lambda: wakeups.connected)
    with wakeups.idle("bots"), wakeups.idle("done"):
        database.run(lambda connection: [wake(connection, "bots", keys) for keys in (["1"], [])])
        assert calls.get(timeout=MINUTE) == frozenset()
        keys = [str(number) for number in range(100_000, 102_000)]
        database.run(lambda connection: wake(connection, "done", keys))
        assert calls.get(timeout=MINUTE) == frozenset()


def test_a_wake_up_of_a_transaction_that_rolled_back_is_never_delivered(
    database: Database, wakeups: Wakeups, onlooker: psycopg.Connection
) -> None:
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        with database.connect() as connection:
            assert sent(connection, "jobs")
            connection.rollback()
        assert heard(onlooker) == []


def test_a_terminated_listener_calls_everybody_back(
    database: Database, wakeups: Wakeups, onlooker: psycopg.Connection
) -> None:
    calls: queue.Queue[tuple[str, frozenset[str]]] = queue.Queue()
    wakeups.subscribe("jobs", lambda keys: calls.put(("jobs", keys)))
    wakeups.subscribe("done", lambda keys: calls.put(("done", keys)))
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        before = [row[0] for row in onlooker.execute(LISTENERS)]
        assert len(before) == 1
        onlooker.execute("SELECT pg_terminate_backend(%s)", before)
        answers = [calls.get(timeout=MINUTE), calls.get(timeout=MINUTE)]
        assert sorted(answers) == [("done", frozenset()), ("jobs", frozenset())]
        after = [row[0] for row in onlooker.execute(LISTENERS)]
        assert after != before
        eventually(lambda: count(onlooker, FLAGS, after) == 1)
        assert wakeups.connected
        assert send(database, "jobs", "7")
        assert calls.get(timeout=MINUTE) == ("jobs", {"7"})


def test_who_went_to_sleep_before_the_connection_stood_is_told_to_look(database: Database) -> None:
    wakeups = Wakeups(database)
    signal = wakeups.signal("jobs")
    with wakeups.idle("jobs"):
        assert not signal.wait(0)
        wakeups.start()
        assert signal.wait(MINUTE)
        wakeups.stop()


def test_a_callback_that_fails_does_not_stop_the_others(database: Database, wakeups: Wakeups) -> None:
    def broken(keys: frozenset[str]) -> None:
        raise RuntimeError("on purpose")

    wakeups.subscribe("jobs", broken)
    signal = wakeups.signal("jobs")
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        for _ in range(2):
            signal.clear()
            send(database, "jobs")
            assert signal.wait(MINUTE)


def test_a_closed_signal_hears_nothing(database: Database, wakeups: Wakeups) -> None:
    closed, open_ = wakeups.signal("jobs"), wakeups.signal("jobs")
    closed.close()
    closed.close()
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        send(database, "jobs")
        assert open_.wait(MINUTE)
    assert not closed.wait(0)


def test_disabled_wake_ups_hold_no_connection_and_no_flag(database: Database, onlooker: psycopg.Connection) -> None:
    wakeups = Wakeups(database, enabled=False)
    wakeups.start()
    signal = wakeups.signal("jobs")
    with wakeups.idle("jobs"):
        assert not send(database, "jobs")
        assert not signal.wait(0)
        assert onlooker.execute(LISTENERS).fetchall() == []
    assert not wakeups.connected
    wakeups.stop()


def test_stop_joins_the_thread_and_closes_the_connection(database: Database, onlooker: psycopg.Connection) -> None:
    wakeups, before = Wakeups(database), set(threading.enumerate())
    for _ in range(2):
        wakeups.start()
        wakeups.start()
        eventually(lambda: wakeups.connected)
        wakeups.stop()
        wakeups.stop()
        assert not wakeups.connected
        assert "leasehold-wakeups" not in {thread.name for thread in set(threading.enumerate()) - before}
        eventually(lambda: not onlooker.execute(LISTENERS).fetchall())


def test_stop_returns_at_once_while_the_database_is_away(database_url: str, database: Database) -> None:
    database.listen_url = "postgresql://nobody@127.0.0.1:1/nowhere"
    wakeups = Wakeups(database)
    wakeups.start()
    with wakeups.idle("jobs"):
        assert not wakeups.connected
    started = clock.monotonic()
    wakeups.stop()
    assert clock.monotonic() - started < MINUTE


class Hasty(random.Random):
    """Chance that waits for nothing before a reconnect."""

    def uniform(self, *bounds: float) -> float:
        return bounds[0]


def test_the_log_of_a_long_outage_tells_why_once_and_then_that_it_is_over(database: Database) -> None:
    database.listen_url, right = "postgresql://nobody@127.0.0.1:1/nowhere", database.listen_url
    wakeups = Wakeups(database, chance=Hasty())
    with capture_logs() as told:
        wakeups.start()
        eventually(lambda: wakeups._failures > 5)
        database.listen_url = right
        eventually(lambda: wakeups.connected)
        wakeups.stop()
    lost, found = (line for line in told if line["event"].startswith("wake-ups"))
    assert "Connection refused" in lost["reason"]
    assert found["event"] == "wake-ups have a connection again"


def test_the_sender_does_not_wait_for_a_sleeper(database: Database, wakeups: Wakeups) -> None:
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        with database.connect() as first, database.connect() as second:
            second.execute(Statement("SET LOCAL lock_timeout = '100ms'"))
            assert sent(first, "jobs")
            assert sent(second, "jobs")
