"""Graphs share the pool: the score of a job, the share of its graph, the penalty above it and the cap."""

from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from assigner.admission import admit, graph_share, ordering
from assigner.admission.graph_share import GraphShare
from assigner.admission.ordering import GraphOrder, OrderingSettings
from assigner.admission.rules import Rules
from assigner.admission.state import AdmissionState
from assigner.cycle.assigner import PriorityAgeAssigner
from schema import graphs as graph_reads
from schema.accounting import counters
from schema.picking.constrained import QueueHead
from tests.support.explain import explained
from tests.support.pool import NOON, Pool, active, completed, queue
from tests.support.pool import head as plain_head
from tests.support.race import Race

GRAPHS = OrderingSettings(kind="graph", max_concurrent=8)


def running(pool: Pool) -> dict[str, int]:
    """Jobs of each graph that run."""
    rows = pool.rows("""
        SELECT g.terms->>'graph' AS graph, count(*) AS jobs FROM jobs j
        JOIN queues q ON q.id = j.queue JOIN constraint_sets g ON g.id = q.constraint_set
        WHERE j.state IN ('leased', 'running') GROUP BY 1""")
    return {row.graph: row.jobs for row in rows}


def head(number: int, graph: str | None, *, priority: int = 5, **fields: Any) -> QueueHead:
    terms = {} if graph is None else {"graph": graph, "graph_priority": priority}
    found = plain_head(number, 0, of=queue(constraint_set=hash(graph), **terms))
    return found._replace(**{"estimate": 0.0, **fields})


def scheduling(pool: Pool, rules: OrderingSettings = GRAPHS, **settings: Any) -> PriorityAgeAssigner:
    return pool.assigner(rules=Rules(rules), **settings)


def settled(limit: float | None, graphs: int, **fields: Any) -> GraphShare:
    found = OrderingSettings(kind="graph", **fields).graph_share(limit=limit, graphs=graphs)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("graphs", "share", "cap", "scores"),
    [(4, 2, 4, {1: 50, 2: 70, 3: 90}), (16, 1, 2, {0: 50, 1: 70}), (0, 8, 16, {7: 50, 8: 70}), (3, 8 / 3, 5, {2: 50})],
)
def test_share_cap_and_scores_are_those_of_marianne(
    graphs: int, share: float, cap: int, scores: dict[int, float]
) -> None:
    found = settled(8, graphs)
    assert (found.share, found.cap) == (share, cap)
    for jobs, expected in scores.items():
        penalty = found.penalty(jobs)
        assert graph_share.score(priority=5, depth=0, retries=0, cost=0.0, penalty=penalty) == expected


def test_depth_and_cost_come_later_and_retries_sooner() -> None:
    assert graph_share.score(priority=3, depth=4, retries=2, cost=10.0, penalty=20.0) == 30 + 4 - 10 + 1 + 20
    assert (
        graph_share.unpenalised_score(head(1, "a", priority=3, attempts=2, estimate=10.0, priority_inputs={"depth": 4}))
        == 30 + 4 - 10 + 1
    )


def test_without_a_limit_and_without_the_order_of_graphs_nobody_has_a_share() -> None:
    assert OrderingSettings(kind="graph").graph_share(limit=None, graphs=4) is None
    assert OrderingSettings().graph_share(limit=8, graphs=4) is None
    assert settled(8, 4).share == settled(99, 4, max_concurrent=8).share


def test_every_pick_goes_by_what_runs_then() -> None:
    """Two graphs of one urgency take turns at their share, though all jobs of one of them are older."""
    heads = [head(n, "a") for n in range(6)] + [head(n, "b") for n in range(10, 16)]
    admission_state = AdmissionState(NOON)
    admission_state.limit_graphs(GraphShare(2.0, 4), [each.queue for each in heads])
    first = admit.admit(heads, admission_state, free_units=6, ordering=GraphOrder()).heads
    assert [each.queue.constraints["graph"] for each in first] == ["a", "a", "b", "b", "a", "b"]
    assert [admission_state.scores[each.job.id] for each in first] == [50, 50, 50, 50, 70, 70]
    rest = admit.admit(heads, admission_state, free_units=9, ordering=GraphOrder()).heads
    assert len(rest) == 2, "both are at their caps"


