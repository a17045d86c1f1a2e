"""Retention of finished jobs, round by round: without a pause while some are overdue, in batches that end in time."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from leasehold.errors import Conflict
from leasehold.states import JobState
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.maintenance import retention as retention_module
from assigner.maintenance.retention import LOOK_BACK, PAUSE, OldRows, Retention
from assigner.maintenance.upkeep import UpkeepSettings
from schema.diagnostics.checks import Verdict
from schema.diagnostics.doctor import run_checks
from schema.moves import retention as retention_moves
from schema.moves.submit import submit, submit_at_once
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.plans import watching
from tests.support.pool import Pool
from tests.support.race import Race, cancel

FINISHED = """
INSERT INTO jobs (public_id, instance, queue, platform, cohort, units, priority, rank, state, finished_at, result_fence)
SELECT gen_random_uuid(), j.instance, j.queue, j.platform, j.cohort, 1, 0, 0, 'failed',
    now() - make_interval(secs => :age) + i * interval '1 ms', NULL
FROM generate_series(1, :count) i, (SELECT * FROM jobs LIMIT 1) j
"""
#: Seconds.
DAY, WEEK = 86400.0, 7 * 86400.0


@pytest.fixture
def kept(pool: Pool) -> Iterator[Pool]:
    """A pool with one cancelled job, from which others are copied."""
    cancel(pool, *pool.submit())
    yield pool
    pool.change("DELETE FROM jobs WHERE state = 'failed'")


def failed(pool: Pool, jobs: int, *, age: float) -> None:
    pool.change(FINISHED, count=jobs, age=age)


def left(pool: Pool) -> int:
    return int(pool.row("SELECT count(*) AS jobs FROM jobs WHERE state = 'failed'").jobs)


def late() -> float | None:
    return REGISTRY.get_sample_value("leasehold_retention_late_seconds", {"duty": "old failed jobs"})


def test_there_is_no_pause_while_finished_jobs_are_overdue(kept: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "MOST", 10)
    monkeypatch.setattr(retention_module, "BATCHES", 2)
    failed(kept, 50, age=WEEK + 3600)
    failed(kept, 5, age=3600)
    retention, pauses = kept.retention(), []
    for _ in range(4):
        pauses.append(retention.run_once())
        if len(pauses) == 1:
            assert left(kept) == 35
            assert late() == pytest.approx(3600, abs=300)
    assert pauses == [0.0, 0.0, PAUSE, PAUSE]
    assert (left(kept), late()) == (5, 0.0)


def test_what_was_deleted_before_costs_the_next_batch_nothing_also_beside_an_old_snapshot(kept: Pool) -> None:
    failed(kept, 2000, age=WEEK + 3600)
    kept.change("ANALYZE jobs")
    with kept.database.connect() as reader:
        reader.execute(Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        reader.execute(Statement("SELECT count(*) FROM jobs"))
        kept.retention().run_once()
        assert left(kept) == 0, "the rows of all of them stay for the snapshot"
        failed(kept, 10, age=WEEK + 60)
        last = kept.row("SELECT max(finished_at) - interval '1 minute' AS at FROM jobs WHERE state = 'failed'").at
        with kept.database.connect() as connection:
            with watching(connection) as watch:
                deleted = retention_moves.delete_finished(connection, JobState.FAILED, age=WEEK, limit=500, since=last)
            connection.rollback()
        assert deleted.rows == 10
        assert watch.touched <= 500, str(watch)
        kept.retention().run_once()


def test_a_job_whose_end_was_committed_late_leaves_a_minute_later(kept: Pool) -> None:
    moment = 0.0
    delete = partial(retention_moves.delete_finished, state=JobState.FAILED, age=WEEK)
    old = OldRows(kept.database, "old failed jobs", delete, now=lambda: moment)
    failed(kept, 5, age=WEEK + 60)
    assert old.run_once() is False
    failed(kept, 3, age=WEEK + 3600)
    old.run_once()
    assert left(kept) == 3
    moment = LOOK_BACK
    old.run_once()
    assert left(kept) == 0


def test_batches_that_take_too_long_become_smaller_until_they_end(kept: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    failed(kept, 700, age=WEEK + 3600)
    delete, tried = retention_moves.delete_finished, []

    def cut_off(connection: Connection, state: JobState, *, limit: int, **others: Any) -> Any:
        tried.append(limit)
        if limit > 500:
            connection.execute(Statement("SET LOCAL statement_timeout = '10ms'"))
            connection.execute(Statement("SELECT pg_sleep(10)"))
        return delete(connection, state, limit=limit, **others)

    monkeypatch.setattr(retention_module, "delete_finished", cut_off)
    moment = 0.0
    retention = Retention(kept.database, UpkeepSettings(), now=lambda: moment)
    while left(kept):
        retention.run_once()
        moment += 100.0
        assert moment < 10_000
    assert {2000, 1000, 500} <= set(tried)


def test_the_doctor_says_when_finished_jobs_are_kept_for_too_long(kept: Pool) -> None:
    def found() -> Any:
        (check,) = (each for each in run_checks(kept.database) if each.name == "retention")
        return check

    failed(kept, 1, age=WEEK + 2 * 3600)
    assert found().verdict is Verdict.OK, "no process says how long they are kept"
    kept.change("""INSERT INTO assigners (name, settings) VALUES ('a', '{"upkeep": {"keep_failed": 604800.0}}')""")
    check = found()
    assert (check.verdict, check.figures) == (Verdict.WARNING, {"late_seconds_failed": pytest.approx(7200, abs=300)})
    assert "failed jobs for 2 h" in check.found
    kept.retention().run_once()
    assert found().verdict is Verdict.OK


def make_older(pool: Pool, key: str, *, seconds: float) -> None:
    older = "UPDATE submit_keys SET created_at = now() - make_interval(secs => :age) WHERE key = :key"
    pool.change(older, age=seconds, key=key)


@pytest.mark.parametrize("many", [False, True], ids=["alone", "in bulk"])
def test_a_repeat_after_its_job_is_gone_answers_its_id_and_makes_no_second_job(pool: Pool, many: bool) -> None:
    keys = ["order-1", "order-2"] if many else ["order-1"]
    requests = [JobRequest(command=["true"], key=key).normal() for key in keys]

    def submitted() -> list[tuple[str, bool]]:
        found = pool.database.run_alone(lambda driver: submit_at_once(driver, requests, actor="test"))
        return [(each.public_id, each.created) for each in found]

    first = submitted()
    assert [created for _, created in first] == [True] * len(keys)
    cancel(pool, *(job for job, _ in first))
    pool.retention(keep_cancelled=0).run_once()
    assert pool.rows("SELECT FROM jobs") == []
    again = [(job, False) for job, _ in first]
    assert submitted() == again
    repeated = pool.database.run(lambda c: submit(c, requests, actor="test"))
    assert [(each.public_id, each.created) for each in repeated] == again
    with pytest.raises(Conflict, match="used before for a different request"):
        pool.submit(key="order-1", priority=5)
    for key in keys:
        make_older(pool, key, seconds=WEEK + 1)
    pool.retention().run_once()
    assert not {job for job, _ in submitted()} & {job for job, _ in first}


def test_a_repeat_of_a_submission_that_has_joined_a_job_answers_its_own_id_also_when_the_job_is_gone(
    pool: Pool,
) -> None:
    (leader,), (joined,) = pool.submit(key="a", dedup_key="same"), pool.submit(key="b", dedup_key="same")
    cancel(pool, joined)
    cancel(pool, leader)
    pool.retention(keep_cancelled=0).run_once()
    assert pool.rows("SELECT FROM jobs") == []
    assert pool.submit(key="a", dedup_key="same") == [leader]
    assert pool.submit(key="b", dedup_key="same") == [joined]


def test_keys_that_clients_made_are_kept_for_an_hour_and_others_for_a_week_however_long_the_job_is_kept(
    pool: Pool,
) -> None:
    ages = {"auto:1": 3000, "auto:2": 4000, "order": 4000, "old": WEEK + 1}
    for key, age in ages.items():
        pool.submit(key=key)
        make_older(pool, key, seconds=age)
    pool.retention().run_once()
    assert {row.key for row in pool.rows("SELECT key FROM submit_keys")} == {"auto:1", "order"}
    assert len(pool.rows("SELECT FROM jobs")) == 4


def test_jobs_leave_also_when_the_journal_lacks_their_day(pool: Pool) -> None:
    """The journal has become longer by a reload, or another host keeps a shorter one."""
    days = "SELECT FROM pg_inherits WHERE inhparent = 'journal'::regclass"
    duties = pool.retention(keep_journal=90 * DAY, keep_cancelled=0).duties
    (delete,) = (each.run for each in duties if each.name == "old cancelled jobs")
    for age in (40, 3, 0):
        shorter = pool.retention(keep_journal=0).duties[0]
        while shorter.run():
            pass
        assert pool.rows(days) == []
        cancel(pool, *pool.submit())
        old = f"queued_at = now() - interval '{age + 1} d', finished_at = now() - interval '{age} d'"
        pool.change(f"UPDATE jobs SET {old} WHERE finished_at > now() - interval '1 min'")
        delete()
        assert pool.rows("SELECT FROM jobs") == []
        assert len(pool.rows("SELECT FROM journal")) == 1


def test_a_job_that_cannot_be_deleted_keeps_no_other_one_and_is_told(pool: Pool) -> None:
    """A row of a caller's table refers to one, and the journal cannot take what another one has asked for."""
    first, unusable, *others = *pool.submit(), *pool.submit(properties={"os": ["plan9"]}), *pool.submit(3)
    for job in (first, unusable, *others):
        cancel(pool, job)
    pool.change("CREATE TABLE theirs (job bigint REFERENCES jobs)")
    pool.change("INSERT INTO theirs SELECT min(id) FROM jobs")
    pool.change("""UPDATE platforms SET properties = '"linux"' WHERE properties <> '{}'""")
    (delete,) = (each for each in pool.retention(keep_cancelled=0).duties if each.name == "old cancelled jobs")
    with capture_logs() as logs:
        delete.run()
    assert {row.public_id for row in pool.rows("SELECT public_id FROM jobs")} == {first, unusable}
    delete.run()
    late = REGISTRY.get_sample_value("leasehold_retention_late_seconds", {"duty": delete.name})
    assert late is not None
    assert late > 0, "also after a run that has passed over them"
    told = [(line["job"], line["error"]) for line in logs]
    assert told == [(first, "ForeignKeyViolation"), (unusable, "InvalidParameterValue")]


@pytest.mark.conflicts
def test_a_job_of_which_somebody_holds_a_row_keeps_no_other_one(pool: Pool, race: Race) -> None:
    held, *others = pool.submit(3)
    cancel(pool, held, *others)
    settings = DatabaseSettings(lock_timeout=0.05)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        retention = Pool(database, pool.timing, pool.chance).retention(keep_cancelled=0)
        with race.first() as stranger, capture_logs() as logs:
            stranger.connection.execute_sql("SELECT FROM job_payloads ORDER BY job_id LIMIT 1 FOR UPDATE")
            retention.run_once()
        assert [row.public_id for row in pool.rows("SELECT public_id FROM jobs")] == [held]
        assert [(line["job"], line["error"]) for line in logs] == [(held, "LockNotAvailable")]
    race.forget_errors()
    pool.retention(keep_cancelled=0).run_once()
    assert pool.rows("SELECT FROM jobs") == []
