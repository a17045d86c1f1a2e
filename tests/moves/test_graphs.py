"""Graphs of jobs: what they are refused for, and that every node runs after what it depends on."""

import json
from typing import Any

import pytest
from leasehold.errors import BadInput, Conflict
from structlog.testing import capture_logs

from assigner.metrics import BLOCKED_FOREVER
from tests.support.pool import (
    Bot,
    Pool,
    active,
    cancel_graph,
    completed,
    graph_of,
    number,
    states,
    submitted,
    taken,
    work_off,
)  # fmt: skip
from tests.support.race import Race, cancel, retention


def test_what_depends_on_nothing_is_queued_and_the_rest_as_what_it_waits_for_ends(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [1], 3: [1], 4: [2, 3], 5: []})
    assert states(pool, graph) == {1: "queued", 2: "blocked", 3: "blocked", 4: "blocked", 5: "queued"}
    order = work_off(pool, pool.bot(capacity=1), graph)
    assert sorted(order) == [1, 2, 3, 4, 5]
    assert order.index(1) < min(order.index(2), order.index(3))
    assert order.index(4) > max(order.index(2), order.index(3))


#: Dependencies → the way round the circle among them.
CIRCLES: list[tuple[dict[int, list[int]], str]] = [
    ({1: [2], 2: [3], 3: [1]}, "1 → 2 → 3 → 1"),
    ({7: [7]}, "7 → 7"),
    ({1: [], 2: [1, 4], 3: [2], 4: [3], 5: [4]}, "2 → 4 → 3 → 2"),
    ({n: [n % 13 + 1] for n in range(1, 14)}, " → ".join(map(str, [*range(1, 14), 1]))),
    (
        {n: [n % 10_000 + 1] for n in range(1, 10_001)},
        "1 → 2 → 3 → 4 → 5 → 6 → 7 → 8 → 9 → 10 → … 9988 more … → 9999 → 10000 → 1",
    ),
]


def test_a_circle_or_a_number_given_twice_is_refused_before_anything_is_stored(pool: Pool) -> None:
    twice = graph_of({1: [], 2: []})
    twice["nodes"][1]["node"] = 1
    for request, reason in (
        *((graph_of(after), f"Circular dependency detected in job build: {path}") for after, path in CIRCLES),
        (twice, "Duplicate sheet_num 1 in job build"),
    ):
        with pytest.raises(BadInput) as refused:
            taken(pool, request)
        assert refused.value.reason == reason
    assert pool.row("SELECT (SELECT count(*) FROM jobs) + (SELECT count(*) FROM graphs)")[0] == 0


def test_who_depends_on_what_is_absent_is_taken_and_blocked_for_ever(pool: Pool) -> None:
    """By default it is a mistake of the caller's which the others need not suffer from."""
    graph = submitted(pool, {1: [], 2: [9, 1, 7], 3: [2, 7]})
    assert (graph.missing, graph.ready) == ((7, 9), 1)
    assert work_off(pool, pool.bot(), graph) == [1]
    assert states(pool, graph) == {1: "succeeded", 2: "blocked", 3: "blocked"}
    pool.upkeep().run_once()
    assert BLOCKED_FOREVER._value.get() == 2


def test_absent_parents_are_refused_or_forgotten_if_the_caller_says_so(pool: Pool) -> None:
    with pytest.raises(BadInput) as refused:
        submitted(pool, {1: [9, 8]}, on_phantom="reject")
    assert refused.value.reason == "Phantom dependencies in job build: 8, 9"
    with pytest.raises(BadInput) as refused:
        submitted(pool, {1: list(range(2, 5000))}, on_phantom="reject")
    assert refused.value.reason.endswith(
        " 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21 and 4978 more"
    )
    graph = submitted(pool, {1: [9, 8]}, on_phantom="ignore")
    assert (graph.missing, states(pool, graph)) == ((), {1: "queued"})


def test_a_graph_replaces_the_unfinished_one_of_its_name(pool: Pool) -> None:
    """What waits is cancelled, what runs is asked to stop, and a late report of it changes nothing in the new one."""
    old = submitted(pool, {1: [], 2: [], 3: [1]})
    bot = pool.bot(capacity=1)
    pool.assigner(batch=1).run_once()
    (work,) = bot.take()
    new = submitted(pool, {1: [], 2: [1]})
    elsewhere = submitted(pool, {1: []}, instance="team-b")
    assert (new.replaced, elsewhere.replaced) == (3, None)
    assert states(pool, old) == {1: "cancelling", 2: "cancelled", 3: "cancelled"}
    bot.sync(completed(work))
    assert states(pool, old)[1] == "succeeded"
    assert states(pool, new) == {1: "leased", 2: "blocked"}
    assert pool.row("SELECT state FROM graphs WHERE id = :id", id=old.graph_id).state == "replaced"


