"""What callers ask for: job requests, their limits, and the one keyed transaction that takes them."""

import json
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import psycopg
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from schema import audit, limits, moves
from schema.engine import Database
from schema.errors import BadInput, Forbidden, NotReady
from schema.moves import Submitted
from schema.tokens import Principal

#: Longest execution timeout of a job, seconds (a year).
MAX_TIMEOUT = 31_536_000.0
MAX_TRIES = 100
MAX_KEY_BYTES = 200
MAX_HINT_BYTES = 200
DEFAULT_INSTANCE = "default"

Name = Annotated[str, Field(pattern=f"^{limits.NAME.pattern}$")]


class Asked(BaseModel):
    """Requests are immutable, refuse unknown fields, and take no value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class JobRequest(Asked):
    """One job. Only `command` is required."""

    command: list[str] = Field(min_length=1, max_length=4096, description="program and arguments; no shell")
    env: dict[str, str] = Field(default={}, description="added to the bot's allow-listed environment")
    stdin: str | None = Field(default=None, description="text given to the command; unset = empty")
    instance: Name | None = Field(default=None, description="tenant; unset = the token's own, or `default`")
    properties: dict[str, str | list[str]] = Field(default={}, description="what its bot must offer")
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
    max_attempts: int = Field(default=limits.MAX_ATTEMPTS, ge=1, le=MAX_TRIES)
    retry_failed: bool = Field(default=False, description="whether a command that fails is tried again")


class SubmitRequest(Asked):
    """A batch: all of it is taken, or none."""

    jobs: list[JobRequest] = Field(min_length=1, max_length=limits.MAX_BATCH)


class OutcomeUnknown(NotReady):
    """The database may or may not keep what was submitted."""

    code = "outcome_unknown"

    def __init__(self) -> None:
        super().__init__("the outcome of the submit is unknown: submit again with the same keys")


def normalised(jobs: Sequence[JobRequest], *, caller: Principal) -> list[dict[str, Any]]:
    """The requests as `moves.submit` takes them. Raises BadInput, or Forbidden, naming the job and the field."""
    return [_normal(f"jobs.{index}", job, caller) for index, job in enumerate(jobs)]


def submit(database: Database, requests: Sequence[dict[str, Any]], *, caller: Principal) -> list[Submitted]:
    """Take all requests in one transaction and return once they are safe.

    Raises OutcomeUnknown when the commit came with a warning, which is how PostgreSQL tells that the wait for a
    synchronous standby was cut short, and when the connection was lost around the commit of a batch in which a
    request has no key, because trying again could then double it. Raises Conflict `key_reused`.
    """
    attempt = _Attempt(keyed=all(request["key"] is not None for request in requests))

    def work(connection: Connection) -> list[Submitted]:
        attempt.begin(connection)
        taken = moves.submit(connection, requests, actor=caller.actor)
        if caller.is_operator:
            names = sorted({request["instance"] for request in requests})
            created = sum(job.created for job in taken)
            details = {"jobs": len(taken), "created": created, "instances": names[:20]}
            audit.write(connection, "jobs.submit", actor=caller.actor, subject=names[0], details=details)
        attempt.commit()
        return taken

    try:
        taken = database.run(work)
    except NotReady:
        if attempt.committing:
            raise OutcomeUnknown from None
        raise
    finally:
        attempt.close()
    if attempt.warned:
        raise OutcomeUnknown
    return taken


class _Attempt:
    """Watches one submit's connection from the moment it commits."""

    def __init__(self, *, keyed: bool) -> None:
        self._keyed = keyed
        self._thread = threading.get_ident()
        self._connection: psycopg.Connection[Any] | None = None
        self.committing = False
        self.warned = False

    def begin(self, connection: Connection) -> None:
        if self.committing and not self._keyed:
            raise OutcomeUnknown
        self.close()
        self.committing = False
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        self._connection = driver
        driver.add_notice_handler(self._notice)

    def commit(self) -> None:
        """All statements succeeded; what follows is the commit."""
        self.committing = True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.remove_notice_handler(self._notice)
            self._connection = None

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # Another thread may already use the connection when its handler is taken off.
        if self.committing and threading.get_ident() == self._thread:
            self.warned = self.warned or (notice.severity_nonlocalized or notice.severity) == "WARNING"


def _normal(place: str, job: JobRequest, caller: Principal) -> dict[str, Any]:
    instance = job.instance or caller.instance or DEFAULT_INSTANCE
    if not caller.may_use_instance(instance):
        raise Forbidden(f"{place}.instance: this token is for the instance '{caller.instance}' only")
    if not caller.may_use_priority(job.priority):
        raise Forbidden(f"{place}.priority: this token may not be more urgent than {caller.priority_ceiling}")
    return {
        "instance": instance,
        "properties": limits.normal_properties(f"{place}.properties", job.properties),
        "key": _short(f"{place}.key", job.key, MAX_KEY_BYTES),
        "priority": job.priority,
        "units": job.units,
        "label": limits.check_text(f"{place}.label", job.label, limits.MAX_LABEL),
        "locality_hint": _short(f"{place}.locality_hint", job.locality_hint, MAX_HINT_BYTES),
        "timeout_seconds": job.timeout_seconds,
        "max_attempts": job.max_attempts,
        "retry_failed": job.retry_failed,
        "payload": _payload(place, job),
    }


def _short(field: str, value: str | None, limit: int) -> str | None:
    return None if value is None else limits.check_text(field, value, limit)


def _payload(place: str, job: JobRequest) -> dict[str, Any]:
    if not job.command[0]:
        raise BadInput(f"{place}.command", "must name a program")
    for name in job.env:
        if not name or "=" in name:
            raise BadInput(f"{place}.env", f"'{limits.escaped(name, 60)}' is not the name of a variable")
    payload: dict[str, Any] = {"command": job.command}
    if job.env:
        payload["env"] = job.env
    if job.stdin is not None:
        payload["stdin"] = job.stdin
    size = len(json.dumps(payload, ensure_ascii=False).encode())
    if size > limits.MAX_PAYLOAD_BYTES:
        raise BadInput(
            place,
            f"has a payload (command, env, stdin) of {size} bytes, at most {limits.MAX_PAYLOAD_BYTES} are allowed",
        )
    return payload
