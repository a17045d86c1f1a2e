"""The routes of schedules: list, show, set, enable, run at once and remove.

A schedule belongs to an instance. Operators may use all of them, a submitter those of its instance.
"""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request
from leasehold import wire
from leasehold.errors import BadInput, Forbidden
from pydantic import BaseModel, Field, field_validator
from sqlalchemy import Connection

from assigner.api import routing, submission
from assigner.api.routing import CALLERS, Caller, Read, problems
from assigner.api.submission import RequestModel
from assigner.maintenance.schedules import RESERVED, request_of
from schema import validation
from schema.fields import Name, Zone
from schema.moves.submit import submit
from schema.policy import cron, schedules
from schema.policy.cron import CatchUp
from schema.policy.schedules import Overlap, ScheduleTerms
from schema.requests import DEFAULT_INSTANCE, JobRequest, flat
from schema.tenancy.tokens import Principal

#: Fields of a job that belong to its schedule.
OF_THE_SCHEDULE = ("instance", "key", "dedup_key")
#: Longest key of a run, bytes.
MAX_RUN_KEY = 100
DAY = 86_400.0

ScheduleName = Annotated[str, Path(max_length=200, description="name of the schedule, unique in its instance")]
Instance = Annotated[str | None, Query(description="instance of the schedule; unset: that of the token, or `default`")]


