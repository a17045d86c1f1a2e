"""Ceilings: what a submit may ask for, what it gets if it asks for nothing, and the end of what is beyond them."""

from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound
from leasehold.states import EndKind, end_kind

from schema.moves.graphs import submit_graph
from schema.moves.submit import Submitted, submit
from schema.moves.waiting import timeouts
from schema.moves.waiting.requeue import requeue
from schema.policy.ceilings import CeilingTerms, remove_ceilings, set_ceilings
from schema.postgres.statements import Statement
from schema.requests import GraphRequest, JobRequest
from tests.support.explain import explained, gates_of
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, park, unpark
from tests.support.servers import counts

REFUSED = "a ceiling of the pool, of its instance or of its label"


def ceiling(pool: Pool, instance: str | None = None, label: str | None = None, **terms: float | None) -> None:
    pool.change("INSERT INTO instances (name) VALUES ('ci'), ('default') ON CONFLICT DO NOTHING")
    pool.database.run(lambda c: set_ceilings(c, {(instance, label): CeilingTerms(**terms)}, actor="test"))


def together(pool: Pool, *jobs: dict[str, Any]) -> list[Submitted]:
    requests = [{"instance": "default", "properties": {}, "payload": {"command": ["true"]}, **job} for job in jobs]
    return pool.database.run(lambda c: submit(c, requests, actor="test"))


def stored(pool: Pool, job: str) -> float | None:
    found: float | None = pool.job(job).timeout_seconds
    return found


def end_aged(pool: Pool, limit: int = 500) -> int:
    return pool.database.run(lambda c: timeouts.age_out(c, limit, actor="upkeep"))


def test_the_tightest_of_pool_instance_and_label_holds(pool: Pool) -> None:
    ceiling(pool, max_timeout=100.0, default_timeout=90.0)
    ceiling(pool, "ci", max_timeout=50.0)
    ceiling(pool, None, "quick", max_timeout=20.0, default_timeout=10.0)
    ceiling(pool, "ci", "quick", max_timeout=5.0)
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 90.0),
        ({"instance": "ci"}, 50.0),
        ({"label": "quick"}, 10.0),
        ({"label": "quick", "instance": "ci"}, 5.0),
        ({"label": "other"}, 90.0),
        ({"timeout_seconds": 100.0}, 100.0),
        ({"timeout_seconds": 20.0, "label": "quick"}, 20.0),
    ]
    assert [stored(pool, pool.submit(**fields)[0]) for fields, _ in cases] == [timeout for _, timeout in cases]


@pytest.mark.parametrize("field", ["timeout_seconds", "queue_timeout_seconds"])
def test_a_time_beyond_the_ceiling_is_refused_by_its_field_and_nothing_is_stored(pool: Pool, field: str) -> None:
    ceiling(pool, max_timeout=60.0, max_queue_age=60.0)
    for others in (0, 1):
        together(pool, {field: 60.0}, *[{}] * others)
        before = counts(pool.database)
        with pytest.raises(BadInput) as refused:
            together(pool, *[{}] * others, {field: 60.001})
        assert refused.value.field == f"jobs.{others}.{field}"
        assert refused.value.reason == f"must be at most 60, {REFUSED}"
        assert counts(pool.database) == before


def test_a_service_level_gives_a_timeout_up_to_the_ceiling(pool: Pool) -> None:
    ceiling(pool, default_timeout=10.0)
    levels = [JobRequest(command=["true"], service_level=level).normal() for level in ("premium", "economy")]
    assert [stored(pool, each.public_id) for each in together(pool, *levels)] == [7200.0, 1800.0]
    ceiling(pool, max_timeout=3600.0)
    assert [stored(pool, each.public_id) for each in together(pool, *levels)] == [3600.0, 1800.0]
    (alone,) = together(pool, levels[0])
    assert stored(pool, alone.public_id) == 3600.0


def test_a_node_of_a_graph_keeps_the_ceilings_of_the_instance_of_its_graph(pool: Pool) -> None:
    ceiling(pool, "ci", default_timeout=5.0, max_timeout=60.0)

    def graph(timeout: float, instance: str) -> list[float | None]:
        nodes = [{"node": 1, "command": ["true"]}, {"node": 2, "command": ["true"], "timeout_seconds": timeout}]
        request = GraphRequest.model_validate({"name": "g", "instance": instance, "nodes": nodes}).normal()
        pool.database.run(lambda c: submit_graph(c, request, actor="test", sync=1.0))
        rows = pool.rows("SELECT timeout_seconds FROM jobs j JOIN graph_nodes n ON n.job_id = j.id ORDER BY j.id")
        return [row.timeout_seconds for row in rows][-2:]

    assert graph(60.0, "ci") == [5.0, 60.0]
    assert graph(61.0, "default") == [None, 61.0]
    before = counts(pool.database)
    with pytest.raises(BadInput, match=r"nodes\.1\.timeout_seconds: must be at most 60"):
        graph(61.0, "ci")
    assert counts(pool.database) == before


