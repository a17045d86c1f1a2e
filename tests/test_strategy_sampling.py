"""Sampling and the fall-backs around it, and what is remembered of where work ran."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection

from assigner import snapshot
from assigner.offers import Offers
from assigner.sampling import SamplingSettings
from schema import candidates, ready
from schema.candidates import FreeBot, Wanted
from tests.pool import Bot, Pool, active, completed


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sample sizes that were asked for, one entry for each sampling round."""
    found: list[int] = []
    read = candidates.sample

    def counted(connection: Connection, wanted: Sequence[Wanted], *, chance: random.Random) -> list[list[FreeBot]]:
        found.append(wanted[0].count)
        return read(connection, wanted, chance=chance)

    monkeypatch.setattr(candidates, "sample", counted)
    return found


def test_bg_30_a_sample_is_bounded_random_and_read_without_locks(pool: Pool) -> None:
    for number in range(12):
        pool.bot(f"bot-{number}")
    pool.submit()
    seen: set[str] = set()
    with pool.database.engine.connect() as other:
        other.exec_driver_sql("SELECT 1 FROM bots FOR UPDATE")
        with pool.database.engine.begin() as connection:
            jobs = ready.pick(connection, ready.Scope(), order=ready.Order.PRIORITY, batch=1, chance=pool.chance)
            for _ in range(40):
                found = snapshot.sampled(connection, jobs, sample_size=3, offers=Offers(), chance=pool.chance)
                (bots,) = found.candidates
                assert len({bot.id for bot in bots}) == 3
                seen |= {bot.name for bot in bots}
        other.rollback()
    assert len(seen) > 6


@pytest.mark.parametrize("strategy", ["capacity", "locality"])
@pytest.mark.parametrize("attempts", [1, 3])
def test_bg_31_bg_32_a_04_after_the_last_round_any_healthy_bot_will_do(
    pool: Pool, rounds: list[int], attempts: int, strategy: str
) -> None:
    (job,) = pool.submit()
    pool.bot("best", priority=-5)
    pool.bot("spare", priority=5)
    settings: dict[str, Any] = {"kind": strategy, "sampling": {"sample_size": 4, "max_attempts": attempts}}
    with pool.database.engine.connect() as other:
        other.exec_driver_sql("SELECT 1 FROM bots WHERE name = 'best' FOR UPDATE")
        pool.assigner(strategy=settings).run_once()
        other.rollback()
    assert rounds == [4] * attempts
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert (decision["bot"], decision["round"]) == ("spare", 0)
    assert pool.job(job).considered == 0


def test_a_04_only_a_job_that_not_even_any_healthy_bot_could_take_backs_off(pool: Pool) -> None:
    (job,) = pool.submit(units=2)
    pool.bot("small")
    pool.assigner().run_once()
    row = pool.job(job)
    assert (row.state, row.considered, row.schedule_after is None) == ("queued", 1, False)


def test_bg_32_one_round_is_the_default() -> None:
    assert SamplingSettings() == SamplingSettings(sample_size=10, max_attempts=1)


def worked(pool: Pool, bot: Bot, hints: Sequence[str], verdict: str = "succeeded") -> None:
    """The bot gets one job after another for each hint, and they end so."""
    for hint in hints:
        pool.submit(locality_hint=hint)
        pool.assigner().run_once()
        (work,) = bot.take()
        bot.sync(completed(work, verdict))


def remembered(pool: Pool) -> list[str]:
    return [row.hint for row in pool.rows("SELECT hint FROM bot_localities ORDER BY seq")]


def test_bg_39_a_bot_keeps_the_hints_of_its_ten_latest_successes(pool: Pool) -> None:
    bot = pool.bot(desk=pool.desk(enabled=False))
    worked(pool, bot, [f"repo-{number}" for number in range(11)])
    assert remembered(pool) == [f"repo-{number}" for number in range(1, 11)]
    worked(pool, bot, ["repo-1"])
    assert remembered(pool) == [f"repo-{number}" for number in (*range(2, 11), 1)]


@pytest.mark.parametrize(("limit", "kept"), [(0, []), (2, ["b", "c"])])
def test_bg_39_the_limit_is_a_setting_and_nought_turns_it_off(pool: Pool, limit: int, kept: list[str]) -> None:
    worked(pool, pool.bot(desk=pool.desk(enabled=False, bot_locality_hint_limit=limit)), ["a", "b", "c"])
    assert remembered(pool) == kept


def test_bg_39_a_job_that_failed_leaves_no_hint(pool: Pool) -> None:
    worked(pool, pool.bot(desk=pool.desk(enabled=False)), ["a"], verdict="failed")
    assert remembered(pool) == []


def test_the_pace_of_retries_is_a_setting(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot(desk=pool.desk(retry_base=100.0, retry_cap=150.0))
    pool.assigner().run_once()
    waits = []
    for _ in range(2):
        (work,) = bot.sync()["leases"]
        bot.sync(active(work))
        bot.sync(completed(work, "error"))
        row = pool.row("SELECT extract(epoch FROM schedule_after - now()) AS wait FROM jobs")
        waits.append(float(row.wait))
        pool.change("UPDATE jobs SET schedule_after = NULL")
        pool.assigner().run_once()
    assert 95 < waits[0] <= 100
    assert 145 < waits[1] <= 150
    assert pool.job(job).attempts == 3
