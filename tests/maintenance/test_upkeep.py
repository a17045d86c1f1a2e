"""Upkeep, round by round: expiry with its grace, overdue leases, retention."""

import queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
from leasehold.errors import Conflict, NotReady
from leasehold.states import EndKind, end_kind
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.admission.ordering import OrderingSettings
from assigner.maintenance import upkeep as upkeep_maintenance
from assigner.maintenance.upkeep import THOROUGH_INTERVAL, Duty
from bots.protocol import OpenSession
from schema.accounting import rates
from schema.accounting.rates import RateTerms
from schema.moves.waiting.priority import set_priority
from schema.policy import priority_classes
from schema.postgres.notify import Wakeups
from schema.requests import JobRequest
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Bot, Pool, active, admission_state, completed, head, open_session
from tests.support.race import cancel

EXPIRE = "UPDATE bots SET expires_at = now() - interval '1 s' WHERE status <> 'gone'"
NO_GRACE = "UPDATE ticks SET grace_until = at"
OVERDUE = "UPDATE leases SET due_at = now() - interval '1 s' WHERE due_at IS NOT NULL"


def test_a_session_that_expired_is_closed_and_its_jobs_are_queued_again(pool: Pool) -> None:
    job, bot, work = pool.running()
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change(EXPIRE)
    assert upkeep.run_once() == pool.timing.reap
    row = pool.job(job)
    assert (row.state, row.attempts, row.kills, row.fence) == ("queued", 1, 1, 2)
    assert pool.row("SELECT status FROM bots").status == "gone"
    with pytest.raises(Conflict) as refused:
        bot.sync(completed(work))
    assert refused.value.code == "session_over"


#: Everything that is stored is ahead of a clock that was set back.
SET_BACK = """
UPDATE ticks SET at = at + interval '{0} s', grace_until = grace_until + interval '{0} s';
UPDATE bots SET expires_at = expires_at + interval '{0} s'
    - CASE name WHEN 'late' THEN interval '60 s' ELSE '0' END
    WHERE name <> 'new';
UPDATE rate_buckets SET refilled_at = refilled_at + interval '{0} s';
UPDATE queues SET schedule_after = schedule_after + interval '{0} s'
    - CASE id % 2 WHEN 0 THEN interval '60 s' ELSE '0' END
"""


@pytest.mark.parametrize(("seconds", "follows"), [(3600, True), (200, False)])
def test_what_was_to_end_by_a_clock_that_was_set_back_far_ends_as_if_it_had_not_been(
    pool: Pool, seconds: int, follows: bool
) -> None:
    ttl = pool.timing.ttl
    for name in ("old", "late", "new"):
        pool.bot(name)
    pool.database.run(lambda c: rates.set_rates(c, {"gpu": RateTerms(10.0, 5)}, actor="test"))
    for system in ("plan9", "beos"):  # of the second the rest is over at the last tick
        pool.submit(properties={"os": system})
    pool.rest_queues(5)
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(SET_BACK.format(seconds))
    upkeep.run_once()
    remaining = "SELECT extract(epoch FROM expires_at - now()) AS left FROM bots WHERE name = :name"
    assert 0 < pool.row(remaining, name="new").left <= ttl
    for name in ("old", "late"):
        assert (pool.row(remaining, name=name).left <= ttl + 5) is follows
    assert (pool.row("SELECT count(schedule_after) AS rest FROM queues").rest == 0) is follows
    bucket = pool.database.run(lambda c: rates.read_buckets(c, ["rate:gpu"]))["rate:gpu"]
    assert (bucket.tokens == 5) is follows
    assert pool.row("SELECT grace_until > at AS in_grace FROM ticks").in_grace


@pytest.mark.parametrize("left", [5, 5000], ids=["first expiry", "a session's time"])
def test_after_a_look_at_all_sessions_the_next_comes_before_any_of_them_may_have_expired(pool: Pool, left: int) -> None:
    """A session lasts 30 seconds. One that lasts longer says nothing of those that begin after the look."""
    at = [0.0]
    upkeep = pool.upkeep(now=lambda: at[0])
    pool.bot()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change(f"UPDATE bots SET expires_at = now() + interval '{left} s'")
    upkeep.run_once()
    pool.change(EXPIRE)
    at[0] += min(left, pool.timing.ttl)
    upkeep.run_once()
    assert pool.row("SELECT status FROM bots").status == "gone"


