"""Jobs that are held aside and released again: what is kept, who may, and who wins a race."""

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from leasehold.errors import Conflict, Forbidden, LeaseholdError, NotFound, QueueFull

from schema.moves.cancel import Cancelled
from schema.moves.waiting import requeue as requeue_moves
from schema.moves.waiting.hold import HoldResult
from schema.moves.waiting.requeue import Requeued
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support.http import JOB, OTHER, Answer, Gateway, audited, call, final, in_turn, submitted
from tests.support.http import JOB_COMMANDING as ONE
from tests.support.pool import Pool, completed
from tests.support.race import Race, cancel, outcome, park, unpark


def last_event(pool: Pool, job: str) -> Any:
    return pool.row("SELECT * FROM job_events WHERE job_id = :id ORDER BY id DESC LIMIT 1", id=pool.job(job).id)


def test_a_held_job_is_not_placed_until_it_is_released_and_keeps_its_age(pool: Pool) -> None:
    older, newer = pool.submit(2)
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 h' WHERE id = :id", id=pool.job(older).id)
    queued_at = pool.job(older).queued_at
    assert park(pool, older, reason="disk is full") == [HoldResult(older, "parked", changed=True)]
    assert pool.job(older).reason == "held: disk is full"
    assert last_event(pool, older).details == {"reason": "disk is full"}
    bot = pool.bot()
    pool.assigner().run_once()
    assert [work["job"] for work in bot.sync()["leases"]] == [newer], "the bot gets the other one"
    assert unpark(pool, older) == [HoldResult(older, "queued", changed=True)]
    assert pool.history(older) == ["submit", "hold", "release"]
    assert (pool.job(older).queued_at, pool.job(older).reason) == (queued_at, None)
    other = pool.bot("bot-2")
    pool.assigner().run_once()
    assert [work["job"] for work in other.sync()["leases"]] == [older]


def test_a_hold_leaves_what_does_not_wait_and_a_release_what_is_not_held(pool: Pool) -> None:
    job, _, _ = pool.running()
    (over,) = pool.submit()
    cancel(pool, over)
    absent = "00000000-0000-4000-8000-000000000000"
    assert park(pool, job, over, absent) == [
        HoldResult(job, "running", changed=False),
        HoldResult(over, "cancelled", changed=False),
        HoldResult(absent, None, changed=False),
    ]
    assert [found.changed for found in unpark(pool, job, over)] == [False, False]


def test_a_hold_keeps_a_lost_bots_time_to_run_the_job_and_does_not_count_towards_its_queue_timeout(pool: Pool) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60)
    rest = (
        "UPDATE jobs SET schedule_after = now() + interval '1 h', queued_at = queued_at - interval '1 h' WHERE id = :id"
    )
    pool.change(rest, id=pool.job(job).id)
    before = pool.job(job)
    park(pool, job)
    pool.change("UPDATE stored_events SET at = at - interval '30 s' WHERE move = 'hold'")
    unpark(pool, job)
    assert pool.job(job).schedule_after == before.schedule_after
    moved = (pool.job(job).queue_deadline - before.queue_deadline).total_seconds()
    assert 30 <= moved < 40
    assert 30 <= last_event(pool, job).details["held_seconds"] < 40


def test_a_job_that_is_released_rests_with_its_queue(pool: Pool) -> None:
    (job,) = pool.submit()
    park(pool, job)
    pool.bot()
    pool.rest_queues(60)
    unpark(pool, job)
    pool.assigner().run_once()
    assert pool.job(job).state == "queued"
    pool.bot("another")
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"


@pytest.mark.parametrize("commit", [True, False])
def test_a_release_waits_for_the_cancel_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    park(pool, job)
    with race.first() as first:
        assert cancel(first, job) == [Cancelled(job, "cancelled", changed=True)]
        late = race.second(lambda: unpark(pool, job), behind=first)
        first.decide(commit)
        assert outcome(late) == [HoldResult(job, "cancelled" if commit else "queued", changed=not commit)]


