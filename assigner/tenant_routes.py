"""The operators' routes for quotas, cohorts and instances."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from assigner import standing
from assigner.routes import MAX_REASON_BYTES, OPERATORS, Caller, Read, problems
from assigner.submission import Asked
from schema import accounts, cohorts, instances, limits, quotas, usage
from schema.accounts import Account, PoolLimits

Reason = Annotated[str, Query(max_length=MAX_REASON_BYTES, description="for the audit; at most 500 bytes")]


class QuotaRequest(Asked):
    min: int = Field(default=0, ge=0, le=quotas.MAX_QUOTA, description="units it is owed")
    max: int | None = Field(default=None, ge=0, le=quotas.MAX_QUOTA, description="the most it gets; unset = any number")
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class CohortRequest(Asked):
    labels: list[str] | None = Field(default=None, max_length=cohorts.MAX_LABELS, description="unset = as before")
    position: int | None = Field(default=None, ge=0, le=cohorts.MAX_POSITION, description="lower = asked sooner")
    reclaim_min: str | None = Field(default=None, description="lower_priority_only or any; unset = as before")
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class InstanceRequest(Asked):
    pool: str | None = Field(default=None, description="its pool; unset = none")
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class AccountRequest(Account):
    model_config = ConfigDict(strict=True)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class PoolLimitsRequest(PoolLimits):
    model_config = ConfigDict(strict=True)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class PoolLimit(BaseModel):
    used: float
    most: float | None = Field(description="unset = any number")


class PoolLimitList(BaseModel):
    """What all managed instances have together."""

    max_concurrent: PoolLimit
    budget: PoolLimit


class Reported(BaseModel):
    instance: str
    unit: str
    amount: float
    jobs: int = Field(description="that are done and said something of it")


class UsageList(BaseModel):
    """By instance and unit."""

    usage: list[Reported]


class QuotaList(BaseModel):
    """By cohort and instance."""

    quotas: list[standing.Quota]


class Cohort(BaseModel):
    name: str
    labels: list[str]
    reclaim_min: str
    position: int


class CohortList(BaseModel):
    """In the order in which they are asked."""

    cohorts: list[Cohort]


class Instance(BaseModel):
    name: str
    pool: str | None
    draining: bool
    usage: int | None = Field(description="units in all cohorts where it has a quota; unset = it has none")
    min_quota: int | None
    max_quota: int | None
    queued: int = Field(description=f"jobs, counted up to {instances.MAX_COUNTED}")
    running: int = Field(description=f"jobs, counted up to {instances.MAX_COUNTED}")
    credit_weight: float | None = Field(description="its part beside the others'; unset = it is not managed")
    unit: str | None = Field(description="that its budget counts")
    used: float | None = Field(description="within the window, with what is reserved for what runs")
    budget: float | None = Field(description="unset = any amount, as of the limits that follow")
    max_concurrent: float | None
    slots: float | None


class InstanceList(BaseModel):
    """By name; the next page is `after` the last."""

    instances: list[Instance]


class Done(BaseModel):
    name: str


router = APIRouter(prefix="/v1", tags=["tenants"])


@router.get("/quotas", responses=problems(), openapi_extra=OPERATORS)
async def list_quotas(request: Request) -> QuotaList:
    """Every quota, with its usage."""
    cooldown = request.app.state.desk.cooldown
    found = await request.app.state.run(lambda connection: quotas.quotas(connection, cooldown=cooldown))
    return QuotaList(quotas=[standing.Quota(**asdict(each)) for each in found])


@router.put("/quotas/{cohort}/{instance}", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def set_quota(
    request: Request, cohort: str, instance: str, body: Annotated[QuotaRequest, Read], caller: Caller
) -> Done:
    """Set an instance's quota in a cohort. A maximum below its usage stops nothing, and nothing new starts."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        quotas.set_quota(
            connection, cohort, instance, minimum=body.min, maximum=body.max, actor=caller.actor, reason=reason
        )

    await request.app.state.run(work)
    return Done(name=f"{cohort}/{instance}")


