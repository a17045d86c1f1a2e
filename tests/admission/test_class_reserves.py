"""Class reserves: what is kept of the pool's limit for a class, whoever places the jobs and whatever else runs."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from leasehold.errors import BadInput

from assigner.admission.gates import ClassReserveGate
from schema.accounting import class_reserves, counters
from schema.accounting.counters import Counter as Amount
from schema.policy import priority_classes
from schema.requests import JobRequest
from tests.support.explain import explained, gates_of
from tests.support.pool import Bot, Pool, active, admission_state, completed, queue
from tests.support.race import Race


def limited(pool: Pool, most: int | None, **reserves: int) -> None:
    """Let the pool run at most so many jobs, and keep some of them for classes."""
    pool.database.run(lambda c: counters.limit_all(c, {"pool:jobs": most}))
    for name, jobs in reserves.items():
        kept(pool, name, jobs)


def kept(pool: Pool, name: str, jobs: int) -> None:
    pool.database.run(lambda c: class_reserves.put_reserve(c, name, jobs=jobs, actor="test"))


def submitted(pool: Pool, job_class: str | None, count: int = 1, **fields: Any) -> list[str]:
    more = {} if job_class is None else {"job_class": job_class}
    return pool.submit(count, **JobRequest(command=["true"], owner="ann", **more, **fields).normal())


def running(pool: Pool) -> dict[str | None, int]:
    """Class -> jobs that hold a lease."""
    rows = pool.rows("""
        SELECT g.terms->>'job_class' AS name FROM live l JOIN jobs j ON j.id = l.job_id
        JOIN queues q ON q.id = j.queue JOIN constraint_sets g ON g.id = q.constraint_set""")
    return Counter(row.name for row in rows)


@pytest.mark.parametrize(
    ("used", "of_classes", "job_class", "said"),
    [
        (7, {}, None, None),
        (8, {}, None, "the pool runs 8 of at most 10 jobs and keeps 2 for class 'critical'"),
        (8, {}, "random", "the pool runs 8 of at most 10 jobs and keeps 2 for class 'critical'"),
        (8, {}, "critical", None),
        (8, {"critical": 1}, "random", None),
        (9, {"critical": 1}, "random", "the pool runs 9 of at most 10 jobs and keeps 1 for class 'critical'"),
        (9, {"critical": 2}, "critical", None),
        (9, {"critical": 2}, "random", None),
        # That nothing is left at all is what the gate of concurrency says.
        (10, {"critical": 2}, "random", None),
        (10, {"critical": 0}, "critical", None),
    ],
)
def test_jobs_of_others_start_while_there_is_room_beside_what_is_kept(
    used: float, of_classes: dict[str, float], job_class: str | None, said: str | None
) -> None:
    state = admission_state(reserves={"critical": 2})
    state.counters = {"pool:jobs": Amount(used, 10.0)}
    state.counters |= {f"class:{name}:jobs": Amount(each) for name, each in of_classes.items()}
    wanted = queue() if job_class is None else queue(job_class=job_class)
    assert ClassReserveGate().closed_for_queue(wanted, state) == said
    state.counters["pool:jobs"].most = None
    assert ClassReserveGate().closed_for_queue(wanted, state) is None, "of no limit nothing can be kept"


def test_what_is_kept_for_a_class_is_there_when_its_jobs_come(pool: Pool) -> None:
    limited(pool, 4, critical=2)
    submitted(pool, "random", 6)
    bot = pool.bot(capacity=20)
    pool.assigner().run_once()
    assert running(pool) == {"random": 2}
    (waiting, *_) = [row.public_id for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'queued'")]
    verdict = gates_of(explained(pool, str(waiting)))["class reserve"]
    said = "the pool runs 2 of at most 4 jobs and keeps 2 for class 'critical'"
    assert (verdict.open, verdict.sentence) == (False, said)
    urgent = submitted(pool, "critical", 3)
    pool.assigner().run_once()
    assert running(pool) == {"random": 2, "critical": 2}
    assert [pool.job(job).state for job in urgent] == ["leased", "leased", "queued"]
    held = ends(pool, bot, [], "random")
    pool.assigner().run_once()
    assert running(pool) == {"random": 1, "critical": 3}, "beyond its reserve a class competes like any other"
    ends(pool, bot, held, "critical", "critical", "critical")
    pool.assigner().run_once()
    assert running(pool) == {"random": 2}, "and what it does not use is kept again"


def ends(pool: Pool, bot: Bot, held: list[dict[str, Any]], *classes: str) -> list[dict[str, Any]]:
    """One job of each of these classes ends. held: the leases that the bot reported last. Returns those left."""
    held = bot.sync(*map(active, held))["leases"]
    rows = pool.rows("""
        SELECT j.public_id, g.terms->>'job_class' AS name FROM jobs j JOIN queues q ON q.id = j.queue
        JOIN constraint_sets g ON g.id = q.constraint_set""")
    class_of = {str(row.public_id): row.name for row in rows}
    ended = []
    for name in classes:
        ended.append(next(each for each in held if class_of[each["job"]] == name and each not in ended))
    left: list[dict[str, Any]] = bot.sync(*(completed(each) if each in ended else active(each) for each in held))[
        "leases"
    ]
    return left


def test_one_cycle_serves_several_reserves_and_jobs_without_a_class(pool: Pool) -> None:
    limited(pool, 6, critical=2, serious=1)
    submitted(pool, None, 9, priority=-1000)
    for name in ("critical", "serious"):
        submitted(pool, name, 4)
    pool.bot(capacity=20)
    pool.assigner().run_once()
    pool.assigner().run_once()
    assert running(pool) == {None: 3, "critical": 2, "serious": 1}


def test_reserves_above_a_limit_that_was_lowered_let_nobody_else_start(pool: Pool) -> None:
    limited(pool, 4, critical=2, serious=2)
    limited(pool, 2)
    for name in ("random", "critical", "serious"):
        submitted(pool, name, 2)
    pool.bot(capacity=20)
    pool.assigner().run_once()
    assert running(pool) == {"critical": 2}
    limited(pool, None)
    pool.assigner().run_once()
    assert running(pool) == {"random": 2, "critical": 2, "serious": 2}


def test_a_reserve_needs_a_limit_that_holds_all_of_them_and_ends_with_its_class(pool: Pool) -> None:
    with pytest.raises(BadInput, match=r"^jobs: can be kept only of a limit"):
        kept(pool, "random", 1)
    limited(pool, 5, critical=3)
    with pytest.raises(BadInput, match=r"^jobs: with the other reserves would be 6, and the pool runs at most 5 jobs"):
        kept(pool, "random", 3)
    kept(pool, "critical", 5)
    pool.database.run(lambda c: priority_classes.remove_classes(c, ["critical"], actor="test"))
    assert pool.database.run(class_reserves.reserves) == []


@pytest.mark.parametrize(
    ("of_two", "found"),
    [
        pytest.param(
            "random", {"random": 2}, marks=pytest.mark.conflicts, id="not the last job beside a reserve twice"
        ),
        pytest.param("critical", {"random": 2, "critical": 1}, id="the class itself beside what has just started"),
    ],
)
def test_of_two_assigners_the_second_starts_what_the_first_has_left(
    pool: Pool, race: Race, of_two: str, found: dict[str, int]
) -> None:
    limited(pool, 3, critical=1)
    for instance, name in (("one", "random"), ("two", of_two)):
        pool.bot(f"bot-{instance}", instance=instance, capacity=50)
        submitted(pool, name, 2 if name == "random" else 1, instance=instance)
    race.in_turn(
        lambda first: first.assigner(instances=("one",)).run_once(), pool.assigner(instances=("two",)).run_once
    )
    assert running(pool) == found


def test_operators_who_set_reserves_at_once_stay_within_the_limit(pool: Pool, race: Race) -> None:
    limited(pool, 3)
    with pytest.raises(BadInput, match="would be 4"):
        race.in_turn(lambda first: kept(first, "critical", 2), partial(kept, pool, "random", 2))
