"""Preemption on a real pool: how much is evicted, for whom, what is kept for the job, and what the history says."""

from typing import Any

import pytest
from sqlalchemy import Connection, text

from schema.accounting import accounts, counters, rates
from schema.accounting.accounts import Account
from schema.moves import preempt as preempt_moves
from schema.moves.cancel import cancel
from schema.moves.grant import Placement, grant
from schema.moves.reassign import add_constraints
from tests.support.explain import closed, explained, gates_of, reserve, rest
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import drain
from tests.support.tenancy import Tenancy, assign, contested

KEPT = "SELECT (SELECT count(*) FROM reservations) AS reservations, sum(reserved) AS reserved FROM bots"
LAST = """
SELECT e.move, e.from_state, e.to_state, e.details FROM job_events e JOIN jobs j ON j.id = e.job_id
WHERE j.public_id = CAST(:id AS uuid) ORDER BY e.id DESC LIMIT 1"""


def test_what_stops_for_one_job_is_not_counted_against_the_next(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=2)
    tenancy.quota("team-c", minimum=1)
    pool.submit(8, instance="team-b", priority=10)
    bot = pool.bot(capacity=8)
    pool.given(bot)
    pool.submit(instance="team-a", units=2)
    assign(pool)
    pool.submit(instance="team-c", priority=1)
    assign(pool)
    assert tenancy.stop_requests() == 2 + 1
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
    assert pool.database.run(lambda c: grant(c, [wish], assigner="test", strategy="test", ack=9)) == []
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


@pytest.mark.parametrize(("timeout", "stop_requests"), [(3, 0), (600, 1)])
def test_nothing_is_stopped_for_a_job_that_gives_up_before(
    pool: Pool, tenancy: Tenancy, timeout: float, stop_requests: int
) -> None:
    tenancy.quota("team-a", minimum=1)
    pool.submit(instance="team-b", priority=10)
    bot = pool.bot()
    pool.given(bot)
    pool.submit(instance="team-a", queue_timeout_seconds=timeout)
    assign(pool)
    assert tenancy.stop_requests() == stop_requests


