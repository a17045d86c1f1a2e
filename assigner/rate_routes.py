"""The operators' routes for how fast jobs may start: rates, and advice to hold back."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from assigner.routes import MAX_REASON_BYTES, OPERATORS, Caller, Read, problems
from assigner.submission import Asked
from assigner.tenant_routes import Reason
from schema import backpressure, limits, rates

ResourceClass = Annotated[str | None, Query(max_length=63, description="unset = the advice for all jobs")]


class RateRequest(Asked):
    per_second: float = Field(gt=0, le=rates.MAX_RATE, description="jobs that start, in the long run")
    burst: int = Field(default=1, ge=1, le=rates.MAX_BURST, description="jobs that may start at once")
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class AdviceRequest(Asked):
    resource_class: str | None = Field(default=None, description="unset = all jobs that ask for more than a place")
    allowed: bool = Field(default=False, description="whether jobs may start")
    delay: float = Field(default=0.0, ge=0, le=backpressure.MAX_DELAY, description="seconds to wait after a start")
    seconds: float | None = Field(default=None, gt=0, le=backpressure.MAX_TIME, description="unset = until removed")
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Rate(BaseModel):
    resource: str = Field(description="CLASS or CLASS/MODEL")
    per_second: float
    burst: int
    tokens: float = Field(description="jobs that may start at once now")


class RateList(BaseModel):
    """By resource."""

    rates: list[Rate]


class Advice(BaseModel):
    resource_class: str | None = Field(description="unset = all jobs that ask for more than a place")
    allowed: bool
    delay: float
    until: datetime | None


class AdviceList(BaseModel):
    """What is in force, that for all jobs first."""

    backpressure: list[Advice]


class Changed(BaseModel):
    name: str = Field(description="CLASS or CLASS/MODEL; of advice for all jobs empty")


router = APIRouter(prefix="/v1", tags=["tenants"])


@router.get("/rates", responses=problems(), openapi_extra=OPERATORS)
async def list_rates(request: Request) -> RateList:
    """Every rate."""
    found = await request.app.state.run(rates.rates)
    return RateList(rates=[Rate(**asdict(each)) for each in found])


@router.put("/rates/{resource:path}", responses=problems(400, 408, 413, 415), openapi_extra=OPERATORS)
async def set_rate(request: Request, resource: str, body: Annotated[RateRequest, Read], caller: Caller) -> Changed:
    """Set the rate of a resource class, or of a model of it: CLASS or CLASS/MODEL."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        rates.set_rate(
            connection, resource, per_second=body.per_second, burst=body.burst, actor=caller.actor, reason=reason
        )

    await request.app.state.run(work)
    return Changed(name=resource)


@router.delete("/rates/{resource:path}", responses=problems(404), openapi_extra=OPERATORS)
async def remove_rate(request: Request, resource: str, caller: Caller, reason: Reason = "") -> Changed:
    """Let jobs start at any rate."""
    await request.app.state.run(
        lambda connection: rates.remove_rate(connection, resource, actor=caller.actor, reason=reason)
    )
    return Changed(name=resource)


@router.get("/backpressure", responses=problems(), openapi_extra=OPERATORS)
async def list_advice(request: Request) -> AdviceList:
    """What is advised now."""
    found = await request.app.state.run(backpressure.standing)
    return AdviceList(backpressure=[Advice(**asdict(each)) for each in found])


@router.put("/backpressure", responses=problems(400, 408, 413, 415), openapi_extra=OPERATORS)
async def set_advice(request: Request, body: Annotated[AdviceRequest, Read], caller: Caller) -> Changed:
    """Advise assigners to start no jobs, or to wait between starts. What runs goes on."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)
    given = body.model_dump(include={"allowed", "delay", "seconds"})

    def work(connection: Connection) -> None:
        backpressure.advise(connection, body.resource_class, **given, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return Changed(name=body.resource_class or "")


@router.delete("/backpressure", responses=problems(404), openapi_extra=OPERATORS)
async def remove_advice(
    request: Request, caller: Caller, resource_class: ResourceClass = None, reason: Reason = ""
) -> Changed:
    """Take advice back."""
    await request.app.state.run(
        lambda connection: backpressure.take_back(connection, resource_class, actor=caller.actor, reason=reason)
    )
    return Changed(name=resource_class or "")
