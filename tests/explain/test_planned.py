"""A plan tells what a submit would do, by the code of a submit, and leaves nothing behind."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import leasehold
import pytest

from tests.support.pool import Pool
from tests.support.servers import Served

JOB = {"command": ["true"]}
TABLES = (
    "SELECT table_name FROM information_schema.tables WHERE table_schema = 'leasehold' AND table_type = 'BASE TABLE'"
)


def planned(http: httpx.Client, *jobs: dict[str, Any], query: str = "plan") -> list[dict[str, Any]]:
    answer = http.post(f"/v1/jobs?{query}", json={"jobs": [JOB | job for job in jobs]})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["jobs"]
    return found


def stored(pool: Pool) -> dict[str, int]:
    """The number of rows of each table, and who waits to be notified."""
    return {row[0]: pool.row(f"SELECT count(*) FROM {row[0]}")[0] for row in pool.rows(TABLES)}


def test_a_plan_tells_the_bot_or_what_is_missing_and_stores_nothing(
    pool: Pool, served: Served, operator: httpx.Client
) -> None:
    bot = pool.bot(capacity=2)
    new = {"instance": "ci", "label": "x", "properties": {"os": "plan9"}, "key": "k", "metadata": {"a": "b"}}
    before = stored(pool)
    with pool.database.listen() as listener:
        listener.execute("LISTEN leasehold_jobs")
        (free, other), (large,) = planned(operator, {}, new), planned(operator, {"units": 3}, query="plan=true")
        assert list(listener.notifies(timeout=0)) == []
    assert (free["outcome"], free["job"], free["bot"]["name"]) == ("new", None, "bot-1")
    assert "bot 'bot-1' was the best of 1 candidate" in free["bot"]["sentence"]
    assert free["explanation"]["order"]["in_queue"] == {"jobs": 0, "more": False}
    closed = [gate["gate"] for gate in large["explanation"]["gates"] if gate["open"] is False]
    assert (closed, large["bot"]) == (["units"], None)
    assert (other["explanation"]["instance"], other["bot"]) == ("ci", None)
    assert "no bot" in other["explanation"]["sentence"]
    assert stored(pool) == before, "no row of any table"
    with served.client(served.token("submitter", instance="default")) as submitter:
        (mine,) = planned(submitter, {})
        assert (mine["bot"]["name"], "bot-1" in json.dumps(mine)) == (None, False)
        assert submitter.post("/v1/jobs?plan", json={"jobs": [JOB | {"instance": "ci"}]}).status_code == 403
    assert bot.sync()["leases"] == []
    with leasehold.Pool(served.url, token=served.token("operator")) as app:
        assert (app.plan(["true"], units=2).bot, app.plan(["true"], units=3).bot) == ("bot-1", None)
        with pytest.raises(leasehold.BadInput, match=r"^units: "):
            app.plan(["true"], units=0)


def test_a_plan_tells_what_the_submit_would_join_replace_or_repeat(pool: Pool, operator: httpx.Client) -> None:
    (job,) = pool.submit(dedup_key="d")
    operator.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]})
    found = planned(operator, {"dedup_key": "d"}, {"dedup_key": "d", "priority": 3}, {"key": "k"}, {"dedup_key": "e"})
    assert [each["outcome"] for each in found] == ["join", "join", "known", "new"]
    (replaced,) = planned(operator, {"dedup_key": "d", "on_conflict": "replace", "priority": 3})
    assert (replaced["outcome"], replaced["job"], replaced["explanation"]["priority"]) == ("replace", job, 3)
    assert (pool.job(job).priority, pool.history(job)) == (0, ["submit"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"units": 0},
        {"priority": 1, "prefer_seconds": 5},
        {"dedup_key": "d", "on_conflict": "refuse"},
        {"label": "full"},
        {"job_class": "absent"},
        {"key": "k", "units": 2},
    ],
    ids=str,
)
def test_what_a_submit_would_be_refused_for_a_plan_is_refused_for(
    pool: Pool, operator: httpx.Client, wrong: dict[str, Any]
) -> None:
    pool.submit(dedup_key="d")
    operator.post("/v1/jobs", json={"jobs": [JOB | {"key": "k"}]})
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('full', 0)")
    body = {"jobs": [JOB | wrong]}
    plan, submit = operator.post("/v1/jobs?plan", json=body), operator.post("/v1/jobs", json=body)
    assert (plan.status_code, plan.json()["detail"]) == (submit.status_code, submit.json()["detail"])
    assert plan.status_code >= 400


def test_too_many_jobs_are_not_planned(operator: httpx.Client) -> None:
    answer = operator.post("/v1/jobs?plan", json={"jobs": [JOB] * 101})
    assert (answer.status_code, answer.json()["detail"]) == (400, "jobs: are 101, and at most 100 are planned at once")


def test_a_plan_tells_what_would_be_stopped_for_a_minimum(pool: Pool, operator: httpx.Client) -> None:
    (victim, _bot, _work) = pool.running(priority=50)
    operator.patch("/v1/quotas/default/default?create=true", json={"max": 5})
    operator.patch("/v1/quotas/default/vision?create=true", json={"min": 1})
    (found,) = planned(operator, {"instance": "vision"})
    stopped = found["explanation"]["preemption"]
    assert stopped["jobs"] == [victim]
    said = "1 job of 1 unit would be asked to stop on bot 'bot-1', by the rule lower_priority_only"
    assert said in stopped["sentence"]
    assert pool.job(victim).state == "running"


def test_the_command_prints_the_plan_of_one_job_and_of_a_file(
    pool: Pool, operate: Callable[..., tuple[int, str]], tmp_path: Any
) -> None:
    pool.bot()
    code, said = operate("submit", "--plan", "--dedup-key", "d", "--", "true")
    assert (code, said.splitlines()[-1]) == (0, "nothing was submitted")
    assert "a job would be made" in said
    assert "bot-1" in said
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"command": ["true"]}\n\n{"command": ["true"], "units": 9}\n')
    assert "line    3" in operate("submit", "--plan", "--file", str(jobs))[1]
    assert len(json.loads(operate("submit", "--plan", "--json", "--file", str(jobs))[1])) == 2
    assert operate("submit", "--plan", "--wait", "--", "true")[1].startswith("error: --plan: submits nothing")
    assert operate("submit", "--plan", "--job-class", "absent", "--", "true")[1].startswith("error: --job-class:")
    assert pool.rows("SELECT FROM jobs") == []
    (job,) = pool.submit(dedup_key="d")
    refuse = ("submit", "--dedup-key", "d", "--on-conflict", "refuse")
    for more in ((), ("--plan",)):
        code, said = operate(*refuse, *more, "--", "true")
        assert (code, said) == (2, f"error: --dedup-key: 'd' is that of job {job}, which is queued\n")
    jobs.write_text('{"command": ["true"]}\n\n{"command": ["true"], "dedup_key": "d", "on_conflict": "refuse"}\n')
    assert operate("submit", "--file", str(jobs))[1].startswith(f"error: {jobs}:3: dedup_key: 'd' is that of")
