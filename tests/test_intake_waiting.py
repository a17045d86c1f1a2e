"""Cancelling, waiting for the end and following the output over the wire."""

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from schema import clock, outputs
from schema.engine import Database
from schema.timing import Timing
from tests.calling import JOB, audited, granted, submitted
from tests.patience import NEWS, eventually
from tests.serving import Bot, Served, serving


def test_cancel_tells_what_became_of_each_and_keeps_what_is_finished(
    operator: httpx.Client, database: Database
) -> None:
    one, two = submitted(operator, JOB, JOB)
    assert operator.post("/v1/jobs/cancel", json={"ids": [one]}).json() == {
        "jobs": [{"id": one, "state": "cancelled", "changed": True}]
    }
    answer = operator.post("/v1/jobs/cancel", json={"ids": [two.upper(), "nonsense", one]}).json()
    assert [(job["state"], job["changed"]) for job in answer["jobs"]] == [
        ("cancelled", True),
        (None, False),
        ("cancelled", False),
    ]
    assert operator.post("/v1/jobs/cancel", json={"ids": ["nonsense"]}).status_code == 404
    assert operator.get(f"/v1/jobs/{one}").json()["events"][-1]["move"] == "cancel"
    assert audited(database).count("jobs.cancel") == 2


def test_many_jobs_can_be_cancelled_while_somebody_waits(operator: httpx.Client, served: Served) -> None:
    ids = submitted(operator, *[JOB] * 500)
    waiter = served.client(served.token("submitter"))
    with ThreadPoolExecutor() as threads:
        held = threads.submit(waiter.post, "/v1/jobs/wait", json={"ids": ids, "wait": 60})
        eventually(lambda: served.waits("done") == 1)
        answer = operator.post("/v1/jobs/cancel", json={"ids": ids})
        assert answer.status_code == 200, answer.text
        assert held.result(NEWS).json()["done"] is True


@pytest.mark.parametrize("wakeups", [True, False], ids=["wake-ups", "poll only"])
def test_wait_returns_once_all_are_final_and_not_before(database: Database, timing: Timing, wakeups: bool) -> None:
    with serving(database, timing, wakeups=wakeups) as served, served.client(served.token("operator")) as http:
        ids = submitted(http, JOB, JOB)
        waiter = served.client(served.token("submitter"))
        began = clock.monotonic()
        short = waiter.post("/v1/jobs/wait", json={"ids": ids, "wait": 0.3}).json()
        assert (short["done"], [job["state"] for job in short["jobs"]]) == (False, ["queued", "queued"])
        assert clock.monotonic() - began >= 0.3
        with ThreadPoolExecutor() as threads:
            held = threads.submit(waiter.post, "/v1/jobs/wait", json={"ids": ids, "wait": 60})
            eventually(lambda: served.waits("done") == 1)
            http.post("/v1/jobs/cancel", json={"ids": ids[:1]})
            assert not held.done()
            http.post("/v1/jobs/cancel", json={"ids": ids[1:]})
            answer = held.result(NEWS).json()
        assert answer["done"] is True
        assert [job["id"] for job in answer["jobs"]] == ids
        assert {job["state"] for job in answer["jobs"]} == {"cancelled"}
        assert waiter.post("/v1/jobs/wait", json={"ids": [ids[0], "0" * 32]}).status_code == 404


def test_output_is_followed_while_it_is_written(
    served: Served, operator: httpx.Client, database: Database, timing: Timing
) -> None:
    bot = Bot(served)
    (job,) = submitted(operator, JOB)
    assert operator.get(f"/v1/jobs/{job}/output").json() == {
        "start": 0,
        "data": "",
        "next": 0,
        "state": "queued",
        "attempt": 0,
        "final": False,
    }
    row, fence = granted(database, timing, job)
    with ThreadPoolExecutor() as threads:
        held = threads.submit(operator.get, f"/v1/jobs/{job}/output?start=0&wait=60")
        eventually(lambda: served.waits("done") == 1)
        report = {
            **bot.identity,
            "job": job,
            "fence": fence,
            "output": [{"start": 0, "data": base64.b64encode(b"hello\n").decode()}],
        }
        assert bot.http.post("/v1/output", json=report).status_code == 204
        first = held.result(NEWS).json()
    assert (base64.b64decode(first["data"]), first["next"], first["attempt"], first["final"]) == (
        b"hello\n",
        6,
        1,
        False,
    )
    finished = bot.sync(
        leases=[{"job": job, "fence": fence, "state": "completed", "outcome": {"verdict": "succeeded"}}]
    )
    assert finished.status_code == 200
    last = operator.get(f"/v1/jobs/{job}/output?start=6&wait=60").json()
    assert (last["data"], last["state"], last["final"]) == ("", "succeeded", True)
    shown = operator.get(f"/v1/jobs/{job}").json()
    assert (shown["state"], shown["bot"], shown["events"][-1]["to"]) == ("succeeded", "b1", "succeeded")
    assert database.run(lambda c: outputs.read(c, row, fence=fence, start=0, limit=100)) == b"hello\n"
