"""Ageing: what waits becomes more urgent, to the point, whoever reads the queue and however long it is."""

import random
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from assigner.admission.heads import Heads
from assigner.admission.ordering import OrderingSettings, RankOrder, ScoreOrder, Weights, effective_priority, score
from assigner.admission.rules import Rules
from assigner.admission.state import AdmissionState
from assigner.cycle.settings import AssignerSettings
from assigner.preemption.plan import QuotaSettings
from schema.accounting import counters
from schema.picking import constrained
from schema.picking.constrained import Ageing
from schema.picking.ready import Scope
from schema.policy import priority_classes
from schema.policy.meters import Meter
from schema.policy.time_windows import Window, WindowSchedule, WindowSettings
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.pool import Pool, admission_state, at, completed, head, queue

HOUR = 3600.0
AGED = "UPDATE jobs SET queued_at = now() - make_interval(hours => :hours) WHERE public_id = CAST(:id AS uuid)"
SLEEPLESS = Ageing(2.0, 20.0)


def test_the_golden_job_has_ninety_points(pool: Pool) -> None:
    request = JobRequest(command=["true"], job_class="serious", project="site", user_priority=2).normal()
    (job,) = pool.submit(**{name: request[name] for name in ("terms", "own")})
    stored = pool.job(job)
    old = head(1, stored.rank, since=-5 * HOUR)
    assert effective_priority(old, admission_state(), SLEEPLESS) == 10
    assert pool.database.run(priority_classes.policy).level(10) == "high"


def test_the_order_is_that_of_the_formula_at_every_moment(chance: random.Random) -> None:
    heads = [head(n, chance.randint(-20, 90), since=-chance.uniform(0, 20) * HOUR) for n in range(400)]
    for clock in (0.0, HOUR, 9 * HOUR, 30 * HOUR):
        now = admission_state(clock)
        found = RankOrder(SLEEPLESS).sorted_heads(heads, now)
        ages = {each.job.id: (now.now - each.queued_at).total_seconds() / HOUR for each in heads}
        formula = [100 - each.rank + min(2 * ages[each.job.id], 20) for each in found]
        assert formula == sorted(formula, reverse=True)


def test_what_is_read_of_a_long_queue_is_the_first_by_the_formula(pool: Pool, chance: random.Random) -> None:
    for priority in (0, 20, 35, 40, 60, 90):
        pool.submit(chance.randint(30, 70), terms={}, priority=priority)

    pool.change("UPDATE jobs SET queued_at = now() - random() * interval '30 hours'")
    pool.bot(capacity=1000)
    jobs = pool.rows("SELECT id, priority, queued_at FROM jobs")

    def read(connection: Connection, hours: float) -> tuple[list[int], list[int]]:
        found = constrained.queues(connection, Scope(None), batch=20, after=constrained.FIRST_QUEUE)
        assert found.now is not None
        now = found.now + timedelta(hours=hours)
        taken = constrained.heads(connection, found.queues, limits=[20] * len(found.queues), now=now, ageing=SLEEPLESS)

        def worth(job: Any) -> tuple[float, float]:
            age = (now - job.queued_at).total_seconds()
            return job.priority - SLEEPLESS.gain(age), -age

        return sorted(each.job.id for each in taken), sorted(job.id for job in sorted(jobs, key=worth)[:20])

    for hours in (0.0, 5.0, 40.0):
        found, expected = pool.database.run(partial(read, hours=hours))
        assert found == expected


def test_another_rate_takes_effect_with_the_next_cycle_and_writes_nothing(pool: Pool) -> None:
    (old,) = pool.submit(terms={}, priority=50)
    (new,) = pool.submit(terms={}, priority=40)
    pool.change(AGED, hours=6, id=old)
    bot = pool.bot(capacity=1)
    assigner = pool.assigner(rules=Rules(OrderingSettings(ageing_rate=2.0)))
    assigner.run_once()
    assert [lease["job"] for lease in bot.take()] == [old], "12 points for its age outdo 10 of its class"
    assert pool.job(old).rank == 50
    assigner.reconfigure(AssignerSettings(), QuotaSettings())
    pool.bot("bot-2", capacity=1)
    assigner.run_once()
    assert pool.job(new).state == "leased"


