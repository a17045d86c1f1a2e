"""Jobs that are queued again: a held one as itself, a final one as a new job that names it."""

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from schema import moves
from schema.engine import Database
from schema.errors import Conflict, Forbidden, LeaseholdError, NotFound, QueueFull
from schema.moves import Requeued
from tests.calling import JOB, audited, submitted
from tests.commanding import JOB as ONE
from tests.commanding import OTHER, call, final
from tests.pool import Pool, completed
from tests.racing import Race, cancel, outcome, park
from tests.scripted import Answer, Gateway, in_turn

SAME = (
    "instance", "platform", "label", "priority", "units", "locality_hint", "timeout_seconds", "max_attempts",
    "retry_failed", "cohort",
)  # fmt: skip


def requeue(pool: Pool, *jobs: str, key: str | None = None, ceiling: int | None = None) -> list[Requeued]:
    return pool.database.run(
        lambda c: moves.requeue(c, jobs, instances=None, ceiling=ceiling, key=key, reason=None, actor="test")
    )


def payload(pool: Pool, job: str) -> Any:
    return pool.row("SELECT payload FROM job_payloads WHERE job_id = :id", id=pool.job(job).id).payload


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
    )
    bot.sync(completed(work, "failed"))
    before = pool.history(job)
    (found,) = requeue(pool, job)
    assert (found.public_id, found.state, found.changed) == (job, "failed", True)
    assert found.successor not in (None, job)

    old, new = pool.job(job), pool.job(str(found.successor))
    assert {name: getattr(new, name) for name in SAME} == {name: getattr(old, name) for name in SAME}
    assert payload(pool, job) == payload(pool, str(found.successor))
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


@pytest.mark.parametrize("commit", [True, False])
def test_of_two_requeues_with_one_key_only_one_makes_a_job(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    cancel(pool, job)
    with race.first() as first:
        (ahead,) = requeue(first, job, key="again")
        late = race.second(lambda: requeue(pool, job, key="again"), behind=first)
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
    with pytest.raises(Forbidden, match="has the priority -5"):
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
    assert first[1] == {"id": "nonsense", "state": None, "changed": False, "job": None}
    (event,) = operator.get(f"/v1/jobs/{first[0]['job']}").json()["events"]
    assert event["details"] == {"from": job}
    assert audited(database).count("jobs.requeue") == 2
    noted = database.run(lambda c: c.execute(text("SELECT details FROM audit WHERE action = 'jobs.requeue'")).first())
    assert noted is not None
    assert noted.details == {"jobs": 1, "reason": "flaky"}
    assert operator.post("/v1/jobs/requeue", json={"ids": [job] * 501}).status_code == 422
    assert operator.post("/v1/jobs/requeue", json={"ids": [job], "key": "k" * 151}).json()["field"] == "key"


def test_the_command_tells_the_new_ids_and_waits_for_them(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_there_is_nothing_to_wait_for_if_the_job_succeeded_or_is_absent(stands: Gateway) -> None:
    stands.script = in_turn(Answer({"jobs": [{"id": ONE, "state": "succeeded", "changed": False, "job": None}]}))
    with pytest.raises(LeaseholdError, match="nothing to wait for"):
        call("requeue", ONE, "--wait")
    stands.script = in_turn(Answer({"jobs": [{"id": ONE, "state": None, "changed": False, "job": None}]}))
    with pytest.raises(NotFound):
        call("requeue", ONE, "--wait")
