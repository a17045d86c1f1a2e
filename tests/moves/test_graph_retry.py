"""A graph goes on: failed nodes get new jobs in their places, and what waits for them waits for these."""

import random
from typing import Any

import pytest
from leasehold.errors import Conflict, Forbidden, NotFound

from bots.protocol import AskInputs
from bots.sync.inputs import read_inputs
from schema.graphs import with_roots
from schema.moves import graph_retry, graphs
from schema.moves.graph_retry import GraphEdge, GraphNode, RetriedGraph, plan_retry
from schema.moves.graphs import SubmittedGraph
from schema.moves.waiting.requeue import Requeued, requeue
from schema.postgres.connection import Connection
from schema.requests import GraphRequest
from tests.support.pool import Bot, Pool, active, completed, taken
from tests.support.race import Race, cancel, retention


def graph(pool: Pool, *nodes: dict[str, Any], **fields: Any) -> SubmittedGraph:
    asked = [{"node": number, "command": ["true"], **node} for number, node in enumerate(nodes, 1)]
    return taken(pool, GraphRequest.model_validate({"name": "build", "nodes": asked, **fields}).normal())


def work_on(pool: Pool, bot: Bot, *failing: int) -> None:
    """Let the bot end what it is given until there is nothing more; the nodes with these numbers fail."""
    while offered := pool.given(bot):
        bad = {str(row.public_id) for row in nodes_of(pool) if row.node_no in failing}
        bot.sync(*[completed(work, "failed" if work["job"] in bad else "succeeded") for work in offered])
    pool.upkeep().run_once()


def nodes_of(pool: Pool) -> list[Any]:
    return pool.rows(
        "SELECT n.node_no, n.outcome, j.public_id, j.state FROM graph_nodes n JOIN jobs j ON j.id = n.job_id"
        " ORDER BY n.graph, n.node_no"
    )


def states(pool: Pool) -> list[str]:
    return [row.state for row in nodes_of(pool)]


def retry(pool: Pool, submitted: SubmittedGraph, *nodes: int, **fields: Any) -> RetriedGraph:
    given = {"instances": None, "ceiling": None, "actor": "test", "nodes": nodes or None} | fields
    return pool.database.run(lambda c: graph_retry.retry_graph(c, submitted.public_id, **given))


#: What a retry is given beside the graph.
GIVEN: dict[str, Any] = {"instances": None, "ceiling": None, "actor": "test"}


def graph_row(pool: Pool) -> tuple[str, bool]:
    row = pool.row("SELECT state, finished_at IS NOT NULL AS over FROM graphs")
    return row.state, row.over


def test_a_node_takes_a_result_whose_job_is_kept_no_longer(pool: Pool) -> None:
    graph(pool, {}, {"after": [1]})
    bot = pool.bot()
    (first,) = pool.given(bot)
    bot.sync(completed(first, result='{"rows": 3}'))
    assert retention(pool) == 1
    (second,) = pool.given(bot)
    found = pool.database.run(lambda c: inputs_of(c, pool, second))
    assert found == {"1": {"state": "succeeded", "result": {"rows": 3}}}
    bot.sync(completed(second, result="4"))
    pool.upkeep().run_once()
    assert retention(pool) == 1
    assert len(pool.rows("SELECT FROM job_results")) == 2, "as long as the graph"
    assert pool.database.run(lambda c: graphs.delete_graph(c, age=0.0, limit=1)).deleted
    assert pool.rows("SELECT FROM job_results") == []


def test_the_result_of_a_callback_goes_with_its_job(pool: Pool) -> None:
    graph(pool, {}, on_failure="cancel", callback={"command": ["true"], "on": "done"})
    bot = pool.bot()
    for result in ("1", "2"):
        (work,) = pool.given(bot)
        bot.sync(completed(work, result=result))
    assert retention(pool) == 2
    assert [row.result for row in pool.rows("SELECT result FROM job_results")] == [1]


def inputs_of(connection: Connection, pool: Pool, work: Any) -> dict[str, Any]:
    session = {"bot": "bot-1", "epoch": 1, "secret": "s", "job": work["job"], "fence": work["fence"], "nodes": [1]}
    return read_inputs(connection, pool.row("SELECT id FROM bots").id, AskInputs.model_validate(session))


CHAIN: tuple[dict[str, Any], ...] = ({}, {"after": [1]}, {"after": [2]}, {"after": [1]})


