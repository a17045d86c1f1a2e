"""Operators' routes that belong to no operator resource: drains, reports and forecasts."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Query, Request
from leasehold import wire
from leasehold.errors import BadInput, NotFound
from pydantic import BaseModel, Field

from assigner import forecasting
from assigner.admission.rules import RULES
from assigner.api import models
from assigner.api.routing import MAX_REASON_BYTES, OPERATORS, UNUSABLE, Caller, Read, problems
from assigner.api.submission import RequestModel
from assigner.explain import forecast as start_forecast
from assigner.explain.forecast import StartForecast
from assigner.maintenance import meters
from assigner.operator_resources.declaration import given
from assigner.queries import demand, report
from assigner.queries import jobs as job_queries
from assigner.queries.preemptions import Preemption, preemptions
from schema import validation
from schema.accounting import accounts, forecasts
from schema.diagnostics.invariants import SNAPSHOT
from schema.filters import pair
from schema.fleet.kinds import Offer, clauses
from schema.moves.sessions import drain
from schema.policy import meters as usage_meters
from schema.policy import priority_classes, time_windows
from schema.postgres.connection import Connection
from schema.tenancy import drains
from schema.tenancy.cohorts import DEFAULT
from schema.validation import load_zone

#: The most groups of waiting jobs whose start is foreseen at once.
MAX_FORECASTS = 50


class ForecastOfGroup(BaseModel):
    """Waiting jobs of a cohort, an instance and a class, and when the last of them will start."""

    cohort: str
    instance: str
    job_class: str = Field(description="empty: those without a class")
    jobs: int = Field(description="ready jobs, counted up to a bound")
    forecast: StartForecast


class ForecastsKept(BaseModel):
    """What became of the forecasts of the last day, of an instance; of the pool with an empty name."""

    instance: str
    jobs: int = Field(description="forecasts whose promise could be judged")
    kept: int = Field(description="those of them whose job started within the promised time")
    coverage: float | None = Field(description="their part; 0.9 is meant")
    error: float | None = Field(description="median difference between the told and the real time, seconds")
    width: float | None = Field(description="median of the promised times, seconds")


class ForecastList(BaseModel):
    waiting: list[ForecastOfGroup]
    kept: list[ForecastsKept] = Field(description="of the pool first")


class DrainRequest(RequestModel):
    draining: bool = True
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class TimedDrainRequest(DrainRequest):
    deadline: float | None = Field(
        default=None,
        ge=0,
        le=validation.YEAR,
        description="seconds after which running jobs are stopped and queued again; unset = never",
    )


class Assigner(BaseModel):
    name: str
    state: str = Field(description="running, draining (its last cycle has not ended), drained, stopped, or dead")
    draining: bool = Field(description="true: an operator asked that it place no jobs")
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    policy: int | None = Field(description="version of the policy by which it works; unset = it has told none")


class InstanceDrain(BaseModel):
    name: str
    draining: bool = Field(description="true: an operator asked that none of its jobs start")
    leases: int | None = given(unit="leases", help="leases that its jobs still hold; unset = it is not draining")


class AssignerList(BaseModel):
    """The assigner processes of the last day, by name."""

    assigners: list[Assigner]


class Reported(BaseModel):
    instance: str
    unit: str
    amount: float = Field(description="reported usage, in this unit")
    jobs: int = given(unit="jobs", help="ended jobs that reported usage in this unit")


class UsageList(BaseModel):
    """Reported usage by instance and unit."""

    usage: list[Reported]


class PreemptionList(BaseModel):
    """Jobs that preemption has evicted, newest first. For the next page, give the id of the last one as `before`."""

    preemptions: list[Preemption]


class ClassReportList(BaseModel):
    """Accuracy of estimates by class."""

    classes: list[priority_classes.Accuracy]


class Forecast(BaseModel):
    """The next time at which a window lets a job start, with its meter below the threshold; unset = none in a week."""

    now: bool = Field(description="true: windows would let it start at once")
    window: str | None = Field(description="the window that lets it start; unset also if there are no windows")
    at: datetime | None
    percent: float | None = given(unit="percent of the limit", help="level of the meter, read now or expected then")
    zone: str | None = Field(description="the time zone of the window")


JobClass = Annotated[str, Query(alias="class", description="class of the job")]

log = structlog.get_logger()
router = APIRouter(prefix="/v1", tags=["operators"])


@router.get("/bots/{name}", responses=problems(400, 404), openapi_extra=OPERATORS)
async def bot(request: Request, name: str) -> models.ShownBot:
    """Show one bot."""
    validation.check_name("name", name)
    row = await request.app.state.run(lambda connection: job_queries.bot(connection, name))
    if row is None:
        raise NotFound(f"bot: no bot '{name}'")
    return models.ShownBot.model_validate(row)


@router.post("/bots/{name}/drain", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def drain_bot(
    request: Request, name: str, body: Annotated[TimedDrainRequest, Read], caller: Caller
) -> models.DrainAnswer:
    """Ask a bot to take no more work, or to go on."""
    validation.check_name("name", name)
    wish = _timed(body)

    def work(connection: Connection) -> None:
        drain(connection, name, actor=caller.actor, **wish)

    await request.app.state.run(work)
    return models.DrainAnswer(name=name, draining=body.draining)


@router.post("/instances/{name}/drain", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def drain_instance(
    request: Request, name: str, body: Annotated[TimedDrainRequest, Read], caller: Caller
) -> models.DrainAnswer:
    """Start no more jobs of an instance, or start them again. Its jobs stay queued."""
    validation.check_name("name", name)
    wish = _timed(body)

    def work(connection: Connection) -> None:
        drains.drain_instance(connection, name, actor=caller.actor, **wish)

    await request.app.state.run(work)
    return models.DrainAnswer(name=name, draining=body.draining)


@router.get("/instances/{name}/drain", responses=problems(404), openapi_extra=OPERATORS)
async def instance_drain(request: Request, name: str) -> InstanceDrain:
    """Show whether an instance is draining, and how many leases its jobs still hold."""
    leases = await request.app.state.run(lambda connection: drains.instance_leases(connection, name))
    return InstanceDrain(name=name, draining=leases is not None, leases=leases)


@router.get("/assigners", responses=problems(), openapi_extra=OPERATORS)
async def assigners(request: Request) -> AssignerList:
    """List the assigner processes of the last day."""
    found = await request.app.state.run(drains.assigners)
    return AssignerList(assigners=[Assigner(**asdict(each)) for each in found])


@router.get("/assigners/{name}", responses=problems(404), openapi_extra=OPERATORS)
async def assigner(request: Request, name: str) -> Assigner:
    """Show one assigner process of the last day."""
    found = await request.app.state.run(lambda connection: drains.assigners(connection, name))
    if not found:
        raise NotFound(f"assigner: no assigner process '{wire.escaped(name, 63)}'")
    return Assigner(**asdict(found[0]))


@router.post("/assigners/{name}/drain", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def drain_assigner(
    request: Request, name: str, body: Annotated[DrainRequest, Read], caller: Caller
) -> models.DrainAnswer:
    """Ask an assigner process to place no more jobs, or to place jobs again. Its upkeep goes on."""
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        drains.drain_assigner(connection, name, draining=body.draining, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return models.DrainAnswer(name=name, draining=body.draining)


@router.get("/usage", responses=problems(), openapi_extra=OPERATORS)
async def list_usage(
    request: Request, hours: Annotated[float, Query(ge=0, le=accounts.MAX_HOURS, allow_inf_nan=False)] = 24.0
) -> UsageList:
    """List the usage that bots reported for constrained jobs within the last `hours`, by instance and unit."""
    found = await request.app.state.read(lambda connection: accounts.reported_usage(connection, hours=hours))
    return UsageList(usage=[Reported(**asdict(each)) for each in found])


@router.get("/report", responses=problems(), openapi_extra=OPERATORS)
async def show_report(
    request: Request,
    window: Annotated[float, Query(ge=1, le=report.MAX_WINDOW, description="seconds back from now")] = 86400.0,
) -> report.Report:
    """Report on the pool: waits, throughput, fairness, efficiency, utilisation, usage, estimates, concentration."""
    found: report.Report = await request.app.state.read(lambda connection: report.report(connection, window=window))
    return found


def _scale(
    least: Annotated[int, Query(alias="min", ge=0, le=demand.MAX_BOTS, description="fewest bots to suggest")] = 0,
    most: Annotated[int, Query(alias="max", ge=0, le=demand.MAX_BOTS, description="most bots to suggest")] = 100,
    units_per_bot: Annotated[
        int | None,
        Query(ge=1, le=demand.MAX_UNITS, description="units of a further bot; unset = as the largest healthy one has"),
    ] = None,
) -> demand.Scale:
    return demand.Scale(least=least, most=most, units_per_bot=units_per_bot)


ScaleQuery = Annotated[demand.Scale, Depends(_scale)]


@router.get("/demand", responses=problems(400), openapi_extra=OPERATORS)
async def show_demand(request: Request, scale: ScaleQuery) -> demand.DemandList:
    """Show how many jobs wait, by cohort and by what they require, and how many bots are suggested for them."""
    state = request.app.state
    limits = {"cooldown": state.sync_service.cooldown, "rules": getattr(state, "rules", RULES)}
    found: demand.DemandList = await state.run(lambda connection: demand.demand(connection, scale, **limits))
    return found


Texts = Annotated[list[str] | None, Query(max_length=validation.MAX_PROPERTIES)]


@router.get("/demand/value", responses=problems(400), openapi_extra=OPERATORS)
async def show_demand_value(
    request: Request,
    scale: ScaleQuery,
    cohort: Annotated[str, Query(max_length=63)] = DEFAULT,
    properties: Annotated[Texts, Query(description="KEY=VALUE that each bot offers; repeatable")] = None,
    exclusive: Annotated[Texts, Query(description="KEY that each bot offers exclusively; repeatable")] = None,
) -> demand.DemandValue:
    """Suggest how many bots with these properties to run for the jobs that they could serve: one number."""
    validation.check_name("cohort", cohort)
    offer = _offer(properties or [], exclusive or [])
    state = request.app.state
    limits = {"cooldown": state.sync_service.cooldown, "rules": getattr(state, "rules", RULES)}
    found: demand.DemandValue = await state.run(
        lambda connection: demand.demand_value(connection, cohort, offer, scale, **limits)
    )
    return found


def _offer(properties: Sequence[str], exclusive: Sequence[str]) -> Offer:
    found: dict[str, list[str]] = {}
    for text in properties:
        key, value = pair(text)
        if not (key and value):
            raise BadInput("properties", f"'{wire.escaped(text, 80)}' is not KEY=VALUE")
        found.setdefault(key, []).append(value)
    for key in exclusive:
        if key not in found:
            raise BadInput("exclusive", f"'{wire.escaped(key, 80)}' is not one of the properties")
    return Offer(clauses(validation.normal_properties("properties", found)), frozenset(exclusive))


@router.get("/preemptions", responses=problems(), openapi_extra=OPERATORS)
async def list_preemptions(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="id of a row: only earlier rows")] = None,
    limit: Annotated[int, Query(ge=1, le=wire.MAX_LIST)] = 100,
) -> PreemptionList:
    """List the jobs that preemption has evicted, with its receipts, newest first."""
    found = await request.app.state.read(lambda connection: preemptions(connection, before=before, limit=limit))
    return PreemptionList(preemptions=found)


@router.get("/class-report", responses=problems(), openapi_extra=OPERATORS)
async def show_class_report(request: Request) -> ClassReportList:
    """Compare estimated with actual run times, for the latest ended jobs of each class."""
    return ClassReportList(classes=await request.app.state.read(priority_classes.accuracy))


@router.get("/meters/{name}/pattern", responses=problems(400, 404), openapi_extra=OPERATORS)
async def show_pattern(
    request: Request,
    name: str,
    zone: Annotated[str, Query(max_length=100, description="time zone of the hours")] = "UTC",
) -> meters.UsagePattern:
    """Show a meter's daily pattern over the last four weeks: percent of its limit by the hour."""
    try:
        found_zone = load_zone(zone)
    except ValueError as error:
        raise BadInput("zone", str(error)) from None
    levels = await request.app.state.run(lambda connection: usage_meters.history(connection, [name])[name])
    if not levels:
        raise NotFound(f"meter: nothing is known of '{wire.escaped(name, 63)}'")
    return meters.usage_pattern(levels, found_zone)


