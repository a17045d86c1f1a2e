"""One name, two sessions: what the older one may still run is granted to nobody before that one is surely dead."""

from datetime import datetime
from typing import Any

import pytest
from leasehold.errors import BadInput, Conflict
from pydantic import ValidationError

from bots.protocol import OpenSession, Session
from bots.sync import sessions
from schema.moves import sessions as move
from schema.moves.grant import Placement, grant
from schema.moves.sessions import SessionOpening, expire
from schema.moves.waiting.backoff import promote
from schema.timing import KILL_ALLOWANCE
from tests.support.plans import statements
from tests.support.pool import Bot, Pool, active, completed, open_session
from tests.support.race import Race, cancel, outcome
from tests.support.tenancy import Tenancy, assign, contested

LIVE = "SELECT FROM leases WHERE state IN ('pending', 'active', 'cancelling')"
PASSED = "UPDATE jobs SET schedule_after = now() - interval '1 ms' WHERE schedule_after IS NOT NULL"


def anew(pool: Pool, *, dead: Session | None = None, **fields: Any) -> Session:
    """Another agent with the name opens a session."""
    told = {} if dead is None else {"dead_session": sessions.digest(dead.secret).hex()}
    request = OpenSession.model_validate({"bot": "bot-1", "capacity": 9, **told, **fields})
    return open_session(pool.database, request, timing=pool.timing)


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


def test_the_latest_session_says_where_and_in_which_version_the_agent_runs_or_that_this_is_not_known(
    pool: Pool,
) -> None:
    pool.bot(host="build-7", pid=4711, version="0.2.0")
    assert pool.row("SELECT host, pid, version FROM bots") == ("build-7", 4711, "0.2.0")
    anew(pool)
    assert pool.row("SELECT host, pid, version FROM bots") == (None, None, None)
    for wrong in (
        {"host": "a b"},
        {"host": ""},
        {"host": "x" * 254},
        {"host": "\x1b[2J"},
        {"pid": 0},
        {"pid": 2**31},
        {"version": "1 0"},
        {"version": "x" * 65},
    ):
        with pytest.raises(ValidationError):
            anew(pool, **wrong)


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_job_that_an_older_session_was_told_of_waits_until_that_would_expire(pool: Pool, acknowledged: bool) -> None:
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


@pytest.mark.parametrize("older", ["dead", "expired", "not the one that is dead"])
def test_jobs_of_an_older_session_that_is_over_are_queued_again_at_once(pool: Pool, older: str) -> None:
    before = anew(pool)
    job, bot, _ = pool.running()
    until = expiry(pool)
    if older == "expired":
        pool.change("UPDATE bots SET expires_at = now() - interval '1 ms'")
    anew(pool, dead={"dead": bot.session, "expired": None}.get(older, before))
    waits = until if older == "not the one that is dead" else None
    assert (pool.job(job).state, pool.job(job).schedule_after) == ("queued", waits)
    pool.bot("bot-2")
    pool.assigner().run_once()
    assert pool.job(job).state == ("queued" if waits else "leased")


def test_what_names_no_session_is_refused() -> None:
    for nonsense in ("", "x" * 64, "A" * 64, "a" * 63, "a" * 65):
        with pytest.raises(ValueError, match="dead_session"):
            OpenSession(bot="bot-1", dead_session=nonsense)


def test_a_bot_is_given_jobs_from_its_first_sync_on_which_wakes_their_queues(pool: Pool) -> None:
    (job,) = pool.submit()
    session = anew(pool)
    pool.assigner().run_once()
    assert pool.job(job).state == "queued"
    pool.rest_queues(3600)
    bot = Bot(pool.sync_service(), session)
    assert bot.sync()["leases"] == []
    assert pool.queue_of(job).schedule_after is None
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


# A bot that is to stop a lease is told why.


def reported_lease(bot: Bot, work: dict[str, object]) -> tuple[str, str | None]:
    (lease,) = bot.sync(active(work))["leases"]
    return lease["state"], lease.get("stop_reason")


