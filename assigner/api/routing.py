"""Shared parts of the callers' and operators' routes: permissions, the caller, ids, job reads, audit, refusals."""

import base64
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import psycopg
import structlog
from fastapi import Depends, Path, Request
from leasehold import wire
from leasehold.errors import Conflict, NotFound
from leasehold.states import FINAL, JobState

from assigner.api import models
from assigner.queries import jobs
from schema import audit, outputs
from schema.moves.cancel import Cancelled
from schema.postgres.connection import Connection
from schema.tenancy.tokens import Principal
from schema.validation import MAX_REASON

MAX_REASON_BYTES = MAX_REASON

log = structlog.get_logger()

# Values for a route's `openapi_extra`. The gateway's middleware reads from them which kinds of token may call the route
# and how large its body may be.
CALLERS: dict[str, Any] = {"x-kinds": ["submitter", "operator"]}
OPERATORS: dict[str, Any] = {"x-kinds": ["operator"], "x-max-body": 64 * 1024}
IDS: dict[str, Any] = CALLERS | {"x-max-body": 1024 * 1024}
OPERATORS_IDS: dict[str, Any] = OPERATORS | {"x-max-body": 1024 * 1024}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of these problem answers and of those that any route may give."""
    schema = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    codes = sorted({400, 401, 403, 422, 500, 503, *statuses})
    return {status: {"description": "a problem document", "content": schema} for status in codes}


async def _principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def _body(request: Request) -> Any:
    return request.state.body


Caller = Annotated[Principal, Depends(_principal)]
#: The body, which the gateway's middleware has read and checked.
Read = Depends(_body)
JobId = Annotated[str, Path(max_length=200)]


# Reads of jobs as units of work.


#: What a stored value raises that cannot be used, in the database or here.
UNUSABLE = (psycopg.DataError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


async def judged(run: Callable[[Callable[[Connection], Any]], Awaitable[Any]], work: Callable[..., Any]) -> Any:
    """Run `work`, which judges why jobs wait; if that fails, once more with `judges=False`.

    Jobs are judged by many stored values, and one that cannot be used must hide no list.
    """
    try:
        return await run(work)
    except UNUSABLE:
        log.exception("why the jobs of a list wait could not be judged")
        return await run(partial(work, judges=False))


#: Largest output in one answer, bytes.
OUTPUT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Progress:
    """Progress of one job, for calls that wait for it. `withdrawn`: ids of its cancelled submissions."""

    final: bool
    withdrawn: frozenset[str]
    attempt: int
    written: int


def read_progress(connection: Connection, keys: Sequence[str]) -> Mapping[str, Progress | None]:
    """Read the progress of jobs, given by their own ids; None for a job that no longer exists."""
    rows = connection.execute(jobs.PROGRESS, {"ids": list(keys)})
    return dict.fromkeys(keys) | {
        str(row.id): Progress(row.final, frozenset(row.withdrawn or ()), row.attempt, row.written) for row in rows
    }


def any_final(submissions: AbstractSet[str]) -> Callable[[Progress], bool]:
    """Return a test whether one of these submissions is final. The caller may shrink the set later."""
    return lambda now: now.final or not submissions.isdisjoint(now.withdrawn)


def read_states(
    ids: Sequence[str], caller: Principal, *, noted: bool
) -> Callable[[Connection], dict[str, dict[str, Any]]]:
    def work(connection: Connection) -> dict[str, dict[str, Any]]:
        found = jobs.submission_states(connection, ids, instances=caller.instances)
        for job in ids:
            if job not in found:
                raise not_found(job)
        if noted:
            audit_access(connection, caller, "jobs.read", subject=ids[0], details={"jobs": len(ids)})
        return found

    return work


def read_output(
    job: str, caller: Principal, start: int, *, attempt: int | None = None, noted: bool
) -> Callable[[Connection], tuple[str, models.OutputAnswer]]:
    """Return the work that reads output: it gives the own id of the submission's job, and the answer."""

    def work(connection: Connection) -> tuple[str, models.OutputAnswer]:
        where = {"ids": [job], "instances": caller.instances, "attempt": attempt}
        row = connection.execute(jobs.ATTEMPT, where).one_or_none()
        if row is None:
            raise not_found(job)
        if attempt is not None and row.fence is None:
            raise NotFound(f"attempt: job '{job}' has no attempt {attempt}")
        data = b""
        if row.fence is not None:
            data = outputs.read(connection, row.row_id, fence=row.fence, start=start, limit=OUTPUT_BYTES)
        if noted:
            audit_access(connection, caller, "output.read", subject=job, details={"start": start})
        answer = models.OutputAnswer(
            start=start,
            data=base64.b64encode(data).decode(),
            next=start + len(data),
            state=row.state,
            attempt=row.attempt,
            final=row.final and len(data) < OUTPUT_BYTES,
            lost=row.lost,
        )
        return str(row.job), answer

    return work


