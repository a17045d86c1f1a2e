"""The routes of schedules: list, show, set, apply, enable, run at once and remove.

A schedule belongs to an instance. Operators may use all of them, a submitter those of its instance.
"""

from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request
from leasehold import wire
from leasehold.errors import BadInput, Forbidden
from pydantic import BaseModel, Field

from assigner.api import routing, submission
from assigner.api.models import StoredObject
from assigner.api.routing import CALLERS, Caller, Read, problems
from assigner.api.submission import RequestModel
from assigner.maintenance.schedule_forms import ScheduleForm
from assigner.maintenance.schedules import request_of
from schema import validation
from schema.fields import Name
from schema.moves.submit import submit
from schema.policy import cron, schedule_changes, schedules
from schema.policy.schedule_changes import APP, MAX_APP, MAX_SCHEDULES, Author, DeclaredSchedule, Outcome
from schema.postgres.connection import Connection
from schema.requests import DEFAULT_INSTANCE
from schema.tenancy.tokens import Principal

#: Longest key of a run, bytes.
MAX_RUN_KEY = 100
#: How many ticks a plan tells.
TICKS = 5

ScheduleName = Annotated[str, Path(max_length=200, description="name of the schedule, unique in its instance")]
TakeOver = Annotated[bool, Query(description="remove a schedule that an app declares, too")]
Instance = Annotated[str | None, Query(description="instance of the schedule; unset: that of the token, or `default`")]


class ScheduleRequest(ScheduleForm):
    """A job that is submitted at every tick of a cron expression."""

    enabled: bool = Field(default=True, description="Only enabled schedules have ticks.")
    take_over: bool = Field(
        default=False, description="Replace a schedule that an app declares, too; the app owns it no longer."
    )


class DeclaredRequest(ScheduleForm):
    """A schedule that an app declares."""

    name: Name = Field(description="Name of the schedule, unique in its instance.")
    enabled: bool | None = Field(
        default=None, description="Unset: a new schedule is enabled, and one that exists stays as it is."
    )


class ApplyRequest(RequestModel):
    """All schedules that an app declares. Either all are as declared afterwards, or nothing is changed."""

    app: str = Field(min_length=1, description=f"The app that declares them. At most {MAX_APP} bytes.")
    schedules: list[DeclaredRequest] = Field(max_length=MAX_SCHEDULES, fail_fast=True)
    prune: bool = Field(default=False, description="Remove what the app has declared before and declares no longer.")
    take_over: bool = Field(
        default=False,
        description="Change schedules of other owners, too: a command or another app. Without it they are refused.",
    )


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
    left_out: int = Field(description="ticks left out since the last job, because it has not ended (overlap = skip)")
    left_out_since: datetime | None = Field(description="the first of them")
    failures: int = Field(description="refusals since the last success")
    last_error: str | None
    failed_at: datetime | None
    set_by: str
    declared_by: str | None = Field(description="its owner: `config`, or `app:` and the app's name; null: a command")
    created_at: datetime
    paused: str | None = Field(description="why it is disabled, maybe empty; null: it is enabled, or nobody said why")


class Schedule(ScheduleRow):
    job: StoredObject = Field(description="the job as it was given")


class ScheduleList(BaseModel):
    """By instance and name; the next page is `after` the last, as INSTANCE/NAME."""

    schedules: list[ScheduleRow]


class SetSchedule(BaseModel):
    name: str
    instance: str
    created: bool
    enabled: bool
    next_tick: datetime | None


class PlannedSchedule(BaseModel):
    name: str
    instance: str
    exists: bool = Field(description="true: PUT would replace it")
    ticks: list[datetime] = Field(description=f"the next {TICKS} ticks from now on, also of one that is not enabled")


class AppliedRow(BaseModel):
    name: str
    instance: str
    outcome: Outcome = Field(description="`left`: the app declares it no longer, and it was not pruned")
    next_tick: datetime | None = Field(description="null: it is disabled")


