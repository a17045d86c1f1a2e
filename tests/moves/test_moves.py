"""The moves one by one: what each changes, and what its fence refuses."""

import json
import uuid
from itertools import product
from typing import Any

import psycopg
import pytest
from leasehold.errors import BadInput, Conflict, QueueFull
from leasehold.states import EndKind, end_kind

from bots.sync import sessions
from schema.moves import cancel as cancel_moves
from schema.moves.cancel import Cancelled
from schema.moves.end import AttemptEnd, Verdict, end
from schema.moves.sessions import drain, expire
from schema.moves.submit import Submitted, submit, submit_alone, submit_at_once
from schema.postgres.fragments import JOB_RESULT
from schema.postgres.statements import Statement
from schema.validation import MAX_FORGIVEN
from tests.support.pool import Pool, active, completed, synced
from tests.support.requests import PLAIN, REQUESTS, STORED
from tests.support.tenancy import no_share, share


def test_a_job_goes_from_submit_to_result(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    (work,) = pool.given(bot)
    assert (work["job"], work["state"], work["attempt"]) == (job, "active", 1)
    answer = bot.sync(completed(work, exit_code=0, seconds=0.5))
    assert answer["leases"] == []
    row = pool.job(job)
    assert (row.state, row.fence, row.result_fence, row.attempts) == ("succeeded", 1, 1, 1)
    assert pool.history(job) == ["submit", "grant", "acknowledge", "finish"]
    assert pool.row("SELECT in_use FROM bots").in_use == 0
    assert pool.row(f"SELECT {JOB_RESULT} AS result FROM jobs j").result == {"exit_code": 0, "seconds": 0.5}
    placed = pool.row(
        "SELECT l.assigner, l.strategy, e.actor, e.details FROM leases l, job_events e WHERE move = 'grant'"
    )
    assert (placed.assigner, placed.actor, placed.strategy) == ("assigner:test", "assigner:test", "capacity")
    assert (placed.details["strategy"], placed.details["bot"]) == ("capacity", "bot-1")


@pytest.mark.parametrize("asks", [True, False])
def test_a_failed_job_is_retried_after_a_wait_only_if_it_asks_for_it_and_then_fails(pool: Pool, asks: bool) -> None:
    job, bot, work = pool.running(retry_failed=asks, max_attempts=2)
    bot.sync(completed(work, "failed", exit_code=3, reason="exit code 3"))
    row = pool.job(job)
    if asks:
        assert (row.state, row.fence, row.attempts) == ("queued", 2, 1)
        assert row.schedule_after is not None
        pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s'")
        (again,) = pool.given(bot)
        assert again["attempt"] == 2
        bot.sync(completed(again, "failed", exit_code=3, reason="exit code 3"))
        row = pool.job(job)
    assert (row.state, row.reason, row.attempts) == ("failed", "exit code 3", 1 + asks)
    attempts = ["grant", "acknowledge", "retry"] * asks + ["grant", "acknowledge", "finish"]
    assert pool.history(job) == ["submit", *attempts]


def test_a_job_that_asks_for_it_runs_again_later_without_an_attempt_and_not_for_ever(pool: Pool) -> None:
    job, bot, work = pool.running(max_attempts=1, queue_timeout_seconds=60)
    bot.sync(completed(work, "released", exit_code=75, again=600, reason="asks to be run again in 600 s"))
    row = pool.job(job)
    assert (row.state, row.attempts, row.queue_deadline, row.schedule_after) == ("queued", 0, None, row.queued_at)
    assert row.queued_at > pool.row("SELECT now() + interval '590 s' AS at").at
    pool.assigner().run_once()
    assert pool.job(job).state == "queued"
    pool.change("UPDATE jobs SET schedule_after = now(), queued_at = now()")
    (work,) = pool.given(bot)
    assert work["attempt"] == 1
    pool.change(
        "INSERT INTO leases SELECT (jsonb_populate_record(l, jsonb_build_object('fence', -n, 'state', 'cancelled',"
        " 'ended_at', now(), 'report', '{\"again\": 1}'::jsonb))).* FROM leases l CROSS JOIN generate_series(1, 999) n"
        " WHERE l.ended_at IS NULL"
    )
    bot.sync(completed(work, "released", again=1))
    row = pool.job(job)
    assert (row.state, row.reason) == ("dead", "asked 1000 times to be run again")
    pool.change("DELETE FROM leases WHERE fence < 0")


def test_a_bot_says_by_the_policy_of_a_job_when_it_is_tried_again_or_that_it_is_not(pool: Pool) -> None:
    job, bot, work = pool.running(retry_failed=True)
    bot.sync(completed(work, "failed", exit_code=3, retry_in=600.0))
    left = (pool.job(job).schedule_after - pool.row("SELECT now() AS at").at).total_seconds()
    assert left == pytest.approx(600, abs=30)
    pool.change("UPDATE jobs SET schedule_after = NULL")
    (work,) = pool.given(bot)
    bot.sync(completed(work, "failed", exit_code=4, final=False))
    pool.change("UPDATE jobs SET schedule_after = NULL")
    (work,) = pool.given(bot)
    bot.sync(completed(work, "failed", exit_code=4, final=True))
    assert pool.job(job).state == "failed"


@pytest.mark.parametrize("most", [1, 5])
def test_a_job_outlives_as_many_lost_bots_as_it_asks_for(pool: Pool, most: int) -> None:
    (job,) = pool.submit(payload={"command": ["true"], "max_lost": most}, max_attempts=9)
    for nth in range(most):
        assert pool.job(job).state == "queued"
        bot = pool.bot(f"bot-{nth}")
        assert pool.given(bot)
        pool.restarted(bot, capacity=0)
        pool.change("UPDATE bots SET draining = true")
    row = pool.job(job)
    times = {1: "once", 5: "5 times"}[most]
    assert (row.state, row.kills, row.reason) == ("dead", most, f"its bot was lost {times}")
    assert end_kind(row.state, row.reason) is EndKind.LOST


def test_a_limit_of_lost_bots_that_nobody_has_checked_holds_up_no_end(pool: Pool) -> None:
    (job,) = pool.submit(payload={"command": ["true"], "max_lost": "x"})
    bot = pool.bot()
    assert pool.given(bot)
    pool.restarted(bot, capacity=0)
    assert (pool.job(job).state, pool.job(job).kills) == ("queued", 1)


def test_a_job_that_no_bot_can_start_is_dead_after_its_attempts(pool: Pool) -> None:
    job, bot, work = pool.running(max_attempts=2)
    bot.sync(completed(work, "error", reason="no such program"))
    assert pool.job(job).state == "queued"
    pool.change("UPDATE jobs SET schedule_after = NULL")
    (work,) = pool.given(bot)
    bot.sync(completed(work, "error", reason="no such program"))
    row = pool.job(job)
    assert (row.state, row.attempts, row.result_fence) == ("dead", 2, None)
    assert pool.history(job)[-1] == "give_up"


@pytest.mark.parametrize("began", [True, False])
def test_a_job_that_kills_three_bots_is_dead_whether_or_not_they_said_that_it_began(pool: Pool, began: bool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    for _ in range(3):
        pool.assigner().run_once()
        assert len(bot.take() if began else bot.sync()["leases"]) == 1
        bot = pool.restarted(bot)
    row = pool.job(job)
    assert (row.state, row.kills, row.attempts) == ("dead", 3, 3)
    assert row.reason == "its bot was lost three times"


def test_outages_of_a_gateway_do_not_count_against_the_jobs_that_they_stop_but_at_most_ten_times(pool: Pool) -> None:
    """The limit is for a job that cuts its bots off from the network each time."""
    (job,) = pool.submit()
    bot = pool.bot()
    charged: list[tuple[int, int]] = []
    while pool.job(job).state == "queued":
        assert len(pool.given(bot)) == 1
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
        pool.database.run(lambda connection: expire(connection, after=0, limit=500, actor="reaper"))
        bot = pool.restarted(bot, cut_off=True)
        row = pool.job(job)
        charged.append((row.kills, row.attempts))
    assert charged == [(0, 0)] * MAX_FORGIVEN + [(1, 1), (2, 2), (3, 3)]
    assert (row.state, row.reason) == ("dead", "its bot was lost three times")
    assert pool.history(job)[:7] == ["submit", "grant", "acknowledge", "expire", "forgive", "grant", "acknowledge"]
    # The last loss ended the job, so there is nothing to forgive.
    assert not pool.rows("SELECT FROM lost_attempts")


def test_a_lost_attempt_is_forgiven_while_the_job_already_runs_elsewhere(pool: Pool) -> None:
    job, bot, _ = pool.running()
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    pool.database.run(lambda connection: expire(connection, after=0, limit=500, actor="reaper"))
    other = pool.bot("other")
    [work] = pool.given(other)
    assert (pool.job(job).kills, pool.job(job).attempts) == (1, 2)

    # Neither another session of the bot nor a bot that does not say why it was lost has a loss to forgive.
    pool.bot("other-2", dead_session=sessions.digest(bot.session.secret).hex(), cut_off=True)
    assert pool.job(job).kills == 1
    pool.restarted(bot, cut_off=True)
    row = pool.job(job)
    assert (row.state, row.kills, row.attempts, row.fence) == ("running", 0, 1, work["fence"])
    other.sync(completed(work))
    assert pool.job(job).state == "succeeded"
    assert pool.history(job)[-2:] == ["forgive", "finish"]


def test_a_bot_that_was_cut_off_and_comes_back_before_its_session_expires_gives_its_jobs_back(pool: Pool) -> None:
    job, bot, _ = pool.running()
    pool.restarted(bot, cut_off=True)
    row = pool.job(job)
    assert (row.state, row.kills, row.attempts, row.schedule_after) == ("queued", 0, 0, None)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_job_that_cuts_its_bots_off_is_dead_even_if_they_are_back_in_time(pool: Pool, leaves: bool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    for _ in range(MAX_FORGIVEN + 3):
        assert pool.job(job).state == "queued"
        assert len(pool.given(bot)) == 1
        if leaves:
            bot.sync(status="gone")
        bot = pool.restarted(bot, cut_off=True)
    row = pool.job(job)
    assert (row.state, row.kills, row.reason) == ("dead", 3, "its bot was lost three times")


def test_a_loss_is_taken_back_before_the_next_one_is_counted(pool: Pool) -> None:
    job, bot, _ = pool.running()
    for _ in range(2):
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
        pool.database.run(lambda connection: expire(connection, after=0, limit=500, actor="reaper"))
        late, bot = bot, pool.bot("bot-1")
        assert len(pool.given(bot)) == 1
    # The agent of an earlier session comes back while another one, of the same name, runs the job.
    pool.restarted(late, cut_off=True)
    row = pool.job(job)
    assert (row.state, row.kills) == ("queued", 2)


def test_work_that_a_lost_bot_was_never_told_of_costs_no_attempt(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    pool.assigner().run_once()
    pool.bot()
    row = pool.job(job)
    assert (row.state, row.kills, row.attempts, row.fence) == ("queued", 0, 0, 2)


@pytest.mark.parametrize("leaves", [True, False])
def test_released_work_and_that_of_a_leaving_bot_goes_back_uncharged_with_its_age(pool: Pool, leaves: bool) -> None:
    job, bot, work = pool.running()
    queued_at = pool.job(job).queued_at
    if leaves:
        bot.sync(active(work), status="gone")
        assert pool.row("SELECT status, session, in_use FROM bots") == ("gone", None, 0)
        with pytest.raises(Conflict):
            bot.sync()
    else:
        bot.sync(completed(work, "released"), status="draining")
    row = pool.job(job)
    assert (row.state, row.attempts, row.queued_at, row.schedule_after) == ("queued", 0, queued_at, None)


def test_a_bot_that_lost_its_lease_cannot_finish_the_job(pool: Pool) -> None:
    job, bot, work = pool.running()
    newer = pool.restarted(bot)
    with pytest.raises(Conflict) as refused:
        bot.sync(completed(work))
    assert refused.value.code == "session_superseded"
    (again,) = pool.given(newer)
    answer = newer.sync(completed(work), active(again))
    assert [lease["fence"] for lease in answer["leases"]] == [again["fence"]]
    assert pool.job(job).state == "running"


@pytest.mark.parametrize("wrong", ["fence", "bot_id", "bot_epoch"])
def test_an_ending_with_any_part_of_its_fence_wrong_changes_nothing(pool: Pool, wrong: str) -> None:
    job, _, _ = pool.running()
    row = pool.row("SELECT job_id, fence, bot_id, bot_epoch FROM live")
    fence = row._asdict() | {wrong: getattr(row, wrong) + 1}
    ended = pool.database.run(
        lambda connection: end(connection, [AttemptEnd(**fence, verdict=Verdict.SUCCEEDED)], actor="test")
    )
    assert ended == []
    assert pool.job(job).state == "running"
    assert pool.row("SELECT in_use FROM bots").in_use == 1


def test_a_final_job_cannot_be_changed_even_by_hand(pool: Pool) -> None:
    job, bot, work = pool.running()
    bot.sync(completed(work))
    with pytest.raises(psycopg.IntegrityError, match="stays so"):
        pool.change("UPDATE jobs SET state = 'queued', finished_at = NULL")
    assert pool.job(job).state == "succeeded"


def test_a_repeated_sync_gets_the_current_leases_and_is_not_applied_twice(pool: Pool) -> None:
    job, bot, work = pool.running()
    message = bot.message(completed(work, exit_code=0))
    first = synced(bot.sync_service, message)
    (later,) = pool.submit()
    pool.assigner().run_once()
    again = synced(bot.sync_service, message)
    assert [[lease["job"] for lease in json.loads(answer)["leases"]] for answer in (first, again)] == [[], [later]]
    assert pool.history(job).count("finish") == 1
    assert pool.history(later)[-1] == "grant"


def test_an_older_sync_and_one_with_the_wrong_secret_are_refused(pool: Pool) -> None:
    job, bot, work = pool.running()
    older, newer = bot.message(completed(work)), bot.message(active(work))
    synced(bot.sync_service, newer)
    with pytest.raises(Conflict) as refused:
        synced(bot.sync_service, older)
    assert refused.value.code == "stale_seq"
    with pytest.raises(Conflict):
        synced(bot.sync_service, bot.message(completed(work)).model_copy(update={"secret": "guess"}))
    assert pool.job(job).state == "running"


def cancel(pool: Pool, *jobs: str, instances: list[str] | None = None) -> list[Cancelled]:
    return pool.database.run(
        lambda connection: cancel_moves.cancel(connection, jobs, instances=instances, sync=1.0, actor="test")
    )


def test_a_queued_job_is_cancelled_at_once_and_a_foreign_one_is_like_an_absent_one(pool: Pool) -> None:
    (job,) = pool.submit()
    found = cancel(pool, job, str(uuid.uuid4()), instances=["other"])
    assert [one.state for one in found] == [None, None]
    assert pool.job(job).state == "queued"
    assert cancel(pool, job) == [Cancelled(job, "cancelled", changed=True)]
    assert pool.job(job).finished_at is not None


def test_a_running_job_is_cancelled_when_its_bot_confirms(pool: Pool) -> None:
    job, bot, work = pool.running()
    assert cancel(pool, job)[0].state == "cancelling"
    (told,) = bot.sync(active(work))["leases"]
    assert told["state"] == "cancelling"
    assert pool.row("SELECT in_use FROM bots").in_use == 1, "capacity is held until the bot confirms"
    bot.sync(completed(work, "stopped"))
    assert (pool.job(job).state, pool.row("SELECT in_use FROM bots").in_use) == ("cancelled", 0)


def test_a_key_stands_for_one_job_whatever_the_number_of_submits(pool: Pool) -> None:
    first = pool.submit(key="nightly", payload={"command": ["true"]})
    assert pool.submit(key="nightly", payload={"command": ["true"]}) == first
    assert len(set(pool.submit(3, key="twice"))) == 1
    with pytest.raises(Conflict, match="nightly") as refused:
        pool.submit(key="nightly", payload={"command": ["false"]})
    assert refused.value.code == "key_reused"
    assert pool.submit(key="nightly", instance="other") != first
    assert pool.row("SELECT count(*) AS jobs FROM jobs").jobs == 3


def test_submit_works_inside_the_callers_own_transaction_from_sql(pool: Pool) -> None:
    with pool.database.begin() as connection:
        created = connection.execute(
            Statement("SELECT created FROM leasehold.submit(CAST(:jobs AS jsonb))"),
            {"jobs": '[{"command": ["true"], "properties": {"os": ["linux"]}}]'},
        ).scalar_one()
        assert created
        connection.rollback()
    assert pool.rows("SELECT id FROM jobs") == []


def test_a_bot_that_forgets_a_running_lease_has_lost_it(pool: Pool) -> None:
    job, bot, _ = pool.running()
    bot.sync()
    row = pool.job(job)
    assert (row.state, row.attempts, row.kills) == ("queued", 1, 1)


def test_a_bot_that_reports_less_capacity_than_it_uses_keeps_what_it_uses(pool: Pool) -> None:
    pool.submit(3)
    bot = pool.bot(capacity=3)
    works = pool.given(bot)
    bot.sync(*[active(work) for work in works], capacity=1)
    assert pool.row("SELECT capacity, in_use FROM bots")._asdict() == {"capacity": 3, "in_use": 3}
    bot.sync(*[completed(work) for work in works], capacity=1)
    assert pool.row("SELECT capacity, in_use FROM bots")._asdict() == {"capacity": 1, "in_use": 0}


def test_a_drained_bot_is_told_and_gets_no_more_work(pool: Pool) -> None:
    bot = pool.bot()
    pool.database.run(lambda c: drain(c, "bot-1", draining=True, actor="test", reason="disk"))
    (job,) = pool.submit()
    pool.assigner().run_once()
    assert bot.sync(wait=10.0)["drain"] is True
    assert pool.job(job).state == "queued"
    pool.database.run(lambda c: drain(c, "bot-1", draining=False, actor="test", reason="mended"))
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"
    assert [row.action for row in pool.rows("SELECT action FROM audit ORDER BY id")] == ["drain", "undrain"]


# A request that comes alone: the same rows, answers and refusals as among others.


def alone(pool: Pool, request: dict[str, Any]) -> Submitted:
    return pool.database.run_alone(lambda driver: submit_alone(driver, request, actor="test"))


def at_once(pool: Pool, requests: list[dict[str, Any]]) -> list[Submitted]:
    return pool.database.run_alone(lambda driver: submit_at_once(driver, requests, actor="test"))


def among_others(pool: Pool, request: dict[str, Any]) -> Submitted:
    """Submit it with another one."""
    return pool.database.run(lambda connection: submit(connection, [request, PLAIN], actor="test"))[0]


def rows(pool: Pool) -> Any:
    return pool.row(
        "SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM job_payloads) AS payloads, "
        "(SELECT count(*) FROM job_events) AS events, (SELECT count(*) FROM submit_keys) AS keys"
    )


@pytest.mark.parametrize("extra", [{}, {"dedup_key": "d"}], ids=["", "deduplicated"])
def test_requests_at_once_are_all_stored_and_answered_in_order_or_none_is(pool: Pool, extra: dict[str, Any]) -> None:
    requests = [PLAIN | {"key": f"k{number}", "label": f"{number}"} | extra for number in range(3)]
    first = at_once(pool, requests[:2])
    assert [job.created for job in first] == [True, not extra]
    again = at_once(pool, [requests[2], *reversed(requests)])
    assert [job.created for job in again] == [not extra, False, False, False]
    assert [again[0][:2], first[1][:2], first[0][:2]] == [job[:2] for job in again[1:]]
    labels = [row.label for row in pool.rows("SELECT label FROM jobs ORDER BY id")]
    assert labels == (["0"] if extra else ["0", "1", "2"])
    before = rows(pool)
    other = PLAIN | {"key": "new"}
    with pytest.raises(Conflict, match=r"jobs\[2\].key: 'k1' was used before for a different request"):
        at_once(pool, [other, requests[0], requests[1] | {"priority": 1}, requests[2] | {"priority": 1}])
    with pytest.raises(psycopg.Error, match=r"payload\.command"):
        at_once(pool, [other, {"key": "another"}])
    assert rows(pool) == before
    assert at_once(pool, []) == []


@pytest.mark.parametrize("others_first", [True, False])
def test_a_request_alone_and_requests_at_once_make_the_rows_that_they_make_among_others(
    pool: Pool, others_first: bool
) -> None:
    """Each request in an instance of its own, and so with a new queue."""
    pool.change("INSERT INTO cohorts (name, labels) VALUES ('night', '{nightly}')")
    for nth, (name, given) in enumerate(REQUESTS.items()):
        request = given | ({"instance": f"i-{nth}"} if "instance" in given else {})
        shared = "dedup_key" in request
        pair = [request, request | {"payload": {"command": ["another"]}}]
        unshared = [request | {"dedup_key": "other"}] if shared else pair
        others = [among_others(pool, each) for each in unshared] if others_first else []
        both = [] if shared else at_once(pool, pair)
        one = alone(pool, request)
        others = others or [among_others(pool, each) for each in unshared]
        for job, other in [(one, others[0]), *zip(both, others, strict=not shared)]:
            assert (name, job.created) == (name, True)
            assert (name, pool.row(STORED, id=job.public_id)) == (name, pool.row(STORED, id=other.public_id))
            assert pool.row("SELECT public_id FROM jobs WHERE id = :id", id=job.job_id).public_id == job.public_id


def test_requests_join_no_queue_of_other_jobs(pool: Pool) -> None:
    cases = product(({}, {"terms": {"job_class": "random"}}), ({}, {"units": 2}), (False, True))
    for nth, (there, wanted, managed) in enumerate(cases):
        instance = {"instance": f"i-{nth}"}
        alone(pool, PLAIN | instance | there)
        if managed:
            share(pool, f"i-{nth}", weight=1.0)
        request = PLAIN | instance | wanted
        made = [alone(pool, request), *at_once(pool, [request] * 2)]
        other = pool.row(STORED, id=among_others(pool, request).public_id)
        assert [pool.row(STORED, id=job.public_id) for job in made] == [other] * 3, (there, wanted, managed)


def test_requests_at_once_get_the_jobs_of_their_known_keys_in_their_order(pool: Pool) -> None:
    alone(pool, PLAIN)
    requests = [PLAIN | {"key": key, "payload": {"command": [key]}} for key in ("d", "b", "c", "a")]
    unkeyed = PLAIN | {"payload": {"command": ["unkeyed"]}}
    first = at_once(pool, [requests[0], unkeyed, requests[1]])
    assert [job.created for job in first] == [True, True, True]
    again = at_once(pool, [*requests, requests[2], unkeyed])
    assert [job.created for job in again] == [False, False, True, True, False, True]
    assert [again[0][:2], again[1][:2], again[4][:2]] == [first[0][:2], first[2][:2], again[2][:2]]
    commands = [
        pool.row("SELECT payload FROM job_payloads WHERE job_id = :id", id=job.job_id).payload["command"]
        for job in again
    ]
    assert commands == [["d"], ["b"], ["c"], ["a"], ["c"], ["unkeyed"]]
    assert rows(pool) == (7, 7, 7, 4)
    assert alone(pool, requests[3]) == again[3]._replace(created=False), "the key has the digest of the whole request"


def test_limits_and_malformed_payloads_are_seen_in_requests_at_once(pool: Pool) -> None:
    alone(pool, PLAIN)
    pool.change("INSERT INTO queue_limits (instance, max_queued) SELECT id, 2 FROM instances")
    with pytest.raises(QueueFull):
        at_once(pool, [PLAIN, PLAIN])
    pool.change("DELETE FROM queue_limits")
    pool.change("INSERT INTO ceilings (max_timeout) VALUES (5)")
    with pytest.raises(BadInput, match=r"jobs\.0\.timeout_seconds"):
        at_once(pool, [PLAIN | {"timeout_seconds": 6.0}] * 2)
    pool.change("DELETE FROM ceilings")
    for command in (None, "true"):
        with pytest.raises(psycopg.Error, match=r"payload\.command"):
            at_once(pool, [PLAIN, PLAIN | {"payload": {"command": command}}])
    assert rows(pool).jobs == 1


def test_jobs_of_an_instance_get_constraints_while_it_is_managed(pool: Pool) -> None:
    alone(pool, PLAIN)
    share(pool, "default", weight=1.0)
    constrained = [alone(pool, PLAIN).job_id for _ in range(2)]
    no_share(pool, "default")
    plain = [alone(pool, PLAIN).job_id for _ in range(2)]
    found = pool.rows("SELECT id, constrained FROM jobs WHERE id = ANY (:ids)", ids=constrained + plain)
    assert {row.id: row.constrained for row in found} == dict.fromkeys(constrained, True) | dict.fromkeys(plain, False)


@pytest.mark.parametrize("extra", [{}, {"dedup_key": "d"}], ids=["", "deduplicated"])
def test_a_key_alone_makes_one_job_and_refuses_another_request(pool: Pool, extra: dict[str, Any]) -> None:
    request = PLAIN | {"key": "k"} | extra
    first, again = alone(pool, request), alone(pool, request)
    assert (again.job_id, again.public_id) == (first.job_id, first.public_id)
    assert (first.created, again.created) == (True, False)
    assert pool.database.run(lambda c: submit(c, [request, PLAIN], actor="test"))[0] == again
    before = rows(pool)
    with pytest.raises(Conflict, match=r"jobs\[0\].key: 'k' was used before for a different request"):
        alone(pool, request | {"priority": 1})
    assert rows(pool) == before


def test_a_label_that_is_full_refuses_a_request_alone(pool: Pool) -> None:
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('nightly', 1)")
    alone(pool, PLAIN | {"label": "nightly"})
    before = rows(pool)
    with pytest.raises(QueueFull, match="label 'nightly' may have 1 queued jobs, held ones included: no room for 1"):
        alone(pool, PLAIN | {"label": "nightly"})
    assert rows(pool) == before
    assert alone(pool, PLAIN).created


def test_a_malformed_request_alone_is_refused_by_the_database(pool: Pool) -> None:
    said = "a request needs payload.command, an array, and its properties are an object"
    for request, reason in (
        *((bad, said) for bad in ({}, {"payload": {"command": "true"}})),
        *((PLAIN | {"properties": bad}, said) for bad in (None, ["os"])),
        (PLAIN | {"priority": 1001}, "jobs_priority_range"),
    ):
        with pytest.raises(psycopg.Error, match=reason):
            alone(pool, request)
    assert rows(pool) == (0, 0, 0, 0)


def test_ids_of_one_moment_lie_together(pool: Pool) -> None:
    before = pool.row("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").ms
    made = alone(pool, PLAIN).public_id
    after = pool.row("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").ms
    assert before <= int(made.replace("-", "")[:12], 16) <= after
    assert made[14] == "7"
