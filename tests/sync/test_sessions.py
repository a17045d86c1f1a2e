"""One name, two sessions: what the older one may still run is granted to nobody before that one is surely dead."""

from datetime import datetime
from typing import Any

import pytest

from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema.errors import Conflict
from schema.moves.backoff import promote
from schema.moves.grant import Placement, grant
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import cancel
from tests.support.tenancy import Tenancy, assign, contested

LIVE = "SELECT FROM leases WHERE state IN ('pending', 'active', 'cancelling')"
PASSED = "UPDATE jobs SET schedule_after = now() - interval '1 ms' WHERE schedule_after IS NOT NULL"


def anew(pool: Pool, *, dead: Session | None = None, **fields: Any) -> Session:
    """Another agent with the name opens a session."""
    told = {} if dead is None else {"dead_session": sessions.digest(dead.secret).hex()}
    request = OpenSession.model_validate({"bot": "bot-1", "capacity": 9, **told, **fields})
    return sessions.open_session(pool.database, request, timing=pool.timing)


def expiry(pool: Pool) -> datetime:
    found: datetime = pool.row("SELECT expires_at FROM bots WHERE name = 'bot-1'").expires_at
    return found


def granted(pool: Pool) -> int:
    """Leases once everybody who hands out work or ends a wait has had a go: promotion, assigners, a bot that comes,
    one that fills itself, and one that finishes something and fetches more."""
    pool.database.run(lambda connection: promote(connection, 100))
    pool.assigner().run_once()
    idle = pool.bot("idle", capacity=9, sync_service=pool.sync_service(to_capacity=True))
    idle.sync()
    fetching = Bot(pool.sync_service(), anew(pool, bot="fetching"))
    pool.submit()
    idle.sync(status="draining")
    pool.assigner().run_once()
    for work in fetching.take():
        fetching.sync(completed(work))
    return len(pool.rows(LIVE))


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_job_that_an_older_session_was_told_of_waits_until_that_session_would_have_expired(
    pool: Pool, acknowledged: bool
) -> None:
    (job,) = pool.submit()
    older = pool.bot(capacity=1)
    pool.assigner().run_once()
    (work,) = older.take() if acknowledged else older.sync()["leases"]
    until = expiry(pool)

    anew(pool, capacity=0)

    row = pool.job(job)
    assert (row.state, row.schedule_after, row.attempts, row.kills) == ("queued", until, 1, 1)
    assert row.reason == "its bot started anew"
    with pytest.raises(Conflict):
        older.sync(completed(work))
    assert granted(pool) == 0
    assert pool.job(job).schedule_after == until

    pool.change(PASSED)
    pool.database.run(lambda connection: promote(connection, 100))
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"


def test_a_job_that_the_older_session_never_heard_of_is_queued_again_at_once(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    pool.assigner().run_once()
    anew(pool)
    row = pool.job(job)
    assert (row.state, row.schedule_after, row.attempts) == ("queued", None, 0)


def test_a_bot_that_knows_that_the_older_session_is_dead_has_its_jobs_queued_again_at_once(pool: Pool) -> None:
    job, older, _ = pool.running()
    anew(pool, dead=older.session)
    assert (pool.job(job).state, pool.job(job).schedule_after) == ("queued", None)
    pool.bot("bot-2")
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"


def test_the_death_of_a_session_says_nothing_of_another_one_of_the_name(pool: Pool) -> None:
    first = anew(pool)
    job, _, _ = pool.running()
    until = expiry(pool)
    anew(pool, dead=first)
    assert pool.job(job).schedule_after == until


def test_an_older_session_that_has_expired_keeps_no_job_waiting(pool: Pool) -> None:
    job, _, _ = pool.running()
    pool.change("UPDATE bots SET expires_at = now() - interval '1 ms'")
    anew(pool)
    assert (pool.job(job).state, pool.job(job).schedule_after) == ("queued", None)


@pytest.mark.parametrize("nonsense", ["", "x" * 64, "A" * 64, "a" * 63, "a" * 65])
def test_what_names_no_session_is_refused(nonsense: str) -> None:
    with pytest.raises(ValueError, match="dead_session"):
        OpenSession(bot="bot-1", dead_session=nonsense)


# A session that nobody uses is given nothing.


def test_a_bot_is_given_jobs_from_its_first_sync_on(pool: Pool) -> None:
    (job,) = pool.submit()
    session = anew(pool)
    pool.assigner().run_once()
    assert pool.job(job).state == "queued"
    bot = Bot(pool.sync_service(), session)
    assert bot.sync()["leases"] == []
    pool.assigner().run_once()
    assert [work["job"] for work in bot.sync()["leases"]] == [job]


def test_a_bot_that_was_chosen_and_has_opened_another_session_since_is_given_nothing(pool: Pool) -> None:
    pool.submit()
    pool.bot()
    (row,) = pool.rows("SELECT j.id AS job_id, b.id AS bot_id FROM jobs j CROSS JOIN bots b")
    chosen = [Placement(row.job_id, row.bot_id, {})]
    anew(pool)
    assert not pool.database.run(lambda c: grant(c, chosen, assigner="test", strategy="test", ack=10.0))
    assert not pool.rows(LIVE)


def test_a_queue_that_rested_because_no_bot_could_serve_it_is_woken_by_the_first_sync(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.rest_queues(3600)
    session = anew(pool)
    assert pool.queue_of(job).schedule_after is not None
    Bot(pool.sync_service(), session).sync()
    assert pool.queue_of(job).schedule_after is None


# A bot that is to stop a lease is told why.


def reported_lease(bot: Bot, work: dict[str, object]) -> tuple[str, str | None]:
    (lease,) = bot.sync(active(work))["leases"]
    return lease["state"], lease.get("stop_reason")


def test_a_bot_is_told_of_a_cancel_and_of_nothing_before_it(pool: Pool) -> None:
    job, bot, work = pool.running()
    assert reported_lease(bot, work) == ("active", None)
    cancel(pool, job)
    assert reported_lease(bot, work) == ("cancelling", "cancel")


def test_a_bot_is_told_of_a_preemption(pool: Pool, tenancy: Tenancy) -> None:
    _, _, bot, work = contested(pool, tenancy)
    assign(pool)
    assert reported_lease(bot, work) == ("cancelling", "preempt")


def test_a_bot_is_told_of_a_timeout(pool: Pool) -> None:
    _, bot, work = pool.running(timeout_seconds=60)
    pool.change("UPDATE leases SET due_at = now() - interval '1 s'")
    pool.upkeep().run_once()
    assert reported_lease(bot, work) == ("cancelling", "timeout")