@pytest.mark.parametrize("kind", ["rank", "score"])
def test_ageing_is_off_by_default(pool: Pool, kind: str) -> None:
    settings = OrderingSettings(kind=kind, weight_wait=0.0)
    assert settings.ageing is None
    assert settings.policy().ageing is None
    (old,) = pool.submit(terms={}, priority=41)
    (new,) = pool.submit(terms={}, priority=40)
    pool.change(AGED, hours=9 * 24, id=old)
    pool.bot(capacity=1)
    pool.assigner(rules=Rules(settings)).run_once()
    assert (pool.job(new).state, pool.job(old).state) == ("leased", "queued")


def test_a_long_queue_is_read_no_further_than_the_first_of_each_rank(pool: Pool) -> None:
    for priority in (10, 20, 30):
        pool.submit(2000, terms={}, priority=priority)
    queue = pool.row("SELECT id, now() AS now FROM queues")
    values = {"ids": [queue.id], "limits": [8], "skips": [0], "rate": 2.0, "cap": 20.0, "now": queue.now, "ranks": 64}
    (plan,) = pool.row(f"EXPLAIN (ANALYZE, FORMAT JSON) {constrained.AGED.text}", **values)[0]
    nodes, scans = [plan["Plan"]], []
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if node.get("Relation Name") == "jobs":
            scans.append(node)
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert max(node["Actual Rows"] for node in scans) <= 16


# The score of four terms: each counts what its weight says, and age counts once.


DAY = 24 * HOUR


@pytest.mark.parametrize(
    ("points", "wait", "efficiency", "window", "expected"),
    [
        (150, DAY, 1, 1, 1.0),
        (150, 0, 0, 0, 0.4),
        (0, DAY, 0, 0, 0.3),
        (0, 0, 1, 0, 0.2),
        (0, 0, 0, 1, 0.1),
        (90, DAY / 2, 1, 1, 0.4 * 0.6 + 0.15 + 0.3),
        (1000, 9 * DAY, 0, 0, 0.7),
        (-50, 0, 0, 0, 0),
    ],
)
def test_each_term_is_brought_to_one_before_its_weight(
    points: float, wait: float, efficiency: float, window: float, expected: float
) -> None:
    found = score(Weights(), points=points, gained=0, wait=wait, efficiency=efficiency, window=window)
    assert found == pytest.approx(expected)


def test_age_counts_once_unless_somebody_asks_for_twice_or_the_wait_has_no_weight() -> None:
    asked = {"points": 60.0, "gained": 20.0, "wait": 10 * HOUR}
    once = score(Weights(), **asked)
    twice = score(Weights(count_age_once=False), **asked)
    assert twice - once == pytest.approx(0.4 * 20 / 150)
    assert score(Weights(wait=0), **asked) == pytest.approx(0.4 * 80 / 150 + 0.3)


def test_raw_is_the_arithmetic_of_the_original() -> None:
    found = score(Weights(raw=True), points=80, gained=10, wait=DAY / 4)
    assert found == pytest.approx(0.4 * 90 + 0.3 * 0.25 + 0.2 + 0.1)


def test_what_is_known_of_resources_and_windows_counts() -> None:
    line = ScoreOrder(Ageing(2.0, 20.0))
    quiet, used_up = (
        Window(
            WindowSettings(name=name, start=0, end=24, types=(name,), meter="plan", usage_threshold=80),
            Meter("plan", used, 100, None, at(0)),
        )
        for name, used in (("quiet", 8.0), ("busy", 72.0))
    )
    heads = [
        head(1, 40, of=queue(job_class="quiet"), seconds=HOUR),
        head(2, 40, of=queue(job_class="busy")),
        head(3, 40, of=queue(job_class="quiet")),
    ]
    now = admission_state(60, openings=WindowSchedule([quiet, used_up]))
    assert [round(now.window(each), 2) for each in heads] == [0.9, 0.1, 0.9]
    assert [now.efficiency(each) for each in heads] == [0.5, 1, 1]
    assert [each.job.id for each in line.sorted_heads(heads, now)] == [3, 2, 1]
    assert now.openings.spare("unknown", now.now) == 0, "no window lets it start"


def test_an_order_that_nobody_knows_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="'scores' is not an order: there are 'graph', 'rank', 'score'"):
        OrderingSettings(kind="scores")


