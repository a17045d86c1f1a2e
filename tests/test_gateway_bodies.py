"""Bodies that no route takes: each gets its 4xx and changes nothing."""

import json
from typing import Any

import pytest

from schema.engine import Database
from tests.serving import Bot, Served, counts

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
