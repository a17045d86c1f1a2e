"""How bodies are read: once, away from the event loop, within bounds that every honest request keeps."""

import difflib
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import anyio
import anyio.lowlevel
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from leasehold import wire
from leasehold.client import MAX_BYTES
from leasehold.errors import MAX_TOLD, BadInput
from pydantic import ValidationError
from structlog.testing import capture_logs

from assigner.api import jobs as job_routes
from assigner.api.submission import SubmitRequest
from bots.agent.job_files import MAX_TOLD_BYTES
from bots.gateway import middleware
from bots.gateway import routes as routes_gateway
from bots.gateway.app import health_router
from bots.gateway.identity.bearers import TokenCache
from bots.gateway.middleware import BodyReader, route_rules
from bots.gateway.server import GatewaySettings
from bots.gateway.workers import Busy, WorkerPool
from bots.protocol import MAX_LEASES, Sync
from schema import validation
from schema.postgres import migrate
from schema.postgres.engine import Database
from schema.tenancy import tokens
from schema.tenancy.tokens import Principal
from schema.timing import Timing
from tests.support.http import JOB
from tests.support.patience import eventually
from tests.support.pool import Pool
from tests.support.requests import FULL
from tests.support.servers import Bot, Served, counts, serving

PATIENCE = 60.0
JSON = {"Content-Type": "application/json"}


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
            with pytest.raises(Busy):
                await crew.call(release.wait)
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
    submit = BodyReader(SubmitRequest)
    with pytest.raises(BadInput, match="is not JSON"):
        submit.read(b"{")
    for document, place in (
        ([], ("body",)),
        ({"jobs": [JOB, JOB | {"priority": "x"}]}, ("body", "jobs", 1, "priority")),
    ):
        with pytest.raises(middleware.Invalid) as caught:
            submit.read(json.dumps(document).encode())
        assert next(iter(caught.value.errors()))["loc"] == place


# Bodies that no route takes: each gets its 4xx and changes nothing.


#: Bodies that are no JSON of ours, and bodies that no route takes.
GARBAGE = [
    *(b"", b"{", b"\xff{}", b'{"a": 1, "a": 2}', b'{"x": NaN}', b'{"x": 1e999}', b'{"x": -Infinity}'),
    *(b'{"x": "a\\u0000b"}', b'{"x": "\\ud800"}', b"[" * 50_000, b'{"x":' * 70 + b"1" + b"}" * 70),
    b'{"x": ' + b"9" * 5000 + b"}",
]
NO_REQUEST = [b"[]", b"null", b'"text"', b"{}", b'{"surprise": 1}']
#: Routes that take a body in which nothing is given.
OF_DEFAULTS = ("/drain", "/v1/scores", "/effect", "/activate", "/rollback", "/shadow", "/stop")
#: Routes that act on jobs given by their ids or by a filter.
SELECTING = {f"/v1/jobs/{act}" for act in ("cancel", "hold", "release", "requeue", "reschedule")}


@pytest.fixture
def callers(served: Served) -> Iterator[dict[str, httpx.Client]]:
    """A way in for each kind of token."""
    made = {
        str(kind): served.client(served.token(kind, **({"bot": "*"} if kind == "bot" else {}))) for kind in tokens.Kind
    }
    yield made
    for http in made.values():
        http.close()


