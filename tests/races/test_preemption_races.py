"""Preemption, two at once on one job, bot or quota: who waits, who wins, and what is kept for whom."""

from collections import Counter
from typing import Any

import pytest

from assigner.preemption import reclaim as reclaim_module
from schema.moves.preempt import release_kept_units
from schema.picking import preemption
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from tests.support.pool import Pool, completed
from tests.support.race import Race, at_service_of, cancel, expire
from tests.support.tenancy import EAGER, Tenancy, assign, contested

OVER = "UPDATE bots SET kept_until = now() - interval '1 s' WHERE kept_units > 0"


def kept(pool: Pool) -> int:
    """Units that bots keep for instances."""
    units: int = pool.row("SELECT coalesce(sum(kept_units), 0) AS units FROM bots").units
    return units


# --- preempt × finish, cancel


def test_preempt_finish_a_victim_that_is_just_finishing_is_left_alone(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    race.side_by_side(lambda first: at_service_of(first, bot).sync(completed(work)), lambda: assign(pool))
    assert tenancy.stop_requests() == 0
    assert (pool.job(victim).state, pool.job(wanting).state) == ("succeeded", "leased"), "it was fetched"
    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (1, 0)


@pytest.mark.parametrize("commit", [True, False])
def test_preempt_finish_a_victim_that_finishes_while_it_is_asked_to_stop_keeps_its_result(
    pool: Pool, tenancy: Tenancy, race: Race, commit: bool
) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    answer = race.in_turn(assign, lambda: bot.sync(completed(work)), commit=commit)
    if commit:
        assert (answer["leases"], kept(pool)) == ([], 1)
        assign(pool)
        answer = bot.sync()
    assert [lease["job"] for lease in answer["leases"]] == [wanting], "kept for it, or fetched"
    row = pool.job(victim)
    assert (row.state, row.evictions, row.attempts) == ("succeeded", 0, 1)
    assert kept(pool) == 0
    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (1, 0)


@pytest.mark.parametrize("cancelled", ["victim", "wanting"])
def test_preempt_cancel_nothing_is_evicted_if_the_victim_or_the_job_is_just_being_cancelled(
    pool: Pool, tenancy: Tenancy, race: Race, cancelled: str
) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    job = victim if cancelled == "victim" else wanting
    race.side_by_side(lambda first: cancel(first, job), lambda: assign(pool))
    assign(pool)
    assert tenancy.stop_requests() == 0
    bot.sync(completed(work, "stopped"))
    assert pool.job(job).state == "cancelled"


def test_preempt_cancel_a_victim_that_is_cancelled_does_not_come_back(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assert race.in_turn(assign, lambda: cancel(pool, victim))[0].state == "cancelling"
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert [lease["job"] for lease in bot.sync()["leases"]] == [wanting]
    assert (pool.job(victim).state, pool.job(victim).evictions) == ("cancelled", 0)


def test_preempt_cancel_what_is_kept_for_a_job_that_is_cancelled_is_for_its_instance_and_then_for_all(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assert race.in_turn(assign, lambda: cancel(pool, wanting))[0].state == "cancelled"
    assert bot.sync(completed(work, "stopped"))["leases"] == []
    assign(pool)
    assert (pool.job(victim).state, kept(pool)) == ("queued", 1)
    pool.change(OVER)
    pool.upkeep().run_once()
    assert kept(pool) == 0
    assign(pool)
    assert pool.job(victim).state == "leased", "nobody wants the room any more"


# --- two preemptors


def evict_by(connection: Connection, stale: Any) -> int:
    """Evict by a plan that was read before."""
    return reclaim_module.reclaim(connection, *stale, EAGER, sync=1.0, actor="test", again=False, used=Counter())


def test_two_preemptors_do_not_evict_one_victim_twice(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    tenancy.quota("team-c", minimum=1)
    pool.submit(instance="team-c", priority=1)
    race.side_by_side(assign, lambda: assign(pool))
    assign(pool)
    assert tenancy.stop_requests() == 1
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert [lease["job"] for lease in bot.sync()["leases"]] == [wanting]
    assert pool.job(victim).evictions == 1


def test_two_preemptors_of_an_instance_evict_no_more_than_its_minimum(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("team-a", minimum=1)
    pool.submit(2, instance="team-b", priority=10)
    bots = [pool.bot(name) for name in ("bot-1", "bot-2")]
    assign(pool)
    for bot in bots:
        bot.take()
    pool.submit(2, instance="team-a")
    race.side_by_side(assign, lambda: assign(pool))
    assign(pool)
    assert tenancy.stop_requests() == 1


def test_two_evictors_for_one_job_evict_once(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    """The second has read what is kept before the first has ended, and locked the job after that."""
    tenancy.quota("team-a", minimum=2)
    pool.submit(2, instance="team-b", priority=10)
    bots = [pool.bot(name) for name in ("bot-1", "bot-2")]
    assign(pool)
    for bot in bots:
        bot.take()
    pool.submit(instance="team-a")
    read = preemption.starved_jobs
    with race.first() as first:
        # It has the plan of a cycle that began before another evictor had ended, and goes on after that.
        stale = pool.database.run(lambda c: read(c, Scope(), delay=0, sync=1, limit=20))
        assign(first)
        first.commit()
    assert tenancy.stop_requests() == 1
    assert pool.database.run(lambda c: evict_by(c, stale)) == 0
    assert (tenancy.stop_requests(), kept(pool)) == (1, 1)


def test_an_evictor_with_an_old_plan_sees_what_others_keep_by_now(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=3)
    pool.submit(3, instance="team-b", priority=10)
    bots = {name: pool.bot(name) for name in ("bot-1", "bot-2", "bot-3")}
    assign(pool)
    held = {name: bot.take() for name, bot in bots.items()}
    pool.submit(instance="team-a", priority=-5)
    assign(pool)
    name = pool.row("SELECT name FROM bots WHERE kept_units > 0").name
    pool.submit(instance="team-a")
    stale = pool.database.run(lambda c: preemption.starved_jobs(c, Scope(), delay=0, sync=1, limit=20))
    assign(pool)
    assert tenancy.stop_requests() == 2
    bots[name].sync(completed(held[name][0], "stopped"))
    pool.assigner().run_once()
    assert (tenancy.usage("team-a"), kept(pool)) == (1, 1), "as much is kept as the old plan has seen"
    assert pool.database.run(lambda c: evict_by(c, stale)) == 0
    assert tenancy.stop_requests() == 2


def test_an_eviction_counts_for_the_grant_that_waited_for_it(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    _, _, bot, work = contested(pool, tenancy, properties={"kind": "one"})
    tenancy.quota("team-b", maximum=2)
    assign(pool)
    pool.bot("bot-2", properties={"kind": "two"}, capacity=2)
    pool.submit(2, instance="team-b", properties={"kind": "two"})
    race.in_turn(lambda first: at_service_of(first, bot).sync(completed(work, "stopped")), lambda: assign(pool))
    assert tenancy.evictions() == 1
    assert tenancy.effective_maximum("team-b") == 1
    assert tenancy.usage("team-b") == 1, "the effective maximum is one less since the eviction"


# --- kept units


def test_what_is_kept_is_granted_once_a_held_quota_is_free(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    bot.sync(completed(work, "stopped"))
    race.in_turn(
        lambda first: first.change(
            "SELECT FROM quotas q JOIN instances i ON i.id = q.instance WHERE i.name = 'team-a' FOR NO KEY UPDATE OF q"
        ),
        lambda: assign(pool),
        commit=False,
    )
    assert [lease["job"] for lease in bot.sync()["leases"]] == [wanting]


@pytest.mark.parametrize("lost", [True, False])
def test_a_bot_that_is_lost_or_starts_anew_keeps_nothing(pool: Pool, tenancy: Tenancy, lost: bool) -> None:
    victim, wanting, _, _ = contested(pool, tenancy)
    assign(pool)
    assert kept(pool) == 1
    if lost:
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
        expire(pool)
    bot = pool.bot("bot-2" if lost else "bot-1")
    assert (kept(pool), pool.job(victim).state, pool.job(victim).kills) == (0, "queued", 1)
    assign(pool)
    assert [work["job"] for work in bot.sync()["leases"]] == [wanting]


@pytest.mark.parametrize("first", ["expiry", "grant"])
def test_expiry_against_grant_units_that_are_kept_are_given_up_or_used_and_never_both(
    pool: Pool, tenancy: Tenancy, race: Race, first: str
) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    bot.sync(completed(work, "stopped"))
    pool.change(OVER)
    release = pool.database.run

    def expiry(side: Pool) -> object:
        return side.database.run(lambda c: release_kept_units(c, 10))

    if first == "expiry":
        race.side_by_side(expiry, lambda: assign(pool))
        assign(pool)
    else:
        race.side_by_side(assign, lambda: release(lambda c: release_kept_units(c, 10)))
    assert (kept(pool), pool.job(wanting).state) == (0, "leased")
    strategy = pool.row("SELECT strategy FROM live").strategy
    assert strategy == ("capacity" if first == "expiry" else "preemption")


def test_two_evictors_for_two_instances_do_not_keep_one_bot(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("team-a", minimum=1)
    tenancy.quota("team-c", minimum=1)
    pool.submit(2, instance="team-b", priority=10)
    pool.given(pool.bot(capacity=2))
    pool.submit(instance="team-a")
    pool.submit(instance="team-c")
    with race.first() as first:
        assign(first)
        race.unhindered(lambda: assign(pool), by=first)
        first.commit()
    assign(pool)
    assert (tenancy.stop_requests(), kept(pool)) == (1, 1)
