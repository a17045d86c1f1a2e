"""Upkeep moves many rows at once. One that needs a row which somebody holds, or which is wrong, stops no other."""

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from schema.accounting.held_rows import MOST_PARTS, move_rows
from schema.moves.waiting.timeouts import stop_drained
from schema.requests import JobRequest
from tests.support.pool import Pool, completed, states, submitted
from tests.support.race import Race, cancel

pytestmark = [pytest.mark.conflicts]

#: What holds the child of the first graph, and what makes a job wrong: it would get the queue null.
HOLD_CHILD = "SELECT FROM graph_nodes WHERE node_no = 2 ORDER BY job_id LIMIT 1 FOR UPDATE"
SPOIL = "UPDATE jobs SET queue = -queue WHERE id = (SELECT min(id) FROM jobs WHERE state = '{}')"
LEFT = "rows are left that need another one, which is held or wrong"
EARLIER = "now() - interval '1 h' + id * interval '1 s'"


@pytest.fixture(params=["held", "wrong"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def round_of_upkeep(pool: Pool, race: Race, kind: str, *, state: str = "blocked", hold: str = HOLD_CHILD) -> list[int]:
    """Run a round while the row is held, or wrong; return how many rows each duty has left."""
    with race.first() as stranger, capture_logs() as logs:
        if kind == "held":
            stranger.connection.execute_sql(hold)
        else:
            pool.change(SPOIL.format(state))
        pool.upkeep().run_once()
    race.forget_errors()
    failed = [log for log in logs if log["event"] == "a duty of upkeep failed"]
    assert not failed, failed
    if kind == "wrong":
        pool.change("UPDATE jobs SET queue = -queue WHERE queue < 0")
    return [log["rows"] for log in logs if log["event"] == LEFT]


def run_on(node: int) -> dict[str, Any]:
    return {"node": node, "on_failure": "run"}


@pytest.mark.parametrize("by", ["timeout", "ceiling"])
def test_a_job_that_waited_too_long_is_given_up_beside_one_that_cannot_be(
    pool: Pool, race: Race, kind: str, by: str
) -> None:
    graph = submitted(pool, {1: [], 2: [run_on(1)]})
    others = pool.submit(5)
    if by == "timeout":
        pool.change(f"UPDATE jobs SET queue_deadline = {EARLIER} WHERE state = 'queued'")
    else:
        pool.change(f"UPDATE jobs SET queued_at = {EARLIER} WHERE state = 'queued'")
        pool.change("INSERT INTO ceilings (max_queue_age) VALUES (60)")
    assert round_of_upkeep(pool, race, kind) == [1]
    assert states(pool, graph) == {1: "queued", 2: "blocked"}
    assert {pool.job(job).state for job in others} == {"dead"}
    pool.upkeep().run_once()
    assert states(pool, graph) == {1: "dead", 2: "queued"}


@pytest.mark.parametrize("others", [0, 5])
def test_jobs_are_given_up_beside_some_that_only_together_cannot_be(pool: Pool, race: Race, others: int) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [run_on(1), run_on(2)]})
    jobs = pool.submit(others) if others else []
    pool.change(f"UPDATE jobs SET queue_deadline = {EARLIER} WHERE state = 'queued'")
    assert round_of_upkeep(pool, race, "wrong") == [1]
    assert sorted(states(pool, graph).values()) == ["blocked", "dead", "queued"]
    assert {pool.job(job).state for job in jobs} <= {"dead"}
    pool.upkeep().run_once()
    assert states(pool, graph) == {1: "dead", 2: "dead", 3: "queued"}


def test_a_node_that_is_due_is_queued_beside_one_that_cannot_be(pool: Pool, race: Race, kind: str) -> None:
    graphs = [submitted(pool, {1: [], 2: [1]}, name=name) for name in ("first", "second")]
    bot = pool.bot(capacity=2)
    works = pool.given(bot)
    with race.first() as stranger:
        stranger.connection.execute_sql("SELECT FROM jobs WHERE state = 'blocked' FOR UPDATE")
        bot.sync(*map(completed, works))
    assert round_of_upkeep(pool, race, kind) == [1]
    assert [states(pool, graph)[2] for graph in graphs] == ["blocked", "queued"]
    pool.upkeep().run_once()
    assert states(pool, graphs[0])[2] == "queued"