def test_a_request_that_was_taken_before_or_joins_a_job_is_answered_whatever_the_ceiling_is_now(pool: Pool) -> None:
    shared = {"dedup_key": "a", "timeout_seconds": 90.0}
    asked = [{"key": "a", "timeout_seconds": 90.0}, {"key": "b"}]
    (first,), taken = together(pool, shared), together(pool, *asked)
    ceiling(pool, max_timeout=60.0, default_timeout=30.0)
    assert [each.public_id for each in together(pool, *asked)] == [each.public_id for each in taken]
    assert together(pool, asked[0])[0].public_id == taken[0].public_id
    (joined,) = together(pool, shared | {"key": "k"})
    assert (joined.job_id, joined.created) == (first.job_id, False)
    assert together(pool, shared | {"key": "k"}, {})[0].public_id == joined.public_id
    with pytest.raises(BadInput, match=r"jobs\.0\.timeout_seconds"):
        together(pool, shared | {"dedup_key": "b"})
    for under in together(pool, {"key": "c"}) + together(pool, {"dedup_key": "c"}):
        assert stored(pool, under.public_id) == 30.0
    ceiling(pool, default_timeout=20.0)
    (again,) = together(pool, {"key": "c"})
    assert (again.created, stored(pool, again.public_id)) == (False, 30.0)


def test_a_job_that_is_made_again_is_cut_to_the_ceiling(pool: Pool) -> None:
    (job,) = pool.submit(timeout_seconds=90.0, queue_timeout_seconds=90.0)
    pool.change("UPDATE jobs SET queue_deadline = now() - interval '1 s'")
    assert pool.database.run(lambda c: timeouts.time_out(c, 10, actor="upkeep")) == 1
    ceiling(pool, max_timeout=60.0, max_queue_age=30.0)
    (again,) = pool.database.run(
        lambda c: requeue(c, [job], instances=None, ceiling=None, key="k", reason=None, actor="test")
    )
    assert again.successor is not None
    row = pool.job(again.successor)
    assert (row.timeout_seconds, (row.queue_deadline - row.queued_at).total_seconds()) == (60.0, 30.0)


def test_a_job_that_waits_for_longer_than_the_ceiling_is_dead_whenever_it_was_submitted(pool: Pool) -> None:
    (old, other) = pool.submit(2)
    (labelled,) = pool.submit(label="quick")
    (elsewhere,) = pool.submit(instance="ci", label="quick")
    pool.change("UPDATE jobs SET queued_at = now() - interval '10 min'")
    pool.change(f"UPDATE jobs SET queued_at = now() WHERE public_id = '{other}'")
    assert end_aged(pool) == 0
    ceiling(pool, "default", "quick", max_queue_age=599.0)
    pool.upkeep().run_once()
    row = pool.job(labelled)
    assert (row.state, row.reason) == ("dead", "waited longer than the ceiling of its queue age")
    assert end_kind(row.state, row.reason) is EndKind.QUEUE_TIMEOUT
    assert pool.history(labelled) == ["submit", "time_out"]
    event = pool.row("SELECT actor, details FROM job_events WHERE move = 'time_out'")
    assert event.details == {"max_queue_age": 599}
    assert (pool.job(old).state, pool.job(elsewhere).state) == ("queued", "queued")
    ceiling(pool, max_queue_age=599.0)
    assert end_aged(pool) == 2
    assert [pool.job(job).state for job in (old, elsewhere, other)] == ["dead", "dead", "queued"]


def test_the_ceiling_of_the_queue_age_is_exact_and_works_in_batches(pool: Pool) -> None:
    ceiling(pool, max_queue_age=60.0)
    pool.submit(3, job_class=None)
    pool.submit(2, label="quick", terms={"locks": ["tree"]})

    def at(connection: Any, seconds: float) -> int:
        connection.execute(Statement("UPDATE jobs SET queued_at = now() - make_interval(secs => :s)"), {"s": seconds})
        return timeouts.age_out(connection, 4, actor="upkeep")

    assert pool.database.run(lambda c: at(c, 60.0)) == 0
    assert pool.database.run(lambda c: at(c, 60.001)) == 4
    assert (end_aged(pool, 4), end_aged(pool, 4)) == (1, 0)


