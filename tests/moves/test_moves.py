"""The moves one by one: what each changes, and what its fence refuses."""

import json
import uuid
from typing import Any

import psycopg
import pytest
from leasehold.errors import BadInput, Conflict, QueueFull

from bots.sync import sessions
from schema.accounting.accounts import Account, put_account, remove_account
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


def test_a_failed_job_stays_failed_and_is_not_tried_again(pool: Pool) -> None:
    job, bot, work = pool.running()

    bot.sync(completed(work, "failed", exit_code=3, reason="exit code 3"))

    row = pool.job(job)
    assert (row.state, row.reason, row.attempts) == ("failed", "exit code 3", 1)


def test_a_failed_job_that_asks_for_it_is_retried_with_a_growing_wait_and_then_fails(pool: Pool) -> None:
    job, bot, work = pool.running(retry_failed=True, max_attempts=2)

    bot.sync(completed(work, "failed", exit_code=3, reason="exit code 3"))
    waiting = pool.job(job)
    assert (waiting.state, waiting.fence, waiting.attempts) == ("queued", 2, 1)
    assert waiting.schedule_after is not None

    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s'")
    (again,) = pool.given(bot)
    assert again["attempt"] == 2
    bot.sync(completed(again, "failed", exit_code=3))
    assert pool.job(job).state == "failed"
    assert pool.history(job) == ["submit", "grant", "acknowledge", "retry", "grant", "acknowledge", "finish"]


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


