"""A job as somebody asks for it: one model and one set of checks, for callers before they send and for the gateway."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from schema import limits
from schema.errors import BadInput
from schema.hours import Zone
from schema.limits import Name
from schema.resources import Need

#: Longest execution timeout of a job, seconds (a year).
MAX_TIMEOUT = 31_536_000.0
#: Most attempts that a job may ask for.
MAX_TRIES = 100
MAX_KEY_BYTES = 200
MAX_HINT_BYTES = 200
MAX_DEDUP_KEY_BYTES = 200
DEFAULT_INSTANCE = "default"
#: Most locks of one job, and the largest cost.
MAX_LOCKS, MAX_COST = 16, 1e12
#: The least urgent graph.
MAX_GRAPH_PRIORITY = 1000
#: Most that a user may raise a job by; each step is worth 5 points.
MAX_USER_PRIORITY = 10
#: Of one property; only the first bad one is told.
Values = Annotated[list[str], Field(fail_fast=True)]


class Payload(BaseModel):
    """The work itself. Only `command` is required."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    command: list[str] = Field(min_length=1, max_length=4096, description="program and arguments; no shell")
    env: dict[str, str] = Field(default={}, description="added to the bot's allow-listed environment")
    stdin: str | None = Field(default=None, description="text given to the command; unset = empty")