def test_no_route_takes_a_bad_body(served: Served, database: Database, callers: dict[str, httpx.Client]) -> None:
    Bot(served)
    before = counts(database)
    for path, ways in served.described()["paths"].items():
        if "post" not in ways:
            continue
        # One reader reads the bodies of all routes.
        garbage = GARBAGE if path in ("/v1/jobs", "/v1/sync") else GARBAGE[1:2]
        for body in [*garbage, *NO_REQUEST]:
            if path.endswith(OF_DEFAULTS) and body == b"{}":
                continue
            http = callers[ways["post"]["x-kinds"][-1]]
            answer = http.post(path.replace("{name}", "b1"), content=body, headers=JSON)
            # Neither ids nor a filter: each field is right by itself.
            wanted = 400 if body in garbage or (body == b"{}" and path in SELECTING) else 422
            assert answer.status_code == wanted, (path, body[:40], answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["field"]
    assert counts(database) == before


def test_a_nul_character_in_a_path_or_query_gets_400_on_every_route(
    served: Served, database: Database, callers: dict[str, httpx.Client]
) -> None:
    before, seen = counts(database), set[str]()
    for path, ways in served.described()["paths"].items():
        for method, what in ways.items():
            for parameter in what.get("parameters", []):
                name = parameter["name"]
                in_path = path if parameter["in"] == "query" else path.replace(f"{{{name}}}", "x%00")
                target = re.sub(r"\{\w+\}", "x", in_path) + ("" if "%00" in in_path else f"?{name}=x%00")
                body = {} if method in ("post", "put", "patch") else None
                answer = callers[what["x-kinds"][-1]].request(method, target, json=body)
                assert (answer.status_code, answer.json()["detail"]) == (400, f"{name}: holds a NUL character"), target
                seen.add(name)
    assert seen >= {"name", "resource_class", "after", "reason", "zone", "id"}
    assert counts(database) == before


def test_an_unknown_parameter_of_the_query_gets_400_on_every_route(
    served: Served, database: Database, callers: dict[str, httpx.Client]
) -> None:
    before = counts(database)
    for path, ways in served.described()["paths"].items():
        for method, what in ways.items():
            kinds = what["x-kinds"]
            target = re.sub(r"\{\w+\}", "x", path) + "?nonsense=1"
            body = {} if method in ("post", "put", "patch") else None
            answer = callers[kinds[-1] if kinds != ["anyone"] else "operator"].request(method, target, json=body)
            if kinds == ["anyone"]:
                assert answer.status_code == 200, target
                continue
            assert (answer.status_code, answer.json()["detail"]) == (400, "nonsense: there is no such field"), target
    assert counts(database) == before


def test_a_misspelt_parameter_of_the_query_is_told_what_was_meant(operator: httpx.Client) -> None:
    for target, told in (
        ("/v1/graphs?opne=1", "opne: there is no such field; did you mean 'open'?"),
        ("/v1/demand?units_per_bots=2", "units_per_bots: there is no such field; did you mean 'units_per_bot'?"),
        ("/v1/jobs?lable=x&stat=queued", "lable: there is no such field; did you mean 'label'?"),
        ("/v1/status?=1", "query: there is no such field"),
    ):
        assert operator.get(target).json()["detail"] == told
    refused = operator.get("/v1/jobs?lable=x&stat=queued").json()["errors"]
    assert [each["field"] for each in refused] == ["lable", "stat"]


def test_names_are_compared_only_for_refusals_that_are_told_and_never_long_ones(
    operator: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, closest = list[str](), difflib.get_close_matches

    def counted(wrong: str, *names: Any, **how: Any) -> list[str]:
        compared.append(wrong)
        return closest(wrong, *names, **how)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    refused = operator.get("/v1/jobs?" + "&".join(f"name{number}" for number in range(1000))).json()
    assert (len(refused["errors"]), refused["more"], len(compared)) == (MAX_TOLD, 1000 - MAX_TOLD, MAX_TOLD)
    jobs = [{"command": ["a"], "nmae": 1}] * 100 + [{"command": ["a"], "n" * 100_000: 1}]
    refused = operator.post("/v1/jobs", json={"jobs": jobs[90:]}).json()
    assert (len(refused["errors"]), refused["more"], compared[MAX_TOLD:]) == (MAX_TOLD, 1, ["nmae"])
    refused = operator.post("/v1/jobs", json={"jobs": jobs[-1:]}).json()
    assert refused["detail"].endswith("there is no such field")
    assert compared[MAX_TOLD:] == ["nmae"]


def test_a_limit_that_consoles_of_earlier_versions_send_to_lists_of_one_page_is_ignored(operator: httpx.Client) -> None:
    for path in ("limits", "scheduling", "rates", "classes", "backpressure"):
        assert operator.get(f"/v1/{path}?limit=200").json() == operator.get(f"/v1/{path}").json()


def test_a_slash_too_many_leads_to_no_host_of_the_request_and_mistakes_are_problems(operator: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/v1/jobs/", 404),
        ("GET", "/healthz/", 404),
        ("POST", "/v1/sync/", 404),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/jobs", 405),
    ):
        answer = operator.request(method, path, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert "location" not in answer.headers


def test_what_is_not_json_or_too_large_is_refused_by_its_head(operator: httpx.Client) -> None:
    for more in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=latin-1"},
        JSON | {"Content-Encoding": "gzip"},
    ):
        assert operator.post("/v1/jobs", content=b"{}", headers=more).status_code == 415
    large = operator.post("/v1/bots/b1/drain", content=b" " * 70_000, headers=JSON)
    assert (large.status_code, large.json()["detail"]) == (413, "body: is larger than 65536 bytes")
    assert operator.get("/v1/status").status_code == 200


# Who may come in by which route, and what strangers are told.


def test_the_open_routes_need_no_token(served: Served) -> None:
    with served.client() as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        eventually(lambda: http.get("/readyz").json()["wakeups_connected"])
        assert http.get("/readyz").json()["status"] == "ready"
        assert "leasehold_requests_total" in http.get("/metrics").text
        described = served.described()
        stranger = http.post("/v1/jobs", json={})
    assert (stranger.status_code, stranger.headers["content-type"]) == (401, "application/problem+json")
    assert stranger.headers["www-authenticate"].startswith("Bearer")
    assert described["paths"]["/v1/sync"]["post"]["security"] == [{"token": []}]
    assert "security" not in described["paths"]["/healthz"]["get"]
    assert "409" in described["paths"]["/v1/jobs"]["post"]["responses"]
    assert {"Problem", "Sync", "SyncAnswer", "SubmitRequest"} <= set(described["components"]["schemas"])
    named = json.dumps(described)
    for reference in set(named.split('"$ref": "#/components/schemas/')[1:]):
        assert reference.split('"')[0] in described["components"]["schemas"]


def test_a_gateway_is_ready_though_its_connections_are_busy_but_not_before_another_schema_or_with_a_loop_that_stands(
    served: Served, pool: Pool
) -> None:
    with served.client() as http:
        with ExitStack() as held:
            for _ in range(pool.database.work.size):
                held.enter_context(pool.database.connect())
            assert http.get("/readyz").status_code == 200
        needed = migrate.status(pool.database).needed
        pool.change("UPDATE alembic_version SET version_num = 'older'")
        older = http.get("/readyz")
        pool.change("UPDATE alembic_version SET version_num = :needed", needed=needed)
        assert (older.status_code, older.headers["retry-after"]) == (503, "1")
        assert older.json()["detail"] == f"schema older, need {needed}; run: leasehold db upgrade"
        served.app.state.standing = lambda: ["presence"]
        stands = http.get("/readyz")
    assert (stands.status_code, stands.json()["detail"]) == (503, "loops of this process stand still: presence")


def test_a_route_that_does_not_say_who_may_use_it_is_closed_to_all() -> None:
    router = APIRouter()

    @router.get("/forgotten")
    async def forgotten() -> None:
        raise AssertionError

    assert route_rules([router], max_body=1)[0].kinds == frozenset()


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


RAISE = """
CREATE OR REPLACE FUNCTION raise() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'secret message' USING ERRCODE = '{code}', DETAIL = 'secret row'; END $$
"""
RAISES = """
CREATE TRIGGER raises BEFORE INSERT ON jobs EXECUTE FUNCTION raise();
CREATE TRIGGER raises BEFORE UPDATE ON bots EXECUTE FUNCTION raise();
CREATE TRIGGER raises BEFORE INSERT ON write_probes EXECUTE FUNCTION raise();
"""


def test_every_error_of_the_database_is_a_problem_document_and_no_text_of_it_is_told_or_logged(
    served: Served, operator: httpx.Client, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    bot, raises = Bot(served), RAISES
    for code, status, detail in (
        ("53100", 503, "the database has no disk space left"),
        ("53200", 503, "the database has no memory left"),
        ("40001", 503, "the database is too busy"),
        ("57014", 503, "the database is too busy"),
        ("55P03", 503, "somebody holds a lock on rows of the pool; operators: `leasehold db doctor` names who"),
        ("XX000", 500, "the gateway failed"),
        ("P0001", 500, "the gateway failed"),
    ):
        database.run(lambda c, code=code: c.execute_sql(RAISE.replace("{code}", code)))
        if raises:
            database.run(lambda c: c.execute_sql(RAISES))
            raises = ""
        with capture_logs() as logs:
            answers = [operator.post("/v1/jobs", json={"jobs": [JOB]}), bot.sync(), operator.get("/readyz")]
        for answer, wanted in zip(answers, (status, status, 503), strict=True):
            assert (answer.status_code, answer.headers["content-type"]) == (wanted, "application/problem+json")
            assert answer.json()["status"] == wanted
            assert "secret" not in answer.text
        assert answers[0].json()["detail"].startswith(detail)
        assert "secret" not in str(logs) + caplog.text
        assert [entry["sqlstate"] for entry in logs if "sqlstate" in entry] == ([code] * 2 if status == 500 else [])


def test_an_unexpected_error_tells_nothing_but_an_id_and_is_logged_once_without_its_text(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bot = Bot(served)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret words: SELECT * FROM tokens")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(served.app.state.opener, "open", broken)
        of_route = bot.http.post("/v1/sessions", json={"bot": "b1"})
    monkeypatch.setattr(served.app.state.database, "run", broken)
    with capture_logs() as further:
        of_framework = bot.http.get("/readyz")
    for answer in (of_route, of_framework):
        assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
        assert answer.json()["code"] in answer.json()["detail"]
    assert [entry["kind"] for entry in [*logs, *further]] == ["RuntimeError"] * 2
    assert "secret" not in of_route.text + of_framework.text + str([*logs, *further]) + caplog.text
    assert bot.http.get("/healthz").status_code == 200
