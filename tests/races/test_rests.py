"""A queue that is put to rest while a bot for it comes or becomes free does not wait until the rest is over."""

from collections.abc import Callable, Collection
from typing import Any

import pytest

from assigner.cycle import assigner as assigner_module
from schema.moves.waiting.backoff import wake_served
from schema.postgres.connection import Connection
from tests.support.pool import Pool, completed
from tests.support.race import Race, drain


def goes_on(pool: Pool, race: Race, job: str, *, when: Callable[[], Any]) -> bool:
    """Whether the job starts in the cycle after one that put its queue to rest, before whose commit `when` happened."""
    with race.first() as first:
        assigner = first.assigner()
        assigner.run_once()
        assert first.queue_of(job).looks == 1
        race.unhindered(when, by=first)
        first.commit()
        assert pool.job(job).state == "queued"
        assigner.run_once()
        first.commit()
    return bool(pool.job(job).state == "leased")


@pytest.mark.parametrize("terms", [{}, {"terms": {"locks": ["a"]}}], ids=["plain", "constrained"])
def test_a_bot_that_was_full_takes_a_large_job(pool: Pool, race: Race, terms: dict[str, Any]) -> None:
    pool.submit()
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    (work,) = bot.take()
    (job,) = pool.submit(units=2, **terms)
    assert goes_on(pool, race, job, when=lambda: bot.sync(completed(work)))


def test_a_bot_that_is_drained_no_more_takes_a_job(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    pool.bot()
    drain(pool)
    assert goes_on(pool, race, job, when=lambda: drain(pool, draining=False))


def test_a_bot_that_begins_a_session_takes_a_job(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    assert goes_on(pool, race, job, when=pool.bot)


def test_a_look_for_such_bots_that_takes_long_is_made_seldom(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fleet of more than a thousand kinds it reads each free bot, for each queue."""
    pool.submit(units=2)
    pool.bot()
    time, looks = 0.0, list[float]()

    def look(connection: Connection, queues: Collection[int]) -> int:
        nonlocal time
        looks.append(time)
        time += 1.0
        return wake_served(connection, queues)

    monkeypatch.setattr(assigner_module, "wake_served", look)
    assigner = pool.assigner(now=lambda: time, failure_backoff=0.0)
    for _ in range(30):
        assigner.run_once()
        time += 1.0
    assert len(looks) == 2


def test_a_queue_whose_jobs_no_bot_can_take_rests_on(pool: Pool) -> None:
    (job,) = pool.submit(units=2)
    pool.bot()
    assigner = pool.assigner()
    for _ in range(3):
        assigner.run_once()
    assert pool.queue_of(job).looks == 1
