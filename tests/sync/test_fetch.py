"""Proactive fetching at a sync, in both modes."""

import pytest

from bots.sync.fetch import FetchSettings
from schema.accounting import accounts
from schema.accounting.accounts import Account
from tests.support.explain import keep
from tests.support.pool import Bot, Pool, active, busy_bot, completed
from tests.support.sync import offered
from tests.support.tenancy import Tenancy


@pytest.mark.parametrize("ahead", [True, False])
def test_a_bot_of_short_tasks_that_finished_something_gets_its_whole_room_filled(pool: Pool, ahead: bool) -> None:
    bot, works = busy_bot(pool, capacity=2)
    jobs = pool.submit(6)
    answer = bot.sync(completed(works[0]), *_still(works[1:]), capacity=5, ahead=ahead)
    assert offered(answer) == (jobs[:4] if ahead else jobs[:1])
    row = pool.row("SELECT capacity, in_use, held FROM bots")
    assert (row.capacity, row.in_use, row.held) == ((5, 5, 5) if ahead else (5, 2, 2))


def test_a_bot_of_short_tasks_gets_no_more_than_the_maximum_of_an_instance_allows(pool: Pool) -> None:
    Tenancy(pool).quota("default", maximum=3)
    bot, works = busy_bot(pool, capacity=2)
    jobs = pool.submit(6)
    assert offered(bot.sync(*map(completed, works), capacity=6, ahead=True)) == jobs[:3]
    row = pool.row("SELECT strategy, assigner FROM leases ORDER BY granted_at DESC LIMIT 1")
    assert (row.strategy, row.assigner) == ("proactive", "bot:bot-1")


def test_room_that_a_bot_of_short_tasks_leaves_to_constrained_jobs_is_free_until_an_assigner_comes(pool: Pool) -> None:
    bot, works = busy_bot(pool, capacity=4)
    pool.database.run(lambda c: accounts.put_account(c, "gated", Account(weight=1), actor="test"))
    pool.change("INSERT INTO assigners (name) VALUES ('here')")
    (urgent,) = pool.submit(instance="gated", priority=-50)
    pool.submit(100)
    free = 0
    for _ in range(12):
        if free == 2:
            break
        works = bot.sync(completed(works[0]), *_still(works[1:]), capacity=4, ahead=True)["leases"]
        left = pool.row("SELECT capacity - in_use AS units FROM bots").units
        assert left >= free
        free = left
    assert free == 2
    pool.assigner().run_once()
    assert pool.job(urgent).state == "leased"


def test_a_bot_that_finished_nothing_fetches_nothing_by_default(pool: Pool) -> None:
    bot, works = busy_bot(pool, capacity=2)
    pool.submit(6)
    assert offered(bot.sync(*_still(works), capacity=5)) == []
    assert offered(bot.sync(*_still(works), capacity=5, ahead=True)) == []


def test_without_a_filter_every_ready_job_is_fetched_but_no_more_than_were_completed(pool: Pool) -> None:
    bot, works = busy_bot(pool, capacity=3, filter="none")
    jobs = [*pool.submit(instance="elapsed"), *pool.submit(instance="resting"), *pool.submit(2)]
    pool.rest_queues(-1, f"public_id = '{jobs[0]}'")
    pool.rest_queues(3600, f"public_id = '{jobs[1]}'")
    answer = bot.sync(*[completed(work) for work in works[:2]], *_still(works[2:]))
    assert offered(answer) == jobs[:2]
    # Literally, a new job is not fetched, as its time is past.
    bot.sync_service = pool.sync_service(filter="literal")
    fetched = [lease for lease in answer["leases"] if lease["job"] in jobs[:2]]
    assert offered(bot.sync(completed(works[2]), *_still(fetched))) == []


def test_a_job_whose_backoff_is_over_is_no_new_one_for_a_bot_with_more_room(pool: Pool) -> None:
    bot, works = busy_bot(pool, capacity=2)
    (elapsed,) = pool.submit()
    pool.rest_queues(-1, "state = 'queued'")
    for work in works:
        works = works[1:]
        assert offered(bot.sync(completed(work), *_still(works))) == []
        assert pool.queue_of(elapsed).looks == 1
    assert bot.sync()["leases"] == []
    pool.assigner().run_once()
    assert pool.job(elapsed).state == "leased"


def test_a_retry_that_waits_is_fetched_in_no_mode(pool: Pool) -> None:
    pool.submit(retry_failed=True)
    bot = pool.bot(sync_service=pool.sync_service(to_capacity=True))
    (work,) = bot.sync()["leases"]
    assert offered(bot.sync(completed(work, "failed", exit_code=1))) == []


def test_fetching_keeps_to_the_bots_properties_instance_and_room(pool: Pool) -> None:
    bot = pool.bot(
        capacity=4, instance="a", properties={"os": "linux"}, sync_service=pool.sync_service(to_capacity=True)
    )
    pool.submit(instance="b")
    pool.submit(instance="a", properties={"os": "plan9"})
    pool.submit(instance="a", units=5)
    (fits,) = pool.submit(instance="a", units=3, properties={"os": "linux"})
    pool.submit(instance="a", units=2)
    assert offered(bot.sync()) == [fits]


