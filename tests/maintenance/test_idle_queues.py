"""Queues that no job has, and the sets that only they name, are deleted by upkeep; nobody loses a job by it."""

import psycopg
import pytest

from assigner.maintenance.unnamed_rows import idle_queues
from schema.moves import retention
from schema.moves.submit import submit_at_once
from tests.support.patience import eventually
from tests.support.pool import Pool
from tests.support.race import Race, cancel, outcome
from tests.support.race import retention as delete_finished


def no_job_left(pool: Pool) -> None:
    """The only queue has none."""
    cancel(pool, *pool.submit())
    assert delete_finished(pool) == 1


def deleted(pool: Pool) -> int:
    """One round, which hardly waits for others."""
    round_ = idle_queues(pool.database, patience=0.05)
    assert not round_.run_once()
    return round_.deleted


def all_deleted(pool: Pool) -> None:
    """As many rounds as it takes."""
    eventually(lambda: deleted(pool) > 0)


def sets(pool: Pool, *, age: float = 0.0) -> tuple[int, int]:
    """Delete constraint sets and requirement sets of that age; how many went."""
    return (
        pool.database.run(lambda c: retention.delete_unused_constraint_sets(c, age=age, limit=9)),
        pool.database.run(lambda c: retention.delete_unused_platforms(c, age=age, limit=9)),
    )


def queues(pool: Pool) -> int:
    return len(pool.rows("SELECT FROM queues"))


def test_a_queue_goes_when_its_last_job_is_gone_and_with_it_the_sets_that_only_it_names(pool: Pool) -> None:
    (old,) = pool.submit(properties={"os": "plan9"}, terms={"job_class": "random"})
    (kept,) = pool.submit(properties={"os": "linux"})
    pool.bot(capacity=2, properties={"os": ["linux", "plan9"]})
    cancel(pool, old)
    for _ in range(4):
        assert deleted(pool) == 0, "a job that is over has its queue until it is deleted"
    assert sets(pool) == (0, 0)
    assert delete_finished(pool) == 1
    all_deleted(pool)
    assert (queues(pool), pool.queue_of(kept).idle_since) == (1, None)
    assert sets(pool, age=3600) == (0, 0)
    assert sets(pool) == (1, 1)
    assert len(pool.rows("SELECT FROM kind_platforms")) == 1
    (new,) = pool.submit(properties={"os": "plan9"}, terms={"job_class": "random"})
    pool.assigner().run_once()
    assert pool.job(new).state == "leased"


def test_a_queue_whose_jobs_all_run_stays(pool: Pool) -> None:
    job, _, _ = pool.running()
    for _ in range(4):
        assert deleted(pool) == 0
    assert pool.queue_of(job).idle_since is not None


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_submit_takes_the_mark_of_an_idle_queue_away(pool: Pool, rounds: int, jobs: int) -> None:
    cancel(pool, *pool.submit())
    for _ in range(rounds):
        deleted(pool)
    requests = [{"instance": "default", "properties": {}, "payload": {"command": ["true"]}}] * jobs
    made = pool.database.run_alone(lambda driver: submit_at_once(driver, requests, actor="test"))
    assert [pool.queue_of(job.public_id).idle_since for job in made] == [None] * jobs


def test_a_queue_that_an_open_transaction_has_looked_up_stays_until_that_has_ended(pool: Pool, race: Race) -> None:
    no_job_left(pool)
    with race.first() as first:
        (job,) = first.submit()
        for _ in range(4):
            assert race.unhindered(lambda: deleted(pool), by=first) == 0
        first.commit()
    assert pool.job(job).queue == pool.queue_of(job).id
    assert deleted(pool) == 0


def test_a_submit_that_looked_its_queue_up_before_an_uncommitted_mark_keeps_it(pool: Pool, race: Race) -> None:
    no_job_left(pool)
    with race.first() as first:
        with pool.database.begin() as marking:
            retention.mark_idle_queues(marking)
            (job,) = first.submit()
        for _ in range(4):
            assert deleted(pool) == 0
        first.commit()
    assert pool.job(job).queue == pool.queue_of(job).id


