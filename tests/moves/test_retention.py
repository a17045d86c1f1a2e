"""What upkeep forgets besides old jobs, and what it must not."""

from collections.abc import Callable
from functools import partial

import pytest
from leasehold.states import JobState

from assigner.maintenance.retention import PAUSE
from assigner.maintenance.unnamed_rows import UnnamedRows, gone_bots, idle_queues
from bots.protocol import OpenSession
from schema import audit
from schema.moves import retention
from schema.moves import sessions as sessions_moves
from schema.moves.graphs import BEGINNING, delete_graph
from schema.moves.sessions import drain
from schema.postgres.connection import Connection
from tests.support.plans import Watch, watching
from tests.support.pool import Pool, completed, open_session, submitted
from tests.support.race import Race, cancel, outcome
from tests.support.race import retention as delete_finished
from tests.support.tenancy import Tenancy

DAY = 86400.0
KEPT = "SELECT name FROM bots ORDER BY name"


def leave(pool: Pool, name: str, *, days: float) -> None:
    """A bot that has opened its last session so many days ago and has left."""
    pool.bot(name).sync(status="gone")
    pool.change(
        "UPDATE bots SET opened_at = now() - make_interval(secs => :age) WHERE name = :name", age=days * DAY, name=name
    )


def test_bots_that_have_gone_for_long_are_forgotten_with_what_they_left(pool: Pool) -> None:
    job, bot, work = pool.running(locality_hint="cache")
    bot.sync(completed(work))
    bot.sync(status="gone")
    pool.change("UPDATE bots SET opened_at = now() - interval '31 days'")
    leave(pool, "old", days=31)
    leave(pool, "recent", days=29)
    leave(pool, "drained", days=31)
    pool.bot("present")
    pool.change("UPDATE bots SET opened_at = now() - interval '31 days' WHERE name = 'present'")
    pool.database.run(lambda c: drain(c, "drained", draining=True, actor="test", reason=""))
    pool.upkeep().run_once()
    assert [row.name for row in pool.rows(KEPT)] == ["bot-1", "drained", "present", "recent"]
    pool.change("UPDATE jobs SET finished_at = now() - interval '10 days'")
    pool.retention().run_once()
    pool.upkeep().run_once()
    assert [row.name for row in pool.rows(KEPT)] == ["drained", "present", "recent"]
    for table in ("bot_localities", "bot_changes"):
        assert pool.rows(f"SELECT FROM {table} t WHERE NOT EXISTS (SELECT FROM bots b WHERE b.id = t.bot_id)") == []
    assert pool.rows("SELECT FROM jobs WHERE public_id = CAST(:id AS uuid)", id=job) == []


def test_a_bot_that_comes_back_while_it_is_forgotten_gets_a_session(pool: Pool, race: Race) -> None:
    leave(pool, "bot-1", days=31)
    with race.first() as ahead:
        gone = retention.gone_bots(ahead.connection, age=30 * DAY)
        assert retention.delete_gone_bots(ahead.connection, gone, age=30 * DAY) == 1
        opened = race.second(
            lambda: open_session(pool.database, OpenSession(bot="bot-1"), timing=pool.timing), behind=ahead
        )
        ahead.commit()
        assert outcome(opened).bot == "bot-1"
    assert pool.row("SELECT status FROM bots").status == "ok"


def test_old_evictions_notes_of_the_audit_and_assigners_are_deleted_but_no_eviction_of_the_last_day(pool: Pool) -> None:
    tenancy = Tenancy(pool)
    tenancy.quota("default", maximum=9)
    pool.change("DELETE FROM audit")
    for age in (40 * DAY, 2 * DAY, 0.5 * DAY):
        tenancy.evicted("default", age=age)
    pool.database.run(lambda c: audit.write(c, "bot.look", actor="old", subject="x"))
    pool.change("UPDATE audit SET at = now() - interval '366 days'")
    pool.database.run(lambda c: audit.write(c, "bot.look", actor="new", subject="x"))
    pool.change("INSERT INTO assigners (name, seen_at) VALUES ('old', now() - interval '25 h'), ('new', now())")
    pool.upkeep().run_once()
    assert (tenancy.evictions(), [row.actor for row in pool.rows("SELECT actor FROM audit")]) == (2, ["new"])
    assert [row.name for row in pool.rows("SELECT name FROM assigners")] == ["new"]
    pool.upkeep(keep_dead=0).run_once()
    assert tenancy.evictions() == 1


