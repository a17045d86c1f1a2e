"""Syncs over the wire: a held call keeps its bot's session alive, and nothing else does."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from bots.gateway.long_poll import rest
from bots.sync.call import Call, HeldCall
from schema import clock
from schema.moves.sessions import close, expire, renew
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.http import JOB, granted, submitted
from tests.support.patience import MINUTE, NEWS, eventually
from tests.support.pool import Pool
from tests.support.servers import Bot, Processes, Served, serving

SHORT = Timing(sync=0.5, ttl=6, reap=0.1, ack=15, poll=0.1)
#: For sessions that must end. Only the test itself gives them up, so none ends early on a busy machine.
FLEETING = Timing(sync=0.5, ttl=1.5, reap=0.1, ack=15, poll=0.1)


def expired(database: Database) -> list[int]:
    """Bots that upkeep gives up now."""
    return database.run(lambda connection: expire(connection, after=0, limit=10, actor="upkeep"))[0]


def left(database: Database, name: str = "b1") -> float:
    """Seconds of that bot's session."""
    query = Statement("SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM bots WHERE name = :name")
    return float(database.run(lambda connection: connection.execute(query, {"name": name}).scalar_one()))


def end(database: Database) -> datetime:
    """When the session of the only bot ends, if nobody renews it."""
    return database.run(lambda connection: connection.execute(Statement("SELECT expires_at FROM bots")).scalar_one())


def renewed(database: Database, before: datetime) -> bool:
    """Whether the session, which nobody may give up, now lives half a life longer than it did before."""
    assert not expired(database)
    return end(database) > before + timedelta(seconds=SHORT.ttl / 2)


def row_id(pool: Pool, name: str) -> int:
    """Of a new bot."""
    pool.bot(name)
    return int(pool.row("SELECT id FROM bots WHERE name = :name", name=name).id)