def test_a_queue_stays_while_a_transaction_goes_on_that_may_have_found_it_without_its_mark(
    pool: Pool, race: Race
) -> None:
    """As a submit between its snapshot and its first row: it has no number yet, and holds no row."""
    no_job_left(pool)
    with race.first() as first:
        first.connection.execute_sql("SELECT id FROM queues")
        for _ in range(4):
            assert race.unhindered(lambda: deleted(pool), by=first) == 0
        first.commit()
    all_deleted(pool)


def test_a_queue_stays_while_a_submit_that_has_looked_it_up_waits_for_its_key(pool: Pool, race: Race) -> None:
    (old,) = pool.submit()
    queue = pool.queue_of(old).id
    cancel(pool, old)
    delete_finished(pool)
    with race.first() as first:
        first.submit(key="k", properties={"os": "linux"})
        late = race.second(lambda: pool.submit(key="k"), behind=first)
        for _ in range(4):
            assert deleted(pool) == 0
        first.roll_back()
        (new,) = outcome(late)
    assert pool.queue_of(new).id == queue


def test_the_look_up_of_a_queue_is_planned_as_a_part_of_the_statement_that_asks(pool: Pool) -> None:
    """Then the statement locks the table of queues before it takes its snapshot, and upkeep waits for it."""
    plan = "\n".join(
        row[0] for row in pool.rows("EXPLAIN SELECT * FROM known_queue(CAST(:request AS jsonb))", request="{}")
    )
    assert "on queues" in plan
    assert "Function Scan" not in plan


def test_submits_to_a_marked_queue_do_not_wait_for_each_other(pool: Pool, race: Race) -> None:
    cancel(pool, *pool.submit())
    deleted(pool)
    with race.first() as first:
        (one,) = first.submit()
        (two,) = race.unhindered(pool.submit, by=first)
        first.commit()
    assert pool.queue_of(one).id == pool.queue_of(two).id
    assert pool.queue_of(one).idle_since is None


def test_a_submit_that_meets_the_deletion_of_its_queue_waits_and_makes_it_anew(pool: Pool, race: Race) -> None:
    no_job_left(pool)
    assert deleted(pool) == 0
    with race.first() as first:
        eventually(lambda: deleted(first) == 1)
        late = race.second(pool.submit, behind=first)
        first.commit()
        (job,) = outcome(late)
    assert pool.queue_of(job).idle_since is None


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_submit_whose_snapshot_is_older_than_the_mark_has_its_queue_or_fails(pool: Pool, rounds: int) -> None:
    """Its transaction has not read the table of queues before, so that upkeep cannot wait for it."""
    no_job_left(pool)
    with pool.database.connect() as connection:
        connection.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute_sql("SELECT FROM bots")
        gone = sum(deleted(pool) for _ in range(rounds))
        submitting = 'SELECT * FROM submit(\'[{"command": ["true"]}]\')'
        if gone:
            with pytest.raises(psycopg.OperationalError, match="could not serialize access"):
                connection.execute_sql(submitting)
        else:
            connection.execute_sql(submitting)
            assert deleted(pool) == 0
            connection.commit()
    assert gone == rounds - 1
    assert queues(pool) == 1 - gone


def test_a_queue_whose_mark_was_taken_away_and_made_again_meanwhile_stays(pool: Pool, race: Race) -> None:
    """As by upkeep of two processes: the second one marks it again while the first one waits for readers."""
    pool.submit(properties={"os": "linux"}, dedup_key="d")
    no_job_left(pool)
    deleted(pool)
    unused = pool.database.run(retention.idle_queues)
    pool.submit(dedup_key="d")  # joins the other job, so that the queue gets none
    with race.first() as first:
        (job,) = first.submit()
        pool.database.run(retention.mark_idle_queues)
        assert pool.database.run(lambda c: retention.delete_queues(c, unused)) == 0
        first.commit()
    assert pool.job(job).queue == pool.queue_of(job).id
