"""Two at once on one row: who waits, who wins, and what every table holds afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
from leasehold.errors import Conflict

from bots.protocol import OutputReport
from schema.moves.cancel import Cancelled
from schema.moves.grant import GRANT, Placement, grant
from schema.moves.waiting.hold import HoldResult
from schema.moves.waiting.priority import ManyPrioritised
from schema.postgres.statements import Statement
from tests.support.pool import Pool, active, completed
from tests.support.race import (
    FINISHED,
    LOST,
    Race,
    Undecided,
    ask_stop,
    at_service_of,
    call,
    cancel,
    counted_state,
    drain,
    expire,
    offered,
    outcome,
    park,
    prioritise,
    prioritise_where,
)
from tests.support.sync import plain

EXPIRED = "UPDATE bots SET expires_at = now() - interval '1 s'"
FREE = "SELECT state FROM jobs WHERE public_id = CAST(:id AS uuid) FOR NO KEY UPDATE NOWAIT"
OVERDUE = "UPDATE leases SET due_at = now() - interval '1 s'"


@pytest.mark.parametrize("report", [active, completed])
def test_a_reaper_passes_over_a_bot_that_is_just_calling(pool: Pool, race: Race, report: Any) -> None:
    job, bot, work = pool.running()
    pool.change(EXPIRED)
    assert race.side_by_side(lambda first: at_service_of(first, bot).sync(report(work)), lambda: expire(pool)) == []
    assert expire(pool) == [], "the call renewed the session"
    found = counted_state(pool, job)
    assert found == FINISHED if report is completed else found["job"] == ("running", 1, None)


def test_whatever_comes_while_the_bot_is_reaped_is_refused(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running()
    session = bot.session
    named = {"bot": session.bot, "epoch": session.epoch, "secret": session.secret}
    saved = OutputReport(**named, job=work["job"], fence=work["fence"], output=[], checkpoint="1")
    report = completed(work, result="1").model_copy(update={"checkpoint": "1"})
    pool.change(EXPIRED)
    with race.first() as first:
        assert [ended.state for ended in expire(first)] == ["queued"]
        late = [
            race.second(lambda: bot.sync_service.output(saved), behind=first),
            race.second(lambda: bot.sync(report), behind=first),
        ]
        first.commit()
        for each in late:
            with pytest.raises(Conflict) as refused:
                outcome(each)
            assert refused.value.code == "session_over"
    assert counted_state(pool, job) == LOST
    assert pool.rows("SELECT FROM job_checkpoints UNION ALL SELECT FROM job_results") == []


def test_a_reaper_that_gives_up_leaves_the_finish_its_way(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running()
    pool.change(EXPIRED)
    assert race.in_turn(expire, lambda: bot.sync(completed(work)), commit=False)["leases"] == []
    assert counted_state(pool, job) == FINISHED


def test_of_two_reapers_one_takes_the_bot_and_the_other_passes_on(pool: Pool, race: Race) -> None:
    job, _, _ = pool.running()
    pool.change(EXPIRED)
    with race.first() as first:
        assert len(expire(first)) == 1
        assert race.unhindered(lambda: expire(pool), by=first) == []
        first.commit()
    assert expire(pool) == []
    assert counted_state(pool, job) == LOST


@pytest.mark.parametrize(
    ("verdict", "state", "lease", "last"),
    [
        ("succeeded", ("succeeded", 1, 1), "completed", "finish"),
        ("stopped", ("cancelled", 2, None), "cancelled", "confirm_cancel"),
        ("error", ("cancelled", 2, None), "cancelled", "confirm_cancel"),
        ("released", ("cancelled", 2, None), "cancelled", "confirm_cancel"),
    ],
)
def test_a_bot_that_ends_a_job_while_it_is_cancelled_waits_and_its_word_counts(
    pool: Pool, race: Race, verdict: str, state: tuple[str, int, int | None], lease: str, last: str
) -> None:
    job, bot, work = pool.running()
    with race.first() as first:
        assert cancel(first, job) == [Cancelled(job, "cancelling", changed=True)]
        finish = race.second(lambda: bot.sync(completed(work, verdict)), behind=first)
        first.commit()
        outcome(finish)
    found = counted_state(pool, job)
    assert (found["job"], found["leases"], found["last"]) == (state, [(1, lease)], last)
    assert (found["attempts"], found["in_use"]) == ((1, 0), [0])


@pytest.mark.parametrize("commit", [True, False])
def test_a_cancel_waits_for_the_finish_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = pool.running()
    (found,) = race.in_turn(
        lambda first: at_service_of(first, bot).sync(completed(work)), lambda: cancel(pool, job), commit=commit
    )
    if commit:
        assert found == Cancelled(job, "succeeded", changed=False)
        assert counted_state(pool, job) == FINISHED
    else:
        assert found == Cancelled(job, "cancelling", changed=True)
        assert counted_state(pool, job)["leases"] == [(1, "cancelling")]


#: What becomes of a job while an assigner looks for one → its state afterwards, if that is committed.
CHANGES: dict[str, tuple[Callable[[Pool, str], object], str]] = {
    "cancelled": (cancel, "cancelled"),
    "held": (park, "parked"),
    "prioritised": (lambda first, job: prioritise(first, -1, job), "leased"),
    "joined": (lambda first, _: first.submit(dedup_key="nightly", priority=-5), "leased"),
}


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(("change", "state"), CHANGES.values(), ids=CHANGES)
def test_an_assigner_passes_over_a_job_that_is_being_changed(
    pool: Pool, race: Race, change: Callable[[Pool, str], object], state: str, commit: bool
) -> None:
    (job,) = pool.submit(dedup_key="nightly")
    pool.bot()
    race.side_by_side(lambda first: change(first, job), pool.assigner().run_once, commit=commit)
    assert pool.job(job).state in ("queued", state)
    pool.assigner().run_once()
    assert pool.job(job).state == (state if commit else "leased")
    assert counted_state(pool, job)["in_use"] == [0 if commit and state != "leased" else 1]


@pytest.mark.parametrize("commit", [True, False])
def test_a_cancel_waits_for_the_grant_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    (found,) = race.in_turn(lambda first: first.assigner().run_once(), lambda: cancel(pool, job), commit=commit)
    assert found == Cancelled(job, "cancelling" if commit else "cancelled", changed=True)
    assert counted_state(pool, job)["leases"] == ([(1, "cancelling")] if commit else [])
    assert bot.sync()["leases"] == [], "a bot that never had it has nothing to stop"
    assert counted_state(pool, job)["job"][0] == "cancelled"
    assert counted_state(pool, job)["in_use"] == [0]


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("what", ["hold", "priority", "drain"])
def test_a_change_behind_a_grant_waits_and_leaves_the_lease(pool: Pool, race: Race, what: str, commit: bool) -> None:
    (job,) = pool.submit(instance="ci")
    bot = pool.bot()
    late: Callable[[], object] = {
        "hold": lambda: park(pool, job),
        "priority": lambda: prioritise_where(pool, -1, instances=["ci"]),
        "drain": lambda: drain(pool),
    }[what]
    found = race.in_turn(lambda first: first.assigner().run_once(), late, commit=commit)
    row = pool.job(job)
    match what:
        case "hold":
            assert found == [HoldResult(job, "leased" if commit else "parked", changed=not commit)]
        case "priority":
            assert found == ManyPrioritised(0 if commit else 1, more=False)
            assert (row.state, row.priority) == (("leased", 0) if commit else ("queued", -1))
        case _:
            assert pool.row("SELECT draining, free FROM bots") == (True, False)
    assert counted_state(pool, job)["in_use"] == [1 if commit else 0]
    assert [work["job"] for work in bot.take()] == ([job] if commit else [])


@pytest.mark.parametrize("commit", [True, False])
def test_an_assigner_passes_over_a_bot_that_is_being_drained(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    pool.bot()
    with race.first() as first:
        drain(first)
        race.unhindered(pool.assigner().run_once, by=first)
        assert pool.job(job).schedule_after is None, "a race that was lost is no reason to wait"
        first.decide(commit)
    pool.assigner().run_once()
    assert pool.job(job).state == ("queued" if commit else "leased")


def test_a_grant_leaves_out_a_bot_that_changed_meanwhile(
    pool: Pool, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot change a version of the row that it does not see: the bot would have a lease without using a unit."""
    statement = GRANT[False].text
    gate = "gate AS MATERIALIZED (SELECT pg_advisory_xact_lock_shared(7))"
    rooms = "(SELECT CAST(:rooms AS bigint[]) FROM gate)"
    waiting = statement.replace("WITH ", f"WITH {gate}, ", 1).replace("CAST(:rooms AS bigint[])", rooms)
    (job,) = pool.submit()
    pool.bot()
    chosen = [Placement(pool.job(job).id, pool.row("SELECT id FROM bots").id, {})]
    with race.first() as first:
        first.rows("SELECT pg_advisory_xact_lock(7)")
        with monkeypatch.context() as patch:
            patch.setitem(GRANT, False, Statement(waiting))
            late = race.second(
                lambda: pool.database.run(lambda c: grant(c, chosen, assigner="a", strategy="s", ack=1.0)),
                behind=first,
            )
            pool.change("UPDATE bots SET sync_seq = sync_seq + 1")
            first.commit()
            assert outcome(late) == []
    assert (pool.job(job).state, pool.row("SELECT in_use FROM bots").in_use) == ("queued", 0)
    pool.assigner().run_once()
    assert (pool.job(job).state, pool.row("SELECT in_use FROM bots").in_use) == ("leased", 1)


