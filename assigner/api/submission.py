"""Submits: what the caller's token allows, and the one transaction that stores the jobs."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psycopg
from leasehold import wire
from leasehold.errors import BadInput, Forbidden, LeaseholdError, NotReady, check_each
from pydantic import BaseModel, ConfigDict, Field, field_validator

from assigner.estimation import Estimator, with_estimate
from schema import audit
from schema.fields import first_errors
from schema.moves import submit as submit_moves
from schema.moves.submit import Submitted, submit_at_once
from schema.moves.waiting import abandon
from schema.policy import priority_classes
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.session import Session
from schema.requests import DEFAULT_INSTANCE, JobRequest, flat, flat_all
from schema.tenancy.tokens import Principal

T = TypeVar("T")


class RequestModel(BaseModel):
    """Base of requests: immutable, without unknown fields, and strict in its types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SubmitRequest(RequestModel):
    """A batch of jobs. Either all are stored, or none."""

    jobs: list[JobRequest] = Field(min_length=1, max_length=wire.MAX_BATCH, fail_fast=True)

    _flat = field_validator("jobs", mode="before")(flat_all)

    @classmethod
    def each_error(cls, document: Any) -> list[dict[str, Any]]:
        """Return the first error of each refused job of a body."""
        return first_errors(document, "jobs", wire.MAX_BATCH, lambda each: JobRequest.model_validate(flat(each)))


class OutcomeUnknown(NotReady):
    """It is not known whether the database has stored the submit."""

    code = "outcome_unknown"

    def __init__(self) -> None:
        super().__init__("the outcome of the submit is unknown: submit again with the same keys")


def normalised_requests(
    jobs: Sequence[JobRequest],
    *,
    caller: Principal,
    estimate: Estimator | None = None,
    default_level: str | None = None,
) -> list[dict[str, Any]]:
    """Return the requests in the form that `moves.submit` takes.

    estimate: estimates the cost of jobs that give none. default_level: service level of jobs without level and class.
    Raises BadInput with the job and the field of each that is refused, Forbidden of the first.
    """
    if default_level is not None:
        jobs = [job.with_service_level(default_level) for job in jobs]
    found = check_each(lambda each: _normal(f"jobs.{each[0]}", each[1], caller), enumerate(jobs))
    return [with_estimate(each, estimate) for each in found]


def submit(
    database: Database,
    requests: Sequence[dict[str, Any]],
    *,
    caller: Principal,
    watched_seconds: float | None = None,
    repeatable: bool = False,
) -> list[Submitted]:
    """Store all requests in one transaction and return once it is durable.

    watched_seconds: seconds for which the submissions count while nobody watches them; None = for ever.
    repeatable: a repeat is harmless although requests have no keys.

    Repeatable requests, as all with keys are, take one round trip, unless an operator sent them or their class must be
    checked.

    Raises OutcomeUnknown in two cases. The commit came with a warning: PostgreSQL warns if it stopped waiting for a
    synchronous standby. Or the connection was lost around the commit, and a request has no key, so that a repeat could
    store it twice. Requests that take one round trip raise it also if the server has refused each repeat because of
    conflicts. Raises Conflict `key_reused`.
    """
    keyed = repeatable or all(request["key"] is not None for request in requests)
    attempt = _Attempt(keyed=keyed)

    def alone(session: Session) -> list[Submitted]:
        attempt.begin(session)
        attempt.commit()
        try:
            return submit_at_once(session, requests, actor=caller.actor)
        except psycopg.errors.ReadOnlySqlTransaction:
            attempt.refuse()
            raise

    def work(connection: Connection) -> list[Submitted]:
        check_points(connection, requests, caller)
        taken = submit_moves.submit(connection, requests, actor=caller.actor)
        if watched_seconds is not None:
            abandon.watch(connection, [each.public_id for each in taken], seconds=watched_seconds)
        if caller.is_operator:
            names = sorted({request["instance"] for request in requests})
            created = sum(job.created for job in taken)
            details = {"jobs": len(taken), "created": created, "instances": names[:20]}
            audit.write(connection, "jobs.submit", actor=caller.actor, subject=names[0], details=details)
        return taken

    # Without a key, a separate commit is needed to tell a lost connection before the commit from one during it.
    is_alone = watched_seconds is None and not caller.is_operator
    if keyed and is_alone and not _priced_by_class(requests, caller):
        return _watched(lambda: database.run_alone(alone), attempt)
    return run_keyed(database, work, keyed=keyed)


#: A job, its caller, and what adds to its normal form what no caller may say.
ToComplete = tuple[JobRequest, Principal, Callable[[dict[str, Any]], dict[str, Any]]]


