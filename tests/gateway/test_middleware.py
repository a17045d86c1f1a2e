"""How bodies are read: once, away from the event loop, within bounds that every honest request keeps."""

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import anyio
import anyio.lowlevel
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from leasehold import wire
from leasehold.client import MAX_BYTES
from leasehold.errors import BadInput
from pydantic import ValidationError
from structlog.testing import capture_logs

from assigner.api import jobs as job_routes
from assigner.api.submission import SubmitRequest
from bots.agent.job_files import MAX_TOLD_BYTES
from bots.gateway import middleware
from bots.gateway import routes as routes_gateway
from bots.gateway.app import health_router
from bots.gateway.middleware import BodyReader, TokenCache, route_rules
from bots.gateway.server import GatewaySettings
from bots.gateway.workers import Busy, WorkerPool
from bots.protocol import MAX_LEASES, Sync
from schema import validation
from schema.postgres import migrate
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.tenancy.tokens import Principal
from schema.timing import Timing
from tests.support.http import JOB
from tests.support.patience import eventually
from tests.support.requests import FULL
from tests.support.servers import Bot, Served, counts, serving

PATIENCE = 60.0
JSON = {"Content-Type": "application/json"}


def refused(reader: BodyReader, document: object) -> list[Any]:
    with pytest.raises(middleware.Invalid) as caught:
        reader.read(json.dumps(document).encode())
    return list(caught.value.errors())


def test_the_event_loop_answers_while_a_maximal_bad_body_is_refused(
    served: Served, operator: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counts(database)
    begun, go_on = threading.Event(), threading.Event()
    parse = validation.parse_json

    def held(raw: bytes) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE), "the event loop answered nobody meanwhile"
        return parse(raw)

    monkeypatch.setattr(validation, "parse_json", held)
    worst = b'{"jobs":[' + b"1," * (8 * 1024 * 1024 - 16) + b"1]}"
    with ThreadPoolExecutor(1) as pool, served.client() as stranger:
        answer = pool.submit(operator.post, "/v1/jobs", content=worst, headers=JSON, timeout=PATIENCE)
        assert begun.wait(PATIENCE)
        try:
            assert stranger.get("/healthz").json() == {"status": "ok"}
        finally:
            go_on.set()
        problem = answer.result()
    assert problem.status_code == 400
    assert problem.json()["detail"] == "body: holds more than 1000000 values and keys"
    assert counts(database) == before


@pytest.mark.parametrize("jobs", [1, 3000], ids=["a small body", "a large body"])
def test_a_body_is_parsed_once_and_never_by_the_thread_of_the_event_loop(
    operator: httpx.Client, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    decode, threads = json.JSONDecoder.decode, list[str]()

    def noted(decoder: json.JSONDecoder, document: str) -> Any:
        if "a mark" in document:
            threads.append(threading.current_thread().name)
        return decode(decoder, document)

    monkeypatch.setattr(json.JSONDecoder, "decode", noted)
    answer = operator.post("/v1/jobs", json={"jobs": [JOB | {"label": "a mark"}] * jobs})
    assert answer.status_code == 200
    assert len(threads) == 1
    assert threads[0].startswith("AnyIO worker thread")


def test_no_route_lets_the_framework_read_its_body() -> None:
    app = FastAPI()
    for router in (routes_gateway.router, health_router, *job_routes.ROUTERS):
        app.include_router(router)
        routes = [route for route in router.routes if isinstance(route, APIRoute)]
        assert [route.path for route in routes if route.body_field is not None] == []
        posts = [route for route in routes if "POST" in route.methods]
        assert [route.path for route in posts if middleware.body_reader(route.endpoint) is None] == []


def test_bodies_wait_for_a_reader_even_when_no_connection_is_free(database: Database) -> None:
    async def crowd() -> None:
        crew = WorkerPool(database, threads=1, queue=2)
        release = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crew.call, release.wait)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(PATIENCE):
                assert await crew.read(threading.current_thread) is not threading.current_thread()
            tasks.start_soon(crew.call, release.wait)
            tasks.start_soon(crew.call, release.wait)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Busy):
                await crew.read(threading.current_thread)
            release.set()
        assert crew.slots.taken == 0

    anyio.run(crowd)


