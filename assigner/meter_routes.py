"""The operators' routes for usage meters."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import Connection

from assigner.routes import OPERATORS, Caller, Read, problems
from assigner.submission import Asked
from schema import meters


class MeterRequest(Asked):
    used: float = Field(ge=0, le=meters.MAX_AMOUNT, description="in a unit of the meter's own")
    limit: float = Field(gt=0, le=meters.MAX_AMOUNT, description="the most there may be used, in the same unit")
    resets_at: Annotated[AwareDatetime, Field(strict=False)] | None = Field(
        default=None, description="when it begins at 0 again; unset = not known"
    )


class Meter(BaseModel):
    name: str
    used: float
    limit: float
    resets_at: datetime | None
    updated_at: datetime = Field(description="when it was read")


class MeterList(BaseModel):
    """By name."""

    meters: list[Meter]


class Done(BaseModel):
    name: str


router = APIRouter(prefix="/v1", tags=["meters"])


@router.get("/meters", responses=problems(), openapi_extra=OPERATORS)
async def list_meters(request: Request) -> MeterList:
    """Every meter that has been read."""
    found = await request.app.state.run(meters.meters)
    return MeterList(
        meters=[
            Meter(name=each.name, used=each.used, limit=each.most, resets_at=each.resets_at, updated_at=each.updated_at)
            for each in found
        ]
    )


@router.put("/meters/{name}", responses=problems(400, 408, 413, 415), openapi_extra=OPERATORS)
async def set_meter(request: Request, name: str, body: Annotated[MeterRequest, Read]) -> Done:
    """A meter was read. Windows that go by it do so from now on."""

    def work(connection: Connection) -> None:
        meters.put(connection, name, used=body.used, most=body.limit, resets_at=body.resets_at)

    await request.app.state.run(work)
    return Done(name=name)


@router.delete("/meters/{name}", responses=problems(404), openapi_extra=OPERATORS)
async def remove_meter(request: Request, name: str, caller: Caller) -> Done:
    """Forget a meter. Windows that go by it are closed until it is read again."""

    def work(connection: Connection) -> None:
        meters.remove(connection, name, actor=caller.actor)

    await request.app.state.run(work)
    return Done(name=name)
