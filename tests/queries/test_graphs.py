"""The first node of a graph that did not succeed, and why others were cancelled."""

from typing import Any, NamedTuple

import pytest
from leasehold.graphs import FailedNode, GraphState

from assigner.explain.answer import explain
from assigner.queries import jobs
from schema import graphs
from schema.moves.graphs import SubmittedGraph
from schema.postgres.connection import Connection
from schema.requests import GraphRequest
from tests.support.plans import watching
from tests.support.pool import Pool, active, completed, taken
from tests.support.race import cancel, retention


def graph(pool: Pool, *nodes: dict[str, Any], **fields: Any) -> SubmittedGraph:
    asked = [{"command": ["true"], **node} for node in nodes]
    return taken(pool, GraphRequest.model_validate({"name": "build", "nodes": asked, **fields}).normal())


def shown(pool: Pool) -> dict[str, Any]:
    return pool.database.run(lambda c: jobs.graph(c, pool.row("SELECT id FROM graphs").id))


def first(pool: Pool) -> tuple[int, str | None, str]:
    found = shown(pool)["first_failed"]
    return found["node"], found["job"] and str(found["job"]), found["state"]


def test_the_first_failure_stays_the_first_when_its_job_is_deleted(pool: Pool) -> None:
    made, bot = graph(pool, {"node": 1}, {"node": 2}), pool.bot(capacity=2)
    works = {work["job"]: work for work in pool.given(bot)}
    bot.sync(completed(works[made.jobs[2]], "failed"), active(works[made.jobs[1]]))
    assert first(pool) == (2, made.jobs[2], "failed")
    assert retention(pool) == 1
    bot.sync(completed(works[made.jobs[1]], "failed"))
    assert first(pool) == (2, None, "failed")


def test_of_cancelled_nodes_the_one_is_told_with_which_the_others_were_cancelled(pool: Pool) -> None:
    made = graph(pool, {"node": 1, "after": [2]}, {"node": 2, "after": [3]}, {"node": 3}, on_failure="cancel")
    assert shown(pool)["first_failed"] is None
    cancel(pool, made.jobs[2])
    pool.upkeep().run_once()
    assert first(pool) == (2, made.jobs[2], "cancelled")


@pytest.mark.parametrize("failed", [1, 0])
def test_of_many_nodes_that_were_cancelled_few_jobs_are_read(pool: Pool, failed: int) -> None:
    nodes = [{"node": number, "after": [1] if number > 1 else []} for number in range(1, 302)]
    made = graph(pool, *nodes, on_failure="cancel")
    if failed:
        bot = pool.bot()
        (work,) = pool.given(bot)
        bot.sync(completed(work, "failed"))
    else:
        cancel(pool, made.jobs[1])
    pool.upkeep().run_once()
    found = shown(pool)
    assert (found["failed"], found["cancelled"]) == (failed, 301 - failed)
    with pool.database.connect() as connection:
        with watching(connection) as watch:
            jobs.graph(connection, pool.row("SELECT id FROM graphs").id)
        connection.rollback()
    read = sum(node.touched for plan in watch.plans for node in plan.nodes if node.relation == "jobs")
    assert read == (1 if failed else jobs.MAX_FAILED)
    assert first(pool)[0] == 1


def test_a_newer_gateway_may_tell_more_of_a_failed_node(pool: Pool) -> None:
    graph(pool, {"node": 1})
    node = {"node": 1, "job": None, "state": "failed", "reason": "exit code 1", "bot": "b"}
    state = GraphState.of(shown(pool) | {"first_failed": node})
    assert state.first_failed == FailedNode(node=1, job=None, state="failed", reason="exit code 1")


def reasons(pool: Pool, made: SubmittedGraph) -> dict[int, set[str | None]]:
    """Why each node was cancelled, as every read of it tells."""
    ids = {number: str(job) for number, job in made.jobs.items()}

    def read(connection: Connection) -> dict[int, set[str | None]]:
        (graph,) = {row.graph for row in connection.execute_sql("SELECT graph FROM graph_nodes")}
        page = {row["node"]: row["reason"] for row in jobs.nodes(connection, graph, after=-1, limit=100)}
        states = jobs.submission_states(connection, list(ids.values()), instances=None)
        results = jobs.results(connection, list(ids.values()), instances=None, room=1000)
        stored = connection.execute_sql("SELECT id AS row_id, public_id, reason FROM jobs").mappings().all()
        listed = {
            str(row["public_id"]): row["reason"] for row in jobs.listed(connection, [dict(row) for row in stored])
        }
        told = dict[int, set[str | None]]()
        for number, job in ids.items():
            shown = jobs.job(connection, job, instances=None)
            assert shown is not None
            told[number] = {page[number], states[job]["reason"], results[job]["reason"], shown["reason"], listed[job]}
            answer = explain(connection, job, instances=None, sync=1.0)
            assert answer is not None
            if not answer.attempts:
                told[number].add(answer.sentence.removeprefix("it is cancelled and never ran: "))
        return told

    return pool.database.run(read)


