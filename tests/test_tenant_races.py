"""Cohorts and quotas that change while the pool is at work: whoever is second waits, and nobody deadlocks."""

from typing import Any

import pytest

from schema import quotas
from schema.errors import Conflict, NotFound
from tests.pool import Pool, completed
from tests.racing import Race, at_desk_of, cancel, outcome
from tests.tenancy import Tenancy, cohort_of, put_cohort, remove_cohort


def leases(pool: Pool) -> list[tuple[str, str, str]]:
    """The cohorts of each live lease, its job and its bot."""
    rows = pool.rows(
        "SELECT l.cohort AS lease, j.cohort AS job, b.cohort AS bot FROM live l"
        " JOIN jobs j ON j.id = l.job_id JOIN bots b ON b.id = l.bot_id"
    )
    return [tuple(row) for row in rows]


def test_a_cohort_declared_behind_an_assigner_leaves_what_it_has_placed(pool: Pool, race: Race) -> None:
    pool.submit(2, label="gpu")
    pool.bot()
    race.in_turn(lambda first: first.assigner().run_once(), lambda: put_cohort(pool, "gpus", "gpu"))
    assert leases(pool) == [(0, 0, 0)]
    assert (
        pool.row("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort WHERE j.state = 'queued'").name == "gpus"
    )


def test_an_assigner_behind_a_cohort_that_is_declared_places_nothing_across_cohorts(pool: Pool, race: Race) -> None:
    pool.submit(label="gpu")
    pool.bot()
    race.in_turn(lambda first: put_cohort(first, "gpus", "gpu"), lambda: pool.assigner().run_once())
    assert leases(pool) == []
    pool.bot("bot-2", labels=["gpu"])
    pool.assigner().run_once()
    ((lease, job, bot),) = leases(pool)
    assert lease == job == bot != 0


@pytest.mark.parametrize("declares_first", [True, False])
def test_a_cancel_and_a_cohort_that_is_declared_do_not_undo_each_other(
    pool: Pool, race: Race, declares_first: bool
) -> None:
    (job,) = pool.submit(label="gpu")
    pool.submit(label="gpu")

    def declare(at: Pool) -> Any:
        put_cohort(at, "gpus", "gpu")

    def give_up(at: Pool) -> Any:
        cancel(at, job)

    ahead, behind = (declare, give_up) if declares_first else (give_up, declare)
    race.in_turn(ahead, lambda: behind(pool))
    assert pool.job(job).state == "cancelled"
    assert (
        pool.row("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort WHERE j.state = 'queued'").name == "gpus"
    )


@pytest.mark.parametrize("declares_first", [True, False])
def test_a_job_that_a_bot_gives_back_while_a_cohort_is_declared_gets_it(
    pool: Pool, race: Race, declares_first: bool
) -> None:
    pool.submit(label="gpu")
    bot = pool.bot(labels=["gpu"])
    pool.assigner().run_once()
    (work,) = bot.take()
    with race.first() as first:
        if declares_first:
            put_cohort(first, "gpus", "gpu")
            waiting = race.second(lambda: bot.sync(completed(work, "released")), behind=first)
        else:
            at_desk_of(first, bot).sync(completed(work, "released"))
            waiting = race.second(lambda: put_cohort(pool, "gpus", "gpu"), behind=first)
        first.commit()
        outcome(waiting)
    assert (cohort_of(pool, "bots"), cohort_of(pool, "jobs")) == ("gpus", "gpus")
    assert pool.row("SELECT state FROM jobs").state == "queued"


def test_a_quota_set_while_its_cohort_is_removed_finds_no_cohort(pool: Pool, race: Race) -> None:
    put_cohort(pool, "gpus", "gpu")
    with race.first() as first:
        remove_cohort(first, "gpus")
        late = race.second(lambda: Tenancy(pool).quota("team-a", maximum=1, cohort="gpus"), behind=first)
        first.commit()
        with pytest.raises(NotFound, match="no cohort 'gpus'"):
            outcome(late)
    assert pool.rows("SELECT FROM quotas") == []


@pytest.mark.parametrize("known", [True, False])
def test_a_cohort_is_not_removed_behind_a_quota_that_is_being_set(pool: Pool, race: Race, known: bool) -> None:
    put_cohort(pool, "gpus", "gpu")
    if known:
        Tenancy(pool).quota("team-a", maximum=2, cohort="gpus")
    with race.first() as first:
        Tenancy(first).quota("team-a", maximum=1, cohort="gpus")
        late = race.second(lambda: remove_cohort(pool, "gpus"), behind=first)
        first.commit()
        with pytest.raises(Conflict, match="still has quotas"):
            outcome(late)
    assert pool.row("SELECT max_quota FROM quotas").max_quota == 1


def test_two_operators_who_set_one_half_each_of_a_new_quota_both_get_it(pool: Pool, race: Race) -> None:
    def change(at: Pool, *, minimum: int | None = None, maximum: int | None = None) -> None:
        def work(connection: Any) -> None:
            least, most = quotas.limits_of(connection, "default", "team-a")
            least, most = least if minimum is None else minimum, most if maximum is None else maximum
            quotas.set_quota(connection, "default", "team-a", minimum=least, maximum=most, actor="test")

        at.database.run(work)

    pool.submit(instance="team-a")
    race.in_turn(lambda first: change(first, minimum=2), lambda: change(pool, maximum=5))
    assert tuple(pool.row("SELECT min_quota, max_quota FROM quotas")) == (2, 5)
