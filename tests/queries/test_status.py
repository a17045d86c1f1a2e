"""The pool at a glance: what it counts, its rates and waits, and that neither history nor queue decides its cost."""

import queue
import re
from collections import Counter
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY, generate_latest

from assigner.api import models
from assigner.api.models import PoolStatus
from assigner.queries import status as status_queries
from schema.fleet import success
from schema.fleet.success import Swarm
from schema.moves.waiting.priority import set_priority
from schema.postgres.connection import Connection
from schema.postgres.notify import Wakeups
from schema.tenancy import pausing
from tests.support import filling
from tests.support.explain import cohort
from tests.support.http import JOB, call, submitted
from tests.support.patience import MINUTE, eventually
from tests.support.plans import watching
from tests.support.pool import Pool, completed, count, granted_lease, work_off_counting
from tests.support.race import ask_stop, cancel, park
from tests.support.servers import Served

KINDS = ("free", "full", "absent")
QUEUED, BACKOFF, FINISHED, RUNNING = 2_400, 240, 6_000, 300
#: What is counted at most.
SMALL = {"MAX_COUNTED": 400, "MAX_FINISHED": 500, "RATE_JOBS": (100, 1000), "MAX_ENDED": 500, "MAX_WAITS": 100}


def status(pool: Pool, *, instances: list[str] | None = None) -> PoolStatus:
    """What the gateway answers."""
    return models.status_answer(
        pool.database.run(lambda connection: status_queries.pool_status(connection, instances=instances))
    )


def submitted_earlier(pool: Pool, job: str, *, seconds: float) -> None:
    """Put back the time of the job's submit."""
    pool.change(
        "UPDATE jobs SET created_at = created_at - make_interval(secs => :seconds)"
        " WHERE public_id = CAST(:job AS uuid)",
        seconds=seconds, job=job,
    )  # fmt: skip


def long_ago(pool: Pool, table: str, *columns: str, seconds: float = 3600) -> None:
    """Put back times of every row."""
    changes = ", ".join(f"{column} = {column} - make_interval(secs => :seconds)" for column in columns)
    pool.change(f"UPDATE {table} SET {changes}", seconds=seconds)


def test_jobs_in_every_state_are_counted_where_they_are(pool: Pool) -> None:
    running, bot, work = pool.running()
    stopping, *_ = pool.submit()
    done = pool.bot("bot-2")
    (ours,) = pool.given(done)
    assert ours["job"] == stopping
    cancel(pool, stopping)
    parked, cancelled, *_ = pool.submit(4)
    park(pool, parked)
    cancel(pool, cancelled)
    pool.submit(2, instance="other", properties={"gpu": "x"})
    found = status(pool)
    assert found.jobs == dict(Counter(row.state for row in pool.rows("SELECT state FROM jobs")))
    assert found.jobs == {"running": 1, "cancelling": 1, "parked": 1, "cancelled": 1, "queued": 4}
    assert found.instances["other"] == {"queued": 2}
    assert (found.unmatchable, found.at_least) == (2, [])
    assert pool.job(running).state == "running"
    bot.sync(completed(work, "failed"))
    assert status(pool).jobs["failed"] == 1


def test_a_lease_that_is_taken_back_is_counted_as_its_job_says(pool: Pool) -> None:
    pool.running()
    pool.change("UPDATE leases SET due_at = now() - interval '1 s'")
    assert ask_stop(pool, from_state="active", reason="timeout") == 1
    assert status(pool).jobs == {"running": 1}