def test_a_cancelled_graph_ends_once_and_for_all(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [1], 3: []})
    bot = pool.bot(capacity=1)
    pool.assigner(batch=1).run_once()
    (work,) = bot.take()
    assert [cancel_graph(pool, graph.public_id).jobs for _ in range(2)] == [3, 0]
    assert states(pool, graph) == {1: "cancelling", 2: "cancelled", 3: "cancelled"}
    bot.sync(completed(work, "stopped"))
    pool.upkeep().run_once()
    row = pool.row("SELECT state, finished_at FROM graphs")
    assert row.state == "cancelled"
    assert row.finished_at is not None
    assert cancel_graph(pool, "00000000-0000-4000-8000-000000000000") is None


def test_a_stale_report_of_a_node_changes_nothing(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    bot = pool.bot(capacity=1, sync_service=pool.sync_service(enabled=False))
    pool.assigner(batch=1).run_once()
    (work,) = bot.take()
    bot.sync(completed(work | {"fence": work["fence"] + 1}), active(work))
    assert states(pool, graph) == {1: "running", 2: "blocked"}
    bot.sync(completed(work))
    bot.sync(completed(work))
    assert states(pool, graph) == {1: "succeeded", 2: "queued"}


def test_the_ends_of_nodes_and_what_they_make_ready_are_told_once_they_are_stored(pool: Pool, race: Race) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [1, 2], 4: [1], 5: [{"node": 2, "on_failure": "cancel"}]})
    bot = pool.bot(capacity=2, sync_service=pool.sync_service(enabled=False))
    pool.assigner().run_once()
    first, second = sorted(bot.take(), key=lambda work: number(graph, work["job"]))
    with capture_logs() as logs:
        with race.first() as undone:
            Bot(undone.sync_service(enabled=False), bot.session, bot.seq).sync(completed(first), active(second))
        assert told(logs) == [], "what is rolled back has not happened"
        bot.sync(completed(first), active(second))
        bot.sync(completed(first), completed(second, "failed"))
    of_graph = {"graph": graph.public_id}
    assert told(logs) == [
        ("leasehold.node_completed", of_graph | {"node": 1, "state": "succeeded"}),
        ("leasehold.node_ready", of_graph | {"node": 4}),
        ("leasehold.mark_complete_unknown_job", {"job": first["job"], "fence": first["fence"], "bot": "bot-1"}),
        ("leasehold.node_completed", of_graph | {"node": 2, "state": "failed"}),
        ("leasehold.node_completed", of_graph | {"node": 5, "state": "cancelled"}),
    ]


