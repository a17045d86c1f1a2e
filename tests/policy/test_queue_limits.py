"""How many jobs of a label may wait: what is refused, what is not, and two at once for the last place."""

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from assigner.cli import errors
from schema.errors import QueueFull
from schema.moves.hold import park, unpark
from schema.moves.submit import Submitted, submit
from schema.policy.queue_limits import QueueSettings
from schema.postgres.engine import Database
from tests.support.http import JOB, Gateway, problem, program, submitted
from tests.support.pool import Pool, completed
from tests.support.race import Race, at_service_of, cancel, outcome
from tests.support.servers import Served, counts

NIGHTLY: dict[str, Any] = {"label": "nightly"}


@pytest.fixture(autouse=True)
def limited(pool: Pool) -> None:
    """Three jobs of the label may wait."""
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('nightly', 3)")


def queued(pool: Pool) -> int:
    count: int = pool.row("SELECT count(*) AS n FROM jobs WHERE state = 'queued'").n
    return count


def together(pool: Pool, *jobs: dict[str, Any]) -> list[Submitted]:
    requests = [{"instance": "default", "properties": {}, "payload": {"command": ["true"]}, **job} for job in jobs]
    return pool.database.run(lambda c: submit(c, requests, actor="test"))


def test_jobs_beyond_the_limit_of_their_label_are_refused_and_nothing_is_written(pool: Pool) -> None:
    pool.submit(2, **NIGHTLY)
    before = counts(pool.database)
    with pytest.raises(QueueFull) as refused:
        together(pool, NIGHTLY, {"label": "other"}, NIGHTLY)
    assert str(refused.value) == "label 'nightly' may have 3 queued jobs, held ones included: no room for 2 more"
    assert refused.value.code == "queue_full"
    assert counts(pool.database) == before
    pool.submit(1, **NIGHTLY)
    pool.submit(5, label="other")
    pool.submit(5)


def test_a_label_with_the_limit_0_takes_nothing(pool: Pool) -> None:
    pool.change("UPDATE queue_limits SET max_queued = 0")
    with pytest.raises(QueueFull):
        pool.submit(**NIGHTLY)
    assert queued(pool) == 0


def test_only_those_that_wait_count(pool: Pool) -> None:
    pool.running(**NIGHTLY)
    last = pool.submit(3, **NIGHTLY)[-1]
    with pytest.raises(QueueFull):
        pool.submit(**NIGHTLY)
    cancel(pool, last)
    pool.submit(**NIGHTLY)


def test_held_jobs_count_because_a_release_lets_them_all_into_the_queue(pool: Pool) -> None:
    held = pool.submit(3, **NIGHTLY)
    pool.database.run(lambda c: park(c, held, instances=None, reason=None, actor="test"))
    with pytest.raises(QueueFull):
        pool.submit(**NIGHTLY)
    pool.database.run(lambda c: unpark(c, held, instances=None, reason=None, actor="test"))
    assert queued(pool) == 3


def test_a_refusal_does_not_tell_how_many_others_have_submitted(pool: Pool) -> None:
    told = set()
    for _ in range(3):
        with pytest.raises(QueueFull) as refused:
            pool.submit(4, **NIGHTLY)
        told.add(str(refused.value))
        pool.submit(**NIGHTLY)
    assert len(told) == 1


def test_a_limit_that_each_submit_could_not_count_up_to_is_refused() -> None:
    QueueSettings(label="nightly", max_queued=100_000)
    with pytest.raises(ValidationError, match="less than or equal to 100000"):
        QueueSettings(label="nightly", max_queued=100_001)


def test_a_request_that_was_taken_before_is_answered_although_the_queue_is_full(pool: Pool) -> None:
    keyed = [NIGHTLY | {"key": str(n)} for n in range(3)]
    taken = together(pool, *keyed)
    again = together(pool, *keyed)
    assert [one.public_id for one in again] == [one.public_id for one in taken]
    with pytest.raises(QueueFull, match="no room for 1 more"):
        together(pool, *keyed, NIGHTLY | {"key": "new"})


