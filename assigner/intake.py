"""The callers' and operators' routes: submit, look, wait, cancel, and the pool at a glance.

Mounted by the gateway, whose door has checked the token's kind and read the body, on a thread, as the type of the
handler's parameter `body`. From `app.state` it takes `run` (work in a transaction, on a thread), `callers` (calls and
reading on a thread), `polls` (long polls by topic) and `timing`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy import Connection
from starlette.responses import Response

from assigner import (
    answers,
    attempts,
    explain,
    glance,
    graph_routes,
    lookups,
    queries,
    standing,
    submission,
)
from assigner.api import operations, resources
from assigner.books import RULES, Rules
from assigner.routes import CALLERS, IDS, OPERATORS, Caller, JobId, Read, problems
from assigner.submission import Asked, SubmitRequest
from schema import clock, limits, moves
from schema.errors import Forbidden
from schema.states import FINAL
from schema.states import JobState as State

#: Longest wait a caller may ask for, seconds.
MAX_WAIT = 60.0
#: Status of an answer whose caller hung up; nobody receives it.
HUNG_UP = 499


class CancelRequest(Asked):
    ids: list[str] = Field(min_length=1, max_length=limits.MAX_BATCH)
    all_submissions: bool = Field(
        default=False, description="operators only: cancel the jobs themselves, whoever else shares them"
    )


class WaitRequest(Asked):
    ids: list[str] = Field(min_length=1, max_length=limits.MAX_BATCH)
    wait: float = Field(default=0.0, ge=0, le=MAX_WAIT, description="seconds the answer may be held back")


router = APIRouter(prefix="/v1", tags=["callers"])


@router.post("/jobs", responses=problems(400, 408, 409, 413, 415), openapi_extra=CALLERS)
async def submit(request: Request, body: Annotated[SubmitRequest, Read], caller: Caller) -> answers.SubmitAnswer:
    """Submit a batch, all or nothing. The answer comes once the jobs are safe; a key makes a repeat harmless.

    409 `key_reused` if a key was used before for another request, and `queue_full` if a label may not have so many
    queued jobs: the same request may be taken later.
    """
    state = request.app.state

    def work() -> answers.SubmitAnswer:
        requests = submission.normalised(body.jobs, caller=caller, estimate=state.estimate)
        taken = submission.submit(state.database, requests, caller=caller)
        return answers.SubmitAnswer(jobs=[answers.SubmittedJob(id=one.public_id, created=one.created) for one in taken])

    found: answers.SubmitAnswer = await state.callers.call(work)
    return found


@router.get("/jobs/{id}", responses=problems(404), openapi_extra=CALLERS)
async def show(request: Request, id: JobId, caller: Caller) -> answers.Job:
    """Everything about one job; of a queued one also why it does not run."""

    def work(connection: Connection) -> answers.Job:
        row = queries.job(connection, lookups.job_id(id), instances=caller.instances)
        if row is None:
            raise lookups.absent(id)
        lookups.note_look(connection, caller, "job.read", subject=str(row["id"]))
        events = attempts.told(row["events"], instance=row["instance"], everything=caller.instances is None)
        held_up = explain.held_up(connection, row["row_id"], cooldown=request.app.state.desk.cooldown)
        return answers.job(row | {"events": events, "held_up": held_up})

    found: answers.Job = await request.app.state.run(work)
    return found


@router.get("/jobs", responses=problems(400, 404), openapi_extra=CALLERS)
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


@router.post("/jobs/cancel", responses=problems(400, 404, 408, 409, 413, 415), openapi_extra=IDS)
async def cancel(request: Request, body: Annotated[CancelRequest, Read], caller: Caller) -> answers.CancelAnswer:
    """Cancel jobs. 404 only if none of them exists; otherwise an absent one has the state null.

    A job that other submissions share goes on until the last of them is cancelled.

    409 `already_final` if all of them exist and had ended before, none by a cancel: their results are kept.
    """
    sync, whole = request.app.state.timing.sync, body.all_submissions
    if whole and not caller.is_operator:
        raise Forbidden("all_submissions: is for operators")

    def work(connection: Connection) -> answers.CancelAnswer:
        known = {given: lookups.uuid_or_none(given) for given in body.ids}
        wanted = sorted({job for job in known.values() if job is not None})
        done = moves.cancel(connection, wanted, instances=caller.instances, sync=sync, actor=caller.actor, whole=whole)
        found = {job.public_id: job for job in done if job.state is not None}
        if not found:
            raise lookups.absent(body.ids[0])
        if all(job in found for job in known.values()):
            lookups.refuse_if_over(list(found.values()))
        changed = sum(job.changed for job in found.values())
        lookups.note(
            connection,
            caller,
            "jobs.cancel",
            subject=next(iter(found)),
            details={"jobs": changed} | ({"all_submissions": True} if whole else {}),
        )
        return answers.CancelAnswer(
            jobs=[lookups.cancelled(given, found.get(known[given] or "")) for given in body.ids]
        )

    answer: answers.CancelAnswer = await request.app.state.run(work)
    return answer


@router.post(
    "/jobs/wait", response_model=answers.WaitAnswer, responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS
)
async def wait(request: Request, body: Annotated[WaitRequest, Read], caller: Caller) -> answers.WaitAnswer | Response:
    """The state of jobs, as soon as all are final or `wait` seconds have passed. 404 names one that is absent."""
    state = request.app.state
    ids = await state.callers.read(lambda: list(dict.fromkeys(lookups.job_id(given) for given in body.ids)))
    deadline = clock.monotonic() + min(body.wait, state.max_wait)
    found: dict[str, dict[str, Any]] = {}
    asked: Sequence[str] = ids
    pending: dict[str, set[str]] = {}  # by job, which is what has news
    async with state.polls.topic("done", lookups.progress, run=state.run).watch(request) as watch:
        while True:
            found |= await state.run(lookups.seen(asked, caller, noted=not found))
            for each in asked:
                mine = pending.setdefault(str(found[each]["job"]), set())
                (mine.discard if found[each]["state"] in FINAL else mine.add)(each)
            for job in {str(found[each]["job"]) for each in asked}:
                if not pending[job]:
                    watch.drop(job)
                elif job not in watch.keys:
                    watch.add(job, lookups.ended(pending[job]))
            left = deadline - clock.monotonic()
            if not watch.keys or left <= 0 or state.polls.stopping:
                break
            asked = [each for job in await watch.wait(left) if job in watch.keys for each in pending[job]]
            if watch.gone:
                return Response(status_code=HUNG_UP)
            if not asked and clock.monotonic() >= deadline:
                break
    jobs = [answers.JobState.model_validate(found[job]) for job in ids]
    return answers.WaitAnswer(jobs=jobs, done=all(job.state in FINAL for job in jobs))


@router.get("/jobs/{id}/output", response_model=answers.OutputAnswer, responses=problems(404), openapi_extra=CALLERS)
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
        found: answers.OutputAnswer
        _, found = await state.run(lookups.read(job, caller, start, noted=True))
        return found
    deadline = clock.monotonic() + min(wait, state.max_wait)
    async with state.polls.topic("done", lookups.progress, run=state.run).watch(request) as watch:
        attempt: int | None = None
        over = lookups.ended({job})

        def news(now: lookups.Progress) -> bool:
            return over(now) or now.written > start or now.attempt != attempt

        while True:
            shared, found = await state.run(lookups.read(job, caller, start, noted=attempt is None))
            if shared not in watch.keys:
                watch.add(shared, news)
            restarted = attempt is not None and found.attempt != attempt
            attempt = found.attempt
            left = deadline - clock.monotonic()
            if found.data or found.final or restarted or left <= 0 or state.polls.stopping:
                return found
            await watch.wait(left)
            if watch.gone:
                return Response(status_code=HUNG_UP)


@router.get("/status", responses=problems(), openapi_extra=CALLERS)
async def status(request: Request, caller: Caller) -> standing.Status:
    """The pool at a glance."""
    state = request.app.state
    found = await state.run(
        lambda connection: glance.pool(connection, instances=caller.instances, cooldown=state.desk.cooldown)
    )
    return standing.status(found)


@router.get("/bots", responses=problems(400), openapi_extra=OPERATORS)
async def bots(
    request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=limits.MAX_BATCH)] = 1000
) -> answers.BotList:
    """Every bot the pool knows, by name."""
    limits.check_text("after", after, 63)
    rows = await request.app.state.run(lambda connection: queries.bots(connection, after=after, limit=limit))
    return answers.BotList(bots=[answers.Bot.model_validate(row) for row in rows])


#: Everything that callers and operators may ask for here.
@router.get("/jobs/{id}/explain", responses=problems(404), openapi_extra=CALLERS)
async def explain_job(request: Request, id: JobId, caller: Caller) -> explain.Explanation:
    """Why a job runs where it runs, or why it does not run: every gate with its evidence, and what would start it.

    Everybody is told which bots had the job. A submitter is told of no other bot by name, of no other tenant, and has
    only those bots counted that serve its instance. Of a submission that was cancelled, only that is told.
    """
    cooldown: float = request.app.state.desk.cooldown
    rules: Rules = getattr(request.app.state, "rules", RULES)

    def work(connection: Connection) -> explain.Explanation:
        found = explain.explain(
            connection, lookups.job_id(id), instances=caller.instances, cooldown=cooldown, rules=rules
        )
        if found is None:
            raise lookups.absent(id)
        return found

    found: explain.Explanation = await request.app.state.run(work)
    return found


ROUTERS = (
    router,
    graph_routes.router,
    operations.router,
    resources.router,
)
