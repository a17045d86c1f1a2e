"""Preemption on a real pool: how much is evicted, for whom, what is kept for the job, and what the history says."""

from typing import Any

import pytest

from schema import moves
from schema.ledger import Guard
from schema.moves import Placement
from tests.pool import Pool, active, completed
from tests.racing import drain
from tests.tenancy import Tenancy, assign, contested

KEPT = "SELECT (SELECT count(*) FROM reservations) AS reservations, sum(reserved) AS reserved FROM bots"
LAST = """
SELECT e.move, e.from_state, e.to_state, e.details FROM job_events e JOIN jobs j ON j.id = e.job_id
WHERE j.public_id = CAST(:id AS uuid) ORDER BY e.id DESC LIMIT 1"""


def test_what_stops_for_one_job_is_not_counted_against_the_next(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=2)
    tenancy.quota("team-c", minimum=1)
    pool.submit(8, instance="team-b", priority=10)
    bot = pool.bot(capacity=8)
    pool.assigner().run_once()
    bot.take()
    pool.submit(instance="team-a", units=2)
    assign(pool)
    pool.submit(instance="team-c", priority=1)
    assign(pool)
    assert tenancy.asked() == 2 + 1
    assert tuple(pool.row(KEPT)) == (2, 3)


def test_a_quota_that_an_eviction_has_freed_is_not_taken_by_others_of_the_instance(
    pool: Pool, tenancy: Tenancy
) -> None:
    _, wanting, bot, work = contested(pool, tenancy, properties={"kind": "one"})
    tenancy.quota("team-a", minimum=1, maximum=1)
    assign(pool)
    other = pool.bot("bot-2", properties={"kind": "two"}, capacity=2)
    pool.submit(instance="team-z", properties={"kind": "two"})
    (sibling,) = pool.submit(instance="team-a", properties={"kind": "two"}, priority=-9)
    assign(pool)
    (own,) = other.take()
    other.sync(completed(own))
    wish = Placement(pool.job(sibling).id, pool.row("SELECT id FROM bots WHERE name = 'bot-2'").id, {})
    for guard in Guard:
        granted = pool.database.run(
            lambda c, guard=guard: moves.grant(c, [wish], assigner="test", strategy="test", ack=9, guard=guard)  # type: ignore[misc]
        )
        assert granted == []
    assert pool.job(sibling).state == "queued"
    answer = bot.sync(completed(work, "stopped"))
    assert [lease["job"] for lease in answer["leases"]] == [wanting]
    assert tenancy.usage("team-a") == 1


@pytest.mark.parametrize(("leaving", "kept"), [("drained", 0), ("unhealthy", 0), ("closing", 0), ("well", 1)])
def test_a_bot_that_takes_no_work_keeps_no_room(pool: Pool, tenancy: Tenancy, leaving: str, kept: int) -> None:
    _, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    if leaving == "drained":
        drain(pool)
        assert tuple(pool.row(KEPT)) == (0, 0), "at once"
    elif leaving == "closing":
        pool.change("UPDATE bots SET closing = true")
    else:
        bot.sync(active(work), status="ok" if leaving == "well" else leaving)
    pool.upkeep().run_once()
    assert tuple(pool.row(KEPT)) == (kept, kept)
    if kept:
        return
    event = pool.row(LAST, id=wanting)
    assert (event.move, event.from_state, event.to_state) == ("unreserve", "queued", "queued")
    assert event.details == {"reason": "the bot takes no work any more"}
    pool.bot("bot-2")
    assign(pool)
    assert pool.job(wanting).state == "leased", "it does not rest beside a free bot"


def test_the_history_tells_that_a_reservation_was_over(pool: Pool, tenancy: Tenancy) -> None:
    _, wanting, _, _ = contested(pool, tenancy)
    assign(pool)
    pool.change("UPDATE reservations SET until = now() - interval '1 s'")
    pool.upkeep().run_once()
    event = pool.row(LAST, id=wanting)
    assert (event.move, event.details["reason"]) == ("unreserve", "the reservation is over")


@pytest.mark.parametrize(("timeout", "asked"), [(3, 0), (600, 1)])
def test_nothing_is_stopped_for_a_job_that_gives_up_before(
    pool: Pool, tenancy: Tenancy, timeout: float, asked: int
) -> None:
    tenancy.quota("team-a", minimum=1)
    pool.submit(instance="team-b", priority=10)
    bot = pool.bot()
    pool.assigner().run_once()
    bot.take()
    pool.submit(instance="team-a", queue_timeout_seconds=timeout)
    assign(pool)
    assert tenancy.asked() == asked


@pytest.mark.parametrize("change", ["deadline", "drain"])
def test_nothing_is_stopped_for_a_job_that_has_become_hopeless_since_it_was_found(
    pool: Pool, tenancy: Tenancy, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contested(pool, tenancy)
    preempt = moves.preempt

    def late(connection: Any, **fields: Any) -> bool:
        if change == "drain":
            pool.change("UPDATE instances SET draining = true WHERE name = 'team-a'")
        else:
            fields["sync"] = 10_000
            connection.exec_driver_sql("UPDATE jobs SET queue_deadline = now() + interval '1 h' WHERE state = 'queued'")
        return preempt(connection, **fields)

    monkeypatch.setattr(moves, "preempt", late)
    assign(pool)
    assert tenancy.asked() == 0


@pytest.mark.parametrize(
    "hopeless", [{"count": 30, "properties": {"gpu": ["yes"]}}, {"count": 30, "units": 3}, {"count": 600, "units": 4}]
)
def test_a_minimum_is_met_however_many_jobs_come_first_that_nobody_could_run(
    pool: Pool, tenancy: Tenancy, hopeless: dict[str, Any]
) -> None:
    """For want of such a bot, of a bot so large, or because the minimum is not so large."""
    tenancy.quota("team-a", minimum=3)
    pool.submit(instance="team-b", priority=10)
    bot = pool.bot()
    pool.assigner().run_once()
    bot.take()
    pool.submit(hopeless.pop("count"), instance="team-a", **hopeless)
    pool.submit(instance="team-a", priority=1)
    assign(pool)
    assign(pool)
    assert tenancy.asked() == 1


@pytest.mark.parametrize(("verdict", "evictions"), [("succeeded", 0), ("stopped", 1)])
def test_an_eviction_is_one_once_the_job_has_lost_its_work(
    pool: Pool, tenancy: Tenancy, verdict: str, evictions: int
) -> None:
    victim, _, bot, work = contested(pool, tenancy)
    assign(pool)
    assert (tenancy.asked(), tenancy.evictions(), tenancy.effective_maximum("team-b")) == (1, 0, 3)
    bot.sync(completed(work, verdict))
    assert (tenancy.evictions(), tenancy.effective_maximum("team-b")) == (evictions, 3 - evictions)
    assert pool.job(victim).evictions == evictions
