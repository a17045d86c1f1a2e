"""Callbacks: a job that runs once all nodes of a graph have ended, by what became of them, and knows how many did."""

from typing import Any

import pytest
from leasehold.errors import BadInput

from schema.moves.graphs import SubmittedGraph
from schema.requests import GraphRequest
from tests.support.pool import Bot, Pool, cancel_graph, completed, states, taken
from tests.support.race import cancel

CALLBACK = 4


def batch(pool: Pool, on: str, **fields: Any) -> SubmittedGraph:
    """Three jobs and a callback, node 4."""
    nodes = [{"node": node, "command": ["true"]} for node in (1, 2, 3)]
    callback = {"command": ["tell"], "env": {"A": "1"}, "on": on}
    request = {"name": "batch", "nodes": nodes, "callback": callback, **fields}
    return taken(pool, GraphRequest.model_validate(request).normal())


def work_on(pool: Pool, bot: Bot, verdict: str = "succeeded") -> list[str]:
    """Let the bot end all that it is given at once; returns these jobs."""
    offered = pool.given(bot)
    bot.sync(*[completed(work, verdict) for work in offered])
    return [work["job"] for work in offered]


def told(pool: Pool, graph: SubmittedGraph) -> dict[str, str]:
    """The environment of the callback."""
    query = "SELECT p.payload FROM jobs j JOIN job_payloads p ON p.job_id = j.id WHERE public_id = CAST(:id AS uuid)"
    found: dict[str, str] = pool.row(query, id=graph.jobs[CALLBACK]).payload["env"]
    return found


def counts(graph: SubmittedGraph, succeeded: int, failed: int, cancelled: int) -> dict[str, str]:
    return {
        "A": "1",
        "LEASEHOLD_GRAPH": graph.public_id,
        "LEASEHOLD_GRAPH_SUCCEEDED": str(succeeded),
        "LEASEHOLD_GRAPH_FAILED": str(failed),
        "LEASEHOLD_GRAPH_CANCELLED": str(cancelled),
    }


@pytest.mark.parametrize("on", ["done", "succeeded", "failed"])
@pytest.mark.parametrize("all_succeed", [True, False])
def test_a_callback_runs_by_what_became_of_jobs_after_a_bot_was_killed(pool: Pool, on: str, all_succeed: bool) -> None:
    graph, at_once = batch(pool, on), on != "failed"
    bot = pool.bot(capacity=1, sync_service=pool.sync_service(enabled=False))
    work_on(pool, bot, "succeeded" if all_succeed else "failed")
    assert states(pool, graph)[CALLBACK] == ("cancelled" if on == "succeeded" and not all_succeed else "blocked")
    # The bot is killed while it runs another one, which runs again.
    (lost,) = pool.given(bot)
    bot = pool.restarted(bot, capacity=2 if at_once else 1, sync_service=pool.sync_service(enabled=False))
    ended = work_on(pool, bot) if at_once else work_on(pool, bot) + work_on(pool, bot)
    assert (len(ended), lost["job"] in ended) == (2, True)
    runs = on == "done" or (on == "succeeded") == all_succeed
    assert states(pool, graph)[CALLBACK] == ("queued" if runs else "cancelled")
    if not runs:
        assert told(pool, graph) == {"A": "1"}
        assert pool.job(graph.jobs[CALLBACK]).reason is not None
    else:
        assert told(pool, graph) == (counts(graph, 3, 0, 0) if all_succeed else counts(graph, 2, 1, 0))
        # It is killed too, and runs again with the same counts.
        (work,) = pool.given(bot)
        bot = pool.restarted(bot)
        assert work_on(pool, bot) == [graph.jobs[CALLBACK]] == [work["job"]]
    pool.upkeep().run_once()
    assert pool.row("SELECT state FROM graphs").state == "finished"


def test_a_cancelled_job_counts_as_one_that_did_not_succeed(pool: Pool) -> None:
    graph = batch(pool, "failed")
    cancel(pool, graph.jobs[1])
    work_on(pool, pool.bot(capacity=2, sync_service=pool.sync_service(enabled=False)))
    assert states(pool, graph)[CALLBACK] == "queued"
    assert told(pool, graph) == counts(graph, 2, 0, 1)


@pytest.mark.parametrize("all_succeed", [True, False])
def test_a_callback_whose_job_is_locked_when_it_is_due_is_left_to_upkeep(pool: Pool, all_succeed: bool) -> None:
    graph = batch(pool, "failed")
    bot = pool.bot(capacity=3, sync_service=pool.sync_service(enabled=False))
    with pool.database.connect() as other:
        other.execute_sql("SELECT FROM jobs WHERE state = 'blocked' FOR UPDATE")
        assert len(work_on(pool, bot, "succeeded" if all_succeed else "failed")) == 3
        assert states(pool, graph)[CALLBACK] == "blocked"
    pool.upkeep().run_once()
    assert states(pool, graph)[CALLBACK] == ("cancelled" if all_succeed else "queued")
    if not all_succeed:
        assert told(pool, graph) == counts(graph, 0, 3, 0)


def test_a_cancelled_graph_runs_no_callback(pool: Pool) -> None:
    graph = batch(pool, "done")
    cancel_graph(pool, graph.public_id)
    assert set(states(pool, graph).values()) == {"cancelled"}


def test_a_callback_waits_for_the_nodes_that_others_cancel(pool: Pool) -> None:
    nodes = [{"node": 1, "command": ["false"]}, {"node": 2, "command": ["true"], "after": [1]}]
    request = {"name": "g", "nodes": nodes, "on_failure": "cancel", "callback": {"command": ["tell"], "on": "failed"}}
    graph = taken(pool, GraphRequest.model_validate(request).normal())
    work_on(pool, pool.bot(sync_service=pool.sync_service(enabled=False)), "failed")
    assert states(pool, graph) == {1: "failed", 2: "cancelled", 3: "queued"}


NODE: dict[str, Any] = {"node": 1, "command": ["x"]}


def test_a_callback_that_might_wait_for_ever_is_refused(pool: Pool) -> None:
    for change, field, said in (
        ({"callback": {"command": [""]}}, "callback.command", "must name a program"),
        ({"callback": {"command": ["x"], "key": "k"}}, "callback.key", "belongs to the graph"),
        ({"nodes": [NODE | {"after": [9]}]}, "nodes.0.after", "names node 9"),
        ({"nodes": [NODE, NODE | {"node": 2, "after": [1]}]}, "nodes.1.after", "needs on_failure `run` or `cancel`"),
        ({"nodes": [NODE | {"node": 2**31 - 1}]}, "callback", "needs a number above"),
    ):
        with pytest.raises(BadInput) as refused:
            batch(pool, "done", **change)
        assert refused.value.field == field
        assert said in refused.value.reason


def test_no_node_may_depend_on_a_callback(pool: Pool) -> None:
    nodes = [
        {"node": 1, "payload": {"command": ["true"]}, "callback": "done"},
        {"node": 2, "payload": {"command": ["true"]}, "after": [1]},
    ]
    with pytest.raises(BadInput, match="node 1 is a callback: no node may depend on it"):
        taken(pool, {"name": "g", "nodes": nodes})