def test_a_draining_or_unhealthy_bot_fetches_nothing(pool: Pool) -> None:
    pool.submit(2)
    bot = pool.bot(sync_service=pool.sync_service(to_capacity=True))
    for status in ("draining", "unhealthy"):
        assert bot.sync(status=status)["leases"] == []
    assert len(bot.sync(status="ok")["leases"]) == 1


def test_how_many_jobs_a_sync_may_fetch() -> None:
    for settings, completed_jobs, free_units, limit in (
        ({}, 2, 5, 2), ({}, 5, 2, 2), ({"to_capacity": True}, 0, 5, 5), ({"enabled": False}, 3, 5, 0)
    ):  # fmt: skip
        assert FetchSettings(**settings).limit(completed=completed_jobs, free_units=free_units) == limit


def _still(works: list[dict]) -> list:
    return [active(work) for work in works]


# Proactive fetching under quotas: only what could not use a quota up, or what this call has given back.


def busy(pool: Pool, *, instance: str, capacity: int = 1, name: str = "bot-1", **fetch: object) -> tuple[Bot, dict]:
    """A bot that runs one job of the instance."""
    bot = pool.bot(name, capacity=capacity, sync_service=pool.sync_service(**fetch), properties={"for": name})
    pool.submit(instance=instance, properties={"for": name})
    (work,) = pool.given(bot)
    return bot, work


def instances(answer: dict) -> list[str]:
    return [lease["instance"] for lease in answer["leases"]]


@pytest.mark.parametrize(("maximum", "fetched"), [(4, []), (5, ["team-a"])])
def test_an_instance_is_fetched_from_if_the_whole_bot_would_fit_into_its_quota(
    pool: Pool, tenancy: Tenancy, maximum: int | None, fetched: list[str]
) -> None:
    bot, work = busy(pool, instance="team-b", capacity=3)
    tenancy.quota("team-a", maximum=maximum)
    pool.submit(2, instance="team-a", properties={"for": "bot-2"})
    pool.bot("bot-2", capacity=2, properties={"for": "bot-2"})
    pool.assigner().run_once()
    assert tenancy.usage("team-a") == 2
    pool.submit(instance="team-a")
    assert instances(bot.sync(completed(work))) == fetched


@pytest.mark.parametrize(("others_wait", "fetched"), [(True, []), (False, ["team-a"])])
def test_an_eviction_lowers_the_fetch(pool: Pool, tenancy: Tenancy, others_wait: bool, fetched: list[str]) -> None:
    bot, work = busy(pool, instance="team-b")
    tenancy.quota("team-a", maximum=1)
    tenancy.evicted("team-a")
    pool.submit(instance="team-a")
    if others_wait:
        pool.submit(instance="team-c", properties={"os": "another"})
    assert instances(bot.sync(completed(work))) == fetched


@pytest.mark.parametrize("to_capacity", [True, False])
def test_what_this_call_has_given_back_may_be_fetched_again(pool: Pool, tenancy: Tenancy, to_capacity: bool) -> None:
    tenancy.quota("team-a", maximum=2)
    bot, work = busy(pool, instance="team-a", capacity=3, to_capacity=to_capacity)
    pool.submit(5, instance="team-a")
    answer = bot.sync(completed(work))
    assert instances(answer) == ["team-a"] * (2 if to_capacity else 1)
    assert tenancy.usage("team-a") == len(answer["leases"]), "and no more than its maximum"


def test_an_instance_below_its_minimum_is_fetched_from_first_and_only_up_to_it(pool: Pool, tenancy: Tenancy) -> None:
    bot, work = busy(pool, instance="team-c", capacity=3, to_capacity=True)
    tenancy.quota("team-a", minimum=1)
    pool.submit(3, instance="team-a", priority=5)
    pool.submit(3, instance="team-b", priority=-5)
    assert sorted(instances(bot.sync(completed(work)))) == ["team-a", "team-b", "team-b"]


@pytest.mark.parametrize("to_capacity", [True, False])
def test_without_any_headroom_nothing_is_fetched(pool: Pool, tenancy: Tenancy, to_capacity: bool) -> None:
    tenancy.quota("team-a", maximum=0)
    tenancy.quota("team-b", maximum=1)
    busy(pool, instance="team-b", name="bot-2")
    bot, work = busy(pool, instance="team-c", to_capacity=to_capacity)
    pool.submit(3, instance="team-a")
    pool.submit(3, instance="team-b")
    assert instances(bot.sync(completed(work))) == []
    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (0, 1)


def test_units_that_are_kept_for_an_instance_are_not_fetched_into(pool: Pool) -> None:
    bot, work = busy(pool, instance="team-b", to_capacity=True)
    keep(pool, "bot-1", "team-d")
    pool.submit(3, instance="team-c")
    assert instances(bot.sync(completed(work))) == []