class AppliedSchedules(BaseModel):
    """What became of each schedule of the app, by instance and name."""

    schedules: list[AppliedRow]


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
        return ScheduleList(schedules=[ScheduleRow.model_validate(_in_its_zone(row)) for row in rows])

    found: ScheduleList = await request.app.state.run(work)
    return found


@router.get("/schedules/{name}", responses=problems(400, 404), openapi_extra=CALLERS)
async def show(request: Request, name: ScheduleName, caller: Caller, instance: Instance = None) -> Schedule:
    """Show one schedule, with its job."""
    of = _instance(instance, caller)

    def work(connection: Connection) -> Schedule:
        row = schedules.schedule(connection, of, name)
        routing.audit_access(connection, caller, "schedule.read", subject=f"{of}/{name}")
        return Schedule.model_validate(_in_its_zone(row) | {"job": row["request"]})

    found: Schedule = await request.app.state.run(work)
    return found


@router.put("/schedules/{name}", responses=problems(400, 408, 409, 413, 415), openapi_extra=CALLERS)
async def put(
    request: Request, name: ScheduleName, body: Annotated[ScheduleRequest, Read], caller: Caller
) -> SetSchedule:
    """Make a schedule, or replace it. Its next tick stays unless expression, zone or `enabled` change."""
    validation.check_name("name", name)
    of, state = _instance(body.instance, caller), request.app.state
    terms = body.terms(enabled=body.enabled)
    author = Author(caller.actor, caller.priority_ceiling, take_over=body.take_over)

    def work(connection: Connection) -> SetSchedule:
        sample = _request(terms.request, of, name, caller, state, key=f"schedule:{name}:0", place="job.")
        submission.check_points(connection, [sample], caller, place="job")
        made = schedule_changes.put_schedule(connection, of, name, terms, author=author)
        row = schedules.schedule(connection, of, name)
        return SetSchedule.model_validate(_in_its_zone(row) | {"created": made})

    done: SetSchedule = await state.run(work)
    return done


@router.post("/schedules/{name}/plan", responses=problems(400, 408, 413, 415), openapi_extra=CALLERS)
async def plan(
    request: Request, name: ScheduleName, body: Annotated[ScheduleRequest, Read], caller: Caller
) -> PlannedSchedule:
    """Tell when a schedule would be due, and refuse what PUT refuses of its terms and its job. Stores nothing."""
    validation.check_name("name", name)
    of, state = _instance(body.instance, caller), request.app.state
    terms = body.terms(enabled=True)

    def work(connection: Connection) -> PlannedSchedule:
        sample = _request(terms.request, of, name, caller, state, key=f"schedule:{name}:0", place="job.")
        submission.check_points(connection, [sample], caller, place="job")
        now = schedule_changes.read_now(connection)
        terms.next_tick(now)
        zone = validation.load_zone(terms.zone)
        ticks = [tick.astimezone(zone) for tick in islice(cron.ticks_after(terms.cron, terms.zone, now), TICKS)]
        return PlannedSchedule(name=name, instance=of, exists=schedules.exists(connection, of, name), ticks=ticks)

    found: PlannedSchedule = await state.run(work)
    return found


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
        schedule_changes.enable_schedule(connection, of, name, enabled=body.enabled, actor=caller.actor)
        row = schedules.schedule(connection, of, name)
        return SetSchedule.model_validate(_in_its_zone(row) | {"created": False})

    done: SetSchedule = await request.app.state.run(work)
    return done


@router.delete("/schedules/{name}", responses=problems(400, 404, 409), openapi_extra=CALLERS)
async def remove(
    request: Request, name: ScheduleName, caller: Caller, instance: Instance = None, take_over: TakeOver = False
) -> RemovedSchedule:
    """Remove a schedule. Its jobs stay."""
    of, author = _instance(instance, caller), Author(caller.actor, take_over=take_over)
    await request.app.state.run(
        lambda connection: schedule_changes.remove_schedule(connection, of, name, author=author)
    )
    return RemovedSchedule(name=name, instance=of)


