"""The routes for pool samples: how many jobs waited, ran and ended in the pool, a cohort or an instance, over time."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from leasehold import wire
from leasehold.errors import BadInput, Forbidden, NotFound
from pydantic import BaseModel, Field

from assigner.api.routing import CALLERS, OPERATORS, Caller, problems
from schema.accounting import pool_samples
from schema.accounting.pool_samples import MAX_HOURS, Scope
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.tenancy.tokens import Principal

#: Whether a cohort, and whether an instance, of this name exists. The instance `default` needs no row.
_COHORT_EXISTS = Statement("SELECT EXISTS (SELECT FROM cohorts WHERE name = :name)")
_INSTANCE_EXISTS = Statement("SELECT :name = 'default' OR EXISTS (SELECT FROM instances WHERE name = :name)")


class PoolSample(BaseModel):
    """How many jobs waited, ran and ended in a stretch of time.

    `waiting` and `running` of a merged sample are means.
    """

    at: datetime = Field(description="beginning of the time that it covers")
    span: int = Field(description="seconds that it covers: 60; 600 once older than a day, 3600 than two weeks")
    waiting: int = Field(description="queued jobs at its end")
    running: int = Field(description="jobs on bots at its end")
    succeeded: int = Field(description="jobs that succeeded in it; the next three count other ends likewise")
    failed: int
    cancelled: int
    dead: int
    oldest_wait: float | None = Field(description="seconds that the oldest queued job had waited; unset = none waited")
    incomplete: bool = Field(description="true: a count stopped at its bound, or some of its minutes were not sampled")


class PoolSampleList(BaseModel):
    """Samples of one scope, oldest first. A minute in which no assigner process ran has none."""

    scope: str
    now: datetime = Field(description="the database's time")
    samples: list[PoolSample]


class FairnessSample(BaseModel):
    """How equally instances with waiting jobs were served by their weights, at the end of a stretch of time."""

    at: datetime = Field(description="beginning of the time that it covers")
    span: int = Field(description="seconds that it covers: 60; 600 once older than a day, 3600 than two weeks")
    fairness: float = Field(
        description="Jain's index of (units in use / weight) of the instances with waiting jobs: 1 = equal shares, "
        "1/n = one of n has everything; of merged samples the mean"
    )


class FairnessList(BaseModel):
    """Samples of fairness, oldest first. A minute in which fewer than two instances had waiting jobs has none."""

    now: datetime = Field(description="the database's time")
    samples: list[FairnessSample]


router = APIRouter(prefix="/v1", tags=["callers"])
Hours = Annotated[float, Query(gt=0, le=MAX_HOURS, allow_inf_nan=False, description="hours back from now")]


@router.get("/samples", responses=problems(400, 404), openapi_extra=CALLERS)
async def list_samples(
    request: Request,
    caller: Caller,
    scope: Annotated[
        str | None,
        Query(max_length=100, description="pool, cohort:NAME or instance:NAME; unset = all that the caller may see"),
    ] = None,
    hours: Hours = 1.0,
) -> PoolSampleList:
    """List pool samples. A minute has one of the pool and of each of the 50 cohorts and 50 instances with most jobs.

    The samples of the pool and of cohorts are for callers who see every instance.
    """
    kind, name = _scope(scope, caller)

    def work(connection: Connection) -> PoolSampleList:
        if kind is not Scope.POOL and not _may_see(connection, kind, name, caller):
            raise NotFound(f"scope: there is no {kind} '{wire.escaped(name, 80)}'")
        found = pool_samples.read(connection, kind, name, hours=hours)
        shown = kind.value if kind is Scope.POOL else f"{kind}:{name}"
        now = connection.now()
        return PoolSampleList(scope=shown, now=now, samples=[PoolSample.model_validate(row) for row in found])

    answer: PoolSampleList = await request.app.state.read(work)
    return answer


@router.get("/samples/fairness", responses=problems(), openapi_extra=OPERATORS)
async def list_fairness(request: Request, hours: Hours = 1.0) -> FairnessList:
    """List how equally instances with waiting jobs were served by their weights, over time."""

    def work(connection: Connection) -> FairnessList:
        found = pool_samples.read_fairness(connection, hours=hours)
        now = connection.now()
        return FairnessList(now=now, samples=[FairnessSample.model_validate(row) for row in found])

    answer: FairnessList = await request.app.state.read(work)
    return answer


def _scope(given: str | None, caller: Principal) -> tuple[Scope, str]:
    """Return the scope and the name that are asked for. Raises BadInput, Forbidden."""
    if given is None:
        return (Scope.POOL, "") if caller.instance is None else (Scope.INSTANCE, caller.instance)
    word, colon, name = given.partition(":")
    if word not in list(Scope) or bool(name) is (word == Scope.POOL) or bool(colon) is not bool(name):
        raise BadInput("scope", "is not pool, cohort:NAME or instance:NAME")
    if word != Scope.INSTANCE and caller.instances is not None:
        raise Forbidden(f"scope: this token sees one instance, not the {word}")
    return Scope(word), name


def _may_see(connection: Connection, kind: Scope, name: str, caller: Principal) -> bool:
    if caller.instances is not None:
        return name in caller.instances
    statement = _COHORT_EXISTS if kind is Scope.COHORT else _INSTANCE_EXISTS
    return bool(connection.execute(statement, {"name": name}).scalar_one())
