"""Schedules: jobs that are submitted again and again, at the ticks of a cron expression, for an instance.

The row of a schedule holds its next tick. Whoever locks the row while the tick is due submits the job and moves the
row on in the same transaction. So each tick makes one job, whatever number of processes looks. The key of the job names
the tick too. The row of a schedule is locked before anything that a submit locks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import Overlap as Overlap
from leasehold.wire import escaped

from schema.policy import cron
from schema.policy.cron import CatchUp, Plan
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement

#: The topic of wake-ups that tell of changed schedules.
TOPIC = "schedules"
#: Longest stored error, bytes.
MAX_ERROR = 500
#: Refusals in a row from which a schedule counts as failing, and ticks left out in a row from which one counts as held
#: up, if its previous job has not started.
FAILING = 3
LEFT_OUT = 3
#: The condition that schedule `s`, joined with its previous job `j`, is held up.
HELD_UP = f"s.left_out >= {LEFT_OUT} AND s.enabled AND j.state IN ('blocked', 'queued', 'parked', 'deferred')"

#: The columns of the terms.
FIELDS = "cron, zone, catch_up, catch_up_most, catch_up_seconds, overlap, enabled, request"
_LIST = f"""
SELECT i.name AS instance, s.name, {FIELDS}, s.next_tick, s.due_at, s.last_tick, j.public_id::text AS last_job,
    j.state AS last_state, s.left_out, s.left_out_since, s.failures, s.last_error, s.failed_at, s.priority_ceiling,
    s.set_by, s.declared_by, s.created_at, z.reason AS paused
FROM schedules s JOIN instances i ON i.id = s.instance LEFT JOIN jobs j ON j.id = s.last_job
LEFT JOIN pauses z ON z.kind = 'schedule' AND z.name = s.name AND z.instance = i.name
WHERE (CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))"""
_PAGE = Statement(f"""{_LIST} AND (CAST(:after AS text) IS NULL OR (i.name, s.name) > (:after_instance, :after))
ORDER BY i.name, s.name LIMIT :limit""")
_SHOW = Statement(f"{_LIST} AND i.name = :instance AND s.name = :name")

# Rows that somebody else holds are skipped while reading, so that those in front keep no others waiting.
_DUE = Statement("""
SELECT id FROM schedules WHERE due_at <= now() ORDER BY due_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
""")
# A row that another process holds is passed over: that process submits the tick.
_TAKE = Statement(f"""
SELECT s.id, i.name AS instance, s.name, {FIELDS}, s.next_tick, s.failures, s.priority_ceiling, s.left_out,
    now() AS now,
    EXISTS (SELECT FROM jobs j WHERE j.id = s.last_job AND j.finished_at IS NULL) AS is_running
FROM schedules s JOIN instances i ON i.id = s.instance
WHERE s.id = :id AND s.due_at <= now() FOR NO KEY UPDATE OF s SKIP LOCKED
""")
_ADVANCE = Statement("""
UPDATE schedules SET last_tick = coalesce(:tick, last_tick), last_job = coalesce(:job, last_job),
    next_tick = :following, due_at = :following, enabled = CAST(:following AS timestamptz) IS NOT NULL, failures = 0,
    last_error = coalesce(:error, last_error), failed_at = CASE WHEN :error IS NULL THEN failed_at ELSE now() END,
    left_out = CASE WHEN :left_out THEN left_out + 1 WHEN CAST(:job AS bigint) IS NULL THEN left_out ELSE 0 END,
    left_out_since = CASE WHEN :left_out THEN coalesce(left_out_since, :tick)
        WHEN CAST(:job AS bigint) IS NULL THEN left_out_since END
WHERE id = :id AND next_tick = :due
""")
_REFUSE = Statement("""
UPDATE schedules SET failures = failures + 1, last_error = :error, failed_at = now(),
    due_at = now() + make_interval(secs => :wait)
WHERE id = :id AND next_tick = :due
""")
_NEXT = Statement(f"""
SELECT extract(epoch FROM min(due_at) - clock_timestamp())::double precision AS seconds,
    (SELECT count(*) FROM schedules WHERE failures >= {FAILING}) AS failing,
    (SELECT count(*) FROM schedules s JOIN jobs j ON j.id = s.last_job WHERE {HELD_UP}) AS held_up