@pytest.mark.parametrize("change", ["deadline", "drain"])
def test_nothing_is_stopped_for_a_job_that_has_become_hopeless_since_it_was_found(
    pool: Pool, tenancy: Tenancy, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contested(pool, tenancy)
    preempt = preempt_moves.preempt

    def late(connection: Any, **fields: Any) -> bool:
        if change == "drain":
            pool.change("UPDATE instances SET draining = true WHERE name = 'team-a'")
        else:
            fields["sync"] = 10_000
            connection.exec_driver_sql("UPDATE jobs SET queue_deadline = now() + interval '1 h' WHERE state = 'queued'")
        return preempt(connection, **fields)

    monkeypatch.setattr("assigner.preemption.reclaim.preempt", late)
    assign(pool)
    assert tenancy.stop_requests() == 0


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
    pool.given(bot)
    pool.submit(hopeless.pop("count"), instance="team-a", **hopeless)
    pool.submit(instance="team-a", priority=1)
    assign(pool)
    assign(pool)
    assert tenancy.stop_requests() == 1


@pytest.mark.parametrize(("verdict", "evictions"), [("succeeded", 0), ("stopped", 1)])
def test_an_eviction_is_one_once_the_job_has_lost_its_work(
    pool: Pool, tenancy: Tenancy, verdict: str, evictions: int
) -> None:
    victim, _, bot, work = contested(pool, tenancy)
    assign(pool)
    assert (tenancy.stop_requests(), tenancy.evictions(), tenancy.effective_maximum("team-b")) == (1, 0, 3)
    bot.sync(completed(work, verdict))
    assert (tenancy.evictions(), tenancy.effective_maximum("team-b")) == (evictions, 3 - evictions)
    assert pool.job(victim).evictions == evictions


# Preemption for jobs that ask for more than a place: only where their gates are open, and what they count is kept with
# the room that is.


CHARGED = "SELECT job_id, fence, names FROM charges"


@pytest.fixture
def below(pool: Pool) -> Tenancy:
    """One bot that team-b fills, and team-a, which has a share of the pool and a minimum, and waits."""
    tenancy = Tenancy(pool)
    tenancy.quota("team-a", minimum=1, maximum=5)
    share(pool, max_concurrent=2)
    return tenancy


def share(pool: Pool, **given: Any) -> None:
    account = Account.model_validate(given)
    pool.database.run(lambda c: accounts.put_account(c, "team-a", account, actor="test"))


def used(pool: Pool, what: str = "jobs") -> float:
    """What team-a has taken of one of its counters."""
    name = f"instance:team-a:{what}"
    return pool.database.run(lambda c: counters.read(c, [name])).get(name, counters.Counter()).used


def occupied(pool: Pool, **fields: Any) -> tuple[Bot, dict[str, Any]]:
    """A bot that runs a job of team-b, and its lease."""
    pool.submit(instance="team-b", priority=10)
    bot = pool.bot(**fields)
    (work,) = pool.given(bot)
    return bot, work


def test_a_job_with_gates_of_an_instance_below_its_minimum_gets_the_place_of_another_and_counts_once(
    pool: Pool, below: Tenancy
) -> None:
    bot, work = occupied(pool)
    (job,) = pool.submit(instance="team-a", estimated_cost=3)
    assign(pool)
    assert below.stop_requests() == 1
    assert (used(pool), used(pool, "cost")) == (1, 3)
    assert closed(explained(pool, job)) == ["backoff", "reservation", "room"]
    answer = bot.sync(completed(work, "stopped"))
    (given,) = answer["leases"]
    assert (given["job"], used(pool)) == (job, 1)
    bot.sync(active(given))
    bot.sync(completed(given))
    assert (used(pool), used(pool, "cost")) == (0, 3)
    assert pool.job(job).state == "succeeded"


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"max_concurrent": 0}, {}),
        ({"budget": 2}, {"estimated_cost": 3}),
        ({}, {"terms": {"locks": ["tree"]}}),
        ({}, {"terms": {"resources": {"cpu_milli": 100}}}),
    ],
)
def test_nothing_is_stopped_for_a_job_whose_gates_are_closed_or_that_takes_of_what_bots_have(
    pool: Pool, below: Tenancy, limits: dict[str, float], request_: dict[str, Any]
) -> None:
    share(pool, **limits)
    pool.database.run(lambda c: counters.limit(c, "lock:team-a:tree", 0))
    occupied(pool, resources={"cpu_milli": 100})
    pool.submit(instance="team-a", **request_)
    assign(pool)
    assert below.stop_requests() == 0


def test_only_as_many_as_the_gates_let_through_have_somebody_stopped(pool: Pool, below: Tenancy) -> None:
    below.quota("team-a", minimum=4)
    pool.submit(4, instance="team-b", priority=10)
    bot = pool.bot(capacity=4)
    pool.given(bot)
    pool.submit(4, instance="team-a")
    for _ in range(2):
        assign(pool)
    assert (below.stop_requests(), used(pool)) == (2, 2)


def test_a_job_that_room_is_reserved_for_keeps_its_lock_from_others(pool: Pool, below: Tenancy) -> None:
    bot, work = occupied(pool)
    (job,) = pool.submit(instance="team-a", terms={"locks": ["tree"]})
    assign(pool)
    (rival,) = pool.submit(instance="team-a", terms={"locks": ["tree"]}, priority=-5)
    other = pool.bot("bot-2")
    pool.assigner().run_once()
    assert pool.job(rival).state == "queued"
    assert gates_of(explained(pool, rival))["locks"].open is False
    assert gates_of(explained(pool, job))["locks"].open is True
    (given,) = bot.sync(completed(work, "stopped"))["leases"]
    bot.sync(completed(given))
    pool.assigner().run_once()
    assert [each["job"] for each in other.take()] == [rival]


