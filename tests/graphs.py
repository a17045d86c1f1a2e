"""Graphs of jobs in a test's own database, submitted and worked off through the real functions."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

from schema import moves
from schema.moves import SubmittedGraph
from tests.pool import Bot, Pool, completed

After = Mapping[int, Iterable[int | Mapping[str, Any]]]


def graph_of(after: After, *, name: str = "build", **fields: Any) -> dict[str, Any]:
    """A request: node -> what it comes after."""
    nodes = [
        {"node": node, "after": list(parents), "payload": {"command": ["true"]}} for node, parents in after.items()
    ]
    return {"name": name, "nodes": nodes, **fields}


def submitted(pool: Pool, after: After, **fields: Any) -> SubmittedGraph:
    """The graph, taken."""
    return taken(pool, graph_of(after, **fields))


def taken(pool: Pool, request: Mapping[str, Any]) -> SubmittedGraph:
    """The graph of this request."""
    return pool.database.run(lambda c: moves.submit_graph(c, request, sync=pool.timing.sync, actor="test"))


def cancel_graph(pool: Pool, graph: str) -> Any:
    """Cancel the graph as an operator."""
    return pool.database.run(
        lambda c: moves.cancel_graph(c, graph, instances=None, sync=pool.timing.sync, actor="test")
    )


def states(pool: Pool, graph: SubmittedGraph) -> dict[int, str]:
    """Node -> the state of its job, or how it ended if its job is gone."""
    return {
        row.node_no: row.state
        for row in pool.rows(
            "SELECT n.node_no, coalesce(j.state, n.outcome) AS state FROM graph_nodes n"
            " LEFT JOIN jobs j ON j.id = n.job_id WHERE n.graph = :id ORDER BY n.node_no",
            id=graph.graph_id,
        )
    }


def number(graph: SubmittedGraph, job: str) -> int:
    """The node that a job is."""
    return next(node for node, each in graph.jobs.items() if each == job)


def work_off(pool: Pool, bot: Bot, graph: SubmittedGraph, verdicts: Mapping[int, str] | None = None) -> list[int]:
    """Run whatever the bot is given until nothing comes any more; returns the nodes in the order of their ends."""
    order: list[int] = []
    assigner = pool.assigner(batch=1000)
    while True:
        assigner.run_once()
        offered = bot.take()
        if not offered:
            return order
        nodes = [number(graph, work["job"]) for work in offered]
        order += nodes
        ends = [(verdicts or {}).get(node, "succeeded") for node in nodes]
        bot.sync(*[completed(work, end) for work, end in zip(offered, ends, strict=True)])


def layered(nodes: int, *, parents: int, chance: random.Random) -> dict[int, list[int]]:
    """A graph in rows of fifty, in which a node comes after so many of the row before its own."""
    near = {node: range(max(1, (node - 1) // 50 * 50 - 49), (node - 1) // 50 * 50 + 1) for node in range(1, nodes + 1)}
    return {node: sorted(chance.sample(before, min(parents, len(before)))) for node, before in near.items()}
