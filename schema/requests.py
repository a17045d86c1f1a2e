"""Requests for jobs and graphs: one model and one set of checks, for callers before they send and for the gateway.

A request is flat: all its fields stand at the top. The nested form, in which `moves.submit` takes and stores a request,
is accepted too: `flat` and `flat_all` turn it into the flat form.

One module because a node of a graph is a job with two more fields, and both are checked by the same functions.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from leasehold import wire
from leasehold.errors import BadInput, check_each
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from schema import validation
from schema.fields import JobLock, Moment, Name, Need, Zone, first_errors

#: Most attempts that a request may allow.
MAX_TRIES = 100
MAX_KEY_BYTES = 200
MAX_HINT_BYTES = 200
MAX_DEDUP_KEY_BYTES = wire.MAX_DEDUP_KEY_BYTES
DEFAULT_INSTANCE = "default"
#: Most exceptions, or exit codes, that a retry policy names.
MAX_CHOSEN = 20
#: Most locks of one job; largest expected cost.
MAX_LOCKS, MAX_COST = 16, 1e12
#: Graph priority of the least urgent graph.
MAX_GRAPH_PRIORITY = 1000
#: Most steps of `user_priority`.
MAX_USER_PRIORITY = 10
#: Values of one property; only the first bad one is reported.
Values = Annotated[list[str], Field(fail_fast=True)]


#: What a submit does if its deduplication key is taken.
OnConflict = Literal["join", "replace", "refuse"]

#: The fields of a request in the order and under the headings of the help of `submit`.
GROUPS: Mapping[str, Sequence[str]] = {
    "What to run": ("command", "env", "stdin", "label", "metadata"),
    "Where it may run": (
        *("properties", "preferred_properties", "prefer_seconds"),
        *("units", "resources", "locality_hint", "batch_key"),
    ),
    "When and how urgently": (
        *(
            "schedule_after",
            "delay",
            "priority",
            "job_class",
            "user_priority",
            "service_level",
            "graph_priority",
        ),
        *("deadline_seconds", "estimated_seconds", "preferred_hours", "preferred_zone"),
    ),
    "Limits and constraints": ("locks", "resource_class", "model", "estimated_cost"),
    "Retries and time-outs": (
        *("timeout_seconds", "queue_timeout_seconds", "max_attempts", "retry_failed", "retry", "max_lost"),
    ),
    "Repeated submits": ("key", "dedup_key", "on_conflict", "unique_for", "debounce", "debounce_max"),
    "Tenancy": ("instance", "owner", "project"),
}


#: The parts of the nested form: name in the part → field of the flat form.
_PARTS: Mapping[str, Mapping[str, str]] = {
    "payload": {name: name for name in ("command", "env", "stdin", "retry", "max_lost")},
    "terms": {
        name: name
        for name in (
            *("locks", "resource_class", "model", "graph_priority", "job_class", "project", "owner", "resources"),
            *("units", "batch_key", "preferred_hours", "preferred_zone"),
        )
    },
    "own": {"level": "service_level", "class": "job_class", "user_priority": "user_priority"},
}
#: Marks that `normal` derives from other fields and sets to true in the nested form: mark → the field it requires.
_MARKS: Mapping[tuple[str, str], str | None] = {
    ("terms", "own"): None,
    ("own", "project"): "project",
    ("own", "fixed"): "priority",
}

#: One encoder for all payloads: `json.dumps` makes one for each, which costs 0.9 µs.
_as_text = json.JSONEncoder(ensure_ascii=False).encode


class RetryPolicy(BaseModel):
    """How a failed attempt is tried again: after base x factor^(attempts - 1) seconds, at most cap, and which ones are.

    `leasehold.runtime.retries` goes by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    base: float = Field(default=1.0, gt=0, le=validation.YEAR, description="seconds before the second attempt")
    factor: float = Field(default=2.0, ge=1, le=100, description="by which each further wait is longer")
    cap: float = Field(default=60.0, gt=0, le=validation.YEAR, description="longest wait, in seconds")
    jitter: float = Field(default=0.0, ge=0, le=1, description="part of a wait that chance may add to it")
    exceptions: list[str] = Field(
        default_factory=list,
        max_length=MAX_CHOSEN,
        description="names of the exceptions after which a task is tried again, also those derived from them",
    )
    exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        default_factory=list, max_length=MAX_CHOSEN, description="exit codes after which a command is tried again"
    )


