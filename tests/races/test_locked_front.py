"""Upkeep reads a page at a time. Rows at its front that somebody else holds keep no later ones waiting.

Each case makes some rows due, holds the first of them, and runs the duty with a limit of one.
"""

from collections.abc import Callable
from contextlib import closing
from itertools import count

import pytest
from structlog.testing import capture_logs

from assigner.maintenance.schedules import Schedules
from assigner.maintenance.upkeep import EVER, OVERDUE
from schema.fleet import success
from schema.moves import dependencies, graphs
from schema.moves.preempt import release_kept_units
from schema.moves.waiting import backoff
from schema.moves.waiting.priority import review_waiting
from schema.moves.waiting.timeouts import age_out, stop_drained
from schema.policy import schedule_changes, schedules
from schema.policy.schedule_changes import Author
from schema.policy.schedules import ScheduleTerms
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.explain import keep
from tests.support.pool import Pool, completed, states, submitted
from tests.support.race import Race
from tests.support.tenancy import Tenancy

Work = Callable[[Connection], object]

HOLD_JOB = "SELECT id FROM jobs WHERE public_id = CAST(:first AS uuid) FOR NO KEY UPDATE"
HOLD_BOT = "SELECT id FROM bots WHERE name = :first FOR NO KEY UPDATE"
HOLD_LEASE = "SELECT job_id FROM leases WHERE job_id = :first FOR NO KEY UPDATE"
HOLD_SCHEDULE = "SELECT id FROM schedules WHERE name = :first FOR NO KEY UPDATE"


def beside(pool: Pool, race: Race, hold: str, first: object, work: Work) -> None:
    """Do the work while the first row is held by a transaction that is open."""

    def holding(holder: Pool) -> None:
        holder.database.run(lambda c: c.execute(Statement(hold), {"first": first}).one())

    race.side_by_side(holding, lambda: pool.database.run(work))


def test_a_job_that_starves_behind_a_held_one_is_promoted(pool: Pool, race: Race) -> None:
    request = JobRequest(command=["true"], job_class="background").normal()
    (first,), (second,) = pool.submit(**request), pool.submit(**request)
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '1 h'")
    pool.change("UPDATE job_constraints SET watch_at = now() - interval '1 h' + job_id * interval '1 s'")
    beside(pool, race, HOLD_JOB, first, lambda c: review_waiting(c, 1, actor="test"))
    assert (pool.history(first), pool.history(second)) == (["submit"], ["submit", "promote"])


@pytest.mark.parametrize("label", ["", "night"])
def test_a_job_that_has_waited_too_long_behind_a_held_one_is_given_up(pool: Pool, race: Race, label: str) -> None:
    first, second = pool.submit(2, label=label)
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 h' + id * interval '1 s'")
    pool.change("INSERT INTO ceilings (label, max_queue_age) VALUES (nullif(:label, ''), 60)", label=label)
    beside(pool, race, HOLD_JOB, first, lambda c: age_out(c, 1, actor="test"))
    assert (pool.job(first).state, pool.job(second).state) == ("queued", "dead")


def test_a_node_that_is_due_behind_a_held_one_is_queued(pool: Pool, race: Race) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [1], 4: [2]})
    bot = pool.bot(capacity=2)
    given = pool.given(bot)
    with race.first() as holder:
        for node in (3, 4):
            holder.rows(HOLD_JOB, first=graph.jobs[node])
        bot.sync(*[completed(work) for work in given])
    assert states(pool, graph) == {1: "succeeded", 2: "succeeded", 3: "blocked", 4: "blocked"}
    beside(pool, race, HOLD_JOB, graph.jobs[3], lambda c: dependencies.unblock_due(c, 1))
    assert states(pool, graph) == {1: "succeeded", 2: "succeeded", 3: "blocked", 4: "queued"}


def test_what_is_left_of_a_graph_behind_a_held_job_is_cancelled(pool: Pool, race: Race) -> None:
    graph = submitted(pool, {1: [], 2: []})
    pool.change("UPDATE graphs SET state = 'cancelled'")
    cancelling: Work = lambda c: graphs.cancel_left_over(c, 1, sync=1.0, actor="test")  # noqa: E731
    beside(pool, race, HOLD_JOB, graph.jobs[1], cancelling)
    assert states(pool, graph) == {1: "queued", 2: "cancelled"}