def test_rates_tell_how_jobs_ended_and_waits_how_long_they_waited_for_a_bot(pool: Pool) -> None:
    jobs = pool.submit(4)
    for job, seconds in zip(jobs, (1.0, 2.0, 3.0, 100.0), strict=True):
        submitted_earlier(pool, job, seconds=seconds)
    bot = pool.bot(capacity=4)
    pool.assigner().run_once()
    work = {each["job"]: each for each in bot.take()}
    bot.sync(*[completed(work[job], "failed" if job == jobs[0] else "succeeded") for job in jobs])
    found = status(pool)
    rates = found.rates
    assert (rates.granted, rates.started, rates.finished) == (0.067, 0.067, 0.067)
    assert (rates.succeeded, rates.failed, rates.dead, rates.cancelled) == (0.05, 0.017, 0, 0)
    assert (rates.submitted, rates.span) == (0.05, 60.0)  # one was submitted more than a minute ago
    waits = found.waits
    assert waits.jobs == 4
    assert (waits.p50, waits.p95, waits.p99) == pytest.approx((2, 100, 100), abs=0.9)


def test_a_wait_begins_when_the_job_last_came_into_the_queue(pool: Pool) -> None:
    job, bot, work = pool.running()
    submitted_earlier(pool, job, seconds=1000)
    long_ago(pool, "leases", "granted_at", "acknowledged_at", seconds=900)
    bot.sync(completed(work, "released"))
    long_ago(pool, "leases", "ended_at", seconds=5)
    pool.database.run(lambda c: set_priority(c, [job], 7, instances=None, reason=None, actor="test"))
    pool.assigner().run_once()
    found = status(pool)
    assert found.waits.jobs == 1
    assert found.waits.p50 == pytest.approx(5, abs=2)
    assert (found.rates.granted, found.rates.started) == (0.017, 0)


def test_a_grant_that_came_to_nothing_counts_once_its_job_is_leased_again_or_ends(pool: Pool) -> None:
    job, bot, work = pool.running()
    bot.sync(completed(work, "released"))
    assert status(pool).rates.granted == 0
    pool.assigner().run_once()
    assert (status(pool).rates.granted, status(pool).waits.jobs) == (0.033, 2)
    (again,) = bot.take()
    bot.sync(completed(again))
    found = status(pool)
    assert (found.rates.granted, found.rates.finished, found.waits.jobs) == (0.033, 0.017, 2)
    assert pool.job(job).attempts == 1


def test_a_lease_from_before_the_minute_is_no_grant_of_it_when_its_job_ends(pool: Pool) -> None:
    _, bot, work = pool.running()
    long_ago(pool, "leases", "granted_at", "acknowledged_at")
    assert status(pool).rates.granted == status(pool).rates.started == 0
    bot.sync(completed(work))
    found = status(pool)
    assert (found.rates.granted, found.rates.started, found.rates.finished, found.waits.jobs) == (0, 0, 0.017, 0)


def test_a_quiet_pool_has_rates_of_zero_and_no_waits(pool: Pool) -> None:
    found = status(pool)
    assert found.rates.finished == found.rates.submitted == 0
    assert (found.waits.jobs, found.waits.p50) == (0, None)
    assert (found.jobs, found.oldest_queued_seconds, found.paused) == ({}, None, [])
    for reason in ("disk full", ""):  # a pause that is repeated without a reason keeps it
        pool.database.run(lambda c, why=reason: pausing.pause(c, "label", "a", instance="", reason=why, actor="op"))
    assert [(each.kind, each.name, each.reason) for each in status(pool).paused] == [("label", "a", "disk full")]
    assert status(pool, instances=["a"]).paused == []
    backlog = pool.database.run(status_queries.count_backlog)
    assert (set(backlog.jobs.values()), backlog.oldest, backlog.unmatchable) == ({0}, 0, 0)