def test_a_hastened_job_comes_first_by_score_too() -> None:
    ordering = OrderingSettings(kind="score").policy().ordering
    found = ordering.sequence([head(1, -60, since=-DAY), head(2, -1e6)], admission_state())
    assert [each.job.id for each in found] == [2, 1]


def test_the_shortest_come_first_only_where_all_else_is_equal() -> None:
    ordering = OrderingSettings(shortest_first=True).policy().ordering
    heads = [head(1, 5, seconds=600), head(2, 5, since=9, seconds=6), head(3, 4, seconds=9000), head(4, 5)]
    assert [each.job.id for each in ordering.sequence(heads, admission_state(60))] == [3, 2, 1, 4]


#: What is submitted, in this order: expected seconds, expected costs, and hours that each has waited.
SECONDS, COSTS, WAITS = (300, 20, 100, 5, 60), (100, 50, 10, 0, 200, 30), (1, 20, 10, 30, 5)


def submit_each(pool: Pool, kind: str) -> list[str]:
    """Submit the jobs of one kind of order; returns them in the order in which they have to start."""
    if kind == "graph":
        of_graph = {"graph": "1", "graph_priority": 1}
        jobs = {each: pool.submit(terms=of_graph, estimated_cost=each)[0] for each in COSTS}
        return [jobs[each] for each in sorted(COSTS)]
    if kind == "shortest first":
        jobs = {each: pool.submit(terms={"owner": "ann"}, estimated_seconds=each)[0] for each in SECONDS}
        return [jobs[each] for each in sorted(SECONDS)]
    # Who has waited longer is less urgent, so that the order is not the one in which they are read.
    jobs = {each: pool.submit(terms={"owner": "ann"}, priority=each)[0] for each in WAITS}
    for each, job in jobs.items():
        pool.change(AGED, hours=each, id=job)
    return [jobs[each] for each in sorted(WAITS, reverse=True)]


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize(
    ("kind", "ordering"),
    [
        ("shortest first", OrderingSettings(shortest_first=True)),
        ("graph", OrderingSettings(kind="graph")),
        ("score", OrderingSettings(kind="score")),
    ],
)
def test_few_free_units_change_no_order(pool: Pool, kind: str, ordering: OrderingSettings, units: int) -> None:
    expected = submit_each(pool, kind)
    bot = pool.bot(capacity=units, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner(rules=Rules(ordering))
    started: list[str] = []
    while len(started) < len(expected):
        assigner.run_once()
        given = bot.take()
        assert given
        started += sorted((lease["job"] for lease in given), key=expected.index)
        bot.sync(*map(completed, given))
    assert started == expected


def test_a_job_that_its_own_gate_refuses_hides_none_behind_it_while_one_unit_is_free(pool: Pool) -> None:
    pool.database.run(lambda c: counters.set_limits(c, counters.COST_OF_OWNER, {("default", "ann"): 5}, actor="test"))
    for _ in range(3):
        pool.submit(terms={"owner": "ann"}, estimated_cost=8)
    (small,) = pool.submit(terms={"owner": "ann"}, estimated_cost=1)
    bot = pool.bot(capacity=1)
    pool.assigner().run_once()
    assert [lease["job"] for lease in bot.take()] == [small]


def test_jobs_that_somebody_else_has_locked_are_replaced_by_the_next_ones(pool: Pool) -> None:
    jobs = {each: pool.submit(terms={"owner": "ann"}, estimated_seconds=each)[0] for each in SECONDS}
    pool.bot(capacity=9)
    policy = OrderingSettings(shortest_first=True).policy()

    def read(connection: Connection) -> list[str]:
        found = constrained.queues(connection, Scope(), batch=9, after=constrained.FIRST_QUEUE)
        assert found.now is not None
        heads = Heads(connection, policy, AdmissionState(found.now), free_units=1).first(found.queues)
        return [head.job.public_id for head in heads]

    with pool.database.connect() as other:
        held = "SELECT FROM jobs WHERE public_id = CAST(:id AS uuid) FOR NO KEY UPDATE"
        other.execute(Statement(held), {"id": jobs[5]})
        found = pool.database.run(read)
        other.rollback()
    assert found == [jobs[each] for each in (20, 60, 100, 300)]