class Payload(BaseModel):
    """The work itself. Only `command` is required.

    Empty lists and dictionaries come from a factory: pydantic copies a default, which took two fifths of a check.
    """

    # Commands that submit nothing use the names and the help of the fields only.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    command: list[str] = Field(
        min_length=1,
        max_length=4096,
        description="Program and its arguments, started without a shell. With env and stdin at most 256 KiB.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables, added to those that the bot passes on.",
    )
    stdin: str | None = Field(
        default=None,
        description="Text for the standard input of the command. Unset: empty.",
    )
    retry: RetryPolicy | None = Field(
        default=None,
        description="How failed attempts are tried again: base, factor, cap and jitter of the waits, and exceptions or "
        "exit_codes after which they are. Needs retry_failed. Unset: every one, after waits of the pool.",
    )
    max_lost: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TRIES,
        description="Times that its bot may be lost while the job runs, before the job is dead. Each loss is one of "
        "its max_attempts. Unset: 3.",
    )

    @field_validator("retry", mode="before")
    @classmethod
    def _is_object(cls, given: Any) -> Any:
        if not isinstance(given, dict | RetryPolicy | None):
            raise ValueError("input should be an object")
        return given


class JobRequest(Payload):
    """One job. Only `command` is required; no value of another type is taken.

    The nested form, with `payload`, `terms` and `own`, is accepted too where jobs are submitted; errors then name the
    fields listed here.
    """

    model_config = ConfigDict(strict=True)

    instance: Name | None = Field(
        default=None,
        description="Instance (tenant) that the job belongs to. Unset: the instance of the token, or `default`.",
    )
    properties: dict[str, str | Values] = Field(
        default_factory=dict,
        description="Properties that the bot must offer, one value or several for each.",
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        description="Idempotency key: a submit repeated with the same key and request returns the first job, as "
        "long as keys are kept (7 days by default; an hour if it begins with 'auto:'). At most 200 bytes.",
    )
    priority: int = Field(
        default=0,
        ge=validation.PRIORITY_MIN,
        le=validation.PRIORITY_MAX,
        description="Priority; a lower number is more urgent. Overrides the priority that a job class or a service "
        "level gives.",
    )
    units: int = Field(
        default=1,
        ge=1,
        le=validation.MAX_UNITS,
        description="Capacity units of the bot that the job occupies.",
    )
    label: str = Field(
        default="",
        description="Label for listing the job; it also decides the job's cohort. At most 64 bytes.",
    )
    locality_hint: str | None = Field(
        default=None,
        min_length=1,
        description="Prefer a bot that recently worked on a job with the same hint. At most 200 bytes.",
    )
    timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Longest run time, in seconds; a job that runs longer is stopped and has failed. Unset: that of "
        "the service level, or the operators' default, or no limit.",
    )
    queue_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Give the job up if it still waits this many seconds after its submit. Unset: never, "
        "unless operators set a ceiling.",
    )
    dedup_key: str | None = Field(
        default=None,
        min_length=1,
        description="Deduplication key: join the unfinished job of the instance that has the same key, even if its "
        "request differs, instead of making another. That job starts as early as either asks. At most 200 bytes.",
    )
    locks: list[JobLock] = Field(
        default_factory=list,
        max_length=MAX_LOCKS,
        description="Locks of the instance that the job holds while it runs; no two running jobs hold the same one. "
        "NAME:SLOTS lets so many hold it, unless an operator has set its slots.",
    )
    estimated_cost: float | None = Field(
        default=None,
        ge=0,
        le=MAX_COST,
        description="Expected cost, in the unit of the instance's budget. Unset: what the configured estimator "
        "expects, or 1.",
    )
    resource_class: Name | None = Field(
        default=None,
        description="Resource class that the job uses and whose rate is limited. Unset: none.",
    )
    model: Name | None = Field(
        default=None,
        description="Model of the resource class, which may have a rate limit of its own. Needs a resource class.",
    )
    graph_priority: int | None = Field(
        default=None,
        ge=1,
        le=MAX_GRAPH_PRIORITY,
        description="Priority of the job's graph among graphs; a lower number is sooner. Unset: 5.",
    )
    job_class: Name | None = Field(
        default=None,
        description="Job class, which gives the priority in points and the time windows for the start.",
    )
    user_priority: int | None = Field(
        default=None,
        ge=0,
        le=MAX_USER_PRIORITY,
        description="Steps by which a job with a class is more urgent, of 5 points each unless configured otherwise. "
        "Unset: 0.",
    )
    project: Name | None = Field(
        default=None,
        description="Project whose quota the job uses. A job with a class is 10 points more urgent for it, unless "
        "configured otherwise.",
    )
    owner: Name | None = Field(
        default=None,
        description="Owner whose quota of the instance the job uses.",
    )
    service_level: Name | None = Field(
        default=None,
        description="Service level, which gives the priority and, unless set here, the time-out.",
    )
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Seconds after the submit by which the job should have ended. It becomes more urgent as the "
        "deadline comes near.",
    )
    estimated_seconds: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Expected run time, in seconds. Unset: as jobs of the same class ran recently.",
    )
    resources: Need = Field(
        default_factory=dict,
        description="Resources of the bot that the job occupies while it runs: cpu_milli in thousandths of a core, "
        "memory_mib and disk_mib in MiB, gpu_milli in thousandths of one GPU, gpus in whole GPUs.",
    )
    batch_key: Name | None = Field(
        default=None,
        description="Batch key: jobs of the instance with the same key go to one bot together where one has capacity.",
    )
    preferred_hours: list[Annotated[int, Field(ge=0, le=23)]] = Field(
        default_factory=list,
        max_length=24,
        description="Hours of the day in which the job may start; 22 means from 22:00 to 22:59. Unset: any.",
    )
    preferred_zone: Zone = Field(
        default="UTC",
        description="Time zone of the preferred hours, such as Europe/Berlin. Needs preferred hours.",
    )
    max_attempts: int = Field(
        default=validation.MAX_ATTEMPTS,
        ge=1,
        le=MAX_TRIES,
        description="Most attempts to run the job.",
    )
    retry_failed: bool = Field(
        default=False,
        description="Also try again when the command itself fails.",
    )
    preferred_properties: dict[str, str | Values] = Field(
        default_factory=dict,
        description="Properties that the bot should offer beside the required ones. A bot that offers them is looked "
        "for first.",
    )
    prefer_seconds: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Seconds for which a queued job waits for a bot that offers the preferred properties, before any "
        "other bot may take it. Unset: it does not wait.",
    )
    metadata: dict[str, str] = Field(
        default_factory=dict,
        description="Up to 16 keys with a value each, such as build=1234, by which jobs are found, acted on and summed "
        "up. A `traceparent` is also the variable TRACEPARENT of the command.",
    )

    schedule_after: Moment | None = Field(
        default=None,
        description="Earliest start: a time with an offset, such as 2026-12-01T10:00:00+01:00, at most a year ahead. "
        "Its waiting time and its queue timeout count from then. Unset, or past: it may start at once.",
    )
    delay: float | None = Field(
        default=None,
        ge=0,
        le=validation.YEAR,
        description="Earliest start, in seconds after the submit, or after the nodes that a node of a graph waits for "
        "have ended.",
    )

    on_conflict: OnConflict | None = Field(
        default=None,
        description="What happens if the dedup_key is taken: `join` that job; `replace` it with this one if it still "
        "waits and nobody else has joined it, and make another if a bot has it; `refuse` this one. Unset: join, or "
        "replace with debounce.",
    )
    unique_for: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Seconds after the submit for which the job keeps its dedup_key, also once it has succeeded: who "
        "submits the key again gets this job. Unset: until the job ends.",
    )
    debounce: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Seconds before the start, which begin anew with each submit of the dedup_key. Each replaces the "
        "job that waits.",
    )
    debounce_max: float | None = Field(
        default=None,
        gt=0,
        le=validation.YEAR,
        description="Longest that debounce puts the start off, in seconds after the first submit of the job. Unset: "
        "without end.",
    )

    def normal(self, *, instance: str = DEFAULT_INSTANCE) -> dict[str, Any]:
        """The nested form, for `moves.submit`; `instance` is used if the request names none. Raises BadInput."""
        if self.schedule_after is not None and self.delay is not None:
            raise BadInput("delay", "and schedule_after are two words for one thing: give one of them")
        if self.prefer_seconds is not None and not self.preferred_properties:
            raise BadInput("prefer_seconds", "means nothing without preferred_properties")
        if self.retry is not None and not self.retry_failed:
            raise BadInput("retry", "means nothing without retry_failed")
        self._check_conflict()
        for field in ("properties", "preferred_properties"):
            validation.check_unreserved(field, getattr(self, field))
        validation.check_dedup_key("dedup_key", self.dedup_key)
        # A key is stored with the digest of its request, so a newer field is in it only if it is given.
        later = {
            "dedup_key": _short("dedup_key", self.dedup_key, MAX_DEDUP_KEY_BYTES),
            "queue_timeout_seconds": self.queue_timeout_seconds,
            "terms": self._constraints(),
            "own": self._priority_inputs() or None,
            "estimated_cost": self.estimated_cost,
            "deadline_seconds": self.deadline_seconds,
            "estimated_seconds": self.estimated_seconds,
            "preferred_properties": validation.normal_properties("preferred_properties", self.preferred_properties)
            or None,
            "prefer_seconds": self.prefer_seconds,
            "priority": self._priority(),
            "metadata": validation.check_metadata("metadata", self.metadata) or None,
            "schedule_after": self.schedule_after,
            "delay": self.delay,
            "on_conflict": self.on_conflict,
            "unique_for": self.unique_for,
            "debounce": self.debounce,
            "debounce_max": self.debounce_max,
        }
        return {
            "instance": self.instance or instance,
            "properties": validation.normal_properties("properties", self.properties),
            "key": _short("key", self.key, MAX_KEY_BYTES),
            "units": self.units,
            "label": validation.check_text("label", self.label, validation.MAX_LABEL),
            "locality_hint": _short("locality_hint", self.locality_hint, MAX_HINT_BYTES),
            "timeout_seconds": self.timeout_seconds,
            "max_attempts": self.max_attempts,
            "retry_failed": self.retry_failed,
            "payload": self._payload(),
        } | {name: value for name, value in later.items() if value is not None}

    def with_service_level(self, level: str, *, priority: int | None = None) -> Self:
        """The request with this service level, unless it names a level or a class, or may join another job.

        priority: that of a request which gives none; None = that of the level.
        """
        if self.service_level is not None or self.job_class is not None or self.dedup_key is not None:
            return self
        added: dict[str, Any] = {"service_level": level}
        if priority is not None and "priority" not in self.model_fields_set:
            added["priority"] = priority
        return self.model_copy(update=added)

    def _check_conflict(self) -> None:
        """Raise BadInput for fields that say what becomes of an equal dedup_key and do not go together."""
        if self.dedup_key is None:
            for field in ("on_conflict", "unique_for", "debounce"):
                if getattr(self, field) is not None:
                    raise BadInput(field, "means nothing without dedup_key")
        if self.debounce_max is not None and self.debounce is None:
            raise BadInput("debounce_max", "means nothing without debounce")
        if self.debounce is None:
            return
        if self.debounce_max is not None and self.debounce_max < self.debounce:
            raise BadInput("debounce_max", "must be at least debounce")
        if self.on_conflict not in (None, "replace"):
            raise BadInput("debounce", "replaces the job that waits: give on_conflict replace, or none")
        if self.schedule_after is not None or self.delay is not None:
            raise BadInput("debounce", "says when the job starts, as schedule_after and delay do: give one of them")

    def _priority(self) -> int | None:
        """The priority that the request gives; None if its service level or class decides. Raises BadInput."""
        is_given, has_class = "priority" in self.model_fields_set, self.job_class is not None
        if self.user_priority is not None and not has_class:
            raise BadInput("user_priority", "raises a job that has a job_class")
        if self.dedup_key is not None and (has_class or self.service_level is not None):
            raise BadInput("dedup_key", "goes with a priority, not with a job_class or a service_level")
        return None if not is_given and (has_class or self.service_level is not None) else self.priority

    def _distinct_locks(self) -> list[str]:
        """The locks in their order, each once. Raises BadInput for one with two numbers of slots."""
        locks = sorted(set(self.locks))
        if len({lock.partition(":")[0] for lock in locks}) < len(locks):
            raise BadInput("locks", "names a lock twice, with different slots")
        return locks

    def _constraints(self) -> dict[str, Any] | None:
        """The constraints, which the job shares with others of its queue; None if it has none. Raises BadInput."""
        if self.model is not None and self.resource_class is None:
            raise BadInput("model", "needs a resource_class")
        if "preferred_zone" in self.model_fields_set and not self.preferred_hours:
            raise BadInput("preferred_zone", "means nothing without preferred_hours")
        shared = {
            "locks": self._distinct_locks(),
            "resource_class": self.resource_class,
            "model": self.model,
            "graph_priority": self.graph_priority,
            "job_class": self.job_class,
            "project": self.project,
            "owner": self.owner,
            "resources": self.resources,
            # With it, all jobs of one queue fit on the same bots.
            "units": self.units if self.resources and self.units > 1 else None,
            "batch_key": self.batch_key,
            "preferred_hours": sorted(set(self.preferred_hours)),
            "preferred_zone": self.preferred_zone if self.preferred_hours else None,
        }
        terms = {name: value for name, value in shared.items() if value}
        is_timed = self.deadline_seconds is not None or self.estimated_seconds is not None
        # Empty terms mean a managed instance, so a job without shared constraints gets a mark instead.
        return terms or ({"own": True} if is_timed or self._priority_inputs() else None)

    def _priority_inputs(self) -> dict[str, Any]:
        """The inputs of this job's points and time-out: its service level or its class."""
        own: dict[str, Any] = {}
        is_fixed = self._priority() is not None
        if self.service_level is not None:
            own |= {"level": self.service_level} | ({"fixed": True} if is_fixed else {})
        elif not is_fixed:
            own |= {"class": self.job_class} | ({"project": True} if self.project else {})
            own |= {"user_priority": self.user_priority} if self.user_priority else {}
        return own

    def _traced(self) -> dict[str, str]:
        """The variable by which OpenTelemetry passes the trace on to a command, unless `env` sets it."""
        given = self.metadata.get(validation.TRACEPARENT)
        return {} if given is None else {"TRACEPARENT": given}

    def _payload(self) -> dict[str, Any]:
        if not self.command[0]:
            raise BadInput("command", "must name a program")
        for name in self.env:
            if not name or "=" in name:
                raise BadInput("env", f"'{wire.escaped(name, 60)}' is not the name of a variable")
        # A command line may hold bytes that are no text in the terminal's encoding.
        for field, texts in (("command", self.command), ("env", [*self.env, *self.env.values()])):
            for text in texts:
                validation.check_text(field, text, validation.MAX_PAYLOAD_BYTES)
        payload: dict[str, Any] = {"command": self.command}
        env = self._traced() | self.env
        if env:
            payload["env"] = env
        if self.stdin is not None:
            payload["stdin"] = validation.check_text("stdin", self.stdin, validation.MAX_PAYLOAD_BYTES)
        if self.retry is not None:
            for name in self.retry.exceptions:
                validation.check_text("retry.exceptions", name, validation.MAX_LABEL)
            payload["retry"] = self.retry.model_dump(exclude_unset=True)
        if self.max_lost is not None:
            payload["max_lost"] = self.max_lost
        size = len(_as_text(payload).encode())
        if size > validation.MAX_PAYLOAD_BYTES:
            raise BadInput(
                "command", f"with env and stdin is {size} bytes, at most {validation.MAX_PAYLOAD_BYTES} are allowed"
            )
        return payload