@contextmanager
def holding(url: str, bot: Bot, *, wait: float = 60) -> Iterator[http.client.HTTPConnection]:
    """A connection over which a call of the bot is under way."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    bot.seq += 1
    body = json.dumps({**bot.identity, "seq": bot.seq, "wait": wait})
    headers = {"Content-Type": "application/json", "Authorization": bot.http.headers["authorization"]}
    connection.request("POST", "/v1/sync", body, headers)
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture
def short(database: Database) -> Iterator[Served]:
    with serving(database, SHORT) as served:
        yield served


@pytest.fixture
def fleeting(database: Database) -> Iterator[Served]:
    with serving(database, FLEETING) as served:
        yield served


def test_a_session_outlives_its_time_while_its_bots_call_is_held(short: Served) -> None:
    database = short.database
    bot = Bot(short)
    with ThreadPoolExecutor() as threads, short.client(short.token("operator")) as http_:
        sent = clock.monotonic()
        held = threads.submit(bot.sync, wait=60)
        eventually(lambda: short.waits("bots") == 1)
        for _ in range(2):
            before = end(database)
            eventually(lambda before=before: renewed(database, before))
        (job,) = submitted(http_, JOB)
        granted(database, SHORT, job)
        answer = held.result(NEWS).json()
    assert [lease["job"] for lease in answer["leases"]] == [job]
    most = left(database)
    assert sent + answer["expires_in"] - clock.monotonic() <= most, "the bot must not believe in more than it has"


def test_a_long_call_without_news_ends_without_the_database(short: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bots.gateway.routes.LONG", 0.1)
    bot = Bot(short)
    settled = short.app.state.metrics.batches._sum
    before, sent = settled.get(), clock.monotonic()
    answer = bot.sync(wait=1).json()
    assert settled.get() == before + 1
    assert (answer["seq"], answer["leases"], answer["drain"]) == (bot.seq, [], False)
    most = left(short.database)
    assert 0 < sent + answer["expires_in"] - clock.monotonic() <= most, "the bot must not believe in more than it has"
    assert bot.sync(wait=0.05).json()["leases"] == []
    assert short.waits("bots") == 0


def test_what_it_takes_to_settle_a_call_counts_as_a_part_of_its_wait(short: Served) -> None:
    bot, batches = Bot(short), short.app.state.batches
    settle = batches._settle

    def slow(calls: Sequence[Call]) -> Sequence[bytes | HeldCall | Exception]:
        clock.sleep(2.0)
        found: Sequence[bytes | HeldCall | Exception] = settle(calls)
        return found

    batches._settle = slow
    sent = clock.monotonic()
    assert bot.sync(wait=2.5).status_code == 200
    assert 2.0 < clock.monotonic() - sent < 4.0


def test_a_session_that_a_failover_has_shortened_is_renewed_while_a_call_is_held(short: Served, pool: Pool) -> None:
    bot = Bot(short)
    with holding(short.url, bot):
        eventually(lambda: short.waits("bots") == 1)
        before = end(short.database)
        pool.change("UPDATE bots SET expires_at = expires_at - interval '2.5 s'")
        # What the gateway knows lets it renew only once half of the session is over.
        eventually(lambda: renewed(short.database, before - timedelta(seconds=2.5)))


@pytest.mark.parametrize(("took", "pause"), [(0.001, 1), (0.015, 3), (2, 4)])
def test_periodic_queries_that_take_long_come_more_rarely_but_not_without_end(took: float, pause: float) -> None:
    assert rest(took, poll=1) == pytest.approx(pause)


def test_the_session_of_a_bot_that_hung_up_or_fell_silent_ends_as_if_it_had_not_called(fleeting: Served) -> None:
    bot = Bot(fleeting)
    with holding(fleeting.url, bot) as connection:
        eventually(lambda: fleeting.waits("bots") == 1)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: fleeting.waits("bots") == 0)
    eventually(lambda: expired(fleeting.database))
    assert bot.sync().json()["code"] == "session_over"
    with holding(fleeting.url, Bot(fleeting), wait=1.5):
        eventually(lambda: fleeting.waits("bots") == 1)
        eventually(lambda: fleeting.waits("bots") == 0)
        eventually(lambda: expired(fleeting.database))


def test_a_client_that_has_sent_its_next_request_and_hangs_up_is_not_waited_for(short: Served) -> None:
    bot = Bot(short)
    bot.seq += 1
    body = json.dumps({**bot.identity, "seq": bot.seq, "wait": 60})
    request = (
        f"POST /v1/sync HTTP/1.1\r\nHost: gateway\r\nAuthorization: {bot.http.headers['authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    parts = urlsplit(short.url)
    with socket.create_connection((parts.hostname, parts.port)) as line:
        line.sendall((request * 2).encode())
        eventually(lambda: short.waits("bots") == 1)
    eventually(lambda: short.waits("bots") == 0)


def test_calls_of_clients_that_hang_up_at_once_are_not_held(short: Served) -> None:
    ended = short.app.state.metrics.requests.labels("/v1/sync", "4xx")._value
    bots = [Bot(short, name=f"b{number}") for number in range(5)]
    for bot in bots:
        with holding(short.url, bot):
            pass
    eventually(lambda: ended.get() == len(bots))
    assert short.waits("bots") == 0


def test_sessions_whose_gateway_was_killed_end_in_their_time(database: Database, scratch: Path) -> None:
    with Processes(scratch, database.url, FLEETING) as processes:
        gateway = processes.gateway()
        served = Served(processes.url, None, None, database)  # type: ignore[arg-type]
        with holding(processes.url, Bot(served)):
            # The first time it may have been the call itself that moved the end.
            for _ in range(2):
                before = end(database)
                eventually(lambda before=before: end(database) > before, what="a held call renews its session")
            gateway.kill()
            eventually(lambda: expired(database))


def test_a_held_call_is_over_when_a_newer_session_is_opened_or_a_later_call_of_its_own_comes(short: Served) -> None:
    older = Bot(short)
    with ThreadPoolExecutor() as threads:
        held = threads.submit(older.sync, wait=60)
        eventually(lambda: short.waits("bots") == 1)
        newer = Bot(short)
        assert held.result(NEWS).json()["code"] == "session_superseded"
        held = threads.submit(newer.sync, wait=60)
        eventually(lambda: short.waits("bots") == 1)
        impostor = newer.http.post("/v1/sync", json={**newer.identity, "secret": "another", "seq": 9})
        assert (impostor.status_code, held.done()) == (409, False)
        assert newer.sync(status="gone").status_code == 200
        assert held.result(NEWS).status_code == 200


def test_the_next_call_of_a_bot_may_come_to_another_gateway_than_its_last(database: Database, pool: Pool) -> None:
    with serving(database, SHORT) as one, serving(database, SHORT) as two, ThreadPoolExecutor() as threads:
        bot = Bot(one)
        elsewhere = httpx.Client(base_url=two.url, headers=bot.http.headers, trust_env=False, timeout=MINUTE)
        older = threads.submit(bot.sync, wait=60)
        eventually(lambda: one.waits("bots") == 1)
        # The bot has given up its connection and calls again, with the next number.
        bot.seq += 1
        newer = threads.submit(elsewhere.post, "/v1/sync", json={**bot.identity, "seq": bot.seq, "wait": 60})
        eventually(lambda: two.waits("bots") == 1)
        (job,) = pool.submit()
        pool.assigner().run_once()
        answer = newer.result(NEWS)
        assert [lease["job"] for lease in answer.json()["leases"]] == [job]
        # Nobody reads the answer to the older call. It had reported nothing, and is told the same.
        assert [lease["job"] for lease in older.result(NEWS).json()["leases"]] == [job]
        # The same call again is answered alike by both, and a newer session ends the one that both know.
        again = [client.post("/v1/sync", json={**bot.identity, "seq": bot.seq}) for client in (elsewhere, bot.http)]
        assert [[lease["job"] for lease in each.json()["leases"]] for each in again] == [[job], [job]]
        assert elsewhere.post("/v1/sessions", json={"bot": "b1", "capacity": 2}).status_code == 200
        over = [client.post("/v1/sync", json={**bot.identity, "seq": 9}) for client in (elsewhere, bot.http)]
        assert [each.json()["code"] for each in over] == ["session_superseded"] * 2
        elsewhere.close()


def test_only_sessions_that_are_open_and_no_longer_young_are_renewed(pool: Pool) -> None:
    names = ("young", "old", "superseded", "closing", "locked", "gone")
    bots = {name: row_id(pool, name) for name in names}
    pool.change("UPDATE bots SET expires_at = now() + interval '10 s' WHERE name <> 'young'")
    pool.change("UPDATE bots SET expires_at = now() + interval '2900 s' WHERE name = 'young'")
    pool.change("UPDATE bots SET epoch = epoch + 1 WHERE name = 'superseded'")
    pool.change("UPDATE bots SET closing = true WHERE name = 'closing'")
    pool.database.run(lambda connection: close(connection, bots["gone"], keeps_leases=False))
    held = [(bot, 1) for bot in bots.values()]
    expiries = "SELECT name, expires_at FROM bots WHERE name <> 'gone'"
    before = {row.name: row.expires_at for row in pool.rows(expiries)}
    with pool.database.begin() as other:
        other.execute(Statement("SELECT FROM bots WHERE name = 'locked' FOR NO KEY UPDATE"))
        assert pool.database.run(lambda connection: renew(connection, held, ttl=3000)) == {(bots["old"], 1)}
    after = {row.name: row.expires_at for row in pool.rows(expiries)}
    assert {name for name in before if after[name] != before[name]} == {"old"}
    assert after["old"] - before["old"] >= timedelta(seconds=2900)


# Answers to held calls


def test_a_sync_repeated_gets_the_same_leases_and_an_older_one_conflicts(served: Served) -> None:
    bot = Bot(served)
    first = bot.sync()
    bot.seq -= 1
    again = bot.sync()
    later = bot.sync()
    bot.seq = 0
    stale = bot.sync()
    assert (first.json()["leases"], first.status_code, later.status_code) == (again.json()["leases"], 200, 200)
    assert (stale.status_code, stale.json()["code"]) == (409, "stale_seq")


@pytest.mark.parametrize("wakeups", [True, False], ids=["wake-ups", "poll only"])
def test_a_held_sync_is_answered_by_a_lease_by_a_drain_and_when_the_gateway_stops(
    database: Database, timing: Timing, wakeups: bool
) -> None:
    with serving(database, timing, wakeups=wakeups) as served, ThreadPoolExecutor() as threads:
        first = Bot(served, "b1")
        held = threads.submit(first.sync, wait=60)
        eventually(lambda: served.waits("bots") == 1)
        with served.client(served.token("operator")) as http:
            (job,) = submitted(http, JOB)
            granted(database, timing, job)
            (lease,) = held.result(NEWS).json()["leases"]
            assert (lease["job"], lease["payload"]) == (job, {"command": ["true"]})
            drained, others = (threads.submit(Bot(served, name).sync, wait=60) for name in ("b2", "b3"))
            eventually(lambda: served.waits("bots") == 2)
            assert http.post("/v1/bots/b2/drain", json={"draining": True, "reason": "disk"}).status_code == 200
            assert drained.result(NEWS).json()["drain"] is True
        served.server.stop()
        assert others.result(NEWS).status_code == 200


def test_many_held_calls_cost_one_query_a_poll_and_no_thread_each(database: Database, timing: Timing) -> None:
    with serving(database, timing, wakeups=False) as served:
        bots = [Bot(served, f"b{number}") for number in range(30)]
        before = threading.active_count()
        with ThreadPoolExecutor(max_workers=30) as threads:
            held = [threads.submit(bot.sync, wait=5) for bot in bots]
            eventually(lambda: served.waits("bots") == 30)
            looks = served.app.state.metrics.looks.labels("bots")._value
            began = looks.get()
            eventually(lambda: looks.get() >= began + 3)
            assert threading.active_count() - before <= 30 + 10 + 2
            assert {one.result(MINUTE).status_code for one in held} == {200}
