"""Pool samples: who writes a minute, what it says, how minutes are merged, and who may read them."""

from typing import Any

import httpx
import pytest

from assigner.maintenance.upkeep import sample_minute
from schema.accounting import pool_samples
from schema.accounting.pool_samples import DAY, MERGES
from schema.postgres.statements import Statement
from tests.support.pool import Pool, completed
from tests.support.servers import Served

ENDED_IN_IT = "UPDATE jobs SET finished_at = date_trunc('minute', now()) - interval '9 s' WHERE finished_at < now()"
FIELDS = "scope, name, waiting, running, succeeded, failed, cancelled, dead, incomplete"
SAMPLES = f"SELECT {FIELDS}, oldest_wait, at, span FROM pool_samples ORDER BY at, scope DESC, name"
MINUTES = """
INSERT INTO pool_samples (at, scope, name, span, waiting, succeeded, oldest_wait)
SELECT to_timestamp(floor(extract(epoch FROM now()) / 3600) * 3600) + make_interval(secs => 60 * n - :age),
    s.scope, s.name, 60, n, 1, n
FROM generate_series(0, :minutes - 1) n, (VALUES ('pool', ''), ('instance', 'ours')) s (scope, name)
WHERE s.scope = 'pool' OR n % 2 = 0
"""


def rows(pool: Pool) -> list[tuple[Any, ...]]:
    return [tuple(row)[:9] for row in pool.rows(SAMPLES)]


def test_a_minute_says_what_waits_runs_and_ended_in_the_pool_its_cohorts_and_its_instances(pool: Pool) -> None:
    _, bot, work = pool.running(instance="ours")
    bot.sync(completed(work))
    pool.submit(2, instance="ours")
    pool.given(bot)
    pool.submit(3, instance="theirs")
    pool.change("UPDATE jobs SET queued_at = now() - interval '90 s' WHERE state = 'queued'")

    assert pool.database.run(lambda c: c.execute(Statement(ENDED_IN_IT)) and sample_minute(c))

    assert rows(pool) == [
        ("pool", "", 4, 1, 1, 0, 0, 0, False),
        ("instance", "ours", 1, 1, 1, 0, 0, 0, False),
        ("instance", "theirs", 3, 0, 0, 0, 0, 0, False),
        ("cohort", "default", 4, 1, 1, 0, 0, 0, False),
    ]
    assert all(row.oldest_wait >= 90 and row.span == 60 for row in pool.rows(SAMPLES))


def test_an_empty_pool_has_samples_too_and_every_minute_one_writer(pool: Pool) -> None:
    for upkeep in (pool.upkeep(), pool.upkeep()):
        upkeep.run_once()
    # A minute may have ended between the two.
    found = pool.rows(SAMPLES)
    assert len({row.at for row in found}) == len(found) in (1, 2)
    assert rows(pool)[0] == ("pool", "", 0, 0, 0, 0, 0, 0, False)


def test_a_process_that_comes_second_waits_for_the_first_and_writes_nothing(pool: Pool) -> None:
    with pool.database.connect() as first:
        at = pool_samples.claim(first)
        assert at is not None
        with pool.database.connect() as second:
            second.execute(Statement("SET LOCAL lock_timeout = '200ms'"))
            with pytest.raises(Exception, match="lock timeout"):
                pool_samples.claim(second)
        first.rollback()
    # The first died; the minute is free, and the next process writes it.
    assert pool.database.run(sample_minute)


def test_old_minutes_become_means_of_ten_and_then_of_an_hour(pool: Pool) -> None:
    pool.change(MINUTES, age=15 * DAY, minutes=60)
    for fine, coarse, age in MERGES:
        while pool.database.run(lambda c, f=fine, t=coarse, a=age: pool_samples.merge(c, fine=f, coarse=t, age=a)):
            pass
        if coarse == 600:
            assert [(row.waiting, row.succeeded, row.oldest_wait, row.span) for row in pool.rows(SAMPLES)[:2]] == [
                (5, 10, 9.0, 600),  # the mean of 0 to 9
                (2, 5, 8.0, 600),  # of an instance that had jobs in every second minute
            ]
    assert [(*row[:5], row[8]) for row in rows(pool)] == [
        ("pool", "", 30, 0, 60, False),
        ("instance", "ours", 15, 0, 30, False),
    ]
    assert {row.span for row in pool.rows(SAMPLES)} == {3600}


