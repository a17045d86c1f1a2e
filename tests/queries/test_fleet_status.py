"""The bots of a cohort at a glance: in the database, in status, on the command line, as metrics, and in alerts."""

import queue
import re
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY, generate_latest

from assigner.api import models
from assigner.queries import status as status_queries
from schema.fleet import success
from schema.fleet.success import Swarm
from schema.postgres.notify import Wakeups
from tests.support.explain import cohort
from tests.support.http import call
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, count, granted_lease, work_off_counting
from tests.support.servers import Served

EMPTY = {
    "total": 0, "idle": 0, "busy": 0, "offline": 0, "on_probation": 0, "total_in_flight": 0, "avg_success_rate": None,
    "avg_load": None, "concentration": None, "even_concentration": None, "avg_latency_ms": None,
}  # fmt: skip


def swarms(pool: Pool) -> list[Swarm]:
    return pool.database.run(success.swarms)


def busy(pool: Pool, **in_use: int) -> None:
    """Bots of four units, so many of which a job has."""
    for name, units in in_use.items():
        bot = pool.bot(name, capacity=4)
        if units:
            (job,) = pool.submit(units=units)
            granted_lease(pool, bot, job)


def metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_the_bots_of_each_cohort_are_counted_by_what_they_do(pool: Pool) -> None:
    count(pool)
    cohort(pool, "gpus", "gpu")
    assert swarms(pool) == [Swarm(cohort=name, **EMPTY) for name in ("default", "gpus")], "without averages"  # type: ignore[arg-type]
    busy(pool, one=1, two=3, three=0)
    pool.bot("gone").sync(status="gone")
    (plain, gpus) = swarms(pool)
    assert (plain.total, plain.idle, plain.busy, plain.offline, plain.total_in_flight) == (4, 1, 2, 1, 4)
    assert (plain.avg_load, plain.avg_success_rate) == (pytest.approx(1 / 3), 1.0)
    assert plain.concentration == pytest.approx(10 / 16)
    assert plain.even_concentration == pytest.approx(1 / 3)
    assert gpus == Swarm(cohort="gpus", **EMPTY)  # type: ignore[arg-type]


def test_the_average_success_is_unknown_while_nothing_is_counted(pool: Pool) -> None:
    pool.bot()
    (found,) = swarms(pool)
    assert (found.total, found.avg_success_rate, found.avg_load) == (1, None, 0.0)
    count(pool)
    work_off_counting(pool, pool.bot("other"), "failed", jobs=2)
    assert swarms(pool)[0].avg_success_rate == pytest.approx((1 + 0.5) / 2)


def test_the_average_latency_of_a_cohort_is_that_of_the_attempts_of_its_present_bots(pool: Pool) -> None:
    for name in ("one", "two", "gone"):
        pool.bot(name)
    pool.bot("gone").sync(status="gone")
    pool.change(
        "INSERT INTO bot_success (bot_id, label, successes, failures, finished, seconds) SELECT b.id, v.label,"
        " v.finished, 0, v.finished, v.seconds FROM bots b JOIN (VALUES ('one', 'build', 3, 30), ('one', 'test', 1, 2),"
        " ('two', 'build', 4, 8), ('gone', 'build', 9, 900)) v (name, label, finished, seconds) ON v.name = b.name"
    )
    pool.upkeep().run_once()
    unknown = metric("leasehold_cohort_latency_seconds", cohort="default")
    assert unknown != unknown, "it is not told while nothing is counted"
    count(pool)
    (found,) = swarms(pool)
    assert found.avg_latency_ms == pytest.approx(1000 * 40 / 8)
    pool.upkeep().run_once()
    assert metric("leasehold_cohort_latency_seconds", cohort="default") == pytest.approx(5)


def test_status_tells_of_the_bots_of_each_cohort_to_operators_only(pool: Pool) -> None:
    busy(pool, one=2)
    pool.submit(instance="team-a")

    def status(instances: list[str] | None) -> models.PoolStatus:
        return models.status_answer(pool.database.run(lambda c: status_queries.pool_status(c, instances=instances)))

    (samples,) = status(None).swarm
    assert (samples.cohort, samples.busy, samples.avg_load) == ("default", 1, 0.5)
    assert status(["team-a"]).swarm == []


