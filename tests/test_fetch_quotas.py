"""Proactive fetching under quotas: only what could not use a quota up, or what this call has given back."""

import pytest

from tests.pool import Bot, Pool, completed
from tests.tenancy import Tenancy


def busy(pool: Pool, *, instance: str, capacity: int = 1, name: str = "bot-1", **fetch: object) -> tuple[Bot, dict]:
    """A bot that runs one job of the instance."""
    bot = pool.bot(name, capacity=capacity, desk=pool.desk(**fetch), properties={"for": name})
    pool.submit(instance=instance, properties={"for": name})
    pool.assigner().run_once()
    (work,) = bot.take()
    return bot, work


def offered(answer: dict) -> list[str]:
    return [lease["instance"] for lease in answer["leases"]]


@pytest.mark.parametrize(("maximum", "fetched"), [(4, []), (5, ["team-a"]), (None, ["team-a"])])
def test_bg_26_an_instance_is_fetched_from_if_the_whole_bot_would_fit_into_its_quota(
    pool: Pool, tenancy: Tenancy, maximum: int | None, fetched: list[str]
) -> None:
    bot, work = busy(pool, instance="team-b", capacity=3)
    tenancy.quota("team-a", maximum=maximum)
    pool.submit(2, instance="team-a", properties={"for": "bot-2"})
    pool.bot("bot-2", capacity=2, properties={"for": "bot-2"})
    pool.assigner().run_once()
    assert tenancy.usage("team-a") == 2
    pool.submit(instance="team-a")
    assert offered(bot.sync(completed(work))) == fetched


def test_bg_26_an_eviction_lowers_what_may_be_fetched(pool: Pool, tenancy: Tenancy) -> None:
    bot, work = busy(pool, instance="team-b")
    tenancy.quota("team-a", maximum=1)
    tenancy.evicted("team-a")
    pool.submit(instance="team-a")
    assert offered(bot.sync(completed(work))) == []


@pytest.mark.parametrize("to_capacity", [True, False])
def test_bg_26_what_this_very_call_has_given_back_may_be_fetched_again(
    pool: Pool, tenancy: Tenancy, to_capacity: bool
) -> None:
    tenancy.quota("team-a", maximum=2)
    bot, work = busy(pool, instance="team-a", capacity=3, to_capacity=to_capacity)
    pool.submit(5, instance="team-a")
    answer = bot.sync(completed(work))
    assert offered(answer) == ["team-a"] * (2 if to_capacity else 1)
    assert tenancy.usage("team-a") == len(answer["leases"]), "and no more than its maximum"


def test_an_instance_below_its_minimum_is_fetched_from_first_and_only_up_to_it(pool: Pool, tenancy: Tenancy) -> None:
    bot, work = busy(pool, instance="team-c", capacity=3, to_capacity=True)
    tenancy.quota("team-a", minimum=1)
    pool.submit(3, instance="team-a", priority=5)
    pool.submit(3, instance="team-b", priority=-5)
    assert sorted(offered(bot.sync(completed(work)))) == ["team-a", "team-b", "team-b"]


@pytest.mark.parametrize("to_capacity", [True, False])
def test_a_06_without_any_headroom_nothing_is_fetched(pool: Pool, tenancy: Tenancy, to_capacity: bool) -> None:
    tenancy.quota("team-a", maximum=0)
    tenancy.quota("team-b", maximum=1)
    busy(pool, instance="team-b", name="bot-2")
    bot, work = busy(pool, instance="team-c", to_capacity=to_capacity)
    pool.submit(3, instance="team-a")
    pool.submit(3, instance="team-b")
    assert offered(bot.sync(completed(work))) == []
    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (0, 1)


def test_a_06_units_that_are_kept_for_an_evictor_are_not_fetched_into(pool: Pool, tenancy: Tenancy) -> None:
    bot, work = busy(pool, instance="team-b", to_capacity=True)
    pool.change(
        "INSERT INTO reservations (job_id, bot_id, units, until) SELECT j.id, b.id, 1, now() + interval '1 h'"
        " FROM bots b, jobs j"
    )
    pool.change("UPDATE bots SET reserved = 1")
    pool.submit(3, instance="team-c")
    assert offered(bot.sync(completed(work))) == []
