"""Of jobs with many different keys the first start, whether the front tells which ones they are or the queues do."""

from collections.abc import Callable

import pytest

from assigner.admission import controller, gates
from assigner.admission.controller import AdmissionController
from schema.accounting import counters
from tests.support.pool import Pool, queue
from tests.support.tenancy import share

Setup = Callable[[Pool], object]


def slots(pool: Pool, name: str, most: int) -> None:
    names = ["default", name]
    pool.database.run(lambda c: counters.set_limits(c, counters.SLOTS_OF_LOCK, {tuple(names): most}, actor="test"))


def nothing(_: Pool) -> None: ...


def resting(pool: Pool) -> None:
    jobs = pool.submit(40, terms={"locks": ["other"]}, priority=-9)
    pool.rest_queues(60, f"queue = {pool.queue_of(jobs[0]).id}")


CASES: dict[str, tuple[Setup, int]] = {
    "gates are open": (nothing, 0),
    "some keys are full": (lambda pool: pool.submit(2, terms={"locks": ["full"]}, priority=-9), 0),
    "the front is full": (lambda pool: pool.submit(40, terms={"locks": ["full"]}, priority=-9), 1),
    "deadlines count": (lambda pool: pool.change("UPDATE job_constraints SET deadline = now()"), 1),
    "instances have shares": (lambda pool: share(pool, "default", weight=2.0), 1),
    "the front rests": (resting, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_jobs_with_a_free_key_start(pool: Pool, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    setup, expected = CASES[case]
    walks, walk = list[int](), AdmissionController.read_queues

    def counted(*arguments: object, **fields: object) -> object:
        walks.append(1)
        return walk(*arguments, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(controller, "FEW_QUEUES", 3)
    monkeypatch.setattr(AdmissionController, "read_queues", counted)
    slots(pool, "customer-*", 1)
    slots(pool, "full", 0)
    jobs = [
        pool.submit(terms={"locks": [f"customer-{key}"]}, priority=priority, estimated_cost=1.0)[0]
        for priority in (2, 0, 1)
        for key in range(priority, 30, 3)
    ]
    in_order = [*jobs[10:20], *jobs[20:], *jobs[:10]]
    assigner, bot = pool.assigner(), pool.bot(capacity=4)
    assigner.run_once()
    assert {lease["job"] for lease in bot.take()} == {*in_order[:4]}
    assert len(walks) == 1, "how many queues there are is not known before"
    other = pool.bot("bot-2", capacity=6)
    setup(pool)
    *rest, hastened = in_order
    pool.change("UPDATE jobs SET rank = -1e6 WHERE public_id = CAST(:id AS uuid)", id=hastened)
    in_order = [*rest[:4], hastened, *rest[4:]]
    assigner.run_once()
    assert len(walks) == 1 + expected
    assert {*pool.granted()} <= {*in_order[:10]}
    assigner.run_once()
    assert {lease["job"] for lease in other.take()} == {*in_order[4:10]}


def test_only_the_gates_of_keys_look_at_keys() -> None:
    """Others are asked once for all jobs that differ only in their keys."""
    rest = {"owner": "ann", "job_class": "build", "graph": "g", "preferred_hours": [1]}
    without, held = queue(**rest), queue(**rest, locks=["door"], resource_class="api", model="m")
    for gate in {*gates.GATES} - {*gates.OF_KEYS}:
        seen = [(gate.charges(each), {*gate.tokens(each)}, gate.concerns(each)) for each in (without, held)]
        assert seen[0] == seen[1], f"{gate.name} is not among OF_KEYS"
    for gate in gates.OF_KEYS:
        assert {*gate.charges(held).values()} <= {1.0}, "a job takes 1 of each counter of its keys"