@router.get("/forecast", responses=problems(400), openapi_extra=OPERATORS)
async def show_forecast(
    request: Request,
    job_class: JobClass,
    estimate: Annotated[float, Query(ge=0, le=usage_meters.MAX_AMOUNT, description="cost, in the meter's unit")] = 0.0,
) -> Forecast:
    """Show when windows next let a job of a class start, with their meters below the threshold; it may be now."""
    validation.check_name("class", job_class)

    def work(connection: Connection) -> Forecast:
        if not any(each.name == job_class for each in priority_classes.classes(connection)):
            raise BadInput("class", f"there is no job class '{job_class}'")
        found = time_windows.read(connection)
        names = [each.settings.meter for each in found.windows if each.settings.meter is not None]
        now = connection.now()
        start = meters.best_start(
            found, job_class, estimate=estimate, histories=usage_meters.history(connection, names), now=now
        )
        if start is None:
            return Forecast(now=False, window=None, at=None, percent=None, zone=None)
        zone = next((each.settings.zone for each in found.windows if each.settings.name == start.window), None)
        return Forecast(now=start.at == now, **asdict(start), zone=zone)

    found: Forecast = await request.app.state.run(work)
    return found


@router.get("/forecasts", responses=problems(), openapi_extra=OPERATORS)
async def list_forecasts(request: Request) -> ForecastList:
    """Tell when the last of the waiting jobs of each instance and class will start, and how good such forecasts were.

    At most 50 groups, those with the most waiting jobs first.
    """
    state = request.app.state
    foresee = partial(
        start_forecast.foresee, cooldown=state.sync_service.cooldown, rules=getattr(state, "rules", RULES)
    )

    def foreseen(connection: Connection, job: int) -> StartForecast:
        try:
            with connection.savepoint():
                return StartForecast.of(foresee(connection, job).forecast)
        except UNUSABLE:
            log.exception("the start of a job could not be foreseen", job=job)
            return StartForecast.of(forecasting.Forecast(reason="a stored value keeps it from being foreseen"))

    def work(connection: Connection) -> ForecastList:
        connection.execute(SNAPSHOT)
        groups = [
            ForecastOfGroup(**asdict(each), forecast=foreseen(connection, each.last))
            for each in forecasts.waiting(connection, limit=MAX_FORECASTS)
        ]
        kept = [ForecastsKept(**asdict(each), coverage=each.coverage) for each in forecasts.judged(connection)]
        return ForecastList(waiting=groups, kept=kept)

    found: ForecastList = await state.read(work)
    return found


def _timed(body: TimedDrainRequest) -> dict[str, Any]:
    drains.check_deadline("deadline", body.deadline, draining=body.draining)
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)
    return {"draining": body.draining, "deadline": body.deadline, "reason": reason}