@pytest.mark.parametrize("reason", ["cancel", "preempt", "timeout", "drain", "unacknowledged"])
def test_a_bot_is_told_why_it_is_to_stop_and_has_the_grace_that_it_gives_before_its_session_is_closed(
    pool: Pool, tenancy: Tenancy, reason: str
) -> None:
    grace = 40.0
    if reason == "preempt":
        _, _, bot, work = contested(pool, tenancy)
    elif reason == "unacknowledged":
        pool.submit()
        pool.bot()
        pool.assigner().run_once()
    else:
        job, bot, work = pool.running(timeout_seconds=60)
        assert reported_lease(bot, work) == ("active", None)
    pool.change("UPDATE bots SET kill_grace = :grace", grace=grace)
    match reason:
        case "cancel":
            cancel(pool, job)
        case "preempt":
            assign(pool)
        case "timeout" | "unacknowledged":
            pool.change("UPDATE leases SET due_at = now() - interval '1 s'")
            pool.upkeep().run_once()
        case "drain":
            pool.change("UPDATE bots SET draining = true, drain_deadline = now() - interval '1 s'")
            pool.upkeep().run_once()
    left = "SELECT extract(epoch FROM due_at - clock_timestamp()) AS left FROM leases WHERE state = 'cancelling'"
    expected = pool.timing.sync + grace + KILL_ALLOWANCE
    assert expected - 10 < float(pool.row(left).left) < expected + 1
    if reason in ("cancel", "preempt", "timeout"):
        assert reported_lease(bot, work) == ("cancelling", reason)


def test_the_time_limit_of_a_running_job_leaves_its_bot_the_grace_too(pool: Pool) -> None:
    pool.submit(timeout_seconds=60)
    bot = pool.bot(kill_grace=20.0)
    pool.assigner().run_once()
    (work,) = bot.take()
    bot.sync(active(work))
    left = pool.row("SELECT extract(epoch FROM due_at - acknowledged_at) AS s FROM leases").s
    assert float(left) == pytest.approx(60 + pool.timing.sync + 20 + KILL_ALLOWANCE, abs=1)
    for wrong in (-1.0, 601.0):
        with pytest.raises(ValidationError):
            anew(pool, kill_grace=wrong)


# Sessions that open together


def together(pool: Pool, *requests: OpenSession) -> list[Session | BadInput]:
    return sessions.open_sessions(pool.database, requests, timing=pool.timing)


def back(bot: Bot, **fields: Any) -> OpenSession:
    """What an agent says that comes back and knows that its last session is dead."""
    dead = sessions.digest(bot.session.secret).hex()
    return OpenSession.model_validate({"bot": bot.session.bot, "dead_session": dead, **fields})


def test_sessions_open_together_in_as_many_statements_as_one(pool: Pool) -> None:
    offers = ({"os": "linux"}, {"os": ["linux"], "gpu": "a"}, {})
    numbers = []
    for count in (1, 30):
        requests = [
            OpenSession(
                bot=f"bot-{count}-{number}",
                instance=f"i{number % 2}" if count == 1 or number % 5 else None,
                properties=offers[number % 3],
                exclusive=["os"] if number % 3 == 0 else [],
                labels=["b", "a"][: number % 3],
                resources={"memory_mib": number + 1},
            )
            for number in range(count)
        ]
        with statements() as sent:
            answers = together(pool, *requests)
        numbers.append(len(sent))
        assert [answer.bot for answer in answers if isinstance(answer, Session)] == [each.bot for each in requests]
        for request in requests:
            row = pool.row(
                "SELECT labels, i.name AS instance, k.properties, k.exclusive, c.most FROM bots b"
                " LEFT JOIN instances i ON i.id = b.instance JOIN kinds k ON k.id = b.kind"
                " JOIN counters c ON c.name = concat_ws(chr(58), 'bot', b.id, 'memory_mib') WHERE b.name = :name",
                name=request.bot,
            )
            offered = {name: [each] if isinstance(each, str) else each for name, each in request.properties.items()}
            most = request.resources and request.resources["memory_mib"]
            wanted = (sorted(request.labels), request.instance, offered, request.exclusive, most)
            assert (row.labels, row.instance, row.properties, row.exclusive, row.most) == wanted
    assert numbers[0] == numbers[1]