FROM schedules WHERE due_at IS NOT NULL
""")


@dataclass(frozen=True)
class ScheduleTerms:
    """What a schedule does.

    cron, zone: its ticks (`schema/policy/cron.py`).
    catch_up: what is done about missed ticks: `skip` submits the newest one unless it is older than `catch_up_seconds`,
        `all` the newest `catch_up_most`, `none` none.
    overlap: `skip` leaves a tick out while the previous job has not ended.
    request: the job in flat form.
    """

    cron: str
    zone: str
    catch_up: CatchUp
    catch_up_most: int
    catch_up_seconds: float
    overlap: Overlap
    enabled: bool
    request: Mapping[str, Any]

    def next_tick(self, after: datetime) -> datetime | None:
        """The first tick later than `after`; None for a disabled schedule. Raises BadInput if there is none."""
        if not self.enabled:
            return None
        found = cron.next_tick(self.cron, self.zone, after)
        if found is None:
            raise BadInput("cron", f"'{self.cron}' has no tick within 50 years")
        return found


@dataclass(frozen=True)
class DueSchedule:
    """A schedule that is due, whose row is locked.

    is_running: the job of its last tick or run has not ended. left_out: ticks left out in a row because of that.
    """

    id: int
    instance: str
    name: str
    terms: ScheduleTerms
    due: datetime
    now: datetime
    failures: int
    priority_ceiling: int | None
    is_running: bool
    left_out: int

    def plan(self) -> Plan:
        """What to do now. Raises BadInput for an expression or a zone that is not known here."""
        terms = self.terms
        return cron.plan(
            terms.cron,
            terms.zone,
            due=self.due,
            now=self.now,
            catch_up=terms.catch_up,
            most=terms.catch_up_most,
            within=terms.catch_up_seconds,
        )


def tick_text(tick: datetime) -> str:
    """A tick in ISO 8601 and UTC, such as 2026-03-29T01:00:00Z."""
    return tick.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def schedules(
    connection: Connection, *, instances: Sequence[str] | None, after: tuple[str, str] | None, limit: int
) -> list[dict[str, Any]]:
    """Up to `limit` schedules of these instances (None = all), by instance and name, that follow `after`."""
    given = {"after_instance": after[0] if after else None, "after": after[1] if after else None, "limit": limit}
    where = {"instances": None if instances is None else list(instances), **given}
    return [dict(row) for row in connection.execute(_PAGE, where).mappings()]


def schedule(connection: Connection, instance: str, name: str) -> dict[str, Any]:
    """One schedule. Raises NotFound."""
    where = {"instances": None, "instance": instance, "name": name}
    row = connection.execute(_SHOW, where).mappings().one_or_none()
    if row is None:
        raise not_found(name)
    return dict(row)


def exists(connection: Connection, instance: str, name: str) -> bool:
    """True if the instance has a schedule of this name."""
    where = {"instances": None, "instance": instance, "name": name}
    return connection.execute(_SHOW, where).one_or_none() is not None


def due_schedules(connection: Connection, *, limit: int) -> list[int]:
    """Ids of up to `limit` schedules that are due, those that have waited longest first."""
    return list(connection.execute(_DUE, {"limit": limit}).scalars())


def take_due(connection: Connection, schedule_id: int) -> DueSchedule | None:
    """Lock a schedule that is due; None if it is not, or if another process holds it."""
    row = connection.execute(_TAKE, {"id": schedule_id}).one_or_none()
    if row is None:
        return None
    return DueSchedule(
        row.id,
        row.instance,
        row.name,
        terms_of(row),
        row.next_tick,
        row.now,
        row.failures,
        row.priority_ceiling,
        row.is_running,
        row.left_out,
    )


def advance(
    connection: Connection,
    held: DueSchedule,
    plan: Plan,
    *,
    job_id: int | None = None,
    left_out: bool = False,
    error: str | None = None,
) -> None:
    """Move a locked schedule on to the following tick; without one it is disabled.

    job_id: the job of the tick. left_out: the tick was left out because the previous job has not ended, which is
        counted. error: is stored.
    """
    values = {"id": held.id, "due": held.due, "tick": plan.tick, "following": plan.following, "job": job_id}
    values["left_out"] = left_out
    connection.execute(_ADVANCE, values | {"error": None if error is None else escaped(error, MAX_ERROR)})


def refuse(connection: Connection, held: DueSchedule, *, error: str, wait: float) -> None:
    """Record that a tick was refused; the schedule is looked at again after `wait` seconds."""
    values = {"id": held.id, "due": held.due, "error": escaped(error, MAX_ERROR), "wait": wait}
    connection.execute(_REFUSE, values)


@dataclass(frozen=True)
class NextLook:
    """Seconds until the next schedule is due, None without any; and how many schedules fail again and again, or are
    held up by a job that has not started."""

    seconds: float | None
    failing: int
    held_up: int


def next_look(connection: Connection) -> NextLook:
    """When to look next, and how many schedules have a problem."""
    row = connection.execute(_NEXT).one()
    return NextLook(row.seconds, row.failing, row.held_up)


def not_found(name: str) -> NotFound:
    """The error for a schedule that is not there."""
    return NotFound(f"schedule: there is no '{escaped(name, 63)}'")


def terms_of(row: Row) -> ScheduleTerms:
    """The terms in a row that has `FIELDS`."""
    return ScheduleTerms(
        row.cron,
        row.zone,
        row.catch_up,
        row.catch_up_most,
        row.catch_up_seconds,
        row.overlap,
        row.enabled,
        row.request,
    )
