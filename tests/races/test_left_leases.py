"""A bot comes back or leaves while one of its leases cannot end: the others do, and the bot goes on."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from structlog.testing import capture_logs

from bots.protocol import OpenSession
from bots.sync.sessions import digest, open_sessions
from schema.diagnostics.invariants import LEASES_OF_LIVE_SESSIONS, verify
from schema.moves import sessions
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from tests.support.pool import Bot, Pool, active, completed, states, submitted
from tests.support.race import Race, expire
from tests.support.tenancy import Tenancy

pytestmark = pytest.mark.conflicts
LOCK_JOB = "SELECT FROM jobs WHERE locality_hint = 'held' FOR UPDATE"


@pytest.fixture
def impatient(pool: Pool, race: Race) -> Iterator[Pool]:
    """The same pool with a wait for locks that is over soon."""
    settings = DatabaseSettings(lock_timeout=0.1)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        yield Pool(database, pool.timing, pool.chance)
    race.forget_errors()


def with_two(pool: Pool, name: str = "bot-1") -> tuple[Bot, str, str]:
    """A bot that runs a job whose row somebody will hold, and another one."""
    bot = pool.bot(name, capacity=2)
    (held,) = pool.submit(locality_hint="held")
    (sound,) = pool.submit()
    bot.sync(*map(active, pool.given(bot)))
    return bot, held, sound


def test_a_bot_comes_back_while_one_of_its_leases_cannot_end_and_the_lease_ends_later(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    _, held, sound = with_two(pool)
    openings = [OpenSession(bot="bot-1", capacity=2), OpenSession(bot="bot-2")]
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        opened = open_sessions(impatient.database, openings, timing=pool.timing)
        bot = Bot(impatient.sync_service(), opened[0])  # type: ignore[arg-type]
        assert [pool.job(job).state for job in (held, sound)] == ["running", "queued"]
        with capture_logs() as logs:
            assert bot.sync()["leases"] == []
        assert [(log["job"], log["bot"]) for log in logs if "job" in log] == [(held, "bot-1")], (
            "who looks for the job finds this"
        )
        (finding,) = [each for each in verify(pool.database) if each.rows]
        assert finding.id == LEASES_OF_LIVE_SESSIONS.id
        pool.upkeep().run_once()
        assert pool.row("SELECT closing, capacity, in_use FROM bots WHERE name = 'bot-1'")[:] == (False, 2, 1)
    bot.sync()
    assert pool.job(held).state == "queued"
    assert pool.row("SELECT in_use, held FROM bots WHERE name = 'bot-1'")[:] == (0, 0)
    rests = "SELECT count(*) FROM jobs WHERE schedule_after > now()"
    assert pool.row(rests)[0] == 2, "the agent of the older session may still run both"


def test_a_bot_with_a_lease_of_an_older_session_runs_others_and_is_not_told_of_it(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    bot, held, _ = with_two(pool)
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        again = impatient.restarted(bot, capacity=2)
        (work,) = impatient.given(again)
        (listed,) = again.sync(active(work))["leases"]
        assert listed["job"] == work["job"]
        again.sync(completed(work))
        assert pool.job(work["job"]).state == "succeeded"
    again.sync()
    assert pool.job(held).kills == 1


def test_a_bot_has_what_its_new_session_declares_while_a_lease_of_the_older_one_is_left(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    (held,) = pool.submit(locality_hint="held", terms={"resources": {"gpus": 2, "memory_mib": 100}})
    bot = pool.bot(capacity=4, resources={"gpus": 2, "memory_mib": 400, "cpu_milli": 9000})
    bot.sync(*map(active, pool.given(bot)))
    resources = (
        "SELECT regexp_replace(name, '^bot.[0-9]+.', ''), used, most FROM counters WHERE name LIKE 'bot%' ORDER BY 1"
    )
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        again = impatient.restarted(bot, capacity=4, resources={"gpus": 1, "disk_mib": 7})
        assert [tuple(row) for row in pool.rows(resources)] == [
            ("disk_mib", 0, 7),
            ("gpu:0", 1000, 1000),
            ("gpu:1", 1000, None),
            ("gpu_milli", 0, 1000),
            ("gpus", 2, 1),
            ("memory_mib", 100, None),
        ]
    again.sync()
    assert pool.job(held).state == "queued"
    pool.submit(2, terms={"resources": {"gpus": 1}})
    impatient.assigner().run_once()
    assert [lease["gpus"] for lease in again.sync()["leases"]] == [[0]]


def test_a_bot_comes_back_while_a_row_that_the_end_of_its_lease_needs_is_wrong(pool: Pool, race: Race) -> None:
    graph = submitted(pool, {1: [], 2: [{"node": 1, "on_failure": "run"}]})
    bot = pool.bot("bot-1", capacity=2)
    (sound,) = pool.submit()
    bot.sync(*map(active, pool.given(bot)))
    pool.change("UPDATE jobs SET max_attempts = 1 WHERE public_id = CAST(:id AS uuid)", id=graph.jobs[1])
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    again = pool.restarted(bot)
    assert (pool.job(graph.jobs[1]).state, pool.job(sound).state) == ("running", "queued")
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    again.sync()
    assert pool.job(graph.jobs[1]).state == "dead"
    race.forget_errors()


def test_a_bot_leaves_while_one_of_its_leases_cannot_end(pool: Pool, impatient: Pool, race: Race) -> None:
    bot, held, sound = with_two(pool)
    bot.sync_service = impatient.sync_service()
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        bot.sync(status="gone")
        assert [pool.job(job).state for job in (held, sound)] == ["running", "queued"]
        assert pool.row("SELECT status, closing FROM bots")[:] == ("ok", True)
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    expire(pool)
    assert pool.job(held).state == "queued"
    assert pool.row("SELECT status FROM bots").status == "gone"


def test_a_bot_that_was_cut_off_comes_back_while_the_job_of_its_charge_is_held(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    bot, held, _ = with_two(pool)
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    expire(pool)
    assert pool.job(held).kills == 1
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        impatient.restarted(bot, capacity=2, cut_off=True)
    assert pool.job(held).kills == 1
    assert pool.row("SELECT status FROM bots").status == "ok"


def test_a_held_job_of_one_bot_that_was_cut_off_costs_no_other_bot_its_forgiveness(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    bots, jobs = [], []
    for name, hint in (("bot-1", "held"), ("bot-2", "free")):
        jobs += pool.submit(locality_hint=hint)
        bots.append(pool.bot(name))
        bots[-1].sync(*map(active, pool.given(bots[-1])))
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    expire(pool)
    openings = [
        OpenSession(bot=bot.session.bot, dead_session=digest(bot.session.secret).hex(), cut_off=True) for bot in bots
    ]
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        open_sessions(impatient.database, openings, timing=pool.timing)
    assert [pool.job(job).kills for job in jobs] == [1, 0]


def test_bots_come_back_with_leases_that_only_together_cannot_end(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [{"node": n, "on_failure": "run"} for n in (1, 2)]})
    pool.change("UPDATE jobs SET max_attempts = 1")
    for name in ("bot-1", "bot-2"):
        bot = pool.bot(name)
        bot.sync(*map(active, pool.given(bot)))
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    openings = [OpenSession(bot=name) for name in ("bot-1", "bot-2")]
    seen: list[str] = []
    declare = sessions.declare_resources

    def look(connection: Connection, *arguments: Any, **named: Any) -> None:
        seen.append(connection.execute_sql("SHOW lock_timeout").scalar_one())
        declare(connection, *arguments, **named)

    monkeypatch.setattr(sessions, "declare_resources", look)
    first, second = open_sessions(pool.database, openings, timing=pool.timing)
    assert len(set(seen)) == 1, "what follows waits for locks as usual"
    assert seen[0] not in ("10ms", "100ms")
    assert sorted(states(pool, graph).values()) == ["blocked", "dead", "running"]
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    for session in (first, second):
        Bot(pool.sync_service(), session).sync()  # type: ignore[arg-type]
    assert states(pool, graph) == {1: "dead", 2: "dead", 3: "queued"}


def test_bots_that_come_back_wait_for_a_held_quota_once_however_many_leases_need_it(
    pool: Pool, impatient: Pool, tenancy: Tenancy, race: Race
) -> None:
    tenancy.quota("team-a", maximum=9)
    for name in ("bot-1", "bot-2"):
        pool.submit(3, instance="team-a")
        pool.submit()
        bot = pool.bot(name, capacity=4)
        bot.sync(*map(active, pool.given(bot)))
    openings = [OpenSession(bot=name, capacity=4) for name in ("bot-1", "bot-2")]
    with race.first() as stranger:
        stranger.connection.execute_sql("SELECT FROM quotas FOR UPDATE")
        open_sessions(impatient.database, openings, timing=pool.timing)
        waits = race.errors.count("55P03")
    assert waits == 3, "all openings together, the leases of the first bot together, and one of them"
    states = "SELECT count(*) FILTER (WHERE state = 'queued'), count(*) FILTER (WHERE state = 'running') FROM jobs"
    assert pool.row(states)[:] == (2, 6)
    for name in ("bot-1", "bot-2"):
        pool.bot(name, capacity=4)
