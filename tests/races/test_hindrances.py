"""Leases that cannot end, because a row is held or wrong: what that costs the calls of bots, and who is told."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from bots.sync.fetch import FetchSettings
from bots.sync.hindrances import CAREFUL, HELD
from bots.sync.settle import SyncService
from schema.postgres.engine import Database, DatabaseSettings
from tests.support.pool import Pool, completed, states, submitted
from tests.support.race import Race
from tests.support.sync import new_calls
from tests.support.tenancy import Tenancy

pytestmark = pytest.mark.conflicts
LOCK_QUOTAS = "SELECT FROM quotas WHERE usage > 0 FOR UPDATE"
LOCK_JOB = "SELECT FROM jobs WHERE locality_hint = 'held' FOR UPDATE"
PUT_OFF = "the report of a lease is put off, as somebody holds a row or one is wrong"


class Gateway:
    """A service with a clock that the test moves, and with a wait for locks that is over soon."""

    def __init__(self, pool: Pool, race: Race, database: Database) -> None:
        self.now, self.race = 0.0, race
        fetch = FetchSettings(enabled=False)
        self.service = SyncService(database, timing=pool.timing, fetch=fetch, now=lambda: self.now)

    def settle(self, *messages: Any) -> list[list[str]]:
        """Settle these calls together; return the jobs that the answer to each of them lists."""
        answers = [json.loads(each) for each in self.service.answer(new_calls(*messages))]  # type: ignore[arg-type]
        return [[lease["job"] for lease in answer["leases"]] for answer in answers]

    def waits(self) -> int:
        """Return how often a statement has waited for a lock in vain since this was asked last."""
        found = self.race.errors.count("55P03")
        self.race.forget_errors()
        return found


@pytest.fixture
def gateway(pool: Pool, race: Race) -> Iterator[Gateway]:
    settings = DatabaseSettings(lock_timeout=0.3)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        yield Gateway(pool, race, database)


def test_a_lease_that_is_put_off_is_told_once_with_its_job_and_hinders_no_other_call(
    pool: Pool, gateway: Gateway
) -> None:
    wrong = submitted(pool, {1: [], 2: [{"node": 1, "on_failure": "run"}]}).jobs[1]
    bot = pool.bot("bot-1")
    (work,) = pool.given(bot)
    other = pool.bot("bot-2")
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    with capture_logs() as logs:
        for moment in (0.0, 5.0, CAREFUL + 1):
            gateway.now = moment
            assert gateway.settle(bot.message(completed(work))) == [[wrong]]
        assert gateway.settle(other.message(), bot.message(completed(work))) == [[], [wrong]]
    told = {"job": wrong, "bot": "bot-1", "error": "NotNullViolation", "sqlstate": "23502"}
    assert logs == [{**told, "event": PUT_OFF, "log_level": "warning"}] * 2, "and nothing of waits for locks"
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    assert gateway.settle(bot.message(completed(work))) == [[]]


def test_leases_that_only_together_cannot_end_are_not_all_put_off(pool: Pool, gateway: Gateway) -> None:
    both = submitted(pool, {1: [], 2: [], 3: [{"node": n, "on_failure": "run"} for n in (1, 2)]})
    bot = pool.bot("bot-1", capacity=2)
    works = pool.given(bot)
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    reports = [completed(work) for work in works]
    assert gateway.settle(bot.message(*reports)) == [[both.jobs[2]]], "the first one has ended"
    assert gateway.settle(bot.message(reports[1])) == [[both.jobs[2]]]
    pool.change("UPDATE jobs SET queue = -queue WHERE state = 'blocked'")
    assert gateway.settle(bot.message(reports[1])) == [[]]
    assert states(pool, both) == {1: "succeeded", 2: "succeeded", 3: "queued"}


def test_a_held_quota_costs_one_wait_in_a_second_however_many_leases_need_it(
    pool: Pool, tenancy: Tenancy, race: Race, gateway: Gateway
) -> None:
    tenancy.quota("default", maximum=9)
    bot = pool.bot("bot-1", capacity=3)
    jobs = pool.submit(3)
    works = pool.given(bot)
    other = pool.bot("bot-2", properties={"at": "other"})
    (last,) = pool.submit(properties={"at": "other"})
    (sound,) = pool.given(other)
    reports = [completed(work) for work in works]
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_QUOTAS)
        assert gateway.settle(bot.message(*reports)) == [jobs]
        assert gateway.waits() == 5 + 1, "five tries of the call, and one of a lease"
        with capture_logs() as logs:
            assert gateway.settle(bot.message(*reports), other.message(completed(sound))) == [jobs, [last]]
        assert [(log["job"], log["sqlstate"]) for log in logs] == [(last, "55P03")]
        assert gateway.waits() == 0
        gateway.now = HELD
        assert gateway.settle(bot.message(*reports), other.message(completed(sound))) == [jobs, [last]]
        assert gateway.waits() == 1, "a brief one of one lease"
    assert gateway.settle(bot.message(*reports), other.message(completed(sound))) == [[], []]


def test_a_held_row_of_one_lease_puts_off_no_other_one_of_its_bot_or_instance(
    pool: Pool, tenancy: Tenancy, race: Race, gateway: Gateway
) -> None:
    tenancy.quota("default", maximum=9)
    bot = pool.bot("bot-1", capacity=2)
    (held,) = pool.submit(locality_hint="held")
    (sound,) = pool.submit()
    works = pool.given(bot)
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        assert gateway.settle(bot.message(*map(completed, works))) == [[held]]
    race.forget_errors()
    assert pool.job(sound).state == "succeeded"


def test_the_service_is_careful_for_a_time_that_failures_do_not_extend_and_waits_for_bots_as_usual(
    pool: Pool, race: Race, gateway: Gateway
) -> None:
    bot = pool.bot("bot-1")
    pool.submit(locality_hint="held")
    (work,) = pool.given(bot)
    other = pool.bot("bot-2")
    with race.first() as stranger:
        stranger.connection.execute_sql(LOCK_JOB)
        gateway.settle(bot.message(completed(work)))
    gateway.now = CAREFUL - 1
    with race.first() as stranger:
        stranger.connection.execute_sql("SELECT FROM bots WHERE name = 'bot-2' FOR UPDATE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            gateway.settle(other.message())
    with race.first() as assigner:
        assigner.connection.execute_sql("SELECT FROM bots WHERE name = 'bot-2' FOR UPDATE")
        holds = threading.Timer(0.15, assigner.commit)
        holds.start()
        assert gateway.settle(other.message()) == [[]], "its bot was held for longer than a short wait"
        holds.join()
    gateway.now = CAREFUL
    assert not gateway.service._hindrances.is_careful
    race.forget_errors()