def test_a_request_that_joins_a_job_is_taken_although_the_queue_is_full(pool: Pool) -> None:
    shared = NIGHTLY | {"dedup_key": "a"}
    together(pool, shared, shared, shared, NIGHTLY, NIGHTLY)
    assert queued(pool) == 3
    together(pool, shared, shared | {"key": "k"})
    together(pool, shared | {"key": "k"})
    with pytest.raises(QueueFull):
        together(pool, shared, NIGHTLY | {"dedup_key": "b"})
    with pytest.raises(QueueFull):
        together(pool, shared | {"instance": "another"})
    assert queued(pool) == 3


@pytest.mark.parametrize("commit", [True, False])
def test_two_submitters_cannot_take_the_last_place_twice(pool: Pool, race: Race, commit: bool) -> None:
    pool.submit(2, **NIGHTLY)
    with race.first() as first:
        first.submit(**NIGHTLY)
        late = race.second(lambda: pool.submit(**NIGHTLY), behind=first)
        first.decide(commit)
        if commit:
            with pytest.raises(QueueFull):
                outcome(late)
        else:
            outcome(late)
    assert queued(pool) == 3


def test_a_repeated_request_waits_for_the_first_one_and_is_not_refused(pool: Pool, race: Race) -> None:
    """Its answer was lost on the way, and it took the last place."""
    pool.submit(2, **NIGHTLY)
    with race.first() as first:
        mine = first.submit(key="k", **NIGHTLY)
        late = race.second(lambda: pool.submit(key="k", **NIGHTLY), behind=first)
        first.commit()
        assert outcome(late) == mine


@pytest.mark.parametrize("fields", [{}, {"label": "other"}, {"dedup_key": "x"}])
def test_a_label_without_a_limit_waits_for_nobody(pool: Pool, race: Race, fields: dict[str, Any]) -> None:
    pool.submit()
    with race.first() as first:
        first.submit(**NIGHTLY)
        race.unhindered(lambda: pool.submit(**fields), by=first)


@pytest.mark.parametrize("commit", [True, False])
def test_a_duplicate_of_a_job_that_just_ends_needs_a_place_of_its_own(pool: Pool, race: Race, commit: bool) -> None:
    """It would have joined the running job, which adds none to those that wait."""
    _, bot, work = pool.running(dedup_key="a", **NIGHTLY)
    pool.submit(3, **NIGHTLY)
    with race.first() as first:
        at_service_of(first, bot).sync(completed(work), status="draining")
        late = race.second(lambda: pool.submit(dedup_key="a", **NIGHTLY), behind=first)
        first.decide(commit)
        if commit:
            with pytest.raises(QueueFull):
                outcome(late)
        else:
            outcome(late)
    assert queued(pool) == 3


def test_a_caller_is_told_which_label_is_full_and_may_repeat_what_was_taken(
    served: Served, operator: httpx.Client, database: Database
) -> None:
    mine = served.client(served.token("submitter", instance="ci"))
    keyed = JOB | NIGHTLY | {"key": "k"}
    (first,) = submitted(mine, keyed)
    submitted(operator, *[JOB | NIGHTLY] * 2)
    before = counts(database)
    refused = mine.post("/v1/jobs", json={"jobs": [JOB, JOB | NIGHTLY]})
    assert (refused.status_code, refused.json()["code"]) == (409, "queue_full")
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["detail"].startswith("label 'nightly' may have 3 queued jobs")
    assert counts(database) == before
    assert submitted(mine, keyed) == [first]


def test_the_command_says_in_one_line_that_a_queue_is_full(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    stands.script = lambda _: problem(409, "label 'nightly' may have 3 queued jobs", code="queue_full")
    assert errors.run(program, ["submit", "--label", "nightly", "true"]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "error: label 'nightly' may have 3 queued jobs\n")
