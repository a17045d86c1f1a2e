"""Two at once on what comes and goes: sessions, requirement sets, keys, waiting jobs and old ones."""

from typing import Any

import pytest
from leasehold.errors import BadInput, Conflict

from schema.diagnostics import invariants
from schema.moves import retention
from schema.moves.cancel import Cancelled
from schema.moves.submit import submit, submit_at_once
from schema.moves.waiting import backoff
from schema.moves.waiting.backoff import promote
from schema.policy.priority_classes import remove_classes
from schema.postgres.fragments import JOB_RESULT
from schema.requests import GraphRequest, JobRequest
from tests.support.pool import Bot, Pool, active, completed, states, submitted, taken
from tests.support.race import FINISHED, LOST, Race, at_service_of, cancel, counted_state, outcome, prioritise
from tests.support.race import retention as delete_finished


@pytest.mark.parametrize("commit", [True, False])
def test_a_call_of_a_session_that_is_being_replaced_waits_and_is_refused(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = pool.running()
    with race.first() as first:
        first.bot()
        finish = race.second(lambda: bot.sync(completed(work)), behind=first)
        first.decide(commit)
        if commit:
            with pytest.raises(Conflict) as refused:
                outcome(finish)
            assert refused.value.code == "session_superseded"
        else:
            outcome(finish)
    assert counted_state(pool, job) == (LOST if commit else FINISHED)


@pytest.mark.parametrize("commit", [True, False])
def test_a_new_session_waits_for_the_call_of_the_old_one(pool: Pool, race: Race, commit: bool) -> None:
    job, bot, work = pool.running()
    assert (
        race.in_turn(
            lambda first: at_service_of(first, bot).sync(completed(work)), pool.bot, commit=commit
        ).session.epoch
        == 2
    )
    assert counted_state(pool, job) == (FINISHED if commit else LOST)


@pytest.mark.parametrize("commit", [True, False])
def test_two_bots_of_a_new_kind_make_it_once(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit(properties={"os": "linux"})
    pool.submit(properties={"os": "plan9"})
    race.in_turn(
        lambda first: first.bot("early", properties={"os": "linux"}),
        lambda: pool.bot("late", properties={"os": "linux"}),
        commit=commit,
    )
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"
    assert len(pool.rows("SELECT FROM kinds")) == len(pool.rows("SELECT FROM kind_platforms")) == 1


@pytest.mark.parametrize("commit", [True, False])
def test_a_session_waits_for_the_deletion_of_its_kind_and_makes_it_anew(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit(properties={"os": "linux"})
    pool.bot(properties={"os": "linux"})
    pool.bot(properties={})
    (old,) = pool.rows("SELECT id FROM kinds WHERE properties <> '{}'")
    race.in_turn(
        lambda first: retention.delete_unused_kinds(first.connection, age=0, limit=9),
        lambda: pool.bot("late", properties={"os": "linux"}),
        commit=commit,
    )
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"
    (new,) = pool.rows("SELECT id FROM kinds WHERE properties <> '{}'")
    assert (new.id == old.id) != commit


def test_a_kind_is_not_deleted_while_a_session_opens(pool: Pool, race: Race) -> None:
    pool.bot(properties={"os": "linux"})
    pool.bot(properties={})

    def delete() -> int:
        return pool.database.run(lambda c: retention.delete_unused_kinds(c, age=0, limit=9))

    assert race.side_by_side(lambda first: first.bot("late", properties={"os": "linux"}), delete) == 0
    assert delete() == 0
    pool.bot("late", properties={})
    assert pool.database.run(lambda c: retention.delete_unused_kinds(c, age=3600, limit=9)) == 0
    assert delete() == 1


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("way", ["alone", "in a list", "as a node"])
def test_a_job_waits_for_the_removal_of_its_class_and_is_refused(
    pool: Pool, race: Race, way: str, commit: bool
) -> None:
    job = JobRequest(command=["true"], job_class="random").normal()
    node = {"node": 1, "command": ["true"], "job_class": "random"}

    def come() -> object:
        if way == "as a node":
            return taken(pool, GraphRequest.model_validate({"name": "g", "nodes": [node]}).normal())
        return pool.database.run(lambda c: submit(c, [job] * (1 if way == "alone" else 2), actor="test"))

    with race.first() as first:
        remove_classes(first.connection, ["random"], actor="test")
        late = race.second(come, behind=first)
        first.decide(commit)
        if commit:
            with pytest.raises(BadInput, match="there is no job class 'random'"):
                outcome(late)
        else:
            outcome(late)
    assert (pool.rows("SELECT FROM jobs") == []) is commit


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("other", [True, False], ids=["another request", "the same"])
def test_a_key_that_is_about_to_name_a_job_is_waited_for(pool: Pool, race: Race, other: bool, commit: bool) -> None:
    with race.first() as first:
        mine = first.submit(key="nightly", payload={"command": ["false" if other else "true"]})
        late = race.second(lambda: pool.submit(2, key="nightly"), behind=first)
        first.decide(commit)
        if other and commit:
            with pytest.raises(Conflict, match="nightly"):
                outcome(late)
        else:
            one, again = outcome(late)
            assert one == again
            assert (mine == [one]) is commit
    assert len(pool.rows("SELECT FROM jobs")) == 1
    (row,) = pool.rows("SELECT payload FROM job_payloads")
    assert row.payload == {"command": ["false" if other and commit else "true"]}


@pytest.mark.parametrize("commit", [True, False])
def test_requests_at_once_wait_for_those_who_are_using_their_keys(pool: Pool, race: Race, commit: bool) -> None:
    pool.submit()
    requests = [
        {"instance": "default", "properties": {}, "payload": {"command": ["true"]}, "key": key} for key in "cab"
    ]
    with race.first() as first:
        mine = first.submit(key="b")
        late = race.second(
            lambda: pool.database.run_alone(lambda driver: submit_at_once(driver, requests, actor="test")), behind=first
        )
        first.decide(commit)
        theirs = outcome(late)
    assert [answer.created for answer in theirs] == [True, True, not commit]
    assert (theirs[2].public_id == mine[0]) is commit
    assert race.errors == [], "nobody had to be repeated"
    kept = {
        row.key: row.public_id
        for row in pool.rows("SELECT k.key, j.public_id FROM submit_keys k JOIN jobs j ON j.id = k.job_id")
    }
    assert {key: str(kept[key]) for key in "cab"} == {
        key: each.public_id for key, each in zip("cab", theirs, strict=True)
    }
    assert len(pool.rows("SELECT FROM jobs")) == 4


def delete_keys(on: Any) -> int:
    return int(on.database.run(lambda c: retention.delete_keys(c, of_clients=False, age=0.0, limit=500)).rows)


def test_retention_passes_over_a_key_that_is_just_being_answered(pool: Pool, race: Race) -> None:
    (old,) = pool.submit(key="a")
    cancel(pool, old)
    requests = [{"instance": "default", "properties": {}, "payload": {"command": ["true"]}, "key": key} for key in "ab"]
    with race.first() as first:
        first.submit(key="b")
        late = race.second(lambda: pool.database.run(lambda c: submit(c, requests, actor="test")), behind=first)
        deleted = outcome(race.as_far_as_it_goes(lambda: (delete_finished(pool), delete_keys(pool)), behind=1))
        first.roll_back()
        answers = outcome(late)
    assert deleted == (1, 0)
    assert [(answer.public_id == old, answer.created) for answer in answers] == [(True, False), (False, True)]
    assert delete_keys(pool) == 2
    assert pool.submit(key="a") != [old], "the key is free again"


def test_a_key_that_retention_is_removing_is_waited_for_and_then_free(pool: Pool, race: Race) -> None:
    (old,) = pool.submit(key="a")
    cancel(pool, old)
    delete_finished(pool)
    with race.first() as first:
        assert delete_keys(first) == 1
        late = race.second(lambda: pool.submit(key="a"), behind=first)
        first.commit()
        (new,) = outcome(late)
    assert [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs")] == [new]


def rest(on: Pool, queue: int) -> int:
    return len(on.database.run(lambda c: backoff.rest_queues(c, [queue], reason="no bot", base=60, cap=60)))


def test_a_queue_can_rest_during_a_grant_and_one_that_rests_is_woken_by_a_grant(pool: Pool, race: Race) -> None:
    (job, other) = pool.submit(2)
    pool.bot()
    queue = pool.queue_of(job).id
    assert race.side_by_side(lambda first: first.assigner().run_once(), lambda: rest(pool, queue)) == 1
    assert (pool.job(job).state, pool.queue_of(other).reason) == ("leased", "no bot")
    pool.rest_queues(-1)
    pool.bot("another")
    pool.assigner().run_once()
    assert pool.job(other).state == "leased"
    assert (pool.queue_of(other).looks, pool.queue_of(other).schedule_after) == (0, None)


def test_a_queue_that_is_being_woken_is_not_put_to_rest_and_the_other_way_round(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    queue = pool.queue_of(job).id
    bot = pool.bot()
    bot_id = pool.row("SELECT id FROM bots").id

    def wake(on: Pool) -> int:
        values = {"bot_ids": [bot_id], "rooms": [1]}
        return on.database.run(lambda c: c.execute(backoff.WAKE_FOR_BOTS, values)).rowcount

    pool.rest_queues(60)
    assert race.side_by_side(wake, lambda: rest(pool, queue)) == 0
    assert pool.queue_of(job).schedule_after is None
    with race.first() as first:
        assert rest(first, queue) == 1
        assert wake(pool) == 0, "what is not committed cannot be seen, and nobody waits for it"
        first.commit()
    bot.sync(capacity=2)
    assert pool.queue_of(job).schedule_after is None, "room that is there later wakes it"


def test_a_job_that_is_being_granted_is_not_promoted_and_the_other_way_round(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    pool.bot()
    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s'")
    with race.first() as first:
        assert first.database.run(lambda c: promote(c, 9)).jobs == 1
        race.unhindered(pool.assigner().run_once, by=first)
        first.roll_back()
    assert (
        race.side_by_side(
            lambda first: first.assigner().run_once(), lambda: pool.database.run(lambda c: promote(c, 9))
        ).jobs
        == 0
    )
    row = pool.job(job)
    assert (row.state, row.schedule_after) == ("leased", None)


def test_retention_does_not_wait_for_a_reader_who_keeps_seeing_everything(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running(metadata={"build": "1"})
    bot.sync(completed(work, exit_code=0))
    with race.first(isolation="REPEATABLE READ") as reader:
        assert reader.job(job).state == "succeeded"
        assert race.unhindered(lambda: delete_finished(pool), by=reader) == 1
        assert [finding for finding in invariants.check(reader.connection) if finding.rows] == []
        assert reader.history(job) == ["submit", "grant", "acknowledge", "finish"]
        assert reader.row(f"SELECT {JOB_RESULT} AS result FROM jobs j").result == {"exit_code": 0}
    kept = ("jobs", "job_payloads", "job_events", "leases", "submit_keys", "job_outputs", "job_results", "job_metadata")
    assert [table for table in kept if pool.rows(f"SELECT FROM {table}")] == []


def test_retention_passes_over_a_job_that_somebody_looks_at_with_a_lock(pool: Pool, race: Race) -> None:
    (job,) = pool.submit()
    cancel(pool, job)
    with race.first() as first:
        assert cancel(first, job) == [Cancelled(job, "cancelled", changed=False)]
        assert race.unhindered(lambda: delete_finished(pool), by=first) == 0
    with race.first() as first:
        assert delete_finished(first) == 1
        late = race.second(lambda: cancel(pool, job), behind=first)
        first.commit()
        assert outcome(late) == [Cancelled(job, None, changed=False)]


# Two at once on one graph: who waits, and that nothing is counted twice or lost.


UNBLOCKED = "SELECT count(*) FROM job_events WHERE move = 'unblock'"


def at_work(pool: Pool, name: str) -> tuple[Bot, dict[str, Any]]:
    """A bot that runs the next job, and nothing beside it, with its lease."""
    bot = pool.bot(name, capacity=1, sync_service=pool.sync_service(enabled=False))
    pool.assigner(batch=1).run_once()
    (work,) = bot.sync()["leases"]
    bot.sync(active(work))
    return bot, work


@pytest.mark.parametrize("committed", [True, False])
def test_two_parents_that_end_at_the_same_time_start_their_child_once(pool: Pool, race: Race, committed: bool) -> None:
    """The second waits for the first, at the row of the child's node, and counts on what became of it."""
    graph = submitted(pool, {1: [], 2: [], 3: [1, 2]})
    one, first_work = at_work(pool, "bot-1")
    two, second_work = at_work(pool, "bot-2")
    with race.first() as ahead:
        at_service_of(ahead, one).sync(completed(first_work))
        behind = race.second(lambda: two.sync(completed(second_work)), behind=ahead)
        ahead.decide(committed)
        outcome(behind)
    assert states(pool, graph)[3] == ("queued" if committed else "blocked")
    assert pool.row(UNBLOCKED)[0] == committed
    assert race.errors == []


@pytest.mark.parametrize("what", ["cancel", "priority"])
def test_a_child_that_was_locked_when_its_turn_came_is_left_to_upkeep(pool: Pool, race: Race, what: str) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    bot, work = at_work(pool, "bot-1")
    with race.first() as ahead:
        prioritise(ahead, 7, graph.jobs[2])
        race.unhindered(lambda: bot.sync(completed(work)), by=ahead)
        assert states(pool, graph) == {1: "succeeded", 2: "blocked"}
        if what == "cancel":
            cancel(ahead, graph.jobs[2])
        ahead.commit()
    pool.upkeep().run_once()
    assert (states(pool, graph)[2], pool.job(graph.jobs[2]).priority) == (
        {"cancel": "cancelled"}.get(what, "queued"),
        7,
    )
    assert pool.row(UNBLOCKED)[0] == (what == "priority")


def test_graphs_of_one_name_that_come_at_once_replace_each_other(pool: Pool, race: Race) -> None:
    with race.first() as ahead:
        old = submitted(ahead, {1: [], 2: [1]})
        behind = race.second(lambda: submitted(pool, {1: []}), behind=ahead)
        ahead.commit()
        new = outcome(behind)
    assert (old.replaced, new.replaced) == (None, 2)
    assert states(pool, old) == {1: "cancelled", 2: "cancelled"}
    assert states(pool, new) == {1: "queued"}
    assert race.errors == []


def test_the_same_graph_submitted_twice_at_once_is_one(pool: Pool, race: Race) -> None:
    with race.first() as ahead:
        first = submitted(ahead, {1: [], 2: [1]}, key="k")
        behind = race.second(lambda: submitted(pool, {1: [], 2: [1]}, key="k"), behind=ahead)
        ahead.commit()
        second = outcome(behind)
    assert (second.public_id, second.jobs) == (first.public_id, first.jobs)
    assert (first.created, second.created, second.replaced) == (True, False, None)