class JobRequest(Payload):
    """One job. Only `command` is required; no value of another type is taken."""

    model_config = ConfigDict(strict=True)

    instance: Name | None = Field(default=None, description="tenant; unset = the token's own, or `default`")
    properties: dict[str, str | Values] = Field(default={}, description="what its bot must offer")
    key: str | None = Field(
        default=None,
        min_length=1,
        description="makes the submit safe to repeat: the same key and request is the same job; at most 200 bytes",
    )
    priority: int = Field(default=0, ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX, description="lower = more urgent")
    units: int = Field(default=1, ge=1, le=limits.MAX_UNITS, description="capacity it takes of its bot")
    label: str = Field(default="", description="for listing; at most 64 bytes")
    locality_hint: str | None = Field(default=None, min_length=1, description="jobs with one hint like one bot")
    timeout_seconds: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT, description="of run time; unset = none")
    queue_timeout_seconds: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT, description="from the submit on; a job that still waits then is given up"
    )
    dedup_key: str | None = Field(
        default=None,
        min_length=1,
        description="joins the unfinished job of the instance that has the same one, whatever else is asked for here, "
        "instead of making another; at most 200 bytes",
    )
    locks: list[Name] = Field(
        default=[], max_length=MAX_LOCKS, description="names, of its instance, of what it has for itself while it runs"
    )
    estimated_cost: float | None = Field(
        default=None, ge=0, le=MAX_COST, description="in the unit of its instance's budget; unset = 1"
    )
    resource_class: Name | None = Field(
        default=None, description="what it uses, whose rate is limited; unset = nothing"
    )
    model: Name | None = Field(default=None, description="of its resource class, which may have a rate of its own")
    graph_priority: int | None = Field(
        default=None, ge=1, le=MAX_GRAPH_PRIORITY, description="of its graph among graphs, lower = sooner; unset = 5"
    )
    job_class: Name | None = Field(
        default=None, description="by its kind what it is worth and when it may start: its class's points and windows"
    )
    user_priority: int | None = Field(
        default=None, ge=0, le=MAX_USER_PRIORITY, description="of a job with a class: each step is worth 5 points"
    )
    project: Name | None = Field(default=None, description="what it belongs to; a job with a class gets 10 points")
    owner: Name | None = Field(default=None, description="whose quota of its instance it uses")
    service_level: Name | None = Field(default=None, description="its priority and, unless given, its timeout")
    urgency: int | None = Field(
        default=None,
        ge=100 - limits.PRIORITY_MAX,
        le=100 - limits.PRIORITY_MIN,
        description="points, higher = more urgent: the priority 100 - urgency; not together with it",
    )
    deadline_seconds: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT, description="from the submit on: when it should have ended; it is hastened"
    )
    estimated_seconds: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT, description="of run time; unset = as its class ran lately"
    )
    resources: Need = Field(default={}, description="what it takes of its bot's resources while it runs")
    batch_key: Name | None = Field(
        default=None, description="jobs of its instance with the same one go to one bot together, where one has room"
    )
    preferred_hours: list[Annotated[int, Field(ge=0, le=23)]] = Field(
        default=[],
        max_length=24,
        description="hours of the day at which it may start, each the whole of it; none = any",
    )
    preferred_zone: Zone = Field(default="UTC", description="the time zone of `preferred_hours`")
    max_attempts: int = Field(default=limits.MAX_ATTEMPTS, ge=1, le=MAX_TRIES)
    retry_failed: bool = Field(default=False, description="whether a command that fails is tried again")

    def normal(self, *, instance: str = DEFAULT_INSTANCE) -> dict[str, Any]:
        """The request as `moves.submit` takes it; `instance` is for one that names none. Raises BadInput."""
        # Keys remember the digest of their request, so what came later is in it only if it is given.
        later = {
            "dedup_key": _short("dedup_key", self.dedup_key, MAX_DEDUP_KEY_BYTES),
            "queue_timeout_seconds": self.queue_timeout_seconds,
            "terms": self._terms(),
            "own": self._own() or None,
            "estimated_cost": self.estimated_cost,
            "deadline_seconds": self.deadline_seconds,
            "estimated_seconds": self.estimated_seconds,
            "priority": self._priority(),
        }
        return {
            "instance": self.instance or instance,
            "properties": limits.normal_properties("properties", self.properties),
            "key": _short("key", self.key, MAX_KEY_BYTES),
            "units": self.units,
            "label": limits.check_text("label", self.label, limits.MAX_LABEL),
            "locality_hint": _short("locality_hint", self.locality_hint, MAX_HINT_BYTES),
            "timeout_seconds": self.timeout_seconds,
            "max_attempts": self.max_attempts,
            "retry_failed": self.retry_failed,
            "payload": self._payload(),
        } | {name: value for name, value in later.items() if value is not None}

    def _priority(self) -> int | None:
        """What it says itself; None if its service level or its class decides. Raises BadInput."""
        is_given, has_class = "priority" in self.model_fields_set, self.job_class is not None
        if self.urgency is not None:
            if is_given:
                raise BadInput("urgency", "and priority are two words for one thing: give one of them")
            return 100 - self.urgency
        if self.user_priority is not None and not has_class:
            raise BadInput("user_priority", "raises a job that has a job_class")
        if self.dedup_key is not None and (has_class or self.service_level is not None):
            raise BadInput("dedup_key", "goes with a priority, not with a job_class or a service_level")
        return None if not is_given and (has_class or self.service_level is not None) else self.priority

    def _terms(self) -> dict[str, Any] | None:
        """What it asks for beside a place and shares with others; None if it asks for nothing."""
        if self.model is not None and self.resource_class is None:
            raise BadInput("model", "needs a resource_class")
        shared = {
            "locks": sorted(set(self.locks)),
            "resource_class": self.resource_class,
            "model": self.model,
            "graph_priority": self.graph_priority,
            "job_class": self.job_class,
            "project": self.project,
            "owner": self.owner,
            "resources": self.resources,
            # Jobs of one queue then fit on the same bots.
            "units": self.units if self.resources and self.units > 1 else None,
            "batch_key": self.batch_key,
            "preferred_hours": sorted(set(self.preferred_hours)),
            "preferred_zone": self.preferred_zone if self.preferred_hours else None,
        }
        terms = {name: value for name, value in shared.items() if value}
        is_timed = self.deadline_seconds is not None or self.estimated_seconds is not None
        # Empty terms are those of managed instances: who has none else is told from these.
        return terms or ({"own": True} if is_timed or self._own() else None)

    def _own(self) -> dict[str, Any]:
        """What it asks for by itself: what its points are made of, and whose timeout it has."""
        own: dict[str, Any] = {}
        is_fixed = self._priority() is not None
        if self.service_level is not None:
            own |= {"level": self.service_level} | ({"fixed": True} if is_fixed else {})
        elif not is_fixed:
            own |= {"class": self.job_class} | ({"project": True} if self.project else {})
            own |= {"user_priority": self.user_priority} if self.user_priority else {}
        return own

    def _payload(self) -> dict[str, Any]:
        if not self.command[0]:
            raise BadInput("command", "must name a program")
        for name in self.env:
            if not name or "=" in name:
                raise BadInput("env", f"'{limits.escaped(name, 60)}' is not the name of a variable")
        # A command line may hold what is no text, in bytes that the terminal's encoding does not know.
        for field, texts in (("command", self.command), ("env", [*self.env, *self.env.values()])):
            for text in texts:
                limits.check_text(field, text, limits.MAX_PAYLOAD_BYTES)
        payload: dict[str, Any] = {"command": self.command}
        if self.env:
            payload["env"] = self.env
        if self.stdin is not None:
            payload["stdin"] = limits.check_text("stdin", self.stdin, limits.MAX_PAYLOAD_BYTES)
        size = len(json.dumps(payload, ensure_ascii=False).encode())
        if size > limits.MAX_PAYLOAD_BYTES:
            raise BadInput(
                "command", f"with env and stdin is {size} bytes, at most {limits.MAX_PAYLOAD_BYTES} are allowed"
            )
        return payload


def _short(field: str, value: str | None, limit: int) -> str | None:
    return None if value is None else limits.check_text(field, value, limit)