def cancelled_answer(given: str, found: Cancelled | None) -> models.ChangedJob:
    if found is None:
        return models.ChangedJob(id=given, state=None, changed=False)
    why = None if found.changed else left_alone("cancel", given, str(found.state))
    return models.ChangedJob(id=given, state=found.state, changed=found.changed, why=why)


#: An act that changes jobs of some states only.
Act = Literal["cancel", "hold", "release", "requeue", "priority", "reschedule"]


def left_alone(act: Act, id: str, state: str) -> str:
    """Return why an act left a job of this state as it is, and what would do what was meant."""
    match JobState(state):
        case JobState.SUCCEEDED if act == "requeue":
            return "only jobs that are held, failed, dead or cancelled are queued again"
        case JobState.CANCELLED:
            return "it is cancelled"
        case JobState.SUCCEEDED | JobState.FAILED | JobState.DEAD:
            return "it has ended"
        case JobState.CANCELLING:
            return "its bot is asked to stop it"
        case JobState.LEASED | JobState.RUNNING:
            return "a bot has it"
        case JobState.DEFERRED:
            return "it is out of the queue until fewer jobs wait"
        case JobState.PARKED if act == "hold":
            return "it is held already"
        case JobState.BLOCKED if act == "hold":
            put_off = f"`leasehold reschedule {id} --in 1h` puts off its start"
            return f"it waits for nodes before it, and only queued jobs are held; {put_off}"
        case _ if act == "priority":
            return "it has this priority already"
        case _ if act == "reschedule":
            return "it has this start already"
        case _ if act == "requeue":
            return f"it waits already; `leasehold explain {id}` says for what"
        case _:
            return f"it is not held; `leasehold explain {id}` says what it waits for"


def audit_act(
    connection: Connection, caller: Principal, action: str, *, subject: str, details: Mapping[str, Any] | None = None
) -> None:
    """Audit a change by an operator. A submitter changes only its own instance, and the jobs' events record that."""
    if caller.is_operator:
        audit.write(connection, action, actor=caller.actor, subject=subject, details=details)


def audit_access(
    connection: Connection, caller: Principal, action: str, *, subject: str, details: Mapping[str, Any] | None = None
) -> None:
    """Audit an operator's read of payloads or results, at most once an hour. The transaction writes nothing else."""
    if caller.is_operator:
        audit.write_access(connection, action, actor=caller.actor, subject=subject, details=details)


def refuse_if_over(found: Sequence[Cancelled]) -> None:
    """Raise Conflict `already_final` if a cancel found only jobs that had ended before and were not cancelled.

    A job that is cancelled already is no conflict: clients repeat a call whose answer was lost.
    """
    if any(job.changed or job.state not in FINAL or job.state == JobState.CANCELLED for job in found):
        return
    first = f"job '{found[0].public_id}' is {found[0].state} already"
    others = f", and the other {len(found) - 1} are final too" if len(found) > 1 else ""
    raise Conflict("already_final", f"{first}{others}; results are kept")


def uuid_or_none(given: str) -> str | None:
    try:
        return str(uuid.UUID(given))
    except ValueError:
        return None


def job_id(given: str) -> str:
    """Return the id in the form of the database. Raises NotFound for a text that cannot be an id."""
    found = uuid_or_none(given)
    if found is None:
        raise not_found(given)
    return found


def not_found(given: str) -> NotFound:
    return NotFound(f"id: there is no job '{wire.escaped(given, 80)}'")
