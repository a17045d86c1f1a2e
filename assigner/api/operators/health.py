"""Operators' routes on the health of a pool: alerts, checks of the database, invariants, gateways, the audit."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Query, Request
from leasehold import wire
from pydantic import BaseModel, Field

from assigner.api.routing import OPERATORS, problems
from assigner.queries import alerts as alert_queries
from schema import audit, validation
from schema.clock import monotonic
from schema.diagnostics import doctor, invariants
from schema.diagnostics.checks import Verdict
from schema.postgres.connection import Connection
from schema.tenancy import processes

T = TypeVar("T")

#: Seconds for which alerts and the checks of the database are answered again without a new look.
FRESH = 5.0
#: Seconds that a check of the invariants may take, and that one may ask for.
INVARIANT_SECONDS, MOST_SECONDS = 10.0, 60.0


class Alert(BaseModel):
    """Something that is wrong now, and what to do."""

    name: str = Field(description="the rule, as in the rules for Prometheus")
    severity: alert_queries.Severity
    subject: str = Field(description="a cohort, cohort/instance, or the name of a process; empty = the pool")
    summary: str
    action: str


class AlertList(BaseModel):
    """What is wrong now, the most severe first."""

    now: datetime = Field(description="the database's time")
    alerts: list[Alert]


class Check(BaseModel):
    """A check of the database."""

    name: str
    verdict: Verdict
    found: str
    remedy: str | None
    figures: dict[str, Any]


class CheckList(BaseModel):
    """What `leasehold db doctor` says."""

    checks: list[Check]


class Invariant(BaseModel):
    """An invariant, and what breaks it."""

    id: str
    title: str = Field(description="what breaks it")
    rows: int = Field(description="0 on a sound database")
    sample: list[str] = Field(description="the first ids, at most five")


class InvariantList(BaseModel):
    """What `leasehold db verify` says."""

    finished: bool = Field(description="false: the time was over, and nothing is known")
    seconds: float = Field(description="seconds that the check took")
    invariants: list[Invariant]


class Gateway(BaseModel):
    """A gateway process of the last day."""

    name: str
    url: str
    state: str = Field(description="running, stopped, or dead: not seen for a minute")
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    figures: dict[str, float] = Field(
        description="what it said last: queue (pieces of work), wakeups_connected (0 or 1), requests and failed of "
        "five minutes, connections_refused of ten minutes"
    )


class GatewayList(BaseModel):
    """Gateway processes, by name; the next page is `after` the last name."""

    gateways: list[Gateway]


class AuditRow(BaseModel):
    """An act of an operator, or a read of payloads or results."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    details: dict[str, Any] | None


class AuditList(BaseModel):
    """Rows of the audit, newest first; the next page is `before` the id of the last."""

    audit: list[AuditRow]


class Look(Generic[T]):
    """One look at a time, whose result is the answer to all who ask within `FRESH` seconds of its end.

    Many open consoles then cost the database as much as one.
    """

    def __init__(self, *, fresh: float = FRESH) -> None:
        self._fresh = fresh
        self._task: asyncio.Task[T] | None = None
        self._ended = 0.0

    async def result(self, look: Callable[[], Awaitable[T]]) -> T:
        """Return what `look` gives, or gave lately. A look that failed is made again by the next who asks."""
        task = self._task
        if task is None or (task.done() and (_failed(task) or monotonic() - self._ended >= self._fresh)):
            task = self._task = asyncio.create_task(self._timed(look))
        return await asyncio.shield(task)

    async def _timed(self, look: Callable[[], Awaitable[T]]) -> T:
        try:
            return await look()
        finally:
            self._ended = monotonic()


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def _look(request: Request, name: str, *, fresh: float = FRESH) -> Look[Any]:
    """Return the look of this name of the request's application."""
    looks: dict[str, Look[Any]] | None = getattr(request.app.state, "operator_looks", None)
    if looks is None:
        looks = request.app.state.operator_looks = {}
    return looks.setdefault(name, Look(fresh=fresh))


router = APIRouter(prefix="/v1", tags=["operators"])


@router.get("/alerts", responses=problems(), openapi_extra=OPERATORS)
async def list_alerts(request: Request) -> AlertList:
    """List what is wrong now and what to do; looked at again every 5 seconds at most.

    The rules are those for Prometheus, as far as the pool's own tables can tell.
    """
    state = request.app.state

    def work(connection: Connection) -> AlertList:
        found = alert_queries.alerts(connection, cooldown=state.sync_service.cooldown)
        now = connection.now()
        return AlertList(now=now, alerts=[Alert(**asdict(each)) for each in found])

    answer: AlertList = await _look(request, "alerts").result(lambda: state.run(work))
    return answer


@router.get("/doctor", responses=problems(), openapi_extra=OPERATORS)
async def show_doctor(request: Request) -> CheckList:
    """Check the database as `leasehold db doctor` does; looked at again every 5 seconds at most."""
    state = request.app.state

    async def look() -> CheckList:
        checks = await state.callers.call(partial(doctor.run_checks, state.database))
        return CheckList(checks=[Check(**asdict(each)) for each in checks])

    answer: CheckList = await _look(request, "doctor").result(look)
    return answer


@router.get("/invariants", responses=problems(), openapi_extra=OPERATORS)
async def check_invariants(
    request: Request,
    seconds: Annotated[
        float, Query(gt=0, le=MOST_SECONDS, allow_inf_nan=False, description="the longest time of the check")
    ] = INVARIANT_SECONDS,
) -> InvariantList:
    """Check the safety invariants as `leasehold db verify` does, within a time.

    It reads whole tables. A gateway makes one check at a time, and whoever asks meanwhile gets its answer.
    """
    state = request.app.state

    async def look() -> InvariantList:
        began = monotonic()
        found = await state.callers.call(partial(invariants.verify_within, state.database, seconds=seconds))
        shown = [Invariant(**asdict(each)) for each in found or ()]
        return InvariantList(finished=found is not None, seconds=monotonic() - began, invariants=shown)

    answer: InvariantList = await _look(request, "invariants", fresh=0.0).result(look)
    return answer


@router.get("/gateways", responses=problems(400), openapi_extra=OPERATORS)
async def list_gateways(
    request: Request,
    after: Annotated[str, Query(description="only those with later names: the next page")] = "",
    limit: Annotated[int, Query(ge=1, le=wire.MAX_LIST)] = wire.MAX_LIST,
) -> GatewayList:
    """List the gateway processes of the last day, by name."""
    validation.check_text("after", after, 500)
    found = await request.app.state.run(lambda connection: processes.gateways(connection, after=after, limit=limit))
    return GatewayList(gateways=[Gateway(**asdict(each)) for each in found])


@router.get("/audit", responses=problems(400), openapi_extra=OPERATORS)
async def list_audit(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="id: only rows written before it")] = None,
    limit: Annotated[int, Query(ge=1, le=wire.MAX_LIST)] = 100,
) -> AuditList:
    """List what operators did and read, newest first."""
    found = await request.app.state.read(lambda connection: audit.rows(connection, before=before, limit=limit))
    return AuditList(audit=[AuditRow(**asdict(each)) for each in found])