def test_a_job_that_kills_three_bots_is_dead(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    for _ in range(3):
        pool.assigner().run_once()
        assert len(bot.take()) == 1
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
def test_a_job_that_cuts_its_bots_off_is_dead_even_if_they_are_back_before_their_sessions_expire(
    pool: Pool, leaves: bool
) -> None:
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


def test_work_that_a_bot_was_told_of_counts_against_the_job_if_the_bot_is_lost_before_it_says_more(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    for _ in range(3):
        pool.assigner().run_once()
        assert bot.sync()["leases"][0]["state"] == "pending"
        bot = pool.restarted(bot)
    row = pool.job(job)
    assert (row.state, row.kills) == ("dead", 3)


def test_released_work_is_queued_again_uncharged_and_keeps_its_age(pool: Pool) -> None:
    job, bot, work = pool.running()
    queued_at = pool.job(job).queued_at

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


def test_an_older_sync_is_refused(pool: Pool) -> None:
    job, bot, work = pool.running()
    older, newer = bot.message(completed(work)), bot.message(active(work))
    synced(bot.sync_service, newer)

    with pytest.raises(Conflict) as refused:
        synced(bot.sync_service, older)

    assert refused.value.code == "stale_seq"
    assert pool.job(job).state == "running"


def test_a_sync_with_the_wrong_secret_is_refused(pool: Pool) -> None:
    bot = pool.bot()
    with pytest.raises(Conflict):
        synced(bot.sync_service, bot.message().model_copy(update={"secret": "guess"}))


def cancel(pool: Pool, *jobs: str, instances: list[str] | None = None) -> list[Cancelled]:
    return pool.database.run(
        lambda connection: cancel_moves.cancel(connection, jobs, instances=instances, sync=1.0, actor="test")
    )


def test_a_queued_job_is_cancelled_at_once(pool: Pool) -> None:
    (job,) = pool.submit()
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


def test_a_job_that_finishes_before_it_hears_of_the_cancellation_keeps_its_result(pool: Pool) -> None:
    job, bot, work = pool.running()
    cancel(pool, job)
    bot.sync(completed(work, exit_code=0))
    row = pool.job(job)
    assert (row.state, row.result_fence) == ("succeeded", row.fence)


def test_a_finished_job_cannot_be_cancelled(pool: Pool) -> None:
    job, bot, work = pool.running()
    bot.sync(completed(work))
    assert cancel(pool, job) == [Cancelled(job, "succeeded", changed=False)]


def test_foreign_and_absent_jobs_look_alike_to_cancel(pool: Pool) -> None:
    (job,) = pool.submit()
    absent = str(uuid.uuid4())
    found = cancel(pool, job, absent, instances=["other"])
    assert [one.state for one in found] == [None, None]
    assert pool.job(job).state == "queued"


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


def test_a_bot_that_leaves_gives_its_work_back(pool: Pool) -> None:
    job, bot, work = pool.running()
    bot.sync(active(work), status="gone")
    assert (pool.job(job).state, pool.job(job).attempts) == ("queued", 0)
    row = pool.row("SELECT status, session, in_use FROM bots")
    assert (row.status, row.session, row.in_use) == ("gone", None, 0)
    with pytest.raises(Conflict):
        bot.sync()


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


def test_sql_callers_may_spell_properties_with_one_value_or_several(pool: Pool) -> None:
    pool.bot(properties={"os": ["linux", "debian"]})
    for properties in ('{"os": "linux"}', '{"os": ["linux"]}', '{"os": ["linux", "linux"]}'):
        pool.rows(
            "SELECT * FROM leasehold.submit(CAST(:jobs AS jsonb))",
            jobs=f'[{{"command": ["true"], "properties": {properties}}}]',
        )
    assert [row.properties for row in pool.rows("SELECT properties FROM platforms")] == [{"os": ["linux"]}]
    assert pool.row("SELECT count(*) AS links FROM kind_platforms").links == 1


@pytest.mark.parametrize(
    ("job", "refused"),
    [
        ('{"payload": {"command": ["true"]}}', r"jobs\.0\.payload: is not a field of a job"),
        ('{"command": ["true"], "payload": {"command": ["true"]}}', r"jobs\.0\.payload: is not a field of a job"),
        ("{}", r"jobs\.0\.command: field required"),
        ('{"properties": []}', r"jobs\.0\.command: field required"),
        ('"command"', r"jobs\.0: input should be an object"),
        ("3", r"jobs\.0: input should be an object"),
        ('{"command": "true"}', r"jobs\.0\.command: "),
    ],
)
def test_sql_callers_cannot_submit_what_no_bot_could_run(pool: Pool, job: str, refused: str) -> None:
    with pytest.raises(psycopg.Error, match=refused):
        pool.rows("SELECT * FROM leasehold.submit(CAST(:jobs AS jsonb))", jobs=f"[{job}]")
    assert pool.rows("SELECT id FROM jobs") == []


@pytest.mark.parametrize(
    ("field", "value"), [("units", 0), ("priority", 1001), ("max_attempts", 0), ("label", "l" * 65)]
)
@pytest.mark.parametrize("others", [0, 1])
def test_what_sql_callers_give_beyond_its_range_is_refused_and_never_stored_otherwise(
    pool: Pool, field: str, value: object, others: int
) -> None:
    job = {"command": ["true"]}
    with pytest.raises(psycopg.Error, match=f"jobs.0.{field}: "):
        pool.rows("SELECT * FROM leasehold.submit(:jobs)", jobs=json.dumps([job | {field: value}] + [job] * others))
    assert pool.rows("SELECT id FROM jobs") == []


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


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("first", ["alone", "among others"])
def test_a_request_alone_makes_the_rows_that_it_makes_among_others(
    pool: Pool, request_: dict[str, Any], first: str
) -> None:
    pool.change("INSERT INTO cohorts (name, labels) VALUES ('night', '{nightly}')")
    unshared = request_ | ({"dedup_key": "other"} if "dedup_key" in request_ else {})
    if first == "alone":
        made = [alone(pool, request_), among_others(pool, unshared)]
    else:
        made = [among_others(pool, unshared), alone(pool, request_)]
    one, other = (pool.row(STORED, id=job.public_id) for job in made)
    assert one == other
    assert [job.created for job in made] == [True, True]
    assert [pool.row("SELECT id FROM jobs WHERE public_id = :id", id=job.public_id).id for job in made] == [
        job.job_id for job in made
    ]


@pytest.mark.parametrize("extra", [{}, {"dedup_key": "d"}], ids=["", "deduplicated"])
def test_requests_at_once_are_all_stored_and_answered_in_their_order_or_none_is(
    pool: Pool, extra: dict[str, Any]
) -> None:
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


@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - {"a deduplication key"}))
@pytest.mark.parametrize("first", ["among others", "at once"])
def test_requests_that_are_alike_make_the_rows_that_they_make_among_others(pool: Pool, name: str, first: str) -> None:
    pool.change("INSERT INTO cohorts (name, labels) VALUES ('night', '{nightly}')")
    pair = [REQUESTS[name], REQUESTS[name] | {"payload": {"command": ["another"]}}]
    if first == "among others":
        others, together = [among_others(pool, each) for each in pair], at_once(pool, pair)
    else:
        together, others = at_once(pool, pair), [among_others(pool, each) for each in pair]
    for one, other in zip(together, others, strict=True):
        assert one.created
        assert pool.row(STORED, id=one.public_id) == pool.row(STORED, id=other.public_id)
        assert pool.row("SELECT public_id FROM jobs WHERE id = :id", id=one.job_id).public_id == one.public_id


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("wanted", [{}, {"units": 2}], ids=["", "large"])
@pytest.mark.parametrize("there", [{}, {"terms": {"job_class": "random"}}], ids=["plain", "constrained"])
def test_requests_join_no_queue_of_other_jobs(
    pool: Pool, there: dict[str, Any], wanted: dict[str, Any], managed: bool
) -> None:
    alone(pool, PLAIN | there)
    if managed:
        account = Account(credit_weight=1.0)
        pool.database.run(lambda connection: put_account(connection, "default", account, actor="test"))
    request = PLAIN | wanted
    made = [alone(pool, request), *at_once(pool, [request] * 2)]
    other = pool.row(STORED, id=among_others(pool, request).public_id)
    assert [pool.row(STORED, id=job.public_id) for job in made] == [other] * 3


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
    before = rows(pool)
    assert before == (7, 7, 7, 4)
    with pytest.raises(Conflict, match=r"jobs\[1\].key: 'b' was used before for a different request"):
        at_once(pool, [PLAIN | {"key": "new"}, PLAIN | {"key": "b"}])
    assert rows(pool) == before
    assert alone(pool, requests[3]) == again[3]._replace(created=False), "the key has the digest of the whole request"