def test_a_graph_goes_on_from_its_failed_node_and_what_succeeded_stays(pool: Pool) -> None:
    submitted, bot = graph(pool, *CHAIN), pool.bot(capacity=9)
    work_on(pool, bot, 2)
    assert states(pool) == ["succeeded", "failed", "blocked", "succeeded"]
    done = retry(pool, submitted)
    assert [*done.jobs] == [2]
    assert states(pool) == ["succeeded", "queued", "blocked", "succeeded"]
    assert retry(pool, submitted).jobs == {}, "nothing failed since"
    old, new = submitted.jobs[2], done.jobs[2]
    assert (pool.job(old).state, pool.history(new)) == ("failed", ["submit"])
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 4
    assert graph_row(pool) == ("finished", True)
    runs = pool.rows("SELECT count(*) AS runs FROM leases GROUP BY job_id")
    assert [row.runs for row in runs] == [1] * 5


def test_nodes_that_were_cancelled_with_it_run_again_in_their_order(pool: Pool) -> None:
    nodes = [{}, {"after": [1]}, {"after": [2]}, {"after": [1, 3]}]
    submitted, bot = graph(pool, *nodes, on_failure="cancel"), pool.bot(capacity=9)
    work_on(pool, bot, 1)
    assert states(pool) == ["failed", "cancelled", "cancelled", "cancelled"]
    assert graph_row(pool) == ("finished", True)
    assert [*retry(pool, submitted, 1).jobs] == [1, 2, 3, 4]
    assert (states(pool), graph_row(pool)) == (["queued", "blocked", "blocked", "blocked"], ("active", False))
    work_on(pool, bot, 3)
    assert states(pool) == ["succeeded", "succeeded", "failed", "cancelled"]
    assert pool.history(retry(pool, submitted).jobs[4]) == ["submit", "block"]
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 4


def test_a_child_that_has_started_anyway_is_not_held_up_again_and_one_that_waits_is(pool: Pool) -> None:
    run = [{"node": 1, "on_failure": "run"}]
    submitted, bot = graph(pool, {}, {"after": run}, {"after": [*run, 4]}, {}), pool.bot(capacity=9)
    given = {work["job"]: work for work in pool.given(bot)}
    slow = given[submitted.jobs[4]]
    bot.sync(completed(given[submitted.jobs[1]], "failed"), active(slow))
    pool.assigner().run_once()
    (anyway,) = (work for work in bot.sync(active(slow))["leases"] if work["job"] == submitted.jobs[2])
    bot.sync(active(slow), active(anyway))
    retry(pool, submitted)
    assert states(pool) == ["queued", "running", "blocked", "running"]
    bot.sync(completed(slow), completed(anyway))
    assert states(pool)[1:] == ["succeeded", "blocked", "succeeded"]
    work_on(pool, bot, 1)
    assert states(pool) == ["failed", "succeeded", "succeeded", "succeeded"]
    retry(pool, submitted)
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 4


def test_a_callback_waits_again(pool: Pool) -> None:
    submitted = graph(pool, {}, {}, callback={"command": ["tell"], "on": "failed"})
    bot = pool.bot(capacity=9)
    work_on(pool, bot, 2)
    assert states(pool) == ["succeeded", "failed", "succeeded"]
    assert [*retry(pool, submitted).jobs] == [2, 3]
    assert states(pool) == ["succeeded", "queued", "blocked"]
    work_on(pool, bot)
    assert states(pool) == ["succeeded", "succeeded", "cancelled"]
    assert graph_row(pool) == ("finished", True)


def test_what_cannot_go_on_is_refused_and_nothing_is_changed(pool: Pool) -> None:
    submitted, bot = (
        graph(pool, {"priority": -5}, {"after": [{"node": 1, "on_failure": "run"}]}, {"after": [2]}),
        pool.bot(),
    )
    work_on(pool, bot, 1, 2)
    cancel(pool, submitted.jobs[3])
    before = nodes_of(pool)
    with pytest.raises(Conflict, match="node 3 depends on node 2, which failed"):
        retry(pool, submitted, 3)
    with pytest.raises(NotFound, match="the graph has no node 9"):
        retry(pool, submitted, 9)
    with pytest.raises(NotFound):
        retry(pool, submitted, instances=["web"])
    with pytest.raises(Forbidden, match="would have the priority -5"):
        retry(pool, submitted, ceiling=0)
    assert nodes_of(pool) == before
    pool.upkeep().run_once()
    graph(pool, {})
    with pytest.raises(Conflict, match="another graph of the name"):
        retry(pool, submitted)