@pytest.mark.parametrize("end", ["over", "drained", "cancelled", "new session", "placed elsewhere"])
def test_what_was_taken_for_a_job_goes_back_when_its_room_is_given_up(pool: Pool, below: Tenancy, end: str) -> None:
    bot, _ = occupied(pool)
    (job,) = pool.submit(instance="team-a", estimated_cost=3)
    assign(pool)
    assert len(pool.rows(CHARGED)) == 1
    left: tuple[float, float] = (0, 0)
    match end:
        case "over":
            pool.change("UPDATE reservations SET until = now() - interval '1 s'")
        case "drained":
            pool.change("UPDATE bots SET draining = true")
        case "cancelled":
            pool.database.run(lambda c: cancel(c, [job], instances=None, sync=1, actor="test"))
        case "new session":
            pool.restarted(bot)
        case "placed elsewhere":
            # Its rest is over, and nobody has given up the room on the other bot yet.
            pool.change("UPDATE reservations SET until = now() - interval '1 s'")
            pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE state = 'queued'")
            pool.bot("bot-2")
            pool.assigner().run_once()
            assert pool.job(job).state == "leased"
            left = (1, 3)
    pool.upkeep().run_once()
    assert pool.rows("SELECT FROM reservations") == []
    assert (used(pool), used(pool, "cost")) == left


def test_room_is_not_given_up_while_its_job_may_be_about_to_start_elsewhere(pool: Pool, below: Tenancy) -> None:
    occupied(pool)
    pool.submit(instance="team-a")
    assign(pool)
    pool.change("UPDATE reservations SET until = now() - interval '1 s'")
    with pool.database.engine.connect() as other:
        other.execute(text("SELECT FROM jobs WHERE state = 'queued' FOR NO KEY UPDATE"))
        pool.upkeep().run_once()
        assert len(pool.rows(CHARGED)) == len(pool.rows("SELECT FROM reservations")) == 1
        other.rollback()
    pool.upkeep().run_once()
    assert pool.rows(CHARGED) == pool.rows("SELECT FROM reservations") == []


def test_a_large_job_that_comes_back_from_its_rest_is_preempted_for(pool: Pool, below: Tenancy) -> None:
    below.quota("team-a", minimum=4)
    pool.submit(3, instance="team-b", priority=10)
    bot = pool.bot(capacity=4)
    pool.given(bot)
    (job,) = pool.submit(instance="team-a", units=4)
    rest(pool, job, -1)
    assign(pool)
    assert below.stop_requests() == 3


def test_a_job_for_which_nothing_is_counted_any_more_goes_through_its_gates_again(pool: Pool, below: Tenancy) -> None:
    bot, work = occupied(pool)
    (job,) = pool.submit(instance="team-a")
    reserve(pool, job, "bot-1")
    assert bot.sync(completed(work))["leases"] == []
    assert pool.job(job).state == "queued"


def test_a_rate_is_kept_for_starts_and_takes_no_token_for_room_that_is_reserved(pool: Pool, below: Tenancy) -> None:
    pool.database.run(lambda c: rates.set_rate(c, "llm", per_second=0.001, burst=5, actor="test"))
    occupied(pool)
    pool.submit(instance="team-a", terms={"resource_class": "llm"})
    assign(pool)
    assert below.stop_requests() == 0


def test_an_instance_that_gets_a_share_while_room_is_reserved_for_its_job_takes_that_over_later(
    pool: Pool, below: Tenancy
) -> None:
    pool.database.run(lambda c: accounts.remove_account(c, "team-a", actor="test"))
    bot, work = occupied(pool)
    (job,) = pool.submit(instance="team-a")
    assign(pool)
    share(pool, max_concurrent=1)
    adopted: int = pool.database.run(_adopt)
    assert adopted == 0
    assert [each["job"] for each in bot.sync(completed(work, "stopped"))["leases"]] == [job]
    assert not pool.job(job).constrained


def _adopt(connection: Connection) -> int:
    return add_constraints(connection, 100)