def test_a_lease_that_is_overdue_behind_a_held_one_is_found(pool: Pool, race: Race) -> None:
    pool.submit(2)
    bot = pool.bot(capacity=2)
    pool.given(bot)
    pool.change("UPDATE leases SET due_at = now() - interval '1 h' + job_id * interval '1 s'")
    first, second = (row.job_id for row in pool.rows("SELECT job_id FROM leases ORDER BY due_at"))
    found: list[int] = []
    reading: Work = lambda c: found.extend(row.job_id for row in c.execute(OVERDUE, {"limit": 1, "since": EVER}))  # noqa: E731
    beside(pool, race, HOLD_LEASE, first, reading)
    assert found == [second]


def test_a_lease_of_a_drained_instance_behind_a_held_one_is_stopped(pool: Pool, race: Race) -> None:
    pool.submit(2)
    bot = pool.bot(capacity=2)
    pool.given(bot)
    pool.change("UPDATE instances SET draining = true, drain_deadline = now() - interval '1 s'")
    first, second = (row.job_id for row in pool.rows("SELECT job_id FROM leases ORDER BY ctid"))
    beside(pool, race, HOLD_LEASE, first, lambda c: stop_drained(c, 1, sync=1.0, actor="test"))
    assert [row.job_id for row in pool.rows("SELECT job_id FROM live WHERE state = 'cancelling'")] == [second]


def test_units_that_are_kept_too_long_behind_a_held_bot_are_given_up(pool: Pool, race: Race) -> None:
    for name in ("bot-1", "bot-2"):
        pool.bot(name, capacity=2)
        keep(pool, name, "team-a", seconds=-1)
    beside(pool, race, HOLD_BOT, "bot-1", lambda c: release_kept_units(c, 1))
    assert [row.kept_units for row in pool.rows("SELECT kept_units FROM bots ORDER BY name")] == [1, 0]


def test_a_job_that_stops_preferring_behind_a_held_one_does_so(pool: Pool, race: Race) -> None:
    first, second = pool.submit(2, prefer_seconds=60.0, preferred_properties={"disk": ["ssd"]})
    pool.change("UPDATE preference_waits SET seconds = 0.001, until = now() - interval '1 h' + job_id * interval '1 s'")
    beside(pool, race, HOLD_JOB, first, lambda c: backoff.stop_preferring(c, 1))
    assert [row.job_id for row in pool.rows("SELECT job_id FROM preference_waits")] == [pool.job(first).id]
    assert pool.job(second).state == "queued"


