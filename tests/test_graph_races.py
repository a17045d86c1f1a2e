"""Two at once on one graph: who waits, and that nothing is counted twice or lost."""

from typing import Any

import pytest

from schema import moves
from tests.graphs import states, submitted
from tests.pool import Bot, Pool, active, completed
from tests.racing import Race, at_desk_of, cancel, outcome

UNBLOCKED = "SELECT count(*) FROM job_events WHERE move = 'unblock'"


def at_work(pool: Pool, name: str) -> tuple[Bot, dict[str, Any]]:
    """A bot that runs the next job, and nothing beside it, with its lease."""
    bot = pool.bot(name, capacity=1, desk=pool.desk(enabled=False))
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
        at_desk_of(ahead, one).sync(completed(first_work))
        behind = race.second(lambda: two.sync(completed(second_work)), behind=ahead)
        ahead.decide(committed)
        outcome(behind)
    assert states(pool, graph)[3] == ("queued" if committed else "blocked")
    assert pool.row(UNBLOCKED)[0] == committed
    assert race.errors == []


def test_a_child_that_somebody_is_cancelling_is_left_to_him(pool: Pool, race: Race) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    bot, work = at_work(pool, "bot-1")
    with race.first() as ahead:
        ahead.connection.exec_driver_sql(
            "SELECT FROM jobs j JOIN graph_nodes n ON n.job_id = j.id WHERE n.node_no = 2 FOR NO KEY UPDATE OF j"
        )
        race.unhindered(lambda: bot.sync(completed(work)), by=ahead)
        assert states(pool, graph) == {1: "succeeded", 2: "blocked"}
        cancel(ahead, graph.jobs[2])
        ahead.commit()
    pool.upkeep().run_once()
    assert states(pool, graph) == {1: "succeeded", 2: "cancelled"}


def test_a_child_whose_job_was_locked_when_its_turn_came_is_queued_by_upkeep(pool: Pool, race: Race) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    bot, work = at_work(pool, "bot-1")
    with race.first() as ahead:
        ahead.database.run(
            lambda c: moves.set_priority(c, [graph.jobs[2]], 7, instances=None, reason=None, actor="test")
        )
        race.unhindered(lambda: bot.sync(completed(work)), by=ahead)
        ahead.commit()
    assert states(pool, graph)[2] == "blocked"
    pool.upkeep().run_once()
    assert (states(pool, graph)[2], pool.job(graph.jobs[2]).priority) == ("queued", 7)
    assert pool.row(UNBLOCKED)[0] == 1


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
