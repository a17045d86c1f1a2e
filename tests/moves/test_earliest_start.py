"""A job that is asked to start later never starts before, and counts as waiting from then on."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from assigner.admission.rules import RULES
from assigner.queries import demand, status
from schema.moves.waiting.reschedule import Rescheduled, reschedule
from schema.requests import GraphRequest
from tests.support.pool import Pool, completed, taken
from tests.support.race import Race, park, unpark
from tests.support.servers import Served

HOUR, DAY = 3600.0, 86400.0


def let_pass(pool: Pool, seconds: float) -> None:
    """Let so much time pass for all jobs."""
    passed = f"- interval '{seconds} s'"
    pool.change(
        f"UPDATE jobs SET queued_at = queued_at {passed}, schedule_after = schedule_after {passed},"
        f" queue_deadline = queue_deadline {passed}"
    )
    pool.change(f"UPDATE graph_nodes SET schedule_after = schedule_after {passed}")


def in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


def moved(pool: Pool, *jobs: str, **to: Any) -> list[Rescheduled]:
    to = {"instances": None, "reason": None, "actor": "test"} | to
    return pool.database.run(lambda c: reschedule(c, jobs, **to))


def seconds_to_start(pool: Pool, job: str) -> float | None:
    found = pool.job(job).schedule_after
    return None if found is None else (found - datetime.now(UTC)).total_seconds()


def test_a_job_starts_at_its_time_and_counts_as_waiting_from_then(pool: Pool) -> None:
    asked = [{"delay": HOUR}, {"schedule_after": in_an_hour()}, {"delay": HOUR, "dedup_key": "d"}]
    one_by_one = [job for fields in asked for job in pool.submit(queue_timeout_seconds=60, **fields)]
    together = pool.submit(2, queue_timeout_seconds=60, delay=HOUR)
    past = pool.submit(schedule_after="2020-01-01T00:00:00+00:00") + pool.submit(delay=0)
    jobs, bot, assigner = one_by_one + together, pool.bot(capacity=9), pool.assigner()
    assigner.run_once()
    assert sorted(pool.granted()) == sorted(past)
    for job in jobs:
        row = pool.job(job)
        assert row.schedule_after == row.queued_at == row.queue_deadline - timedelta(seconds=60)
    let_pass(pool, HOUR - 30)
    assigner.run_once()
    pool.upkeep().run_once()
    bot.sync(*[completed(work) for work in pool.given(bot)])
    assert len(pool.granted()) == 2
    let_pass(pool, 31)
    assigner.run_once()
    assert len(pool.granted()) == 2 + len(jobs)


def test_an_idle_assigner_sleeps_until_the_next_start(pool: Pool) -> None:
    pool.submit(delay=0.4)
    pool.submit(delay=HOUR)
    assert 0 < pool.assigner(interval=60, jitter=0).run_once() <= 0.4


def test_a_node_of_a_graph_counts_from_its_release_or_waits_for_its_time(pool: Pool) -> None:
    nodes = [
        {"node": 1, "command": ["true"]},
        {"node": 2, "command": ["true"], "after": [1], "delay": HOUR, "queue_timeout_seconds": 60},
        {"node": 3, "command": ["true"], "after": [1], "schedule_after": in_an_hour()},
        {"node": 4, "command": ["true"], "delay": HOUR},
        {"node": 5, "command": ["true"], "after": [1], "delay": HOUR},
        {"node": 6, "command": ["true"], "after": [1], "schedule_after": in_an_hour()},
    ]
    graph = taken(pool, GraphRequest.model_validate({"name": "late", "nodes": nodes}).normal())
    later = [graph.jobs[node] for node in (2, 3, 4, 5, 6)]
    assert seconds_to_start(pool, graph.jobs[4]) == pytest.approx(HOUR, abs=60)
    assert pool.job(graph.jobs[2]).schedule_after is None
    done = moved(pool, graph.jobs[5], graph.jobs[6], delay=0)
    assert done == [Rescheduled(graph.jobs[node], "blocked", None, changed=True) for node in (5, 6)]
    let_pass(pool, 600)
    bot = pool.bot(capacity=9)
    bot.sync(*[completed(work) for work in pool.given(bot)])
    pool.assigner().run_once()
    assert sorted(pool.granted()) == sorted(graph.jobs[node] for node in (1, 5, 6))
    assert seconds_to_start(pool, graph.jobs[2]) == pytest.approx(HOUR, abs=60)
    assert seconds_to_start(pool, graph.jobs[3]) == pytest.approx(HOUR - 600, abs=60)
    row = pool.job(graph.jobs[2])
    assert row.queue_deadline == row.queued_at + timedelta(seconds=60)
    let_pass(pool, HOUR)
    pool.assigner().run_once()
    assert sorted(pool.granted()) == sorted([graph.jobs[1], *later])


def test_a_hold_neither_hastens_a_start_nor_lengthens_the_wait_before_it(pool: Pool) -> None:
    (job,) = pool.submit(delay=HOUR, queue_timeout_seconds=60)
    before = pool.job(job)
    park(pool, job)
    pool.change("UPDATE stored_events SET at = at - interval '30 min' WHERE move = 'hold'")
    unpark(pool, job)
    after = pool.job(job)
    assert (after.schedule_after, after.queue_deadline) == (before.schedule_after, before.queue_deadline)
    released = pool.row("SELECT details FROM stored_events WHERE move = 'release'").details
    assert released["held_seconds"] == 0, "a ceiling of waits counts from the start, too"
    pool.bot()
    pool.assigner().run_once()
    assert pool.granted() == []


def test_a_job_that_is_joined_starts_when_the_sooner_of_both_may(pool: Pool) -> None:
    (job,) = pool.submit(dedup_key="d", delay=HOUR, queue_timeout_seconds=60)
    pool.submit(dedup_key="d", delay=2 * HOUR)
    assert seconds_to_start(pool, job) == pytest.approx(HOUR, abs=60)
    pool.submit(dedup_key="d", delay=600)
    row = pool.job(job)
    assert row.schedule_after == row.queued_at == row.queue_deadline - timedelta(seconds=60)
    assert seconds_to_start(pool, job) == pytest.approx(600, abs=60)
    pool.submit(dedup_key="d")
    pool.bot()
    pool.assigner().run_once()
    assert pool.granted() == [job]


def test_the_start_of_a_waiting_job_is_changed(pool: Pool) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60)
    before = pool.job(job)
    (found,) = moved(pool, job, delay=HOUR)
    row = pool.job(job)
    assert found == Rescheduled(job, "queued", row.queued_at, changed=True)
    assert row.schedule_after == row.queued_at == row.queue_deadline - timedelta(seconds=60)
    park(pool, job)
    at = (row.queued_at + timedelta(days=1)).isoformat()
    assert moved(pool, job, schedule_after=at)[0].starts_at == row.queued_at + timedelta(days=1)
    assert moved(pool, job, schedule_after=at)[0].changed is False
    unpark(pool, job)
    pool.bot()
    pool.assigner().run_once()
    assert pool.granted() == []
    assert moved(pool, job, delay=0) == [Rescheduled(job, "queued", None, changed=True)]
    assert pool.history(job) == ["submit", "reschedule", "hold", "reschedule", "release", "reschedule"]
    pool.assigner().run_once()
    assert moved(pool, job, delay=HOUR) == [Rescheduled(job, "leased", None, changed=False)]
    assert before.queued_at < pool.job(job).queued_at


def test_a_job_that_waits_already_keeps_its_age_and_one_whose_bot_was_lost_its_rest(pool: Pool) -> None:
    (job,) = pool.submit()
    before = pool.job(job)
    assert moved(pool, job, delay=0) == [Rescheduled(job, "queued", None, changed=False)]
    assert pool.job(job) == before
    pool.given(pool.bot())
    pool.bot()  # of the same name: what its older session runs may go on until that would have expired
    rest = pool.job(job).schedule_after
    assert rest is not None
    assert moved(pool, job, delay=0)[0].starts_at == rest
    assert moved(pool, job, delay=DAY)[0].starts_at > rest
    assert moved(pool, job, delay=0)[0].starts_at == rest


def test_who_joins_a_job_that_has_had_a_bot_does_not_change_when_it_starts(pool: Pool) -> None:
    (job,) = pool.submit(dedup_key="d")
    bot = pool.bot()
    pool.given(bot)
    pool.submit(dedup_key="d", delay=0.5)
    assert pool.job(job).schedule_after is None
    pool.bot()  # of the same name: what its older session runs may go on until that would have expired
    rest = pool.job(job).schedule_after
    moved(pool, job, delay=5)
    pool.submit(dedup_key="d")
    assert pool.job(job).schedule_after == rest


def test_a_reschedule_and_the_start_of_its_job_exclude_each_other(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    pool.bot()
    with race.first() as first:
        moved_first = reschedule(first.connection, [job], delay=HOUR, instances=None, reason=None, actor="test")
        pool.assigner().run_once()
        first.decide(commit=True)
    assert moved_first[0].changed
    pool.assigner().run_once()
    assert pool.granted() == []


def test_jobs_that_start_later_are_no_demand_and_nobodys_wait_but_fill_a_queue(pool: Pool) -> None:
    pool.submit(3, delay=HOUR)
    backlog = pool.database.run(status.count_backlog)
    assert (backlog.jobs["queued"], backlog.oldest) == (3, 0)
    found = pool.database.run(lambda c: demand.demand(c, demand.Scale(), rules=RULES))
    assert found.demand == []
    told = pool.database.run(lambda c: status.pool_status(c, instances=None))
    assert [(row["jobs"], row["later"]) for row in told["counts"]] == [(3, 3)]
    minute = pool.row("SELECT now() AS at").at
    assert [each.waiting for each in pool.database.run(lambda c: status.count_minute(c, minute))] == [0, 0, 0]


def test_a_caller_sees_when_its_job_starts_and_changes_it(served: Served, operator: httpx.Client) -> None:
    with served.client(served.token("submitter", instance="ci")) as http:
        submitted = http.post("/v1/jobs", json={"jobs": [{"command": ["true"], "delay": 7200}]})
        (job,) = (each["id"] for each in submitted.json()["jobs"])
        (row,) = http.get("/v1/jobs").json()["jobs"]
        assert row["why"].startswith(("starts in 2 h, at ", "starts in 1 h 59 min, at "))
        assert (
            http.get(f"/v1/jobs/{job}")
            .json()["waiting"]["sentence"]
            .startswith("it does not run because it starts at ")
        )
        gates = {each["gate"]: each for each in http.get(f"/v1/jobs/{job}/explain").json()["gates"]}
        assert "it starts at" in gates["backoff"]["sentence"]
        assert gates["backoff"]["sentence"].endswith(("in 2 h", "in 1 h 59 min"))
        answer = http.post("/v1/jobs/reschedule", json={"ids": [job], "delay": 0}).json()
        assert answer["jobs"] == [{"id": job, "state": "queued", "starts_at": None, "changed": True, "why": None}]
        assert http.get("/v1/jobs").json()["jobs"][0]["why"] == "no bot in its cohort"
        for bad in ({}, {"delay": 1, "schedule_after": "2026-12-01T10:00Z"}, {"schedule_after": "tomorrow"}):
            assert http.post("/v1/jobs/reschedule", json={"ids": [job], **bad}).status_code in (400, 422)
        foreign = operator.post("/v1/jobs", json={"jobs": [{"command": ["true"], "instance": "web"}]}).json()
        assert http.post("/v1/jobs/reschedule", json={"ids": [foreign["jobs"][0]["id"]], "delay": 1}).status_code == 404