def test_submissions_that_shared_a_job_are_deleted_with_it(pool: Pool) -> None:
    first = pool.submit(dedup_key="same")
    second = pool.submit(dedup_key="same", metadata={"build": "7"})
    assert first != second
    bot = pool.bot()
    (work,) = pool.given(bot)
    bot.sync(completed(work))
    pool.upkeep().run_once()
    assert len(pool.rows("SELECT FROM job_followers")) == 1
    pool.change("UPDATE jobs SET finished_at = now() - interval '10 days'")
    pool.retention().run_once()
    pool.upkeep().run_once()
    assert [pool.rows(f"SELECT FROM {each}") for each in ("job_followers", "submission_metadata", "jobs")] == [[]] * 3


def test_a_lost_attempt_can_be_forgiven_for_a_day(pool: Pool) -> None:
    jobs = pool.submit(3)
    bot = pool.bot(capacity=3)
    assert len(pool.given(bot)) == 3
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    pool.database.run(lambda connection: sessions_moves.expire(connection, after=0, limit=10, actor="reaper"))
    pool.change(
        "UPDATE lost_attempts SET at = now() - interval '25 hours' WHERE job_id <> :id", id=pool.job(jobs[0]).id
    )
    pool.change("UPDATE lost_attempts SET at = now() - interval '23 hours' WHERE job_id = :id", id=pool.job(jobs[0]).id)
    assert pool.database.run(lambda c: retention.delete_old_lost_attempts(c, age=DAY, limit=1)) == 1
    pool.upkeep().run_once()
    pool.restarted(bot, cut_off=True)
    assert [pool.job(job).kills for job in jobs] == [0, 1, 1]


#: Rows that are kept, in front of those that are due.
KEPT_IN_FRONT = 3000
FINISHED = """
INSERT INTO jobs (public_id, instance, queue, platform, cohort, units, priority, rank, state, finished_at, result_fence)
SELECT gen_random_uuid(), j.instance, j.queue, j.platform, j.cohort, 1, 0, 0, :state,
    now() - make_interval(secs => :age) + i * interval '1 ms', NULL
FROM generate_series(1, :count) i, (SELECT * FROM jobs LIMIT 1) j
"""


def read_by(pool: Pool, work: Callable[[Connection], int]) -> tuple[int, Watch]:
    """What the work, which is then undone, has deleted and read."""
    with pool.database.connect() as connection:
        with watching(connection) as watch:
            deleted = work(connection)
        connection.rollback()
    return deleted, watch


@pytest.mark.parametrize("analyzed", [False, True])
def test_jobs_that_are_kept_of_one_state_cost_nothing_where_others_are_due(pool: Pool, analyzed: bool) -> None:
    cancel(pool, *pool.submit())
    pool.change(FINISHED, state="failed", age=9000, count=KEPT_IN_FRONT)
    pool.change(FINISHED, state="succeeded", age=5000, count=10)
    if analyzed:
        pool.change("ANALYZE jobs")
    finished = partial(retention.delete_finished, age=3600, limit=500)
    deleted, watch = read_by(pool, lambda c: finished(c, JobState.SUCCEEDED).rows)
    assert deleted == 10
    assert watch.touched <= 500, str(watch)
    pool.change("DELETE FROM jobs WHERE state IN ('failed', 'succeeded')")


def test_blames_of_today_cost_nothing_where_older_ones_are_due(pool: Pool) -> None:
    pool.submit(20)
    pool.change("INSERT INTO blames (job_id, at) SELECT id, now() FROM jobs")
    pool.change("UPDATE blames SET at = now() - interval '2 days' WHERE job_id = (SELECT max(id) FROM jobs)")
    deleted, watch = read_by(pool, lambda c: retention.delete_old_blames(c, age=DAY, limit=500))
    assert deleted == 1
    assert "blames_old" in str(watch)
    assert watch.touched <= 10, str(watch)


def walked(rows: UnnamedRows) -> int:
    """Let it work, a few pages in each round, until nothing is left; returns the number of rounds."""
    rounds = 1
    while rows.run_once():
        rounds += 1
    return rounds


