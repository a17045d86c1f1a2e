"""nothing -> queued: submit."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import psycopg
from leasehold import errors
from leasehold.errors import BadInput, Conflict, LeaseholdError, QueueFull
from leasehold.wire import escaped
from pydantic_core import to_json

from schema.policy.new_instances import UNKNOWN_INSTANCE, refusal, refused_instance
from schema.policy.priority_classes import UNKNOWN_POINTS, unknown_points
from schema.postgres import engine
from schema.postgres.connection import Connection
from schema.postgres.session import Session
from schema.postgres.statements import Row, Statement

# Two SQL functions submit jobs: `submit_alone` submits one, `submit_many` a list. Callers in SQL come to them as well.
# `submit_many` answers in one row of arrays. The client would need 1.5 ms more to read a thousand rows.
SUBMIT = Statement("""
SELECT CAST(job_ids AS text) AS job_ids, CAST(public_ids AS text) AS public_ids, CAST(created AS text) AS created,
    array_position(same, false) - 1 AS other
FROM submit_many(CAST(:requests AS jsonb), :actor)
""")
SUBMIT_ALONE = b"SELECT submit_alone($1, $2)"
SUBMIT_AT_ONCE = b"SELECT job_ids, public_ids, created FROM submit_many($1, $2, true)"
SUBMIT_ALIKE = b"SELECT job_ids, public_ids, created FROM submit_many($1, $4, true, common => $2, keys => $3)"
#: What the functions raise when a queue is full, when a request breaks a limit that operators have set, when a key was
#: used for a different request, and when a deduplication key is taken by a job that a request must not join or replace.
QUEUE_FULL, BEYOND_LIMIT, KEY_REUSED, KEY_TAKEN = "LH001", "LH004", "LH005", "LH008"


class Submitted(NamedTuple):
    """One accepted submission. It is a tuple because that is made in half of a dataclass's time."""

    #: The job that was made, or that was there already.
    job_id: int
    #: The id by which the caller knows the job. Submissions that share a job by a deduplication key have an id each.
    public_id: str
    #: False if no job was made: the key was used before by an equal request, or an unfinished job had the same
    #: deduplication key.
    created: bool


def submit(connection: Connection, requests: Sequence[Mapping[str, Any]], *, actor: str) -> list[Submitted]:
    """Queue all `requests`, or none. Answers are in the order of the requests.

    Requests are in the form of `JobRequest.normal`; fields that are absent have their defaults. A request whose key was
    used before in its instance is answered with the earlier job, even if that job is not kept any more.

    Raises Conflict `key_reused` if that key was used for a different request, Conflict `key_taken` if a job has the
    deduplication key of a request that refuses it or cannot replace it, QueueFull if a label or an instance has no room
    for all of its new jobs, and BadInput if a class or a service level is not known or a new job would break a limit
    that operators have set.
    """
    values = {"requests": to_json(list(requests)).decode(), "actor": actor}
    if not requests:
        return []
    (answers,) = submitted_rows(connection, SUBMIT, values, requests=requests)
    if answers.other is not None:
        raise _key_conflict(answers.other, requests[answers.other])
    return _answers(answers.job_ids, answers.public_ids, answers.created, count=len(requests))


def submit_at_once(driver: Session, requests: Sequence[Mapping[str, Any]], *, actor: str) -> list[Submitted]:
    """Queue all `requests`, or none, in a transaction of their own; for `Database.run_alone`.

    Takes, answers and raises what `submit` does. It is one statement that commits by itself, which saves two round
    trips and the layers above the driver: a thirteenth of the time of 1,000 requests.
    """
    if len(requests) < 2:
        return [submit_alone(driver, request, actor=actor) for request in requests]
    alike = _alike(requests)
    statement, values = (SUBMIT_AT_ONCE, (to_json(list(requests)),)) if alike is None else (SUBMIT_ALIKE, alike)
    try:
        found = engine.single_row(driver, statement, *values, actor.encode())
    except psycopg.Error as error:
        if (refused := _refused(error, {f"jobs.{index}": each for index, each in enumerate(requests)})) is not None:
            raise refused from None
        raise
    job_ids, public_ids, created = (None if each is None else each.decode() for each in found)
    assert job_ids is not None
    assert public_ids is not None
    return _answers(job_ids, public_ids, created, count=len(requests))


