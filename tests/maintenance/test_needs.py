"""A round of upkeep runs only the duties that have something to do, and once a minute all of them."""

import random
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from assigner.maintenance import needs
from assigner.maintenance.duties import Duty
from assigner.maintenance.needs import NEEDS, THOROUGH_INTERVAL, Needs
from assigner.operator_resources.priorities import reprice
from schema.moves.sessions import FIRST_EXPIRY
from schema.policy import priority_classes
from schema.policy.priority_classes import Policy
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.plans import statements
from tests.support.pool import Pool, count, submitted, work_off
from tests.support.race import Race

PAST = "now() - interval '1 s'"
NO_GRACE = "UPDATE ticks SET grace_until = at"
DRAIN = f"draining = true, drain_deadline = {PAST}"


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def late(pool: Pool) -> str:
    """Submit a job that has waited too long."""
    (job,) = pool.submit(queue_timeout_seconds=60.0)
    pool.change(f"UPDATE jobs SET queue_deadline = {PAST}")
    return job


def linked(pool: Pool) -> None:
    """All requirement sets are linked."""
    duty_of(pool, "missed links").run()


def duty_of(pool: Pool, name: str) -> Duty:
    """The duty of upkeep of this name, which nothing keeps from running."""
    (found,) = (each for each in pool.upkeep().duties if each.name == name)
    return found


def test_a_round_with_nothing_to_do_takes_a_sign_of_life_and_one_question(pool: Pool) -> None:
    pool.bot()
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    look, question = FIRST_EXPIRY.query.decode(), needs.NEEDED.query.decode()
    for expected in ([look, question], [question], [question]):
        with statements() as sent:
            upkeep.run_once()
        # A look at all bots says when the first session expires. Until then there is no other.
        assert [each for each in sent if "ticks" not in each] == expected


def test_what_a_duty_has_made_to_do_is_found_by_those_that_follow_it(pool: Pool) -> None:
    found = Needs(pool.database, Clock(), since=10.0)
    found.begin()
    found.ask()
    assert [what for what in NEEDS if found.are_there(what)] == []
    late(pool)
    linked(pool)
    assert not found.are_there("late"), "it came after the question"
    found.begin()
    found.ask()
    assert found.are_there("late")
    pool.change("UPDATE platforms SET linked = false")
    assert not found.is_outdated("late"), "it runs anyway"
    assert found.is_outdated("unlinked"), "a duty has run"
    found.ask()
    assert found.are_there("unlinked")


LOCK = "LOCK TABLE ceilings IN ACCESS EXCLUSIVE MODE"


@pytest.fixture
def impatient(pool: Pool, database_url: str, chance: random.Random) -> Iterator[Pool]:
    """The same pool, in which nobody waits long for a lock."""
    database = Database(database_url, DatabaseSettings(lock_timeout=0.01), role="impatient", chance=chance)
    yield Pool(database, pool.timing, chance)
    database.close()


def failures(logs: Sequence[MutableMapping[str, Any]]) -> list[str]:
    return [line["duty"] for line in logs if line["event"] == "a duty of upkeep failed"]