def test_bots_and_queues_that_nothing_names_are_found_by_pages(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has three rows, and a round two pages."""
    monkeypatch.setattr("assigner.maintenance.unnamed_rows.PAGES", 2)
    for name in ("named", "unnamed"):
        bot = pool.bot(name, capacity=20)
        if name == "named":
            pool.submit(20)
            for work in pool.given(bot):
                bot.sync(completed(work))
        bot.sync(status="gone")
    pool.change("UPDATE bots SET opened_at = now() - interval '9 days'")
    bots = gone_bots(pool.database, age=DAY, page=3)
    assert walked(bots) > 2
    assert (bots.deleted, [row.name for row in pool.rows(KEPT)]) == (1, ["named"])
    cancel(pool, *pool.submit(properties={"os": "linux"}))
    pool.change("UPDATE jobs SET finished_at = now() - interval '1 h' WHERE id = (SELECT max(id) FROM jobs)")
    pool.database.run(lambda c: retention.delete_finished(c, JobState.CANCELLED, age=60, limit=500))
    walked(idle_queues(pool.database, page=3))
    queues = idle_queues(pool.database, page=3)
    assert walked(queues) > 2
    assert (queues.deleted, len(pool.rows("SELECT FROM queues"))) == (1, 1)


def test_a_bot_that_came_back_and_left_while_leases_were_read_is_kept(pool: Pool) -> None:
    leave(pool, "bot-1", days=9)
    found = pool.database.run(lambda c: retention.gone_bots(c, age=0.0))
    leave(pool, "bot-1", days=9)
    assert pool.database.run(lambda c: retention.delete_gone_bots(c, found, age=0.0)) == 0


def test_a_queue_that_somebody_has_held_while_jobs_were_read_is_kept(pool: Pool, race: Race) -> None:
    """Two submits look it up. The one that takes the mark away comes to nothing."""
    cancel(pool, *pool.submit())
    delete_finished(pool)
    pool.database.run(retention.mark_idle_queues)
    found = pool.database.run(retention.idle_queues)
    with race.first() as first, race.first() as second:
        first.submit()
        (job,) = second.submit()
        second.commit()
    assert pool.database.run(lambda c: retention.delete_queues(c, found)) == 0
    assert pool.job(job).queue == pool.queue_of(job).id


def test_a_graph_goes_although_many_before_it_keep_their_jobs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five graphs are kept for their jobs. One look reads two graphs, and a round has two looks."""
    for _ in range(6):
        graph = submitted(pool, {1: []})
        cancel(pool, graph.jobs[1])
    pool.upkeep().run_once()
    pool.change("UPDATE graphs SET finished_at = now() - interval '1 h' + id * interval '1 s'")
    pool.change("UPDATE jobs SET finished_at = now() - interval '2 h' WHERE id = (SELECT max(id) FROM jobs)")
    pool.database.run(lambda c: retention.delete_finished(c, JobState.CANCELLED, age=3600, limit=500))
    monkeypatch.setattr("assigner.maintenance.retention.GRAPHS", 2)
    monkeypatch.setattr("assigner.maintenance.retention.BATCHES", 2)
    deletion = pool.retention(keep_succeeded=0, keep_cancelled=3600, retention_interval=1e-9)
    assert deletion.run_once() == PAUSE, "kept graphs call for no hurry"
    assert len(pool.rows("SELECT FROM graphs")) == 6
    deletion.run_once()
    assert len(pool.rows("SELECT FROM graphs")) == 5


def test_graphs_that_are_kept_are_not_looked_at_again_after_a_deletion(pool: Pool) -> None:
    """The first graph is kept for its job, the next two are not."""
    kept, *others = (submitted(pool, {1: []}) for _ in range(3))
    for graph in (kept, *others):
        cancel(pool, graph.jobs[1])
    pool.upkeep().run_once()
    pool.change("UPDATE graphs SET finished_at = now() - interval '1 h' + id * interval '1 s'")
    pool.change("UPDATE jobs SET finished_at = now() - interval '2 h' WHERE id > (SELECT min(id) FROM jobs)")
    pool.database.run(lambda c: retention.delete_finished(c, JobState.CANCELLED, age=3600, limit=500))
    first = pool.database.run(lambda c: delete_graph(c, age=0, limit=2))
    second = pool.database.run(lambda c: delete_graph(c, age=0, after=first.after or BEGINNING, limit=1))
    assert (first.deleted, second.deleted) == (True, True)
    assert [row.id for row in pool.rows("SELECT id FROM graphs")] == [kept.graph_id]
