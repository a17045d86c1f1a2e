"""Operators' routes for shadows: let a version of the policy decide beside the one in force, end it, see what came."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Self

from fastapi import APIRouter, Path, Request
from leasehold.errors import NotFound
from pydantic import BaseModel, ConfigDict, Field

from assigner.api.routing import MAX_REASON_BYTES, OPERATORS, Caller, Read, problems
from assigner.api.submission import RequestModel
from assigner.cycle import shadow as shadowing
from schema import validation
from schema.policy import shadows, trials, versions
from schema.policy.shadows import Counts, Report
from schema.postgres.connection import Connection

#: The most values that a shadow does not compare, in one answer.
MAX_NOT_COMPARED = 100


class Start(RequestModel):
    """How much a version is to be compared with the one in force, and for how long."""

    share: float = Field(default=shadows.SHARE, description="the part of the cycles to look at, above 0 up to 1")
    seconds: float = Field(
        default=shadows.SECONDS, description=f"until it ends by itself; at most {shadows.MOST_SECONDS:.0f}"
    )
    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Stop(RequestModel):
    """Why the shadow is ended."""

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class ShadowCounts(BaseModel):
    """Decisions that were compared, and those that the shadow made otherwise."""

    model_config = ConfigDict(from_attributes=True)

    instance: str | None = Field(description="unset = it was removed, or these are the sums of all")
    bots: int = Field(description="choices of a bot for a job")
    other_bots: int = Field(description="those for which only one of both has a bot, or another one")
    orders: int = Field(description="places of jobs in the order of a cycle")
    other_orders: int = Field(description="those of jobs that have another place, or that only one of both places")
    victims: int = Field(description="jobs for which others are to be stopped")
    other_victims: int = Field(description="those for which other jobs would be stopped, or none")


class ShadowProcess(BaseModel):
    """What the shadow of one assigner process did."""

    model_config = ConfigDict(from_attributes=True)

    process: str
    at: datetime = Field(description="when it last told so")
    compared: int = Field(description="cycles")
    skipped: int = Field(description="cycles for which it had no processor time left")
    failed: int = Field(description="cycles in which the version raised an error")
    seconds: float = Field(description="of processor time")
    reason: str | None = Field(description="what it cannot compare, or why it cannot use the version")


class Shadow(BaseModel):
    """A version that decides beside the one in force, without an effect, and what came of it: sums of all processes."""

    policy: int
    share: float = Field(description="of the cycles, 0 to 1")
    author: str
    reason: str
    began_at: datetime
    ends_at: datetime
    ended_at: datetime | None = Field(description="unset = it goes on")
    ended: str | None = Field(description="why it goes on no more")
    total: ShadowCounts
    instances: list[ShadowCounts] = Field(description="those with the most differences first")
    processes: list[ShadowProcess]
    starts: int = Field(description=f"starts in its time, of the newest {shadows.STARTS:,}")
    fetched: int = Field(description="those of them that bots fetched: strategies and orders do not apply to them")
    not_compared: list[str] = Field(
        description="values that differ from the version in force and that no shadow compares: the first "
        f"{MAX_NOT_COMPARED}"
    )

    @classmethod
    def of(cls, report: Report, not_compared: Sequence[str]) -> Self:
        """Return the answer for a shadow."""
        shadow = report.shadow
        return cls(
            policy=shadow.policy,
            share=shadow.share,
            author=shadow.author,
            reason=shadow.reason,
            began_at=shadow.began_at,
            ends_at=shadow.ends_at,
            ended_at=shadow.ended_at,
            ended=shadow.ended,
            total=_counts(report.total),
            instances=[_counts(each) for each in report.instances],
            processes=[ShadowProcess.model_validate(each) for each in report.processes],
            starts=report.starts,
            fetched=report.fetched,
            not_compared=list(not_compared[:MAX_NOT_COMPARED]),
        )


class Shadows(BaseModel):
    """The shadow that goes on, or else the last one; unset = there was none."""

    shadow: Shadow | None


router = APIRouter(prefix="/v1/policies", tags=["operators"])


@router.get("/shadow", responses=problems(), openapi_extra=OPERATORS)
async def show_shadow(request: Request) -> Shadows:
    """Tell which version decides beside the one in force, and how often otherwise."""

    def work(connection: Connection) -> Shadows:
        found = shadows.newest(connection)
        return Shadows(shadow=None if found is None else told(connection, found))

    answer: Shadows = await request.app.state.run(work)
    return answer


@router.post("/{number}/shadow", responses=problems(404, 408, 409, 413, 415), openapi_extra=OPERATORS)
async def start_shadow(
    request: Request,
    number: Annotated[int, Path(ge=1, le=2**31 - 1, description="the version")],
    body: Annotated[Start, Read],
    caller: Caller,
) -> Shadow:
    """Let a version decide beside the one in force in all assigners, within 2 seconds. It has no effect on jobs."""
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)
    follower = getattr(request.app.state, "policy", None)  # a gateway of the tests follows none

    def work(connection: Connection) -> Shadow:
        if follower is not None:
            follower.check(versions.version(connection, number))
        made = shadows.start(
            connection, number, share=body.share, seconds=body.seconds, actor=caller.actor, reason=reason
        )
        return told(connection, made)

    answer: Shadow = await request.app.state.run(work)
    return answer


@router.post("/shadow/stop", responses=problems(404, 408, 413, 415), openapi_extra=OPERATORS)
async def stop_shadow(request: Request, body: Annotated[Stop, Read], caller: Caller) -> Shadow:
    """End the shadow; what it has counted stays. Asked again, nothing changes."""
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)
    answer: Shadow = await request.app.state.run(
        lambda connection: told(connection, shadows.stop(connection, actor=caller.actor, reason=reason))
    )
    return answer


def told(connection: Connection, shadow: shadows.Shadow) -> Shadow:
    """Return a shadow with what came of it."""
    return Shadow.of(shadows.report(connection, shadow), _not_compared(connection, shadow.policy))


def _not_compared(connection: Connection, policy: int) -> Sequence[str]:
    with suppress(NotFound):  # either may not be kept any more
        one, other = versions.version(connection, policy), versions.version(connection, None)
        assert one.content is not None
        assert other.content is not None
        return [
            f"{each.what}: {each.field}"
            for each in versions.differences(trials.without(other.content), one.content)
            if not shadowing.is_compared(each.what, each.field)
        ]
    return []


def _counts(counts: Counts) -> ShadowCounts:
    return ShadowCounts.model_validate(counts)
