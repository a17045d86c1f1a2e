"""The operators' routes that take a bot, an instance or an assigner process out of service, and back into it."""

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from sqlalchemy import Connection

from assigner import answers, queries
from assigner.routes import MAX_REASON_BYTES, OPERATORS, Caller, Read, problems
from assigner.submission import Asked
from schema import drains, limits, moves
from schema.errors import NotFound


class DrainRequest(Asked):
    draining: bool = True
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class TimedDrainRequest(DrainRequest):
    deadline: float | None = Field(
        default=None,
        ge=0,
        le=drains.MAX_DEADLINE,
        description="seconds after which what still runs is stopped and queued again; unset = never",
    )


class Assigner(BaseModel):
    name: str
    state: str = Field(description="running, draining (it has not obeyed yet), drained, stopped, or dead")
    draining: bool = Field(description="an operator asked it to place nothing")
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None


class AssignerList(BaseModel):
    """The assigner processes of the last day, by name."""

    assigners: list[Assigner]


router = APIRouter(prefix="/v1", tags=["callers"])


@router.get("/bots/{name}", responses=problems(400, 404), openapi_extra=OPERATORS)
async def bot(request: Request, name: str) -> answers.ShownBot:
    """One bot."""
    limits.check_name("name", name)
    row = await request.app.state.run(lambda connection: queries.bot(connection, name))
    if row is None:
        raise NotFound(f"bot: no bot '{name}'")
    return answers.ShownBot.model_validate(row)


@router.post("/bots/{name}/drain", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def drain_bot(
    request: Request, name: str, body: Annotated[TimedDrainRequest, Read], caller: Caller
) -> answers.DrainAnswer:
    """Ask a bot to take no more work, or to go on."""
    limits.check_name("name", name)
    wish = _timed(body)

    def work(connection: Connection) -> None:
        moves.drain(connection, name, actor=caller.actor, **wish)

    await request.app.state.run(work)
    return answers.DrainAnswer(name=name, draining=body.draining)


@router.post("/instances/{name}/drain", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def drain_instance(
    request: Request, name: str, body: Annotated[TimedDrainRequest, Read], caller: Caller
) -> answers.DrainAnswer:
    """Start no more jobs of an instance, or start them again. Its jobs stay queued."""
    limits.check_name("name", name)
    wish = _timed(body)

    def work(connection: Connection) -> None:
        drains.drain_instance(connection, name, actor=caller.actor, **wish)

    await request.app.state.run(work)
    return answers.DrainAnswer(name=name, draining=body.draining)


@router.get("/assigners", responses=problems(), openapi_extra=OPERATORS)
async def assigners(request: Request) -> AssignerList:
    """Every assigner process of the last day."""
    found = await request.app.state.run(drains.assigners)
    return AssignerList(assigners=[Assigner(**asdict(each)) for each in found])


@router.post("/assigners/{name}/drain", responses=problems(400, 404, 408, 413, 415), openapi_extra=OPERATORS)
async def drain_assigner(
    request: Request, name: str, body: Annotated[DrainRequest, Read], caller: Caller
) -> answers.DrainAnswer:
    """Ask an assigner process to place no more jobs, or to go on. Its upkeep goes on."""
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)

    def work(connection: Connection) -> None:
        drains.drain_assigner(connection, name, draining=body.draining, actor=caller.actor, reason=reason)

    await request.app.state.run(work)
    return answers.DrainAnswer(name=name, draining=body.draining)


def _timed(body: TimedDrainRequest) -> dict[str, Any]:
    drains.check_deadline("deadline", body.deadline, draining=body.draining)
    reason = limits.check_text("reason", body.reason, MAX_REASON_BYTES)
    return {"draining": body.draining, "deadline": body.deadline, "reason": reason}