class ScheduleRequest(RequestModel):
    """A job that is submitted at every tick of a cron expression."""

    instance: Name | None = Field(
        default=None, description="Instance of the schedule and its jobs. Unset: that of the token, or `default`."
    )
    cron: str = Field(description=f"Cron expression of five fields: {cron.FIELDS}.")
    zone: Zone = Field(default="UTC", description="Time zone of the expression, such as Europe/Berlin.")
    catch_up: CatchUp = Field(
        default="skip",
        description="What is done about ticks that were missed in an outage: `skip` submits the newest one, `all` the "
        "newest `catch_up_most`, `none` none.",
    )
    catch_up_most: int = Field(default=10, ge=1, le=1000, description="Most missed ticks that `all` submits.")
    catch_up_seconds: float = Field(
        default=DAY,
        ge=0,
        le=validation.MAX_TIMEOUT,
        description="Age in seconds up to which `skip` submits a missed tick.",
    )
    overlap: Overlap = Field(
        default="allow", description="`skip` leaves a tick out while the previous job of the schedule has not ended."
    )
    enabled: bool = Field(default=True, description="Only enabled schedules have ticks.")
    job: JobRequest = Field(description="The job, without instance, key and dedup_key.")

    @field_validator("job", mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        return flat(given)


class EnableRequest(RequestModel):
    enabled: bool = Field(description="false: no ticks until it is enabled again; what it misses is not made up for")


class RunRequest(RequestModel):
    key: str = Field(
        min_length=1, max_length=MAX_RUN_KEY, description="a repeated call with the same key makes one job"
    )


class ScheduleRow(BaseModel):
    name: str
    instance: str
    cron: str
    zone: str
    catch_up: str
    catch_up_most: int
    catch_up_seconds: float
    overlap: str
    enabled: bool
    next_tick: datetime | None = Field(description="null: it is disabled")
    due_at: datetime | None = Field(description="when the next tick is tried; later than it after a refusal")
    last_tick: datetime | None = Field(description="the newest tick that was handled")
    last_job: UUID | None = Field(description="the newest job, if it is kept")
    last_state: str | None = Field(description="state of that job")
    failures: int = Field(description="refusals since the last success")
    last_error: str | None
    failed_at: datetime | None
    set_by: str
    created_at: datetime


class Schedule(ScheduleRow):
    job: dict[str, Any] = Field(description="the job as it was given")


class ScheduleList(BaseModel):
    """By instance and name; the next page is `after` the last, as INSTANCE/NAME."""

    schedules: list[ScheduleRow]


class SetSchedule(BaseModel):
    name: str
    instance: str
    created: bool
    enabled: bool
    next_tick: datetime | None


class RemovedSchedule(BaseModel):
    name: str
    instance: str


class StartedRun(BaseModel):
    id: UUID = Field(description="id of the job")
    created: bool = Field(description="false: the key had been used before")


router = APIRouter(prefix="/v1", tags=["callers"])


@router.get("/schedules", responses=problems(400), openapi_extra=CALLERS)
async def list_schedules(
    request: Request,
    caller: Caller,
    instance: str | None = None,
    after: Annotated[str | None, Query(max_length=200, description="INSTANCE/NAME of the last one seen")] = None,
    limit: Annotated[int, Query(ge=1, le=wire.MAX_LIST)] = wire.MAX_LIST,
) -> ScheduleList:
    """List schedules, by instance and name."""
    wanted = caller.instances if instance is None else [_instance(instance, caller)]
    last = None if after is None else _after(after)

    def work(connection: Connection) -> ScheduleList:
        rows = schedules.schedules(connection, instances=wanted, after=last, limit=limit)
        return ScheduleList(schedules=[ScheduleRow.model_validate(row) for row in rows])

    found: ScheduleList = await request.app.state.run(work)
    return found


@router.get("/schedules/{name}", responses=problems(400, 404), openapi_extra=CALLERS)
async def show(request: Request, name: ScheduleName, caller: Caller, instance: Instance = None) -> Schedule:
    """Show one schedule, with its job."""
    of = _instance(instance, caller)

    def work(connection: Connection) -> Schedule:
        row = schedules.schedule(connection, of, name)
        routing.audit_access(connection, caller, "schedule.read", subject=f"{of}/{name}")
        return Schedule.model_validate(row | {"job": row["request"]})

    found: Schedule = await request.app.state.run(work)
    return found


@router.put("/schedules/{name}", responses=problems(400, 408, 409, 413, 415), openapi_extra=CALLERS)
async def put(
    request: Request, name: ScheduleName, body: Annotated[ScheduleRequest, Read], caller: Caller
) -> SetSchedule:
    """Make a schedule, or replace it. Its next tick stays unless expression, zone or `enabled` change."""
    validation.check_name("name", name)
    of, state = _instance(body.instance, caller), request.app.state
    terms = _terms(body)

    def work(connection: Connection) -> SetSchedule:
        sample = _request(terms.request, of, name, caller, state, key=f"schedule:{name}:0", place="job.")
        submission.check_points(connection, [sample], caller, place="job")
        made = schedules.put_schedule(
            connection, of, name, terms, priority_ceiling=caller.priority_ceiling, actor=caller.actor
        )
        row = schedules.schedule(connection, of, name)
        return SetSchedule.model_validate(row | {"created": made})

    done: SetSchedule = await state.run(work)
    return done


@router.patch("/schedules/{name}", responses=problems(400, 404, 408, 413, 415), openapi_extra=CALLERS)
async def enable(
    request: Request,
    name: ScheduleName,
    body: Annotated[EnableRequest, Read],
    caller: Caller,
    instance: Instance = None,
) -> SetSchedule:
    """Enable or disable a schedule. An enabled one begins with its first tick from now on."""
    of = _instance(instance, caller)

    def work(connection: Connection) -> SetSchedule:
        schedules.enable_schedule(connection, of, name, enabled=body.enabled, actor=caller.actor)
        return SetSchedule.model_validate(schedules.schedule(connection, of, name) | {"created": False})

    done: SetSchedule = await request.app.state.run(work)
    return done


@router.delete("/schedules/{name}", responses=problems(400, 404), openapi_extra=CALLERS)
async def remove(request: Request, name: ScheduleName, caller: Caller, instance: Instance = None) -> RemovedSchedule:
    """Remove a schedule. Its jobs stay."""
    of = _instance(instance, caller)
    await request.app.state.run(lambda connection: schedules.remove_schedule(connection, of, name, actor=caller.actor))
    return RemovedSchedule(name=name, instance=of)


@router.post("/schedules/{name}/run", responses=problems(400, 404, 408, 409, 413, 415), openapi_extra=CALLERS)
async def run(
    request: Request, name: ScheduleName, body: Annotated[RunRequest, Read], caller: Caller, instance: Instance = None
) -> StartedRun:
    """Submit the job of a schedule now, beside its ticks, also of a disabled one."""
    of, state = _instance(instance, caller), request.app.state
    key = f"schedule:{name}:run:{validation.check_text('key', body.key, MAX_RUN_KEY)}"

    def work(connection: Connection) -> StartedRun:
        held, job = schedules.hold_request(connection, of, name)
        wanted = _request(job, of, name, caller, state, key=key)
        submission.check_points(connection, [wanted], caller)
        (taken,) = submit(connection, [wanted], actor=caller.actor)
        schedules.note_run(connection, held, taken.job_id)
        routing.audit_act(connection, caller, "schedule.run", subject=f"{of}/{name}", details={"job": taken.public_id})
        return StartedRun(id=UUID(taken.public_id), created=taken.created)

    done: StartedRun = await state.callers.call(lambda: submission.run_keyed(state.database, work, keyed=True))
    return done


def _instance(given: str | None, caller: Principal) -> str:
    wanted = caller.instance or DEFAULT_INSTANCE if given is None else validation.check_name("instance", given)
    if not caller.may_use_instance(wanted):
        raise Forbidden(f"instance: this token is for the instance '{caller.instance}' only")
    return wanted


def _after(given: str) -> tuple[str, str]:
    instance, slash, name = given.partition("/")
    if not slash:
        raise BadInput("after", "is not INSTANCE/NAME")
    return validation.check_name("after", instance), validation.check_name("after", name)


def _terms(body: ScheduleRequest) -> ScheduleTerms:
    for field in OF_THE_SCHEDULE:
        if getattr(body.job, field) is not None:
            raise BadInput(f"job.{field}", "belongs to the schedule and not to its job")
    for name in RESERVED:
        if name in body.job.metadata:
            raise BadInput("job.metadata", f"'{name}' is set by the schedule")
    return ScheduleTerms(
        cron=cron.check_cron("cron", body.cron),
        zone=body.zone,
        catch_up=body.catch_up,
        catch_up_most=body.catch_up_most,
        catch_up_seconds=body.catch_up_seconds,
        overlap=body.overlap,
        enabled=body.enabled,
        request=body.job.model_dump(mode="json", exclude_unset=True),
    )


def _request(
    job: Any, instance: str, name: str, caller: Principal, state: Any, *, key: str, place: str = ""
) -> dict[str, Any]:
    """The job in the form that `moves.submit` takes. Raises BadInput or Forbidden with its field below `place`."""
    try:
        found = request_of(
            job, instance=instance, name=name, key=key, tick=None, level=state.default_level, estimate=state.estimate
        )
    except BadInput as refused:
        raise BadInput(f"{place}{refused.field}", refused.reason) from None
    if "priority" in found and not caller.may_use_priority(found["priority"]):
        raise Forbidden(f"{place}priority: this token may not be more urgent than {caller.priority_ceiling}")
    return found
