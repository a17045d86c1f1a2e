"""Schedules: one job for each tick, whoever looks; what happens after outages, refusals and kills."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import BadInput, Conflict, NotFound
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.loops import Loop
from assigner.maintenance.schedules import Schedules
from assigner.queries import alerts
from schema.diagnostics.checks import Verdict
from schema.diagnostics.doctor import run_checks
from schema.policy import queue_limits, schedule_changes, schedules
from schema.policy.schedule_changes import Author
from schema.policy.schedules import ScheduleTerms
from schema.postgres.connection import Connection
from schema.postgres.notify import Wakeups
from schema.postgres.statements import Statement
from tests.support.patience import eventually
from tests.support.pool import Pool, completed
from tests.support.race import cancel
from tests.support.servers import Processes

ROW = "SELECT * FROM schedules WHERE name = 'nightly'"
KEYS = "SELECT k.key FROM submit_keys k JOIN jobs j ON j.id = k.job_id ORDER BY j.id"
#: The tick of the month that has begun, or of an earlier one. No test lasts until the next.
TICK = "(date_trunc('month', now() AT TIME ZONE 'UTC') - make_interval(months => :months)) AT TIME ZONE 'UTC'"
MONTHS = 40 * 86_400.0
SQUAT = Statement("""
INSERT INTO submit_keys (instance, key, request_hash, job_id, public_id)
SELECT instance, :key, '', id, public_id FROM jobs
""")


def put(pool: Pool, name: str = "nightly", **fields: Any) -> bool:
    terms = ScheduleTerms(**{
        "cron": "0 0 1 * *", "zone": "UTC", "catch_up": "skip", "catch_up_most": 10, "catch_up_seconds": MONTHS,
        "overlap": "allow", "enabled": True, "request": {"command": ["true"]}, **fields,
    })  # fmt: skip
    return pool.database.run(lambda c: schedule_changes.put_schedule(c, "default", name, terms, author=Author("test")))


def enable(connection: Connection, enabled: bool) -> None:
    schedule_changes.enable_schedule(connection, "default", "nightly", enabled=enabled, actor="test")


def disable_and_enable(connection: Connection) -> None:
    enable(connection, False)
    enable(connection, True)


def due_again(pool: Pool) -> None:
    """The wait after a refusal is over."""
    pool.change("UPDATE schedules SET due_at = next_tick WHERE name = 'nightly'")


def waiting(pool: Pool) -> Any:
    """The row, with the seconds that it waits."""
    return pool.row(ROW.replace("*", "*, extract(epoch FROM due_at - now()) AS wait"))


def make_due(pool: Pool, *, months: int = 0, name: str = "nightly") -> None:
    """Move the next tick to the month that has begun, or to an earlier one, as an outage would leave it behind."""
    pool.change(
        f"UPDATE schedules SET next_tick = {TICK}, due_at = {TICK}, last_tick = NULL WHERE name = :name",
        months=months,
        name=name,
    )


def month(pool: Pool, months: int = 0) -> datetime:
    """The tick of the month that has begun, or of so many months before."""
    found: datetime = pool.row(f"SELECT {TICK} AS tick", months=months).tick
    return found.astimezone(UTC)


def looked(pool: Pool, **options: Any) -> float:
    return Schedules(pool.database, **options).run_once()


def keys(pool: Pool) -> list[str]:
    return [row.key for row in pool.rows(KEYS)]


def key_of(tick: datetime, name: str = "nightly") -> str:
    return f"schedule:{name}:{tick:%Y-%m-%dT%H:%M:%SZ}"


def test_a_job_that_was_stored_with_an_urgency_has_its_priority(pool: Pool) -> None:
    for name, urgency in (("nightly", 90), ("weekly", None)):
        put(pool, name, request={"command": ["true"], "urgency": urgency})
        make_due(pool, name=name)
        Schedules(pool.database).run_once()
    assert [row.priority for row in pool.rows("SELECT priority FROM jobs ORDER BY id")] == [10, 0]
    pool.change(import_module("schema.migrations.versions.0042_one_word_for_priority").PRIORITIES)
    stored = [row.request for row in pool.rows("SELECT request FROM schedules ORDER BY name")]
    assert stored == [{"command": ["true"], "priority": 10}, {"command": ["true"]}]


def test_a_tick_makes_one_job_that_knows_its_tick_and_the_row_moves_on(pool: Pool) -> None:
    put(pool, request={"command": ["true"], "label": "night", "env": {"A": "1"}, "metadata": {"team": "x"}})
    assert pool.row(ROW).next_tick > pool.row("SELECT now() AS now").now
    make_due(pool)
    assert looked(pool) == looked(pool) == 5.0
    row, tick = pool.row(ROW), month(pool)
    assert (row.last_tick, row.next_tick, row.failures) == (tick, month(pool, -1), 0)
    assert row.due_at == row.next_tick
    (job,) = pool.rows("SELECT j.*, p.payload FROM jobs j JOIN job_payloads p ON p.job_id = j.id")
    told = key_of(tick).partition("nightly:")[2]
    assert (job.id, job.label, keys(pool)) == (row.last_job, "night", [key_of(tick)])
    assert job.payload["env"] == {"A": "1", "LEASEHOLD_SCHEDULE": "nightly", "LEASEHOLD_TICK": told}
    kept = {row.key: row.value for row in pool.rows("SELECT key, value FROM job_metadata")}
    assert kept == {"team": "x", "schedule": "nightly", "tick": told}


def test_two_assigners_make_one_job_of_a_tick(pool: Pool) -> None:
    put(pool)
    make_due(pool)
    with pool.database.begin() as taken:
        (due,) = schedules.due_schedules(taken, limit=9)
        held = schedules.take_due(taken, due)
        assert held is not None
        # The other one passes the row over, looks again soon, and waits for nobody.
        assert looked(pool) == 0.5
        assert keys(pool) == []
        outcome = Schedules(pool.database)._handle(taken, schedule_id=due)
        assert outcome.result == "submitted"
        assert looked(pool) == 0.5
    looked(pool)
    assert len(keys(pool)) == 1


def test_an_assigner_that_is_killed_between_submit_and_commit_leaves_the_tick_to_another(
    pool: Pool, tmp_path: Path, database_url: str
) -> None:
    put(pool)
    pool.submit(1)
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with Processes(tmp_path, database_url, pool.timing) as processes, pool.database.connect() as squatter:
        assigner = processes.assigner()
        # Whoever has the key of the tick makes its submit wait in the middle of the transaction.
        squatter.execute(SQUAT, {"key": key_of(month(pool))})
        make_due(pool)
        pool.change("SELECT wake('schedules')")
        eventually(lambda: bool(pool.rows(waiting)))
        assigner.kill()
        eventually(lambda: not pool.rows(waiting))
    assert (keys(pool), pool.row(ROW).last_tick) == ([], None)

    def is_done() -> bool:
        looked(pool)
        return bool(keys(pool))

    eventually(is_done)  # the server takes a moment to end the session of a killed process, and its locks
    assert (keys(pool), pool.row(ROW).last_tick) == ([key_of(month(pool))], month(pool))


@pytest.mark.parametrize(
    ("fields", "ticks", "pauses"),
    [
        pytest.param({"catch_up": "skip"}, [0], [5.0, 5.0], id="the newest tick only"),
        pytest.param({"catch_up": "skip", "catch_up_seconds": 0.0}, [], [5.0], id="nothing that is too old"),
        pytest.param({"catch_up": "all", "catch_up_most": 3}, [2, 1, 0], [0.0, 0.0, 5.0],
                     id="the newest ticks, each in a transaction of its own"),
        pytest.param({"catch_up": "none"}, [], [5.0], id="nothing that was missed"),
    ],
)  # fmt: skip
def test_after_an_outage_a_schedule_catches_up_as_it_says(
    pool: Pool, fields: dict[str, Any], ticks: list[int], pauses: list[float]
) -> None:
    put(pool, **fields)
    make_due(pool, months=9)
    for nth, pause in enumerate(pauses):
        assert looked(pool) == pause
        assert len(keys(pool)) == min(nth + 1, len(ticks))
    assert keys(pool) == [key_of(month(pool, months)) for months in ticks]
    row = pool.row(ROW)
    assert (row.last_tick, row.enabled) == (month(pool) if ticks else None, True)
    assert row.next_tick > pool.row("SELECT now() AS now").now


def test_a_tick_is_left_out_while_the_previous_job_has_not_ended(pool: Pool) -> None:
    put(pool, overlap="skip", catch_up="all")
    make_due(pool, months=1)
    looked(pool)
    looked(pool)
    row = pool.row(ROW)
    assert (keys(pool), row.last_tick, row.failures) == ([key_of(month(pool, 1))], month(pool), 0)
    bot = pool.bot()
    (work,) = pool.given(bot)
    bot.sync(completed(work))
    make_due(pool)
    looked(pool)
    assert keys(pool) == [key_of(month(pool, 1)), key_of(month(pool))]


def test_a_schedule_behind_a_job_that_never_starts_counts_and_tells_the_ticks_that_it_leaves_out(pool: Pool) -> None:
    put(pool, overlap="skip", catch_up="all", request={"command": ["true"], "properties": {"os": "none"}})
    make_due(pool, months=4)
    with capture_logs() as logs:
        for _ in range(5):
            looked(pool)
    row = pool.row(ROW)
    assert (len(keys(pool)), row.left_out, row.left_out_since, row.last_tick) == (1, 4, month(pool, 3), month(pool))
    assert [line["log_level"] for line in logs if "left out because" in line["event"]] == ["info"] * 2 + ["warning"] * 2
    assert REGISTRY.get_sample_value("leasehold_schedules_held_up") == 1
    (job,) = pool.rows("SELECT public_id FROM jobs")
    (check,) = [each for each in run_checks(pool.database) if each.name == "schedules"]
    assert f"default/nightly has left out 4 ticks, because job {job.public_id} has not started" in check.found
    assert "SchedulesAreHeldUp" in str(pool.database.run(lambda c: alerts.alerts(c)))
    cancel(pool, str(job.public_id))
    make_due(pool)
    looked(pool)
    row = pool.row(ROW)
    assert (len(keys(pool)), row.left_out, row.left_out_since) == (2, 0, None)
    assert REGISTRY.get_sample_value("leasehold_schedules_held_up") == 0


def test_a_refused_job_is_told_of_and_tried_again_and_keeps_no_other_schedule_waiting(pool: Pool) -> None:
    put(pool, request={"command": ["true"], "label": "full"})
    put(pool, "other")
    pool.database.run(lambda c: queue_limits.set_queue_limits(c, {"full": 0}, actor="test"))
    make_due(pool)
    make_due(pool, name="other")
    tick = month(pool)
    looked(pool)
    assert keys(pool) == [key_of(tick, "other")]
    row = waiting(pool)
    assert (row.failures, row.last_tick, row.next_tick) == (1, None, tick)
    assert 0 < row.wait <= 5
    assert "full" in row.last_error
    due_again(pool)
    looked(pool)
    row = waiting(pool)
    assert (row.failures, 5 < row.wait <= 10) == (2, True)
    pool.database.run(lambda c: queue_limits.remove_queue_limits(c, ["full"], actor="test"))
    due_again(pool)
    looked(pool)
    row = pool.row(ROW)
    assert (row.failures, row.last_tick, len(keys(pool))) == (0, tick, 2)
    assert row.last_error is not None, "it stays for whoever asks later"


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("zone", "Mars/Phobos", "zone: 'Mars/Phobos' is not a time zone"),
        ("cron", "0 0 99 * *", "cron: '0 0 99 * *' is not a cron expression: bad day-of-month"),
        ("cron", "0 0 * * 1L/2", "cron: '0 0 * * 1L/2' is not a cron expression"),
    ],
)
def test_ticks_that_cannot_be_computed_any_more_are_told_of_and_keep_no_other_schedule_waiting(
    pool: Pool, column: str, value: str, said: str
) -> None:
    put(pool)
    put(pool, "other")
    make_due(pool, months=1)
    make_due(pool, name="other")
    pool.change(f"UPDATE schedules SET {column} = :value WHERE name = 'nightly'", value=value)
    for _ in range(3):
        due_again(pool)
        looked(pool)
    assert keys(pool) == [key_of(month(pool), "other")]
    row = waiting(pool)
    assert (row.failures, row.next_tick, row.last_tick) == (3, month(pool, 1), None)
    assert 10 < row.wait <= 20
    assert said in row.last_error
    (check,) = [each for each in run_checks(pool.database) if each.name == "schedules"]
    assert check.verdict is Verdict.WARNING
    assert "default/nightly was refused 3 times" in check.found
    with pytest.raises(BadInput, match=column):
        pool.database.run(disable_and_enable)
    pool.change("UPDATE schedules SET zone = 'UTC', cron = '0 0 1 * *', due_at = next_tick WHERE name = 'nightly'")
    looked(pool)
    assert keys(pool) == [key_of(month(pool), "other"), key_of(month(pool))]


def test_a_refusal_that_cannot_be_stored_keeps_no_other_schedule_waiting(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(pool, request={"command": ["true"], "label": "full"})
    put(pool, "other")
    pool.database.run(lambda c: queue_limits.set_queue_limits(c, {"full": 0}, actor="test"))
    make_due(pool, months=1)
    make_due(pool, name="other")
    monkeypatch.setattr(schedules, "refuse", lambda *_, **__: 1 / 0)
    looked(pool)
    assert looked(pool) == 0.5, "it is tried again soon, but not at once"
    assert keys(pool) == [key_of(month(pool), "other")]


def test_a_tick_that_comes_soon_is_looked_at_in_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assigner.maintenance.schedules.HELD_INTERVAL", 60.0)
    put(pool)
    soon = "clock_timestamp() + interval '4 s'"
    pool.change(f"UPDATE schedules SET next_tick = {soon}, due_at = {soon}")
    assert looked(pool) <= 4


def test_a_default_level_and_an_estimator_hold_for_jobs_of_schedules_and_a_failing_one_is_told_of(pool: Pool) -> None:
    put(pool)
    make_due(pool)

    def broken(_: Any) -> float:
        raise ZeroDivisionError("secret")

    looked(pool, estimate=broken)
    assert pool.row(ROW).last_error == "the job could not be submitted (ZeroDivisionError)"
    due_again(pool)
    looked(pool, level="premium", estimate=lambda _: 7.0)
    assert pool.row("SELECT priority FROM jobs").priority == 0
    assert pool.row("SELECT estimate FROM job_constraints").estimate == 7


def test_what_its_ceiling_or_a_newer_version_refuses_is_told_of_with_its_field(pool: Pool) -> None:
    put(pool, request={"command": ["true"], "job_class": "critical"})
    pool.change("UPDATE schedules SET priority_ceiling = 50")
    make_due(pool)
    looked(pool)
    assert pool.row(ROW).last_error == "the schedule may not be more urgent than 50"
    pool.change("""UPDATE schedules SET request = '{"command": ["true"], "gone": 1}'""")
    due_again(pool)
    looked(pool)
    row = pool.row(ROW)
    assert (row.failures, row.last_error) == (2, "gone: there is no such field")


def test_a_key_that_another_job_has_is_told_of_and_the_schedule_goes_on(pool: Pool) -> None:
    put(pool)
    make_due(pool)
    tick = month(pool)
    pool.submit(key=key_of(tick))
    looked(pool)
    row = pool.row(ROW)
    assert (row.last_tick, row.last_job, row.failures) == (tick, None, 0)
    assert "used before" in row.last_error


def test_a_disabled_schedule_makes_nothing_and_begins_anew_when_it_is_enabled(pool: Pool) -> None:
    put(pool)
    make_due(pool, months=5)

    pool.database.run(lambda c: enable(c, False))
    row = pool.row(ROW)
    assert (row.enabled, row.next_tick, row.due_at) == (False, None, None)
    looked(pool)
    pool.database.run(lambda c: enable(c, True))
    looked(pool)
    assert keys(pool) == []
    assert pool.row(ROW).next_tick > pool.row("SELECT now() AS now").now


def test_setting_the_same_schedule_again_keeps_its_tick_and_another_expression_gives_it_a_new_one(pool: Pool) -> None:
    assert put(pool) is True
    make_due(pool, months=5)
    assert put(pool) is False
    assert put(pool, request={"command": ["false"]}) is False
    assert pool.row(ROW).next_tick == month(pool, 5)
    assert put(pool, cron="0 3 * * *", zone="Europe/Berlin") is False
    row = pool.row(ROW)
    assert (row.next_tick > month(pool), row.due_at == row.next_tick) == (True, True)
    audited = "SELECT action FROM audit WHERE action LIKE 'schedule%' ORDER BY id"
    assert [each.action for each in pool.rows(audited)] == ["schedule.set"] * 3


def test_an_expression_without_ticks_a_full_instance_and_an_absent_schedule_are_refused(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=r"cron: .* has no tick within 50 years"):
        put(pool, cron="0 0 */31 2 MON#5")
    monkeypatch.setattr(schedule_changes, "MAX_SCHEDULES", 1)
    put(pool)
    with pytest.raises(Conflict, match="has 1 schedules already"):
        put(pool, "other")
    remove = lambda: pool.database.run(  # noqa: E731
        lambda c: schedule_changes.remove_schedule(c, "default", "nightly", author=Author("test"))
    )
    make_due(pool)
    remove()
    looked(pool)
    assert keys(pool) == []
    with pytest.raises(NotFound):
        remove()


@pytest.fixture
def loop(pool: Pool, wakeups: Wakeups) -> Iterator[Loop]:
    """The loop as an assigner process runs it."""
    signal = wakeups.signal(schedules.TOPIC)
    made = Loop(
        "schedules",
        Schedules(pool.database).run_once,
        chance=random.Random(1),
        signal=signal,
        idle=lambda: wakeups.idle(schedules.TOPIC),
    )
    made.start()
    yield made
    made.stop()
    signal.close()


def test_the_loop_wakes_for_a_new_schedule_and_at_its_tick(
    pool: Pool, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assigner.maintenance.schedules.POLL_INTERVAL", 3600.0)
    eventually(lambda: bool(pool.row("SELECT wake('schedules') AS told").told))
    put(pool)
    soon = "now() + interval '1 second'"
    pool.change(f"UPDATE schedules SET next_tick = {soon}, due_at = {soon}")
    pool.change("SELECT wake('schedules')")
    # That second is no tick of the expression: the newest tick before it was handled, so the row moves on.
    eventually(lambda: pool.row(ROW).next_tick == month(pool, -1))
