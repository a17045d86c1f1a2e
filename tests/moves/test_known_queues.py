"""Single submits to a queue that the session knows do what the SQL function does, or leave the request to it."""

from typing import Any

import pytest
from leasehold.errors import Conflict, QueueFull

from assigner.maintenance.unnamed_rows import idle_queues
from schema.accounting.accounts import Account, put_account, remove_account
from schema.moves import submit as submit_moves
from schema.moves.submit import Submitted, submit_alone
from schema.postgres.kept_statements import SessionConnection
from tests.support.patience import eventually
from tests.support.pool import Pool
from tests.support.race import Race, cancel, outcome
from tests.support.race import retention as delete_finished
from tests.support.requests import PLAIN, REQUESTS, STORED

#: Requests whose queue is found, of all kinds.
FOUND = {"plain", "nothing but a command", "everything unset", "numbers as text", "estimates"}
#: How many submits of one kind make a session know its queue.
LEARNING = 2


@pytest.fixture(autouse=True)
def _sessions(pool: Pool) -> None:
    if pool.database.is_pooled:
        pytest.skip("through a transaction pooler no session knows a queue")


def alone(pool: Pool, request: dict[str, Any], **fields: Any) -> Submitted:
    return pool.database.run_alone(lambda driver: submit_alone(driver, request | fields, actor="test"))


def among_others(pool: Pool, request: dict[str, Any]) -> Submitted:
    return pool.database.run(lambda c: submit_moves.submit(c, [request, PLAIN], actor="test"))[0]


def known(pool: Pool) -> set[int]:
    """The queues that the session knows."""

    def remembered(driver: Any) -> dict[Any, int]:
        assert isinstance(driver, SessionConnection)
        return driver.remembered

    return {queue for queue in pool.database.run_alone(remembered).values() if queue > 0}


def learned(pool: Pool, *, keyed: bool = False) -> int:
    """Submit until the session knows the queue of requests with or without keys; return its id."""
    for number in range(LEARNING):
        alone(pool, PLAIN, **{"key": f"learned-{number}"} if keyed else {})
    (queue,) = known(pool)
    return queue


def cancelled(pool: Pool) -> None:
    """Cancel all jobs and delete them."""
    cancel(pool, *(str(job.public_id) for job in pool.rows("SELECT public_id FROM jobs WHERE finished_at IS NULL")))
    assert delete_finished(pool) > 0


def deleted(pool: Pool) -> int:
    round_ = idle_queues(pool.database, patience=0.05)
    assert not round_.run_once()
    return round_.deleted


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(
    ("name", "request_"), [*REQUESTS.items(), ("estimates", PLAIN | {"estimated_seconds": 5.0, "own": {}})]
)
def test_a_request_to_a_known_queue_makes_the_rows_that_the_function_makes(
    pool: Pool, name: str, request_: dict[str, Any], keyed: bool
) -> None:
    pool.change("INSERT INTO cohorts (name, labels) VALUES ('night', '{nightly}')")
    made = [
        alone(pool, request_, **{"key": f"key-{number}"} if keyed else {}, **_unshared(request_, number))
        for number in range(LEARNING + 1)
    ]
    first, *others = (pool.row(STORED, id=job.public_id) for job in made)
    assert others == [first] * LEARNING
    assert [job.created for job in made] == [True] * (LEARNING + 1)
    assert bool(known(pool)) is (name in FOUND)
    stored = pool.rows("SELECT id, public_id FROM jobs ORDER BY id")
    assert [(job.job_id, job.public_id) for job in made] == [(row.id, str(row.public_id)) for row in stored]
    hashes = pool.rows("SELECT DISTINCT request_hash FROM submit_keys")
    assert len(hashes) == int(keyed) + ("dedup_key" in request_ and keyed) * LEARNING


OTHERS = REQUESTS | {
    "another instance": PLAIN | {"instance": "other"},
    "other properties": PLAIN | {"properties": {"os": ["linux"]}},
}


@pytest.mark.parametrize("request_", [pytest.param(request, id=name) for name, request in OTHERS.items()])
def test_a_request_of_another_kind_than_the_known_one_makes_the_rows_that_it_makes_among_others(
    pool: Pool, request_: dict[str, Any]
) -> None:
    pool.change("INSERT INTO cohorts (name, labels) VALUES ('night', '{nightly}')")
    for _ in range(LEARNING):
        alone(pool, PLAIN)
        alone(pool, PLAIN, label=None)
    for number in range(LEARNING + 1):
        one = alone(pool, request_, **_unshared(request_, number))
        other = among_others(pool, request_ | _unshared(request_, -1 - number))
        assert pool.row(STORED, id=one.public_id) == pool.row(STORED, id=other.public_id)


def _unshared(request: dict[str, Any], number: int) -> dict[str, str]:
    return {"dedup_key": f"d{number}"} if "dedup_key" in request else {}


def test_a_key_that_was_used_before_gets_its_job_again_and_refuses_another_request(pool: Pool) -> None:
    learned(pool, keyed=True)
    first = alone(pool, PLAIN, key="k")
    assert alone(pool, PLAIN, key="k") == first._replace(created=False)
    with pytest.raises(Conflict, match=r"jobs\[0\].key: 'k' was used before for a different request"):
        alone(pool, PLAIN, key="k", priority=1)
    assert len(pool.rows("SELECT FROM jobs")) == LEARNING + 1
    assert len(pool.rows("SELECT FROM job_payloads")) == LEARNING + 1