def _alike(requests: Sequence[Mapping[str, Any]]) -> tuple[bytes, bytes, bytes] | None:
    """Return payloads, what else requests say, and keys if any, of requests that differ in nothing else; or None.

    Requests are in the form of `JobRequest.normal`, so that equal values are of one type and have one digest.
    """
    own: Mapping[str, Any] = {"payload": None, "key": None}
    first = {**requests[0], **own}
    if any("payload" not in request or {**request, **own} != first for request in requests):
        return None
    common = {name: value for name, value in first.items() if name not in own}
    keys = [request.get("key") for request in requests]
    payloads = [request["payload"] for request in requests]
    return to_json(payloads), to_json(common), to_json(keys if any(key is not None for key in keys) else [])


def _answers(job_ids: str, public_ids: str, created: str | None, *, count: int) -> list[Submitted]:
    """Read arrays in the text form of the server. created: None if all requests have made a job."""
    ids, names = job_ids[1:-1].split(","), public_ids[1:-1].split(",")
    assert len(ids) == len(names) == count
    are_new = repeat(True) if created is None else map("t".__eq__, created[1:-1].split(","))
    return list(map(Submitted, map(int, ids), names, are_new))


def submit_alone(driver: Session, request: Mapping[str, Any], *, actor: str) -> Submitted:
    """Queue one request in a transaction of its own; for `Database.run_alone`.

    Takes, answers and raises what `submit` does for one request.
    """
    try:
        (answer,) = engine.single_row(driver, SUBMIT_ALONE, to_json(request), actor.encode())
    except psycopg.Error as error:
        if (refused := _refused(error, {"jobs.0": request})) is not None:
            raise refused from None
        raise
    assert answer is not None
    job_id, public_id, created, same = answer[1:-1].decode().split(",")
    if same != "t":
        raise _key_conflict(0, request)
    return Submitted(int(job_id), public_id, created == "t")


def submitted_rows(
    connection: Connection,
    statement: Statement,
    values: Mapping[str, Any],
    *,
    requests: Sequence[Mapping[str, Any]] = (),
    place: str = "jobs",
) -> Sequence[Row]:
    """Return the rows of a statement that submits `requests`.

    place: what callers call this list, which begins the names of fields in errors.
    Raises QueueFull if a queue has no room, and BadInput if a class or a service level is not known or a request breaks
    a limit.
    """
    try:
        return connection.execute(statement, values).all()
    except psycopg.Error as error:
        placed = {f"{place}.{index}": request for index, request in enumerate(requests)}
        if (refused := _refused(error, placed)) is not None:
            raise refused from None
        raise


def _key_conflict(index: int, request: Mapping[str, Any]) -> Conflict:
    key = escaped(str(request.get("key")), 80)
    return Conflict("key_reused", f"jobs[{index}].key: '{key}' was used before for a different request")


def _refused(error: psycopg.Error, requests: Mapping[str, Mapping[str, Any]]) -> LeaseholdError | None:
    """Return the refusal that this error of the functions means; None if it is another error.

    requests: by their places, such as `jobs.0`.
    """
    reason = escaped(error.diag.message_primary or "", 300)
    match error.sqlstate:
        case code if code == QUEUE_FULL:
            return QueueFull(reason)
        case code if code == KEY_REUSED:
            index = int(error.diag.message_detail or 0)
            return _key_conflict(index, requests[f"jobs.{index}"])
        case code if code == KEY_TAKEN:
            return Conflict(errors.KEY_TAKEN, escaped(error.diag.message_primary or "", 400))
        case code if code == BEYOND_LIMIT:
            return BadInput(error.diag.column_name or "jobs", escaped(error.diag.message_detail or "", 300))
        case code if code == UNKNOWN_POINTS:
            return unknown_points(error, {place: request.get("own") or {} for place, request in requests.items()})
        case code if code == UNKNOWN_INSTANCE:
            name = refused_instance(error) or ""
            place = next((each for each, request in requests.items() if request.get("instance") == name), None)
            return refusal(name, "instance" if place is None else f"{place}.instance")
        case _:
            return None
