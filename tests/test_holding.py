"""Jobs that are held aside and released again: what is kept, who may, and who wins a race."""

from typing import Any

import httpx
import pytest

from schema.engine import Database
from schema.moves import Cancelled, Held
from tests.calling import JOB, audited, submitted
from tests.commanding import JOB as ONE
from tests.commanding import OTHER, call
from tests.pool import Pool
from tests.racing import Race, books, cancel, outcome, park, unpark
from tests.scripted import Answer, Gateway, in_turn
from tests.serving import Served


def last_event(pool: Pool, job: str) -> Any:
    return pool.row("SELECT * FROM job_events WHERE job_id = :id ORDER BY id DESC LIMIT 1", id=pool.job(job).id)


def test_a_held_job_is_not_placed_until_it_is_released_and_keeps_its_age(pool: Pool) -> None:
    older, newer = pool.submit(2)
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 h' WHERE id = :id", id=pool.job(older).id)
    queued_at = pool.job(older).queued_at
    assert park(pool, older, reason="disk is full") == [Held(older, "parked", changed=True)]
    assert pool.job(older).reason == "held: disk is full"
    assert last_event(pool, older).details == {"reason": "disk is full"}
    bot = pool.bot()
    pool.assigner().run_once()
    assert [work["job"] for work in bot.sync()["leases"]] == [newer], "the bot gets the other one"

    assert unpark(pool, older) == [Held(older, "queued", changed=True)]
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
        Held(job, "running", changed=False),
        Held(over, "cancelled", changed=False),
        Held(absent, None, changed=False),
    ]
    assert [found.changed for found in unpark(pool, job, over)] == [False, False]