def test_minutes_of_the_last_day_stay_and_a_year_is_the_end(pool: Pool) -> None:
    pool.change(MINUTES, age=DAY - 3600, minutes=3)
    pool.change(MINUTES, age=366 * DAY, minutes=1)
    pool.change("UPDATE pool_samples SET span = 3600 WHERE at < now() - interval '300 days'")
    pool.upkeep().run_once()
    kept = [row for row in pool.rows(SAMPLES) if row.waiting or row.succeeded]
    assert [(row.scope, row.waiting, row.span) for row in kept] == [
        ("pool", 0, 60),
        ("instance", 0, 60),
        ("pool", 1, 60),
        ("pool", 2, 60),
        ("instance", 2, 60),
    ]


def test_a_gap_in_the_minutes_is_told_and_merged_samples_have_the_mean_of_their_fairness(pool: Pool) -> None:
    pool.change(MINUTES, age=2 * DAY, minutes=7)
    pool.change("UPDATE pool_samples SET fairness = 0.5 WHERE scope = 'pool' AND waiting % 2 = 0")
    pool.change("UPDATE pool_samples SET fairness = 1 WHERE scope = 'pool' AND waiting = 1")
    pool.upkeep().run_once()
    merged, of_instance = pool.rows("SELECT * FROM pool_samples WHERE span = 600 ORDER BY scope DESC")
    assert (merged.waiting, merged.succeeded, merged.incomplete) == (3, 7, True)
    assert (merged.fairness, of_instance.fairness) == (pytest.approx(3 / 5), None)


def test_operators_read_all_samples_and_submitters_those_of_their_instance(
    served: Served, pool: Pool, operator: httpx.Client
) -> None:
    pool.submit(2, instance="ours")
    pool.submit(3, instance="theirs")
    pool.database.run(sample_minute)

    def waiting(http: httpx.Client, query: str) -> Any:
        answer = http.get(f"/v1/samples{query}")
        if answer.status_code != 200:
            return answer.status_code, answer.json()["detail"]
        return answer.json()["scope"], [each["waiting"] for each in answer.json()["samples"]]

    assert waiting(operator, "") == ("pool", [5])
    assert waiting(operator, "?scope=cohort:default&hours=8760") == ("cohort:default", [5])
    assert waiting(operator, "?scope=instance:theirs") == ("instance:theirs", [3])
    assert waiting(operator, "?scope=instance:nobody") == (404, "scope: there is no instance 'nobody'")
    for wrong in ("x", "pool:x", "instance", "instance:", "cohort", ""):
        assert waiting(operator, f"?scope={wrong}") == (400, "scope: is not pool, cohort:NAME or instance:NAME")
    with served.client(served.token("submitter", instance="ours")) as ours:
        assert waiting(ours, "") == waiting(ours, "?scope=instance:ours") == ("instance:ours", [2])
        assert waiting(ours, "?scope=instance:theirs") == (404, "scope: there is no instance 'theirs'")
        assert waiting(ours, "?scope=pool")[0] == waiting(ours, "?scope=cohort:default")[0] == 403


@pytest.mark.parametrize(("held", "index"), [({"ours": 3, "theirs": 1}, 1.0), ({"ours": 6}, 0.5), ({}, None)])
def test_a_minute_says_how_equally_the_instances_that_wait_are_served_by_their_weights(
    pool: Pool, operator: httpx.Client, held: dict[str, int], index: float | None
) -> None:
    """With weights of 3 and 1, three units and one are equal shares; who waits for nothing has what it asked for."""
    for instance, weight in (("ours", 3), ("theirs", 1), ("idle", 1)):
        pool.change("SELECT intern_instance(:name)", name=instance)
        weigh = "INSERT INTO accounts (instance, credit_weight) SELECT id, :weight FROM instances WHERE name = :name"
        pool.change(weigh, weight=weight, name=instance)
    for instance, jobs in held.items():
        pool.submit(jobs, instance=instance)
        assert len(pool.given(pool.bot(instance, capacity=jobs))) == jobs
    for instance in ("ours", "theirs"):
        pool.submit(instance=instance)
    pool.database.run(sample_minute)
    found = operator.get("/v1/samples/fairness?hours=1").json()["samples"]
    expected = [] if index is None else [(60, pytest.approx(index))]
    assert [(each["span"], each["fairness"]) for each in found] == expected
