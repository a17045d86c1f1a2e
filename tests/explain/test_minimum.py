"""What is stopped for a job whose instance is below its minimum, and if nothing is, why not."""

import pytest

from assigner.explain.answer import QUOTAS
from assigner.preemption.plan import QuotaSettings
from tests.support.explain import explained
from tests.support.pool import Pool
from tests.support.tenancy import Tenancy

BELOW = "nothing is stopped for it although instance 'web' is below its minimum of 2 with 0 units: "


def run_two(pool: Pool, one: str, other: str) -> None:
    """A bot of two units runs a job of each of these instances."""
    for instance in (one, other):
        pool.submit(instance=instance, priority=5 if one != other else 0)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    assert len(bot.take()) == 2


def said(pool: Pool, job: str, settings: QuotaSettings = QUOTAS, **view: list[str]) -> str:
    found = explained(pool, job, quotas=settings, **view)
    assert found.preemption is not None, found.sentence
    return found.preemption.sentence


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "2 jobs are not less urgent, and the rule of the cohort is lower_priority_only"),
        ({"preemption": False}, "preemption is off"),
        ({"min_run_time": 60.0}, "2 jobs have run for less than 1 min"),
        ({"max_evictions": 0}, "2 jobs were evicted 0 times, as often as a job may be"),
    ],
)
def test_why_nothing_is_stopped_is_told_by_what_protects_the_running_jobs(
    pool: Pool, tenancy: Tenancy, settings: dict[str, float], why: str
) -> None:
    tenancy.quota("web", minimum=2)
    run_two(pool, "default", "default")
    (job,) = pool.submit(instance="web")
    assert said(pool, job, QuotaSettings(**settings)) == BELOW + why
    seen = said(pool, job, QuotaSettings(**settings), instances=["web"])
    assert seen.removeprefix(BELOW) in ("the rules protect the jobs that run", "preemption is off")


def test_minimums_of_others_and_jobs_of_the_same_instance_are_counted_apart(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("web", minimum=3)
    tenancy.quota("ml", minimum=1)
    run_two(pool, "ml", "web")
    (job,) = pool.submit(instance="web", units=1)
    assert said(pool, job).endswith(
        "with 1 unit: 1 job is of instances that would fall below their own minimum; 1 job is of the same instance"
    )


def test_a_job_is_told_of_only_where_room_is_all_that_is_missing_and_a_minimum_is_unmet(
    pool: Pool, tenancy: Tenancy
) -> None:
    pool.running(priority=5)
    (job,) = pool.submit(instance="web")
    assert explained(pool, job).preemption is None, "it has no minimum"
    tenancy.quota("web", minimum=2)
    assert len(explained(pool, job).preemption.jobs) == 1  # type: ignore[union-attr]
    assert said(pool, job).startswith("1 job of 1 unit would be asked to stop on bot 'bot-1', by the rule")
    assert explained(pool, job, instances=["web"]).preemption.jobs == []  # type: ignore[union-attr]
    seen = "room would be made for it, by the rule lower_priority_only, once it has waited 20.0 s: instance 'web'"
    assert said(pool, job, instances=["web"]).startswith(seen), "a submitter sees nothing of other tenants"
    (wide,) = pool.submit(instance="web", units=4)
    assert explained(pool, wide).preemption is None, "no bot has so many units"
    pool.change("UPDATE instances SET draining = true WHERE name = 'web'")
    assert explained(pool, job).preemption is None, "its instance starts no jobs"
