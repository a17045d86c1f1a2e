"""What `explain` costs does not grow with the queue, and with the fleet only up to a bound."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from assigner.explain.answer import explain
from assigner.queries import report as reports
from schema.accounting import forecasts
from schema.diagnostics import evidence
from schema.moves.cancel import cancel
from schema.moves.end import AttemptEnd, Verdict, end
from schema.moves.graphs import SubmittedGraph, cancel_graph
from schema.moves.submit import submit
from schema.moves.waiting.timeouts import age_out, stop_drained, stop_over_ceiling
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import instances as instances_tenancy
from tests.support import filling, plans
from tests.support.plans import Plan, Watch, watching
from tests.support.pool import Pool, layered, states, submitted, work_off
from tests.support.servers import Databases

KINDS = ("free", "full", "absent")
INSTANCES = 2
JOBS, BOTS = 9_000, 5_000
#: Jobs that hold locks, in the queues of so many locks; those of one kind alone, and behind all others of it.
LOCKED, LOCKS = 1_500, 30
#: Jobs that are counted ahead of one, at most: fewer than a queue has here, as the default is than deep ones have.
AHEAD = 1_000
#: Jobs that are counted, bots that are looked at with their requirement sets, and a few rows of everything else. And of
#: the forecast: jobs in the order, the newest jobs, and bots.
BOUND = AHEAD + 3 * evidence.MAX_BOTS_COUNTED + evidence.COMPARISONS + 200 + 4 * AHEAD
LAST = Statement("""
SELECT j.public_id FROM jobs j JOIN platforms p ON p.id = j.platform
WHERE j.state = 'queued' AND p.properties @> jsonb_build_object('kind', jsonb_build_array(CAST(:kind AS text)))
ORDER BY j.priority DESC, j.queued_at DESC, j.id DESC LIMIT 1
""")


@pytest.fixture
def filled(database: Database) -> Database:
    """A pool with a deep queue and a large fleet, and no statistics of either."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
        filling.fill_jobs(connection, JOBS, instances=INSTANCES, kinds=KINDS)
        filling.fill_bots(connection, {"free": BOTS // 2, "full": BOTS // 2})
        filling.occupy(connection, "full", leaving=0)
        locked = {"instance": "i-0", "payload": {"command": ["true"]}, "priority": 20}
        locked |= {"properties": {"kind": ["free"]}}
        submit(connection, [locked | {"terms": {"locks": [f"l-{n % LOCKS}"]}} for n in range(LOCKED)], actor="test")

    database.run(lambda connection: connection.execute(Statement("ALTER TABLE jobs SET (autovacuum_enabled = off)")))
    database.run(fill)
    return database


def cost(database: Database, kind: str, *, instances: list[str] | None) -> tuple[Watch, str]:
    """What it takes to explain the last job of all that want a bot of this kind, and the answer."""
    with database.connect() as connection:
        job = str(connection.execute(LAST, {"kind": kind}).scalar_one())
        with watching(connection) as watch:
            found = explain(connection, job, instances=instances)
        connection.rollback()
    assert found is not None
    return watch, found.sentence


def test_explain_reads_few_rows_behind_thousands_of_jobs(filled: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "AHEAD", AHEAD)
    monkeypatch.setattr(forecasts, "MOST_AHEAD", AHEAD)
    monkeypatch.setattr(forecasts, "ARRIVED", AHEAD)
    monkeypatch.setattr(forecasts, "MOST_BOTS", AHEAD)
    filled.run(lambda connection: connection.execute(Statement("INSERT INTO lease_times VALUES (0, 1, 1, 1, 1)")))
    for analysed in (False, True):
        if analysed:
            filled.run(lambda connection: connection.execute(Statement("ANALYZE")))
        for kind in KINDS:
            for instances in (None, ["i-0", "i-1"]):
                watch, sentence = cost(filled, kind, instances=instances)
                # Operators set few of these, whatever the size of the queue and of the fleet.
                assert not watch.whole_scans() - {"ceilings", "backpressure"}, f"{kind}: {watch}"
                assert watch.touched <= BOUND, f"{kind}, {sentence}: {watch}"


# What operators see of instances costs neither the finished jobs nor what other instances run.


OF_OPERATORS: dict[str, Any] = {"instances": 10, "kinds": ("free", "full")}
QUEUED, FINISHED, RUNNING = 500, 20_000, 1_000
EACH = QUEUED // 10
WHOLE = {"jobs", "leases", "bots"}


def fill_for_operators(connection: Connection) -> None:
    """Ten instances with queued, resting and many finished jobs; the first one runs a thousand jobs."""
    filling.fill_queues(connection, **OF_OPERATORS)
    filling.fill_jobs(connection, FINISHED, **OF_OPERATORS, state="succeeded")
    filling.fill_jobs(connection, QUEUED, **OF_OPERATORS)
    filling.fill_jobs(connection, EACH, **OF_OPERATORS, units=2, backoff=60.0)
    filling.fill_bots(connection, {"full": RUNNING})
    filling.occupy(connection, "full", leaving=0)


@pytest.fixture(scope="module", params=["no statistics", "statistics"])
def of_operators(request: pytest.FixtureRequest, databases: Databases, template: str) -> Iterator[Database]:
    with plans.filled(databases, template, sorted(WHOLE)) as database:
        database.run(fill_for_operators)
        if request.param == "statistics":
            database.run(lambda connection: connection.execute(Statement("ANALYZE")))
        yield database


@contextmanager
def undone(database: Database, *changes: str) -> Iterator[Connection]:
    """Make the changes, and undo them with all that the block does."""
    with database.connect() as connection:
        for change in changes:
            connection.execute_sql(change)
        yield connection
        connection.rollback()


def test_a_list_of_instances_reads_what_waits_and_what_runs_once(of_operators: Database) -> None:
    with undone(of_operators) as connection, watching(connection) as watch:
        found = instances_tenancy.instances(connection)
    assert sum(one.queued for one in found) == QUEUED + EACH
    assert min(one.queued for one in found if one.name.startswith("i-")) >= EACH
    assert [one.running for one in found if one.running] == [RUNNING]
    assert not watch.whole_scans() & WHOLE, str(watch)
    assert watch.touched <= QUEUED * 1.1 + RUNNING + 200, str(watch)


def test_a_report_tells_what_waits_from_an_index_and_no_more_of_it_than_its_bound(
    of_operators: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, counted in ((100_000, QUEUED + EACH), (100, 100)):
        monkeypatch.setattr(reports, "MAX_ENDED", most)
        with undone(of_operators) as connection, watching(connection) as watch:
            found = reports.report(connection, window=1.0)
        assert sum(each.jobs for each in found.waiting) == counted
        (waiting,) = [plan for plan in watch.plans if plan.query == reports.WAITING.query.decode()]
        (ready,) = [node for node in waiting.nodes if node.index == "jobs_of_queue"]
        assert (ready.kind, ready.touched) == ("Index Only Scan", counted), str(waiting)
        assert not waiting.whole_scans() & WHOLE, str(waiting)
        assert waiting.touched <= counted + 200, str(waiting)


def test_a_drained_instance_whose_time_is_over_reads_what_runs_once(of_operators: Database) -> None:
    drained = "UPDATE instances SET draining = true, drain_deadline = now() - interval '1 hour' WHERE name = 'i-5'"
    with undone(of_operators, drained) as connection:
        for most in (2 * RUNNING + 200, 50):
            with watching(connection) as watch:
                assert stop_drained(connection, 100, sync=1, actor="test") == 0
            assert not watch.whole_scans() & WHOLE, str(watch)
            assert watch.touched <= most, str(watch)


CEILINGS = (
    "INSERT INTO ceilings (label, max_timeout, max_queue_age) VALUES (NULL, 86400, 86400), ('quick', 86400, 86400)"
)


@pytest.mark.parametrize(("changes", "most"), [((), 10), ((CEILINGS,), 8 * RUNNING + 200)], ids=["none", "some"])
def test_ceilings_are_looked_for_in_indexes_and_without_any_nothing_is_read(
    of_operators: Database, changes: tuple[str, ...], most: int
) -> None:
    """What upkeep reads to find jobs that run or wait for longer than a ceiling, of which there are none."""
    with undone(of_operators, *changes) as connection, watching(connection) as watch:
        assert stop_over_ceiling(connection, 100, sync=1, actor="test") == 0
        assert age_out(connection, 100, actor="test") == 0
    assert not watch.whole_scans() & {"jobs", "leases"}, str(watch)
    assert watch.touched <= most, str(watch)


def test_for_a_queue_limit_only_the_jobs_of_the_instance_are_counted(of_operators: Database) -> None:
    with undone(of_operators, "INSERT INTO queue_limits (max_queued) VALUES (1000)") as connection:
        with watching(connection, nested=True) as watch:
            connection.execute(Statement("""SELECT refuse_full_queues('[{"instance": "i-5"}]')"""))
    assert "jobs" not in watch.whole_scans(), str(watch)
    assert EACH <= watch.touched <= 2 * EACH + QUEUED // 10 + 200, str(watch)


# What graphs cost: nothing where there are none, and each edge once where there are.


GRAPH_TABLES = ("graphs", "graph_nodes", "graph_edges")


def touched(plans: Iterable[Plan], table: str) -> float:
    """Rows of a table that these statements read."""
    return sum(node.touched for plan in plans for node in plan.nodes if node.relation == table)


def ended_one_by_one(pool: Pool, graph: SubmittedGraph) -> list[Plan]:
    """End every node in the order of the graph, by cancelling it; returns the statements."""

    def work(connection: Connection) -> list[Plan]:
        with watching(connection) as watch:
            for _, job in sorted(graph.jobs.items()):
                cancel(connection, [job], instances=None, sync=1.0, actor="test")
        return watch.plans

    return pool.database.run(work)


def test_a_pool_without_unfinished_graphs_looks_once_for_each_statement_that_ends_jobs(pool: Pool) -> None:
    over = submitted(pool, layered(50, parents=3, chance=pool.chance))
    pool.database.run(lambda c: cancel_graph(c, over.public_id, instances=None, sync=1.0, actor="test"))
    pool.upkeep().run_once()
    pool.submit(20)
    pool.bot(capacity=20)
    pool.assigner().run_once()
    leases = pool.rows("SELECT * FROM live ORDER BY job_id")
    endings = [AttemptEnd(row.job_id, row.fence, row.bot_id, row.bot_epoch, Verdict.SUCCEEDED) for row in leases]
    assert len(endings) == 20

    def work(connection: Connection) -> list[Plan]:
        with watching(connection) as watch:
            end(connection, endings, actor="test")
        return watch.plans

    plans = [plan for plan in pool.database.run(work) if "graph" in plan.query]
    assert len(plans) == 1
    reads = [node for node in plans[0].nodes if node.relation in GRAPH_TABLES]
    assert [(node.relation, node.loops) for node in reads] == [("graphs", 1)]
    assert reads[0].touched <= 1


@pytest.mark.long
def test_each_edge_is_walked_when_its_parent_ends_and_never_again(pool: Pool) -> None:
    """Once to learn whose rows to lock and once to count, twice each for a parent that did not succeed; other graphs
    in the tables make no difference."""
    submitted(pool, layered(300, parents=5, chance=pool.chance), name="other")
    pages = []
    for nodes, statistics in ((60, False), (240, True)):
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


def test_many_nodes_run_each_after_its_parents(pool: Pool) -> None:
    after = layered(400, parents=5, chance=pool.chance)
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
