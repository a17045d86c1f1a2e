"""The operator's command line for classes, service levels and what holds for all of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from schema.requests import JobRequest
from tests.support.pool import Pool, completed

Answer = Callable[..., str]


@pytest.fixture
def good(operate: Callable[..., tuple[int, str]]) -> Answer:
    def call(line: str) -> str:
        code, said = operate(*line.split())
        assert code == 0, said
        return said

    return call


def submitted(pool: Pool, **fields: Any) -> str:
    (job,) = pool.submit(**JobRequest(command=["true"], **fields).normal())
    return job


def test_the_table_shows_both_directions_and_a_change_reaches_what_waits(good: Answer, pool: Pool) -> None:
    shown = {
        each["name"]: (each["points"], each["priority"], each["level"])
        for each in json.loads(good("class list --json"))
    }
    assert shown["critical"] == (100, 0, "critical")
    assert shown["background"] == (10, 90, "low")
    assert "serious_project" in good("class list")
    job = submitted(pool, job_class="random")
    assert good("class set random 55") == "random has 55 points: priority 45; 1 waiting job changed\n"
    assert (pool.job(job).priority, pool.job(job).rank) == (45, 45)
    good("class set nightly 5")
    assert pool.job(submitted(pool, job_class="nightly")).priority == 95


def test_a_service_level_can_be_changed_and_shown(good: Answer, pool: Pool) -> None:
    job = submitted(pool, service_level="economy")
    said = good("service-level set economy --points 30 --timeout 15m")
    assert said == "economy has 30 points: priority 70, timeout 900 s; 1 waiting job changed\n"
    assert (pool.job(job).priority, pool.job(job).timeout_seconds) == (70, 1800)
    shown = {each["name"]: each for each in json.loads(good("service-level list --json"))}
    assert shown["economy"]["timeout_seconds"] == 900
    assert "premium" in good("service-level list")


def test_what_holds_for_all_classes_is_set_and_what_is_not_given_stays(
    good: Answer, operate: Callable[..., tuple[int, str]], pool: Pool
) -> None:
    good("scheduling set --starvation 30m --max-queue-size 5000 --high 30")
    shown = json.loads(good("scheduling show --json"))
    assert (shown["starvation_seconds"], shown["max_queue_size"]) == (1800, 5000)
    assert (shown["critical"], shown["high"], shown["normal"]) == (0, 30, 60)
    good("scheduling set --starvation none --max-queue-size none")
    shown = json.loads(good("scheduling show --json"))
    assert (shown["starvation_seconds"], shown["max_queue_size"], shown["high"]) == (None, None, 30)
    for wrong, said in {
        "scheduling set --high 70": "levels: must have critical < high < normal",
        "scheduling set --max-queue-size many": "'many' is neither a whole number nor 'none'",
        "scheduling set": "give at least one of: --project-points",
        "class set Random 5": "is not a name",
    }.items():
        code, told = operate(*wrong.split())
        assert code == 2
        assert said in told
    actions = {row.action for row in pool.rows("SELECT action FROM audit WHERE action <> 'token.create'")}
    assert actions == {"scheduling.set"}


def test_quotas_of_owners_and_projects_are_set_by_name(good: Answer, pool: Pool) -> None:
    assert good("quota owner default ann 2") == "owner ann of default may cost 2\n"
    good("quota project default site 0")
    jobs = [submitted(pool, owner="ann") for _ in range(3)]
    stopped = submitted(pool, project="site")
    pool.bot(capacity=10)
    pool.assigner().run_once()
    assert [pool.job(job).state for job in (*jobs, stopped)] == ["leased", "leased", "queued", "queued"]
    assert good("quota project default site none") == "project site of default may cost any amount\n"
    pool.assigner().run_once()
    assert pool.job(stopped).state == "leased"


def test_a_class_that_is_limited_leaves_room_for_the_others(good: Answer, pool: Pool) -> None:
    good("class limit background 2")
    for _ in range(4):
        submitted(pool, job_class="background")
    pool.bot(capacity=3)
    pool.assigner().run_once()
    assert pool.row("SELECT count(*) AS jobs FROM live").jobs == 2
    urgent = submitted(pool, job_class="critical")
    pool.assigner().run_once()
    assert pool.job(urgent).state == "leased"


def test_what_was_estimated_is_compared_with_what_was(good: Answer, pool: Pool) -> None:
    for estimate in (10, 20, 40):
        submitted(pool, job_class="random", estimated_seconds=estimate, deadline_seconds=5 * estimate)
    bot = pool.bot(capacity=3)
    pool.assigner().run_once()
    bot.sync(*(completed(lease) for lease in bot.take()))
    pool.change("UPDATE jobs SET started_at = created_at, finished_at = created_at + interval '60 seconds'")
    (shown,) = json.loads(good("class report --json"))
    assert shown == {"name": "random", "jobs": 3, "estimated": 3, "ratio": 3.0, "dated": 3, "late": 1}
    assert "random" in good("class report")
