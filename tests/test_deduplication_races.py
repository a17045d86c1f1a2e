"""A shared job and two at once: one who joins it, ends it or leaves it, while another one does."""

from typing import Any

import pytest

from schema.moves import Cancelled
from tests.pool import Pool, completed
from tests.racing import Race, at_desk_of, call, cancel, outcome, running

DEDUP: dict[str, Any] = {"dedup_key": "nightly"}
STATES = "SELECT state FROM jobs ORDER BY id"


def states(pool: Pool) -> list[str]:
    return [row.state for row in pool.rows(STATES)]


def followers(pool: Pool) -> list[str]:
    return [str(row.public_id) for row in pool.rows("SELECT public_id FROM job_followers")]


@pytest.mark.parametrize("commit", [True, False])
def test_a_duplicate_waits_for_the_finish_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    _, bot, work = running(pool, **DEDUP)
    mine = race.in_turn(
        lambda first: at_desk_of(first, bot).sync(completed(work)), lambda: pool.submit(**DEDUP), commit=commit
    )
    assert states(pool) == (["succeeded", "queued"] if commit else ["running"])
    assert followers(pool) == ([] if commit else mine)


@pytest.mark.parametrize("commit", [True, False])
def test_a_finish_waits_for_the_duplicate_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    _, bot, work = running(pool, **DEDUP)
    message = bot.message(completed(work))
    with race.first() as first:
        mine = first.submit(**DEDUP)
        late = race.second(lambda: call(bot, message), behind=first)
        first.decide(commit)
        outcome(late)

    assert states(pool) == ["succeeded"]
    assert followers(pool) == (mine if commit else [])


@pytest.mark.parametrize("commit", [True, False])
def test_a_duplicate_waits_for_the_cancel_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit(**DEDUP)
    mine = race.in_turn(lambda first: cancel(first, job), lambda: pool.submit(**DEDUP), commit=commit)
    assert states(pool) == (["cancelled", "queued"] if commit else ["queued"])
    assert followers(pool) == ([] if commit else mine)


@pytest.mark.parametrize("commit", [True, False])
def test_a_cancel_waits_for_the_duplicate_that_was_ahead_of_it(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit(**DEDUP)
    assert race.in_turn(lambda first: first.submit(**DEDUP), lambda: cancel(pool, job), commit=commit) == [
        Cancelled(job, "cancelled", changed=True)
    ]
    assert states(pool) == ["queued" if commit else "cancelled"]
    assert pool.history(job)[-1] == ("withdraw" if commit else "cancel")


@pytest.mark.parametrize("commit", [True, False])
def test_of_two_duplicates_at_once_one_makes_the_job_and_the_other_joins_it(
    pool: Pool, race: Race, commit: bool
) -> None:
    with race.first() as first:
        mine = first.submit(**DEDUP)
        late = race.second(lambda: pool.submit(**DEDUP), behind=first)
        first.decide(commit)
        theirs = outcome(late)

    assert [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs")] == (mine if commit else theirs)
    assert followers(pool) == (theirs if commit else [])


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("state", ["queued", "running"])
def test_of_two_who_leave_at_once_the_last_one_ends_the_job(pool: Pool, race: Race, state: str, commit: bool) -> None:
    job = pool.submit(**DEDUP)[0] if state == "queued" else running(pool, **DEDUP)[0]
    (joined,) = pool.submit(**DEDUP)
    with race.first() as first:
        assert cancel(first, job) == [Cancelled(job, "cancelled", changed=True)]
        late = race.second(lambda: cancel(pool, joined), behind=first)
        first.decide(commit)
        (found,) = outcome(late)

    end = "cancelled" if state == "queued" or not commit else "cancelling"
    assert found == Cancelled(joined, end, changed=True)
    assert states(pool) == [end if commit else state]
    assert pool.history(job).count("withdraw") == 1


def test_an_assigner_passes_over_a_job_that_is_just_being_joined(pool: Pool, race: Race) -> None:
    (job,) = pool.submit(**DEDUP)
    pool.bot()
    race.side_by_side(lambda first: first.submit(priority=-5, **DEDUP), pool.assigner().run_once)
    assert states(pool) == ["queued"]
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"


def test_two_batches_that_join_the_same_jobs_in_another_order_do_not_block_each_other(pool: Pool, race: Race) -> None:
    pool.submit(dedup_key="a")
    with race.first() as first:
        first.submit(dedup_key="b")
        late = race.second(lambda: [*pool.submit(dedup_key="b"), *pool.submit(dedup_key="a")], behind=first)
        first.submit(dedup_key="a")
        first.commit()
        assert len(outcome(late)) == 2
    assert states(pool) == ["queued", "queued"]