def test_more_urgent_graphs_come_first_and_what_belongs_to_no_graph_has_no_penalty() -> None:
    heads = [head(1, "late", priority=9), head(2, None), head(3, "soon", priority=1), head(4, "soon", priority=1)]
    admission_state = AdmissionState(NOON, graph_share=GraphShare(1.0, 2))
    admitted = admit.admit(heads, admission_state, free_units=9, ordering=GraphOrder()).heads
    assert [each.job.id for each in admitted] == [3, 4, 2, 1]


def test_a_graph_at_its_cap_is_skipped_and_keeps_nobody_waiting(pool: Pool) -> None:
    jobs = pool.submit(20, terms={"graph": "1", "graph_priority": 1}, priority=-50)
    pool.submit(1, terms={"graph": "2"})
    pool.submit(20, terms={"graph": "3"})
    pool.submit(1, terms={"graph": "4"})
    bot = pool.bot(capacity=50)
    scheduling(pool, OrderingSettings(kind="graph", max_concurrent=8, max_per_graph=1.5)).run_once()
    assert running(pool) == {"1": 3, "2": 1, "3": 3, "4": 1}, "the share of four is 2, the cap 3"
    bot.sync(*(completed(lease) for lease in bot.take()))
    tighter = OrderingSettings(kind="graph", max_concurrent=8, max_per_graph=0.75)
    scheduling(pool, tighter).run_once()
    assert running(pool) == {"1": 3, "3": 3}, "the share of two is 4, the cap 3: two places stay free"
    (job, *_) = [each for each in jobs if pool.job(each).state == "queued"]
    said = "it does not run because its graph runs 3 jobs, its share is 4 and the most is 3"
    assert explained(pool, job, rules=Rules(tighter)).sentence == said


def test_all_graphs_together_run_no_more_than_they_may(pool: Pool) -> None:
    """Other constrained jobs are not counted, and what ends makes room for as many more."""
    for graph in ("1", "2", "3"):
        pool.submit(10, terms={"graph": graph})
    pool.submit(1, terms={"locks": ["tree"]})
    bot = pool.bot(capacity=50, sync_service=pool.sync_service(enabled=False))
    for _ in range(2):
        scheduling(pool).run_once()
        counted = running(pool)
        assert (sum(counted.values()) - counted[None], counted[None]) == (8, 1)
        assert {counted[graph] for graph in ("1", "2", "3")} == {2, 3}
    (job, *_) = pool.submit(8, terms={"graph": "4"})
    said = "it does not run because all graphs together run 8 of at most 8 jobs"
    assert explained(pool, job, rules=Rules(GRAPHS)).sentence == said
    first, second, *others = [lease for lease in bot.take() if lease["fence"]]
    bot.sync(completed(first), completed(second), *map(active, others))
    scheduling(pool).run_once()
    assert sum(jobs for graph, jobs in running(pool).items() if graph is not None) == 8


@pytest.mark.conflicts
@pytest.mark.parametrize(
    ("rules", "graphs", "counted", "found"),
    [
        pytest.param(GRAPHS, "12", ["graph:1:jobs", "graph:2:jobs", "graphs:jobs"], {"1": 8}, id="what all may run"),
        pytest.param(
            OrderingSettings(kind="graph", max_concurrent=8, max_per_graph=0.75), "11", ["graph:1:jobs"], {"1": 6},
            id="the cap of one",
        ),
    ],
)  # fmt: skip
def test_two_assigners_do_not_both_start_as_many_jobs_as_graphs_may_run(
    pool: Pool, race: Race, rules: OrderingSettings, graphs: str, counted: list[str], found: dict[str, int]
) -> None:
    """Whoever comes second finds the limit reached and begins anew."""
    for name in counted:
        pool.database.run(lambda c, name=name: counters.limit_all(c, {name: None}))
    for instance, graph in zip(("one", "two"), graphs, strict=True):
        pool.bot(f"bot-{instance}", instance=instance, capacity=50)
        pool.submit(20, terms={"graph": graph}, instance=instance)
    race.in_turn(
        lambda first: scheduling(first, rules, instances=("one",)).run_once(),
        scheduling(pool, rules, instances=("two",)).run_once,
    )
    assert running(pool) == found