def test_a_requeue_of_a_node_goes_on_with_its_graph(pool: Pool) -> None:
    submitted, bot = graph(pool, *CHAIN), pool.bot(capacity=9)
    work_on(pool, bot, 2)
    cancel(pool, submitted.jobs[3])
    both = [submitted.jobs[2], submitted.jobs[3]]
    given: dict[str, Any] = {"instances": None, "ceiling": None, "key": "k", "reason": None, "actor": "test"}
    (barred,) = pool.database.run(lambda c: requeue(c, both[1:], **given))
    goes_on = f"`leasehold graph retry {submitted.public_id}` lets the graph go on"
    why = f"it depends on node 2 of its graph, which failed; {goes_on}"
    assert barred == Requeued(both[1], "cancelled", None, changed=False, why=why)
    again = pool.database.run(lambda c: requeue(c, both, **given))
    assert [each.changed for each in again] == [True, True]
    assert states(pool) == ["succeeded", "queued", "blocked", "succeeded"]
    repeated = pool.database.run(lambda c: requeue(c, both, **given))
    assert [(each.successor, each.changed) for each in repeated] == [(each.successor, False) for each in again]
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 4


@pytest.mark.parametrize("commit", [True, False])
def test_a_retry_waits_for_an_end_of_a_node_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    submitted, bot = graph(pool, {}, {}, {"after": [1, 2]}), pool.bot(capacity=2)
    works = {work["job"]: work for work in pool.given(bot)}
    bot.sync(completed(works[submitted.jobs[1]], "failed"))
    with race.first() as first:
        cancel(first, submitted.jobs[3])
        late = race.second(lambda: retry(pool, submitted), behind=first)
        first.decide(commit)
        made = late.result()
    assert [*made.jobs] == ([1, 3] if commit else [1])


def test_a_graph_that_goes_on_is_not_finished_by_upkeep_that_had_looked_before(pool: Pool, race: Race) -> None:
    submitted, bot = graph(pool, {}, {"after": [1]}, on_failure="cancel"), pool.bot()
    bot.sync(*[completed(work, "failed") for work in pool.given(bot)])
    with race.first() as first:
        graph_retry.retry_graph(first.connection, submitted.public_id, **GIVEN)
        assert pool.database.run(lambda c: graphs.finish_graphs(c, 10)) == 0
        first.decide(commit=True)
    assert pool.database.run(lambda c: graphs.finish_graphs(c, 10)) == 0
    stale = graphs.FINISH, {"ids": [row.id for row in pool.rows("SELECT id FROM graphs")]}
    assert pool.database.run(lambda c: c.execute(*stale).rowcount) == 0, "what a look before the retry had found"
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 2


def test_a_graph_of_the_same_name_waits_for_a_retry_and_then_replaces_the_graph(pool: Pool, race: Race) -> None:
    submitted, bot = graph(pool, {}), pool.bot()
    work_on(pool, bot, 1)
    with race.first() as first:
        graph_retry.retry_graph(first.connection, submitted.public_id, **GIVEN)
        late = race.second(lambda: graph(pool, {}), behind=first)
        first.decide(commit=True)
        late.result()
    assert [row.state for row in pool.rows("SELECT state FROM graphs ORDER BY id")] == ["replaced", "active"]


def test_ends_of_two_nodes_that_wait_for_a_retry_count_both_on_its_new_job(pool: Pool, race: Race) -> None:
    submitted, bot = graph(pool, {}, {}, {"after": [1, 2]}), pool.bot(capacity=2)
    works = {work["job"]: work for work in pool.given(bot)}
    cancel(pool, submitted.jobs[3])
    with race.first() as first:
        graph_retry.retry_graph(first.connection, submitted.public_id, **GIVEN)
        late = race.second(lambda: bot.sync(*[completed(work) for work in works.values()]), behind=first)
        first.decide(commit=True)
        late.result()
    assert states(pool)[:2] == ["succeeded", "succeeded"]
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 3


def test_nothing_is_tried_again_while_a_node_is_being_stopped_or_the_callback_runs(pool: Pool) -> None:
    submitted = graph(pool, {}, {}, callback={"command": ["tell"], "on": "failed"})
    bot = pool.bot(capacity=3)
    first, second = pool.given(bot)
    cancel(pool, second["job"])
    bot.sync(completed(first, "failed"), active(second))
    again = {"ceiling": None, "key": None, "reason": None, "instances": None, "actor": "test"}
    (left,) = pool.database.run(lambda c: requeue(c, [first["job"]], **again))
    assert left.why == "node 2 of its graph is still being stopped: try again when it has ended"
    with pytest.raises(Conflict, match="node 2 is still being stopped"):
        retry(pool, submitted)
    bot.sync(completed(second, "stopped"))
    pool.given(bot)
    with pytest.raises(Conflict, match="node 3 is the callback, and may run already"):
        retry(pool, submitted, 1)


