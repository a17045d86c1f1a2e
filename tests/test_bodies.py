"""How bodies are read: once, away from the event loop, within bounds that every honest request keeps."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError

from assigner import intake
from assigner.submission import SubmitRequest
from bots import bodies, conversation
from bots.bodies import Reader
from bots.client import MAX_BYTES
from bots.crew import Busy, Crew
from bots.gateway import house
from bots.protocol import MAX_LEASES, Sync
from bots.usage import MAX_TOLD_BYTES
from schema import limits
from schema.engine import Database
from schema.errors import BadInput
from tests.calling import JOB
from tests.serving import Served, counts

PATIENCE = 60.0
JSON = {"Content-Type": "application/json"}


def refused(reader: Reader, document: object) -> list[Any]:
    with pytest.raises(bodies.Invalid) as caught:
        reader.read(json.dumps(document).encode())
    return list(caught.value.errors())


def test_the_event_loop_answers_while_a_maximal_bad_body_is_refused(
    served: Served, operator: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counts(database)
    begun, go_on = threading.Event(), threading.Event()
    parse = limits.parse_json

    def held(raw: bytes) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE), "the event loop answered nobody meanwhile"
        return parse(raw)

    monkeypatch.setattr(bodies.limits, "parse_json", held)
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
    loads, threads = json.loads, list[str]()

    def noted(document: Any, **options: Any) -> Any:
        if b"a mark" in (document if isinstance(document, bytes) else document.encode()):
            threads.append(threading.current_thread().name)
        return loads(document, **options)

    monkeypatch.setattr(json, "loads", noted)
    answer = operator.post("/v1/jobs", json={"jobs": [JOB | {"label": "a mark"}] * jobs})
    assert answer.status_code == 200
    assert len(threads) == 1
    assert threads[0].startswith("AnyIO worker thread")


def test_no_route_lets_the_framework_read_its_body() -> None:
    app = FastAPI()
    for router in (conversation.router, house, *intake.ROUTERS):
        app.include_router(router)
        routes = [route for route in router.routes if isinstance(route, APIRoute)]
        assert [route.path for route in routes if route.body_field is not None] == []
        posts = [route for route in routes if "POST" in route.methods]
        assert [route.path for route in posts if bodies.reader(route.endpoint) is None] == []


def test_bodies_wait_for_a_reader_even_when_no_connection_is_free(database: Database) -> None:
    async def crowd() -> None:
        crew = Crew(database, threads=1, queue=2)
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
        assert crew.busy == 0

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
    job: dict[str, Any] = {
        "command": ["make", *map(str, range(20))],
        "env": {f"NAME{n}": "value" for n in range(8)},
        "stdin": "",
        "instance": "ci",
        "properties": {"os": "linux", "arch": ["x86", "arm"]},
        "key": "k" * 36,
        "priority": -3,
        "units": 2,
        "label": "nightly",
        "locality_hint": "core",
        "timeout_seconds": 60,
        "max_attempts": 7,
        "retry_failed": True,
    }
    room = MAX_BYTES // limits.MAX_BATCH - len(json.dumps(job)) - 2
    return {"jobs": [job | {"stdin": "," * room}] * limits.MAX_BATCH}


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
    lease = {"job": "0" * 36, "fence": 2**63 - 1, "state": "completed", "outcome": outcome, "output": []}
    output = [{"start": n << 18, "data": "A" * (limits.MAX_OUTPUT_BYTES // 3)} for n in range(4)]
    identity = {"bot": "b" * 63, "epoch": 2**63 - 1, "secret": "s" * 200, "seq": 2**63 - 1, "wait": 60.0}
    return {**identity, "status": "draining", "leases": [lease] * (MAX_LEASES - 1) + [lease | {"output": output}]}


@pytest.mark.parametrize(("model", "make"), [(SubmitRequest, largest_batch), (Sync, largest_sync)])
def test_the_largest_honest_bodies_pass(model: type[Any], make: Callable[[], dict[str, Any]]) -> None:
    raw = json.dumps(make(), separators=(",", ":")).encode()
    assert limits.LEAST_BODY // 3 < len(raw) <= limits.LEAST_BODY
    assert isinstance(Reader(model).read(raw), model)


def test_a_refusal_names_the_place_in_the_body() -> None:
    with pytest.raises(BadInput, match="is not JSON"):
        Reader(SubmitRequest).read(b"{")
    submit = Reader(SubmitRequest)
    assert refused(submit, [])[0]["loc"] == ("body",)
    assert refused(submit, {"jobs": [JOB, JOB | {"priority": "x"}]})[0]["loc"] == ("body", "jobs", 1, "priority")
