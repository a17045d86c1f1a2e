"""Operators' routes for the trial of a version of the policy on some cohorts or instances: begin, show, stop."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from leasehold.errors import BadInput, Conflict, NotFound
from pydantic import BaseModel, ConfigDict, Field

from assigner.api.operators.policies import Number, numbered, usable
from assigner.api.routing import MAX_REASON_BYTES, OPERATORS, UNUSABLE, Caller, Read, problems
from assigner.api.submission import RequestModel
from assigner.operator_resources import canaries as trials
from assigner.operator_resources import guards
from assigner.operator_resources.canaries import MOST_GUARDS, MOST_NAMES, MOST_STEPS, Plan
from schema import validation
from schema.policy import canaries
from schema.postgres.connection import Connection


class CanaryRequest(RequestModel):
    """Where a version is tried, in which steps, and what must hold meanwhile."""

    on: list[str] = Field(
        max_length=MOST_NAMES, description="`cohort:NAME` or `instance:NAME`, all of one sort, in the order of steps"
    )
    steps: list[int] = Field(
        default=[*trials.STEPS], max_length=MOST_STEPS, description="percent of these, rising; one name has one step"
    )
    every: float = Field(
        default=trials.EVERY,
        ge=trials.LEAST_EVERY,
        le=trials.MOST_EVERY,
        description="seconds that a step takes at least",
    )
    guards: list[str] = Field(
        max_length=MOST_GUARDS,
        description="such as `p95_wait<=2x`, `evictions<=20`, `others:p95_wait<=2x`; the first that does not hold "
        "ends the trial",
    )
    least: int = Field(default=trials.LEAST, ge=1, le=100_000, description="waits below which nothing is judged")
    reason: str = Field(default="", description="for the audit; at most 500 bytes")
    stale: bool = Field(
        default=False, description="true = also a draft since which something was changed, taking that back there"
    )


class CanaryStop(RequestModel):
    """Why a trial is stopped."""

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Measured(BaseModel):
    """What was measured of some jobs."""

    model_config = ConfigDict(from_attributes=True)

    sample: int = Field(description="waits that are known: of jobs that started, and so far of those that wait")
    starts: int
    fetched: int = Field(description="starts that bots fetched themselves, by which no weights count")
    p50_wait: float | None = Field(description="seconds")
    p95_wait: float | None = Field(description="seconds")
    max_wait: float | None = Field(description="seconds")
    evictions: float | None = Field(description="of 1,000 starts")
    failures: float | None = Field(description="failed and dead jobs, of 1,000 that ended")


class JudgedGuard(BaseModel):
    """A guard as the last look found it."""

    guard: str
    value: float | None = Field(description="unset = nothing was measured")
    limit: float | None = Field(description="what the value may be; unset = nothing is known of before")
    holds: bool | None = Field(description="unset = too little is known to say so")


class CanaryState(BaseModel):
    """The trial that is running, or the last one."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    policy: int = Field(description="the version that is tried")
    base: int = Field(description="the version that was in force before")
    kind: Literal["cohort", "instance"]
    names: list[str]
    reached: list[str] = Field(description="those of them where the version decides, or did when the trial ended")
    steps: list[int] = Field(description="how many of them each step reaches")
    step: int = Field(description="the present one, from 0")
    every: float = Field(description="seconds that a step takes at least")
    least: int
    author: str
    reason: str
    begun_at: datetime
    step_at: datetime = Field(description="when its step began")
    ended_at: datetime | None
    outcome: Literal["activated", "returned", "stopped", "replaced"] | None = Field(description="unset = it is running")
    why: str | None
    untried: list[str] = Field(
        description="what the version says otherwise and the trial does not try, the first of it"
    )
    undecided: list[str] = Field(
        description="cohorts that are reached and where no assigner at work decides by the version, as the last look "
        "found: their hosts are drained or stopped, or have other entries. Meanwhile the trial does not rise"
    )
    guards: list[JudgedGuard]
    now: Measured | None = Field(description="where it is tried, since its step began; unset = not looked at yet")
    before: Measured = Field(description="the same before the trial")


router = APIRouter(prefix="/v1/policies", tags=["operators"])


@router.get("/canary", responses=problems(404, 409), openapi_extra=OPERATORS)
async def show_canary(request: Request) -> CanaryState:
    """Show the trial that is running, or else the last one."""

    def work(connection: Connection) -> CanaryState:
        return _state(canaries.last(connection))

    found: CanaryState = await request.app.state.run(work)
    return found


@router.post("/canary/stop", responses=problems(408, 409, 413, 415), openapi_extra=OPERATORS)
async def stop_canary(request: Request, body: Annotated[CanaryStop, Read], caller: Caller) -> CanaryState:
    """End the trial that is running: everything is as before it within 2 seconds."""
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> CanaryState:
        with _readable(canaries.last(connection)):
            trials.stop(connection, actor=caller.actor, reason=reason)
        return _state(canaries.last(connection))

    found: CanaryState = await request.app.state.run(work)
    return found


@router.post("/{number}/canary", responses=problems(404, 408, 409, 413, 415), openapi_extra=OPERATORS)
async def begin_canary(
    request: Request, number: Number, body: Annotated[CanaryRequest, Read], caller: Caller
) -> CanaryState:
    """Try a version on some cohorts or instances. It is taken back by itself when a guard does not hold."""
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)
    id, check = numbered(number), usable(request)
    if id is None:
        raise BadInput("number", "must be the number of a version")
    plan = Plan(body.on, body.steps, body.every, body.guards, body.least)

    def work(connection: Connection) -> CanaryState:
        return _state(
            trials.begin(connection, id, plan, actor=caller.actor, reason=reason, check=check, stale=body.stale)
        )

    begun: CanaryState = await request.app.state.run(work)
    return begun


def _state(canary: canaries.Canary | None) -> CanaryState:
    if canary is None:
        raise NotFound("policy: there was no canary yet")
    with _readable(canary):
        return _read(canary)


@contextmanager
def _readable(canary: canaries.Canary | None) -> Iterator[None]:
    """Raise Conflict for a stored value of the trial that cannot be used."""
    try:
        yield
    except UNUSABLE:
        if canary is None:
            raise
        ends = "" if canary.ended_at else f"; `policy activate {canary.base}` ends it, or activate another version"
        problem = f"the canary of version {canary.policy} cannot be read: wrong JSON is stored"
        raise Conflict("canary_unreadable", f"policy: {problem}{ends}") from None


def _read(canary: canaries.Canary) -> CanaryState:
    measured = canary.measured
    unknown = [{"guard": each, "value": None, "limit": None, "holds": None} for each in canary.guards]
    before = guards.read_arms(canary.before[canary.step])
    return CanaryState.model_validate({
        **vars(canary),
        "reached": canary.reached,
        "guards": unknown if measured is None else measured["guards"],
        "undecided": () if measured is None else measured.get("undecided", ()),
        "now": None if measured is None else measured["tried"],
        "before": vars(before.tried),
    })  # fmt: skip
