"""Jobs that a request acts on: those it names by their ids, or those that pass a filter.

A call with a filter acts on a bounded number of jobs in one transaction, from the newest to the oldest, and answers
with the cursor of the next call. Jobs that are submitted after the first call are left alone, so the calls come to an
end. The filter only chooses: what may happen to a job is decided by the move, on the locked row.
"""

from collections.abc import Collection, Mapping
from typing import Any

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.states import JobState
from pydantic import Field

from assigner.api.submission import RequestModel
from assigner.queries import listing
from schema.filters import JobFilter, Sort
from schema.postgres.connection import Connection
from schema.tenancy.tokens import Principal

#: The most jobs that one call with a filter acts on. A requeue may make a new job for each.
MAX_SELECTED = 500


class Selection(RequestModel):
    """Either `ids`, or a filter in `where`."""

    ids: list[str] | None = Field(default=None, min_length=1, max_length=wire.MAX_BATCH)
    where: JobFilter | None = Field(
        default=None,
        description=f"instead of ids: a filter, which must name a condition. A call acts on at most {MAX_SELECTED} "
        "jobs, the newest first, and on none that was submitted after the first call, the one without a cursor",
    )
    cursor: str | None = Field(default=None, max_length=500, description="with `where`: `next` of the call before")

    def named(self) -> list[str]:
        """The ids; empty if a filter chooses. Raises BadInput unless the request has the one or the other."""
        if (self.ids is None) == (self.where is None):
            raise BadInput("ids", "give either ids or where")
        if self.where is not None and self.where.says_nothing():
            raise BadInput("where", "names no condition: a filter may not choose all jobs of the pool")
        if self.cursor is not None and self.where is None:
            raise BadInput("cursor", "goes with where")
        return self.ids or []


def select(
    connection: Connection, caller: Principal, body: Selection, *, states: Collection[JobState]
) -> tuple[list[str], str | None]:
    """The ids of the next jobs that pass the filter, and the cursor of the next call.

    states: the states in which the act changes a job; the filter asks for these unless it names states itself.
    """
    assert body.where is not None, "ids are not looked up"
    where = body.where if body.where.state else body.where.model_copy(update={"state": sorted(states)})
    request = listing.Request.of(where, sort=Sort.SUBMITTED, limit=MAX_SELECTED, cursor=body.cursor)
    found = listing.page(connection, request, instances=caller.instances)
    return [str(job["id"]) for job in found.jobs], found.next


def audited(body: Selection) -> dict[str, Any]:
    """What the audit log records of the filter."""
    given: Mapping[str, Any] = {} if body.where is None else body.where.model_dump(mode="json", exclude_defaults=True)
    return {"where": given} if given else {}
