"""The loop that submits the jobs of schedules at their ticks.

Every assigner process runs it. The row of a schedule decides who submits a tick (`schema/policy/schedules.py`), so no
process leads. What is wrong with a schedule holds up that schedule only: the refusal is stored and the tick is tried
again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any

import structlog
from leasehold.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotReady, QueueFull
from pydantic import ValidationError

from assigner import metrics
from assigner.estimation import Estimator, with_estimate
from schema.fields import first_error
from schema.moves.submit import submit
from schema.policy import priority_classes, schedules
from schema.policy.schedules import LEFT_OUT, DueSchedule, tick_text
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.requests import JobRequest

#: The most seconds between two looks: what a lost wake-up costs.
POLL_INTERVAL = 5.0
#: Seconds until the next look if what is due is held by other processes, or could not be handled.
HELD_INTERVAL = 0.5
#: The most schedules of one look.
LIMIT = 100
#: Bounds in seconds of the wait after a refusal, which doubles each time.
RETRY_FIRST, RETRY_LAST = 5.0, 300.0
#: Names of metadata and of variables by which a job tells its schedule and its tick.
SCHEDULE, TICK = "schedule", "tick"
RESERVED = (SCHEDULE, TICK)
VARIABLES: Mapping[str, str] = {SCHEDULE: "LEASEHOLD_SCHEDULE", TICK: "LEASEHOLD_TICK"}

log = structlog.get_logger()


class Result(StrEnum):
    """What became of a schedule that was due. `held`: another process has its row, or has handled it. `failed`: it was
    refused, and the refusal could not be stored."""

    SUBMITTED = "submitted"
    OVERLAPPED = "overlapped"
    MISSED = "missed"
    REFUSED = "refused"
    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """The result for one schedule. missed: True if ticks were left out. left_out: ticks left out in a row because the
    previous job has not ended. error: why its job was refused."""

    result: Result
    name: str = ""
    instance: str = ""
    tick: datetime | None = None
    missed: bool = False
    left_out: int = 0
    error: str | None = None


def request_of(
    request: Mapping[str, Any],
    *,
    instance: str,
    name: str,
    key: str,
    tick: datetime | None,
    level: str | None,
    estimate: Estimator | None,
) -> dict[str, Any]:
    """The job of a schedule in the form that `moves.submit` takes. Its metadata and variables tell schedule and tick.

    level: service level of a job without level and class. Raises BadInput with the field of the job.
    """
    if "urgency" in request:  # stored by a gateway of a version before, while others were upgraded
        more = {} if request["urgency"] is None else {"priority": 100 - request["urgency"]}
        request = {field: value for field, value in request.items() if field != "urgency"} | more
    told = {SCHEDULE: name} | ({} if tick is None else {TICK: tick_text(tick)})
    fields = {
        **request,
        "instance": instance,
        "key": key,
        "metadata": {**request.get("metadata", {}), **told},
        "env": {**request.get("env", {}), **{VARIABLES[each]: value for each, value in told.items()}},
    }
    try:
        job = JobRequest.model_validate(fields)
    except ValidationError as error:
        field, said = first_error(error)
        raise BadInput(field or "job", said) from None
    job = job if level is None else job.with_service_level(level)
    return with_estimate(job.normal(instance=instance), estimate)


class Schedules:
    """Submits what is due. Several processes may do so at the same time."""

    def __init__(self, database: Database, *, level: str | None = None, estimate: Estimator | None = None) -> None:
        self._database = database
        self.reconfigure(level=level, estimate=estimate)

    def reconfigure(self, *, level: str | None, estimate: Estimator | None) -> None:
        """Use this default service level and this estimator of costs from the next look on."""
        self._level, self._estimate = level, estimate

    def run_once(self) -> float:
        """Handle one tick of each schedule that is due; returns the seconds until the next look."""
        due = self._database.run(lambda connection: schedules.due_schedules(connection, limit=LIMIT))
        done = [self._handled(each) for each in due]
        for each in done:
            _tell(each)
        following = self._database.run(schedules.next_look)
        wait = following.seconds
        metrics.SCHEDULES_FAILING.set(following.failing)
        metrics.SCHEDULES_HELD_UP.set(following.held_up)
        if wait is None:
            return POLL_INTERVAL
        if wait <= 0 and all(each.result in (Result.HELD, Result.FAILED) for each in done):
            return HELD_INTERVAL
        return min(max(wait, 0.0), POLL_INTERVAL)

    def _handled(self, schedule_id: int) -> Outcome:
        """Handle one schedule. Whatever is wrong with it is stored there and keeps no other schedule waiting."""
        try:
            return self._database.run(partial(self._handle, schedule_id=schedule_id))
        except NotReady:
            raise
        except Exception as error:
            return self._refused(schedule_id, error)

    def _refused(self, schedule_id: int, error: Exception) -> Outcome:
        try:
            return self._database.run(partial(_refuse, schedule_id=schedule_id, error=error))
        except NotReady:
            raise
        except Exception:
            log.exception("a refusal of a schedule could not be stored", id=schedule_id, error=_said(error))
            return Outcome(Result.FAILED)

    def _handle(self, connection: Connection, *, schedule_id: int) -> Outcome:
        """Submit one tick and move its schedule on, in one transaction."""
        held = schedules.take_due(connection, schedule_id)
        if held is None:
            return Outcome(Result.HELD)
        plan = held.plan()
        job_id = None
        if plan.tick is None:
            result = Result.MISSED
        elif held.terms.overlap == "skip" and held.is_running:
            result = Result.OVERLAPPED
        else:
            job_id, result = self._submit(connection, held, plan.tick), Result.SUBMITTED
        left_out = result is Result.OVERLAPPED
        schedules.advance(connection, held, plan, job_id=job_id, left_out=left_out)
        count = held.left_out + left_out
        return Outcome(result, held.name, held.instance, plan.tick, missed=plan.missed, left_out=count)

    def _submit(self, connection: Connection, held: DueSchedule, tick: datetime) -> int:
        key = f"schedule:{held.name}:{tick_text(tick)}"
        request = request_of(
            held.terms.request,
            instance=held.instance,
            name=held.name,
            key=key,
            tick=tick,
            level=self._level,
            estimate=self._estimate,
        )
        priority = request.get("priority")
        if held.priority_ceiling is not None:
            if priority is None:
                priority = priority_classes.priority_of(connection, request["own"], place="job")
            if priority < held.priority_ceiling:
                raise Forbidden(f"the schedule may not be more urgent than {held.priority_ceiling}")
        (taken,) = submit(connection, [request], actor=f"schedule:{held.name}")
        return taken.job_id


def _refuse(connection: Connection, *, schedule_id: int, error: Exception) -> Outcome:
    """Store why the job of a schedule was refused, and when it is tried again. Planning its ticks may have failed."""
    held = schedules.take_due(connection, schedule_id)
    if held is None:
        return Outcome(Result.HELD)
    said, tick = _said(error), held.due
    if isinstance(error, Conflict) and not isinstance(error, QueueFull):
        # Another job has the key of this tick, and always will have it.
        plan = held.plan()
        schedules.advance(connection, held, plan, error=said)
        tick = plan.tick or tick
    else:
        wait = min(RETRY_LAST, RETRY_FIRST * 2.0 ** min(held.failures, 30))
        schedules.refuse(connection, held, error=said, wait=wait)
    return Outcome(Result.REFUSED, held.name, held.instance, tick, error=said)


def _said(error: Exception) -> str:
    """The error in one line. Those of the database and of plug-ins go without their text, which may hold values."""
    if isinstance(error, LeaseholdError):
        return str(error).removeprefix("jobs.0.").removeprefix("jobs[0].")
    kind = type(error).__name__
    return f"the job could not be submitted ({kind})"


def _tell(done: Outcome) -> None:
    """Count and log what became of one schedule."""
    if done.result is Result.HELD:
        return
    metrics.SCHEDULE_TICKS.labels(result=done.result).inc()
    if done.result is Result.FAILED:
        return
    where = {"schedule": done.name, "instance": done.instance}
    when = None if done.tick is None else tick_text(done.tick)
    match done.result:
        case Result.REFUSED:
            log.error("a job of a schedule was refused", **where, tick=when, error=done.error)
        case Result.OVERLAPPED:
            tell = log.warning if done.left_out >= LEFT_OUT else log.info
            tell(
                "a tick is left out because the previous job has not ended", **where, tick=when, in_a_row=done.left_out
            )
        case Result.SUBMITTED | Result.MISSED:
            pass
    if done.missed:
        log.warning("missed ticks are left out", **where)
