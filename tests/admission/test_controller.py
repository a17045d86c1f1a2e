"""Few heads are read, and those that start are the first of those that would start if all had been read."""

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from assigner.admission import admit, controller, judging, rules
from assigner.admission.admit import PATIENCE
from assigner.admission.controller import AdmissionController, AdmissionMemory, AdmissionResult
from assigner.admission.heads import Heads
from assigner.admission.ordering import OrderingPolicy, OrderingSettings
from assigner.admission.rules import RULES
from assigner.admission.state import AdmissionState
from schema.accounting import counters
from schema.moves.grant import Placement, grant
from schema.moves.submit import submit
from schema.picking import constrained
from schema.picking.constrained import QueueHead, QueueId, QueueScan, ReadHeads
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support.plans import watching
from tests.support.pool import Pool, admission_state, admitted, head, queue
from tests.support.requests import PLAIN
from tests.support.tenancy import Tenancy, share

ARRANGEMENT = RULES.ordering.policy()
AGEING = OrderingSettings(ageing_rate=1.0).policy()


def filled(pool: Pool, weights: Sequence[float], *, jobs: int) -> None:
    """Jobs of three priorities for an instance of each weight."""
    names = {f"i-{nth}": weight for nth, weight in enumerate(weights)}
    for name, weight in names.items():
        share(pool, name, weight=weight)
    each = [{"priority": priority} for priority in (3, 1, 2) for _ in range(jobs // 3)]
    requests = [PLAIN | {"instance": name} | fields for name in names for fields in each]
    pool.database.run(lambda c: submit(c, requests, actor="test"))


@pytest.fixture
def keeper() -> AdmissionController:
    return AdmissionController(RULES, AdmissionMemory(), name="test", now=lambda: 0.0)


def estimate_all(pool: Pool, cost: float) -> None:
    """Give every job this estimate of its cost."""
    estimated = "INSERT INTO job_constraints (job_id, estimate) SELECT id, :cost FROM jobs"
    pool.change(f"{estimated} ON CONFLICT (job_id) DO UPDATE SET estimate = :cost", cost=cost)


def queues(connection: Connection, *, batch: int) -> QueueScan:
    return constrained.queues(connection, Scope(), batch=batch, after=constrained.FIRST_QUEUE)


def of_all(connection: Connection, *, free_units: int) -> list[int]:
    """The jobs that would start if every head had been read."""
    found = queues(connection, batch=free_units)
    assert found.now is not None
    admission_state = rules.read_admission_state(connection, found.queues, now=found.now, rules=RULES)
    heads = constrained.heads(connection, found.queues, limits=[1000] * len(found.queues), now=found.now)
    found_first = admit.admit(heads, admission_state, free_units=free_units, ordering=ARRANGEMENT.ordering)
    return [head.job.id for head in found_first.heads]


@pytest.mark.parametrize("weights", [(1, 1, 40), (1, 2, 3, 4, 5, 6), (0, 1), (7,)])
def test_what_starts_is_what_would_start_if_all_had_been_read(
    pool: Pool, keeper: AdmissionController, weights: Sequence[float]
) -> None:
    filled(pool, weights, jobs=90)
    pool.bot(capacity=100)

    def both(connection: Connection) -> tuple[list[int], list[int]]:
        expected = of_all(connection, free_units=80)
        picked = admitted(connection, keeper, batch=80, chance=pool.chance).heads
        return [head.job.id for head in picked], expected

    found, expected = pool.database.run(both)
    assert found == expected
    assert len(found) == 80


@pytest.mark.parametrize("policy", [ARRANGEMENT, AGEING], ids=["by rank", "aged"])
def test_a_head_is_read_once_though_others_let_go_of_those_in_front_of_it(pool: Pool, policy: OrderingPolicy) -> None:
    filled(pool, (1, 1), jobs=90)
    pool.bot(capacity=100)

    def read(connection: Connection) -> list[int]:
        found = queues(connection, batch=20)
        assert found.now is not None
        heads = Heads(connection, policy, AdmissionState(found.now), free_units=20)
        with pool.database.connect() as other:
            held = constrained.heads(other, found.queues, limits=[5] * len(found.queues), now=found.now)
            first = heads.first(found.queues)
            other.rollback()
        assert not {head.job.id for head in held} & {head.job.id for head in first}
        more = heads.more([], started=Counter(head.queue.id for head in first[::2]), refused={})
        return [head.job.id for head in [*first, *more]]

    ids = pool.database.run(read)
    assert len(ids) == len(set(ids)) > 20


def test_a_further_read_begins_behind_the_last_head(pool: Pool) -> None:
    """It costs no more than the read before, though it is further from the front."""
    filled(pool, (1, 1), jobs=300)
    pool.bot(capacity=100)
    pool.change("ANALYZE")

    def read(connection: Connection) -> tuple[list[int], list[int], list[float]]:
        found = queues(connection, batch=100)
        assert found.now is not None
        at_once = constrained.heads(connection, found.queues, limits=[120, 120], now=found.now)
        in_steps, known, touched = list[QueueHead](), dict[QueueId, ReadHeads](), list[float]()
        for jobs in (40, 80, 120):
            with watching(connection) as watch:
                heads = constrained.heads(connection, found.queues, limits=[40, 40], now=found.now, read=known)
            touched.append(sum(node.touched for plan in watch.plans for node in plan.nodes))
            last = {head.queue.id: head for head in heads}
            known = {each: ReadHeads(jobs, head.rank, head.queued_at, head.job.id) for each, head in last.items()}
            in_steps += heads
        in_order = sorted(in_steps, key=lambda head: (head.queue.id, head.rank, head.queued_at, head.job.id))
        at_once.sort(key=lambda head: head.queue.id)
        return [head.job.id for head in at_once], [head.job.id for head in in_order], touched

    at_once, in_steps, touched = pool.database.run(read)
    assert len(at_once) == 240
    assert in_steps == at_once
    assert max(touched) <= 1.2 * touched[0]


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many heads are read from now on, and by how many statements."""
    read, heads = Counter[str](), constrained.heads

    def counting(*arguments: Any, **fields: Any) -> list[QueueHead]:
        found = heads(*arguments, **fields)
        read.update(heads=len(found), times=int(len(arguments[1]) > 0))
        return found

    monkeypatch.setattr(constrained, "heads", counting)
    return read


def test_queues_of_which_few_jobs_may_start_are_not_read_to_their_end(
    pool: Pool, keeper: AdmissionController, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pool, [1] * 8, jobs=90)
    for nth in range(4):
        Tenancy(pool).quota(f"i-{nth}", maximum=1)
        pool.database.run(lambda c, nth=nth: counters.limit_all(c, {f"instance:i-{nth + 4}:cost": 1.5}))
    estimate_all(pool, 2)
    pool.bot(capacity=500)
    read = counted(monkeypatch)

    started = pool.database.run(lambda c: admitted(c, keeper, batch=500, chance=pool.chance).heads)
    assert sorted(head.queue.instance_name for head in started) == [f"i-{nth}" for nth in range(4)]
    assert read["times"] <= 4
    assert read["heads"] <= 4 * (PATIENCE + 4) + 4 * 78, "no more than at first"


def test_what_many_queues_cost_grows_with_their_number(pool: Pool) -> None:
    pool.bot(capacity=50)

    def touched(connection: Connection) -> float:
        connection.execute(Statement("SET LOCAL plan_cache_mode = force_generic_plan"))
        with watching(connection) as watch:
            found = queues(connection, batch=50)
        rows = sum(node.touched for plan in watch.plans for node in plan.nodes)
        connection.rollback()
        return rows / len(found.queues)

    filled(pool, [1] * 20, jobs=30)
    pool.change("ANALYZE")
    few = pool.database.run(touched)
    filled(pool, [1] * 100, jobs=3)
    assert pool.database.run(touched) <= 1.5 * few, "rows for each queue"


def test_of_many_instances_those_that_come_first_are_read(
    pool: Pool, keeper: AdmissionController, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pool, range(1, 61), jobs=60)
    pool.bot(capacity=1000)

    start(pool, keeper, free_units=200)
    read = counted(monkeypatch)
    for _ in range(20):
        expected = set(pool.database.run(lambda c: of_all(c, free_units=16)))
        read.clear()
        started = {head.job.id for head in start(pool, keeper, free_units=8)}
        assert started <= expected, "instances within a fraction of a start may change places"
        assert read["heads"] <= 3 * 10, "of the room and two more instances"


@pytest.mark.parametrize("cost", [0.2, 1.0, 7.0])
def test_about_as_many_heads_are_read_as_start_whatever_a_job_costs(
    pool: Pool, keeper: AdmissionController, monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    filled(pool, range(1, 31), jobs=90)
    estimate_all(pool, cost)
    pool.bot(capacity=1000)

    start(pool, keeper, free_units=100)
    read = counted(monkeypatch)
    for _ in range(3):
        read.clear()
        assert len(start(pool, keeper, free_units=100)) == 100
        assert read["times"] <= 3
        assert read["heads"] <= 220


@pytest.mark.parametrize("others", [90, 97])
def test_the_earliest_deadline_starts_first_in_a_queue_of_which_nothing_was_expected_to_start(
    pool: Pool, keeper: AdmissionController, others: int
) -> None:
    for name in ("behind", "ahead"):
        share(pool, name, weight=1)
    pool.submit(others, instance="behind")
    dated = [pool.job(each).id for each in pool.submit(40, instance="ahead")]
    # The later a job was queued, the earlier is its deadline.
    dates = "INSERT INTO job_constraints (job_id, deadline) VALUES (:id, now() + make_interval(days => 100 - :nth))"
    for nth, job_id in enumerate(dated):
        pool.change(dates, nth=nth, id=job_id)
    for name, used in (("behind", 1.0), ("ahead", 1000.0)):
        cost = {"name": f"instance:{name}:cost", "used": used}
        pool.change("INSERT INTO usage VALUES (:name, date_trunc('minute', now()), :used, 1)", **cost)
        pool.change("INSERT INTO counters (name, used) VALUES (:name, :used)", **cost)
    pool.bot(capacity=100)

    started = pool.database.run(lambda c: admitted(c, keeper, batch=100, chance=pool.chance).heads)
    of_dated = [dated.index(head.job.id) for head in started if head.queue.instance_name == "ahead"]
    assert of_dated == [*range(39, 39 - (100 - others), -1)]


def test_many_instances_that_are_alike_take_turns(
    pool: Pool, keeper: AdmissionController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "MANY_ALIKE", 10)
    filled(pool, [1] * 60, jobs=30)
    pool.bot(capacity=1000)

    read, had = counted(monkeypatch), Counter[str]()
    for _ in range(21):
        had.update(head.queue.instance_name for head in start(pool, keeper, free_units=8))
        assert read["heads"] <= 4 * 11
        read.clear()
    assert set(had.values()) == {2, 3}, "168 jobs of 60 instances that weigh the same"


def test_instances_whose_jobs_may_not_start_do_not_change_who_comes_next(
    pool: Pool, keeper: AdmissionController
) -> None:
    filled(pool, [1] * 40, jobs=30)
    pool.bot(capacity=1000)

    # Those furthest behind have a budget of which too little is left for any of their jobs; then comes a single one.
    for nth in range(40):
        if nth < 10:
            pool.change("INSERT INTO counters (name, most) VALUES (:name, 2)", name=f"instance:i-{nth}:cost")
        else:
            lift = "UPDATE accounts SET lift = :lift, lifted_at = now() WHERE instance = (SELECT id FROM instances"
            pool.change(f"{lift} WHERE name = :name)", lift=10 if nth == 30 else 11, name=f"i-{nth}")
    estimate_all(pool, 5)
    found = Counter(head.queue.instance_name for head in start(pool, keeper, free_units=8))
    assert found.total() == 8
    assert max(found.values()) == 1, "each of them puts its instance behind the others"
    assert found["i-30"] == 1


@pytest.mark.parametrize("budget", [4, 4.5])
def test_where_many_budgets_end_a_cycle_reads_their_queues_in_few_statements(
    pool: Pool, keeper: AdmissionController, monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    filled(pool, [1] * 40, jobs=60)
    pool.bot(capacity=1000)
    for nth in range(39):
        limit = {"name": f"instance:i-{nth}:cost", "most": budget + nth % 3}
        pool.change("INSERT INTO counters (name, most) VALUES (:name, :most)", **limit)

    read = counted(monkeypatch)
    started = Counter(head.queue.instance_name for head in start(pool, keeper, free_units=250))
    assert read["times"] <= 12, "122 if each queue is read to its end"
    assert read["heads"] <= 700
    assert started == {f"i-{nth}": 4 + nth % 3 for nth in range(39)} | {"i-39": 250 - 39 * 5}


@pytest.mark.parametrize(("sets", "jobs"), [(200, 1), (200, 3), (20, 10)])
def test_jobs_of_many_queues_fill_all_units_in_one_cycle_though_others_wait_behind_them(
    pool: Pool, sets: int, jobs: int
) -> None:
    """Each constraint set is a queue, and they take turns by the age of their jobs."""
    requests = [PLAIN | {"terms": {"owner": f"o{nth}"}, "priority": -1} for _ in range(jobs) for nth in range(sets)]
    pool.database.run(lambda c: submit(c, requests, actor="test"))
    pool.submit(100)
    bot = pool.bot(capacity=100)
    pool.assigner().run_once()
    started = pool.rows("SELECT priority FROM jobs WHERE state = 'leased'")
    assert [row.priority for row in started] == [-1] * 100
    assert bot.take()


def start(pool: Pool, keeper: AdmissionController, *, free_units: int) -> Sequence[QueueHead]:
    """What starts of what `keeper` picks, which is all of it."""

    def placed(connection: Connection) -> AdmissionResult:
        picked = admitted(connection, keeper, batch=free_units, chance=pool.chance)
        bot = connection.execute(Statement("SELECT id FROM bots")).scalar_one()
        wanted = [Placement(head.job.id, bot, {}) for head in picked.heads]
        taken = keeper.amounts(picked)
        granted = grant(connection, wanted, assigner="test", strategy="capacity", ack=60.0, taken=taken)
        assert len(granted) == len(wanted)
        keeper.charge(connection, picked, [*taken.items()])
        return picked

    picked = pool.database.run(placed)
    keeper.after_commit(picked)
    return picked.heads


def test_what_a_cycle_has_read_is_freed_without_the_garbage_collector() -> None:
    """It holds thousands of objects, and the collector would look at those of several cycles at once."""
    gc.disable()
    try:
        state, of = admission_state(counters={"instance:default:jobs": counters.Counter(0.0, 10.0)}), queue()
        assert judging.queue_admission(of, state).closed(head(1, 0, of=of), state) is None
        alive = weakref.ref(state)
        del state
        assert alive() is None
    finally:
        gc.enable()
