"""Syncs over the wire: repeated, held, hung up on, and many at once."""

import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import anyio
import pytest

from bots.gateway.workers import Busy, WorkerPool
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.http import JOB, granted, submitted
from tests.support.patience import MINUTE, NEWS, eventually
from tests.support.servers import Bot, Served, serving


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
def test_a_held_sync_is_answered_as_soon_as_there_is_a_lease(database: Database, timing: Timing, wakeups: bool) -> None:
    with serving(database, timing, wakeups=wakeups) as served, ThreadPoolExecutor() as threads:
        bot = Bot(served)
        held = threads.submit(bot.sync, wait=60)
        eventually(lambda: served.waits("bots") == 1)
        with served.client(served.token("operator")) as http:
            (job,) = submitted(http, JOB)
        granted(database, timing, job)
        answer = held.result(NEWS)
        assert [lease["job"] for lease in answer.json()["leases"]] == [job]
        assert answer.json()["leases"][0]["payload"] == {"command": ["true"]}


def test_a_held_sync_is_answered_when_the_bot_is_drained(served: Served) -> None:
    bot = Bot(served)
    with ThreadPoolExecutor() as threads, served.client(served.token("operator")) as http:
        held = threads.submit(bot.sync, wait=60)
        eventually(lambda: served.waits("bots") == 1)
        assert http.post("/v1/bots/b1/drain", json={"draining": True, "reason": "disk"}).status_code == 200
        assert held.result(NEWS).json()["drain"] is True


def test_a_held_sync_ends_after_its_wait(served: Served) -> None:
    answer = Bot(served).sync(wait=0.2)
    assert (answer.status_code, answer.json()["leases"]) == (200, [])
    assert served.waits("bots") == 0


def test_a_client_that_hangs_up_leaves_nothing_behind(served: Served) -> None:
    bot = Bot(served)
    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    bot.seq += 1
    body = json.dumps({**bot.identity, "seq": bot.seq, "wait": 60})
    headers = {"Content-Type": "application/json", "Authorization": bot.http.headers["authorization"]}
    connection.request("POST", "/v1/sync", body, headers)
    eventually(lambda: served.waits("bots") == 1)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: served.waits("bots") == 0, NEWS)
    assert bot.sync().status_code == 200


def test_stopping_answers_held_calls_at_once(database: Database, timing: Timing) -> None:
    with serving(database, timing) as served, ThreadPoolExecutor() as threads:
        bot = Bot(served)
        held = threads.submit(bot.sync, wait=60)
        eventually(lambda: served.waits("bots") == 1)
        served.server.stop()
        assert held.result(NEWS).status_code == 200


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


def test_work_beyond_the_queue_is_refused_before_the_pool(database: Database) -> None:
    async def scenario() -> None:
        crew = WorkerPool(database, threads=1, queue=1)
        release = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crew.call, release.wait)
            tasks.start_soon(crew.call, release.wait)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Busy):
                await crew.call(release.wait)
            release.set()
        assert crew.slots.taken == 0

    anyio.run(scenario)