def told(logs: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of graphs and their fields; those of one transaction by name and node."""
    return [
        (entry["event"], {name: value for name, value in entry.items() if name not in ("event", "log_level")})
        for entry in logs
        if entry["event"].startswith("leasehold.")
    ]


def test_a_node_is_started_once_after_its_parents_and_a_graph_forgotten_with_its_last_job(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [], 4: [1, 2, 3]})
    work_off(pool, pool.bot(capacity=2), graph)
    assert pool.history(graph.jobs[4]) == ["submit", "unblock", "grant", "acknowledge", "finish"]
    pool.upkeep().run_once()
    assert pool.row("SELECT state FROM graphs").state == "finished"
    for _ in range(2):
        pool.retention(keep_succeeded=0).run_once()
    assert [table for table in ("graphs", "graph_nodes", "graph_edges") if pool.rows(f"SELECT FROM {table}")] == []


@pytest.mark.parametrize("verdict", ["failed", "cancelled", "dead"])
def test_each_edge_says_what_a_parent_that_did_not_succeed_means(pool: Pool, verdict: str) -> None:
    """However it ended: by its bot's word, by the server's, or because somebody cancelled it."""
    edges = {node: [{"node": 1, "on_failure": policy}] for node, policy in ((2, "block"), (3, "run"), (4, "cancel"))}
    after = {node + 3: [{"node": 1, "on_failure": "run"}, node] for node in edges}
    request = graph_of({1: [], **edges, **after})
    request["nodes"][0]["queue_timeout_seconds"] = 3600
    graph = taken(pool, request)
    match verdict:
        case "failed":
            work_off(pool, pool.bot(capacity=9), graph, {1: "failed"})
        case "cancelled":
            cancel(pool, graph.jobs[1])
        case "dead":
            pool.change("UPDATE jobs SET queue_deadline = now() - interval '1 s' WHERE queue_deadline IS NOT NULL")
            pool.upkeep().run_once()
    runs = ("succeeded", "succeeded") if verdict == "failed" else ("queued", "blocked")
    seen = states(pool, graph)
    assert seen == {1: verdict, 2: "blocked", 3: runs[0], 4: "cancelled", 5: "blocked", 6: runs[1], 7: "blocked"}


@pytest.mark.parametrize(("policy", "then"), [("block", "blocked"), ("cancel", "cancelled")])
def test_a_long_chain_follows_its_first_node_at_once(pool: Pool, policy: str, then: str) -> None:
    chain = {1: [], **{node: [node - 1] for node in range(2, 301)}}
    graph = submitted(pool, chain, on_failure=policy)
    work_off(pool, pool.bot(), graph, {1: "failed"})
    seen = states(pool, graph)
    assert seen.pop(1) == "failed"
    assert set(seen.values()) == {then}


def test_a_chain_that_runs_whatever_happens_runs_to_its_end(pool: Pool) -> None:
    chain = {1: [], **{node: [node - 1] for node in range(2, 31)}}
    graph = submitted(pool, chain, on_failure="run")
    verdicts = {node: "failed" for node in chain if node % 2}
    assert work_off(pool, pool.bot(), graph, verdicts) == list(chain)


def test_a_cancelled_job_in_the_middle_of_a_graph_ends_as_its_edges_say(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [1], 3: [2], 4: [{"node": 2, "on_failure": "run"}, 1]}, on_failure="cancel")
    cancel(pool, graph.jobs[2])
    assert states(pool, graph) == {1: "queued", 2: "cancelled", 3: "cancelled", 4: "blocked"}
    assert work_off(pool, pool.bot(), graph) == [1, 4]


def test_a_parent_that_is_no_more_has_still_done_its_part(pool: Pool) -> None:
    """Retention may delete a finished job long before its graph is over."""
    graph = submitted(pool, {1: [], 2: [], 3: [1, 2]})
    bot = pool.bot(capacity=1, sync_service=pool.sync_service(enabled=False))
    for left in (1, 0):
        pool.assigner(batch=1).run_once()
        (work,) = bot.take()
        bot.sync(completed(work))
        assert retention(pool) == 1
        assert states(pool, graph)[3] == ("blocked" if left else "queued")
    assert work_off(pool, bot, graph) == [3]


def test_a_key_makes_a_graph_safe_to_repeat(pool: Pool) -> None:
    first = submitted(pool, {1: [], 2: [1]}, key="k")
    second = submitted(pool, {1: [], 2: [1]}, key="k")
    assert (second.graph_id, second.jobs, second.created) == (first.graph_id, first.jobs, False)
    with pytest.raises(Conflict) as refused:
        submitted(pool, {1: []}, key="k")
    assert refused.value.code == "key_reused"
    assert states(pool, first) == {1: "queued", 2: "blocked"}


def test_a_node_has_its_number_depth_and_priority_and_waits_in_the_queue_from_when_it_is_ready(pool: Pool) -> None:
    """Nodes of all graphs and single jobs share one queue."""
    request = graph_of({10: [], 30: [20, 10], 20: [10]}, priority=5)
    request["nodes"][2] |= {"priority": -1, "queue_timeout_seconds": 3600}
    graph = taken(pool, request)
    found = pool.rows(
        "SELECT n.node_no, n.depth, j.priority FROM graph_nodes n JOIN jobs j ON j.id = n.job_id ORDER BY n.node_no"
    )
    assert [tuple(row) for row in found] == [(10, 0, 5), (20, 1, -1), (30, 2, 5)]
    assert pool.job(graph.jobs[20]).queue_deadline is None
    (single,) = pool.submit(priority=6)
    bot = pool.bot(capacity=1, sync_service=pool.sync_service(enabled=False))
    for node in (10, 20, 30):
        (work,) = pool.given(bot)
        assert work["job"] == graph.jobs[node]
        bot.sync(completed(work))
        if node == 10:
            job = pool.job(graph.jobs[20])
            assert 3590 < (job.queue_deadline - job.queued_at).total_seconds() < 3610
    assert [work["job"] for work in pool.given(bot)] == [single]


def test_nodes_whose_properties_differ_only_in_how_a_number_is_written_are_all_there(pool: Pool) -> None:
    nodes = [
        {"node": node, "payload": {"command": ["true"]}, "properties": {"memory": [memory]}, **more}
        for node, (memory, more) in enumerate(
            [(1, {}), (1.0, {}), (1, {"preferred_properties": {"disk": [1]}}),
             (1, {"preferred_properties": {"disk": [1.0]}})]
        )
    ]  # fmt: skip
    graph = taken(pool, {"name": "build", "nodes": nodes})
    assert states(pool, graph) == dict.fromkeys(range(4), "queued")


def test_graphs_can_be_submitted_and_given_up_in_sql(pool: Pool) -> None:
    """What was replaced in a transaction of somebody's own is cancelled by upkeep."""
    request = json.dumps(graph_of({1: [], 2: [1]}))
    made = [pool.row("SELECT * FROM submit_graph(CAST(:request AS jsonb))", request=request) for _ in range(2)]
    assert made[1].replaced == made[0].graph_id
    pool.upkeep().run_once()
    found = pool.rows(
        "SELECT g.id, j.state FROM graphs g JOIN graph_nodes n ON n.graph = g.id"
        " JOIN jobs j ON j.id = n.job_id ORDER BY j.id"
    )
    assert [row.state for row in found] == ["cancelled", "cancelled", "queued", "blocked"]


@pytest.mark.breaks_invariants
def test_an_edge_to_a_node_that_is_not_there_keeps_no_parent_from_ending(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [1], 3: [1]})
    pool.change("DELETE FROM graph_nodes WHERE node_no = 2")
    bot = pool.bot()
    bot.sync(*(completed(work) for work in pool.given(bot)))
    assert pool.job(graph.jobs[1]).state == "succeeded"
    assert pool.job(graph.jobs[3]).state == "leased", "the bot has fetched it"