@router.delete("/quotas/{cohort}/{instance}", responses=problems(404), openapi_extra=OPERATORS)
async def remove_quota(request: Request, cohort: str, instance: str, caller: Caller, reason: Reason = "") -> Done:
    """Let an instance have any number of units in a cohort."""

    def work(connection: Connection) -> None:
        quotas.remove_quota(connection, cohort, instance, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name=f"{cohort}/{instance}")


@router.get("/cohorts", responses=problems(), openapi_extra=OPERATORS)
async def list_cohorts(request: Request) -> CohortList:
    """Every cohort."""
    found = await request.app.state.run(cohorts.cohorts)
    return CohortList(cohorts=[Cohort.model_validate(asdict(each)) for each in found])


@router.put("/cohorts/{name}", responses=problems(400, 408, 413, 415), openapi_extra=OPERATORS)
async def set_cohort(request: Request, name: str, body: Annotated[CohortRequest, Read], caller: Caller) -> Done:
    """Make a cohort or change it. Bots and queued jobs move to the cohort that is theirs then."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)
    given = body.model_dump(include={"labels", "position", "reclaim_min"})

    def work(connection: Connection) -> None:
        cohorts.put_cohort(connection, name, **given, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name=name)


@router.delete("/cohorts/{name}", responses=problems(400, 404, 409), openapi_extra=OPERATORS)
async def remove_cohort(request: Request, name: str, caller: Caller, reason: Reason = "") -> Done:
    """Remove a cohort that has neither quotas nor running jobs."""

    def work(connection: Connection) -> None:
        cohorts.remove_cohort(connection, name, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name=name)


@router.get("/instances", responses=problems(400), openapi_extra=OPERATORS)
async def list_instances(
    request: Request, after: str = "", limit: Annotated[int, Query(ge=1, le=limits.MAX_LIST)] = limits.MAX_LIST
) -> InstanceList:
    """Every instance, with what it has."""
    limits.check_text("after", after, 63)
    found = await request.app.state.run(lambda connection: instances.instances(connection, after=after, limit=limit))
    return InstanceList(instances=[Instance(**asdict(each)) for each in found])


@router.put("/instances/{name}", responses=problems(400, 408, 409, 413, 415), openapi_extra=OPERATORS)
async def set_instance(request: Request, name: str, body: Annotated[InstanceRequest, Read], caller: Caller) -> Done:
    """Make an instance, or change its pool."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        instances.put_instance(connection, name, pool=body.pool, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name=name)


@router.put("/instances/{name}/account", responses=problems(400, 408, 413, 415), openapi_extra=OPERATORS)
async def set_account(request: Request, name: str, body: Annotated[AccountRequest, Read], caller: Caller) -> Done:
    """Give an instance a share of the pool, or change it; what is not given stays, and null takes a limit away."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        accounts.put_account(connection, name, body, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name=name)


@router.delete("/instances/{name}/account", responses=problems(404), openapi_extra=OPERATORS)
async def remove_account(request: Request, name: str, caller: Caller, reason: Reason = "") -> Done:
    """Let an instance have any number of places, as they come, without a share."""

    def work(connection: Connection) -> None:
        accounts.remove_account(connection, name, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name=name)


@router.get("/usage", responses=problems(), openapi_extra=OPERATORS)
async def list_usage(
    request: Request, hours: Annotated[float, Query(ge=0, le=usage.MAX_HOURS, allow_inf_nan=False)] = 24.0
) -> UsageList:
    """What bots say that jobs at gates have used within so many hours, in every unit."""
    found = await request.app.state.run(lambda connection: usage.reported(connection, hours=hours))
    return UsageList(usage=[Reported(**asdict(each)) for each in found])


@router.get("/limits", responses=problems(), openapi_extra=OPERATORS)
async def list_limits(request: Request) -> PoolLimitList:
    """What all managed instances have together, and may have."""
    found = await request.app.state.run(accounts.pool_limits)
    return PoolLimitList.model_validate({name: asdict(counter) for name, counter in found.items()})


@router.put("/limits", responses=problems(400, 408, 413, 415), openapi_extra=OPERATORS)
async def set_limits(request: Request, body: Annotated[PoolLimitsRequest, Read], caller: Caller) -> Done:
    """Limit what all managed instances may have together; what is not given stays, and null takes a limit away."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        accounts.limit_pool(connection, body, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Done(name="pool")
