"""Assigners of one or several processes, of one or both kinds, start jobs in their order, as one assigner would."""

import os
import random
from typing import Any

import pytest

from schema.accounting import rates
from schema.postgres.notify import wake
from schema.requests import JobRequest
from tests.support.assigners import assigner_processes, assigning
from tests.support.patience import eventually
from tests.support.pool import Bot, Pool, completed

ROUNDS_VARIABLE = "LEASEHOLD_TEST_ROUNDS"
ROUNDS, JOBS = 2, 10
#: What makes the jobs constrained: each kind waits in a queue of its own.
KINDS: tuple[dict[str, Any], ...] = (
    {"locks": ["tree"]},
    {"resource_class": "gpu"},
    {"resource_class": "gpu", "model": "large", "owner": "ann"},
    {"owner": "bob", "project": "site"},
    {"preferred_hours": list(range(24))},
)
#: Classes with these points, which no other job may have.
CLASSES = {"serious": 60, "random": 40}
WAITING = "SELECT public_id, rank FROM jobs WHERE state = 'queued' ORDER BY rank"
STARTED = """
SELECT j.public_id FROM job_events e JOIN jobs j ON j.id = e.job_id
WHERE e.move = 'grant' AND e.id > :after ORDER BY e.id"""


def submitted(pool: Pool, chance: random.Random, *, plain: bool) -> list[str]:
    """Ten waiting jobs of distinct points, submitted in any order; returns them in the order of their points.

    plain: without constraints, but with distinct priorities.
    """
    if plain:
        requests: list[dict[str, Any]] = [{"priority": each} for each in chance.sample(range(-50, 50), JOBS)]
    else:
        points = chance.sample(sorted({*range(-50, 150)} - {*CLASSES.values()}), JOBS - len(CLASSES))
        requests = [{"priority": 100 - each, **chance.choice(KINDS)} for each in points]
        requests += [{"job_class": each} for each in CLASSES]
    chance.shuffle(requests)
    for request in requests:
        pool.submit(**JobRequest(command=["true"], **request).normal())
    found = pool.rows(WAITING)
    assert len({row.rank for row in found}) == JOBS
    return [str(row.public_id) for row in found]


def worked_off(bot: Bot, jobs: int) -> None:
    """End this many jobs, one after the other, as soon as each is offered."""
    for _ in range(jobs):
        (work,) = eventually(lambda: bot.sync()["leases"])
        bot.sync(completed(work))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kinds", "processes"),
    [
        pytest.param("all all", 0, id="threads of one kind"),
        pytest.param("all cohort all cohort", 0, id="threads of both kinds"),
        pytest.param("all cohort", 2, id="2 processes of both kinds"),
    ],
)
def test_assigners_start_jobs_one_by_one_in_the_order_of_their_points(
    pool: Pool, database_url: str, chance: random.Random, kinds: str, processes: int
) -> None:
    """All threads are woken at once for each free unit. `LEASEHOLD_TEST_ROUNDS=20` makes more rounds.

    kinds: the threads, of all cohorts or of the only one, as in a configuration with both kinds of assigners.
    """
    pool.database.run(lambda c: rates.set_rates(c, {"gpu": rates.RateTerms(1000, 1000)}, actor="test"))
    bot = pool.bot(capacity=1, sync_service=pool.sync_service(enabled=False))
    cohort = pool.row("SELECT id FROM cohorts").id
    group = [cohort if each == "cohort" else None for each in kinds.split()]
    wrong = dict[int, list[str]]()
    rounds = int(os.environ.get(ROUNDS_VARIABLE) or ROUNDS)
    # Queues do not rest while the bot is drained. One that comes to rest after the drain would be passed over.
    how: dict[str, Any] = {"wakeups": True, "interval": 0.1, "jitter": 0.1, "failure_backoff": 0.0}
    at_work = (
        assigner_processes(database_url, pool.timing, chance, [group] * processes, **how)
        if processes
        else assigning(pool.database, pool.timing, chance, group, **how)
    )
    with at_work:
        for number in range(rounds):
            pool.change("UPDATE bots SET draining = true")
            before = pool.row("SELECT coalesce(max(id), 0) AS id FROM job_events").id
            expected = submitted(pool, chance, plain=number % 2 == 1)
            pool.change("UPDATE bots SET draining = false")
            pool.database.run(lambda connection: wake(connection, "jobs"))
            worked_off(bot, JOBS)
            started = [str(row.public_id) for row in pool.rows(STARTED, after=before)]
            if started != expected:
                wrong[number] = [str(expected.index(each)) for each in started]
    assert not wrong, f"out of order in {len(wrong)} of {rounds} rounds: {wrong}"
