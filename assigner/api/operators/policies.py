"""Operators' routes for versions of the policy: list, show, compare, put one into force, roll back."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from leasehold.errors import BadInput
from pydantic import BaseModel, ConfigDict, Field

from assigner.api.operators.shadows import Shadow
from assigner.api.operators.shadows import told as shadow_told
from assigner.api.routing import MAX_REASON_BYTES, OPERATORS, Caller, Read, problems
from assigner.api.submission import RequestModel
from assigner.operator_resources import priorities
from assigner.operator_resources import versions as activation
from schema import validation
from schema.policy import shadows, versions
from schema.policy.versions import Version
from schema.postgres.connection import Connection
from schema.tenancy.tokens import Principal
from schema.timing import DEAD_AFTER

#: The most versions, and the most differences, in one answer.
MAX_VERSIONS, MAX_CHANGES = 200, 1000
#: Stands for the number of the version in force.
ACTIVE = "active"

Number = Annotated[str, Path(max_length=20, description=f"a number, or `{ACTIVE}` for the one in force")]


class Change(BaseModel):
    """A value that differs; unset = there is none."""

    model_config = ConfigDict(from_attributes=True)

    what: str = Field(description="a resource and a name, an assigner entry, or a section of the configuration")
    field: str
    before: Any
    after: Any


class PolicyVersion(BaseModel):
    """A version of the policy, which never changes."""

    model_config = ConfigDict(from_attributes=True)

    id: int = Field(description="its number")
    digest: str = Field(description="equal for equal contents")
    made_at: datetime
    author: str = Field(description="who made the change; config = a configuration file")
    reason: str
    parent: int | None = Field(description="the version that was in force before; unset = there was none")
    changed: int = Field(description="values that differ from it")
    changes: list[Change] = Field(description=f"the first {versions.STORED_CHANGES} of them")
    drafted: bool = Field(description="it was made without being put into force, as `leasehold tune` does")
    in_force: bool


class PolicyContent(PolicyVersion):
    """A version with its content."""

    content: dict[str, Any] = Field(description="settings by section, limits by resource and name, names declared")
    shadow: Shadow | None = Field(default=None, description="its last shadow; unset = it was none lately")


class Runner(BaseModel):
    """A live process and the version by which it works."""

    model_config = ConfigDict(from_attributes=True)

    kind: str = Field(description="assigner or gateway")
    name: str
    policy: int | None = Field(description="unset = it has told none yet")


class PolicyList(BaseModel):
    """Versions, newest first, and who works by which. For the next page, give the last number as `before`."""

    policies: list[PolicyVersion]
    processes: list[Runner]


class Differences(BaseModel):
    """What differs between two versions."""

    before: int
    after: int
    changes: list[Change] = Field(description=f"the first {MAX_CHANGES}")
    left_out: int = Field(description="further differences")


class Rollback(RequestModel):
    """Why the version in force is taken back, and which one that is."""

    reason: str = Field(default="", description="for the audit; at most 500 bytes")
    of: int | None = Field(
        default=None,
        alias="from",
        ge=1,
        le=2**31 - 1,
        description="the version that is to be taken back; if another one is in force, nothing happens. With it a "
        "request may be repeated. Unset = whichever is in force",
    )


class Activation(RequestModel):
    """Why a version is put into force."""

    reason: str = Field(default="", description="for the audit; at most 500 bytes")
    stale: bool = Field(
        default=False, description="true = also a draft made while another version was in force, taking back changes"
    )


class Draft(RequestModel):
    """What a draft says otherwise than the version in force."""

    settings: dict[str, dict[str, Any]] = Field(
        description="sections of the configuration that decide, whole; of `assigners` entries by name, whole",
    )
    limits: dict[str, dict[str, dict[str, Any]]] = Field(
        default={}, description="what operators set, by resource and name; values that are not named stay"
    )
    reason: str = Field(default="", description="kept with the version; at most 500 bytes")


class Activated(BaseModel):
    """A version is in force. Processes work by it within 2 seconds."""

    model_config = ConfigDict(from_attributes=True)

    id: int = Field(description="the one in force: a new one, as the wanted one but for what was kept, if anything was")
    kept: list[str] = Field(description="what could not be as it was, and why")


router = APIRouter(prefix="/v1/policies", tags=["operators"])


@router.get("", responses=problems(), openapi_extra=OPERATORS)
async def list_policies(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="only versions with lower numbers")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_VERSIONS)] = 20,
) -> PolicyList:
    """List the versions of the policy, newest first, and by which one each live process works."""

    def work(connection: Connection) -> PolicyList:
        found = versions.versions(connection, before=before, limit=limit)
        runners = versions.runners(connection, dead_after=DEAD_AFTER)
        return PolicyList.model_validate({"policies": found, "processes": runners}, from_attributes=True)

    answer: PolicyList = await request.app.state.run(work)
    return answer


@router.post("", responses=problems(404, 408, 409, 413, 415), openapi_extra=OPERATORS)
async def draft_policy(request: Request, body: Annotated[Draft, Read], caller: Caller) -> PolicyVersion:
    """Make a version that is not in force: the one in force, with what the request says otherwise."""
    reason = validation.check_text("reason", body.reason, MAX_REASON_BYTES)
    state, by = request.app.state, {"actor": caller.actor, "reason": reason}
    work = partial(activation.draft, state.database, body.settings, body.limits, check=usable(request), **by)
    return PolicyVersion.model_validate(await state.callers.call(work))


@router.get("/{number}", responses=problems(404), openapi_extra=OPERATORS)
async def show_policy(request: Request, number: Number) -> PolicyContent:
    """Show one version with its content."""
    id = numbered(number)

    def work(connection: Connection) -> PolicyContent:
        found = versions.version(connection, id)
        shadow = shadows.newest(connection, policy=found.id)
        told = None if shadow is None else shadow_told(connection, shadow)
        return PolicyContent.model_validate(found).model_copy(update={"shadow": told})

    answer: PolicyContent = await request.app.state.run(work)
    return answer


@router.get("/{number}/diff", responses=problems(404), openapi_extra=OPERATORS)
async def compare_policies(
    request: Request,
    number: Number,
    other: Annotated[str, Query(max_length=20, description="the version to compare with; `active` = the one in force")]
    = ACTIVE,
) -> Differences:  # fmt: skip
    """Tell what differs between this version and another one."""

    def work(connection: Connection) -> Differences:
        one, two = (versions.version(connection, numbered(each)) for each in (number, other))
        found = _differences(one, two)
        shown = [Change.model_validate(each) for each in found[:MAX_CHANGES]]
        return Differences(before=one.id, after=two.id, changes=shown, left_out=len(found) - len(shown))

    answer: Differences = await request.app.state.run(work)
    return answer


@router.post("/{number}/activate", responses=problems(404, 408, 409, 413, 415), openapi_extra=OPERATORS)
async def activate_policy(
    request: Request, number: Number, body: Annotated[Activation, Read], caller: Caller
) -> Activated:
    """Put a version into force: what operators set becomes as it was, and processes work by it within 2 seconds."""
    id = numbered(number)
    if id is None:
        raise BadInput("number", "must be the number of a version")
    return await _activated(request, partial(activation.activate, id=id, stale=body.stale), body.reason, caller)


@router.post("/rollback", responses=problems(404, 408, 409, 413, 415), openapi_extra=OPERATORS)
async def roll_back_policy(request: Request, body: Annotated[Rollback, Read], caller: Caller) -> Activated:
    """Put the version into force that was so before the present one. A request with `from` may be repeated."""
    return await _activated(request, partial(activation.roll_back, of=body.of), body.reason, caller)


async def _activated(
    request: Request, act: Callable[..., activation.Activated], reason: str, caller: Principal
) -> Activated:
    reason = validation.check_text("reason", reason, MAX_REASON_BYTES)
    state, check = request.app.state, usable(request)
    done = await state.run(lambda connection: act(connection, actor=caller.actor, reason=reason, check=check))
    # Also if nothing was to do: then a process may have died that was about to.
    await state.callers.call(lambda: priorities.reprice(state.database, actor=caller.actor))
    return Activated.model_validate(done)


def usable(request: Request) -> activation.Check:
    """Return what raises Conflict for a version that the gateway cannot use."""
    follower = getattr(request.app.state, "policy", None)  # a gateway of the tests follows none
    check: activation.Check = (lambda _: None) if follower is None else follower.check
    return check


def numbered(number: str) -> int | None:
    """Return the number of a version; None for the one in force. Raises BadInput."""
    if number == ACTIVE:
        return None
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 2**31 - 1):
        raise BadInput("number", f"must be the number of a version, or '{ACTIVE}'")
    return int(number)


def _differences(one: Version, other: Version) -> Sequence[versions.Change]:
    assert one.content is not None
    assert other.content is not None
    return versions.differences(one.content, other.content)
