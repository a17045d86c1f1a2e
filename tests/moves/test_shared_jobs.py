"""Several submissions of one job: joining, raising its priority, and cancelling one's own part of it."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from leasehold.errors import Conflict

from assigner.queries import jobs as job_queries
from schema.moves import cancel as cancel_moves
from schema.moves.cancel import Cancelled
from schema.moves.submit import Submitted, submit
from tests.support.pool import Pool, completed
from tests.support.race import Race, cancel, expire, park

DEDUP = {"dedup_key": "nightly"}
JOBS = "SELECT * FROM jobs ORDER BY id"
FOLLOWERS = "SELECT * FROM job_followers"


def submission_states(pool: Pool, *submissions: str) -> list[str]:
    """The state that each submission is told."""
    found = pool.database.run(lambda c: job_queries.submission_states(c, submissions, instances=None))
    return [found[each]["state"] for each in submissions]


def cancel_all_submissions(pool: Pool, *submissions: str) -> list[Cancelled]:
    return pool.database.run(
        lambda c: cancel_moves.cancel(c, submissions, instances=None, sync=1.0, actor="test", all_submissions=True)
    )


def shared(pool: Pool, state: str) -> tuple[str, str]:
    """A job in this state, and the submission that joined it."""
    (job,) = pool.submit(**DEDUP)
    match state:
        case "parked":
            park(pool, job)
        case "leased":
            pool.bot()
            pool.assigner().run_once()
        case "running":
            pool.given(pool.bot())
    (joined,) = pool.submit(**DEDUP)
    assert pool.job(job).state == state
    return job, joined


def test_a_submit_joins_the_unfinished_job_of_its_instance_with_its_key_under_an_id_of_its_own(pool: Pool) -> None:
    (job,) = pool.submit(**DEDUP)
    joined, other, plain, elsewhere = (*pool.submit(2, **DEDUP), *pool.submit(), *pool.submit(instance="ci", **DEDUP))
    assert len({job, joined, other, plain, elsewhere}) == 5
    assert len(pool.rows(JOBS)) == 3
    assert pool.history(job) == ["submit", "join", "join"]
    found = pool.database.run(lambda c: job_queries.submission_states(c, [job, joined, plain], instances=None))
    assert [found[each]["joined"] for each in (job, plain)] == [None, None]
    assert str(found[joined]["joined"]) == job


def test_equal_requests_of_one_batch_are_one_job_and_answers_keep_their_order(pool: Pool) -> None:
    requests = [
        {"instance": "default", "properties": {}, "payload": {"command": [str(n)]}, "dedup_key": key}
        for n, key in enumerate(["b", None, "a", "b", "a", None, "b"])
    ]
    taken = pool.database.run(lambda c: submit(c, requests, actor="test"))
    assert [one.created for one in taken] == [True, True, True, False, False, True, False]
    jobs = [one.job_id for one in taken]
    assert (jobs[0], jobs[0], jobs[2]) == (jobs[3], jobs[6], jobs[4])
    assert len(set(jobs)) == 4
    assert len({one.public_id for one in taken}) == 7
    assert jobs[0] < jobs[2], "they are queued in the order of their requests"
    payload = "SELECT payload->'command'->>0 AS n FROM job_payloads WHERE job_id = :id"
    assert [pool.row(payload, id=jobs[n]).n for n in (0, 2)] == ["0", "2"]


@pytest.mark.parametrize("end", ["succeeded", "cancelled", "cancelling"])
def test_a_job_that_is_over_or_being_stopped_is_joined_no_more(pool: Pool, end: str) -> None:
    if end == "cancelled":
        (job,) = pool.submit(**DEDUP)
        cancel(pool, job)
    else:
        job, bot, work = pool.running(**DEDUP)
        bot.sync(completed(work)) if end == "succeeded" else cancel(pool, job)
    (again,) = pool.submit(**DEDUP)
    assert (pool.job(job).state, pool.job(again).state) == (end, "queued")
    assert pool.rows(FOLLOWERS) == []


def test_a_key_that_joined_answers_with_the_same_id_again_and_refuses_other_requests(pool: Pool) -> None:
    (job,) = pool.submit(**DEDUP)
    mine = pool.submit(key="k", **DEDUP)
    assert pool.submit(key="k", **DEDUP) == mine != [job]
    cancel(pool, job, *mine)
    assert pool.submit(key="k", **DEDUP) == mine, "also when the job is over"
    with pytest.raises(Conflict, match="'k' was used before"):
        pool.submit(key="k", dedup_key="other")
    with pytest.raises(Conflict, match="'k' was used before"):
        pool.submit(key="k")
    assert len(pool.rows(JOBS)) == 1


@pytest.mark.parametrize("others", [["b", "a"], ["a", "b"], ["b", None], [None, "b"]])
def test_one_key_in_a_batch_with_other_deduplication_keys_is_a_conflict(pool: Pool, others: list[str | None]) -> None:
    request = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}, "key": "k"}
    requests = [request | ({} if other is None else {"dedup_key": other}) for other in others]
    with pytest.raises(Conflict, match=r"jobs\[[01]\]\.key: 'k' was used before"):
        pool.database.run(lambda c: submit(c, requests, actor="test"))
    assert pool.rows(JOBS) == []
    flat = [
        {"command": ["true"]} | {name: each[name] for name in ("key", "dedup_key") if name in each} for each in requests
    ]
    answers = pool.rows("SELECT * FROM submit(CAST(:jobs AS jsonb)) ORDER BY n", jobs=json.dumps(flat))
    assert sorted((row.created, row.same) for row in answers) == [(False, False), (True, True)]
    assert len({row.public_id for row in answers} - {None}) == len(pool.rows(JOBS)) == 1


@pytest.mark.parametrize("runs", [True, False], ids=["of a job that is lost", "of a job that waits"])
def test_a_more_urgent_duplicate_is_picked_before_what_it_stood_behind(pool: Pool, runs: bool) -> None:
    (job,) = pool.submit(priority=5, **DEDUP)
    if runs:
        pool.given(pool.bot())
    (ahead,) = pool.submit(priority=0)
    pool.submit(priority=7, **DEDUP)
    assert pool.job(job).priority == 5, "a less urgent one changes nothing"
    pool.submit(priority=-5, **DEDUP)
    assert pool.job(job).state == ("running" if runs else "queued")
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    expire(pool)
    pool.bot("bot-2")
    pool.assigner(batch=1).run_once()
    assert (pool.job(job).state, pool.job(ahead).state) == ("leased", "queued")
    details = pool.row("SELECT details FROM job_events WHERE move = 'join' ORDER BY id DESC LIMIT 1").details
    assert details == {"priority": -5, "priority_before": 5}


@pytest.mark.parametrize("state", ["queued", "parked", "leased", "running"])
@pytest.mark.parametrize("own", [True, False], ids=["its own submitter leaves", "who joined leaves"])
def test_who_cancels_a_shared_job_leaves_it_to_others_and_the_last_ends_it(pool: Pool, state: str, own: bool) -> None:
    job, joined = shared(pool, state)
    leaves, stays = (job, joined) if own else (joined, job)
    assert cancel(pool, leaves) == [Cancelled(leaves, "cancelled", changed=True)]
    assert cancel(pool, leaves) == [Cancelled(leaves, "cancelled", changed=False)]
    assert (pool.job(job).state, submission_states(pool, leaves, stays)) == (state, ["cancelled", state])
    assert pool.history(job)[-1] == "withdraw"
    event = pool.row("SELECT * FROM job_events WHERE move = 'withdraw'")
    assert (event.from_state, event.to_state, event.details) == (state, state, {"submission": leaves})
    end = "cancelled" if state in ("queued", "parked") else "cancelling"
    assert cancel(pool, stays) == [Cancelled(stays, end, changed=True)]
    assert (pool.job(job).state, submission_states(pool, leaves, stays)) == (end, ["cancelled", end])
    assert pool.history(job)[-1] == "cancel"


def test_a_withdrawn_submission_stays_cancelled_and_the_others_get_the_result(pool: Pool) -> None:
    job, bot, work = pool.running(**DEDUP)
    joined, other = pool.submit(2, **DEDUP)
    cancel(pool, job, joined)
    bot.sync(completed(work, exit_code=0))
    assert submission_states(pool, job, joined, other) == ["cancelled", "cancelled", "succeeded"]
    found = pool.database.run(lambda c: job_queries.submission_states(c, [job, other], instances=None))
    assert (found[job]["result"], found[other]["result"]) == (None, {"exit_code": 0})
    assert found[job]["finished_at"] < found[other]["finished_at"]
    assert cancel(pool, other) == [Cancelled(other, "succeeded", changed=False)]


def test_all_submissions_named_in_one_call_end_their_job_and_only_theirs(pool: Pool) -> None:
    first, second = pool.submit(2, **DEDUP)
    other, shares = pool.submit(2, dedup_key="other")
    assert {each.state for each in cancel(pool, first, second, other)} == {"cancelled"}
    assert [row.state for row in pool.rows(JOBS)] == ["cancelled", "queued"]
    assert pool.history(first) == ["submit", "join", "cancel"], "nobody left it to others"
    assert submission_states(pool, shares) == ["queued"]


def test_an_operator_can_end_a_job_whoever_shares_it(pool: Pool) -> None:
    job, bot, work = pool.running(**DEDUP)
    joined, left = pool.submit(2, **DEDUP)
    cancel(pool, left)
    assert cancel_all_submissions(pool, joined) == [Cancelled(joined, "cancelling", changed=True)]
    bot.sync(completed(work, "stopped"))
    assert submission_states(pool, job, joined, left) == ["cancelled"] * 3
    assert pool.row("SELECT details FROM job_events WHERE move = 'cancel'").details == {"all_submissions": True}


def test_who_left_may_come_back_as_somebody_new(pool: Pool) -> None:
    job, joined = shared(pool, "queued")
    cancel(pool, job)
    (again,) = pool.submit(**DEDUP)
    assert submission_states(pool, job, joined, again) == ["cancelled", "queued", "queued"]
    cancel(pool, joined)
    assert pool.job(job).state == "queued"
    cancel(pool, again)
    assert pool.job(job).state == "cancelled"


def _requests(chance: random.Random) -> list[dict[str, Any]]:
    """A batch in any order; what belongs to one submit key is always the same request."""
    requests = []
    for _ in range(chance.randint(1, 8)):
        instance, dedup = chance.choice(["a", "b"]), chance.choice([None, "x", "y", "z"])
        number = chance.randint(0, 5)
        key = None if number == 0 else f"{dedup}-{number}"
        priority = chance.randint(-9, 9) if key is None else number
        request = {"instance": instance, "properties": {}, "payload": {"command": ["true"]}, "priority": priority}
        requests.append(request | {name: v for name, v in (("key", key), ("dedup_key", dedup)) if v is not None})
    return requests


def _submit_batches(pool: Pool, chance: random.Random, batches: int) -> list[tuple[dict[str, Any], Submitted]]:
    answers = []
    for _ in range(batches):
        requests = _requests(chance)
        taken = pool.database.run(lambda c, wanted=requests: submit(c, wanted, actor="test"))
        answers += list(zip(requests, taken, strict=True))
    return answers


@pytest.mark.parametrize("cancels", [False, True], ids=["submits only", "with cancels"])
def test_many_submitters_at_once_share_one_live_job_for_each_key(pool: Pool, race: Race, cancels: bool) -> None:
    seeds = [pool.chance.getrandbits(32) for _ in range(4)]
    with ThreadPoolExecutor(5) as threads:
        running = [threads.submit(_submit_batches, pool, random.Random(seed), 12) for seed in seeds]
        while cancels and not all(each.done() for each in running):
            live = pool.rows("SELECT public_id FROM jobs WHERE dedup_key IS NOT NULL AND state = 'queued'")
            if live:
                cancel_all_submissions(pool, *(str(row.public_id) for row in live))
        answers = [answer for each in running for answer in each.result()]
    jobs = {row.id: row for row in pool.rows("SELECT j.*, i.name FROM jobs j JOIN instances i ON i.id = j.instance")}
    live = [(row.name, row.dedup_key) for row in jobs.values() if row.dedup_key and row.state == "queued"]
    assert len(live) == len(set(live))
    if not cancels:
        assert len(live) == len(
            {(asked["instance"], asked["dedup_key"]) for asked, _ in answers if "dedup_key" in asked}
        )
    assert sum(taken.created for _, taken in answers) == len(jobs), "an answer `created` for each job"
    by_key: dict[tuple[str, str], set[str]] = {}
    for asked, taken in answers:
        assert (jobs[taken.job_id].name, jobs[taken.job_id].dedup_key) == (asked["instance"], asked.get("dedup_key"))
        by_key.setdefault((asked["instance"], asked.get("key", taken.public_id)), set()).add(taken.public_id)
    assert {len(ids) for ids in by_key.values()} == {1}, "one answer for each submit key"
    submissions = {taken.public_id: taken.job_id for _, taken in answers}
    followers = {str(row.public_id): row.job_id for row in pool.rows(FOLLOWERS)}
    own = {str(row.public_id): row.id for row in jobs.values()}
    assert submissions == own | followers
    assert "40P01" not in race.errors, "they never block each other for good"