def test_a_lost_bots_time_to_run_the_job_is_kept_through_a_hold(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 h' WHERE id = :id", id=pool.job(job).id)
    waits_until = pool.job(job).schedule_after
    park(pool, job)
    unpark(pool, job)
    assert pool.job(job).schedule_after == waits_until


def test_a_job_that_nobody_could_place_is_looked_at_again_once_it_is_released(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.change(
        "UPDATE jobs SET schedule_after = now() + interval '1 h', considered = 3 WHERE id = :id", id=pool.job(job).id
    )
    park(pool, job)
    unpark(pool, job)
    assert (pool.job(job).schedule_after, pool.job(job).considered) == (None, 0)


def test_the_time_a_job_is_held_does_not_count_towards_its_queue_timeout(pool: Pool) -> None:
    (job,) = pool.submit(queue_timeout_seconds=60)
    deadline = pool.job(job).queue_deadline
    park(pool, job)
    pool.change("UPDATE job_events SET at = at - interval '30 s' WHERE move = 'hold'")
    unpark(pool, job)
    moved = (pool.job(job).queue_deadline - deadline).total_seconds()
    assert 30 <= moved < 40
    assert 30 <= last_event(pool, job).details["held_seconds"] < 40


def test_room_reserved_for_a_held_job_is_given_up_by_upkeep(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    row = pool.job(job)
    pool.change(
        "WITH kept AS (UPDATE bots SET reserved = 1 RETURNING id), rests AS (UPDATE jobs SET"
        " schedule_after = now() + interval '1 h' WHERE id = :id)"
        " INSERT INTO reservations (job_id, bot_id, units, until)"
        " SELECT :id, id, 1, now() + interval '1 h' FROM kept",
        id=row.id,
    )
    park(pool, job, reason="wait")
    pool.upkeep().run_once()
    assert pool.row("SELECT reserved FROM bots").reserved == 0
    assert pool.job(job).reason == "held: wait"
    unpark(pool, job)
    pool.assigner().run_once()
    assert [work["job"] for work in bot.sync()["leases"]] == [job], "it need not wait for a reservation that is over"


@pytest.mark.parametrize("commit", [True, False])
def test_an_assigner_passes_over_a_job_that_is_being_held(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    pool.bot()
    race.side_by_side(lambda first: park(first, job), pool.assigner().run_once, commit=commit)
    pool.assigner().run_once()
    assert pool.job(job).state == ("parked" if commit else "leased")


@pytest.mark.parametrize("commit", [True, False])
def test_a_hold_waits_for_the_grant_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    pool.bot()
    assert race.in_turn(lambda first: first.assigner().run_once(), lambda: park(pool, job), commit=commit) == [
        Held(job, "leased" if commit else "parked", changed=not commit)
    ]
    assert books(pool, job)["in_use"] == [1 if commit else 0]


@pytest.mark.parametrize("commit", [True, False])
def test_a_release_waits_for_the_cancel_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit()
    park(pool, job)
    with race.first() as first:
        assert cancel(first, job) == [Cancelled(job, "cancelled", changed=True)]
        late = race.second(lambda: unpark(pool, job), behind=first)
        first.decide(commit)
        assert outcome(late) == [Held(job, "cancelled" if commit else "queued", changed=not commit)]


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
    assert park(pool, follower) == [Held(follower, "cancelled", changed=False)]
    (other,) = pool.submit(dedup_key="same")
    assert park(pool, other) == [Held(other, "parked", changed=True)]
    assert pool.job(job).state == "parked"


def test_holding_over_the_wire_is_listed_counted_and_audited(operator: httpx.Client, database: Database) -> None:
    one, two = submitted(operator, JOB, JOB)
    answer = operator.post("/v1/jobs/hold", json={"ids": [one.upper(), "nonsense"], "reason": "later"}).json()
    assert answer == {
        "jobs": [
            {"id": one.upper(), "state": "parked", "changed": True},
            {"id": "nonsense", "state": None, "changed": False},
        ]
    }
    assert [job["id"] for job in operator.get("/v1/jobs", params={"state": "parked"}).json()["jobs"]] == [one]
    assert operator.get("/v1/status").json()["jobs"] == {"parked": 1, "queued": 1}
    assert operator.post("/v1/jobs/release", json={"ids": [one, two]}).json()["jobs"] == [
        {"id": one, "state": "queued", "changed": True},
        {"id": two, "state": "queued", "changed": False},
    ]
    assert {"jobs.hold", "jobs.release"} <= set(audited(database))
    assert operator.post("/v1/jobs/hold", json={"ids": ["nonsense"]}).status_code == 404
    refused = operator.post("/v1/jobs/hold", json={"ids": [one], "reason": "x" * 501})
    assert (refused.status_code, refused.json()["field"]) == (400, "reason")


@pytest.mark.parametrize("act", ["hold", "release", "requeue"])
def test_a_submitter_may_not_hold_release_or_requeue_even_its_own_jobs(
    operator: httpx.Client, served: Served, act: str
) -> None:
    (mine,) = submitted(operator, JOB | {"instance": "ci"})
    if act != "hold":
        operator.post("/v1/jobs/hold", json={"ids": [mine]})
    before = operator.get(f"/v1/jobs/{mine}").json()["state"]
    with served.client(served.token("submitter", instance="ci")) as http:
        assert http.post(f"/v1/jobs/{act}", json={"ids": [mine]}).status_code == 403
    assert operator.get(f"/v1/jobs/{mine}").json()["state"] == before


@pytest.mark.parametrize(("command", "state"), [("hold", "parked"), ("release", "queued")])
@pytest.mark.usefixtures("no_pool_of_our_own")
def test_the_commands_tell_what_became_of_each(
    stands: Gateway, capsys: pytest.CaptureFixture[str], command: str, state: str
) -> None:
    answers = [{"id": ONE, "state": state, "changed": True}, {"id": OTHER, "state": "running", "changed": False}]
    stands.script = in_turn(Answer({"jobs": answers}))
    call(command, ONE, OTHER, ONE, "--reason", "why")
    assert capsys.readouterr().out == f"{ONE} {state}\n{OTHER} running (unchanged)\n"
    assert stands.paths() == [f"POST /v1/jobs/{command}"]
    assert stands.asked[0].body == {"ids": [ONE, OTHER], "reason": "why"}
