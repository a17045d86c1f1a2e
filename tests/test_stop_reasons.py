"""A bot that is to stop a lease is told why."""

from tests.pool import Bot, Pool, active
from tests.racing import cancel
from tests.tenancy import Tenancy, assign, contested


def told(bot: Bot, work: dict[str, object]) -> tuple[str, str | None]:
    (lease,) = bot.sync(active(work))["leases"]
    return lease["state"], lease.get("stop_reason")


def test_a_bot_is_told_of_a_cancel_and_of_nothing_before_it(pool: Pool) -> None:
    job, bot, work = pool.running()
    assert told(bot, work) == ("active", None)
    cancel(pool, job)
    assert told(bot, work) == ("cancelling", "cancel")


def test_a_bot_is_told_of_a_preemption(pool: Pool, tenancy: Tenancy) -> None:
    _, _, bot, work = contested(pool, tenancy)
    assign(pool)
    assert told(bot, work) == ("cancelling", "preempt")


def test_a_bot_is_told_of_a_timeout(pool: Pool) -> None:
    _, bot, work = pool.running(timeout_seconds=60)
    pool.change("UPDATE leases SET due_at = now() - interval '1 s'")
    pool.upkeep().run_once()
    assert told(bot, work) == ("cancelling", "timeout")