def test_what_is_left_of_a_graph_is_cancelled_beside_what_cannot_be(pool: Pool, race: Race) -> None:
    graphs = [submitted(pool, {1: [], 2: [run_on(1)]}, name=name) for name in ("first", "second")]
    pool.change("UPDATE graphs SET state = 'cancelled'")
    assert round_of_upkeep(pool, race, "held") == [2]
    assert states(pool, graphs[1]) == {1: "cancelled", 2: "cancelled"}
    pool.upkeep().run_once()
    assert states(pool, graphs[0]) == {1: "cancelled", 2: "cancelled"}


@pytest.mark.breaks_invariants
def test_a_deferred_job_returns_beside_one_that_cannot(pool: Pool, race: Race) -> None:
    first, second = pool.submit(2)
    pool.change("UPDATE jobs SET state = 'deferred'")
    assert round_of_upkeep(pool, race, "wrong", state="deferred") == [1]
    assert (pool.job(first).state, pool.job(second).state) == ("deferred", "queued")


def test_a_job_that_starves_beside_one_whose_constraints_are_held_is_promoted(pool: Pool, race: Race) -> None:
    request = JobRequest(command=["true"], job_class="background").normal()
    (first,), (second,) = pool.submit(**request), pool.submit(**request)
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '1 h'")
    pool.change("UPDATE job_constraints SET watch_at = now() - interval '1 h' + job_id * interval '1 s'")
    hold = "SELECT FROM job_constraints ORDER BY job_id LIMIT 1 FOR UPDATE"
    assert round_of_upkeep(pool, race, "held", hold=hold) == []
    assert (pool.history(first), pool.history(second)) == (["submit"], ["submit", "promote"])


def test_a_bot_whose_drain_is_over_is_stopped_beside_an_instance_that_is_held(pool: Pool, race: Race) -> None:
    cancel(pool, *pool.submit(instance="served"))
    job, _, _ = pool.running(instance="default")
    pool.change(
        "UPDATE instances SET draining = true, drain_deadline = now() - interval '1 h' WHERE name = 'served';"
        " UPDATE bots SET draining = true, drain_deadline = now() - interval '1 s'"
    )
    hold = "SELECT FROM instances WHERE name = 'served' FOR UPDATE"
    assert round_of_upkeep(pool, race, "held", hold=hold) == []
    assert pool.history(job)[-1] == "drain"
    deadline = "SELECT drain_deadline IS NULL AS forgotten FROM instances WHERE name = 'served'"
    assert not pool.row(deadline).forgotten
    pool.database.run(lambda c: stop_drained(c, 1, sync=1.0, actor="test"))
    assert pool.row(deadline).forgotten


def test_usage_leaves_the_window_beside_a_counter_that_is_held_however_much_it_has(pool: Pool, race: Race) -> None:
    pool.change("INSERT INTO counters (name, used) VALUES ('instance:a:cost', 600), ('instance:b:cost', 2)")
    pool.change(
        "INSERT INTO usage (name, bucket, amount) SELECT 'instance:a:cost', now() - n * interval '1 h', 1"
        " FROM generate_series(100, 699) n"
    )
    pool.change(
        "INSERT INTO usage (name, bucket, amount) VALUES ('instance:b:cost', now() - interval '90 h', 2),"
        " ('reported:b:token', now() - interval '90 h', 3)"
    )
    hold = "SELECT FROM counters WHERE name = 'instance:a:cost' FOR UPDATE"
    assert round_of_upkeep(pool, race, "held", hold=hold) == []
    used = "SELECT name, used::integer FROM counters ORDER BY name"
    assert pool.rows(used) == [("instance:a:cost", 600), ("instance:b:cost", 0)]
    assert pool.rows("SELECT DISTINCT name FROM usage WHERE rolled ORDER BY name") == [
        ("instance:b:cost",),
        ("reported:b:token",),
    ]
    pool.upkeep().run_once()
    assert pool.rows(used) == [("instance:a:cost", 0), ("instance:b:cost", 0)]


@pytest.mark.parametrize(
    ("bad", "left"),
    [((), ()), ((7,), (7,)), ((0, 1, 499), (0, 1, 499)), (range(500), range(500))],
    ids=["none", "one", "some", "all"],
)
def test_rows_that_can_be_moved_are_moved_in_few_parts(pool: Pool, bad: Sequence[int], left: Sequence[int]) -> None:
    tried: list[int] = []

    def move(part: Sequence[int]) -> Sequence[int]:
        tried.append(len(part))
        if not set(bad).isdisjoint(part):
            raise psycopg.DataError
        return part

    parts = pool.database.run(lambda c: move_rows(c, range(500), move, tries=True))
    moved = [row for part in parts for row in part]
    assert sorted([*moved, *left]) == [*range(500)]
    assert len(tried) <= MOST_PARTS