@router.post("/schedules/apply", responses=problems(400, 408, 409, 413, 415), openapi_extra=CALLERS)
async def apply(request: Request, body: Annotated[ApplyRequest, Read], caller: Caller) -> AppliedSchedules:
    """Make the schedules of an app those that it declares, in one transaction."""
    source = APP + validation.check_text("app", body.app, MAX_APP)
    author = Author(caller.actor, caller.priority_ceiling, source, body.take_over)
    wanted = [_declared(each, index, caller) for index, each in enumerate(body.schedules)]
    names = [(each.instance, each.name) for each in wanted]
    if len(set(names)) < len(names):
        index = next(index for index, name in enumerate(names) if name in names[:index])
        raise BadInput(f"schedules.{index}.name", f"'{names[index][1]}' is declared twice")
    state = request.app.state

    def work(connection: Connection) -> AppliedSchedules:
        for index, each in enumerate(wanted):
            place, key = f"schedules.{index}.job", f"schedule:{each.name}:0"
            sample = _request(each.terms.request, each.instance, each.name, caller, state, key=key, place=f"{place}.")
            submission.check_points(connection, [sample], caller, place=place)
        done = schedule_changes.apply_schedules(
            connection, wanted, instances=caller.instances, prune=body.prune, author=author
        )
        schedule_changes.refuse_owned(done, source=source)
        zones = {(each.instance, each.name): each.terms.zone for each in wanted}
        rows = [vars(each) | {"zone": zones.get((each.instance, each.name), "UTC")} for each in done]
        return AppliedSchedules(schedules=[AppliedRow.model_validate(_in_its_zone(row)) for row in rows])

    answer: AppliedSchedules = await state.run(work)
    return answer


@router.post("/schedules/{name}/run", responses=problems(400, 404, 408, 409, 413, 415), openapi_extra=CALLERS)
async def run(
    request: Request, name: ScheduleName, body: Annotated[RunRequest, Read], caller: Caller, instance: Instance = None
) -> StartedRun:
    """Submit the job of a schedule now, beside its ticks, also of a disabled one."""
    of, state = _instance(instance, caller), request.app.state
    key = f"schedule:{name}:run:{validation.check_text('key', body.key, MAX_RUN_KEY)}"

    def work(connection: Connection) -> StartedRun:
        held, job = schedule_changes.hold_request(connection, of, name)
        wanted = _request(job, of, name, caller, state, key=key)
        submission.check_points(connection, [wanted], caller)
        (taken,) = submit(connection, [wanted], actor=caller.actor)
        schedule_changes.note_run(connection, held, taken.job_id)
        routing.audit_act(connection, caller, "schedule.run", subject=f"{of}/{name}", details={"job": taken.public_id})
        return StartedRun(id=UUID(taken.public_id), created=taken.created)

    done: StartedRun = await state.callers.call(lambda: submission.run_keyed(state.database, work, keyed=True))
    return done


def _in_its_zone(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a schedule with its ticks, and when the next one is tried, in its zone; the offset tells it."""
    try:
        zone = validation.load_zone(row["zone"])
    except ValueError:
        return dict(row)  # this machine no longer knows the zone: the ticks stay in UTC
    ticks = [name for name in ("next_tick", "due_at", "last_tick") if row.get(name) is not None]
    return {**row, **{name: row[name].astimezone(zone) for name in ticks}}


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


def _declared(given: DeclaredRequest, index: int, caller: Principal) -> DeclaredSchedule:
    """Raises BadInput with the field below `schedules.INDEX`, Forbidden."""
    of = _instance(given.instance, caller)
    try:
        terms = given.terms(enabled=given.enabled is not False)
    except BadInput as refused:
        raise BadInput(f"schedules.{index}.{refused.field}", refused.reason) from None
    return DeclaredSchedule(of, given.name, terms, keeps_enabled=given.enabled is None)


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
