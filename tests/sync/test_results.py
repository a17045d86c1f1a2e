"""Results and checkpoints as the database keeps them: of whom they are taken, and who gets them."""

import json
from typing import Any

import pytest
from leasehold.errors import Conflict
from pydantic import ValidationError

from bots.protocol import LeaseReport, Outcome, OutputReport, Progress
from schema.checkpoints import read_progress
from schema.moves.cancel import cancel
from schema.validation import MAX_RESULT_BYTES
from tests.support.plans import statements
from tests.support.pool import Bot, Pool, active, completed, synced
from tests.support.race import retention

#: Seconds between attempts: none.
AT_ONCE = "UPDATE jobs SET schedule_after = NULL WHERE state = 'queued'"


def results(pool: Pool) -> list[tuple[str, int, str]]:
    """Job, fence and text of each result."""
    return [
        (str(row.public_id), row.fence, row.result)
        for row in pool.rows(
            "SELECT j.public_id, r.fence, CAST(r.result AS text) AS result FROM job_results r"
            " JOIN jobs j ON j.id = r.job_id ORDER BY j.id"
        )
    ]


def checkpoints(pool: Pool) -> list[tuple[int, str]]:
    """Fence and text of each checkpoint."""
    found = pool.rows("SELECT fence, CAST(checkpoint AS text) FROM job_checkpoints ORDER BY job_id")
    return [tuple(row) for row in found]


def saved(bot: Bot, work: dict[str, Any], checkpoint: str, *, number: int = 0) -> None:
    """Send a checkpoint between two syncs."""
    identity = {name: getattr(bot.session, name) for name in ("bot", "epoch", "secret")}
    told = {"job": work["job"], "fence": work["fence"], "checkpoint": checkpoint, "checkpoint_number": number}
    bot.sync_service.output(OutputReport(**identity, **told, output=[]))


def told(bot: Bot, work: dict[str, Any], share: float, *, number: int) -> None:
    """Send a progress between two syncs."""
    identity = {name: getattr(bot.session, name) for name in ("bot", "epoch", "secret")}
    progress = Progress(share=share, text=f"step {number}", number=number)
    bot.sync_service.output(
        OutputReport(**identity, job=work["job"], fence=work["fence"], output=[], progress=progress)
    )


def shown(pool: Pool, work: dict[str, Any]) -> list[tuple[float, str]]:
    """What a caller is told of the progress of the job."""
    found = pool.database.run(lambda connection: read_progress(connection, [work["job"]]))
    return [(each["share"], each["text"]) for each in found.values()]


def again(pool: Pool, bot: Bot) -> dict[str, Any]:
    """Let the bot start the job that is queued again; return the lease as it was offered."""
    pool.change(AT_ONCE)
    pool.assigner().run_once()
    (work,) = bot.sync()["leases"]
    bot.sync(active(work))
    return dict(work)


@pytest.mark.parametrize(
    ("verdict", "state"),
    [("succeeded", "succeeded"), ("failed", "failed"), ("error", "dead"), ("stopped", "cancelled")],
)
def test_the_result_of_the_attempt_that_ends_a_job_is_stored_as_written(pool: Pool, verdict: str, state: str) -> None:
    job, bot, work = pool.running(max_attempts=1)
    if verdict == "stopped":
        pool.database.run(lambda c: cancel(c, [job], instances=None, sync=pool.timing.sync, actor="test"))
    text = ' {"b": 1.0, "a": [1e2, null]}\n'
    bot.sync(completed(work, verdict, result=text))
    assert (pool.job(job).state, results(pool)) == (state, [(job, work["fence"], text)])
    # The history does not repeat it.
    assert not [row for row in pool.rows("SELECT details FROM job_events") if "result" in (row.details or {})]


def test_an_attempt_after_which_the_job_runs_again_leaves_no_result(pool: Pool) -> None:
    job, bot, work = pool.running(retry_failed=True)
    bot.sync(completed(work, "failed", result="1"))
    assert (pool.job(job).state, results(pool)) == ("queued", [])
    second = again(pool, bot)
    bot.sync(completed(second, result="2"))
    assert results(pool) == [(job, second["fence"], "2")]


