"""`leasehold report`: what the pool did within a window."""

import json
import math
from collections.abc import Callable

import httpx
import pytest

from assigner.queries import report
from assigner.queries.report import Report
from schema.accounting import counters, fair_share
from schema.policy import meters
from schema.requests import JobRequest
from tests.support.pool import Pool, completed

HOUR = 3600.0


def reported(pool: Pool, window: float = HOUR) -> Report:
    return pool.database.run(lambda c: report.report(c, window=window))


def ran(pool: Pool, *, instance: str, jobs: int, verdict: str = "succeeded", **fields: object) -> None:
    pool.submit(jobs, instance=instance, **fields)
    bot = pool.bot(f"bot-of-{instance}", capacity=jobs)
    pool.assigner().run_once()
    bot.sync(*(completed(lease, verdict) for lease in bot.take()), status="draining")


def aged(pool: Pool, seconds: float) -> None:
    """What happened so far happened so many seconds earlier, and each job waited 2 s and ran 10 s."""
    ended = "now() - make_interval(secs => :s)"
    jobs = (
        f"UPDATE jobs SET created_at = {ended} - interval '12 s', finished_at = {ended} WHERE finished_at IS NOT NULL"
    )
    pool.change(jobs, s=seconds)
    pool.change(f"UPDATE leases SET granted_at = {ended} - interval '10 s', ended_at = {ended}", s=seconds)


@pytest.mark.parametrize(
    ("shares", "index"),
    [([1, 1, 1], 1.0), ([1000 / 3, 500 / 1], 0.962), ([5, 0, 0, 0], 0.25), ([0, 0], None), ([], None)],
)
def test_fairness_is_jains_index(shares: list[float], index: float | None) -> None:
    found = fair_share.jain_index(shares)
    assert found == (None if index is None else pytest.approx(index, abs=5e-4))


def test_a_report_tells_waits_throughput_fairness_and_concentration(pool: Pool) -> None:
    ran(pool, instance="team-a", jobs=3, estimated_seconds=5.0, terms={})
    ran(pool, instance="team-b", jobs=1, verdict="failed")
    aged(pool, 60)
    found = reported(pool)
    estimates = found.estimates
    assert (estimates.jobs, estimates.estimated_mean, round(estimates.ratio_p50 or 0)) == (3, 5.0, 2)
    assert [(each.name, each.ended, each.succeeded, each.failed) for each in found.instances] == [
        ("team-a", 3, 3, 0),
        ("team-b", 1, 0, 1),
    ]
    assert [round(each.wait_p50 or 0) for each in found.instances] == [2, 2]
    assert [round(each.unit_seconds) for each in found.instances] == [30, 10]
    assert found.fairness is not None
    assert math.isclose(found.fairness, 40**2 / (2 * (30**2 + 10**2)), abs_tol=1e-3)
    assert math.isclose(found.throughput, 4 / HOUR)
    (spread,) = found.concentration
    assert (spread.bots, spread.jobs, spread.busiest_share) == (2, 4, 0.75)
    assert math.isclose(spread.index, 0.75**2 + 0.25**2)
    assert found.waiting == []
    pool.submit(2, instance="team-b")
    pool.change("UPDATE jobs SET queued_at = now() - interval '90 s' WHERE state = 'queued'")
    assert [(each.name, each.jobs, round(each.oldest)) for each in reported(pool).waiting] == [("team-b", 2, 90)]


def test_days_come_newest_first_with_their_mean_wait_and_priority(pool: Pool) -> None:
    ran(pool, instance="team-a", jobs=2, priority=5)
    aged(pool, 25 * HOUR)
    pool.submit(instance="team-b")
    found = reported(pool, 48 * HOUR)
    (day,) = found.days
    assert (day.scheduled, day.completed, day.priority_mean, round(day.wait_mean or 0)) == (2, 2, 5.0, 2)
    assert reported(pool).days == []


