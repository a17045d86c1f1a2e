"""What the callers' and operators' routes share: who may use them, who calls, the body, and how refusals are told."""

import base64
import uuid
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from sqlalchemy import Connection

from assigner.api import models
from assigner.queries import jobs
from schema import audit, outputs, validation
from schema.errors import Conflict, NotFound
from schema.moves.cancel import Cancelled
from schema.states import FINAL, JobState
from schema.tenancy.tokens import Principal
from schema.validation import MAX_REASON

MAX_REASON_BYTES = MAX_REASON

# What a route's `openapi_extra` tells the gateway's door.
CALLERS: dict[str, Any] = {"x-kinds": ["submitter", "operator"]}
OPERATORS: dict[str, Any] = {"x-kinds": ["operator"], "x-max-body": 64 * 1024}
IDS: dict[str, Any] = CALLERS | {"x-max-body": 1024 * 1024}
OPERATORS_IDS: dict[str, Any] = OPERATORS | {"x-max-body": 1024 * 1024}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of these problem answers, beside those that any route may give."""
    schema = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    codes = sorted({401, 403, 422, 500, 503, *statuses})
    return {status: {"description": "a problem document", "content": schema} for status in codes}


async def _principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def _body(request: Request) -> Any:
    return request.state.body


Caller = Annotated[Principal, Depends(_principal)]
#: The body, which the door has read.
Read = Depends(_body)
JobId = Annotated[str, Path(max_length=200)]


# What the callers' routes share: looks at jobs as units of work, ids as callers write them, and the audit.


#: Most bytes of output in one answer.
OUTPUT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Progress:
    """What a look tells those who wait for one job; `withdrawn` are those of its submissions that were cancelled."""

    final: bool
    withdrawn: frozenset[str]
    attempt: int
    written: int


def read_progress(connection: Connection, keys: Sequence[str]) -> Mapping[str, Progress | None]:
    """What there is to tell those who wait for these jobs, given by their own ids; None of one that is no more."""
    rows = connection.execute(jobs.PROGRESS, {"ids": list(keys)})
    return dict.fromkeys(keys) | {
        str(row.id): Progress(row.final, frozenset(map(str, row.withdrawn)), row.attempt, row.written) for row in rows
    }


def any_final(submissions: AbstractSet[str]) -> Callable[[Progress], bool]:
    """Whether one of these submissions of a job is final; they may become fewer."""
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
    job: str, caller: Principal, start: int, *, noted: bool
) -> Callable[[Connection], tuple[str, models.OutputAnswer]]:
    """Gives the own id of the job that `job` stands for, and what is written of it."""

    def work(connection: Connection) -> tuple[str, models.OutputAnswer]:
        where = {"ids": [job], "instances": caller.instances}
        row = connection.execute(jobs.ATTEMPT, where).one_or_none()
        if row is None:
            raise not_found(job)
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
        )
        return str(row.job), answer

    return work


def cancelled_answer(given: str, found: Cancelled | None) -> models.CancelledJob:
    if found is None:
        return models.CancelledJob(id=given, state=None, changed=False)
    return models.CancelledJob(id=given, state=found.state, changed=found.changed)


def audit_act(
    connection: Connection, caller: Principal, action: str, *, subject: str, details: Mapping[str, Any] | None = None
) -> None:
    """What an operator does is audited; a submitter acts on its own instance and leaves events."""
    if caller.is_operator:
        audit.write(connection, action, actor=caller.actor, subject=subject, details=details)


def audit_access(
    connection: Connection, caller: Principal, action: str, *, subject: str, details: Mapping[str, Any] | None = None
) -> None:
    """An operator's look at payloads or results, noted at most once an hour; the transaction writes nothing else."""
    if caller.is_operator:
        audit.write_access(connection, action, actor=caller.actor, subject=subject, details=details)


def refuse_if_over(found: Sequence[Cancelled]) -> None:
    """Raise Conflict `already_final` if a cancel found only jobs that had ended before it in another way.

    A job that is cancelled already is what was asked for: clients repeat a call whose answer was lost.
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
    """The id as the database writes it. One that cannot be an id is an absent one."""
    found = uuid_or_none(given)
    if found is None:
        raise not_found(given)
    return found


def not_found(given: str) -> NotFound:
    return NotFound(f"id: there is no job '{validation.escaped(given, 80)}'")