def test_a_bot_that_lost_its_lease_leaves_no_result(pool: Pool) -> None:
    job, lost, work = pool.running()
    newer = pool.restarted(lost)
    second = again(pool, newer)
    with pytest.raises(Conflict):
        lost.sync(completed(work, result='"late"'))
    newer.sync(active(second), completed(work, result='"late"'))
    assert results(pool) == []
    newer.sync(completed(second, result='"in time"'))
    assert results(pool) == [(job, second["fence"], '"in time"')]
    newer.sync(completed(work, result='"late"'))
    assert results(pool) == [(job, second["fence"], '"in time"')]


def test_results_cost_no_statement_of_their_own(pool: Pool) -> None:
    sent: list[int] = []
    largest = json.dumps("x" * (MAX_RESULT_BYTES - 2))
    for result in (None, largest):
        _, bot, work = pool.running()
        with statements() as seen:
            bot.sync(completed(work, result=result))
        sent.append(len(seen))
    assert sent[0] == sent[1]
    assert [found for _, _, found in results(pool)] == [largest]
    assert pool.row("SELECT size FROM job_results").size == MAX_RESULT_BYTES


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("NaN", "holds NaN"),
        ('"\\u0000"', "holds a NUL character"),
        (json.dumps("x" * MAX_RESULT_BYTES), f"at most {MAX_RESULT_BYTES} are allowed"),
        (json.dumps("é" * (MAX_RESULT_BYTES // 2), ensure_ascii=False), f"at most {MAX_RESULT_BYTES} are allowed"),
    ],
)
def test_a_gateway_refuses_what_is_no_result_or_no_checkpoint(text: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Outcome(verdict="succeeded", result=text)
    with pytest.raises(ValidationError, match=reason):
        LeaseReport(job="j", fence=1, state="active", checkpoint=text)


# Checkpoints


def test_the_next_attempt_is_given_the_checkpoint_with_its_payload_and_only_then(pool: Pool) -> None:
    _, bot, work = pool.running(retry_failed=True)
    saved(bot, work, '{"step": 1}')
    saved(bot, work, '{"step":  2}')
    assert checkpoints(pool) == [(work["fence"], '{"step":  2}')]
    assert "checkpoint" not in bot.sync(active(work))["leases"][0]
    bot.sync(completed(work, "failed"))
    offered = again(pool, bot)
    assert (offered["payload"], offered["checkpoint"]) == ({"command": ["true"]}, '{"step":  2}')


def test_a_fetched_attempt_is_told_of_the_checkpoint_as_a_repeat_of_the_call_tells_it(pool: Pool) -> None:
    pool.submit(2, units=2, timeout_seconds=7.5, instance="team-a", payload={"command": ['é"\\']})
    bot = pool.bot(capacity=4)
    first, second = pool.given(bot)
    report = completed(first, "released").model_copy(update={"checkpoint": '{"step":  2}'})
    call = bot.message(report, completed(second))
    (answer, repeated) = (json.loads(synced(bot.sync_service, call)) for _ in range(2))
    (lease,) = answer["leases"]
    assert (lease["job"], lease["checkpoint"], lease["attempt"]) == (first["job"], '{"step":  2}', 1)
    assert (lease["payload"], lease["timeout"], lease["units"]) == ({"command": ['é"\\']}, 7.5, 2)
    assert (lease["instance"], repeated["leases"]) == ("team-a", [lease])


def test_a_bot_that_lost_its_lease_cannot_write_the_checkpoint(pool: Pool) -> None:
    _, lost, work = pool.running()
    saved(lost, work, "1")
    lost = pool.restarted(lost)
    offered = again(pool, lost)
    assert offered["checkpoint"] == "1"
    saved(lost, offered, "2")
    saved(lost, work, "3")
    report = active(work).model_copy(update={"checkpoint": "4"})
    lost.sync(active(offered), report)
    assert checkpoints(pool) == [(offered["fence"], "2")]


def test_a_late_call_does_not_bring_back_an_earlier_checkpoint_of_its_attempt(pool: Pool) -> None:
    _, bot, work = pool.running()
    for number in (1, 3, 2):
        saved(bot, work, f"[{number}]", number=number)
    assert checkpoints(pool) == [(work["fence"], "[3]")]
    # The next attempt counts anew.
    bot.sync(completed(work, "released"))
    second = again(pool, bot)
    saved(bot, second, "[4]", number=1)
    assert checkpoints(pool) == [(second["fence"], "[4]")]


def test_a_checkpoint_of_a_job_that_is_over_is_not_stored(pool: Pool) -> None:
    _, bot, work = pool.running()
    bot.sync(completed(work))
    saved(bot, work, "1")
    assert checkpoints(pool) == []


def test_results_and_checkpoints_are_deleted_with_their_jobs(pool: Pool) -> None:
    _, bot, work = pool.running()
    saved(bot, work, "1")
    told(bot, work, 1.0, number=1)
    bot.sync(completed(work, result="2"))
    assert shown(pool, work) == [(1.0, "step 1")], "of a job that has ended by itself it stays"
    assert retention(pool) == 1
    assert pool.rows("SELECT FROM job_progress") == []
    assert (results(pool), checkpoints(pool)) == ([], [])


def ended(work: dict[str, Any], progress: Progress) -> LeaseReport:
    """The report of an attempt that has told something last."""
    return completed(work).model_copy(update={"progress": progress})


def test_the_last_progress_comes_with_the_end_and_replaces_no_later_one(pool: Pool) -> None:
    _, bot, work = pool.running()
    told(bot, work, 0.5, number=1)
    bot.sync(ended(work, Progress(share=1.0, text="done", number=2)))
    assert shown(pool, work) == [(1.0, "done")]
    pool.submit()
    work = again(pool, bot)
    told(bot, work, 1.0, number=3)
    bot.sync(ended(work, Progress(share=0.25, text="late", number=2)))
    assert shown(pool, work) == [(1.0, "step 3")]


def test_the_progress_of_a_job_that_was_stopped_is_that_of_the_attempt_that_ended_it(pool: Pool) -> None:
    _, bot, work = pool.running()
    told(bot, work, 0.5, number=1)
    pool.database.run(lambda c: cancel(c, [work["job"]], instances=None, sync=pool.timing.sync, actor="test"))
    assert shown(pool, work) == [(0.5, "step 1")]
    bot.sync(completed(work, "stopped"))
    assert shown(pool, work) == [(0.5, "step 1")], "the fence of a cancelled job has grown"
    assert pool.rows("SELECT state, fence FROM jobs") == [("cancelled", work["fence"] + 1)]


def test_a_job_that_was_cancelled_between_two_attempts_has_no_progress(pool: Pool) -> None:
    _, bot, work = pool.running()
    told(bot, work, 0.5, number=1)
    bot.sync(completed(work, "released"))
    pool.database.run(lambda c: cancel(c, [work["job"]], instances=None, sync=pool.timing.sync, actor="test"))
    assert pool.rows("SELECT state FROM jobs") == [("cancelled",)]
    assert shown(pool, work) == [], "that attempt has not ended the job"


def test_progress_is_that_of_the_live_attempt_and_the_latest_that_it_told(pool: Pool) -> None:
    _, bot, work = pool.running()
    for number in (1, 3, 2):
        told(bot, work, number / 4, number=number)
    assert shown(pool, work) == [(0.75, "step 3")]
    bot.sync(completed(work, "released"))
    assert shown(pool, work) == [], "nobody works at it any more"
    second = again(pool, bot)
    told(bot, work, 1.0, number=9)
    assert shown(pool, work) == [], "the attempt before is over"
    told(bot, second, 0.25, number=1)
    assert shown(pool, work) == [(0.25, "step 1")]
