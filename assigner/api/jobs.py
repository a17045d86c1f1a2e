"""The callers' routes for jobs: submit, show, list, wait, output, cancel, explain; also pool status and bots.

The gateway mounts these routes. Its middleware has checked the kind of the token, and has read the body on a thread as
the type of the handler's parameter `body`. The handlers use `app.state`: `run` (work in a transaction, on a thread),
`callers` (calls and reads on a thread), `polls` (long polls by topic) and `timing`.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from leasehold import wire
from leasehold.errors import BadInput, Forbidden
from leasehold.states import FINAL, WAITING, JobState
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from assigner.admission.rules import RULES
from assigner.api import (
    builds,
    graphs,
    metadata,
    models,
    operations,
    pool_samples,
    resources,
    results,
    routing,
    schedules,
    submission,
)
from assigner.api.operators import canaries, health, policies, policy, shadows, simulations
from assigner.api.routing import CALLERS, IDS, OPERATORS, Caller, JobId, Read, problems
from assigner.api.selection import Selection, audited, select
from assigner.api.submission import RequestModel, SubmitRequest
from assigner.explain import answer as explanation
from assigner.explain import forecast, planned
from assigner.queries import job_names, listing
from assigner.queries import jobs as job_queries
from assigner.queries import status as status_queries
from schema import clock, validation
from schema.checkpoints import read_progress
from schema.diagnostics.invariants import SNAPSHOT
from schema.filters import Direction, JobFilter, Sort
from schema.moves import cancel as cancel_moves
from schema.moves import submit as submit_moves
from schema.moves.submit import Submitted
from schema.postgres.connection import Connection
from schema.tenancy.tokens import Principal

#: Longest wait a caller may ask for, seconds.
MAX_WAIT = 60.0
#: Status of the answer to a caller that has disconnected; nobody receives it.
HUNG_UP = 499
#: States in which a cancel changes a job.
CANCELLABLE = frozenset(JobState) - FINAL - {JobState.CANCELLING}


#: The most jobs of one page for which the answer has a forecast.
MOST_FORESEEN = 50


class ListQuery(JobFilter):
    model_config = ConfigDict(defer_build=False)

    sort: Sort | None = Field(
        default=None, description="what the list is sorted by; unset: the end if the filter names it, else the submit"
    )
    order: Direction | None = Field(default=None, description="unset: the newest or the most urgent first")
    limit: int = Field(default=100, ge=1, le=wire.MAX_LIST)
    cursor: str | None = Field(default=None, max_length=500, description="`next` of the page before")
    before: str | None = Field(default=None, max_length=200, description="only jobs submitted before this one")
    forecast: bool = Field(
        default=False,
        description=f"tell of the first {MOST_FORESEEN} waiting jobs of the page when they will start; some reads each",
    )
    primary: bool = Field(
        default=False,
        description="read from the primary, also where lists are read from a standby, which may be behind",
    )


class CancelRequest(Selection):
    all_submissions: bool = Field(
        default=False, description="operators only: cancel the jobs themselves, even if other submissions share them"
    )


class WaitRequest(RequestModel):
    ids: list[str] = Field(min_length=1, max_length=wire.MAX_BATCH)
    wait: float = Field(default=0.0, ge=0, le=MAX_WAIT, description="longest time to wait for the answer, seconds")
    any: bool = Field(default=False, description="true: answer once one of the jobs is final, not only once all are")
    progress: bool = Field(default=False, description="true: tell how far jobs that are not final say that they are")


class FindRequest(RequestModel):
    names: list[str] = Field(
        min_length=1,
        max_length=wire.MAX_NAMES,
        description="short forms such as 2c8a-6789ab: the digits 5 to 8 of an id and at least its last 6; @last, the "
        "newest job that this token has submitted or joined; @failed, the one of its jobs that failed last",
    )


class PlanAnswer(BaseModel):
    """What a submit of these jobs would do, in their order. Nothing is stored."""

    jobs: list[planned.PlannedJob]


router = APIRouter(prefix="/v1", tags=["callers"])


#: `?plan` alone means true.
Plan = Annotated[
    bool,
    BeforeValidator(lambda given: given == "" or given),
    Query(description=f"true: store nothing, and tell what would become of up to {planned.MAX_PLANNED} jobs"),
]


@router.post("/jobs", responses=problems(400, 408, 409, 413, 415), openapi_extra=CALLERS)
async def submit(
    request: Request, body: Annotated[SubmitRequest, Read], caller: Caller, plan: Plan = False
) -> models.SubmitAnswer | PlanAnswer:
    """Submit a batch, all or nothing. The answer comes once the jobs are durable; a key makes a repeat harmless.

    409 `key_reused` if a key was used before for another request. 409 `queue_full` if a label or an instance would have
    more queued jobs than its limit: the same request may be taken later. 409 `key_taken` if a job has the dedup_key
    that must not be joined or replaced. With `plan` errors are the same, and the answer tells of each job what a submit
    would do: whether it joins another one, which bot would take it now, or what it waits for.
    """
    state = request.app.state
    if plan:
        if len(body.jobs) > planned.MAX_PLANNED:
            raise BadInput("jobs", f"are {len(body.jobs)}, and at most {planned.MAX_PLANNED} are planned at once")
        return PlanAnswer(jobs=await state.callers.call(partial(_planned, state, body, caller)))

    def work() -> models.SubmitAnswer:
        requests = submission.normalised_requests(
            body.jobs, caller=caller, estimate=state.estimate, default_level=state.default_level
        )
        # Before the jobs are stored, so that a failure to read leaves nothing behind.
        advice = {} if state.advise is None else state.advise(requests)
        taken = submission.submit(state.database, requests, caller=caller)
        return models.SubmitAnswer(
            jobs=[models.SubmittedJob(id=one.public_id, created=one.created) for one in taken],
            advice=[models.EstimateAdvice(job=index, text=text) for index, text in advice.items()],
        )

    found: models.SubmitAnswer = await state.callers.call(work)
    return found


def _planning(state: Any) -> planned.Planning:
    return replace(getattr(state, "planning", planned.Planning()), sync=state.timing.sync)


def _planned(state: Any, body: SubmitRequest, caller: Principal) -> list[planned.PlannedJob]:
    requests = submission.normalised_requests(
        body.jobs, caller=caller, estimate=state.estimate, default_level=state.default_level
    )

    def taken(connection: Connection) -> list[Submitted]:
        submission.check_points(connection, requests, caller)
        return submit_moves.submit(connection, requests, actor=caller.actor)

    planning = _planning(state)
    found: list[planned.PlannedJob] = state.database.run(
        lambda connection: planned.plan(
            connection, taken, instances=caller.instances, planning=planning, chance=random.SystemRandom()
        )
    )
    return found


@router.get("/jobs/{id}", responses=problems(404), openapi_extra=CALLERS)
async def show(
    request: Request,
    id: JobId,
    caller: Caller,
    with_forecast: Annotated[
        bool, Query(alias="forecast", description="tell of a waiting job when it will start, which takes some reads")
    ] = False,
) -> models.Job:
    """Show everything about one job, and for a waiting job why it does not run."""

    def work(connection: Connection) -> models.Job:
        row = job_queries.job(connection, routing.job_id(id), instances=caller.instances)
        if row is None:
            raise routing.not_found(id)
        routing.audit_access(connection, caller, "job.read", subject=str(row["id"]))
        events = explanation.visible_events(
            row["events"], instance=row["instance"], everything=caller.instances is None
        )
        why, told, unmatchable, by = None, None, False, _by(request, caller)
        if row["state"] in (JobState.BLOCKED, JobState.QUEUED):
            why, told = explanation.why_it_waits(connection, row["row_id"], with_forecast=with_forecast, **by)
            unmatchable = row["state"] == JobState.QUEUED and status_queries.is_unmatchable(connection, row["row_id"])
        elif with_forecast:
            told = forecast.of_job(connection, row["row_id"], row["state"], **by)
        return models.job(row | {"events": events, "why_it_waits": why, "unmatchable": unmatchable, "forecast": told})

    found: models.Job = await request.app.state.run(work)
    return found


def _by(request: Request, caller: Principal) -> dict[str, Any]:
    """Return by what an explanation judges: what the caller may see, and what the assigners decide by."""
    return {
        "everything": caller.instances is None,
        "cooldown": request.app.state.sync_service.cooldown,
        "rules": getattr(request.app.state, "rules", RULES),
    }


@router.get("/jobs", responses=problems(400, 404), openapi_extra=CALLERS)
async def list_jobs(
    request: Request,
    caller: Caller,
    asked: Annotated[ListQuery, Query()],
) -> models.JobList:
    """List the jobs that pass all filters, by default the newest first.

    A page may hold fewer jobs than `limit` and still have a `next`: it has looked at many jobs that did not pass. 400
    for an order in which no index has the jobs, if a filter leaves more than 10,000 of them.
    """
    by = _by(request, caller)

    def work(connection: Connection, *, judges: bool = True) -> models.JobList:
        before = None
        if asked.forecast:
            connection.execute(SNAPSHOT)  # a job that waits at first does so until its start is foreseen
        if asked.before is not None:
            before = job_queries.job_row_id(connection, routing.job_id(asked.before), instances=caller.instances)
            if before is None:
                raise routing.not_found(asked.before)
        wanted = listing.Request.of(
            asked, limit=asked.limit, sort=asked.sort, direction=asked.order, before=before, cursor=asked.cursor
        )
        found = listing.page(connection, wanted, instances=caller.instances)
        rows = job_queries.listed(connection, found.jobs)
        whys = explanation.why_in_few_words(connection, rows, **by) if judges else explanation.by_facts_alone(rows)
        waiting = [row for row in rows if asked.forecast and judges and row["state"] in WAITING][:MOST_FORESEEN]
        starts = {row["row_id"]: forecast.of_job(connection, row["row_id"], row["state"], **by) for row in waiting}
        told = [
            models.ListedJob.model_validate(row | {"why": why, "forecast": starts.get(row["row_id"])})
            for row, why in zip(rows, whys, strict=True)
        ]
        return models.JobList(jobs=told, next=found.next)

    state = request.app.state
    found: models.JobList = await routing.judged(state.run if asked.primary else state.read, work)
    return found


@router.post("/jobs/find", responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS)
async def find(request: Request, body: Annotated[FindRequest, Read], caller: Caller) -> models.FoundIds:
    """Return the whole ids of jobs that are named in short, in the order of the request.

    400 for a short form that stands for several jobs, whose ids it tells; 404 for one that stands for none. Jobs that
    the caller may not see are none.
    """

    def work(connection: Connection) -> models.FoundIds:
        found = job_names.find(connection, body.names, instances=caller.instances, actor=caller.actor)
        return models.FoundIds(ids=[found[name] for name in body.names])

    answer: models.FoundIds = await request.app.state.run(work)
    return answer


@router.post("/jobs/cancel", responses=problems(400, 404, 408, 409, 413, 415), openapi_extra=IDS)
async def cancel(request: Request, body: Annotated[CancelRequest, Read], caller: Caller) -> models.CancelAnswer:
    """Cancel jobs, by their ids or by a filter.

    404 only if none of the ids exists; otherwise an unknown id has the state null.

    A job that other submissions share goes on until the last of them is cancelled.

    409 `already_final` if all the jobs exist and had ended before, none by a cancel: their results are kept.
    """
    sync, all_submissions = request.app.state.timing.sync, body.all_submissions
    if all_submissions and not caller.is_operator:
        raise Forbidden("all_submissions: is for operators")
    named = body.named()

    def work(connection: Connection) -> models.CancelAnswer:
        ids, following = named, None
        if body.where is not None:
            ids, following = select(connection, caller, body, states=CANCELLABLE)
        if not ids:
            return models.CancelAnswer(jobs=[], next=following)
        known = {given: routing.uuid_or_none(given) for given in ids}
        wanted = sorted({job for job in known.values() if job is not None})
        done = cancel_moves.cancel(
            connection,
            wanted,
            instances=caller.instances,
            sync=sync,
            actor=caller.actor,
            all_submissions=all_submissions,
        )
        found = {job.public_id: job for job in done if job.state is not None}
        if not found:
            raise routing.not_found(ids[0])
        if body.where is None and all(job in found for job in known.values()):
            routing.refuse_if_over(list(found.values()))
        changed = sum(job.changed for job in found.values())
        routing.audit_act(
            connection,
            caller,
            "jobs.cancel",
            subject=next(iter(found)),
            details={"jobs": changed} | ({"all_submissions": True} if all_submissions else {}) | audited(body),
        )
        jobs = [routing.cancelled_answer(given, found.get(known[given] or "")) for given in ids]
        return models.CancelAnswer(jobs=jobs, next=following)

    answer: models.CancelAnswer = await request.app.state.run(work)
    return answer


def _progress(state: Any) -> Any:
    """Return the topic of jobs for which callers wait."""
    return state.polls.topic("done", routing.read_progress, run=partial(state.run, kept_plans=True))


@router.post(
    "/jobs/wait", response_model=models.WaitAnswer, responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS
)
async def wait(request: Request, body: Annotated[WaitRequest, Read], caller: Caller) -> models.WaitAnswer | Response:
    """Return the states of jobs once all are final, with `any` once one is, or after `wait` seconds.

    404 names an unknown id.
    """
    state = request.app.state
    ids = await state.callers.read(lambda: list(dict.fromkeys(routing.job_id(given) for given in body.ids)))
    deadline = clock.monotonic() + min(body.wait, state.max_wait)
    found: dict[str, dict[str, Any]] = {}
    asked: Sequence[str] = ids
    pending: dict[str, set[str]] = {}  # submissions by job: news come by job
    async with _progress(state).watch(request.state.hang_up) as watch:
        while True:
            found |= await state.run(routing.read_states(asked, caller, noted=not found), kept_plans=True)
            for each in asked:
                mine = pending.setdefault(str(found[each]["job"]), set())
                (mine.discard if found[each]["state"] in FINAL else mine.add)(each)
            for job in {str(found[each]["job"]) for each in asked}:
                if not pending[job]:
                    watch.drop(job)
                elif job not in watch.keys:
                    watch.add(job, routing.any_final(pending[job]))
            left = deadline - clock.monotonic()
            enough = body.any and any(each["state"] in FINAL for each in found.values())
            if not watch.keys or enough or left <= 0 or state.polls.stopping:
                break
            asked = [each for job in await watch.wait(left) if job in watch.keys for each in pending[job]]
            if watch.gone:
                return Response(status_code=HUNG_UP)
            if not asked and clock.monotonic() >= deadline:
                break
    if body.progress and (running := [job for job in ids if found[job]["state"] not in FINAL]):
        own = {str(found[job]["job"]) for job in running}
        told = await state.run(lambda connection: read_progress(connection, sorted(own)))
        found |= {job: found[job] | {"progress": told.get(str(found[job]["job"]))} for job in running}
    jobs = [models.JobState.model_validate(found[job]) for job in ids]
    return models.WaitAnswer(jobs=jobs, done=all(job.state in FINAL for job in jobs))


@router.get("/jobs/{id}/output", response_model=models.OutputAnswer, responses=problems(404), openapi_extra=CALLERS)
async def output(
    request: Request,
    id: JobId,
    caller: Caller,
    start: Annotated[int, Query(ge=0, le=validation.MAX_OUTPUT_BYTES)] = 0,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
) -> models.OutputAnswer | Response:
    """Return output from offset `start`. Waits up to `wait` seconds for output or the end of the job.

    attempt: number of the attempt, from 1; without it the newest. 404 if there is none of that number.
    """
    state = request.app.state
    job = routing.job_id(id)
    if wait == 0:
        found: models.OutputAnswer
        _, found = await state.run(routing.read_output(job, caller, start, attempt=attempt, noted=True))
        return found
    deadline = clock.monotonic() + min(wait, state.max_wait)
    async with _progress(state).watch(request.state.hang_up) as watch:
        seen: int | None = None
        over = routing.any_final({job})

        def news(now: routing.Progress) -> bool:
            return over(now) or now.written > start or now.attempt != seen

        while True:
            shared, found = await state.run(
                routing.read_output(job, caller, start, attempt=attempt, noted=seen is None), kept_plans=True
            )
            if shared not in watch.keys:
                watch.add(shared, news)
            restarted = seen is not None and found.attempt != seen
            seen = found.attempt
            left = deadline - clock.monotonic()
            if found.data or found.final or restarted or left <= 0 or state.polls.stopping:
                return found
            await watch.wait(left)
            if watch.gone:
                return Response(status_code=HUNG_UP)


@router.get("/status", responses=problems(), openapi_extra=CALLERS)
async def status(request: Request, caller: Caller) -> models.PoolStatus:
    """Show the state of the pool."""
    state = request.app.state
    found = await state.read(
        lambda connection: status_queries.pool_status(
            connection, instances=caller.instances, cooldown=state.sync_service.cooldown
        )
    )
    standby = state.standby if caller.instances is None else None
    reads = standby and models.Reads(
        standby=not standby.trouble, lag_seconds=standby.lag, reason=standby.trouble or None
    )
    return models.status_answer(found, reads)


@router.get("/labels", responses=problems(), openapi_extra=CALLERS)
async def labels(request: Request, caller: Caller) -> models.LabelList:
    """List the labels of the caller's queued and parked jobs, of the first 500 labels in the pool."""
    found = await request.app.state.read(
        lambda connection: job_queries.waiting_labels(connection, instances=caller.instances)
    )
    return models.LabelList(labels=found)


