"""The declaration of pauses, by which operators keep the jobs of a label, task, instance or schedule from starting."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

from pydantic import Field

from assigner.operator_resources.declaration import (
    ALL,
    By,
    Fields,
    Key,
    Keys,
    Page,
    Removal,
    Request,
    Resource,
    Row,
    Setting,
    check_scope,
)
from schema.policy import pauses
from schema.policy.pauses import EVERYWHERE, Kind
from schema.postgres.connection import Connection
from schema.tenancy import pausing


class PauseRequest(Request):
    """Nothing but the reason, which everybody sees who sees a job that waits for it."""


class Pause(Row):
    kind: str = Field(description="label, task, instance or schedule")
    name: str
    instance: str = Field(description="of a label or a task only the jobs of that instance, * = all")
    reason: str
    actor: str = Field(description="who has paused it; empty: it was drained or disabled without being noted here")
    at: datetime | None = Field(description="since when")


def _pauses(connection: Connection, _: Page) -> list[Pause]:
    return [Pause.model_validate(vars(each) | {"instance": each.instance or ALL}) for each in pauses.pauses(connection)]


def _scope(keys: Keys) -> dict[str, Any]:
    return {"instance": EVERYWHERE if keys[1] == ALL else keys[1]}


def _pause(connection: Connection, keys: Keys, _: PauseRequest, by: By) -> Fields:
    kind = cast("Kind", keys[0])
    pausing.pause(connection, kind, keys[2], **_scope(keys), **by)
    return vars(pauses.stopped(connection, kind, keys[2], **_scope(keys))) if kind in ("label", "task") else None


def _paused(done: Mapping[str, Any]) -> str:
    """Say what is paused, and of a label or a task how much it stops: its name may be misspelt."""
    told = f"{done['kind']} {done['name']} is paused"
    if "jobs" not in done:
        return told
    jobs, schedules = done["jobs"], done["schedules"]
    if not jobs and not schedules:
        return f"{told}; no queued job and no schedule has this {done['kind']} now"
    at_least = "at least " if jobs >= pauses.COUNTED else ""
    waiting = f"{at_least}{jobs:,} queued {'job waits' if jobs == 1 else 'jobs wait'}"
    return f"{told}; {waiting}" + (
        f", {schedules} {'schedule' if schedules == 1 else 'schedules'}" if schedules else ""
    )


def _resume(connection: Connection, keys: Keys, by: By) -> None:
    pausing.resume(connection, cast("Kind", keys[0]), keys[2], **_scope(keys), **by)


PAUSES = Resource(
    name="pause",
    plural="pauses",
    help="Labels, tasks, instances and schedules that are paused: their queued jobs stay queued, running ones go on.",
    keys=(
        Key("kind", "KIND", check=pausing.check_kind),
        Key("instance", "NAME", option="--instance", default=ALL, check=check_scope),
        Key("name", "NAME", check=pausing.check_any, slashes=True),
    ),
    row=Pause,
    rows=_pauses,
    columns=(
        ("kind", "kind"),
        ("instance", "instance"),
        ("name", "name"),
        ("reason", "reason"),
        ("by", "actor"),
        ("since", "at"),
    ),
    set=Setting(
        help="Pause a label, a task, an instance or a schedule. KIND is one of these words. Jobs that wait show the "
        "--reason. --instance: only the jobs of that instance; a schedule needs it.",
        model=PauseRequest,
        apply=_pause,
    ),
    printed=_paused,
    remove=Removal(
        help="Resume what is paused: its jobs start at the next look of the assigners.",
        apply=_resume,
        printed="{kind} {name} is resumed",
    ),
)

RESOURCES: tuple[Resource[Any], ...] = (PAUSES,)