def test_efficiency_and_utilisation_count_the_minutes_in_which_jobs_were_ready(pool: Pool) -> None:
    nothing = reported(pool)
    assert (nothing.resources, nothing.meters) == ([], [])
    pool.bot("bot-1", capacity=9, resources={"cpu_milli": 4000, "memory_mib": 1000})
    pool.submit(1, terms={"resources": {"cpu_milli": 2000, "memory_mib": 250}})
    pool.assigner().run_once()
    pool.bot("bot-2", capacity=9, resources={"cpu_milli": 4000})
    pool.database.run(counters.sample)
    found = reported(pool)
    assert (found.resources, found.efficiency) == ([], None), "nothing was ready"
    pool.submit(1)
    pool.bot("bot-3", resources={"cpu_milli": 9000}, properties={"os": "plan9"})
    pool.change("UPDATE bots SET draining = true WHERE name = 'bot-3'")
    pool.database.run(counters.sample)
    pool.database.run(counters.sample)
    found = reported(pool).resources
    assert [(each.name, each.used, each.declared, each.utilisation) for each in found] == [
        ("cpu_milli", 2000, 8000, 0.25),
        ("memory_mib", 250, 1000, 0.25),
    ]
    assert reported(pool).efficiency == pytest.approx(1 / 18)


def test_gpus_that_jobs_have_to_themselves_count_as_thousandths_too(pool: Pool) -> None:
    pool.bot("bot-1", capacity=9, resources={"gpus": 4})
    pool.bot("bot-2", capacity=9, resources={"gpu_milli": 1000})
    for need in ({"gpus": 2}, {"gpu_milli": 500}):
        pool.submit(1, terms={"resources": need})
        pool.assigner().run_once()
    pool.submit(1, properties={"os": "plan9"})
    pool.database.run(counters.sample)
    found = reported(pool).resources
    assert [(each.name, each.used, each.declared) for each in found] == [("gpu_milli", 2500, 5000), ("gpus", 2, 4)]


def test_meters_tell_how_far_what_is_outside_the_pool_was_used(
    pool: Pool, operate: Callable[..., tuple[int, str]]
) -> None:
    for used in (10, 30):
        pool.database.run(lambda c, used=used: meters.put(c, "plan", used=used, most=100))
    pool.change(
        "INSERT INTO meter_hours (name, hour, readings, percents) VALUES"
        " ('plan', date_trunc('hour', now()) - interval '2 hours', 2, 160),"
        " ('plan', date_trunc('hour', now()) - interval '9 days', 1, 99)"
    )
    ran(pool, instance="team-a", jobs=1)
    (found,) = reported(pool, 24 * HOUR).meters
    assert (found.name, found.mean, found.busiest_hour) == ("plan", 50, 80)
    code, told = operate("report")
    assert (code, all(word in told for word in ("busiest hour (%)", "plan", "team-a"))) == (0, True)


def test_the_command_prints_a_report_and_refuses_a_bad_window(
    pool: Pool, operate: Callable[..., tuple[int, str]]
) -> None:
    ran(pool, instance="team-a", jobs=3)
    code, told = operate("report", "--json")
    assert (code, json.loads(told)["instances"][0]["name"]) == (0, "team-a")
    code, told = operate("report", "--window", "0")
    assert (code, told.startswith("error: --window: must be between")) == (2, True)


def test_one_job_with_an_estimate_that_nothing_can_be_divided_by_leaves_the_reports(
    pool: Pool, operator: httpx.Client
) -> None:
    operator.put("/v1/classes/nightly", json={"points": 1})
    pool.submit(**JobRequest(command=["true"], job_class="nightly", estimated_seconds=5e-324).normal())
    bot = pool.bot()
    pool.assigner().run_once()
    bot.sync(*map(completed, bot.take()))
    for path in ("report", "class-report"):
        assert operator.get(f"/v1/{path}").status_code == 200, path