def test_every_read_of_a_cancelled_node_names_the_one_that_failed_first(pool: Pool) -> None:
    nodes = [{"node": number, "after": [number - 1] if number > 1 else []} for number in range(1, 5)]
    nodes.append({"node": 5, "after": [6, 3]})
    nodes.append({"node": 6})
    made, bot = graph(pool, *nodes, on_failure="cancel"), pool.bot(capacity=2)
    works = {work["job"]: work for work in pool.given(bot)}
    bot.sync(completed(works[made.jobs[1]], "failed"), active(works[made.jobs[6]]))
    bot.sync(completed(works[made.jobs[6]], "failed"))
    why = {f"cancelled: node 1 of its graph, job {made.jobs[1]}, failed"}
    told = reasons(pool, made)
    assert [told[number] for number in (2, 3, 4, 5)] == [why] * 4


def test_a_node_that_somebody_cancelled_is_told_as_the_reason_of_those_after_it(pool: Pool) -> None:
    nodes = [{"node": 1}, {"node": 2, "after": [1]}, {"node": 3, "after": [2]}, {"node": 4, "after": [3]}]
    made, bot = graph(pool, *nodes, on_failure="cancel"), pool.bot()
    cancel(pool, made.jobs[2])
    (work,) = pool.given(bot)
    bot.sync(completed(work, "failed"))
    why = {f"cancelled: node 2 of its graph, job {made.jobs[2]}, was cancelled"}
    told = reasons(pool, made)
    assert (told[3], told[4]) == (why, why)
    assert why.isdisjoint(told[2])


def wide_and_deep() -> list[dict[str, Any]]:
    """Node 1, a chain of 60 nodes after it, and 60 nodes that each depend on each of these."""
    chain = [{"node": number, "after": [number - 1] if number > 1 else []} for number in range(1, 62)]
    return [*chain, *({"node": number, "after": list(range(2, 62))} for number in range(62, 122))]


def test_a_list_of_cancelled_nodes_reads_each_node_above_them_once_or_twice(pool: Pool) -> None:
    made = graph(pool, *wide_and_deep(), on_failure="cancel")
    cancel(pool, made.jobs[1])
    pool.upkeep().run_once()
    stored = [row._asdict() for row in pool.rows("SELECT id AS row_id, reason FROM jobs ORDER BY id")]
    with pool.database.connect() as connection:
        with watching(connection) as watch:
            told = graphs.with_roots(connection, stored)
        connection.rollback()
    assert {row["reason"] for row in told[1:]} == {f"cancelled: node 1 of its graph, job {made.jobs[1]}, was cancelled"}
    (plan,) = watch.plans
    read = {
        name: sum(node.touched for node in plan.nodes if node.relation == name)
        for name in ("jobs", "graph_nodes", "graph_edges")
    }
    assert read["jobs"] <= 2 * 121, read
    assert read["graph_nodes"] <= 2 * 121, read
    assert read["graph_edges"] <= 60 + 60 * 60, read


def test_past_the_bound_of_one_answer_the_deepest_nodes_are_told_in_general(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = [{"node": number, "after": [number - 1] if number > 1 else []} for number in range(1, 9)]
    made = graph(pool, *chain, on_failure="cancel")
    cancel(pool, made.jobs[1])
    pool.upkeep().run_once()
    ids = {row.node_no: row.job_id for row in pool.rows("SELECT node_no, job_id FROM graph_nodes")}
    monkeypatch.setattr(graphs, "MAX_CAUSES", 4)
    asked = [{"row_id": ids[number], "reason": graphs.UPSTREAM} for number in (2, 3, 8)]
    told = pool.database.run(lambda c: graphs.with_roots(c, asked))
    why = f"cancelled: node 1 of its graph, job {made.jobs[1]}, was cancelled"
    assert [row["reason"] for row in told] == [why, why, graphs.UPSTREAM]


class NodeCause(NamedTuple):
    parent: int
    goes_on: bool
    node: int = 1
    job: str | None = None
    outcome: str = "failed"


def test_the_causes_of_a_chain_are_walked_once() -> None:
    class Counted(dict[int, Any]):
        steps = 0

        def get(self, key: int, default: Any = None) -> Any:
            self.steps += 1
            return super().get(key, default)

    causes = Counted({n: NodeCause(n - 1, n > 2) for n in range(2, 1001)})
    firsts = graphs.first_causes(causes, range(1, 1001))
    assert {cause and cause.parent for n, cause in firsts.items() if n > 1} == {1}
    assert causes.steps == 1000


def test_causes_that_go_round_in_a_graph_that_was_changed_by_hand_have_an_end() -> None:
    causes = {1: NodeCause(2, True), 2: NodeCause(3, True), 3: NodeCause(2, True)}
    firsts = graphs.first_causes(causes, [1, 3])
    assert firsts == dict.fromkeys((1, 2, 3), causes[2])
