"""What `explain` and `show` say of a job that waits for other jobs."""

import httpx
import pytest

from tests.explaining import closed, explained, gates_of
from tests.graphs import graph_of, submitted, taken, work_off
from tests.pool import Pool
from tests.racing import cancel


def test_a_blocked_job_names_the_nodes_it_waits_for_and_what_would_start_it(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [1, 2], 4: [3]})
    pool.bot()
    found = explained(pool, graph.jobs[3])
    assert closed(found) == ["dependencies", "state"]
    assert found.sentence == (
        "it does not run because node 3 of graph 'build' waits for 2 nodes: node 1 is queued, node 2 is queued"
    )
    assert found.change == ["wait for 2 of the nodes that it depends on"]
    evidence = gates_of(found)["dependencies"].evidence
    assert (evidence["node"], evidence["waits_for"], evidence["blocked_forever"]) == (3, 2, False)
    assert [parent["job"] for parent in evidence["parents"]] == [graph.jobs[1], graph.jobs[2]]


def test_a_node_that_waits_for_nothing_says_so_and_jobs_without_a_graph_say_nothing(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    (single,) = pool.submit()
    found = explained(pool, graph.jobs[1])
    assert gates_of(found)["dependencies"].sentence == "node 1 of graph 'build' waits for no other node"
    assert "dependencies" not in gates_of(explained(pool, single))


@pytest.mark.parametrize("how", ["absent", "failed", "cancelled"])
def test_a_19_what_can_never_run_is_blocked_for_ever_and_so_is_what_depends_on_it(pool: Pool, how: str) -> None:
    graph = submitted(pool, {1: [], 2: [1, 9] if how == "absent" else [1], 3: [{"node": 2, "on_failure": "run"}]})
    if how == "cancelled":
        cancel(pool, graph.jobs[1])
    else:
        work_off(pool, pool.bot(), graph, {1: "failed" if how == "failed" else "succeeded"})
    why = "no node has the number 9" if how == "absent" else f"node 1 is {how}"
    assert explained(pool, graph.jobs[2]).sentence == (
        f"it does not run because BLOCKED_FOREVER: node 2 of graph 'build' waits for 1 node: {why}; it can never run"
    )
    below = explained(pool, graph.jobs[3])
    assert below.sentence.endswith("waits for 1 node: node 2 is blocked; it can never run, because of node 2")
    assert below.change[0] == "nothing will: cancel it, or submit its graph again"
    row = pool.row("SELECT state, blocked, blocked_forever FROM graph_stats")
    assert tuple(row) == ("stalled", 2, 2)


def test_of_many_parents_the_first_few_are_named(pool: Pool) -> None:
    graph = submitted(pool, {**{node: [] for node in range(1, 9)}, 9: range(1, 9)})
    assert explained(pool, graph.jobs[9]).sentence.endswith("node 5 is queued, and 3 more")


def test_ma_27_the_numbers_of_a_graph_are_those_of_its_nodes(pool: Pool) -> None:
    request = graph_of({1: [], 2: [], 3: [], 4: [1], 5: [2, 9], 6: [3]}, on_failure="cancel")
    graph = taken(pool, request)
    bot = pool.bot(capacity=1)
    pool.assigner(batch=1).run_once()
    bot.take()
    cancel(pool, graph.jobs[3])
    row = pool.row("SELECT state, nodes, queued, active, blocked, blocked_forever, cancelled FROM graph_stats")
    assert tuple(row) == ("active", 6, 1, 1, 2, 1, 2)


def test_show_tells_the_node_and_why_it_waits(pool: Pool, operator: httpx.Client) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    shown = operator.get(f"/v1/jobs/{graph.jobs[2]}").json()
    assert shown["graph"] == {"id": graph.public_id, "name": "build", "node": 2, "depth": 1}
    assert shown["waiting"]["sentence"] == "node 2 of graph 'build' waits for 1 node: node 1 is queued"