def test_a_requeue_keeps_to_the_ceiling_and_passes_over_a_graph_whose_name_another_one_has(pool: Pool) -> None:
    after = [{"node": 1, "on_failure": "cancel"}]
    submitted, bot = graph(pool, {}, {"priority": -900, "after": after}), pool.bot()
    work_on(pool, bot, 1)
    given: dict[str, Any] = {"instances": None, "key": None, "reason": None, "actor": "test"}
    with pytest.raises(Forbidden, match="would have the priority -900"):
        pool.database.run(lambda c: requeue(c, [submitted.jobs[1]], ceiling=0, **given))
    graph(pool, {})
    (done,) = pool.database.run(lambda c: requeue(c, [submitted.jobs[1]], ceiling=0, **given))
    assert done.changed
    assert [row.job_id for row in pool.rows("SELECT job_id FROM graph_nodes WHERE graph = 1")] == [1, 2]


def test_any_graph_goes_on_until_every_node_has_succeeded_once(pool: Pool, chance: random.Random) -> None:
    kinds = ("block", "run", "cancel")
    nodes = [
        {
            "after": [
                {"node": each, "on_failure": chance.choice(kinds)} for each in chance.sample(range(1, n + 1), min(n, 2))
            ]
        }
        for n in range(30)
    ]
    submitted, bot = graph(pool, *nodes), pool.bot(capacity=99)
    for _ in range(10):
        work_on(pool, bot, *chance.sample(range(1, 31), 12))
        retry(pool, submitted)
    work_on(pool, bot)
    retry(pool, submitted)
    work_on(pool, bot)
    assert states(pool) == ["succeeded"] * 30
    ended = pool.row("SELECT count(*) FILTER (WHERE state = 'succeeded') AS ended FROM jobs").ended
    assert ended == 30, "each node succeeded once"


def test_what_is_tried_again_follows_from_outcomes_and_edges() -> None:
    nodes = [GraphNode(1, "failed", "failed"), GraphNode(2, "cancelled", "cancelled"), GraphNode(3, None, "blocked")]
    edges = [GraphEdge(1, 2, "cancel"), GraphEdge(2, 3, "block")]
    assert plan_retry(nodes, edges).nodes == {1, 2}
    assert plan_retry(nodes, edges, [1]).nodes == {1, 2}
    assert (plan_retry(nodes, edges, [2]).nodes, plan_retry(nodes, edges, [2]).barred) == (frozenset(), {2: 1})
    assert plan_retry(nodes, edges, [3]).nodes == frozenset()


def test_what_keeps_a_node_from_running_is_what_reads_name_and_none_that_is_tried_again(pool: Pool) -> None:
    chain: list[dict[str, Any]] = [{}, {}, {"after": [1, 2]}, {"after": [3]}, {"after": [4]}]
    chain.append({"after": [{"node": 1, "on_failure": "block"}, 5]})
    submitted, bot = graph(pool, *chain, on_failure="cancel"), pool.bot(capacity=9)
    works = {work["job"]: work for work in pool.given(bot)}
    bot.sync(completed(works[submitted.jobs[2]], "failed"), active(works[submitted.jobs[1]]))
    bot.sync(completed(works[submitted.jobs[1]], "failed"))
    pool.upkeep().run_once()
    assert states(pool) == ["failed"] * 2 + ["cancelled"] * 4
    told = f"node 2 of its graph, job {submitted.jobs[2]}, failed"
    for number in (3, 4, 5, 6):
        row = pool.row(
            "SELECT id AS row_id, reason FROM jobs WHERE public_id = CAST(:id AS uuid)", id=submitted.jobs[number]
        )
        ((read),) = pool.database.run(lambda c, row=row: with_roots(c, [row._asdict()]))
        assert read["reason"] == f"cancelled: {told}"
        with pytest.raises(Conflict, match=f"node {number} depends on node 2, which failed"):
            retry(pool, submitted, number)
    # Of what keeps a node from running, what is tried again with it is left out.
    with pytest.raises(Conflict, match="node 3 depends on node 1, which failed"):
        retry(pool, submitted, 2)
