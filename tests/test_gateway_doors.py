"""Who may come in by which route, and what strangers are told."""

import json
from typing import Any

import pytest
from fastapi import APIRouter
from sqlalchemy import text

from bots.door import entries
from bots.gateway import GatewaySettings
from schema import migrate, tokens
from schema.engine import Database
from schema.timing import Timing
from tests.patience import eventually
from tests.serving import Bot, Served, serving


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
    database.run(lambda c: c.execute(text("UPDATE alembic_version SET version_num = 'older'")))
    with served.client() as http:
        answer = http.get("/readyz")
    database.run(lambda c: c.execute(text("UPDATE alembic_version SET version_num = :needed"), {"needed": needed}))
    assert answer.status_code == 503
    assert answer.json()["detail"] == f"schema older, need {needed}; run: leasehold db upgrade"
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

    def broken(_: Any) -> list[bytes]:
        raise RuntimeError("secret words: SELECT * FROM tokens")

    monkeypatch.setattr(served.app.state.desk, "answer", broken)
    answer = bot.sync()
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["code"] in answer.json()["detail"]
    assert bot.http.get("/healthz").status_code == 200
