"""Drains of bots and instances: nothing new starts, what runs may end, and what is left at the deadline goes back."""

from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound

from schema.moves.cancel import cancel
from schema.moves.sessions import drain
from schema.moves.waiting.timeouts import stop_drained
from schema.tenancy import drains
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, at_service_of, call, outcome

OVER = "UPDATE bots SET drain_deadline = now() - interval '1 s' WHERE drain_deadline IS NOT NULL"
INSTANCE_OVER = "UPDATE instances SET drain_deadline = now() - interval '1 s' WHERE drain_deadline IS NOT NULL"


def drain_bot(pool: Pool, name: str = "bot-1", *, deadline: float | None = None, draining: bool = True) -> None:
    pool.database.run(lambda c: drain(c, name, draining=draining, actor="test", reason="disk", deadline=deadline))


def drain_instance(pool: Pool, name: str, *, deadline: float | None = None, draining: bool = True) -> None:
    pool.database.run(lambda c: drains.drain_instance(c, name, draining=draining, actor="test", deadline=deadline))


def leases_of(pool: Pool, instance: str) -> int | None:
    return pool.database.run(lambda c: drains.instance_leases(c, instance))


def stop(pool: Pool) -> int:
    return pool.database.run(lambda c: stop_drained(c, 500, sync=0.5, actor="upkeep"))


def stopped(work: dict[str, Any]) -> Any:
    return completed(work, "stopped")


def test_what_a_drained_bot_runs_at_its_deadline_goes_back_to_the_queue_uncharged(pool: Pool) -> None:
    job, bot, work = pool.running()
    drain_bot(pool, deadline=60)
    pool.upkeep().run_once()
    assert bot.sync(active(work))["leases"][0]["state"] == "active"
    pool.change(OVER)
    pool.upkeep().run_once()
    assert bot.sync(active(work))["leases"][0]["state"] == "cancelling"
    bot.sync(stopped(work))
    row = pool.job(job)
    assert (row.state, row.attempts, row.kills, row.evictions) == ("queued", 0, 0, 0)
    assert pool.history(job)[-2:] == ["drain", "requeue"]
    assert pool.row("SELECT stop_reason FROM leases").stop_reason == "drain"
    other = pool.bot("bot-2")
    pool.assigner().run_once()
    assert [lease["job"] for lease in other.take()] == [job]


def test_a_drain_without_a_deadline_stops_nothing_and_an_undrain_forgets_the_deadline(pool: Pool) -> None:
    _, bot, work = pool.running()
    drain_bot(pool)
    assert stop(pool) == 0
    drain_bot(pool, deadline=0)
    drain_bot(pool, draining=False)
    assert stop(pool) == 0
    assert pool.row("SELECT drain_deadline FROM bots").drain_deadline is None
    bot.sync(completed(work))
    assert [row.details for row in pool.rows("SELECT details FROM audit ORDER BY id")] == [
        {"reason": "disk"},
        {"reason": "disk", "deadline": 0},
        {"reason": "disk"},
    ]