def submit_completed(
    database: Database,
    estimate: Estimator | None,
    wanted: Sequence[ToComplete],
    *,
    watched_seconds: float | None = None,
) -> list[Submitted | Exception]:
    """Store jobs of several callers, those of one caller together; return for each what `submit` returns or raises.

    watched_seconds: as of `submit`.
    One that is refused fails no other. Equal jobs share one, also if they come together. A job whose outcome is unknown
    is stored once more, as by the client, who would send it again.
    """
    found: list[Submitted | Exception] = []
    groups: list[tuple[Principal, dict[int, dict[str, Any]]]] = []
    for place, (job, caller, complete) in enumerate(wanted):
        found.append(NotReady("the job is not stored yet"))
        try:
            normal = complete(normalised_requests([job], caller=caller, estimate=estimate)[0])
        except LeaseholdError as error:
            found[place] = error
            continue
        for of, group in groups:
            if of == caller and not _is_among(normal.get("dedup_key"), group.values()):
                group[place] = normal
                break
        else:
            groups.append((caller, {place: normal}))
    for caller, group in groups:
        storing = partial(submit, database, caller=caller, watched_seconds=watched_seconds, repeatable=True)
        for place, done in _submit_apart(storing, group).items():
            found[place] = done
    return found


def _is_among(dedup_key: str | None, jobs: Iterable[Mapping[str, Any]]) -> bool:
    return dedup_key is not None and any(each.get("dedup_key") == dedup_key for each in jobs)


def _submit_apart(
    storing: Callable[[Sequence[dict[str, Any]]], list[Submitted]], group: Mapping[int, dict[str, Any]]
) -> Mapping[int, Submitted | Exception]:
    """Store the jobs together, or one by one if one of them is refused."""
    try:
        return dict(zip(group, storing(list(group.values())), strict=True))
    except (NotReady, psycopg.OperationalError) as error:
        return dict.fromkeys(group, error)
    except (LeaseholdError, psycopg.Error) as error:
        if len(group) == 1:
            return dict.fromkeys(group, error)
    alone: dict[int, Submitted | Exception] = {}
    for place, normal in group.items():
        alone |= _submit_apart(storing, {place: normal})
    return alone


def run_keyed(database: Database, work: Callable[[Connection], T], *, keyed: bool) -> T:
    """Run a submit in one transaction and return once it is durable. Raises OutcomeUnknown as `submit` does.

    keyed: True if a repeat is harmless.
    """
    attempt = _Attempt(keyed=keyed)

    def once(connection: Connection) -> T:
        attempt.begin(connection.session)
        taken = work(connection)
        attempt.commit()
        return taken

    return _watched(lambda: database.run(once), attempt)


def _watched(submitting: Callable[[], T], attempt: "_Attempt") -> T:
    try:
        taken = submitting()
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
    """Watches the connection of one submit from its commit on, for warnings and for a lost connection."""

    def __init__(self, *, keyed: bool) -> None:
        self._keyed = keyed
        self._thread = threading.get_ident()
        self._connection: psycopg.Connection[Any] | None = None
        self.committing = False
        self.warned = False

    def begin(self, driver: "psycopg.Connection[Any]") -> None:
        if self.committing and not self._keyed:
            raise OutcomeUnknown
        self.close()
        self.committing = False
        self._connection = driver
        driver.add_notice_handler(self._notice)

    def commit(self) -> None:
        """All statements succeeded; what follows is the commit."""
        self.committing = True

    def refuse(self) -> None:
        """The server has refused to write; nothing was committed."""
        self.committing = False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.remove_notice_handler(self._notice)
            self._connection = None

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # Another thread may already use the connection when its handler is taken off.
        if self.committing and threading.get_ident() == self._thread:
            self.warned = self.warned or (notice.severity_nonlocalized or notice.severity) == "WARNING"


def _priced_by_class(requests: Sequence[dict[str, Any]], caller: Principal) -> list[tuple[int, dict[str, Any]]]:
    """Return the requests whose priority comes from a class or service level, if the caller has a priority ceiling.

    Each comes with its index. Only the database knows the points of classes and service levels, so these requests are
    checked there.
    """
    if caller.priority_ceiling is None:
        return []
    return [
        (index, each)
        for index, each in enumerate(requests)
        if "priority" not in each and each.get("own", {}).keys() & {"class", "level"}
    ]


def check_points(
    connection: Connection, requests: Sequence[dict[str, Any]], caller: Principal, *, place: str = "jobs"
) -> None:
    """Raise Forbidden if a class or a service level is more urgent than the caller's priority ceiling.

    place: name of the list of requests, for errors.
    """
    for index, request in _priced_by_class(requests, caller):
        priority = priority_classes.priority_of(connection, request["own"], place=f"{place}.{index}")
        if not caller.may_use_priority(priority):
            raise Forbidden(f"{place}.{index}: this token may not be more urgent than {caller.priority_ceiling}")


def _normal(place: str, job: JobRequest, caller: Principal) -> dict[str, Any]:
    instance = job.instance or caller.instance or DEFAULT_INSTANCE
    if not caller.may_use_instance(instance):
        raise Forbidden(f"{place}.instance: this token is for the instance '{caller.instance}' only")
    try:
        normal = job.normal(instance=instance)
    except BadInput as refused:
        raise BadInput(f"{place}.{refused.field}", refused.reason) from None
    if "priority" in normal and not caller.may_use_priority(normal["priority"]):
        raise Forbidden(f"{place}.priority: this token may not be more urgent than {caller.priority_ceiling}")
    return normal
