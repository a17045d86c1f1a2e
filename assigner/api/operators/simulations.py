"""Operators' routes for reports of simulations that were kept: list and show."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from leasehold.errors import NotFound
from pydantic import BaseModel, ConfigDict, Field

from assigner.api.routing import OPERATORS, problems
from schema.accounting import simulations
from schema.postgres.connection import Connection

MOST = 2**31 - 1


class Kept(BaseModel):
    """A report that was kept under a title."""

    model_config = ConfigDict(from_attributes=True)

    id: int = Field(description="its number")
    made_at: datetime
    title: str


class KeptList(BaseModel):
    """Reports, newest first. For the next page, give the last number as `before`."""

    simulations: list[Kept]


class Report(BaseModel):
    """What `leasehold simulate` has printed, and the points of its charts."""

    head: list[str] = Field(description="lines above the table")
    columns: list[str]
    rows: list[list[str]] = Field(
        description="of an instance, a job class or all: the name of a figure, then the figures"
    )
    losers: dict[str, list[list[str]]] = Field(
        description="by what was tried: jobs that lose most, each with its instance and its wait before and then"
    )
    since: float = Field(description="seconds since 1970")
    until: float = Field(description="seconds since 1970")
    charts: dict[str, dict[str, dict[str, list[float | None]]]] = Field(
        description="by column: `units` in use and 95 % `waits` in seconds, by instance, in parts of the span"
    )


class Whole(Kept):
    """A report with its content."""

    report: Report


router = APIRouter(prefix="/v1/simulations", tags=["operators"])


@router.get("", responses=problems(), openapi_extra=OPERATORS)
async def list_simulations(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=MOST, description="only reports with lower numbers")] = None,
    limit: Annotated[int, Query(ge=1, le=simulations.KEPT)] = simulations.KEPT,
) -> KeptList:
    """List the reports that were kept, newest first."""

    def work(connection: Connection) -> dict[str, Any]:
        return {"simulations": simulations.simulations(connection, before=before, limit=limit)}

    return KeptList.model_validate(await request.app.state.read(work), from_attributes=True)


@router.get("/{id}", responses=problems(404), openapi_extra=OPERATORS)
async def show_simulation(request: Request, id: Annotated[int, Path(ge=1, le=MOST)]) -> Whole:
    """Show a report."""

    def work(connection: Connection) -> simulations.Simulation:
        found = simulations.simulation(connection, id)
        if found is None:
            raise NotFound(f"simulation {id} is not kept: the newest {simulations.KEPT} are")
        return found

    return Whole.model_validate(await request.app.state.read(work))