def test_requests_at_once_that_share_a_deduplication_key_make_one_job(pool: Pool) -> None:
    alone(pool, PLAIN)
    one, two = at_once(pool, [PLAIN | {"dedup_key": "d"}] * 2)
    assert (one.created, two.created, two.job_id) == (True, False, one.job_id)


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


def test_jobs_of_an_instance_that_becomes_managed_get_constraints_and_lose_them_when_it_ceases_to_be(
    pool: Pool,
) -> None:
    alone(pool, PLAIN)
    pool.database.run(lambda c: put_account(c, "default", Account(credit_weight=1.0), actor="test"))
    constrained = [alone(pool, PLAIN).job_id for _ in range(2)]
    pool.database.run(lambda c: remove_account(c, "default", actor="test"))
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


@pytest.mark.parametrize(
    "request_", [{}, {"payload": {"command": "true"}}, PLAIN | {"properties": None}, PLAIN | {"properties": ["os"]}]
)
def test_a_malformed_request_alone_is_refused_by_the_database(pool: Pool, request_: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"a request needs payload.command, an array, and its properties are an object"):
        alone(pool, request_)
    assert rows(pool) == (0, 0, 0, 0)


def test_what_a_constraint_forbids_is_refused_by_its_name(pool: Pool) -> None:
    with pytest.raises(Exception, match="jobs_priority_range"):
        alone(pool, PLAIN | {"priority": 1001})
    assert rows(pool) == (0, 0, 0, 0)


def test_ids_of_one_moment_lie_together(pool: Pool) -> None:
    before = pool.row("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").ms
    made = alone(pool, PLAIN).public_id
    after = pool.row("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").ms
    assert before <= int(made.replace("-", "")[:12], 16) <= after
    assert made[14] == "7"