def test_a_repeat_leaves_its_queue_known(pool: Pool) -> None:
    queue = learned(pool, keyed=True)
    assert not alone(pool, PLAIN, key="learned-0").created
    assert alone(pool, PLAIN, key="k").created
    assert known(pool) == {queue}


def test_a_queue_stays_while_a_submit_to_it_waits_for_its_key(pool: Pool, race: Race) -> None:
    queue = learned(pool, keyed=True)
    cancelled(pool)
    with race.first() as first:
        first.submit(key="k", properties={"os": "linux"})
        late = race.second(lambda: alone(pool, PLAIN, key="k"), behind=first)
        for _ in range(3):
            assert deleted(pool) == 0
        first.roll_back()
        assert pool.queue_of(outcome(late).public_id).id == queue


def test_a_submit_to_a_known_queue_waits_for_one_that_is_using_its_key(pool: Pool, race: Race) -> None:
    learned(pool, keyed=True)
    with race.first() as first:
        (mine,) = first.submit(key="k")
        late = race.second(lambda: alone(pool, PLAIN, key="k"), behind=first)
        first.roll_back()
        made = outcome(late)
    assert made.created
    assert made.public_id != mine


def test_what_a_job_without_a_command_breaks_is_refused_at_a_known_queue_too(pool: Pool) -> None:
    learned(pool)
    for payload in ({}, {"command": "true"}, []):
        with pytest.raises(Exception, match=r"payload\.command"):
            alone(pool, PLAIN, payload=payload)
    with pytest.raises(Exception, match="jobs_priority_range"):
        alone(pool, PLAIN, priority=1001)
    assert len(pool.rows("SELECT FROM jobs")) == LEARNING


def test_the_mark_of_an_idle_queue_that_is_known_goes_with_the_next_submit(pool: Pool) -> None:
    queue = learned(pool)
    cancelled(pool)
    deleted(pool)
    assert pool.row("SELECT idle_since FROM queues").idle_since is not None
    made = alone(pool, PLAIN)
    assert (pool.queue_of(made.public_id).id, pool.queue_of(made.public_id).idle_since) == (queue, None)


def test_a_known_queue_that_was_deleted_is_made_anew_and_learned_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_moves, "_AGAIN", 1)
    queue = learned(pool)
    cancelled(pool)
    eventually(lambda: deleted(pool) == 1)
    made = [alone(pool, PLAIN) for _ in range(LEARNING + 1)]
    queues = {pool.queue_of(job.public_id).id for job in made}
    assert queues == known(pool)
    assert queue not in queues


def test_a_queue_stays_while_a_transaction_goes_on_that_may_have_found_it_without_its_mark(
    pool: Pool, race: Race
) -> None:
    """As a submit between its snapshot and its first row: it has no number yet, and holds no row."""
    learned(pool)
    cancelled(pool)
    with race.first() as first:
        first.connection.exec_driver_sql("SELECT id FROM queues")
        for _ in range(3):
            assert race.unhindered(lambda: deleted(pool), by=first) == 0
        first.commit()
    eventually(lambda: deleted(pool) == 1)


def test_the_look_up_of_a_queue_is_planned_as_a_part_of_the_statement_that_asks(pool: Pool) -> None:
    """Then the statement locks the table of queues before it takes its snapshot, and upkeep waits for it."""
    plan = "\n".join(
        row[0] for row in pool.rows("EXPLAIN SELECT * FROM known_queue(CAST(:request AS jsonb))", request="{}")
    )
    assert "on queues" in plan
    assert "Function Scan" not in plan


def test_jobs_of_an_instance_that_becomes_managed_get_constraints_and_lose_them_when_it_ceases_to_be(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_moves, "_AGAIN", 1)
    learned(pool)
    pool.database.run(lambda c: put_account(c, "default", Account(credit_weight=1.0), actor="test"))
    constrained = [alone(pool, PLAIN).job_id for _ in range(LEARNING + 1)]
    pool.database.run(lambda c: remove_account(c, "default", actor="test"))
    plain = [alone(pool, PLAIN).job_id for _ in range(LEARNING + 1)]
    found = pool.rows("SELECT id, constrained FROM jobs WHERE id = ANY (:ids)", ids=constrained + plain)
    assert {row.id: row.constrained for row in found} == dict.fromkeys(constrained, True) | dict.fromkeys(plain, False)
    assert known(pool)


def test_a_limit_that_operators_set_later_holds_for_a_known_queue(pool: Pool) -> None:
    learned(pool)
    pool.change(
        "INSERT INTO queue_limits (instance, max_queued) SELECT id, :most FROM instances WHERE name = 'default'",
        most=LEARNING + 1,
    )
    assert alone(pool, PLAIN).created
    with pytest.raises(QueueFull):
        alone(pool, PLAIN)


def test_a_session_remembers_only_so_many_queues(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_moves, "_REMEMBERED", 2)
    for units in (1, 2, 3, 1, 2, 3):
        for _ in range(LEARNING + 1):
            assert alone(pool, PLAIN, units=units).created
    assert len(known(pool)) <= 2
    counts = pool.rows("SELECT q.units, count(*) AS jobs FROM jobs j JOIN queues q ON q.id = j.queue GROUP BY 1")
    assert {row.units: row.jobs for row in counts} == dict.fromkeys((1, 2, 3), 2 * (LEARNING + 1))