def test_a_charge_behind_one_of_a_held_bot_goes_back(pool: Pool, race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [pool.job(job).id for job in pool.submit(2)]
    for name, job in zip(("bot-1", "bot-2"), jobs, strict=True):
        pool.bot(name)
        pool.change(
            "INSERT INTO blames (job_id, bot_id, returned_at) SELECT :job, id, now() FROM bots WHERE name = :bot",
            job=job,
            bot=name,
        )
    monkeypatch.setattr(success, "REVIEW_LIMIT", 1)
    beside(pool, race, HOLD_BOT, "bot-1", success.review_probation)
    assert [row.job_id for row in pool.rows("SELECT job_id FROM blames WHERE bot_id IS NOT NULL")] == jobs[:1]


def test_a_schedule_that_is_due_behind_a_held_fires(pool: Pool, race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = ScheduleTerms("* * * * *", "UTC", "skip", 10, 86400.0, "allow", True, {"command": ["true"]})
    for name in ("first", "second"):
        pool.database.run(
            lambda c, name=name: schedule_changes.put_schedule(c, "default", name, terms, author=Author("test"))
        )
    pool.change("UPDATE schedules SET next_tick = now() - interval '2 min', due_at = now() - interval '2 min'")
    monkeypatch.setattr("assigner.maintenance.schedules.LIMIT", 1)
    with race.first() as holder:
        holder.rows(HOLD_SCHEDULE, first="first")
        assert race.unhindered(Schedules(pool.database).run_once, by=holder) == 0
        assert race.unhindered(Schedules(pool.database).run_once, by=holder) == 0.5
    assert [row.name for row in pool.rows("SELECT name FROM schedules WHERE last_job IS NOT NULL")] == ["second"]
    assert pool.database.run(lambda c: schedules.due_schedules(c, limit=9)) != []


@pytest.mark.conflicts
def test_a_session_behind_one_that_needs_a_held_row_expires(pool: Pool, race: Race) -> None:
    (held,) = pool.submit(terms={"locks": ["tree"]})
    pool.bot("bot-1")
    pool.bot("bot-2")
    pool.assigner().run_once()
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    pool.change("INSERT INTO ticks (name, at, grace_until) VALUES ('reaper', now(), now() - interval '1 s')")
    settings = DatabaseSettings(lock_timeout=0.05)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        upkeep = Pool(database, pool.timing, pool.chance).upkeep()
        (sessions,) = (duty for duty in upkeep.duties if duty.name == "sessions")
        with race.first() as stranger, capture_logs() as logs:
            stranger.connection.execute_sql("SELECT FROM counters WHERE name LIKE 'lock:%' FOR UPDATE")
            sessions.run()
        assert len(race.errors) <= 4, "for pages of two, for one session, and for its lease: each time once"
        holder, other = pool.rows("SELECT name, held, status FROM bots ORDER BY held DESC")
        assert (holder.status, other.status) == ("ok", "gone")
        assert [(line["log_level"], line["sessions"]) for line in logs] == [("warning", 1)]
    race.forget_errors()
    pool.change("UPDATE ticks SET grace_until = now() - interval '1 s'")
    pool.upkeep().run_once()
    assert pool.job(held).state == "queued"


@pytest.mark.conflicts
def test_many_sessions_that_need_a_held_row_make_no_round_long_and_keep_no_other_session(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    """A look at the clock takes 0.4 s here, and a round goes on where the last one has ended."""
    tenancy.quota("default", maximum=9)
    for n in range(4):
        pool.submit()
        pool.given(pool.bot(f"bot-{n}"))
    pool.bot("last")
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    pool.change("INSERT INTO ticks (name, at, grace_until) VALUES ('reaper', now(), now() - interval '1 s')")
    ticking = count(1.0, 0.4)
    (sessions,) = (duty for duty in pool.upkeep(now=lambda: next(ticking)).duties if duty.name == "sessions")
    open_ones, rounds = "SELECT name FROM bots WHERE status <> 'gone' ORDER BY name", []
    with race.first() as stranger:
        stranger.connection.execute_sql("SELECT FROM quotas FOR UPDATE")
        for _ in range(3):
            sessions.run()
            rounds.append([row.name for row in pool.rows(open_ones)])
    race.forget_errors()
    assert "last" in rounds[0], "the round was over"
    assert rounds[-1] == ["bot-0", "bot-1", "bot-2", "bot-3"]
    sessions.run()
    sessions.run()
    assert pool.rows(open_ones) == []


@pytest.mark.conflicts
def test_duties_that_wait_for_a_locked_table_do_not_keep_sessions_from_expiring(pool: Pool, race: Race) -> None:
    """Each tries once or twice in a round, not five times. The look for late sessions would be so late that all get a
    grace."""
    pool.submit(2)
    settings = DatabaseSettings(lock_timeout=0.02)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        upkeep = Pool(database, pool.timing, pool.chance).upkeep()
        with race.first() as stranger:
            stranger.connection.execute_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            stranger.connection.execute_sql("LOCK TABLE graphs, ceilings, job_constraints IN ACCESS EXCLUSIVE MODE")
            with capture_logs() as logs:
                upkeep.run_once()
        failing = [line["duty"] for line in logs if line["event"] == "a duty of upkeep failed"]
        assert 3 < len(failing) <= len(race.errors) <= 2 * len(failing)
        race.forget_errors()
        with capture_logs() as logs:
            upkeep.run_once()
        assert not [line for line in logs if line["event"] == "a duty of upkeep failed"]


@pytest.mark.conflicts
def test_sessions_expire_while_somebody_holds_the_tick_of_upkeep(pool: Pool, race: Race) -> None:
    """After a grace of one session, which the other tick begins with: nobody knows whether bots could call before."""
    pool.upkeep().run_once()
    pool.bot()
    settings = DatabaseSettings(lock_timeout=0.05)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        upkeep = Pool(database, pool.timing, pool.chance).upkeep()
        (sessions,) = (duty for duty in upkeep.duties if duty.name == "sessions")
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
        with race.first() as stranger:
            stranger.connection.execute_sql("SELECT FROM ticks FOR UPDATE")
            sessions.run()
            assert pool.row("SELECT status FROM bots").status == "ok", "it has just begun"
            pool.change("UPDATE ticks SET grace_until = now() - interval '1 s' WHERE name = 'reaper-2'")
            sessions.run()
            assert pool.row("SELECT status FROM bots").status == "gone"
    race.forget_errors()
