"""Waiting jobs: they are promoted when they starve, hastened when they are due, and told when they will be late."""

import random

import pytest

from assigner import admission, waiting
from assigner.lines import ByRank
from assigner.ordering import OrderingSettings
from schema import classes, moves
from schema.gated import Ageing
from schema.requests import JobRequest
from tests.heads import book, head
from tests.pool import Pool

HOUR = 3600.0


def submitted(pool: Pool, **fields: object) -> str:
    request = JobRequest(command=["true"], **fields).normal()  # type: ignore[arg-type]
    (job,) = pool.submit(**request)
    return job


def older(pool: Pool, seconds: float) -> None:
    """So much time passes for everything that waits."""
    pool.change("UPDATE jobs SET queued_at = queued_at - make_interval(secs => :s)", s=seconds)
    pool.change(
        "UPDATE job_constraints SET watch_at = watch_at - make_interval(secs => :s),"
        " promoted_at = promoted_at - make_interval(secs => :s), deadline = deadline - make_interval(secs => :s)",
        s=seconds,
    )


def test_sa_19_a_job_that_starves_moves_up_one_level_at_a_time_and_keeps_its_class(pool: Pool) -> None:
    job = submitted(pool, job_class="background")
    levels = []
    for _ in range(5):
        pool.upkeep().run_once()
        levels.append(pool.row("SELECT level_of(rank) AS level FROM jobs").level)
        older(pool, HOUR)
    assert levels == ["low", "normal", "high", "critical", "critical"]
    assert (pool.job(job).priority, pool.job(job).rank) == (90, -1000)
    assert pool.row("SELECT terms FROM constraint_sets").terms == {"job_class": "background"}
    assert pool.history(job) == ["submit", "promote", "promote", "promote"]
    told = pool.rows("SELECT details FROM job_events WHERE move = 'promote' ORDER BY id")
    assert [(row.details["from"], row.details["to"]) for row in told] == [
        ("low", "normal"),
        ("normal", "high"),
        ("high", "critical"),
    ]


def test_a_11_one_sweep_that_comes_late_carries_no_job_up_two_levels(pool: Pool) -> None:
    job = submitted(pool, job_class="background")
    older(pool, 10 * HOUR)
    for _ in range(3):
        pool.upkeep().run_once()
    assert pool.history(job) == ["submit", "promote"]


def test_sa_19_the_threshold_is_a_setting_and_off_is_off(pool: Pool) -> None:
    pool.database.run(lambda c: classes.put_policy(c, classes.Policy(starvation_seconds=None), actor="test"))
    job = submitted(pool, job_class="background")
    older(pool, 1000 * HOUR)
    pool.upkeep().run_once()
    assert pool.history(job) == ["submit"]
    assert pool.row("SELECT watch_at FROM job_constraints").watch_at is None


def test_sa_19_what_starved_starts_before_what_is_as_urgent_by_its_class(pool: Pool) -> None:
    job = submitted(pool, job_class="background")
    for _ in range(3):
        older(pool, HOUR)
        pool.upkeep().run_once()
    for _ in range(5):
        submitted(pool, job_class="critical", project="site", user_priority=10)
    bot = pool.bot(capacity=1)
    pool.assigner().run_once()
    assert [lease["job"] for lease in bot.take()] == [job]


def starved(seed: int, *, ageing: Ageing | None, threshold: float = HOUR) -> float:
    """Seconds until the one background job starts, although 120 % of what can run is most urgent."""
    chance, line, policy = random.Random(seed), ByRank(ageing), classes.Policy()
    step, room = 60.0, 5
    victim = head(0, 90.0)
    queued, rank, promoted, nth = [], victim.rank, 0.0, 0
    for tick in range(10_000):
        now = tick * step
        for _ in range(chance.choice([5, 6, 7])):
            nth += 1
            queued.append(head(nth, chance.choice([0.0, -10.0, -60.0]), since=now))
        if rank > policy.critical and now - promoted >= threshold:
            rank = policy.high + 0.5 if rank > policy.normal else policy.critical + 0.5 if rank > policy.high else -1000
            promoted = now
        waits = head(0, rank)
        given = admission.admit([*queued, waits], book(now), room=room, ordering=admission.ByInstance(line)).heads
        if any(each.job.id == 0 for each in given):
            return now
        taken = {each.job.id for each in given}
        queued = [each for each in queued if each.job.id not in taken]
    raise AssertionError(f"seed {seed}: it never started")


@pytest.mark.parametrize("ageing", [None, Ageing(2.0, 20.0)])
def test_sa_19_the_least_urgent_job_starts_within_three_thresholds_under_overload(ageing: Ageing | None) -> None:
    waits = [starved(seed, ageing=ageing, threshold=600.0) for seed in range(200)]
    assert max(waits) <= 3 * 600.0 + 60.0


def test_sa_29_the_earliest_deadline_comes_first_and_keeps_nobody_else_waiting() -> None:
    heads = [head(1, 5), head(2, 5, since=1, deadline=900), head(3, 5, since=2), head(4, 5, since=3, deadline=100)]
    ordering = OrderingSettings().made().ordering
    assert [each.job.id for each in ordering.sequence(heads, book())] == [1, 4, 3, 2]
    other = [*heads, head(5, 4, since=9, deadline=5000)]
    assert [each.job.id for each in ordering.sequence(other, book())] == [5, 1, 4, 3, 2]


def test_a_38_a_job_with_little_slack_comes_before_everything_and_the_least_slack_first(pool: Pool) -> None:
    urgent = submitted(pool, job_class="critical")
    relaxed = submitted(pool, priority=500, deadline_seconds=10 * HOUR, estimated_seconds=HOUR)
    tight = submitted(pool, priority=500, deadline_seconds=HOUR + 800, estimated_seconds=HOUR)
    tighter = submitted(pool, priority=900, deadline_seconds=HOUR + 60, estimated_seconds=HOUR)
    pool.upkeep().run_once()
    assert [pool.history(job) for job in (relaxed, tight)] == [["submit"], ["submit", "hasten"]]
    ranks = [pool.job(job).rank for job in (tighter, tight, urgent, relaxed)]
    assert ranks == sorted(ranks)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    assert {lease["job"] for lease in bot.take()} == {tighter, tight}


def test_sa_29_a_deadline_that_cannot_be_kept_is_told_once(pool: Pool) -> None:
    job = submitted(pool, deadline_seconds=HOUR, estimated_seconds=2000.0)
    pool.upkeep().run_once()
    assert pool.history(job) == ["submit"]
    for _ in range(3):
        older(pool, 1700.0)
        pool.upkeep().run_once()
    assert pool.history(job) == ["submit", "hasten", "at_risk"]


def test_sa_29_a_job_that_is_over_is_looked_at_no_more(pool: Pool) -> None:
    job = submitted(pool, deadline_seconds=HOUR)
    pool.change("UPDATE job_constraints SET watch_at = now()")

    pool.database.run(lambda c: moves.cancel(c, [job], instances=None, sync=1.0, actor="test"))
    assert not waiting.watch(pool.database, actor="test")
    assert pool.row("SELECT watch_at FROM job_constraints").watch_at is None