def test_a_submitter_sees_the_rates_waits_and_counts_of_its_own_instance(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    pool.running()
    submitted(mine, JOB)
    theirs, all_of_it = mine.get("/v1/status").json(), operator.get("/v1/status").json()
    assert (theirs["rates"]["submitted"], all_of_it["rates"]["submitted"]) == (0.017, 0.033)
    assert (theirs["waits"]["jobs"], all_of_it["waits"]["jobs"]) == (0, 1)
    assert (theirs["jobs"], all_of_it["jobs"]) == ({"queued": 1}, {"queued": 1, "running": 1})
    assert theirs["finished_estimate"] is None


def filled(pool: Pool) -> None:
    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=4, kinds=KINDS)
        filling.fill_jobs(connection, FINISHED, instances=4, kinds=KINDS, state="succeeded")
        filling.fill_jobs(connection, QUEUED, instances=4, kinds=KINDS)
        filling.fill_jobs(connection, BACKOFF, instances=4, kinds=KINDS, units=2, backoff=60.0)
        filling.fill_bots(connection, {"full": RUNNING})
        filling.occupy(connection, "full", leaving=0)

    for table in ("jobs", "leases", "bots", "stored_events"):
        pool.change(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    pool.database.run(fill)
    # Of the queues, only the first one's oldest job has waited for long.
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 hour' WHERE id = (SELECT min(id) FROM jobs"
                " WHERE state = 'queued' AND schedule_after IS NULL)")  # fmt: skip