def test_a_cancel_waits_for_the_release_that_was_ahead_of_it(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    park(pool, job)
    assert race.in_turn(lambda first: unpark(first, job), lambda: cancel(pool, job)) == [
        Cancelled(job, "cancelled", changed=True)
    ]
    assert pool.history(job) == ["submit", "hold", "release", "cancel"]


def test_who_withdrew_from_a_shared_job_cannot_hold_it_for_the_others(pool: Pool) -> None:
    (job,) = pool.submit(dedup_key="same")
    (follower,) = pool.submit(dedup_key="same")
    cancel(pool, follower)
    assert park(pool, follower) == [HoldResult(follower, "cancelled", changed=False)]
    (other,) = pool.submit(dedup_key="same")
    assert park(pool, other) == [HoldResult(other, "parked", changed=True)]
    assert pool.job(job).state == "parked"


def test_holding_over_the_wire_is_listed_counted_and_audited(operator: httpx.Client, database: Database) -> None:
    one, two = submitted(operator, JOB, JOB)
    answer = operator.post("/v1/jobs/hold", json={"ids": [one.upper(), "nonsense"], "reason": "later"}).json()
    assert answer == {
        "jobs": [
            {"id": one.upper(), "state": "parked", "changed": True, "why": None},
            {"id": "nonsense", "state": None, "changed": False, "why": None},
        ],
        "next": None,
    }
    assert [job["id"] for job in operator.get("/v1/jobs", params={"state": "parked"}).json()["jobs"]] == [one]
    assert operator.get("/v1/status").json()["jobs"] == {"parked": 1, "queued": 1}
    assert operator.post("/v1/jobs/release", json={"ids": [one, two]}).json()["jobs"] == [
        {"id": one, "state": "queued", "changed": True, "why": None},
        {
            "id": two,
            "state": "queued",
            "changed": False,
            "why": f"it is not held; `leasehold explain {two}` says what it waits for",
        },
    ]
    assert {"jobs.hold", "jobs.release"} <= set(audited(database))
    assert operator.post("/v1/jobs/hold", json={"ids": ["nonsense"]}).status_code == 404
    refused = operator.post("/v1/jobs/hold", json={"ids": [one], "reason": "x" * 501})
    assert (refused.status_code, refused.json()["field"]) == (400, "reason")


@pytest.mark.parametrize(("command", "state"), [("hold", "parked"), ("release", "queued")])
@pytest.mark.usefixtures("no_pool_of_our_own")
def test_commands_tell_what_became(
    stands: Gateway, capsys: pytest.CaptureFixture[str], command: str, state: str
) -> None:
    answers = [
        {"id": ONE, "state": state, "changed": True},
        {"id": OTHER, "state": "running", "changed": False, "why": "a bot has it"},
    ]
    stands.script = in_turn(Answer({"jobs": answers}))
    call(command, ONE, OTHER, ONE, "--reason", "why")
    assert capsys.readouterr().out == f"{ONE} {state}\n{OTHER} running (unchanged: a bot has it)\n"
    assert stands.paths() == [f"POST /v1/jobs/{command}"]
    assert stands.asked[0].body == {"ids": [ONE, OTHER], "reason": "why"}
    stands.script = in_turn(Answer({"jobs": [answers[0] | {"changed": False}]}))
    call(command, ONE)  # a repeat is no conflict
    stands.script = in_turn(Answer({"jobs": [answers[1], answers[1] | {"id": ONE, "state": "failed"}]}))
    with pytest.raises(Conflict, match=f"job '{OTHER}' is running: a bot has it; none of the 2 jobs was changed"):
        call(command, OTHER, ONE)
    stands.script = in_turn(Answer({"jobs": [{"id": ONE, "state": "failed", "changed": False}]}))
    with pytest.raises(Conflict, match=f"job '{ONE}' is failed: it does not wait; nothing was changed"):
        call(command, ONE)  # as a gateway of an older version answers
    stands.script = in_turn(Answer({"jobs": [], "next": None}))
    capsys.readouterr()
    call(command, "--all", "--label", "nightly")
    assert "no job that this could change" in capsys.readouterr().err


# Jobs that are queued again: a held one as itself, a final one as a new job that names it.


SAME = (
    "instance", "platform", "label", "priority", "units", "locality_hint", "timeout_seconds", "max_attempts",
    "retry_failed", "cohort",
)  # fmt: skip


def requeue(
    pool: Pool, *jobs: str, key: str | None = None, ceiling: int | None = None, repeat: bool = True
) -> list[Requeued]:
    given: dict[str, Any] = {"instances": None, "ceiling": ceiling, "key": key, "reason": None, "actor": "test"}
    return pool.database.run(lambda c: requeue_moves.requeue(c, jobs, **given, repeat=repeat))


def payload(pool: Pool, job: str) -> Any:
    return pool.row("SELECT payload FROM job_payloads WHERE job_id = :id", id=pool.job(job).id).payload


def metadata(pool: Pool, job: str) -> dict[str, str]:
    rows = pool.rows("SELECT key, value FROM job_metadata WHERE job_id = :id", id=pool.job(job).id)
    return {row.key: row.value for row in rows}


def test_a_failed_job_stays_final_and_a_new_one_like_it_is_queued(pool: Pool) -> None:
    job, bot, work = pool.running(
        instance="ci",
        priority=-3,
        label="nightly",
        locality_hint="core",
        timeout_seconds=60,
        queue_timeout_seconds=600,
        max_attempts=7,
        payload={"command": ["make"], "env": {"A": "1"}, "stdin": "yes"},
        metadata={"build": "12", "commit": ""},
    )
    bot.sync(completed(work, "failed"))
    before = pool.history(job)
    (found,) = requeue(pool, job)
    assert (found.public_id, found.state, found.changed) == (job, "failed", True)
    assert found.successor not in (None, job)
    old, new = pool.job(job), pool.job(str(found.successor))
    assert {name: getattr(new, name) for name in SAME} == {name: getattr(old, name) for name in SAME}
    assert payload(pool, job) == payload(pool, str(found.successor))
    assert metadata(pool, job) == metadata(pool, str(found.successor)) == {"build": "12", "commit": ""}
    assert (new.state, new.attempts, new.queue_deadline - new.created_at) == ("queued", 0, timedelta(minutes=10))
    assert (old.state, pool.history(job)) == ("failed", before), "a final job gets no events"
    event = pool.row("SELECT move, actor, details FROM job_events WHERE job_id = :id", id=new.id)
    assert (event.move, event.actor, event.details) == ("submit", "test", {"from": job, "queue_timeout_seconds": 600})


def test_requeue_goes_by_the_state_each_job_is_in(pool: Pool) -> None:
    running, bot, work = pool.running(label="done")
    queued, held, cancelled = pool.submit(3)
    park(pool, held)
    cancel(pool, cancelled)
    absent = "00000000-0000-4000-8000-000000000000"
    found = requeue(pool, running, queued, held, cancelled, absent)
    new = found[3].successor
    assert found == [
        Requeued(running, "running", running, changed=False),
        Requeued(queued, "queued", queued, changed=False),
        Requeued(held, "queued", held, changed=True),
        Requeued(cancelled, "cancelled", new, changed=True),
        Requeued(absent, None, None, changed=False),
    ]
    assert new not in (None, cancelled)
    bot.sync(completed(work))
    assert requeue(pool, running) == [Requeued(running, "succeeded", None, changed=False)]


def test_one_key_makes_one_new_job_and_another_key_another(pool: Pool) -> None:
    one, two = pool.submit(2)
    cancel(pool, one, two)
    first = requeue(pool, one, two, key="again")
    repeated = requeue(pool, one, two, key="again")
    assert [job.successor for job in repeated] == [job.successor for job in first]
    assert [(job.state, job.changed) for job in repeated] == [("cancelled", False)] * 2
    assert len({job.successor for job in [*first, *requeue(pool, one, key="other"), *requeue(pool, one)]}) == 4


@pytest.mark.parametrize(("commit", "repeat"), [(True, True), (False, True), (True, False), (False, False)])
def test_of_two_requeues_with_one_key_or_by_filters_only_one_makes_a_job(
    pool: Pool, race: Race, commit: bool, repeat: bool
) -> None:
    (job,) = pool.submit()
    cancel(pool, job)
    with race.first() as first:
        (ahead,) = requeue(first, job, key="again", repeat=repeat)
        late = race.second(lambda: requeue(pool, job, key="again" if repeat else "other", repeat=repeat), behind=first)
        first.decide(commit)
        (found,) = outcome(late)
    assert found.changed is not commit
    assert (found.successor == ahead.successor) is commit
    assert len(pool.rows("SELECT id FROM jobs")) == 2


def test_a_key_that_somebody_submitted_with_is_refused(pool: Pool) -> None:
    (job,) = pool.submit()
    cancel(pool, job)
    pool.submit(key=f"requeue:again:{job}")
    with pytest.raises(Conflict, match="was used for another job"):
        requeue(pool, job, key="again")


def test_a_full_queue_refuses_and_nothing_is_released(pool: Pool) -> None:
    over, held = pool.submit(2, label="nightly")
    cancel(pool, over)
    park(pool, held)
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('nightly', 0)")
    with pytest.raises(QueueFull, match="'nightly' may have 0"):
        requeue(pool, over, held)
    assert pool.job(held).state == "parked"


def test_a_new_job_is_never_more_urgent_than_the_token_allows(pool: Pool) -> None:
    urgent, other = pool.submit(priority=-5)[0], pool.submit(priority=0)[0]
    cancel(pool, urgent, other)
    with pytest.raises(Forbidden, match="would have the priority -5"):
        requeue(pool, other, urgent, ceiling=0)
    assert len(pool.rows("SELECT id FROM jobs")) == 2
    assert requeue(pool, other, ceiling=0)[0].changed


def test_who_withdrew_from_a_shared_job_gets_a_job_of_its_own(pool: Pool) -> None:
    (job,) = pool.submit(dedup_key="same")
    (follower,) = pool.submit(dedup_key="same")
    cancel(pool, follower)
    (found,) = requeue(pool, follower)
    assert (found.state, found.changed) == ("cancelled", True)
    new = pool.job(str(found.successor))
    assert (new.state, new.dedup_key) == ("queued", None)
    assert pool.job(job).state == "queued"


def test_requeueing_over_the_wire_is_safe_to_repeat_and_audited(operator: httpx.Client, database: Database) -> None:
    (job,) = submitted(operator, JOB)
    operator.post("/v1/jobs/cancel", json={"ids": [job]})
    body = {"ids": [job, "nonsense"], "key": "k", "reason": "flaky"}
    first, again = (operator.post("/v1/jobs/requeue", json=body).json()["jobs"] for _ in range(2))
    assert (first[0]["state"], first[0]["changed"], again[0]["changed"]) == ("cancelled", True, False)
    assert first[0]["job"] == again[0]["job"] != job
    nothing = {"id": "nonsense", "state": None, "changed": False, "why": None}
    assert first[1] == nothing | {"job": None, "left_out": False}
    (event,) = operator.get(f"/v1/jobs/{first[0]['job']}").json()["events"]
    assert event["details"] == {"from": job}
    assert audited(database).count("jobs.requeue") == 2
    noted = database.run(
        lambda c: c.execute(Statement("SELECT details FROM audit WHERE action = 'jobs.requeue'")).first()
    )
    assert noted is not None
    assert noted.details == {"jobs": 1, "reason": "flaky"}
    assert operator.post("/v1/jobs/requeue", json={"ids": [job] * 501}).status_code == 422
    assert operator.post("/v1/jobs/requeue", json={"ids": [job], "key": "k" * 151}).json()["field"] == "key"


def test_the_command_tells_the_new_ids_and_waits_for_them_if_there_are_any(
    stands: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Answer({"jobs": [{"id": ONE, "state": "dead", "changed": True, "job": OTHER}]})
    stands.script = in_turn(answer)
    call("requeue", ONE)
    assert capsys.readouterr().out == f"{ONE} dead, again as {OTHER}\n"
    assert stands.asked[0].body["key"], "a retry must not make a second one"
    stands.script = in_turn(answer, Answer({"jobs": [final(OTHER, "succeeded")], "done": True}))
    call("requeue", ONE, "--wait", "--key", "k", "--json")
    assert [job["id"] for job in json.loads(capsys.readouterr().out)] == [OTHER]
    assert [asked.body["ids"] for asked in stands.asked[1:]] == [[ONE], [OTHER]]
    assert stands.asked[1].body["key"] == "k"
    many = [{"id": ONE, "state": "dead", "changed": True, "job": OTHER}] * 21
    for answers, said in ((many, "21 jobs in all\n"), (many[:20], "")):
        stands.script = in_turn(Answer({"jobs": answers}))
        call("requeue", ONE)
        assert capsys.readouterr().err == said
    del stands.asked[:]
    before = {"id": ONE, "state": "dead", "changed": False, "job": OTHER, "left_out": True}
    stands.script = in_turn(Answer({"jobs": [before], "next": None}))
    call("requeue", "--all", "--label", "x")
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "", "1 job was left out: requeued before; `leasehold requeue ID` copies one again\n"
    )  # fmt: skip
    for state, error in (("succeeded", LeaseholdError), (None, NotFound)):
        left = {"id": ONE, "state": state, "changed": False, "job": None, "why": state and "only some are"}
        stands.script = in_turn(Answer({"jobs": [left]}))
        said = f"job '{ONE}' is succeeded: only some are; nothing was changed" if state else "."
        with pytest.raises(error, match=said):
            call("requeue", ONE, "--wait")