@pytest.mark.parametrize(
    ("in_use", "expected"), [({"a": 4, "b": 4, "c": 4}, 1.0), ({"a": 4, "b": 0, "c": 0}, 3.0), ({"a": 0}, None)]
)
def test_concentration_is_one_if_every_bot_is_loaded_alike(
    pool: Pool, in_use: dict[str, int], expected: float | None
) -> None:
    busy(pool, **in_use)
    pool.upkeep().run_once()
    found = metric("leasehold_cohort_concentration", cohort="default")
    assert found == pytest.approx(expected) if expected else found != found


def test_load_is_told_for_each_cohort_and_never_for_a_bot(pool: Pool) -> None:
    busy(pool, one=1, two=3)
    pool.upkeep().run_once()
    assert metric("leasehold_cohort_load", cohort="default") == 0.5
    assert metric("leasehold_cohort_bots", cohort="default", state="busy") == 2
    text = generate_latest(REGISTRY).decode()
    labels = {
        label for line in text.splitlines() if "leasehold_cohort" in line for label in re.findall(r'(\w+)="', line)
    }
    assert labels == {"cohort", "state"}


def test_a_cohort_that_is_no_more_is_told_of_no_more(pool: Pool) -> None:
    cohort(pool, "gpus", "gpu")
    pool.upkeep().run_once()
    assert metric("leasehold_cohort_units_in_flight", cohort="gpus") == 0
    pool.change("DELETE FROM cohorts WHERE name = 'gpus'")
    pool.upkeep().run_once()
    assert metric("leasehold_cohort_units_in_flight", cohort="gpus") is None


def test_placements_are_counted_by_strategy_and_their_scores_kept(pool: Pool) -> None:
    def samples() -> tuple[float, float, float]:
        assigned = metric("leasehold_jobs_assigned_total", strategy="success") or 0.0
        scores = [metric(f"leasehold_assignment_score_{part}") or 0.0 for part in ("count", "sum")]
        return (assigned, *scores)

    count(pool)
    before = samples()
    pool.bot(capacity=2)
    pool.submit(3)
    pool.assigner(strategy={"kind": "success"}).run_once()
    assert [after - was for was, after in zip(before, samples(), strict=True)] == pytest.approx([2, 2, 1 + 1 / 1.5])
    pool.bot("other")
    pool.assigner().run_once()
    assert metric("leasehold_assignment_score_count") == before[1] + 2


def test_a_new_job_wakes_the_assigners(pool: Pool, wakeups: Wakeups) -> None:
    news: queue.Queue[frozenset[str]] = queue.Queue()
    wakeups.subscribe("jobs", news.put)
    eventually(lambda: wakeups.connected)
    with wakeups.idle("jobs"):
        pool.submit()
        assert news.get(timeout=MINUTE) == frozenset()


def test_a_bot_is_shown_with_the_success_of_its_work(
    pool: Pool,
    served: Served,
    operator: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count(pool)
    bot = pool.bot()
    work_off_counting(pool, bot, jobs=2, label="build")
    work_off_counting(pool, bot, "failed", label="test")
    pool.change("UPDATE bots SET probation_until = now() + interval '1 minute'")
    found: dict[str, Any] = operator.get("/v1/bots/bot-1").json()
    assert (found["success_rate"], found["probation"] > 50, found["avg_latency_ms"] >= 0) == (0.8, True, True)
    assert [(each["label"], each["successes"], each["failures"]) for each in found["success"]] == [
        ("test", 0.0, 1.0), ("build", 2.0, 0.0),
    ]  # fmt: skip
    (listed,) = operator.get("/v1/bots").json()["bots"]
    assert (listed["success_rate"], "success" in listed) == (0.8, False)
    monkeypatch.setenv("LEASEHOLD_URL", served.url)
    monkeypatch.setenv("LEASEHOLD_TOKEN", served.token("operator"))
    call("bots", "show", "bot-1")
    call("bots", "list")
    call("status")
    told = capsys.readouterr().out
    assert all(word in told for word in ("probation", "given back", "build", "0.80", "concentration"))
