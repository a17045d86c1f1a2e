"""The routes of metadata: the sum of all jobs with a value, and the values of a key."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from leasehold import wire
from leasehold.errors import BadInput
from pydantic import BaseModel, Field

from assigner.api.routing import CALLERS, Caller, problems
from assigner.queries import metadata as metadata_queries
from schema import filters, validation
from schema.fields import Name
from schema.filters import Metadata
from schema.postgres.connection import Connection


class Summary(BaseModel):
    """All jobs with the asked metadata."""

    jobs: dict[str, int] = Field(description="number of jobs by state")
    more: bool = Field(description="true: there are more than 100,000, and only the newest are counted")
    unfinished: int
    first_queued_at: datetime | None
    last_ended_at: datetime | None = Field(description="end of the job that ended last; null = none has ended")
    run_seconds: float = Field(description="run time of all attempts so far, in seconds")
    remaining_seconds: float = Field(
        description="expected run time of what is left, in seconds: by the estimate of each request, else the "
        "prediction for its class, else the average of the jobs here that succeeded"
    )
    unestimated: int = Field(description="unfinished jobs without any of these estimates, which count as 0 seconds")


class Values(BaseModel):
    values: list[str]
    next: str | None = Field(description="`after` of the page that follows; null = there is none")


router = APIRouter(prefix="/v1/metadata", tags=["callers"])


@router.get("/summary", responses=problems(400), openapi_extra=CALLERS)
async def summary(
    request: Request,
    caller: Caller,
    metadata: Annotated[list[Metadata], Query(min_length=1, max_length=validation.MAX_METADATA)],
    instance: Annotated[Name | None, Query()] = None,
) -> Summary:
    """Sum up the jobs that have all of these `KEY=VALUE`: everything of one build."""
    wanted = dict(map(filters.pair, metadata))
    if len(wanted) < len(metadata):
        raise BadInput("metadata", "names a key twice")

    def work(connection: Connection) -> Summary:
        row = metadata_queries.summary(connection, wanted, instances=caller.instances, instance=instance)
        return Summary.model_validate(row)

    found: Summary = await request.app.state.read(work)
    return found


@router.get("", responses=problems(400), openapi_extra=CALLERS)
async def values(
    request: Request,
    caller: Caller,
    key: str,
    contains: Annotated[str | None, Query(max_length=validation.MAX_METADATA_BYTES)] = None,
    after: Annotated[str | None, Query(max_length=validation.MAX_METADATA_BYTES)] = None,
    limit: Annotated[int, Query(ge=1, le=wire.MAX_LIST)] = 100,
    instance: Annotated[Name | None, Query()] = None,
) -> Values:
    """List the values of a key. A page may hold fewer than `limit` and still have a `next`."""
    validation.check_metadata_key("key", key)
    for field, given in (("contains", contains), ("after", after)):
        if given is not None:
            validation.check_text(field, given, validation.MAX_METADATA_BYTES)

    def work(connection: Connection) -> Values:
        found, following = metadata_queries.values(
            connection,
            key,
            contains=contains,
            after=after,
            limit=limit,
            instances=caller.instances,
            instance=instance,
        )
        return Values(values=found, next=following)

    answer: Values = await request.app.state.read(work)
    return answer
