"""The route of builds: what clients of the farm door have asked for, and how that stands."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from assigner.api.routing import CALLERS, Caller, problems
from assigner.queries import builds as build_queries
from schema.fields import Name
from schema.postgres.connection import Connection

#: The most builds of one answer.
MOST = 200


class Build(BaseModel):
    """One build: all actions with the same invocation, as the client names it."""

    instance: str
    invocation: str = Field(description="as its jobs have it as metadata")
    tool: str = Field(description="name and version of the client's program; empty = it did not tell")
    began_at: datetime
    seconds: float = Field(description="from its begin until its last action, or until now while some are unfinished")
    cached: int = Field(description="actions that the cache has answered")
    joined: int = Field(description="actions that have joined the job of an equal one")
    made: int = Field(description="actions for which a job was made")
    waiting: int
    running: int = Field(description="jobs that a bot has")
    failed: int = Field(description="jobs that have failed or are dead")
    cancelled: int
    more: bool = Field(description="true: it has more than 5,000 jobs, and only the newest 5,000 are counted")
    longest_wait: float | None = Field(description="seconds that a job of it waited at most for its first start")
    bots: int = Field(description="bots that have run its jobs")


class Builds(BaseModel):
    builds: list[Build]


router = APIRouter(prefix="/v1/builds", tags=["callers"])


@router.get("", responses=problems(400), openapi_extra=CALLERS)
async def newest(
    request: Request,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 50,
    instance: Annotated[Name | None, Query()] = None,
) -> Builds:
    """List builds, the one that asked for an action last first."""

    def work(connection: Connection) -> Builds:
        rows = build_queries.newest(connection, instances=caller.instances, instance=instance, limit=limit)
        return Builds.model_validate({"builds": rows})

    found: Builds = await request.app.state.read(work)
    return found