def test_the_pool_runs_no_more_than_it_may_and_that_is_what_graphs_share(pool: Pool) -> None:
    pool.database.run(lambda c: counters.limit_all(c, {"pool:jobs": 8}))
    for graph in ("1", "2", "3", "4"):
        pool.submit(10, terms={"graph": graph})
    pool.bot(capacity=50)
    scheduling(pool, OrderingSettings(kind="graph")).run_once()
    assert running(pool) == {"1": 2, "2": 2, "3": 2, "4": 2}


def test_statistics_tell_what_waits_and_runs_of_each_graph(pool: Pool) -> None:
    empty = pool.row("SELECT * FROM scheduler_stats")
    assert tuple(empty) == (0, 0, None, {}, {})
    pool.database.run(lambda c: counters.limit_all(c, {"pool:jobs": 8}))
    assigner = scheduling(pool, OrderingSettings(kind="graph"))
    pool.bot(capacity=3)
    pool.submit()
    assigner.run_once()
    pool.submit(5, terms={"graph": "1"})
    pool.submit(2, terms={"graph": "2"})
    pool.submit(1, terms={"locks": ["tree"]})
    assigner.run_once()
    found = pool.row("SELECT * FROM scheduler_stats")
    assert (found.queued + found.active, found.max_concurrent) == (8, 8)
    assert found.active == 2, "the job that asks for nothing else took a place as well"
    both = Counter(found.per_graph_running) + Counter(found.per_graph_queued)
    assert both == {"1": 5, "2": 2}


def test_a_job_of_a_graph_that_starts_is_told_with_its_score(pool: Pool) -> None:
    (job,) = pool.submit(terms={"graph": "7", "graph_priority": 3}, estimated_cost=2)
    pool.bot()
    with capture_logs() as logs:
        scheduling(pool).run_once()
    (told,) = [each for each in logs if each["event"] == "leasehold.node_dispatched"]
    assert (told["job"], told["graph"], told["priority"], told["active"]) == (job, "7", 30.2, 1)


def test_counters_of_graphs_that_run_nothing_are_forgotten_and_begin_anew(pool: Pool) -> None:
    pool.submit(2, terms={"graph": "1"})
    pool.submit(1, terms={"graph": "2"})
    bot = pool.bot(capacity=2)
    scheduling(pool).run_once()
    bot.sync(*(completed(lease) for lease in bot.take()))
    assert pool.database.run(lambda c: graph_reads.delete_idle_counters(c, limit=10)) == 1
    scheduling(pool).run_once()
    assert sum(running(pool).values()) == 1


def test_a_pick_scores_those_in_front_and_not_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 picks among 8,000 jobs of 1,000 graphs: each graph once, and for each pick a few more."""
    heads = [head(graph * 10 + n, str(graph), priority=1 + graph % 9) for graph in range(1000) for n in range(8)]
    scored, counted = ordering.graph_score, Counter[str]()

    def counting(each: QueueHead, admission_state: AdmissionState) -> ordering.Score:
        counted["scored"] += 1
        return scored(each, admission_state)

    monkeypatch.setattr(ordering, "graph_score", counting)
    admission_state = AdmissionState(NOON, graph_share=GraphShare(1.0, 2))
    assert len(admit.admit(heads, admission_state, free_units=500, ordering=GraphOrder()).heads) == 500
    assert counted["scored"] <= 1000 + 4 * 500
