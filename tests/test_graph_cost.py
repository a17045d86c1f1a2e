"""What graphs cost: nothing where there are none, and each edge once where there are."""

from collections.abc import Iterable

import pytest
from sqlalchemy import Connection

from schema import moves
from schema.moves import Ending, SubmittedGraph, Verdict
from tests.graphs import layered, states, submitted, work_off
from tests.plans import Plan, watching
from tests.pool import Pool

GRAPH_TABLES = ("graphs", "graph_nodes", "graph_edges")


def touched(plans: Iterable[Plan], table: str) -> float:
    """Rows of a table that these statements read."""
    return sum(node.touched for plan in plans for node in plan.nodes if node.relation == table)


def ended_one_by_one(pool: Pool, graph: SubmittedGraph) -> list[Plan]:
    """End every node in the order of the graph, by cancelling it; returns the statements."""

    def work(connection: Connection) -> list[Plan]:
        with watching(connection) as watch:
            for _, job in sorted(graph.jobs.items()):
                moves.cancel(connection, [job], instances=None, sync=1.0, actor="test")
        return watch.plans

    return pool.database.run(work)


def test_a_pool_without_unfinished_graphs_looks_once_for_each_statement_that_ends_jobs(pool: Pool) -> None:
    over = submitted(pool, layered(50, parents=3, chance=pool.chance))
    pool.database.run(lambda c: moves.cancel_graph(c, over.public_id, instances=None, sync=1.0, actor="test"))
    pool.upkeep().run_once()
    pool.submit(20)
    pool.bot(capacity=20)
    pool.assigner().run_once()
    leases = pool.rows("SELECT * FROM live ORDER BY job_id")
    endings = [Ending(row.job_id, row.fence, row.bot_id, row.bot_epoch, Verdict.SUCCEEDED) for row in leases]
    assert len(endings) == 20

    def work(connection: Connection) -> list[Plan]:
        with watching(connection) as watch:
            moves.end(connection, endings, actor="test")
        return watch.plans

    plans = [plan for plan in pool.database.run(work) if "graph" in plan.query]
    assert len(plans) == 1
    reads = [node for node in plans[0].nodes if node.relation in GRAPH_TABLES]
    assert [(node.relation, node.loops) for node in reads] == [("graphs", 1)]
    assert reads[0].touched <= 1


def test_each_edge_is_walked_when_its_parent_ends_and_never_again(pool: Pool) -> None:
    """Once to learn whose rows to lock and once to count, twice each for a parent that did not succeed; other graphs
    in the tables make no difference."""
    submitted(pool, layered(2000, parents=5, chance=pool.chance), name="other")
    pages = []
    for nodes, statistics in ((100, False), (400, True)):
        if statistics:
            pool.change("ANALYZE")
        graph = submitted(pool, layered(nodes, parents=5, chance=pool.chance), name=f"of-{nodes}", on_failure="run")
        plans = ended_one_by_one(pool, graph)
        assert set(states(pool, graph).values()) == {"cancelled"}
        assert touched(plans, "graph_edges") <= 4 * graph.edges
        assert touched(plans, "graph_nodes") <= 8 * (nodes + graph.edges)
        assert touched(plans, "jobs") <= 20 * nodes
        assert not any(plan.whole_scans() & set(GRAPH_TABLES) for plan in plans)
        pages.append(sum(plan.buffers for plan in plans) / graph.edges)
    assert pages[1] < 1.5 * pages[0], f"pages for each edge grow with the graph: {pages}"


@pytest.mark.timeout(300)
def test_thousands_of_nodes_run_each_after_its_parents(pool: Pool) -> None:
    after = layered(1000, parents=5, chance=pool.chance)
    graph = submitted(pool, after)
    place = {node: nth for nth, node in enumerate(work_off(pool, pool.bot(capacity=50), graph))}
    assert place.keys() == after.keys()
    events = pool.rows(
        "SELECT n.node_no, min(e.id) FILTER (WHERE e.move = 'grant') AS granted,"
        " min(e.id) FILTER (WHERE e.move = 'finish') AS ended"
        " FROM job_events e JOIN graph_nodes n ON n.job_id = e.job_id GROUP BY n.node_no"
    )
    granted = {row.node_no: row.granted for row in events}
    ended = {row.node_no: row.ended for row in events}
    assert all(ended[parent] < granted[node] for node, parents in after.items() for parent in parents)
