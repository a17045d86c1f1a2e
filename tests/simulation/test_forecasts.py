"""On a virtual clock a pool at nine tenths of its load keeps what it promises, and errs less than simple guesses."""

import random
from functools import partial
from statistics import median
from typing import Any

import pytest

from assigner.settings import PoolSettings
from assigner.simulation.loop import living
from bots.protocol import OpenSession, Work
from bots.simulation.bots import Run, simulated_bots
from bots.sync.fetch import FetchSettings
from schema.moves.submit import submit
from schema.postgres.statements import Statement
from schema.requests import JobRequest

SETTINGS = PoolSettings.model_validate({"assigners": [{"interval": 1800.0, "jitter": 0.0}]})
#: Seconds since 1970 at the begin, of the whole, and that a job runs on average; units of the pool.
START, SPAN, RUNS, UNITS = 2e9, 1500.0, 60.0, 4
JUDGED = Statement("""
SELECT f.job_id, f.seconds, f.upper, f.waited, extract(epoch FROM f.at)::double precision AS at,
    extract(epoch FROM j.queued_at)::double precision AS queued
FROM forecasts f JOIN jobs j ON j.id = f.job_id WHERE f.upper IS NOT NULL AND f.waited IS NOT NULL
""")
STARTS = Statement("""
SELECT extract(epoch FROM granted_at)::double precision AS at,
    extract(epoch FROM granted_at - queued_at)::double precision AS waited
FROM leases l JOIN jobs j ON j.id = l.job_id ORDER BY granted_at
""")


def runs(work: Work, _chance: random.Random) -> Run:
    return Run(float((work.payload or {})["command"][1]))


@pytest.mark.long
def test_nine_of_ten_jobs_start_within_the_promised_time(empty_url: str) -> None:
    chance = random.Random(1)
    bots_of = partial(simulated_bots, timing=SETTINGS.timing, fetch=FetchSettings(), runs=runs, seed=1,
                      cooldown=SETTINGS.quotas.of_evictions)  # fmt: skip
    with living(empty_url, SETTINGS, bots_of, start=START, seed=1, upkeep_every=20.0) as (pool, bots):

        def arrive(jobs: int) -> None:
            commands = (["run", f"{chance.uniform(0.2, 1.8) * RUNS:.1f}"] for _ in range(jobs))
            requests = [JobRequest(command=command).normal() for command in commands]
            pool.database.run(lambda c: submit(c, requests, actor="test"))

        bots.open(*[OpenSession(bot=f"b{nth}", capacity=2) for nth in range(UNITS // 2)])
        at = START
        while (at := at + chance.expovariate(0.9 * UNITS / RUNS / 2)) < START + SPAN:
            pool.at(at, partial(arrive, chance.choice((1, 1, 1, 5))))
        pool.run(START + SPAN)
        judged, starts = (pool.database.run(lambda c, s=s: c.execute(s).all()) for s in (JUDGED, STARTS))  # type: ignore[misc]
    assert len(judged) > 20

    def last_two(row: Any) -> float:
        before = [each.waited for each in starts if each.at <= row.at][-2:]
        return max(0.0, sum(before) / 2 - (row.at - row.queued))

    kept = sum(row.waited <= row.upper for row in judged) / len(judged)
    ours, simple = (median(abs(guess(row) - row.waited) for row in judged) for guess in (lambda r: r.seconds, last_two))
    assert 0.8 < kept < 0.99
    assert ours < simple / 2
