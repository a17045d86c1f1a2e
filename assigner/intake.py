"""The callers' and operators' routes: submit, look, wait, cancel, and the pool at a glance.

Mounted by the gateway, whose door has checked the token's kind and read the body, on a thread, as the type of the
handler's parameter `body`. From `app.state` it takes `run` (work in a transaction, on a thread), `callers` (calls and
reading on a thread), `polls` (long polls by topic) and `timing`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import Field
from sqlalchemy import Connection
from starlette.responses import Response

from assigner import answers, lookups, queries, submission
from assigner.submission import Asked, SubmitRequest
from schema import clock, limits, moves
from schema.states import FINAL
from schema.states import JobState as State
from schema.tokens import Principal

MAX_REASON_BYTES = 500
#: Longest wait a caller may ask for, seconds.
MAX_WAIT = 60.0
#: Status of an answer whose caller hung up; nobody receives it.
HUNG_UP = 499

# What a route's `openapi_extra` tells the gateway's door.
_CALLERS: dict[str, Any] = {"x-kinds": ["submitter", "operator"]}
_OPERATORS: dict[str, Any] = {"x-kinds": ["operator"], "x-max-body": 64 * 1024}
_IDS: dict[str, Any] = _CALLERS | {"x-max-body": 1024 * 1024}


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    schema = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    codes = sorted({401, 403, 422, 500, 503, *statuses})
    return {status: {"description": "a problem document", "content": schema} for status in codes}


class CancelRequest(Asked):
    ids: list[str] = Field(min_length=1, max_length=limits.MAX_BATCH)


class WaitRequest(Asked):
    ids: list[str] = Field(min_length=1, max_length=limits.MAX_BATCH)
    wait: float = Field(default=0.0, ge=0, le=MAX_WAIT, description="seconds the answer may be held back")


class DrainRequest(Asked):
    draining: bool = True
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


async def _principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def _body(request: Request) -> Any:
    return request.state.body


Caller = Annotated[Principal, Depends(_principal)]
_Read = Depends(_body)
JobId = Annotated[str, Path(max_length=200)]

router = APIRouter(prefix="/v1", tags=["callers"])


@router.post("/jobs", responses=_problems(400, 408, 409, 413, 415), openapi_extra=_CALLERS)
async def submit(request: Request, body: Annotated[SubmitRequest, _Read], caller: Caller) -> answers.SubmitAnswer:
    """Submit a batch, all or nothing. The answer comes once the jobs are safe; a key makes a repeat harmless."""
    state = request.app.state

    def work() -> answers.SubmitAnswer:
        requests = submission.normalised(body.jobs, caller=caller)
        taken = submission.submit(state.database, requests, caller=caller)
        return answers.SubmitAnswer(jobs=[answers.SubmittedJob(id=one.public_id, created=one.created) for one in taken])

    found: answers.SubmitAnswer = await state.callers.call(work)
    return found


@router.get("/jobs/{id}", responses=_problems(404), openapi_extra=_CALLERS)
async def show(request: Request, id: JobId, caller: Caller) -> answers.Job:
    """Everything about one job; of a queued one also why it does not run."""

    def work(connection: Connection) -> answers.Job:
        row = queries.job(connection, lookups.job_id(id), instances=caller.instances)
        if row is None:
            raise lookups.absent(id)
        lookups.note_look(connection, caller, "job.read", subject=str(row["id"]))
        return answers.job(row)

    found: answers.Job = await request.app.state.run(work)
    return found


@router.get("/jobs", responses=_problems(400, 404), openapi_extra=_CALLERS)
async def list_jobs(
    request: Request,
    caller: Caller,
    instance: str | None = None,
    state: State | None = None,
    label: str | None = None,
    limit: Annotated[int, Query(ge=1, le=limits.MAX_LIST)] = 100,
    before: Annotated[str | None, Query(max_length=200)] = None,
) -> answers.JobList:
    """Jobs, newest first."""
    filters: dict[str, Any] = {
        "instance": None if instance is None else limits.check_name("instance", instance),
        "state": None if state is None else state.value,
        "label": None if label is None else limits.check_text("label", label, limits.MAX_LABEL),
        "limit": limit,
    }

    def work(connection: Connection) -> answers.JobList:
        last = None
        if before is not None:
            last = queries.row_of(connection, lookups.job_id(before), instances=caller.instances)
            if last is None:
                raise lookups.absent(before)
        rows = queries.page(connection, instances=caller.instances, filters=filters | {"before": last})
        return answers.JobList(jobs=[answers.JobRow.model_validate(row) for row in rows])

    found: answers.JobList = await request.app.state.run(work)
    return found


@router.post("/jobs/cancel", responses=_problems(400, 404, 408, 409, 413, 415), openapi_extra=_IDS)
async def cancel(request: Request, body: Annotated[CancelRequest, _Read], caller: Caller) -> answers.CancelAnswer:
    """Cancel jobs. 404 only if none of them exists; otherwise an absent one has the state null.

    409 `already_final` if all of them exist and had ended before, none by a cancel: their results are kept.
    """
    sync = request.app.state.timing.sync

    def work(connection: Connection) -> answers.CancelAnswer:
        known = {given: lookups.uuid_or_none(given) for given in body.ids}
        wanted = sorted({job for job in known.values() if job is not None})
        done = moves.cancel(connection, wanted, instances=caller.instances, sync=sync, actor=caller.actor)
        found = {job.public_id: job for job in done if job.state is not None}
        if not found:
            raise lookups.absent(body.ids[0])
        if all(job in found for job in known.values()):
            lookups.refuse_if_over(list(found.values()))
        changed = sum(job.changed for job in found.values())
        lookups.note(connection, caller, "jobs.cancel", subject=next(iter(found)), details={"jobs": changed})
        return answers.CancelAnswer(
            jobs=[lookups.cancelled(given, found.get(known[given] or "")) for given in body.ids]
        )

    answer: answers.CancelAnswer = await request.app.state.run(work)
    return answer


@router.post(
    "/jobs/wait", response_model=answers.WaitAnswer, responses=_problems(400, 404, 408, 413, 415), openapi_extra=_IDS
)
async def wait(request: Request, body: Annotated[WaitRequest, _Read], caller: Caller) -> answers.WaitAnswer | Response:
    """The state of jobs, as soon as all are final or `wait` seconds have passed. 404 names one that is absent."""
    state = request.app.state
    ids = await state.callers.read(lambda: list(dict.fromkeys(lookups.job_id(given) for given in body.ids)))
    deadline = clock.monotonic() + min(body.wait, state.max_wait)
    found: dict[str, dict[str, Any]] = {}
    asked: Sequence[str] = ids
    async with state.polls.topic("done", lookups.progress, run=state.run).watch(request) as watch:
        for job in ids:
            watch.add(job, lookups.is_final)
        while True:
            found |= await state.run(lookups.seen(asked, caller, noted=not found))
            for job in asked:
                if found[job]["state"] in FINAL:
                    watch.drop(job)
            left = deadline - clock.monotonic()
            if not watch.keys or left <= 0 or state.polls.stopping:
                break
            asked = [job for job in await watch.wait(left) if job in watch.keys]
            if watch.gone:
                return Response(status_code=HUNG_UP)
            if not asked and clock.monotonic() >= deadline:
                break
    jobs = [answers.JobState.model_validate(found[job]) for job in ids]
    return answers.WaitAnswer(jobs=jobs, done=all(job.state in FINAL for job in jobs))


@router.get("/jobs/{id}/output", response_model=answers.OutputAnswer, responses=_problems(404), openapi_extra=_CALLERS)
async def output(
    request: Request,
    id: JobId,
    caller: Caller,
    start: Annotated[int, Query(ge=0, le=limits.MAX_OUTPUT_BYTES)] = 0,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0,
) -> answers.OutputAnswer | Response:
    """Output from offset `start`, held back up to `wait` seconds while there is none and the job is not final."""
    state = request.app.state
    job = lookups.job_id(id)
    if wait == 0:
        found: answers.OutputAnswer = await state.run(lookups.read(job, caller, start, noted=True))
        return found
    deadline = clock.monotonic() + min(wait, state.max_wait)
    async with state.polls.topic("done", lookups.progress, run=state.run).watch(request) as watch:
        attempt: int | None = None
        watch.add(job, lambda now: now.final or now.written > start or now.attempt != attempt)
        while True:
            found = await state.run(lookups.read(job, caller, start, noted=attempt is None))
            restarted = attempt is not None and found.attempt != attempt
            attempt = found.attempt
            left = deadline - clock.monotonic()
            if found.data or found.final or restarted or left <= 0 or state.polls.stopping:
                return found
            await watch.wait(left)
            if watch.gone:
                return Response(status_code=HUNG_UP)


@router.get("/status", responses=_problems(), openapi_extra=_CALLERS)
async def status(request: Request, caller: Caller) -> answers.Status:
    """The pool at a glance."""
    found = await request.app.state.run(lambda connection: queries.pool(connection, instances=caller.instances))
    return answers.status(found)


@router.get("/bots", responses=_problems(400), openapi_extra=_OPERATORS)
async def bots(
    request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=limits.MAX_BATCH)] = 1000
) -> answers.BotList:
    """Every bot the pool knows, by name."""
    limits.check_text("after", after, 63)
    rows = await request.app.state.run(lambda connection: queries.bots(connection, after=after, limit=limit))
    return answers.BotList(bots=[answers.Bot.model_validate(row) for row in rows])


@router.post("/bots/{name}/drain", responses=_problems(400, 404, 408, 413, 415), openapi_extra=_OPERATORS)
async def drain(
    request: Request, name: str, body: Annotated[DrainRequest, _Read], caller: Caller
) -> answers.DrainAnswer:
    """Ask a bot to take no more work, or to go on."""
    limits.check_name("name", name)
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)
    await request.app.state.run(
        lambda connection: moves.drain(connection, name, draining=body.draining, actor=caller.actor, reason=reason)
    )
    return answers.DrainAnswer(name=name, draining=body.draining)
