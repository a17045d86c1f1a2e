"""Ageing: what waits becomes more urgent, to the point, whoever reads the queue and however long it is."""

import random
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from assigner.books import Rules
from assigner.lines import ByRank, effective
from assigner.ordering import OrderingSettings
from schema import classes, gated
from schema.gated import Ageing
from schema.ready import Scope
from schema.requests import JobRequest
from tests.heads import book, head
from tests.pool import Pool

HOUR = 3600.0
SLEEPLESS = Ageing(2.0, 20.0)


def test_sa_03_the_golden_job_has_ninety_points(pool: Pool) -> None:
    request = JobRequest(command=["true"], job_class="serious", project="site", user_priority=2).normal()
    (job,) = pool.submit(**{name: request[name] for name in ("terms", "own")})
    stored = pool.job(job)
    old = head(1, stored.rank, since=-5 * HOUR)
    assert effective(old, book(), SLEEPLESS) == 10
    assert pool.database.run(classes.policy).level(10) == "high"


def test_sa_04_age_gives_two_points_an_hour_and_twenty_at_most() -> None:
    assert [SLEEPLESS.gain(hours * HOUR) for hours in (0, 0.5, 5, 10, 11, 1000)] == [0, 1, 10, 20, 20, 20]


@pytest.mark.parametrize("seed", range(100))
def test_a_10_the_order_is_that_of_the_formula_at_every_moment(seed: int) -> None:
    chance = random.Random(seed)
    heads = [head(n, chance.randint(-20, 90), since=-chance.uniform(0, 20) * HOUR) for n in range(40)]
    for clock in (0.0, HOUR, 9 * HOUR, 30 * HOUR):
        now = book(clock)
        found = ByRank(SLEEPLESS).arranged(heads, now)
        ages = {each.job.id: (now.now - each.queued_at).total_seconds() / HOUR for each in heads}
        formula = [100 - each.rank + min(2 * ages[each.job.id], 20) for each in found]
        assert formula == sorted(formula, reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_10_what_is_read_of_a_long_queue_is_the_first_by_the_formula(pool: Pool, seed: int) -> None:
    chance, count = random.Random(seed), 300
    priorities = [chance.choice([0, 20, 35, 40, 60, 90]) for _ in range(count)]
    for priority in set(priorities):
        pool.submit(priorities.count(priority), terms={}, priority=priority)
    for row in pool.rows("SELECT id FROM jobs ORDER BY id"):
        pool.change(
            "UPDATE jobs SET queued_at = now() - make_interval(secs => :age) WHERE id = :id",
            id=row.id,
            age=chance.uniform(0, 30) * HOUR,
        )
    pool.bot(capacity=1000)
    jobs = pool.rows("SELECT id, priority, queued_at FROM jobs")

    def read(connection: Connection, hours: float) -> tuple[list[int], list[int]]:
        found = gated.queues(connection, Scope(None), batch=20, start=0.5, after=gated.BEGINNING)
        assert found.now is not None
        now = found.now + timedelta(hours=hours)
        taken = gated.heads(connection, found.queues, limits=[20] * len(found.queues), now=now, ageing=SLEEPLESS)

        def worth(job: Any) -> tuple[float, float]:
            age = (now - job.queued_at).total_seconds()
            return job.priority - SLEEPLESS.gain(age), -age

        return sorted(each.job.id for each in taken), sorted(job.id for job in sorted(jobs, key=worth)[:20])

    for hours in (0.0, 5.0, 40.0):
        found, expected = pool.database.run(partial(read, hours=hours))
        assert found == expected


def test_a_10_another_rate_takes_effect_with_the_next_cycle_and_writes_nothing(pool: Pool) -> None:
    (old,) = pool.submit(terms={}, priority=50)
    (new,) = pool.submit(terms={}, priority=40)
    pool.change("UPDATE jobs SET queued_at = now() - interval '6 hours' WHERE public_id = CAST(:id AS uuid)", id=old)
    bot = pool.bot(capacity=1)
    assigner = pool.assigner()
    settings = assigner._settings, assigner._quotas
    assigner.reconfigure(*settings, Rules(OrderingSettings(ageing_rate=2.0)))
    assigner.run_once()
    assert [lease["job"] for lease in bot.take()] == [old], "12 points for its age outdo 10 of its class"
    assert pool.job(old).rank == 50
    assigner.reconfigure(*settings)
    pool.bot("bot-2", capacity=1)
    assigner.run_once()
    assert pool.job(new).state == "leased"


def test_a_10_two_assigners_that_read_at_once_take_different_jobs(pool: Pool) -> None:
    pool.submit(30, terms={}, priority=5)
    pool.bot(capacity=100)

    def both(connection: Connection) -> None:
        found = gated.queues(connection, Scope(None), batch=5, start=0.5, after=gated.BEGINNING)
        assert found.now is not None
        mine = gated.heads(connection, found.queues, limits=[5] * len(found.queues), now=found.now, ageing=SLEEPLESS)
        theirs = pool.database.run(
            lambda other: gated.heads(
                other, found.queues, limits=[5] * len(found.queues), now=found.now, ageing=SLEEPLESS
            )
        )
        assert len(mine) == len(theirs) == 5
        assert not {one.job.id for one in mine} & {one.job.id for one in theirs}

    pool.database.run(both)


def test_a_10_a_long_queue_is_read_no_further_than_the_first_of_each_rank(pool: Pool) -> None:
    for priority in (10, 20, 30):
        pool.submit(2000, terms={}, priority=priority)
    queue = pool.row("SELECT DISTINCT cohort, instance, platform, constraint_set, now() AS now FROM jobs")
    values = {
        **{"cohorts": [queue.cohort], "instances": [queue.instance], "platforms": [queue.platform]},
        **{
            "constraint_sets": [queue.constraint_set],
            "limits": [8],
            "skips": [0],
            "rate": 2.0,
            "cap": 20.0,
            "now": queue.now,
            "ranks": 64,
        },
    }
    (plan,) = pool.row(f"EXPLAIN (ANALYZE, FORMAT JSON) {gated.AGED.text}", **values)[0]
    nodes, scans = [plan["Plan"]], []
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if node.get("Relation Name") == "jobs":
            scans.append(node)
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert max(node["Actual Rows"] for node in scans) <= 16