@pytest.mark.parametrize(
    "tick",
    ["at - interval '1 h'", "at + interval '1 h', grace_until = at + interval '1 h'"],
    ids=["silent", "put back"],
)
def test_after_a_silence_of_upkeep_or_a_clock_that_went_back_nobody_is_expired_for_one_session_life(
    pool: Pool, tick: str
) -> None:
    job, _, _ = pool.running()
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change(f"UPDATE ticks SET at = {tick}")
    pool.change(EXPIRE)
    upkeep.run_once()
    assert pool.job(job).state == "running"
    grace = pool.row("SELECT extract(epoch FROM grace_until - at) AS grace FROM ticks").grace
    assert float(grace) == pytest.approx(pool.timing.ttl)


def test_a_lease_that_is_never_acknowledged_is_taken_back_uncharged(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot()
    pool.assigner().run_once()
    bot.sync()
    pool.change(OVERDUE)
    pool.upkeep().run_once()
    row = pool.row("SELECT state, stop_reason FROM live")
    assert (row.state, row.stop_reason) == ("cancelling", "unacknowledged")
    bot.sync(status="draining")
    assert (pool.job(job).state, pool.job(job).attempts) == ("queued", 0)


def test_a_job_that_outlives_its_timeout_is_stopped_by_the_server_and_dead(pool: Pool) -> None:
    job, bot, work = pool.running(timeout_seconds=1.0)
    pool.change(OVERDUE)
    pool.upkeep().run_once()
    (told,) = bot.sync(active(work))["leases"]
    assert told["state"] == "cancelling"
    bot.sync(completed(work, "stopped"))
    row = pool.job(job)
    assert (row.state, row.reason) == ("dead", "ran longer than its timeout")
    assert end_kind(row.state, row.reason) is EndKind.TIMEOUT


def test_a_lease_that_was_missed_when_it_became_overdue_is_found_within_a_minute(pool: Pool) -> None:
    moment = 0.0
    upkeep = pool.upkeep(now=lambda: moment)
    pool.running(timeout_seconds=1.0)
    upkeep.run_once()
    pool.change("UPDATE leases SET due_at = now() - interval '1 h'")
    upkeep.run_once()
    assert pool.row("SELECT state FROM live").state == "active", "rounds look at what is newly overdue"
    moment = THOROUGH_INTERVAL
    upkeep.run_once()
    assert pool.row("SELECT state FROM live").state == "cancelling"


def test_a_bot_that_ignores_a_stop_is_not_renewed_and_its_job_waits_for_the_expiry(pool: Pool) -> None:
    job, bot, work = pool.running(timeout_seconds=1.0)
    upkeep = pool.upkeep()
    pool.change(OVERDUE)
    upkeep.run_once()
    bot.sync(active(work))
    pool.change(OVERDUE)
    upkeep.run_once()
    with pytest.raises(Conflict):
        bot.sync(active(work))
    assert pool.job(job).state == "running", "the bot may still run it"

    pool.change(NO_GRACE)
    pool.change(EXPIRE)
    upkeep.run_once()
    assert pool.job(job).state == "dead"


def test_finished_jobs_leave_after_the_time_of_their_state_with_everything_of_theirs(pool: Pool) -> None:
    job, bot, work = pool.running(key="once")
    bot.sync(completed(work))
    failed, waiting = pool.submit()[0], pool.submit(priority=3, properties={"os": "none"})[0]
    bot.sync(completed(pool.given(bot)[0], "failed", exit_code=1))
    pool.retention(keep_succeeded=3600).run_once()
    assert pool.job(job).state == "succeeded"
    pool.retention(keep_succeeded=0, keep_cancelled=0, keep_dead=0).run_once()
    assert [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs ORDER BY id")] == [failed, waiting]
    assert pool.row("SELECT count(*) AS n FROM job_payloads").n == 2
    assert {row.job_id for row in pool.rows("SELECT job_id FROM job_events UNION SELECT job_id FROM leases")} == {
        pool.job(each).id for each in (failed, waiting)
    }
    assert pool.submit(key="once") == [job], "a key is kept by itself"


TICK_AGE = "leasehold_upkeep_tick_age_seconds"


def test_the_age_of_upkeep_counts_from_its_beginning_until_a_first_round_ends(pool: Pool) -> None:
    upkeep = pool.upkeep()
    began = REGISTRY.get_sample_value(TICK_AGE)
    assert began is not None
    assert 0 <= began < 10
    seen = began
    while seen == began:
        seen = REGISTRY.get_sample_value(TICK_AGE)
    assert seen > began, "a first round that hangs makes it grow"
    upkeep.run_once()
    age = REGISTRY.get_sample_value(TICK_AGE)
    assert age is not None
    assert 0 <= age < 10


def failures(duty: str) -> float | None:
    return REGISTRY.get_sample_value("leasehold_upkeep_duty_failures", {"duty": duty})


def broken() -> None:
    raise ZeroDivisionError


def test_a_duty_that_fails_keeps_no_other_one_waiting_is_named_and_tried_again_soon(pool: Pool) -> None:
    moment = 0.0
    upkeep = pool.upkeep(now=lambda: moment)
    assert len({duty.name for duty in upkeep.duties}) == len(upkeep.duties)
    ran: list[str] = []

    def fails_once(duty: Duty) -> Callable[[], None]:
        def run() -> None:
            ran.append(duty.name)
            if ran.count(duty.name) == 1:
                broken()

        return run

    duties = upkeep.duties
    upkeep.duties = [replace(duty, run=fails_once(duty)) for duty in duties]
    with capture_logs() as logs:
        assert upkeep.run_once() == pool.timing.reap
    assert {line["duty"] for line in logs} == {duty.name for duty in duties}
    assert ran == [duty.name for duty in duties], "each was tried, whatever came before"
    assert {failures(name) for name in ran} == {1.0}
    ran.clear()
    upkeep.duties = [replace(duty, run=partial(ran.append, duty.name)) for duty in duties]
    upkeep.run_once()
    assert ran == [duty.name for duty in duties if duty.every == 0]
    moment = 5.0
    upkeep.run_once()
    assert set(ran) == {duty.name for duty in duties}, "also what is due every hour"
    assert {failures(name) for name in ran} == {0.0}


def test_a_duty_that_goes_on_failing_is_tried_and_traced_ever_more_rarely(pool: Pool) -> None:
    moment = 0.0
    upkeep = pool.upkeep(now=lambda: moment)
    tried: list[float] = []

    def run() -> None:
        tried.append(moment)
        broken()

    upkeep.duties = [Duty("hourly", 3600.0, run)]
    with capture_logs() as logs:
        for second in range(1000):
            moment = float(second)
            upkeep.run_once()
    assert tried == [0, 5, 15, 35, 75, 155, 315, 615, 915]
    assert failures("hourly") == 9
    assert [line["in_a_row"] for line in logs] == list(range(1, 10)), "each failure is told"
    assert [line["in_a_row"] for line in logs if line.get("exc_info")] == [1, 2, 4, 8]


def test_a_statement_of_a_duty_that_the_database_refuses_keeps_no_other_duty_from_deleting(pool: Pool) -> None:
    pool.change("INSERT INTO audit (at, action, actor, subject) VALUES (now() - interval '9 years', 'x', 'x', 'x')")
    pool.change("ALTER TABLE evictions RENAME TO gone")
    pool.upkeep().run_once()
    pool.change("ALTER TABLE gone RENAME TO evictions")
    assert pool.rows("SELECT FROM audit WHERE action = 'x'") == []
    assert failures("old evictions") == 1


def test_an_outage_of_the_database_ends_the_round(pool: Pool) -> None:
    upkeep = pool.upkeep()

    def away() -> None:
        raise NotReady("the database cannot be reached")

    upkeep.duties = [Duty("one", 0, away), Duty("other", 0, broken)]
    with pytest.raises(NotReady):
        upkeep.run_once()
    assert failures("other") is None


@pytest.mark.parametrize("every", [0, 60])
def test_a_duty_that_loses_its_connection_each_time_keeps_no_other_one_from_running(pool: Pool, every: float) -> None:
    moment = 0.0
    upkeep = pool.upkeep(now=lambda: moment)
    ran: list[tuple[str, float]] = []

    def lost() -> None:
        ran.append(("lost", moment))
        raise NotReady("the connection was lost")

    def runs(name: str) -> Callable[[], None]:
        return lambda: ran.append((name, moment))

    upkeep.duties = [Duty("first", 0, runs("first")), Duty("lost", every, lost), Duty("last", 0, runs("last"))]
    for _ in range(4):
        with suppress(NotReady):
            upkeep.run_once()
        moment += 2.0
    assert [at for name, at in ran if name == "first"] == [0, 2, 4, 6]
    assert [at for name, at in ran if name == "last"] == ([2, 4] if every else [2, 4, 6]), (
        "a round that found an outage goes on behind it"
    )
    assert [at for name, at in ran if name == "lost"] == ([0, 6] if every else [0, 2, 4, 6])
    assert failures("lost") == (2 if every else 4)


@pytest.mark.parametrize(("count", "named"), [(205, True), (300, False)], ids=["all fit", "too many"])
def test_waiters_hear_of_every_ending_or_are_told_to_look(
    pool: Pool, count: int, named: bool, wakeups: Wakeups
) -> None:
    eventually(lambda: wakeups.connected)
    jobs = pool.submit(count=count, max_attempts=1)
    bot = pool.bot(capacity=count)
    assigner = pool.assigner()
    while pool.rows("SELECT FROM jobs WHERE state = 'queued'"):
        assigner.run_once()
    assert len(bot.take()) == count
    upkeep = pool.upkeep()
    upkeep.run_once()
    pool.change(NO_GRACE)
    pool.change(EXPIRE)
    heard: queue.Queue[frozenset[str]] = queue.Queue()
    wakeups.subscribe("done", heard.put)
    with wakeups.idle("done"):
        upkeep.run_once()
        assert heard.get(timeout=MINUTE) == (frozenset(jobs) if named else frozenset())
    assert {pool.job(job).state for job in jobs[:3]} == {"dead"}


def test_a_repeated_opening_finds_the_session_it_opened(pool: Pool) -> None:
    request = OpenSession(bot="bot-1", secret="s" * 40)
    first = open_session(pool.database, request, timing=pool.timing)
    Bot(pool.sync_service(), first).sync()
    (job,) = pool.submit()
    pool.assigner().run_once()
    assert open_session(pool.database, request, timing=pool.timing) == first
    assert pool.job(job).state == "leased"
    other = open_session(pool.database, OpenSession(bot="bot-1"), timing=pool.timing)
    assert (other.epoch, pool.job(job).state) == (first.epoch + 1, "queued")


# Waiting jobs: they are promoted when they starve, hastened when they are due, and told when they will be late.


HOUR = 3600.0


def submitted(pool: Pool, **fields: object) -> str:
    request = JobRequest(command=["true"], **fields).normal()  # type: ignore[arg-type]
    (job,) = pool.submit(**request)
    return job


def older(pool: Pool, seconds: float) -> None:
    """So much time passes for everything that waits."""
    pool.change("UPDATE jobs SET queued_at = queued_at - make_interval(secs => :s)", s=seconds)
    pool.change(
        "UPDATE job_constraints SET watch_at = watch_at - make_interval(secs => :s),"
        " promoted_at = promoted_at - make_interval(secs => :s), deadline = deadline - make_interval(secs => :s)",
        s=seconds,
    )


def test_a_job_that_starves_moves_up_one_level_at_a_time_and_keeps_its_class(pool: Pool) -> None:
    job = submitted(pool, job_class="background")
    levels = []
    for waited in (10 * HOUR, 0.0, HOUR, HOUR, HOUR):
        older(pool, waited)
        pool.upkeep().run_once()
        levels.append(pool.row("SELECT level_of(rank) AS level FROM jobs").level)
    assert levels == ["normal", "normal", "high", "critical", "critical"], "however late the first look comes"
    assert (pool.job(job).priority, pool.job(job).rank) == (90, -1000)
    later = "SELECT watch_at > now() + interval '9 min' AS later FROM job_constraints"
    assert pool.row(later).later, "nothing can happen to it for now"
    assert pool.row("SELECT terms FROM constraint_sets").terms == {"job_class": "background"}
    assert pool.history(job) == ["submit", "promote", "promote", "promote"]
    told = pool.rows("SELECT details FROM job_events WHERE move = 'promote' ORDER BY id")
    steps = [("low", "normal"), ("normal", "high"), ("high", "critical")]
    assert [(row.details["from"], row.details["to"]) for row in told] == steps
    pool.database.run(lambda c: set_priority(c, [job], 95, instances=None, reason=None, actor="test"))
    older(pool, HOUR)
    pool.upkeep().run_once()
    assert pool.history(job)[-2:] == ["prioritise", "promote"], "an operator has put it at the end again"


def test_the_threshold_is_a_setting_and_off_is_off(pool: Pool) -> None:
    pool.database.run(
        lambda c: priority_classes.put_policy(c, priority_classes.Policy(starvation_seconds=None), actor="test")
    )
    job = submitted(pool, job_class="background")
    older(pool, 1000 * HOUR)
    pool.upkeep().run_once()
    assert pool.history(job) == ["submit"]
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 h'")
    pool.database.run(
        lambda c: priority_classes.put_policy(c, priority_classes.Policy(starvation_seconds=60), actor="test")
    )
    pool.upkeep().run_once()
    pool.change("UPDATE jobs SET schedule_after = NULL")
    older(pool, HOUR)
    pool.upkeep().run_once()
    assert pool.history(job) == ["submit", "promote"], "it was switched on while the job rested"


def test_what_starved_starts_before_what_is_as_urgent_by_its_class(pool: Pool) -> None:
    job = submitted(pool, job_class="background")
    for _ in range(3):
        older(pool, HOUR)
        pool.upkeep().run_once()
    for _ in range(5):
        submitted(pool, job_class="critical", project="site", user_priority=10)
    bot = pool.bot(capacity=1)
    pool.assigner().run_once()
    assert [lease["job"] for lease in bot.take()] == [job]


def test_the_earliest_deadline_comes_first_and_keeps_nobody_else_waiting() -> None:
    heads = [head(1, 5), head(2, 5, since=1, deadline=900), head(3, 5, since=2), head(4, 5, since=3, deadline=100)]
    ordering = OrderingSettings().policy().ordering
    assert [each.job.id for each in ordering.sequence(heads, admission_state())] == [1, 4, 3, 2]
    other = [*heads, head(5, 4, since=9, deadline=5000)]
    assert [each.job.id for each in ordering.sequence(other, admission_state())] == [5, 1, 4, 3, 2]


def test_a_job_with_little_slack_comes_before_everything_and_the_least_slack_first(pool: Pool) -> None:
    urgent = submitted(pool, job_class="critical")
    relaxed = submitted(pool, priority=500, deadline_seconds=10 * HOUR, estimated_seconds=HOUR)
    tight = submitted(pool, priority=500, deadline_seconds=HOUR + 800, estimated_seconds=HOUR)
    tighter = submitted(pool, priority=900, deadline_seconds=HOUR + 60, estimated_seconds=HOUR)
    pool.upkeep().run_once()
    assert [pool.history(job) for job in (relaxed, tight)] == [["submit"], ["submit", "hasten"]]
    ranks = [pool.job(job).rank for job in (tighter, tight, urgent, relaxed)]
    assert ranks == sorted(ranks)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    assert {lease["job"] for lease in bot.take()} == {tighter, tight}


def test_a_deadline_that_cannot_be_kept_is_told_once(pool: Pool) -> None:
    job = submitted(pool, deadline_seconds=HOUR, estimated_seconds=2000.0)
    pool.upkeep().run_once()
    assert pool.history(job) == ["submit"]
    for _ in range(3):
        older(pool, 1700.0)
        pool.upkeep().run_once()
    assert pool.history(job) == ["submit", "hasten", "at_risk"]


def test_a_job_that_is_over_is_looked_at_no_more(pool: Pool) -> None:
    job = submitted(pool, deadline_seconds=HOUR)
    pool.change("UPDATE job_constraints SET watch_at = now()")

    cancel(pool, job)
    assert not upkeep_maintenance.review_waiting_jobs(pool.database, actor="test")
    assert pool.row("SELECT watch_at FROM job_constraints").watch_at is None