def test_a_question_that_fails_is_asked_once_and_keeps_no_duty_from_running(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    running, _, _ = pool.running()
    upkeep = impatient.upkeep()
    upkeep.run_once()
    waiting = late(pool)
    pool.change(NO_GRACE)
    pool.change(f"UPDATE bots SET expires_at = {PAST}")
    with race.first() as ahead, capture_logs() as logs:
        ahead.change(LOCK)
        upkeep.run_once()
    assert pool.row("SELECT status FROM bots").status == "gone"
    assert [pool.job(job).state for job in (running, waiting)] == ["queued", "dead"]
    assert failures(logs) == ["needs", "ceilings of run times"]


def test_a_question_that_fails_when_it_is_asked_again_keeps_no_duty_from_running(
    pool: Pool, impatient: Pool, race: Race
) -> None:
    pool.running()
    (waiting,) = pool.submit(queue_timeout_seconds=60.0)
    upkeep = impatient.upkeep()
    upkeep.run_once()
    pool.change(f"UPDATE bots SET {DRAIN}")
    names = [duty.name for duty in upkeep.duties]
    with race.first() as ahead, capture_logs() as logs:

        def come() -> None:
            pool.change(f"UPDATE jobs SET queue_deadline = {PAST} WHERE state = 'queued'")
            ahead.change(LOCK)

        behind = names.index("drains") + 1
        upkeep.duties = [*upkeep.duties[:behind], Duty("somebody comes", 0, come), *upkeep.duties[behind:]]
        upkeep.run_once()
    assert pool.job(waiting).state == "dead"
    assert failures(logs) == ["needs", "ceilings of run times"]


# What makes each need, and the duty that ends it.


def stubborn(pool: Pool) -> None:
    """A bot does not stop what it was asked to."""
    pool.running()
    pool.change(f"UPDATE leases SET state = 'cancelling', stop_reason = 'cancel', due_at = {PAST}")


def upheld(pool: Pool) -> None:
    count(pool, probation_failures=2)
    pool.bot()
    pool.change("INSERT INTO blames (job_id, bot_id, upheld_at) SELECT n, id, now() FROM bots, generate_series(1, 2) n")


def returned(pool: Pool) -> None:
    pool.submit()
    pool.bot()
    pool.change("INSERT INTO blames (job_id, bot_id, returned_at) SELECT j.id, b.id, now() FROM bots b, jobs j")


def returned_of_gone_jobs(pool: Pool) -> None:
    pool.bot()
    pool.change(
        "INSERT INTO blames (job_id, bot_id, returned_at) SELECT n, id, now() FROM bots, generate_series(1, 3) n"
    )


def finished_graph(pool: Pool) -> None:
    bot = pool.bot()
    work_off(pool, bot, submitted(pool, {1: []}))


def deferred(pool: Pool) -> None:
    """A job is deferred, and the limit for which it was is gone."""
    limited(pool)
    pool.upkeep().run_once()
    pool.database.run(lambda c: priority_classes.put_policy(c, Policy(), actor="test"))


def watched(pool: Pool) -> None:
    request = JobRequest(command=["true"], deadline_seconds=3600.0).normal()
    pool.submit(**request)
    pool.change("UPDATE job_constraints SET watch_at = now()")


def limited(pool: Pool) -> None:
    pool.submit(count=2, priority=99)
    pool.database.run(lambda c: priority_classes.put_policy(c, Policy(max_queue_size=1), actor="test"))


def repriced(pool: Pool) -> None:
    pool.submit()
    pool.database.run(lambda c: priority_classes.put_classes(c, {"random": 9}, actor="test"))


def running(change: str) -> Callable[[Pool], None]:
    def make(pool: Pool) -> None:
        pool.running()
        pool.change(change)

    return make


MADE: dict[str, tuple[str, str, Callable[[Pool], object]]] = {
    "a lease": ("overdue", "overdue leases", running(f"UPDATE leases SET due_at = {PAST}")),
    "a stubborn bot": ("overdue", "overdue leases", stubborn),
    "a drained bot": ("drained", "drains", running(f"UPDATE bots SET {DRAIN}")),
    "a drained instance": ("drained", "drains", running(f"UPDATE instances SET {DRAIN}")),
    "kept units": (
        "kept",
        "kept units",
        running(f"UPDATE bots SET kept_units = 1, kept_for = 1, kept_until = {PAST}, capacity = capacity + 1"),
    ),
    "a probation that is over": ("probation", "probation", running(f"UPDATE bots SET probation_until = {PAST}")),
    "failures of a bot": ("probation", "probation", upheld),
    "a charge to give back": ("probation", "probation", returned),
    "charges of jobs that are gone": ("probation", "probation", returned_of_gone_jobs),
    "a job that waits too long": ("late", "queue timeouts", late),
    "a requirement set": ("unlinked", "missed links", running("UPDATE platforms SET linked = false")),
    "a graph that is over": ("graphs", "finished graphs", finished_graph),
    "other points of a class": ("repricing", "changed points", repriced),
    "a job with a deadline": ("watched", "waiting jobs", watched),
    "a deferred job": ("overflow", "overflow", deferred),
}
#: What is there until an operator takes it away.
STANDING = {
    "ceilings": "INSERT INTO ceilings (max_timeout) VALUES (5)",
    "overflow": "UPDATE scheduling SET max_queue_size = 5",
}


def asked(pool: Pool) -> set[str]:
    found = Needs(pool.database, Clock(), since=10.0)
    found.ask()
    return {what for what in NEEDS if found.are_there(what)}


@pytest.mark.parametrize(("what", "duty", "make"), MADE.values(), ids=MADE)
def test_what_a_duty_finds_is_needed_until_it_has_run(
    pool: Pool, what: str, duty: str, make: Callable[[Pool], object]
) -> None:
    make(pool)
    if what != "unlinked":
        linked(pool)
    if what != "repricing":
        reprice(pool.database, actor="test")
    assert asked(pool) == {what}
    duty_of(pool, duty).run()
    assert asked(pool) == set()


def test_each_need_has_such_a_case() -> None:
    assert {what for what, _, _ in MADE.values()} | set(STANDING) == set(NEEDS)


@pytest.mark.parametrize(("what", "change"), STANDING.items(), ids=STANDING)
def test_what_a_setting_needs_is_needed_as_long_as_it_is_set(pool: Pool, what: str, change: str) -> None:
    pool.change(change)
    assert asked(pool) == {what}


@pytest.mark.parametrize(
    "quiet",
    [
        "UPDATE bots SET " + DRAIN,
        "UPDATE instances SET " + DRAIN,
        "UPDATE bots SET probation_until = now() + interval '1 h'",
        "INSERT INTO blames (job_id, bot_id, upheld_at) SELECT 1, id, now() FROM bots",
        "INSERT INTO blames (job_id, bot_id, returned_at) SELECT 1, id + 1, now() FROM bots",
    ],
)
def test_what_no_duty_would_change_is_not_needed(pool: Pool, quiet: str) -> None:
    count(pool)
    pool.bot()
    pool.change(quiet)
    assert asked(pool) == set()


def test_all_duties_run_once_a_minute_whatever_is_found(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "SELECT " + ", ".join(f"false AS {what}" for what in NEEDS)
    monkeypatch.setattr(needs, "NEEDED", Statement(nothing))
    job = late(pool)
    clock = Clock()
    upkeep = pool.upkeep(now=clock)
    states = []
    for at in (0.0, THOROUGH_INTERVAL - 1.0, THOROUGH_INTERVAL):
        clock.now = at
        upkeep.run_once()
        states.append(pool.job(job).state)
    assert states == ["queued", "queued", "dead"]