def test_only_the_wait_for_the_first_start_counts_and_not_the_time_aside(pool: Pool) -> None:
    ceiling(pool, max_queue_age=60.0)
    (held,) = pool.submit()
    park(pool, held)
    pool.change(
        "UPDATE stored_events SET at = at - interval '1 h'; UPDATE jobs SET queued_at = queued_at - interval '1 h'"
    )
    assert end_aged(pool) == 0
    unpark(pool, held)
    assert end_aged(pool) == 0
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '61 s'")
    assert end_aged(pool) == 1

    job, bot, work = pool.running()
    bot.sync(completed(work, "released"))
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 h'")
    assert (pool.job(job).state, end_aged(pool)) == ("queued", 0)


def test_a_job_that_is_about_to_be_granted_is_passed_by(pool: Pool, race: Race) -> None:
    ceiling(pool, max_queue_age=60.0)
    (job,) = pool.submit()
    pool.bot()
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 h'")
    with race.first() as ahead:
        ahead.assigner().run_once()
        assert race.unhindered(lambda: end_aged(pool), by=ahead) == 0
        ahead.commit()
    assert (end_aged(pool), pool.job(job).state) == (0, "leased")


def test_a_run_that_is_longer_than_the_ceiling_is_ended_whenever_it_was_submitted(pool: Pool) -> None:
    job, bot, work = pool.running()
    pool.change("UPDATE leases SET acknowledged_at = now() - interval '10 min'")
    pool.upkeep().run_once()
    ceiling(pool, max_timeout=601.0)
    pool.upkeep().run_once()
    assert pool.row("SELECT state FROM live").state == "active"
    ceiling(pool, max_timeout=599.0)
    pool.upkeep().run_once()
    (lease,) = bot.sync(active(work))["leases"]
    assert (lease["state"], lease["stop_reason"]) == ("cancelling", "ceiling")
    bot.sync(completed(work, "stopped"))
    row = pool.job(job)
    assert (row.state, row.reason) == ("dead", "ran longer than the ceiling of its timeout")
    assert end_kind(row.state, row.reason) is EndKind.TIMEOUT
    assert pool.history(job) == ["submit", "grant", "acknowledge", "ceiling", "give_up"]
    assert pool.row("SELECT details FROM job_events WHERE move = 'ceiling'").details == {"max_timeout": 599}


def test_a_job_whose_own_timeout_keeps_the_ceiling_is_left_to_its_bot(pool: Pool) -> None:
    pool.running(timeout_seconds=60.0)
    ceiling(pool, max_timeout=60.0)
    pool.change("UPDATE leases SET acknowledged_at = now() - interval '10 min'")
    assert pool.database.run(lambda c: timeouts.stop_over_ceiling(c, 10, sync=1.0, actor="upkeep")) == 0
    ceiling(pool, max_timeout=59.0)
    assert pool.database.run(lambda c: timeouts.stop_over_ceiling(c, 10, sync=1.0, actor="upkeep")) == 1


def test_explain_says_how_long_a_job_may_wait_under_the_ceiling(pool: Pool) -> None:
    ceiling(pool, max_queue_age=3600.0)
    (job,) = pool.submit()
    assert 3000 < gates_of(explained(pool, job))["queue deadline"].evidence["left_seconds"] <= 3600


def test_what_makes_no_sense_is_refused(pool: Pool) -> None:
    ceiling(pool, max_timeout=60.0)
    with pytest.raises(BadInput, match="default_timeout: must be at most 60, the longest run time"):
        ceiling(pool, default_timeout=61.0)
    with pytest.raises(NotFound, match="there is no instance 'nosuch'"):
        ceiling(pool, "nosuch", max_timeout=1.0)
    ceiling(pool, max_timeout=None)
    assert pool.rows("SELECT FROM ceilings") == []
    assert stored(pool, pool.submit()[0]) is None


@pytest.mark.parametrize("commit", [True, False])
def test_a_submit_looks_at_a_ceiling_that_was_set_while_the_last_other_one_went(
    pool: Pool, race: Race, *, commit: bool
) -> None:
    """Submits ask one table whether there is any limit; whoever takes the last one away must not hide a new one."""
    ceiling(pool, label="old", max_timeout=5)
    with race.first() as first:
        set_ceilings(first.connection, {(None, "new"): CeilingTerms(max_timeout=9)}, actor="test")
        late = race.second(
            lambda: pool.database.run(lambda c: remove_ceilings(c, [(None, "old")], actor="test")), behind=first
        )
        first.decide(commit)
        late.result()
    if commit:
        with pytest.raises(BadInput, match=REFUSED):
            together(pool, {"label": "new", "timeout_seconds": 60})
    else:
        assert pool.rows("SELECT FROM submit_checks") == []
