"""Preemption, two at once on one job, bot or reservation: who waits, who wins, and what is kept for whom."""

import pytest

from schema.moves.preempt import expire_reservations
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, at_service_of, cancel, expire
from tests.support.tenancy import Tenancy, assign, contested

KEPT = "SELECT (SELECT count(*) FROM reservations) AS reservations, sum(reserved) AS reserved FROM bots"
# A reservation and the rest of its job end together.
OVER = """
WITH over AS (UPDATE reservations SET until = now() - interval '1 s')
UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE schedule_after IS NOT NULL"""


def kept(pool: Pool) -> tuple[int, int]:
    """How many reservations there are, and units that bots keep for them."""
    return tuple(pool.row(KEPT))


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
    assert [lease["job"] for lease in answer["leases"]] == [wanting], "claimed, or fetched"
    row = pool.job(victim)
    assert (row.state, row.evictions, row.attempts) == ("succeeded", 0, 1)
    assert kept(pool) == (0, 0)
    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (1, 0)


def test_preempt_cancel_a_victim_that_is_being_cancelled_is_left_alone(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    victim, _, bot, work = contested(pool, tenancy)
    race.side_by_side(lambda first: cancel(first, victim), lambda: assign(pool))
    assign(pool)
    assert tenancy.stop_requests() == 0, "it stops anyway"
    bot.sync(completed(work, "stopped"))
    assert pool.job(victim).state == "cancelled"


def test_preempt_cancel_a_victim_that_is_cancelled_does_not_come_back(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assert race.in_turn(assign, lambda: cancel(pool, victim))[0].state == "cancelling"
    answer = bot.sync(completed(work, "stopped"))
    assert [lease["job"] for lease in answer["leases"]] == [wanting]
    assert (pool.job(victim).state, pool.job(victim).evictions) == ("cancelled", 0)


def test_preempt_cancel_nothing_is_evicted_for_a_job_that_is_being_cancelled(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    _, wanting, _, _ = contested(pool, tenancy)
    race.side_by_side(lambda first: cancel(first, wanting), lambda: assign(pool))
    assign(pool)
    assert tenancy.stop_requests() == 0


def test_preempt_cancel_the_room_kept_for_a_job_that_is_cancelled_is_given_up(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assert race.in_turn(assign, lambda: cancel(pool, wanting))[0].state == "cancelled"
    assert bot.sync(completed(work, "stopped"))["leases"] == []
    assert pool.job(victim).state == "queued"
    pool.upkeep().run_once()
    assert kept(pool) == (0, 0)
    assign(pool)
    assert pool.job(victim).state == "leased", "nobody wants the room any more"


# --- two preemptors


def test_bg_17_two_preemptors_do_not_evict_one_victim_twice(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    tenancy.quota("team-c", minimum=1)
    pool.submit(instance="team-c", priority=1)
    race.side_by_side(assign, lambda: assign(pool))
    assign(pool)
    assert tenancy.stop_requests() == 1
    answer = bot.sync(completed(work, "stopped"))
    assert [lease["job"] for lease in answer["leases"]] == [wanting]
    assert pool.job(victim).evictions == 1


def test_bg_22_two_preemptors_of_one_instance_evict_no_more_than_its_minimum(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
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


# --- reservations


def test_what_is_reserved_is_claimed_although_somebody_holds_its_quota(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    answer = race.in_turn(
        lambda first: first.change(
            "SELECT FROM quotas q JOIN instances i ON i.id = q.instance WHERE i.name = 'team-a' FOR NO KEY UPDATE OF q"
        ),
        lambda: bot.sync(completed(work, "stopped")),
        commit=False,
    )
    assert [lease["job"] for lease in answer["leases"]] == [wanting]


def test_a_reservation_that_is_over_ends_no_other_wait_of_its_job(pool: Pool, tenancy: Tenancy) -> None:
    """It was placed elsewhere, and may still run there although that bot started anew."""
    _, wanting, _, _ = contested(pool, tenancy)
    assign(pool)
    pool.change(OVER)
    other = pool.bot("bot-2")
    assign(pool)
    other.take()
    pool.bot("bot-2")
    held_until = pool.job(wanting).schedule_after
    assert held_until is not None
    pool.upkeep().run_once()
    assert kept(pool) == (0, 0)
    assert pool.job(wanting).schedule_after == held_until


def test_a_bot_that_is_lost_gives_its_reservation_up(pool: Pool, tenancy: Tenancy) -> None:
    victim, wanting, _, _ = contested(pool, tenancy)
    assign(pool)
    assert kept(pool) == (1, 1)
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    expire(pool)
    assert kept(pool) == (0, 0)
    assert (pool.job(victim).state, pool.job(wanting).schedule_after) == ("queued", None)
    pool.bot("bot-2")
    assign(pool)
    assert pool.job(wanting).state == "leased"


def test_a_bot_that_starts_anew_gives_its_reservation_up(pool: Pool, tenancy: Tenancy) -> None:
    victim, wanting, _, _ = contested(pool, tenancy)
    assign(pool)
    bot = pool.bot()
    assert kept(pool) == (0, 0)
    assign(pool)
    assert [work["job"] for work in bot.sync()["leases"]] == [wanting]
    assert (pool.job(victim).state, pool.job(victim).kills) == ("queued", 1)


def test_a_reservation_that_is_over_gives_the_job_and_the_room_back(pool: Pool, tenancy: Tenancy) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    pool.change(OVER)
    pool.upkeep().run_once()
    assert kept(pool) == (0, 0)
    assert (pool.job(wanting).state, pool.job(wanting).schedule_after) == ("queued", None)
    answer = bot.sync(completed(work, "stopped"))
    assert answer["leases"] == [], "a stop is no reason to fetch"
    assign(pool)
    assert pool.job(wanting).state == "leased"
    assert pool.job(victim).evictions == 1


def test_a_job_whose_reservation_is_over_is_not_reserved_for_twice(pool: Pool, tenancy: Tenancy) -> None:
    """Its rest ends with the reservation, which is there until upkeep looks."""
    tenancy.quota("team-a", minimum=3)
    pool.submit(2, instance="team-b", priority=10)
    bot = pool.bot(capacity=2)
    assign(pool)
    bot.take()
    (wanting,) = pool.submit(instance="team-a")
    assign(pool)
    pool.change(OVER)
    assign(pool)
    assert (tenancy.stop_requests(), kept(pool)) == (1, (1, 1))
    pool.bot("bot-2")
    assign(pool)
    assert pool.job(wanting).state == "leased", "it need not wait for upkeep"
    pool.upkeep().run_once()
    assert kept(pool) == (0, 0)


def test_a_reservation_that_is_given_up_while_it_is_claimed_is_counted_once(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    pool.change(OVER)
    race.in_turn(
        lambda first: first.database.run(lambda c: expire_reservations(c, 10)),
        lambda: bot.sync(completed(work, "stopped")),
    )
    assert kept(pool) == (0, 0)
    assign(pool)
    assert pool.job(wanting).state == "leased"


def test_a_job_of_several_units_evicts_several_from_one_bot(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=3)
    pool.submit(4, instance="team-b", priority=10)
    bots = [pool.bot(name, capacity=3) for name in ("bot-1", "bot-2")]
    pool.assigner().run_once()
    held = [bot.take() for bot in bots]
    (wanting,) = pool.submit(instance="team-a", units=3)
    for _ in range(3):
        assign(pool)
    assert pool.job(wanting).reason == "a bot is being freed for it", "though it rested, as no bot is large enough"
    stop_requests = pool.rows(
        "SELECT b.name, j.public_id FROM live l JOIN bots b ON b.id = l.bot_id JOIN jobs j"
        " ON j.id = l.job_id WHERE l.state = 'cancelling'"
    )
    assert len({row.name for row in stop_requests}) == 1
    (nth,) = {int(row.name[-1]) - 1 for row in stop_requests}
    assert len(stop_requests) == len(held[nth]), "no more than it needs, and all from one bot"
    for answered, work in enumerate(held[nth], start=1):
        rest = [active(each) for each in held[nth][answered:]]
        answer = bots[nth].sync(completed(work, "stopped"), *rest)
    assert [lease["job"] for lease in answer["leases"]] == [wanting]
    assert tenancy.usage("team-a") == 3