@router.get("/bots", responses=problems(400), openapi_extra=OPERATORS)
async def bots(
    request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=wire.MAX_BATCH)] = 1000
) -> models.BotList:
    """List every bot that the pool knows, by name."""
    validation.check_text("after", after, 63)

    def read(connection: Connection) -> models.BotList:
        rows = job_queries.bots(connection, after=after, limit=limit)
        return models.BotList.model_validate({"bots": rows, "versions": job_queries.bot_versions(connection)})

    found: models.BotList = await request.app.state.read(read)
    return found


@router.get("/jobs/{id}/explain", responses=problems(404), openapi_extra=CALLERS)
async def explain_job(request: Request, id: JobId, caller: Caller) -> explanation.Explanation:
    """Explain a job: why it runs where it runs, or every gate with its evidence and what would help.

    Every caller sees which bots had the job. A submitter sees the names of no other bots and nothing of other tenants;
    only bots that serve its instance are counted. For a cancelled submission, the answer says only that.
    """
    by = _planning(request.app.state)

    def work(connection: Connection) -> explanation.Explanation:
        found = explanation.explain(
            connection, routing.job_id(id), instances=caller.instances, quotas=by.quotas, sync=by.sync, rules=by.rules
        )
        if found is None:
            raise routing.not_found(id)
        return found

    found: explanation.Explanation = await request.app.state.run(work)
    return found


#: The routers that the gateway mounts for callers and operators, beside that of `backlog`.
ROUTERS = (
    router,
    results.router,
    metadata.router,
    builds.router,
    graphs.router,
    schedules.router,
    pool_samples.router,
    operations.router,
    health.router,
    policy.router,
    # These two come before policies, which take any word for a number.
    canaries.router,
    shadows.router,
    policies.router,
    simulations.router,
    resources.router,
)
