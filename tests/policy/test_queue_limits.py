"""How many jobs of a label or an instance may wait: what is refused, what is not, two at once for the last place."""

from functools import partial
from typing import Any

import httpx
import pytest
from leasehold.errors import QueueFull
from pydantic import ValidationError

from schema.moves.graphs import submit_graph
from schema.moves.submit import Submitted, submit
from schema.policy.queue_limits import QueueSettings, set_instance_queue_limits
from schema.postgres.engine import Database
from schema.requests import GraphRequest
from tests.support.http import JOB, submitted
from tests.support.pool import Pool, completed
from tests.support.race import Race, at_service_of, cancel, outcome, park, unpark
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
    """The refusal does not tell how many others have submitted."""
    for _ in range(3):
        before = counts(pool.database)
        with pytest.raises(QueueFull) as refused:
            together(pool, *[NIGHTLY] * 2, {"label": "other"}, *[NIGHTLY] * 2)
        assert str(refused.value) == "label 'nightly' may have 3 queued jobs, held ones included: no room for 4 more"
        assert refused.value.code == "queue_full"
        assert counts(pool.database) == before
        pool.submit(1, **NIGHTLY)
    pool.submit(5, label="other")
    pool.submit(5)


def test_those_that_wait_count_and_those_that_a_release_would_let_into_the_queue(pool: Pool) -> None:
    pool.running(**NIGHTLY)
    held, last = pool.submit(2, **NIGHTLY), pool.submit(**NIGHTLY)[0]
    park(pool, *held)
    with pytest.raises(QueueFull):
        pool.submit(**NIGHTLY)
    cancel(pool, last)
    pool.submit(**NIGHTLY)
    unpark(pool, *held)
    assert queued(pool) == 3
    pool.change("UPDATE queue_limits SET max_queued = 0")
    with pytest.raises(QueueFull, match="may have 0 queued jobs"):
        pool.submit(**NIGHTLY)


def test_a_request_that_was_taken_before_or_joins_a_job_is_taken_although_the_queue_is_full(pool: Pool) -> None:
    shared = NIGHTLY | {"dedup_key": "a"}
    keyed = [NIGHTLY | {"key": str(n)} for n in range(2)]
    together(pool, shared, shared, shared)
    taken = together(pool, *keyed)
    assert queued(pool) == 3
    assert [one.public_id for one in together(pool, *keyed)] == [one.public_id for one in taken]
    with pytest.raises(QueueFull, match="no room for 1 more"):
        together(pool, *keyed, NIGHTLY | {"key": "new"})
    together(pool, shared, shared | {"key": "k"})
    together(pool, shared | {"key": "k"})
    for other in (NIGHTLY | {"dedup_key": "b"}, shared | {"instance": "another"}):
        with pytest.raises(QueueFull):
            together(pool, shared, other)
    assert queued(pool) == 3


@pytest.mark.parametrize(("jobs", "fields"), [(1, NIGHTLY), (1, {}), (2, {})], ids=["of a label", "one", "two"])
def test_submits_at_once_may_exceed_the_limit_by_what_is_not_committed_and_later_ones_are_refused(
    pool: Pool, race: Race, jobs: int, fields: dict[str, Any]
) -> None:
    limit_instance(pool, None, 4)
    most = 3 if fields else 4
    pool.submit(most - jobs, **fields)
    race.side_by_side(lambda first: first.submit(jobs, **fields), lambda: pool.submit(jobs, **fields))
    with pytest.raises(QueueFull):
        pool.submit(**fields)
    assert queued(pool) == most + jobs


def test_a_repeated_request_waits_for_the_first_one_and_is_not_refused(pool: Pool, race: Race) -> None:
    """Its answer was lost on the way, and it took the last place."""
    pool.submit(2, **NIGHTLY)
    mine = race.in_turn(lambda first: first.submit(key="k", **NIGHTLY), lambda: pool.submit(key="k", **NIGHTLY))
    assert pool.submit(key="k", **NIGHTLY) == mine


def test_a_label_without_a_limit_waits_for_nobody(pool: Pool, race: Race) -> None:
    pool.submit()
    cases: list[dict[str, Any]] = [{}, {"label": "other"}, {"dedup_key": "x"}]
    with race.first() as first:
        first.submit(**NIGHTLY)
        for fields in cases:
            race.unhindered(partial(pool.submit, **fields), by=first)


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


# Instances


def limit_instance(pool: Pool, instance: str | None, most: int) -> None:
    pool.change("INSERT INTO instances (name) VALUES ('ci') ON CONFLICT DO NOTHING")
    pool.database.run(lambda c: set_instance_queue_limits(c, {instance: most}, actor="test"))


def test_each_instance_has_its_own_limit_or_the_default(pool: Pool) -> None:
    limit_instance(pool, None, 2)
    limit_instance(pool, "ci", 3)
    with pytest.raises(ValidationError, match="less than or equal to 100000"):
        QueueSettings(label="nightly", max_queued=100_001)
    for instance, most in (("default", 2), ("ci", 3), ("new", 2)):
        together(pool, *[{"instance": instance, "label": str(n)} for n in range(most)])
        before = counts(pool.database)
        for more in (1, 2):
            with pytest.raises(QueueFull) as refused:
                together(pool, *[{"instance": instance}] * more)
            assert str(refused.value) == (
                f"instance '{instance}' may have {most} queued jobs, held ones included: no room for {more} more"
            )
        assert counts(pool.database) == before
    with pytest.raises(QueueFull, match="instance 'newer' may have 2"):
        together(pool, *[{"instance": "newer"}] * 3)


def test_whatever_waits_of_an_instance_counts(pool: Pool) -> None:
    """Ready jobs, constrained ones, those to be tried again, and those held aside; not those that run or are over."""
    limit_instance(pool, "default", 4)
    _, bot, work = pool.running(retry_failed=True)
    bot.sync(completed(work, "failed"))
    (held,) = pool.submit(label="other")
    park(pool, held)
    last = pool.submit(2, terms={"locks": ["tree"]})[-1]
    assert pool.row("SELECT count(*) AS n FROM jobs WHERE schedule_after IS NOT NULL").n == 1
    with pytest.raises(QueueFull):
        pool.submit()
    pool.submit(instance="ci")
    cancel(pool, last)
    pool.submit()
    with pytest.raises(QueueFull):
        pool.submit()


def test_a_label_and_an_instance_limit_hold_together(pool: Pool) -> None:
    limit_instance(pool, "default", 4)
    pool.submit(3, **NIGHTLY)
    with pytest.raises(QueueFull, match="label 'nightly'"):
        pool.submit(**NIGHTLY)
    pool.submit()
    with pytest.raises(QueueFull, match="instance 'default'"):
        pool.submit()


def test_all_nodes_of_a_graph_need_a_place_in_its_instance(pool: Pool) -> None:
    limit_instance(pool, "ci", 2)
    nodes = [{"node": n, "command": ["true"], "after": [n - 1] if n else []} for n in range(3)]
    request = GraphRequest.model_validate({"name": "g", "instance": "ci", "nodes": nodes}).normal()
    with pytest.raises(QueueFull, match="instance 'ci' may have 2 queued jobs, held ones included: no room for 3 more"):
        pool.database.run(lambda c: submit_graph(c, request, actor="test", sync=1.0))
    assert pool.rows("SELECT FROM graphs") == []
    pool.database.run(lambda c: submit_graph(c, request | {"nodes": request["nodes"][:2]}, actor="test", sync=1.0))


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