@pytest.mark.parametrize("commit", [True, False])
def test_a_lease_is_acknowledged_or_asked_to_stop_but_not_both(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = offered(pool)
    pool.change(OVERDUE)
    assert (
        race.side_by_side(
            lambda first: at_service_of(first, bot).sync(active(work)), lambda: ask_stop(pool), commit=commit
        )
        == 0
    )
    assert ask_stop(pool) == (0 if commit else 1)
    found = counted_state(pool, job)
    assert found["job"] == ("running" if commit else "leased", 1, None)
    assert found["leases"] == [(1, "active" if commit else "cancelling")]


@pytest.mark.parametrize("commit", [True, False])
def test_a_bot_that_acknowledges_what_it_is_asked_to_stop_is_told_to_stop(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = offered(pool)
    pool.change(OVERDUE)
    with race.first() as first:
        assert ask_stop(first) == 1
        late = race.second(lambda: bot.sync(active(work)), behind=first)
        first.decide(commit)
        (told,) = outcome(late)["leases"]
    assert told["state"] == ("cancelling" if commit else "active")
    assert pool.job(job).state == ("leased" if commit else "running")


def test_a_job_that_finishes_while_its_timeout_is_noticed_keeps_its_result(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running()
    pool.change(OVERDUE)
    with race.first() as first:
        assert ask_stop(first, from_state="active", reason="timeout") == 1
        finish = race.second(lambda: bot.sync(completed(work)), behind=first)
        first.commit()
        outcome(finish)
    assert counted_state(pool, job) == FINISHED


@pytest.mark.parametrize("commit", [True, False])
def test_two_calls_of_one_number_have_one_effect_and_name_the_same_leases(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = pool.running()
    pool.submit(3)
    message = bot.message(completed(work, exit_code=0))
    with race.first() as first:
        mine = call(at_service_of(first, bot), message)
        late = race.second(lambda: call(bot, message), behind=first)
        first.decide(commit)
        theirs = outcome(late)
    if commit:
        assert plain(theirs) == plain(mine)
    assert plain(call(bot, message)) == plain(theirs)
    assert counted_state(pool, job) == FINISHED | {"in_use": [1]}, "one job was fetched in the place of the other"
    assert pool.row("SELECT count(*) AS live FROM live").live == 1


def test_a_bot_that_came_back_as_another_is_not_given_what_it_was_chosen_for(pool: Pool) -> None:
    """The choice is made from what was read before; between the two the bot opens a new session."""
    (needs_gpu,) = pool.submit(properties={"gpu": "a100"})
    (other,) = pool.submit(instance="other")
    pool.bot(properties={"gpu": "a100"}, capacity=2)
    chosen = [Placement(pool.job(job).id, pool.row("SELECT id FROM bots").id, {}) for job in (needs_gpu, other)]
    pool.bot(properties={}, instance="default", capacity=2)
    granted = pool.database.run(lambda c: grant(c, chosen, assigner="assigner:test", strategy="capacity", ack=1.0))
    assert granted == []
    assert [pool.job(job).state for job in (needs_gpu, other)] == ["queued", "queued"]
    assert pool.row("SELECT in_use FROM bots").in_use == 0


@pytest.mark.parametrize("fields", [{}, {"status": "gone"}])
def test_a_call_that_does_several_things_locks_jobs_in_order(pool: Pool, race: Race, fields: dict[str, Any]) -> None:
    """It acknowledges the younger job and ends the older one; a cancel of both would meet it half way."""
    older, younger = pool.submit(2)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    works = {work["job"]: work for work in bot.sync()["leases"]}
    bot.sync(active(works[older]))
    with race.first() as first:
        cancel(first, older)
        late = race.second(lambda: bot.sync(completed(works[older]), active(works[younger]), **fields), behind=first)
        assert pool.row(FREE, id=younger).state == "leased"
        first.commit()
        outcome(late)
    assert pool.job(older).state == "succeeded"
    assert pool.job(younger).state == ("queued" if fields else "running")


# A shared job and two at once: one who joins it, ends it or leaves it, while another one does.


DEDUP: dict[str, Any] = {"dedup_key": "nightly"}
STATES = "SELECT state FROM jobs ORDER BY id"


def states(pool: Pool) -> list[str]:
    return [row.state for row in pool.rows(STATES)]


def followers(pool: Pool) -> list[str]:
    return [str(row.public_id) for row in pool.rows("SELECT public_id FROM job_followers")]


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("end", ["finish", "cancel", "submit"])
def test_a_duplicate_waits_for_what_was_ahead_of_it(pool: Pool, race: Race, end: str, commit: bool) -> None:
    mine: list[str] = []
    if end == "finish":
        _, bot, work = pool.running(**DEDUP)
        ahead: Callable[[Undecided], object] = lambda first: at_service_of(first, bot).sync(completed(work))  # noqa: E731
    elif end == "cancel":
        (job,) = pool.submit(**DEDUP)
        ahead = lambda first: cancel(first, job)  # noqa: E731
    else:
        ahead = lambda first: mine.extend(first.submit(**DEDUP))  # noqa: E731
    theirs = race.in_turn(ahead, lambda: pool.submit(**DEDUP), commit=commit)
    if end == "submit":
        assert [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs")] == (mine if commit else theirs)
        assert followers(pool) == (theirs if commit else [])
    else:
        over = {"finish": ("succeeded", "running"), "cancel": ("cancelled", "queued")}[end]
        assert states(pool) == ([over[0], "queued"] if commit else [over[1]])
        assert followers(pool) == ([] if commit else theirs)


@pytest.mark.parametrize("commit", [True, False])
def test_a_finish_waits_for_the_duplicate_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    _, bot, work = pool.running(**DEDUP)
    message = bot.message(completed(work))
    with race.first() as first:
        mine = first.submit(**DEDUP)
        late = race.second(lambda: call(bot, message), behind=first)
        first.decide(commit)
        outcome(late)
    assert states(pool) == ["succeeded"]
    assert followers(pool) == (mine if commit else [])


@pytest.mark.parametrize("commit", [True, False])
def test_a_cancel_waits_for_the_duplicate_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit(**DEDUP)
    assert race.in_turn(lambda first: first.submit(**DEDUP), lambda: cancel(pool, job), commit=commit) == [
        Cancelled(job, "cancelled", changed=True)
    ]
    assert states(pool) == ["queued" if commit else "cancelled"]
    assert pool.history(job)[-1] == ("withdraw" if commit else "cancel")


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("state", ["queued", "running"])
def test_of_two_who_leave_at_once_the_last_one_ends_the_job(pool: Pool, race: Race, state: str, commit: bool) -> None:
    job = pool.submit(**DEDUP)[0] if state == "queued" else pool.running(**DEDUP)[0]
    (joined,) = pool.submit(**DEDUP)
    with race.first() as first:
        assert cancel(first, job) == [Cancelled(job, "cancelled", changed=True)]
        late = race.second(lambda: cancel(pool, joined), behind=first)
        first.decide(commit)
        (found,) = outcome(late)
    end = "cancelled" if state == "queued" or not commit else "cancelling"
    assert found == Cancelled(joined, end, changed=True)
    assert states(pool) == [end if commit else state]
    assert pool.history(job).count("withdraw") == 1


def test_two_batches_that_join_the_same_jobs_in_another_order_do_not_block_each_other(pool: Pool, race: Race) -> None:
    pool.submit(dedup_key="a")
    with race.first() as first:
        first.submit(dedup_key="b")
        late = race.second(lambda: [*pool.submit(dedup_key="b"), *pool.submit(dedup_key="a")], behind=first)
        first.submit(dedup_key="a")
        first.commit()
        assert len(outcome(late)) == 2
    assert states(pool) == ["queued", "queued"]


def test_starts_follow_the_order_whatever_the_number_of_assigners(pool: Pool, race: Race) -> None:
    """Where there is less room than a batch, one picks at a time; two would give the unit to a less urgent job."""
    jobs = [pool.submit(priority=nth)[0] for nth in reversed(range(5))][::-1]
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
    for nth, job in enumerate(jobs):
        race.side_by_side(lambda first: first.assigner().run_once(), pool.assigner().run_once)
        (work,) = bot.take()
        assert work["job"] == job, f"round {nth}"
        bot.sync(completed(work))


@pytest.mark.parametrize("commit", [True, False])
def test_the_last_unit_is_given_once_and_left_to_the_next_by_who_gives_up(pool: Pool, race: Race, commit: bool) -> None:
    jobs = pool.submit(2)
    pool.bot()
    race.side_by_side(lambda first: first.assigner(batch=1).run_once(), pool.assigner().run_once, commit=commit)
    assert pool.row("SELECT in_use FROM bots").in_use == commit, "the other one found nothing to do"
    pool.assigner().run_once()
    assert [pool.job(job).state for job in jobs] == ["leased", "queued"]
    assert pool.row("SELECT in_use, capacity FROM bots") == (1, 1)


def test_where_there_is_room_for_a_batch_two_assigners_place_at_once(pool: Pool, race: Race) -> None:
    pool.submit(8)
    for nth in range(8):
        pool.bot(f"bot-{nth}", capacity=2)
    race.side_by_side(lambda first: first.assigner(batch=4).run_once(), pool.assigner(batch=4).run_once)
    assert pool.row("SELECT count(*) AS n FROM live").n == 8