def test_what_is_counted_is_bounded_and_the_answer_says_where_it_stopped(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pool)
    exact = {part: status(pool, instances=["i-0", "i-1"] if part == 2 else None) for part in (1, 2)}
    for part, found in exact.items():
        assert found.at_least == []
        assert (found.jobs["queued"], found.jobs["succeeded"]) == ((QUEUED + BACKOFF) // part, FINISHED // part)
    with monkeypatch.context() as patched:
        patched.setattr(status_queries, "MAX_COUNTED", RUNNING // 2)
        found = status(pool)
        assert {"running", "rates.granted", "rates.started"} <= set(found.at_least), "not all leases are looked at"
        assert found.rates.granted > 0
    for name, value in SMALL.items():
        monkeypatch.setattr(status_queries, name, value)
    for analysed in (False, True):
        if analysed:
            pool.change("ANALYZE")
        for part, instances in ((1, None), (2, ["i-0", "i-1"])):
            with pool.database.connect() as connection:
                with watching(connection) as watch:
                    bounded = models.status_answer(status_queries.pool_status(connection, instances=instances))
                connection.rollback()
            assert not watch.whole_scans() & {"jobs", "leases", "stored_events"}, str(watch)
            # A few rows are for each queue and bot.
            most = 3 * 400 + 500 + (100 + 2 * 1000 + 2 * 500) + 2 * 100 + 10 * RUNNING + 900
            assert watch.touched <= most, str(watch)
            assert {"queued", "unmatchable", "succeeded", "dead"} <= set(bounded.at_least)
            assert "running" not in bounded.at_least
            assert 400 <= bounded.jobs["queued"] < exact[part].jobs["queued"]
            assert min(counts["queued"] for counts in bounded.instances.values()) >= 100
            assert bounded.oldest_queued_seconds is not None
            assert 3600 <= bounded.oldest_queued_seconds < 3700
            assert bounded.rates.span < 60
    found = status(pool)
    assert found.jobs["succeeded"] == 500
    assert found.finished_estimate == pytest.approx(FINISHED, rel=0.05), "once there is one"


def test_what_is_older_than_a_minute_is_hardly_read(pool: Pool) -> None:
    filled(pool)
    long_ago(pool, "jobs", "created_at", "finished_at")
    long_ago(pool, "leases", "granted_at", "acknowledged_at")
    with pool.database.connect() as connection:
        with watching(connection) as watch:
            found = models.status_answer(status_queries.pool_status(connection, instances=None))
        connection.rollback()
    rates = found.rates
    assert (rates.submitted, rates.granted, rates.finished, rates.span) == (0, 0, 0, 60)
    nodes = [node for plan in watch.plans if "created_at" in plan.query for node in plan.nodes]
    assert sum(node.touched for node in nodes if node.relation) <= 2 * status_queries.RATE_JOBS[0] + RUNNING, str(watch)


# What operators watch: the backlog as metrics, and the alerts that are shipped.


def metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"leasehold_{name}", labels)


def test_upkeep_tells_how_much_waits_for_how_long_and_what_nobody_can_run(pool: Pool) -> None:
    bot = pool.bot(capacity=1)
    pool.submit(3)
    pool.submit(2, properties={"gpu": ["h100"]})
    pool.submit(1, terms={"locks": ["door"]})
    (parked,) = pool.submit()
    park(pool, parked, reason="")
    pool.assigner().run_once()
    assert len(bot.take()) == 1
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '2 h' WHERE state = 'queued'")
    pool.upkeep().run_once()
    told = {state: metric("jobs", state=state) for state in ("queued", "running", "parked", "leased", "deferred")}
    assert told == {"queued": 5, "running": 1, "parked": 1, "leased": 0, "deferred": 0}
    assert metric("jobs_unmatchable") == 2
    assert metric("oldest_wait_seconds") == pytest.approx(7200, abs=60)


# The bots of a cohort at a glance: in the database, in status, on the command line, as metrics, and in alerts.


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
    unknown = metric("cohort_latency_seconds", cohort="default")
    assert unknown != unknown, "it is not told while nothing is counted"
    count(pool)
    (found,) = swarms(pool)
    assert found.avg_latency_ms == pytest.approx(1000 * 40 / 8)
    pool.upkeep().run_once()
    assert metric("cohort_latency_seconds", cohort="default") == pytest.approx(5)


@pytest.mark.parametrize(
    ("in_use", "expected"), [({"a": 4, "b": 4, "c": 4}, 1.0), ({"a": 4, "b": 0, "c": 0}, 3.0), ({"a": 0}, None)]
)
def test_concentration_is_one_if_every_bot_is_loaded_alike(
    pool: Pool, in_use: dict[str, int], expected: float | None
) -> None:
    busy(pool, **in_use)
    pool.upkeep().run_once()
    found = metric("cohort_concentration", cohort="default")
    assert found == pytest.approx(expected) if expected else found != found


def test_load_is_told_for_each_cohort_and_never_for_a_bot_and_in_status_to_operators_only(pool: Pool) -> None:
    cohort(pool, "gpus", "gpu")
    busy(pool, one=1, two=3)
    pool.upkeep().run_once()
    assert metric("cohort_load", cohort="default") == 0.5
    assert metric("cohort_bots", cohort="default", state="busy") == 2
    text = generate_latest(REGISTRY).decode()
    labels = {
        label for line in text.splitlines() if "leasehold_cohort" in line for label in re.findall(r'(\w+)="', line)
    }
    assert labels == {"cohort", "state"}
    for instances, seen in ((None, [("default", 2, 0.5), ("gpus", 0, None)]), (["team-a"], [])):
        found = pool.database.run(partial(status_queries.pool_status, instances=instances))
        told = models.status_answer(found).swarm
        assert [(each.cohort, each.busy, each.avg_load) for each in told] == seen
    assert metric("cohort_units_in_flight", cohort="gpus") == 0
    pool.change("DELETE FROM cohorts WHERE name = 'gpus'")
    pool.upkeep().run_once()
    assert metric("cohort_units_in_flight", cohort="gpus") is None, "it is no more"


def test_placements_are_counted_by_strategy_and_their_scores_kept(pool: Pool) -> None:
    def samples() -> tuple[float, float, float]:
        assigned = metric("jobs_assigned_total", strategy="success") or 0.0
        scores = [metric(f"assignment_score_{part}") or 0.0 for part in ("count", "sum")]
        return (assigned, *scores)

    count(pool)
    before = samples()
    pool.bot(capacity=2)
    pool.submit(3)
    pool.assigner(strategy={"kind": "success"}).run_once()
    assert [after - was for was, after in zip(before, samples(), strict=True)] == pytest.approx([2, 2, 1 + 1 / 1.5])
    pool.bot("other")
    pool.assigner().run_once()
    assert metric("assignment_score_count") == before[1] + 2


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
