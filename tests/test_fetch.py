"""Proactive fetching at a sync, in both modes."""

import pytest

from bots.fetch import FetchSettings
from tests.pool import Bot, Pool, active, completed


def busy_bot(pool: Pool, *, capacity: int = 1, **fetch: object) -> tuple[Bot, list[dict]]:
    """A full bot, and the work it holds."""
    pool.submit(capacity)
    bot = pool.bot(capacity=capacity, desk=pool.desk(**fetch))
    pool.assigner().run_once()
    return bot, bot.take()


def offered(answer: dict) -> list[str]:
    return [lease["job"] for lease in answer["leases"] if lease["state"] == "pending"]


def test_a_bot_that_finished_work_gets_as_much_again_in_the_same_call(pool: Pool) -> None:
    bot, works = busy_bot(pool, capacity=3)
    jobs = pool.submit(5)
    answer = bot.sync(*[completed(work) for work in works[:2]], *_still(works[2:]))
    assert offered(answer) == jobs[:2]
    row = pool.row("SELECT strategy, assigner FROM leases ORDER BY granted_at DESC LIMIT 1")
    assert (row.strategy, row.assigner) == ("proactive", "bot:bot-1")


def test_a_bot_that_finished_nothing_fetches_nothing_by_default(pool: Pool) -> None:
    bot = pool.bot(capacity=3)
    pool.submit(5)
    assert bot.sync()["leases"] == []


def test_the_default_takes_new_jobs_and_those_in_backoff_but_none_whose_backoff_is_over(pool: Pool) -> None:
    bot, works = busy_bot(pool, capacity=3)
    (elapsed,) = pool.submit(priority=-3)
    (resting,) = pool.submit(priority=-2)
    (new,) = pool.submit(priority=-1)
    pool.change("UPDATE jobs SET considered = 1 WHERE priority IN (-3, -2)")
    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE priority = -3")
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 h' WHERE priority = -2")

    answer = bot.sync(*[completed(work) for work in works])

    assert offered(answer) == sorted([resting, new], key=lambda job: pool.job(job).id)
    assert pool.job(elapsed).state == "queued"


def test_literally_a_new_job_is_not_fetched_as_its_time_is_past(pool: Pool) -> None:
    bot, works = busy_bot(pool, backoff="literal")
    pool.submit()
    assert offered(bot.sync(*[completed(work) for work in works])) == []


def test_to_capacity_fills_all_room_at_every_sync_whatever_the_backoff(pool: Pool) -> None:
    bot = pool.bot(capacity=3, desk=pool.desk(to_capacity=True))
    jobs = pool.submit(3)
    pool.change("UPDATE jobs SET considered = 1")
    pool.change(f"UPDATE jobs SET schedule_after = now() + interval '1 h' WHERE public_id = '{jobs[0]}'")
    pool.change(f"UPDATE jobs SET schedule_after = now() - interval '1 h' WHERE public_id = '{jobs[1]}'")
    assert sorted(offered(bot.sync())) == sorted(jobs)


def test_a_retry_that_waits_is_fetched_in_no_mode(pool: Pool) -> None:
    pool.submit(retry_failed=True)
    bot = pool.bot(desk=pool.desk(to_capacity=True))
    (work,) = bot.sync()["leases"]
    assert offered(bot.sync(completed(work, "failed", exit_code=1))) == []


def test_fetching_keeps_to_the_bots_properties_instance_and_room(pool: Pool) -> None:
    bot = pool.bot(capacity=4, instance="a", properties={"os": "linux"}, desk=pool.desk(to_capacity=True))
    pool.submit(instance="b")
    pool.submit(instance="a", properties={"os": "plan9"})
    pool.submit(instance="a", units=5)
    (fits,) = pool.submit(instance="a", units=3, properties={"os": "linux"})
    pool.submit(instance="a", units=2)
    assert offered(bot.sync()) == [fits]


def test_a_draining_or_unhealthy_bot_fetches_nothing(pool: Pool) -> None:
    pool.submit(2)
    bot = pool.bot(desk=pool.desk(to_capacity=True))
    for status in ("draining", "unhealthy"):
        assert bot.sync(status=status)["leases"] == []
    assert len(bot.sync(status="ok")["leases"]) == 1


@pytest.mark.parametrize(
    ("settings", "completed_jobs", "room", "limit"),
    [({}, 2, 5, 2), ({}, 5, 2, 2), ({"to_capacity": True}, 0, 5, 5), ({"enabled": False}, 3, 5, 0)],
)
def test_how_many_jobs_a_sync_may_fetch(settings: dict, completed_jobs: int, room: int, limit: int) -> None:
    assert FetchSettings(**settings).limit(completed=completed_jobs, room=room) == limit


def _still(works: list[dict]) -> list:
    return [active(work) for work in works]