def flat(given: Any, *place: str | int) -> Any:
    """The flat form of a request, before validation. A value that is not in nested form is returned unchanged.

    An unknown name in a part becomes an unknown field. Raises ValidationError for a part that is no object, for a field
    given twice with different values, and for a mark without the field it requires. `place` is the path of the request,
    with which the error's path begins.
    """
    if not _is_nested(given):
        return given
    fields = {name: value for name, value in given.items() if name not in _PARTS}
    marks = []
    for part, names in _PARTS.items():
        inner = given.get(part)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise _refused((*place, part), "is not an object")
        for name, value in inner.items():
            field = names.get(name, f"{part}.{name}")
            if value is True and (part, name) in _MARKS:
                marks.append((part, name))
            elif field in fields and (fields[field] != value or type(fields[field]) is not type(value)):
                raise _refused((*place, field), "is given twice, with different values")
            else:
                fields[field] = value
    for part, name in marks:
        needed = _MARKS[part, name]
        if needed is not None and fields.get(needed) is None:
            raise _refused((*place, needed), f"is missing, although {part}.{name} is true")
    return fields


def flat_all(given: Any) -> Any:
    """The flat forms of a list of requests, before validation. Raises ValidationError.

    It takes the whole list and is not a validator of JobRequest: nearly all requests are flat already, and one Python
    call for each would make the validation of a batch a tenth slower.
    """
    if type(given) is not list or not any(map(_is_nested, given)):
        return given
    return [flat(each, index) for index, each in enumerate(given)]


