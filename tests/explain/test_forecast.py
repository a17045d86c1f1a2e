"""When a waiting job will start, as `show`, `explain`, a plan and `leasehold forecast` tell it."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from assigner.admission.rules import RULES
from assigner.explain.answer import explain, why_it_waits
from assigner.explain.forecast import foresee
from assigner.maintenance.forecasts import Forecasts
from schema.accounting import forecasts
from schema.accounting.quotas import EVICTION_COOLDOWN
from schema.postgres.connection import Connection
from tests.support.plans import watching
from tests.support.pool import Pool, completed

#: Thirty forecasts: twenty came true, ten were twice as late. Five of another class are of jobs that are gone.
PAST = """
INSERT INTO forecasts (job_id, at, cohort, instance, class, past, predicted, scale, seconds, upper, waited)
SELECT -n, now() - interval '1 h', 0, (SELECT instance FROM jobs LIMIT 1), CASE WHEN n > 30 THEN 'random' ELSE '' END,
    200, 60, 60, 60, 100, CASE WHEN n <= 20 THEN 60 WHEN n <= 30 THEN 120 END
FROM generate_series(1, 35) n
"""


def test_a_waiting_job_tells_when_it_will_start_or_why_nobody_knows(
    pool: Pool, operator: httpx.Client, good: Callable[[str], str]
) -> None:
    _, bot, work = pool.running()
    bot.sync(completed(work))
    pool.change("UPDATE leases SET granted_at = now() - interval '30 s', ended_at = now()")
    (running,) = pool.submit()
    pool.assigner().run_once()
    waiting, last = pool.submit(), pool.submit(retry_failed=True)

    def told(job: str, of: str = "?forecast=true") -> dict[str, Any]:
        found: dict[str, Any] = operator.get(f"/v1/jobs/{job}{of}").json()["forecast"]
        return found

    assert told(last[0])["reason"] == "no lease like its own has ended lately"
    pool.database.run(forecasts.measure_times)
    (times,) = pool.rows("SELECT per_second, waited FROM lease_times")
    assert (round(times.per_second * 60), 0 <= times.waited < 5) == (1, True), "one job in the first minute"
    assert told(last[0])["sentence"] == "not known, because too few jobs like it have started lately"
    pool.change(PAST)
    assert told(running) is None
    assert told(last[0], "") is None, "nobody asked for it"
    first, second = (told(job) for job in (*waiting, *last))
    # Half of the jobs start sooner than the 30 and 60 s of the mean. Nine of ten were off by no more than their scale:
    # a quarter of the time, its deviation, 30 s of its own and 1 s.
    assert (round(first["seconds"]), round(second["seconds"])) == (20, 48)
    assert round(second["upper_seconds"]) == 134
    (urgent,) = pool.submit(priority=-5)
    assert told(last[0])["seconds"] > 120, "one more is ahead, and they come at one a minute"
    good(f"cancel {urgent}")
    assert round(told(last[0])["seconds"]) == 48, "it has taken nothing"
    assert told(last[0], "/explain") == second
    assert "starts in about 4" in good(f"show {last[0]}")
    assert re.search(
        r"in 20\.\d s, 90% within .*in 48\.\d s, 90% within 2 min", good("list --forecast --order asc"), re.S
    )
    assert "90%" not in good("list")
    assert "forecastnot" not in good(f"explain {last[0]}").replace(" ", "")
    (plan,) = operator.post("/v1/jobs?plan", json={"jobs": [{"command": ["true"], "deadline_seconds": 80}]}).json()[
        "jobs"
    ]
    assert plan["explanation"]["forecast"]["misses_deadline"], "half of such start after 77 s and run for 30 s"
    assert "would miss its deadline" in plan["explanation"]["forecast"]["sentence"]

    # Upkeep stores what it foresees of some, and judges it when they start. An operator's hold is nobody's error.
    ids = pool.database.run(lambda c: forecasts.jobs_without(c, limit=10))
    assert sorted(ids) == [pool.job(job).id for job in (*waiting, *last)]
    pool.database.run(lambda c: forecasts.store(c, [foresee(c, each).stored for each in ids]))
    good(f"hold {last[0]}")
    assert told(last[0])["reason"] == "it is parked (held)"
    bot.sync()
    bot.sync(*[completed(each) for each in bot.take()])
    pool.assigner().run_once()
    pool.database.run(lambda c: forecasts.judge(c, after=-100, limit=100))
    (row,) = pool.rows("SELECT job_id, waited FROM forecasts WHERE job_id > 0")
    assert row.job_id == pool.job(waiting[0]).id
    assert 0 <= row.waited < 30
    of_pool = pool.database.run(forecasts.judged)[0]
    assert (of_pool.jobs, of_pool.kept, of_pool.with_past, of_pool.told) == (30, 20, 30, 30)
    good(f"release {last[0]}")
    text = good("forecast")
    assert "starts in about" in text
    assert "66.7%" in text


def test_a_job_that_ends_before_its_start_has_waited_longer_than_was_promised_or_says_nothing(
    pool: Pool, good: Callable[[str], str]
) -> None:
    jobs = pool.submit(3)
    pool.change("""
        INSERT INTO forecasts (job_id, at, cohort, instance, past, predicted, scale, seconds, upper)
        SELECT id, now() - interval '10 min', cohort, instance, 200, 60, 60, 60, 100 * id FROM jobs""")
    pool.change("UPDATE forecasts SET upper = 700 WHERE job_id = (SELECT min(job_id) FROM forecasts)")
    for job in jobs[:2]:
        good(f"cancel {job}")
    pool.database.run(lambda c: forecasts.judge(c, after=0, limit=100))
    rows = pool.rows("SELECT job_id, round(waited) AS waited FROM forecasts ORDER BY job_id")
    assert [tuple(row) for row in rows] == [(pool.job(jobs[1]).id, 600), (pool.job(jobs[2]).id, None)]
    of_pool = pool.database.run(forecasts.judged)[0]
    assert (of_pool.jobs, of_pool.kept) == (2, 0), "neither started within the promised time"


def test_an_instance_that_ends_no_jobs_has_no_rate_and_keeps_its_times(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bot = pool.bot(capacity=9)

    def run(instance: str) -> dict[str, tuple[int, float]]:
        pool.submit(6, instance=instance)
        pool.assigner().run_once()
        bot.sync(*[completed(work) for work in bot.take()])
        pool.database.run(forecasts.measure_times)
        rows = pool.rows("SELECT name, leases, per_second * 60 FROM lease_times JOIN instances ON id = instance")
        return {name: (leases, round(rate)) for name, leases, rate in rows}

    monkeypatch.setattr(forecasts, "NEWEST", 6)
    assert run("ci") == {"ci": (6, 6)}
    assert run("web") == {"ci": (6, 0), "web": (6, 6)}


def test_a_job_that_starts_later_tells_its_earliest_start_although_no_more_is_known(
    pool: Pool, operator: httpx.Client, good: Callable[[str], str]
) -> None:
    (later,) = pool.submit(delay=5400)
    pool.change("UPDATE queues SET looks = 3, schedule_after = now() + interval '3 h'")
    found = operator.get(f"/v1/jobs/{later}?forecast=true").json()["forecast"]
    assert (found["seconds"], 5300 < found["earliest_seconds"] <= 5400) == (None, True)
    known = r"in 1 h (29|30) min at the earliest"
    assert re.search(f"forecast +{known}; more is not known, because ", good(f"show {later}"))
    assert re.search(f"when +{known}; more", good(f"explain {later}"))
    assert re.search(known, good("list --columns id,starts"))


def test_the_reason_and_the_forecast_of_a_job_are_made_of_one_judgement_as_explain_tells_them(pool: Pool) -> None:
    pool.bot()
    job = pool.submit(2)[-1]
    pool.assigner().run_once()
    by: dict[str, Any] = {"everything": True, "cooldown": EVICTION_COOLDOWN, "rules": RULES}
    with pool.database.connect() as connection:
        with watching(connection) as watch:
            why, told = why_it_waits(connection, pool.job(job).id, with_forecast=True, **by)
        found = explain(connection, job, instances=None)
        connection.rollback()
    assert found is not None
    assert (why, told) == (found.sentence, found.forecast)
    asked = [plan.query for plan in watch.plans]
    assert len(asked) == len(set(asked)), "no statement is executed twice"


def test_a_job_that_cannot_be_foreseen_keeps_no_other_from_it(pool: Pool) -> None:
    bad, good = (pool.job(*pool.submit()).id for _ in range(2))

    def foreseen(connection: Connection, job: int) -> forecasts.Stored:
        if job == bad:
            connection.execute_sql("SELECT 1 / 0")
        return foresee(connection, job).stored

    Forecasts(pool.database, foreseen).run_once()
    assert [row.job_id for row in pool.rows("SELECT job_id FROM forecasts")] == [good]
    pool.submit(3)
    first = {pool.database.run(partial(forecasts.jobs_without, limit=1, nth=nth))[0] for nth in range(20)}
    assert len(first) > 1, "the others have their turns"
