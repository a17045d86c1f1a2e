"""The routes that change waiting jobs: hold, release, requeue, and change the priority or the start.

Operators may use all of them, and each change is audited with its reason. Submitters may only change the priority of
their instance's jobs, within the ceiling of their token, and their start; neither of jobs that several submissions
share. The gateway
mounts these routes as it does those of `assigner/api/jobs.py`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from leasehold import wire
from leasehold.errors import BadInput, Forbidden
from leasehold.states import JobState
from pydantic import Field

from assigner.api import models, routing
from assigner.api.routing import IDS, MAX_REASON_BYTES, OPERATORS_IDS, Caller, Read, problems
from assigner.api.selection import Selection, audited, select
from schema import validation
from schema.fields import Moment, Name
from schema.moves.submit_again import MAX_REQUEUE_KEY_BYTES
from schema.moves.waiting import requeue as requeue_moves
from schema.moves.waiting import reschedule as reschedule_moves
from schema.moves.waiting.hold import HoldResult, park, unpark
from schema.moves.waiting.priority import Prioritised, set_priority, set_priority_where
from schema.moves.waiting.requeue import MAX_REQUEUED, REQUEUEABLE, Requeued
from schema.moves.waiting.reschedule import Rescheduled
from schema.postgres.connection import Connection
from schema.tenancy.tokens import Principal

Result = TypeVar("Result", HoldResult, Requeued, Prioritised, Rescheduled)
Reason = Annotated[str, Field(description="for the history and the audit; at most 500 bytes")]


class HoldRequest(Selection):
    reason: Reason = ""


class RequeueRequest(Selection):
    ids: list[str] | None = Field(default=None, min_length=1, max_length=MAX_REQUEUED)
    key: str | None = Field(
        default=None,
        min_length=1,
        description="with the same key, a job is requeued once only; at most 150 bytes",
    )
    reason: Reason = ""


class PriorityRequest(Selection):
    """Jobs by id or by a filter, or up to 10,000 waiting jobs of an instance, with a label, or both."""

    priority: int = Field(ge=validation.PRIORITY_MIN, le=validation.PRIORITY_MAX, description="lower = more urgent")
    instance: Name | None = None
    label: str | None = Field(default=None, min_length=1)
    reason: Reason = ""


class RescheduleRequest(Selection):
    """Jobs, and either a time or seconds from now."""

    schedule_after: Moment | None = Field(default=None, description="a time with an offset, at most a year ahead")
    delay: float | None = Field(default=None, ge=0, le=validation.YEAR, description="seconds; 0 = at once")
    reason: Reason = ""


router = APIRouter(prefix="/v1", tags=["callers"])


@router.post("/jobs/hold", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS_IDS)
async def hold(request: Request, body: Annotated[HoldRequest, Read], caller: Caller) -> models.HeldAnswer:
    """Hold queued jobs; jobs in other states stay as they are. 404 only if none of the ids exists."""
    reason, named = _reason(body.reason), body.named()

    def work(connection: Connection) -> models.HeldAnswer:
        def act(ids: Sequence[str]) -> list[HoldResult]:
            return park(connection, ids, instances=None, reason=reason, actor=caller.actor)

        ids, following = _chosen(connection, caller, body, named, {JobState.QUEUED})
        found = _act_on_each(connection, caller, "jobs.hold", ids, act, reason=reason, details=audited(body))
        return models.HeldAnswer(jobs=[_held_answer("hold", given, found) for given in ids], next=following)

    answer: models.HeldAnswer = await request.app.state.run(work)
    return answer


@router.post("/jobs/release", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS_IDS)
async def release(request: Request, body: Annotated[HoldRequest, Read], caller: Caller) -> models.HeldAnswer:
    """Put held jobs back into the queue with the age they had. 404 only if none of the ids exists."""
    reason, named = _reason(body.reason), body.named()

    def work(connection: Connection) -> models.HeldAnswer:
        def act(ids: Sequence[str]) -> list[HoldResult]:
            return unpark(connection, ids, instances=None, reason=reason, actor=caller.actor)

        ids, following = _chosen(connection, caller, body, named, {JobState.PARKED})
        found = _act_on_each(connection, caller, "jobs.release", ids, act, reason=reason, details=audited(body))
        return models.HeldAnswer(jobs=[_held_answer("release", given, found) for given in ids], next=following)

    answer: models.HeldAnswer = await request.app.state.run(work)
    return answer


@router.post("/jobs/requeue", responses=problems(400, 404, 408, 409, 413, 415), openapi_extra=OPERATORS_IDS)
async def requeue(request: Request, body: Annotated[RequeueRequest, Read], caller: Caller) -> models.RequeueAnswer:
    """Release held jobs, and make a new job like each one that failed, died or was cancelled. Others stay.

    A final job does not change; the history of the new job names it. With `where`, jobs that were requeued before are
    left out; with `ids` each gets another new job. 404 only if none of the ids exists. 409
    `queue_full` if a label or an instance would have more queued jobs than its limit; this call changes nothing then.
    """
    reason, named = _reason(body.reason), body.named()
    key = None if body.key is None else validation.check_text("key", body.key, MAX_REQUEUE_KEY_BYTES)

    def work(connection: Connection) -> models.RequeueAnswer:
        def act(ids: Sequence[str]) -> list[Requeued]:
            return requeue_moves.requeue(
                connection,
                ids,
                instances=None,
                ceiling=None,
                key=key,
                reason=reason,
                actor=caller.actor,
                repeat=body.where is None,
            )

        ids, following = _chosen(connection, caller, body, named, {JobState.PARKED, *REQUEUEABLE})
        found = _act_on_each(connection, caller, "jobs.requeue", ids, act, reason=reason, details=audited(body))
        jobs = []
        for given in ids:
            job = found.get(given)
            if job is None:
                jobs.append(models.RequeuedJob(id=given, state=None, job=None, changed=False))
                continue
            jobs.append(
                models.RequeuedJob(
                    id=given,
                    state=job.state,
                    job=job.successor,
                    changed=job.changed,
                    left_out=job.left_out,
                    why=_why("requeue", given, job, is_repeated=job.successor not in (None, job.public_id)),
                )
            )
        return models.RequeueAnswer(jobs=jobs, next=following)

    answer: models.RequeueAnswer = await request.app.state.run(work)
    return answer


@router.post("/jobs/priority", responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS)
async def priority(request: Request, body: Annotated[PriorityRequest, Read], caller: Caller) -> models.PriorityAnswer:
    """Change the priority of queued and held jobs; jobs in other states keep theirs.

    A submitter cannot change jobs that other submissions share. With ids: 404 only if none of them exists. With a
    filter: at most 10,000 jobs change, and the answer says if there are more.
    """
    reason = _reason(body.reason)
    if not caller.may_use_priority(body.priority):
        raise Forbidden(f"priority: this token may not be more urgent than {caller.priority_ceiling}")
    is_filtered = body.instance is not None or body.label is not None
    if is_filtered and (body.ids is not None or body.where is not None):
        raise BadInput("ids", "give either ids, or where, or an instance, a label or both")
    named = [] if is_filtered else body.named()
    if body.instance is not None and not caller.may_use_instance(body.instance):
        raise Forbidden(f"instance: this token is for the instance '{caller.instance}' only")
    if body.label is not None:
        validation.check_text("label", body.label, validation.MAX_LABEL)
    answer: models.PriorityAnswer = await request.app.state.run(
        lambda connection: (
            _filtered(connection, caller, body, reason)
            if is_filtered
            else _named(connection, caller, body, named, reason)
        )
    )
    return answer


@router.post("/jobs/reschedule", responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS)
async def reschedule(
    request: Request, body: Annotated[RescheduleRequest, Read], caller: Caller
) -> models.RescheduleAnswer:
    """Change the earliest start of blocked, queued and held jobs; jobs in other states stay as they are.

    A submitter cannot change jobs that other submissions share. 404 only if none of the ids exists.
    """
    reason, named = _reason(body.reason), body.named()
    if (body.schedule_after is None) == (body.delay is None):
        raise BadInput("schedule_after", "give either schedule_after or delay")

    def work(connection: Connection) -> models.RescheduleAnswer:
        def act(ids: Sequence[str]) -> list[Rescheduled]:
            return reschedule_moves.reschedule(
                connection,
                ids,
                schedule_after=body.schedule_after,
                delay=body.delay,
                instances=caller.instances,
                shared=caller.is_operator,
                reason=reason,
                actor=caller.actor,
            )

        ids, following = _chosen(connection, caller, body, named, {JobState.BLOCKED, JobState.QUEUED, JobState.PARKED})
        given = {"schedule_after": body.schedule_after, "delay": body.delay, **audited(body)}
        found = _act_on_each(connection, caller, "jobs.reschedule", ids, act, reason=reason, details=given)
        jobs = []
        for each in ids:
            job = found.get(each)
            if job is None:
                jobs.append(models.RescheduledJob(id=each, state=None, starts_at=None, changed=False))
                continue
            why = _why("reschedule", each, job, is_shared=job.is_shared)
            told = {"id": each, "state": job.state, "starts_at": job.starts_at, "changed": job.changed, "why": why}
            jobs.append(models.RescheduledJob.model_validate(told))
        return models.RescheduleAnswer(jobs=jobs, next=following)

    answer: models.RescheduleAnswer = await request.app.state.run(work)
    return answer


def _named(
    connection: Connection, caller: Principal, body: PriorityRequest, named: Sequence[str], reason: str | None
) -> models.PriorityAnswer:
    def act(wanted: Sequence[str]) -> list[Prioritised]:
        return set_priority(
            connection,
            wanted,
            body.priority,
            instances=caller.instances,
            shared=caller.is_operator,
            reason=reason,
            actor=caller.actor,
        )

    ids, following = _chosen(connection, caller, body, named, {JobState.BLOCKED, JobState.QUEUED, JobState.PARKED})
    details = {"priority": body.priority, **audited(body)}
    found = _act_on_each(connection, caller, "jobs.priority", ids, act, reason=reason, details=details)
    jobs = []
    for given in ids:
        job = found.get(given)
        if job is None:
            jobs.append(models.PrioritisedJob(id=given, state=None, priority=None, changed=False))
            continue
        why = _why("priority", given, job, is_shared=job.priority != body.priority)
        told = {"id": given, "state": job.state, "priority": job.priority, "changed": job.changed, "why": why}
        jobs.append(models.PrioritisedJob.model_validate(told))
    count = sum(job.changed for job in set(found.values()))
    return models.PriorityAnswer(jobs=jobs, changed=count, more=following is not None, next=following)


def _filtered(
    connection: Connection, caller: Principal, body: PriorityRequest, reason: str | None
) -> models.PriorityAnswer:
    done = set_priority_where(
        connection,
        body.priority,
        instances=caller.instances if body.instance is None else [body.instance],
        label=body.label,
        shared=caller.is_operator,
        limit=wire.MAX_BATCH,
        reason=reason,
        actor=caller.actor,
    )
    details: dict[str, Any] = {"jobs": done.changed, "priority": body.priority, "label": body.label, "reason": reason}
    routing.audit_act(connection, caller, "jobs.priority", subject=body.instance or "every instance", details=details)
    return models.PriorityAnswer(jobs=[], changed=done.changed, more=done.more)


def _chosen(
    connection: Connection, caller: Principal, body: Selection, named: Sequence[str], states: Collection[JobState]
) -> tuple[Sequence[str], str | None]:
    """The ids of the jobs to act on, and the cursor of the next call."""
    return (named, None) if body.where is None else select(connection, caller, body, states=states)


def _act_on_each(
    connection: Connection,
    caller: Principal,
    action: str,
    ids: Sequence[str],
    act: Callable[[Sequence[str]], Sequence[Result]],
    *,
    reason: str | None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Result]:
    """Act on the jobs with these ids and audit it. Returns the results by id as given.

    Raises NotFound if none of the jobs exists.
    """
    if not ids:
        return {}
    known = {given: routing.uuid_or_none(given) for given in ids}
    wanted = sorted({job for job in known.values() if job is not None})
    done = {job.public_id: job for job in act(wanted) if job.state is not None}
    if not done:
        raise routing.not_found(ids[0])
    changed = sum(job.changed for job in done.values())
    noted = {"jobs": changed, "reason": reason, **(details or {})}
    routing.audit_act(connection, caller, action, subject=next(iter(done)), details=noted)
    return {given: done[job] for given, job in known.items() if job in done}


def _held_answer(act: routing.Act, given: str, found: Mapping[str, HoldResult]) -> models.ChangedJob:
    job = found.get(given)
    if job is None:
        return models.ChangedJob(id=given, state=None, changed=False)
    return models.ChangedJob(id=given, state=job.state, changed=job.changed, why=_why(act, given, job))


def _why(
    act: routing.Act,
    given: str,
    job: HoldResult | Requeued | Prioritised | Rescheduled,
    *,
    is_shared: bool = False,
    is_repeated: bool = False,
) -> str | None:
    """Return why the act did not change the job, None if it did. is_shared: a waiting job is one that others share."""
    if job.changed:
        return None
    if isinstance(job, Requeued) and job.why is not None:
        return job.why
    if is_repeated:
        return "it was queued again before"
    if is_shared and job.state in (JobState.BLOCKED, JobState.QUEUED, JobState.PARKED):
        return "others share it, and only operators change such jobs"
    return routing.left_alone(act, given, str(job.state))


def _reason(given: str) -> str | None:
    return validation.check_text("reason", given, MAX_REASON_BYTES) or None
