import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from fastapi import APIRouter
from pydantic import ValidationError
from sqlalchemy import text

from bots.crew import Busy, Crew
from bots.door import entries
from bots.gateway import GatewaySettings
from schema import clock, moves, tokens
from schema.engine import Database
from schema.timing import Timing
from tests.serving import Served, serving


@pytest.fixture
def served(database: Database, timing: Timing) -> Iterator[Served]:
    with serving(database, timing) as running:
        yield running


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = clock.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert clock.monotonic() < deadline, "it did not come true"
        pause.wait(0.01)


def waits(served: Served) -> float:
    return float(served.app.state.metrics.waits.labels("bots")._value.get())


class Bot:
    """The wire side of a bot, without an agent."""

    def __init__(self, served: Served, name: str = "b1", **scope: Any) -> None:
        self.http = served.client(served.token("bot", bot="*"))
        answer = self.http.post("/v1/sessions", json={"bot": name, "capacity": 2, **scope})
        assert answer.status_code == 200, answer.text
        session = answer.json()
        self.identity = {"bot": name, "epoch": session["epoch"], "secret": session["secret"]}
        self.seq = 0

    def sync(self, **report: Any) -> httpx.Response:
        self.seq += 1
        return self.http.post("/v1/sync", json={**self.identity, "seq": self.seq, **report})


def counts(database: Database) -> dict[str, int]:
    names = ("jobs", "job_payloads", "job_outputs", "submit_keys", "bots", "bot_answers", "leases", "job_events")
    rows = database.run(
        lambda c: {name: c.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}
    )
    return rows


def test_the_open_routes_need_no_token(served: Served) -> None:
    with served.client() as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        until(lambda: http.get("/readyz").json()["wakeups_connected"])
        assert http.get("/readyz").json()["status"] == "ready"
        assert "leasehold_requests_total" in http.get("/metrics").text
        described = http.get("/openapi.json").json()
    assert described["paths"]["/v1/sync"]["post"]["security"] == [{"token": []}]
    assert "security" not in described["paths"]["/healthz"]["get"]
    assert "409" in described["paths"]["/v1/jobs"]["post"]["responses"]
    assert {"Problem", "Sync", "SyncAnswer", "SubmitRequest"} <= set(described["components"]["schemas"])
    named = json.dumps(described)
    for reference in set(named.split('"$ref": "#/components/schemas/')[1:]):
        assert reference.split('"')[0] in described["components"]["schemas"]


def test_a_database_of_another_version_is_not_ready(served: Served, database: Database) -> None:
    database.run(lambda c: c.execute(text("UPDATE alembic_version SET version_num = 'older'")))
    with served.client() as http:
        answer = http.get("/readyz")
    database.run(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '0001'")))
    assert answer.status_code == 503
    assert answer.json()["detail"] == "schema older, need 0001; run: leasehold db upgrade"
    assert answer.headers["retry-after"] == "1"


def test_every_route_is_closed_to_strangers_and_to_the_wrong_kind(served: Served) -> None:
    kinds = {kind: served.token(kind, **({"bot": "*"} if kind == "bot" else {})) for kind in tokens.Kind}
    described = served.client().get("/openapi.json").json()
    closed = [(path, method, what) for path, ways in described["paths"].items() for method, what in ways.items()]
    for path, method, what in closed:
        if what["x-kinds"] == ["anyone"]:
            continue
        target = path.replace("{id}", "0" * 32).replace("{name}", "b1")
        with served.client() as http:
            stranger = http.request(method, target, json={})
            assert stranger.status_code == 401
            assert stranger.headers["www-authenticate"].startswith("Bearer")
            assert stranger.headers["content-type"] == "application/problem+json"
        for kind, token in kinds.items():
            with served.client(token) as http:
                answer = http.request(method, target, json={} if method == "post" else None)
                assert (answer.status_code == 403) == (kind not in what["x-kinds"]), (path, kind, answer.text)


def test_a_route_that_does_not_say_who_may_use_it_is_closed_to_all() -> None:
    router = APIRouter()

    @router.get("/forgotten")
    async def forgotten() -> None:
        raise AssertionError

    assert entries([router], max_body=1)[0].kinds == frozenset()


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"\xff{}", 400),
    (b'{"a": 1, "a": 2}', 400),
    (b'{"x": NaN}', 400),
    (b'{"x": 1e999}', 400),
    (b'{"x": -Infinity}', 400),
    (b'{"x": "a\\u0000b"}', 400),
    (b'{"x": "\\ud800"}', 400),
    (b"[" * 50_000, 400),
    (b'{"x":' * 70 + b"1" + b"}" * 70, 400),
    (b'{"x": ' + b"9" * 5000 + b"}", 400),
    (b"[]", 422),
    (b"null", 422),
    (b'"text"', 422),
    (b"{}", 422),
    (b'{"surprise": 1}', 422),
]