def test_of_sessions_that_open_together_each_ends_the_older_one_of_its_own_bot(pool: Pool) -> None:
    """One that may still run, one that is dead, one that was cut off, one that expired while it was cut off."""
    jobs = pool.submit(4)
    bots = [pool.bot(f"bot-{number}") for number in range(4)]
    pool.assigner().run_once()
    works = {bot.session.bot: bot.take() for bot in bots}
    assert [len(each) for each in works.values()] == [1] * 4
    pool.change("UPDATE bots SET expires_at = expires_at + make_interval(secs => id)")
    until = pool.row("SELECT expires_at FROM bots WHERE name = 'bot-0'").expires_at
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s' WHERE name = 'bot-3'")
    pool.database.run(lambda connection: expire(connection, after=0, limit=500, actor="reaper"))

    cut_off = [back(bot, cut_off=True) for bot in bots[2:]]
    together(pool, OpenSession(bot="bot-0"), back(bots[1]), *cut_off, OpenSession(bot="new"))

    rows = [pool.job(works[bot.session.bot][0]["job"]) for bot in bots]
    assert sorted(row.public_id for row in rows) == sorted(jobs)
    told = [(row.state, row.kills, row.attempts) for row in rows]
    assert told == [("queued", 1, 1)] * 2 + [("queued", 0, 0)] * 2
    assert [row.schedule_after for row in rows] == [until, None, None, None]
    last = [
        pool.rows("SELECT actor FROM job_events WHERE job_id = :id ORDER BY id DESC LIMIT 1", id=row.id) for row in rows
    ]
    assert [event.actor for (event,) in last] == [f"bot:bot-{number}" for number in range(4)]


def test_a_job_that_two_bots_lost_is_forgiven_both_when_they_come_back_together(pool: Pool) -> None:
    (job,) = pool.submit()
    bots = []
    for name in ("bot-1", "bot-2"):
        bots.append(pool.bot(name))
        assert len(pool.given(bots[-1])) == 1
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s' WHERE name = :name", name=name)
        pool.database.run(lambda connection: expire(connection, after=0, limit=500, actor="reaper"))
    assert (pool.job(job).kills, pool.job(job).attempts) == (2, 2)
    together(pool, *(back(bot, cut_off=True) for bot in bots))
    assert (pool.job(job).kills, pool.job(job).attempts) == (0, 0)
    told = "SELECT actor, details->>'lost_fence' AS fence FROM job_events WHERE move = 'forgive' ORDER BY id"
    assert [(row.actor, row.fence) for row in pool.rows(told)] == [("bot:bot-1", "1"), ("bot:bot-2", "3")]


def test_one_request_that_is_refused_refuses_no_other(pool: Pool) -> None:
    first, bad, last = together(
        pool, OpenSession(bot="bot-1"), OpenSession(bot="bad", exclusive=["gpu"]), OpenSession(bot="bot-2")
    )
    assert isinstance(bad, BadInput)
    assert [each.bot for each in (first, last) if isinstance(each, Session)] == ["bot-1", "bot-2"]
    assert [row.name for row in pool.rows("SELECT name FROM bots ORDER BY id")] == ["bot-1", "bot-2"]


def test_sessions_that_open_twice_at_the_same_moment_in_another_order_wait_once(pool: Pool, race: Race) -> None:
    pool.bot("old-2")
    pool.bot("old-1")
    names = ["new-2", "old-1", "new-1", "old-2"]
    with race.first() as ahead:
        openings = [
            SessionOpening(name, session=sessions.digest(name), capacity=1, properties={"os": [name]}, instance=name)
            for name in names
        ]
        move.open_sessions(ahead.connection, openings, ttl=60.0)
        requests = [
            OpenSession(bot=name, properties={"os": name}, instance=name, secret=name * 10) for name in reversed(names)
        ]
        late = race.second(lambda: together(pool, *requests), behind=ahead)
        ahead.commit()
        assert [each.bot for each in outcome(late) if isinstance(each, Session)] == names[::-1]
    assert race.errors == []
    assert [row.epoch for row in pool.rows("SELECT epoch FROM bots ORDER BY name")] == [2, 2, 3, 3]
