"""A small pool lives a month in virtual time, with limits, graphs, schedules, faults and operators."""

import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from assigner.settings import PoolSettings
from assigner.simulation.loop import living
from assigner.simulation.runs import make_once
from bots.protocol import OpenSession, Work
from bots.simulation.bots import Run, simulated_bots
from bots.sync.fetch import FetchSettings
from ops.life.scenario import Life
from schema import clock
from schema.diagnostics.invariants import verify
from schema.moves.cancel import cancel
from schema.moves.sessions import drain
from schema.moves.submit import submit
from schema.postgres import embedded
from schema.postgres.statements import Row
from schema.requests import JobRequest

#: Within the month the clocks change in Cairo, Berlin, New York and Newfoundland.
START = datetime(2033, 10, 15, tzinfo=UTC)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """The cluster that each life begins with."""
    data = embedded.scratch("leasehold-test-")
    make_once(data, START.timestamp())
    yield data
    shutil.rmtree(data)


def lived(days: int, like: Path, *, seed: int) -> Life:
    """A life of so many days, on a server of its own. On a shared one other databases use up ids of transactions."""
    with embedded.serve_for_now("leasehold-test-", like=like) as server:
        life = Life(server.url, seed, START, jobs_a_day=6.0, verified_every=12, upkeep_every=6 * 3600.0)
        life.run(days)
    return life


@pytest.mark.long
def test_a_month_of_a_pool_breaks_nothing(made: Path) -> None:
    life = lived(30, made, seed=1)
    assert life.wrong == []
    assert life.done["starts"] > 400
    assert clock.wall() < START.timestamp(), "the host's clock is back"


@pytest.mark.long
def test_equal_seeds_live_equal_lives(made: Path) -> None:
    first, again = (lived(2, made, seed=2) for _ in range(2))
    assert first.digest == again.digest
    assert first.done == again.done


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_a_bot_that_was_drained_for_a_while_idle_or_at_work_runs_jobs_again(made: Path, step: float) -> None:
    settings, began = PoolSettings(), START.timestamp()
    bots_of = partial(
        simulated_bots,
        timing=settings.timing,
        fetch=FetchSettings(),
        cooldown=settings.quotas.of_evictions,
        runs=lambda *_: Run(15.0),
        seed=1,
        step=step,
    )
    with (
        embedded.serve_for_now("leasehold-test-", like=made) as server,
        living(server.url, settings, bots_of, start=began, seed=1, step=step) as (pool, bots),
    ):
        bots.open(OpenSession(bot="bot", capacity=1))
        job = JobRequest(command=["true"]).normal()
        submits = partial(submit, requests=[job], actor="op")
        drains, undrains = (
            partial(drain, name="bot", draining=draining, actor="op", reason="") for draining in (True, False)
        )
        # The first drain meets it idle. The job that it runs at the second one ends before the drain does.
        for seconds, act in ((10, drains), (20, undrains), (30, submits), (40, drains), (60, undrains), (70, submits)):
            pool.run(began + seconds)
            pool.database.run(act)
        pool.run(began + 100.0)
        states = pool.database.run(lambda connection: [*connection.execute_sql("SELECT state FROM jobs")])
    assert [row.state for row in states] == ["succeeded"] * 2


LEASES = """
SELECT job_id, fence, bot_id, granted_at, delivered_at, acknowledged_at, acknowledged_by, ended_at, verdict,
    report::text
FROM leases ORDER BY job_id, fence
"""


def leases_of_a_busy_pool(like: Path, *, apart: bool) -> list[Row]:
    """The leases of bots that are never idle for long, while jobs fail or are cancelled, and bots drain, leave or die.

    apart: leases begin without calls.
    """
    settings, began, step = PoolSettings(), START.timestamp(), 2.0

    def runs(work: Work, _chance: random.Random) -> Run:
        number = int((work.payload or {})["command"][1])
        return Run(step * (1 + number * 7 % 23), "failed" if number % 9 == 0 else "succeeded")

    bots_of = partial(
        simulated_bots,
        timing=settings.timing,
        fetch=FetchSettings(),
        cooldown=settings.quotas.of_evictions,
        runs=runs,
        seed=1,
        step=step if apart else 0.0,
    )
    with (
        embedded.serve_for_now("leasehold-test-", like=like) as server,
        living(server.url, settings, bots_of, start=began, seed=1, step=step) as (pool, bots),
    ):

        def submits(number: int) -> None:
            asked = JobRequest(command=["run", str(number)], max_attempts=3, retry_failed=True).normal()
            made = pool.database.run(partial(submit, requests=[asked], actor="op"))
            if number % 11 == 0:
                # At this stop of the clock, and some stops later.
                for seconds in (0.0, number % 5 * step):
                    cancels = partial(cancel, public_ids=[made[0].public_id], instances=None, sync=5.0, actor="op")
                    pool.at(clock.monotonic() + seconds, partial(pool.database.run, cancels))

        def drains(draining: bool) -> None:
            pool.database.run(partial(drain, name="bot-2", draining=draining, actor="op", reason=""))

        openings = [OpenSession(bot=f"bot-{number}", capacity=number) for number in range(1, 6)]
        bots.open(*openings)
        for number in range(100):
            pool.at(began + number * 1.7, partial(submits, number))
        for seconds, act in (
            (40, partial(drains, True)),
            (60, partial(drains, False)),
            (80, partial(bots.kill, "bot-3")),
            (120, partial(bots.open, openings[2])),
            (130, partial(bots.leave, "bot-4")),
            (132, partial(bots.open, openings[3])),
        ):
            pool.at(began + seconds, act)
        pool.run(began + 500.0)
        assert [found.id for found in verify(pool.database) if found.rows] == []
        return pool.database.run(lambda connection: connection.execute_sql(LEASES).all())


@pytest.mark.long
def test_leases_begin_without_calls_as_they_would_with_them(made: Path) -> None:
    with_calls, apart = (leases_of_a_busy_pool(made, apart=apart) for apart in (False, True))
    assert len(with_calls) > 100
    assert apart == with_calls