def test_bad_bodies_get_4xx_on_every_route_and_change_nothing(served: Served, database: Database) -> None:
    Bot(served)
    before = counts(database)
    posts = [
        (path, what["x-kinds"][-1])
        for path, ways in served.client().get("/openapi.json").json()["paths"].items()
        for method, what in ways.items()
        if method == "post"
    ]
    known = {"operator": served.token("operator"), "bot": served.token("bot", bot="*")}
    for path, kind in posts:
        with served.client(known[kind]) as http:
            for body, status in BODIES:
                if path.endswith("/drain") and body == b"{}":
                    continue
                answer = http.post(
                    path.replace("{name}", "b1"), content=body, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code == status, (path, body[:40], answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["field"]
    assert counts(database) == before


SYNCS: list[dict[str, Any]] = [
    {"seq": 0},
    {"seq": 2**63},
    {"seq": 10**30},
    {"epoch": 2**63},
    {"epoch": "1"},
    {"bot": "Bad Name"},
    {"bot": "b1\n"},
    {"capacity": -1},
    {"capacity": 2**31},
    {"wait": -1},
    {"wait": 61},
    {"status": "asleep"},
    {"secret": "x" * 1000},
    {"leases": [{"job": "no-uuid", "fence": 0, "state": "active"}]},
    {"leases": [{"job": "0" * 32, "fence": 2**63, "state": "active"}]},
    {"leases": [{"job": "0" * 32, "fence": -1, "state": "active"}]},
    {"leases": [{"job": "0" * 32, "fence": 1, "state": "completed"}]},
    {"leases": [{"job": "0" * 32, "fence": 1, "state": "active", "output": [{"start": 2**63, "data": "eA=="}]}]},
    {"leases": [{"job": "0" * 32, "fence": 1, "state": "active", "output": [{"start": 0, "data": "***"}]}]},
    {"leases": [{"job": "0" * 32, "fence": 1, "state": "completed", "outcome": {"verdict": "x"}}]},
]


@pytest.mark.parametrize("change", SYNCS, ids=str)
def test_a_bad_sync_is_never_an_internal_error(served: Served, change: dict[str, Any]) -> None:
    bot = Bot(served)
    answer = bot.sync(**change)
    assert 200 <= answer.status_code < 500, answer.text
    if answer.status_code == 200:
        assert json.loads(answer.content)["leases"] == []


def test_what_is_not_json_or_too_large_is_refused_by_its_head(served: Served) -> None:
    token = served.token("operator")
    with served.client(token) as http:
        plain = http.post("/v1/jobs", content=b"{}", headers={"Content-Type": "text/plain"})
        latin = http.post("/v1/jobs", content=b"{}", headers={"Content-Type": "application/json; charset=latin-1"})
        zipped = http.post(
            "/v1/jobs", content=b"{}", headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}
        )
        large = http.post("/v1/bots/b1/drain", content=b" " * 70_000, headers={"Content-Type": "application/json"})
        after = http.get("/v1/status")
    assert [plain.status_code, latin.status_code, zipped.status_code, large.status_code] == [415, 415, 415, 413]
    assert large.json()["detail"] == "body: is larger than 65536 bytes"
    assert after.status_code == 200


def test_unknown_paths_and_methods_are_problems_too(served: Served) -> None:
    with served.client() as http:
        assert http.get("/v1/nothing").json()["title"] == "not found"
        answer = http.delete("/v1/jobs")
        assert (answer.status_code, answer.headers["content-type"]) == (405, "application/problem+json")


def test_a_revoked_token_stops_working_once_the_cache_forgets_it(database: Database, timing: Timing) -> None:
    with serving(database, timing, settings=GatewaySettings(port=0, token_cache_seconds=0.3)) as served:
        token = served.token("operator")
        with served.client(token) as http:
            assert http.get("/v1/status").status_code == 200
            database.run(lambda c: tokens.revoke(c, tokens.parse(token)))
            until(lambda: http.get("/v1/status").status_code == 401, 5)
            assert http.get("/v1/status").json()["detail"] == "the token was revoked"


def test_a_bot_may_only_be_what_its_token_says(served: Served) -> None:
    with served.client(served.token("bot", bot="ci-*", properties={"os": ["linux"]})) as http:
        opened = http.post("/v1/sessions", json={"bot": "ci-1", "properties": {"os": "linux"}})
        foreign = http.post("/v1/sessions", json={"bot": "b1"})
        boaster = http.post("/v1/sessions", json={"bot": "ci-1", "properties": {"os": "mac"}})
        identity = {"epoch": 1, "secret": opened.json()["secret"], "seq": 1}
        other = http.post("/v1/sync", json={"bot": "b1", **identity})
    assert [opened.status_code, foreign.status_code, boaster.status_code, other.status_code] == [200, 403, 403, 403]


def test_a_sync_repeated_gets_the_same_answer_and_an_older_one_conflicts(served: Served) -> None:
    bot = Bot(served)
    first = bot.sync()
    bot.seq -= 1
    again = bot.sync()
    later = bot.sync()
    bot.seq = 0
    stale = bot.sync()
    assert (first.content, first.status_code, later.status_code) == (again.content, 200, 200)
    assert (stale.status_code, stale.json()["code"]) == (409, "stale_seq")


@pytest.mark.parametrize("wakeups", [True, False], ids=["wake-ups", "poll only"])
def test_a_held_sync_is_answered_as_soon_as_there_is_a_lease(database: Database, timing: Timing, wakeups: bool) -> None:
    with serving(database, timing, wakeups=wakeups) as served, ThreadPoolExecutor() as threads:
        bot = Bot(served)
        held = threads.submit(bot.sync, wait=60)
        until(lambda: waits(served) == 1)
        began = clock.monotonic()
        with served.client(served.token("operator")) as http:
            job = http.post("/v1/jobs", json={"jobs": [{"command": ["true"]}]}).json()["jobs"][0]["id"]
        row = database.run(lambda c: c.execute(text("SELECT id, fence, instance, units FROM jobs")).one())
        bot_id = database.run(lambda c: c.execute(text("SELECT id FROM bots")).scalar_one())
        placement = moves.Placement(row.id, bot_id, {})
        database.run(lambda c: moves.grant(c, [placement], assigner="test", strategy="test", ack=timing.ack))
        answer = held.result(10)
        assert clock.monotonic() - began < 0.9, "answered by the end of the wait, not by news"
        assert [lease["job"] for lease in answer.json()["leases"]] == [job]
        assert answer.json()["leases"][0]["payload"] == {"command": ["true"]}


def test_a_held_sync_is_answered_when_the_bot_is_drained(served: Served) -> None:
    bot = Bot(served)
    with ThreadPoolExecutor() as threads, served.client(served.token("operator")) as http:
        held = threads.submit(bot.sync, wait=60)
        until(lambda: waits(served) == 1)
        assert http.post("/v1/bots/b1/drain", json={"draining": True, "reason": "disk"}).status_code == 200
        assert held.result(10).json()["drain"] is True


def test_a_held_sync_ends_after_its_wait(served: Served) -> None:
    answer = Bot(served).sync(wait=0.2)
    assert (answer.status_code, answer.json()["leases"]) == (200, [])
    assert waits(served) == 0


def test_a_client_that_hangs_up_leaves_nothing_behind(served: Served) -> None:
    bot = Bot(served)
    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    body = json.dumps({**bot.identity, "seq": 1, "wait": 60})
    headers = {"Content-Type": "application/json", "Authorization": bot.http.headers["authorization"]}
    connection.request("POST", "/v1/sync", body, headers)
    until(lambda: waits(served) == 1)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    until(lambda: waits(served) == 0, 0.9)
    assert bot.sync().status_code == 200


def test_stopping_answers_held_calls_at_once(database: Database, timing: Timing) -> None:
    with serving(database, timing) as served, ThreadPoolExecutor() as threads:
        bot = Bot(served)
        held = threads.submit(bot.sync, wait=60)
        until(lambda: waits(served) == 1)
        began = clock.monotonic()
        served.server.stop()
        assert held.result(5).status_code == 200
        assert clock.monotonic() - began < 0.9


def test_many_held_calls_cost_one_query_a_poll_and_no_thread_each(database: Database, timing: Timing) -> None:
    with serving(database, timing, wakeups=False) as served:
        bots = [Bot(served, f"b{number}") for number in range(30)]
        before = threading.active_count()
        with ThreadPoolExecutor(max_workers=30) as threads:
            held = [threads.submit(bot.sync, wait=1) for bot in bots]
            until(lambda: waits(served) == 30)
            looks = served.app.state.metrics.looks.labels("bots")._value
            began = looks.get()
            until(lambda: looks.get() >= began + 3)
            assert threading.active_count() - before <= 30 + 10 + 2
            assert {one.result(20).status_code for one in held} == {200}


def test_an_unexpected_error_tells_nothing_but_an_id(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    bot = Bot(served)

    def broken(_: Any) -> bytes:
        raise RuntimeError("secret words: SELECT * FROM tokens")

    monkeypatch.setattr(served.app.state.desk, "sync", broken)
    answer = bot.sync()
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["code"] in answer.json()["detail"]
    assert bot.http.get("/healthz").status_code == 200


def test_work_beyond_the_queue_is_refused_before_the_pool(database: Database) -> None:
    async def scenario() -> None:
        crew = Crew(database, threads=1, queue=1)
        release = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crew.call, release.wait)
            tasks.start_soon(crew.call, release.wait)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Busy):
                await crew.call(release.wait)
            release.set()
        assert crew.busy == 0

    anyio.run(scenario)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"host": "0.0.0.0"}, "insecure"),
        ({"host": "example.org"}, "insecure"),
        ({"tls_cert": "a.pem"}, "both or neither"),
        ({"port": 65536}, "port"),
        ({"surprise": 1}, "surprise"),
        ({"max_wait": float("inf")}, "max_wait"),
    ],
)
def test_settings_that_are_unsafe_or_wrong_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        GatewaySettings(**settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert GatewaySettings(host=host).host == host
    assert GatewaySettings(host="0.0.0.0", insecure=True).insecure


def test_a_unix_socket_is_for_its_owner_only_and_replaces_a_dead_one(
    database: Database, timing: Timing, scratch: Path
) -> None:
    path = scratch / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(database, timing, settings=GatewaySettings(unix_socket=path)) as served:
        assert served.url == f"http+unix://{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway") as http:
            assert http.get("/healthz").status_code == 200
    assert not path.exists()


def test_sigterm_ends_a_gateway_process_cleanly(database_url: str) -> None:
    program = f"""
import random
from bots import gateway
from bots.fetch import FetchSettings
from bots.leases import Desk
from schema import clock
from schema.engine import Database, DatabaseSettings
from schema.timing import Timing
database = Database({database_url!r}, DatabaseSettings(), role="gateway", chance=random.Random(1))
settings = gateway.GatewaySettings(port=0)
desk = Desk(database, timing=Timing(), fetch=FetchSettings(), now=clock.monotonic)
app = gateway.build(database, desk, settings, timing=Timing())
gateway.serve(app, settings, on_ready=lambda url: print(url, flush=True))
print("stopped", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(10) == 0
