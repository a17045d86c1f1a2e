"""What upkeep forgets besides old jobs, and what it must not."""

from bots.protocol import OpenSession
from bots.sync import sessions
from schema import audit
from schema.moves import retention
from schema.moves import sessions as sessions_moves
from schema.moves.sessions import drain
from tests.support.pool import Pool, completed
from tests.support.race import Race, outcome
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
    pool.upkeep().run_once()
    assert [row.name for row in pool.rows(KEPT)] == ["drained", "present", "recent"]
    for table in ("bot_localities", "bot_changes"):
        assert pool.rows(f"SELECT FROM {table} t WHERE NOT EXISTS (SELECT FROM bots b WHERE b.id = t.bot_id)") == []
    assert pool.rows("SELECT FROM jobs WHERE public_id = CAST(:id AS uuid)", id=job) == []


def test_a_bot_that_comes_back_while_it_is_forgotten_gets_a_session(pool: Pool, race: Race) -> None:
    leave(pool, "bot-1", days=31)
    with race.first() as ahead:
        assert retention.delete_gone_bots(ahead.connection, age=30 * DAY, limit=10) == 1
        opened = race.second(
            lambda: sessions.open_session(pool.database, OpenSession(bot="bot-1"), timing=pool.timing), behind=ahead
        )
        ahead.commit()
        assert outcome(opened).bot == "bot-1"
    assert pool.row("SELECT status FROM bots").status == "ok"


def test_old_evictions_and_old_notes_of_the_audit_are_deleted_but_no_eviction_of_the_last_day(pool: Pool) -> None:
    tenancy = Tenancy(pool)
    tenancy.quota("default", maximum=9)
    pool.change("DELETE FROM audit")
    for age in (40 * DAY, 2 * DAY, 0.5 * DAY):
        tenancy.evicted("default", age=age)
    pool.database.run(lambda c: audit.write(c, "bot.look", actor="old", subject="x"))
    pool.change("UPDATE audit SET at = now() - interval '366 days'")
    pool.database.run(lambda c: audit.write(c, "bot.look", actor="new", subject="x"))

    pool.upkeep().run_once()
    assert (tenancy.evictions(), [row.actor for row in pool.rows("SELECT actor FROM audit")]) == (2, ["new"])
    pool.upkeep(keep_dead=0).run_once()
    assert tenancy.evictions() == 1


def test_assigner_processes_that_were_not_seen_for_a_day_are_forgotten(pool: Pool) -> None:
    pool.change("INSERT INTO assigners (name, seen_at) VALUES ('old', now() - interval '25 h'), ('new', now())")
    pool.upkeep().run_once()
    assert [row.name for row in pool.rows("SELECT name FROM assigners")] == ["new"]


def test_submissions_that_shared_a_job_are_deleted_with_it(pool: Pool) -> None:
    first = pool.submit(dedup_key="same")
    second = pool.submit(dedup_key="same")
    assert first != second
    bot = pool.bot()
    (work,) = pool.given(bot)
    bot.sync(completed(work))
    pool.upkeep().run_once()
    assert len(pool.rows("SELECT FROM job_followers")) == 1
    pool.change("UPDATE jobs SET finished_at = now() - interval '10 days'")
    pool.upkeep().run_once()
    assert (pool.rows("SELECT FROM job_followers"), pool.rows("SELECT FROM jobs")) == ([], [])


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