def test_a_lease_that_its_bot_has_not_taken_up_is_stopped_at_the_deadline_too(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    pool.assigner().run_once()
    drain_bot(pool, deadline=0)
    assert stop(pool) == 1
    assert stop(pool) == 0
    bot.sync()
    assert (pool.job(job).state, pool.job(job).attempts) == ("queued", 0)


def test_a_drained_instance_starts_nothing_and_the_others_go_on(pool: Pool) -> None:
    running, bot, work = pool.running(instance="ci")
    (waiting,) = pool.submit(instance="ci")
    (other,) = pool.submit(instance="web")
    drain_instance(pool, "ci")
    second = pool.bot("bot-2", capacity=3)
    pool.assigner().run_once()
    assert [lease["job"] for lease in second.take()] == [other]
    assert pool.job(waiting).state == "queued"
    assert leases_of(pool, "ci") == 1
    bot.sync(completed(work))
    assert pool.job(running).state == "succeeded"
    assert pool.job(waiting).state == "queued"
    assert leases_of(pool, "ci") == 0
    drain_instance(pool, "ci", draining=False)
    pool.assigner().run_once()
    assert pool.job(waiting).state == "leased"
    assert leases_of(pool, "ci") is None
    assert [row.action for row in pool.rows("SELECT action FROM audit ORDER BY id")] == [
        "instance.drain",
        "instance.undrain",
    ]


def test_what_a_drained_instance_runs_at_its_deadline_goes_back_to_the_queue(pool: Pool) -> None:
    job, bot, work = pool.running(instance="ci")
    pool.submit(instance="web")
    drain_instance(pool, "ci", deadline=60)
    assert stop(pool) == 0
    pool.change(INSTANCE_OVER)
    pool.upkeep().run_once()
    bot.sync(stopped(work))
    assert (pool.job(job).state, pool.job(job).attempts) == ("queued", 0)
    assert leases_of(pool, "ci") == 0
    pool.assigner().run_once()
    assert [row.name for row in pool.rows("SELECT i.name FROM live l JOIN instances i ON i.id = l.instance")] == ["web"]


def test_an_unknown_name_and_a_senseless_deadline_are_refused(pool: Pool) -> None:
    with pytest.raises(NotFound, match="no instance 'nowhere'"):
        drain_instance(pool, "nowhere")
    with pytest.raises(NotFound, match="no instance 'nowhere'"):
        leases_of(pool, "nowhere")
    for deadline, draining in ((-1.0, True), (float("nan"), True), (1e9, True), (1.0, False)):
        with pytest.raises(BadInput, match="deadline"):
            drains.check_deadline("deadline", deadline, draining=draining)
    assert pool.rows("SELECT * FROM audit") == []


def test_whoever_waits_for_an_instance_waits_for_grants_from_before_the_drain(pool: Pool, race: Race) -> None:
    pool.submit(instance="ci")
    pool.bot()
    with race.first() as ahead:
        ahead.assigner().run_once()
        drain_instance(pool, "ci")
        waits = race.second(lambda: leases_of(pool, "ci"), behind=ahead)
        ahead.commit()
        assert outcome(waits) == 1


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "rolled back"])
def test_a_sync_behind_a_drain_gets_no_work_unless_it_is_undone(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = pool.running()
    (following,) = pool.submit()
    message = bot.message(completed(work))
    assert (
        b'"drain":true'
        in race.in_turn(
            lambda ahead: ahead.database.run(lambda c: drain(c, "bot-1", draining=True, actor="test", reason="")),
            lambda: call(bot, message),
            commit=commit,
        )
    ) is commit
    assert pool.job(job).state == "succeeded"
    assert pool.job(following).state == ("queued" if commit else "leased")


def test_a_drain_behind_a_sync_leaves_the_bot_what_it_was_given_until_the_deadline(pool: Pool, race: Race) -> None:
    _, bot, work = pool.running()
    (following,) = pool.submit()
    race.in_turn(
        lambda ahead: call(at_service_of(ahead, bot), bot.message(completed(work))), lambda: drain_bot(pool, deadline=0)
    )
    assert pool.job(following).state == "leased"
    assert stop(pool) == 1
    bot.sync()
    assert bot.sync()["leases"] == []
    assert pool.job(following).state == "queued"


def test_a_stop_for_a_drain_passes_by_a_job_that_is_about_to_finish(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running()
    drain_bot(pool, deadline=0)
    with race.first() as ahead:
        call(at_service_of(ahead, bot), bot.message(completed(work)))
        assert race.unhindered(lambda: stop(pool), by=ahead) == 0
        ahead.commit()
    assert stop(pool) == 0
    assert pool.job(job).state == "succeeded"


def test_a_cancel_behind_the_stop_of_a_drain_ends_the_job(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running()
    drain_bot(pool, deadline=0)
    with race.first() as ahead:
        assert stop(ahead) == 1
        cancelled = race.second(
            lambda: pool.database.run(lambda c: cancel(c, [job], instances=None, sync=0.5, actor="test")),
            behind=ahead,
        )
        ahead.commit()
        assert [each.state for each in outcome(cancelled)] == ["cancelling"]
    bot.sync(stopped(work))
    assert pool.job(job).state == "cancelled"
    assert pool.history(job)[-3:] == ["drain", "cancel", "confirm_cancel"]