def test_of_thousands_of_bad_elements_only_the_first_is_noted() -> None:
    """Each that is noted costs time in which no other thread runs."""
    jobs = [{"command": [1] * 5000, "properties": {"os": [1] * 5000}}] * 10
    with pytest.raises(ValidationError) as submit:
        SubmitRequest.model_validate({"jobs": jobs})
    leases = [{"job": 1, "fence": 0, "state": "active"}] * 5000
    with pytest.raises(ValidationError) as sync:
        Sync.model_validate({"bot": "b1", "epoch": 1, "secret": "s", "seq": 1, "leases": leases})
    assert submit.value.error_count() < 5
    assert sync.value.error_count() == 1


def largest_batch() -> dict[str, Any]:
    """10,000 jobs that use every field, as many bytes as a part may have."""
    env = {f"NAME{n}": "value" for n in range(8)}
    job = FULL | {"command": ["make", *map(str, range(20))], "env": env, "key": "k" * 36}
    room = MAX_BYTES // wire.MAX_BATCH - len(json.dumps(job)) - 2
    return {"jobs": [job | {"stdin": "," * room}] * wire.MAX_BATCH}


def largest_sync() -> dict[str, Any]:
    """Everything that a bot with 10,000 leases can have to tell at once."""
    outcome = {
        "verdict": "released",
        "exit_code": -2147483648,
        "reason": "\\" * 500,
        "seconds": 12345678.123456789,
        "output_bytes": 2**63 - 1,
        "output_truncated": False,
        "usage": {f"unit-{n:05d}": 1234567.1234 for n in range(7)},
    }
    assert MAX_TOLD_BYTES - 30 < len(json.dumps(outcome["usage"], separators=(",", ":"))) <= MAX_TOLD_BYTES
    leases = [
        {"job": "0" * 36, "fence": 2**63 - 1 - n, "state": "completed", "outcome": outcome, "output": []}
        for n in range(MAX_LEASES)
    ]
    output = [{"start": n << 18, "data": "A" * (validation.MAX_OUTPUT_BYTES // 3)} for n in range(4)]
    # Each of these characters takes six bytes in the body, and two in the text.
    text = json.dumps("é" * ((validation.MAX_RESULT_BYTES - 2) // 2), ensure_ascii=False)
    last = leases[0] | {"output": output, "checkpoint": text, "outcome": outcome | {"result": text}}
    identity = {"bot": "b" * 63, "epoch": 2**63 - 1, "secret": "s" * 200, "seq": 2**63 - 1, "wait": 60.0}
    return {**identity, "status": "draining", "leases": [*leases[1:], last]}


@pytest.mark.parametrize(("model", "make"), [(SubmitRequest, largest_batch), (Sync, largest_sync)])
def test_the_largest_honest_bodies_pass(model: type[Any], make: Callable[[], dict[str, Any]]) -> None:
    raw = json.dumps(make(), separators=(",", ":")).encode()
    assert wire.LEAST_BODY // 3 < len(raw) <= wire.LEAST_BODY
    assert isinstance(BodyReader(model).read(raw), model)


def test_a_refusal_names_the_place_in_the_body() -> None:
    with pytest.raises(BadInput, match="is not JSON"):
        BodyReader(SubmitRequest).read(b"{")
    submit = BodyReader(SubmitRequest)
    assert refused(submit, [])[0]["loc"] == ("body",)
    assert refused(submit, {"jobs": [JOB, JOB | {"priority": "x"}]})[0]["loc"] == ("body", "jobs", 1, "priority")


# Bodies that no route takes: each gets its 4xx and changes nothing.


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


#: Routes that take a body in which nothing is given.
OF_DEFAULTS = ("/drain", "/v1/scores", "/effect")
#: Routes that act on jobs given by their ids or by a filter.
SELECTING = {f"/v1/jobs/{act}" for act in ("cancel", "hold", "release", "requeue")}


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
                if path.endswith(OF_DEFAULTS) and body == b"{}":
                    continue
                answer = http.post(
                    path.replace("{name}", "b1"), content=body, headers={"Content-Type": "application/json"}
                )
                # Neither ids nor a filter: each field is right by itself.
                wanted = 400 if body == b"{}" and path in SELECTING else status
                assert answer.status_code == wanted, (path, body[:40], answer.text)
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


def test_a_nul_character_in_a_path_or_query_gets_400_on_every_route(served: Served, database: Database) -> None:
    before = counts(database)
    tokens_of = {kind: served.token(kind, **({"bot": "*"} if kind == "bot" else {})) for kind in tokens.Kind}
    addresses = [
        (
            method,
            parameter["name"],
            path if parameter["in"] == "query" else path.replace(f"{{{parameter['name']}}}", "x%00"),
            what,
        )
        for path, ways in served.client().get("/openapi.json").json()["paths"].items()
        for method, what in ways.items()
        for parameter in what.get("parameters", [])
    ]
    assert {"name", "resource_class", "after", "reason", "zone", "id"} <= {name for _, name, _, _ in addresses}
    for method, name, path, what in addresses:
        query = "" if "%00" in path else f"?{name}=x%00"
        target = re.sub(r"\{\w+\}", "x", path) + query
        with served.client(tokens_of[what["x-kinds"][-1]]) as http:
            answer = http.request(method, target, json={} if method in ("post", "put", "patch") else None)
        assert (answer.status_code, answer.json()["detail"]) == (400, f"{name}: holds a NUL character"), target
    assert counts(database) == before


def test_a_slash_too_many_leads_to_no_host_that_the_request_names(operator: httpx.Client) -> None:
    for method, path in (("GET", "/v1/jobs/"), ("GET", "/healthz/"), ("POST", "/v1/sync/")):
        answer = operator.request(method, path, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
        assert "location" not in answer.headers


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


# Who may come in by which route, and what strangers are told.


def test_the_open_routes_need_no_token(served: Served) -> None:
    with served.client() as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        eventually(lambda: http.get("/readyz").json()["wakeups_connected"])
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
    needed = migrate.status(database).needed
    database.run(lambda c: c.execute(Statement("UPDATE alembic_version SET version_num = 'older'")))
    with served.client() as http:
        answer = http.get("/readyz")
    database.run(lambda c: c.execute(Statement("UPDATE alembic_version SET version_num = :needed"), {"needed": needed}))
    assert answer.status_code == 503
    assert answer.json()["detail"] == f"schema older, need {needed}; run: leasehold db upgrade"
    assert answer.headers["retry-after"] == "1"


def test_a_process_of_which_a_loop_stands_still_is_not_ready_and_names_it(served: Served) -> None:
    with served.client() as http:
        assert http.get("/readyz").status_code == 200
        served.app.state.standing = lambda: ["presence"]
        answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["detail"]) == (503, "loops of this process stand still: presence")


def test_a_stranger_is_told_how_to_show_a_token(served: Served) -> None:
    with served.client() as http:
        stranger = http.post("/v1/jobs", json={})
    assert stranger.status_code == 401
    assert stranger.headers["www-authenticate"].startswith("Bearer")
    assert stranger.headers["content-type"] == "application/problem+json"


def test_a_route_that_does_not_say_who_may_use_it_is_closed_to_all() -> None:
    router = APIRouter()

    @router.get("/forgotten")
    async def forgotten() -> None:
        raise AssertionError

    assert route_rules([router], max_body=1)[0].kinds == frozenset()


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
            eventually(lambda: http.get("/v1/status").status_code == 401)
            assert http.get("/v1/status").json()["detail"] == "the token was revoked"


def test_requests_that_bring_the_same_token_at_once_share_one_query(served: Served) -> None:
    token, asked = served.token("operator"), list[str]()
    cache, done = TokenCache(seconds=5.0), list[Principal]()

    class Workers:
        async def run(self, work: Callable[[Any], Principal]) -> Principal:
            asked.append("query")
            await anyio.lowlevel.checkpoint()
            return served.database.run(work)

    async def ask() -> None:
        done.append(await cache.principal([f"Bearer {token}"], cast(Any, Workers())))

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask)

    anyio.run(scenario)
    assert asked == ["query"]
    assert [each.kind for each in done] == ["operator"] * 20


def test_a_bot_may_only_be_what_its_token_says(served: Served) -> None:
    with served.client(served.token("bot", bot="ci-*", properties={"os": ["linux"]})) as http:
        opened = http.post("/v1/sessions", json={"bot": "ci-1", "properties": {"os": "linux"}})
        foreign = http.post("/v1/sessions", json={"bot": "b1"})
        boaster = http.post("/v1/sessions", json={"bot": "ci-1", "properties": {"os": "mac"}})
        intruders = [http.post("/v1/sessions", json={"bot": "ci-1"} | more).status_code for more in
                     ({"labels": ["secure"]}, {"pool": "blue"})]  # fmt: skip
        identity = {"epoch": 1, "secret": opened.json()["secret"], "seq": 1}
        other = http.post("/v1/sync", json={"bot": "b1", **identity})
    assert intruders == [403, 403]
    assert [opened.status_code, foreign.status_code, boaster.status_code, other.status_code] == [200, 403, 403, 403]


def test_an_unexpected_error_tells_nothing_but_an_id(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    bot = Bot(served)

    async def broken(_: Any) -> None:
        raise RuntimeError("secret words: SELECT * FROM tokens")

    monkeypatch.setattr(served.app.state.opener, "open", broken)
    answer = bot.http.post("/v1/sessions", json={"bot": "b1"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["code"] in answer.json()["detail"]
    assert bot.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("53100", 503, "the database has no disk space left"),
        ("53200", 503, "the database has no memory left"),
        ("40001", 503, "the database is too busy"),
        ("57014", 503, "the database is too busy"),
        ("XX000", 500, "the gateway failed"),
        ("P0001", 500, "the gateway failed"),
    ],
)
def test_every_error_of_the_database_is_a_problem_document_and_no_text_of_it_is_told_or_logged(
    served: Served, database: Database, caplog: pytest.LogCaptureFixture, code: str, status: int, detail: str
) -> None:
    bot, operator = Bot(served), served.client(served.token("operator"))
    raises = f"""
        CREATE FUNCTION raise() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'secret message' USING ERRCODE = '{code}', DETAIL = 'secret row'; END $$;
        CREATE TRIGGER raises BEFORE INSERT ON jobs EXECUTE FUNCTION raise();
        CREATE TRIGGER raises BEFORE UPDATE ON bots EXECUTE FUNCTION raise();
        CREATE TRIGGER raises BEFORE INSERT ON write_probes EXECUTE FUNCTION raise();
    """
    database.run(lambda c: c.execute_sql(raises))
    with operator, capture_logs() as logs:
        answers = [operator.post("/v1/jobs", json={"jobs": [JOB]}), bot.sync(), operator.get("/readyz")]
    for answer, wanted in zip(answers, (status, status, 503), strict=True):
        assert (answer.status_code, answer.headers["content-type"]) == (wanted, "application/problem+json")
        assert answer.json()["status"] == wanted
        assert "secret" not in answer.text
    assert answers[0].json()["detail"].startswith(detail)
    assert "secret" not in str(logs) + caplog.text
    assert [entry["sqlstate"] for entry in logs if "sqlstate" in entry] == ([code] * 2 if status == 500 else [])


def test_an_error_in_a_handler_of_the_framework_is_a_problem_document_and_is_logged_once_without_its_text(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret words")

    monkeypatch.setattr(served.app.state.database, "run", broken)
    with served.client() as http, capture_logs() as logs:
        answer = http.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert answer.json()["code"] in answer.json()["detail"]
    assert [entry["kind"] for entry in logs] == ["RuntimeError"]
    assert "secret" not in answer.text + str(logs) + caplog.text