def _is_nested(given: Any) -> bool:
    # With its command at the top a request is flat, and a payload is an unknown field; is_flat.sql says so too.
    return type(given) is dict and "command" not in given and "payload" in given


def _refused(place: tuple[str | int, ...], reason: str) -> ValidationError:
    problem = PydanticCustomError("nested_request", reason)
    return ValidationError.from_exception_data("JobRequest", [{"type": problem, "loc": place, "input": None}])


def _short(field: str, value: str | None, limit: int) -> str | None:
    return None if value is None else validation.check_text(field, value, limit)


# Graphs


MAX_GRAPH_NODES, MAX_GRAPH_EDGES = 10_000, 100_000
MAX_NODE_NO = 2**31 - 1

OnFailure = Literal["block", "run", "cancel"]
OnPhantom = Literal["warn", "reject", "ignore"]
NodeNo = Annotated[int, Field(ge=0, le=MAX_NODE_NO)]

#: Fields that a node takes from its graph and must not set.
_OF_THE_GRAPH = ("instance", "key", "dedup_key")


class Parent(BaseModel):
    """A node that another node depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: NodeNo = Field(description="Number of the node.")
    on_failure: OnFailure | None = Field(
        default=None,
        description="What this node does if that one does not succeed. Unset: as the graph says.",
    )

    def normal(self) -> int | dict[str, Any]:
        """The dependency in the form that `moves.submit_graph` takes."""
        return self.node if self.on_failure is None else {"node": self.node, "on_failure": self.on_failure}


def _parent(given: Any) -> Any:
    return {"node": given} if type(given) is int else given


class NodeRequest(JobRequest):
    """One job of a graph. It has no instance, key or dedup_key of its own."""

    node: NodeNo = Field(description="Number of the node, unique in its graph; 0 to 2,147,483,647.")
    after: list[Annotated[Parent, BeforeValidator(_parent, json_schema_input_type=int | Parent)]] = Field(
        default_factory=list,
        max_length=MAX_GRAPH_EDGES,
        fail_fast=True,
        description="Nodes that must end before this one starts: their numbers, or objects with on_failure.",
    )

    def normal(self, *, instance: str = DEFAULT_INSTANCE) -> dict[str, Any]:
        """The node in the form that `moves.submit_graph` takes. Raises BadInput."""
        for field in _OF_THE_GRAPH:
            if getattr(self, field) is not None:
                raise BadInput(field, "belongs to the graph and not to one of its nodes")
        counted = Counter(parent.node for parent in self.after)
        number, times = counted.most_common(1)[0] if counted else (0, 1)
        if times > 1:
            raise BadInput("after", f"names node {number} {times} times")
        found = super().normal(instance=instance) | {"node": self.node}
        for field in _OF_THE_GRAPH:
            found.pop(field, None)
        if "priority" not in self.model_fields_set:
            found.pop("priority", None)
        if self.after:
            found["after"] = [parent.normal() for parent in self.after]
        return found


#: What has to become of the other nodes for a callback to run → what its dependencies do if one does not succeed.
CallbackOn = Literal["done", "succeeded", "failed"]
_ON_FAILURE: Mapping[CallbackOn, OnFailure] = {"done": "run", "succeeded": "cancel", "failed": "run"}


class CallbackRequest(JobRequest):
    """A job that runs once all nodes of a graph have ended. It is a node with a number of its own."""

    on: CallbackOn = Field(
        default="done",
        description="When it runs: `done` whatever the nodes became, `succeeded` if all succeeded, `failed` if at "
        "least one failed, died or was cancelled. Otherwise it is cancelled.",
    )

    def node(self, number: int, after: Sequence[int]) -> dict[str, Any]:
        """The callback as a node that waits for `after`, in the form that `moves.submit_graph` takes."""
        given = self.model_dump(exclude_unset=True, exclude={"on"})
        parents = [{"node": each, "on_failure": _ON_FAILURE[self.on]} for each in after]
        found = NodeRequest.model_validate(given | {"node": number, "after": parents}).normal()
        return found | {"callback": self.on}


class GraphRequest(BaseModel):
    """Jobs that depend on each other. All of them are accepted, or none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Name = Field(
        description="Name of the graph. An unfinished graph of the same name in the instance is replaced."
    )
    instance: Name | None = Field(
        default=None,
        description="Instance (tenant) that the jobs belong to. Unset: the instance of the token, or `default`.",
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        description="Idempotency key: a submit repeated with the same key and request returns the first graph. "
        "At most 200 bytes.",
    )
    priority: int = Field(
        default=0,
        ge=validation.PRIORITY_MIN,
        le=validation.PRIORITY_MAX,
        description="Priority of the nodes that have none of their own; a lower number is more urgent.",
    )
    on_failure: OnFailure = Field(
        default="block",
        description="What a node does if one that it depends on does not succeed: stay blocked, run, or be cancelled.",
    )
    on_phantom: OnPhantom = Field(
        default="warn",
        description="What happens to a node that depends on a number that no node has: `warn` leaves it blocked for "
        "ever and reports it, `reject` refuses the graph, `ignore` drops the dependency.",
    )
    fair_share: bool = Field(
        default=False,
        description="All nodes are constrained jobs, so that the order `graph` divides the pool between this graph and "
        "others. The nodes of an instance with an account always are.",
    )
    nodes: list[NodeRequest] = Field(
        min_length=1, max_length=MAX_GRAPH_NODES, fail_fast=True, description="Jobs of the graph, 1 to 10,000."
    )
    callback: CallbackRequest | None = Field(
        default=None,
        description="Job that runs once all nodes have ended. Its number is one above the highest, and it finds the "
        "graph and the counts of its nodes in its environment.",
    )

    _flat = field_validator("nodes", mode="before")(flat_all)

    def with_service_level(self, level: str) -> Self:
        """The graph, whose nodes have this service level where `JobRequest.with_service_level` gives it. A priority of
        the graph goes before that of the level."""
        priority = self.priority if "priority" in self.model_fields_set else None
        nodes = [node.with_service_level(level, priority=priority) for node in self.nodes]
        callback = self.callback and self.callback.with_service_level(level, priority=priority)
        return self.model_copy(update={"nodes": nodes, "callback": callback})

    @classmethod
    def each_error(cls, document: Any) -> list[dict[str, Any]]:
        """Return the first error of each wrong node of a graph."""
        return first_errors(document, "nodes", MAX_GRAPH_NODES, lambda each: NodeRequest.model_validate(flat(each)))

    @property
    def callback_node(self) -> int | None:
        """The number of the callback, None without one."""
        return None if self.callback is None else max(node.node for node in self.nodes) + 1

    def normal(self, *, instance: str = DEFAULT_INSTANCE) -> dict[str, Any]:
        """The form that `moves.submit_graph` takes; `instance` is used if the request names none. Raises BadInput."""
        edges = sum(len(node.after) for node in self.nodes)
        if self.callback is not None:
            self._check_ends()
            edges += len(self.nodes)
        if edges > MAX_GRAPH_EDGES:
            raise BadInput("nodes", f"have {edges} dependencies, at most {MAX_GRAPH_EDGES} are allowed")
        request: dict[str, Any] = {
            "name": self.name,
            "instance": self.instance or instance,
            "priority": self.priority,
            "on_failure": self.on_failure,
            "on_phantom": self.on_phantom,
            "nodes": check_each(lambda each: _placed(*each), enumerate(self.nodes)),
        }
        if self.callback is not None and self.callback_node is not None:
            try:
                request["nodes"].append(self.callback.node(self.callback_node, [node.node for node in self.nodes]))
            except BadInput as refused:
                raise BadInput(f"callback.{refused.field}", refused.reason) from None
        if self.fair_share:
            request["fair_share"] = True
        if self.key is not None:
            request["key"] = validation.check_text("key", self.key, MAX_KEY_BYTES)
        return request

    def _check_ends(self) -> None:
        """Raise BadInput for nodes that might never end, because the callback would wait for them for ever."""
        known = {node.node for node in self.nodes}
        if MAX_NODE_NO in known:
            raise BadInput("callback", f"needs a number above those of the nodes, of which one is {MAX_NODE_NO}")
        for index, node in enumerate(self.nodes):
            for parent in node.after:
                if parent.node not in known:
                    raise BadInput(f"nodes.{index}.after", f"names node {parent.node}, which a callback would wait for")
                if (parent.on_failure or self.on_failure) == "block":
                    raise BadInput(
                        f"nodes.{index}.after", "with a callback needs on_failure `run` or `cancel`, so that it ends"
                    )


def _placed(index: int, node: NodeRequest) -> dict[str, Any]:
    try:
        return node.normal()
    except BadInput as refused:
        raise BadInput(f"nodes.{index}.{refused.field}", refused.reason) from None
