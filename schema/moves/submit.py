"""nothing -> queued: submit."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import psycopg
from leasehold.errors import BadInput, Conflict, LeaseholdError, QueueFull
from leasehold.wire import escaped
from pydantic_core import to_json

from schema.policy.new_instances import UNKNOWN_INSTANCE, refusal, refused_instance
from schema.policy.priority_classes import UNKNOWN_POINTS, unknown_points
from schema.postgres import engine
from schema.postgres.connection import Connection
from schema.postgres.session import Session
from schema.postgres.statements import Row, Statement

# The functions are the one implementation, for callers in SQL as well as for this one.
# All answers are one row of texts: reading a row of its own for each of a thousand jobs takes the client 1.5 ms.
SUBMIT = Statement("""
SELECT CAST(job_ids AS text) AS job_ids, CAST(public_ids AS text) AS public_ids, CAST(created AS text) AS created,
    array_position(same, false) - 1 AS other
FROM submit_all(CAST(:requests AS jsonb), :actor)
""")
SUBMIT_ALONE = b"SELECT submit_alone($1, $2)"
SUBMIT_AT_ONCE = b"SELECT job_ids, public_ids, created FROM submit_all($1, $2, true)"
SUBMIT_ALIKE = b"SELECT job_ids, public_ids, created FROM submit_alike($1, $2, $3, $4)"
#: The fields of a request that may differ between requests which are alike, unset.
OWN: Mapping[str, Any] = {"payload": None, "key": None}
#: What the functions raise when a queue is full, when a request breaks a limit that operators have set, and when a key
#: was used for a different request.
QUEUE_FULL, BEYOND_LIMIT, KEY_REUSED = "LH001", "LH004", "LH005"


class Submitted(NamedTuple):
    """One accepted submission; `created` is false when it made no job. A tuple is made in half of a dataclass's time.

    Its key had been used before by an equal request, or it joined a job by its deduplication key: `job_id` is then that
    job, and `public_id` a name of its own for it.
    """

    job_id: int
    public_id: str
    created: bool


def submit(connection: Connection, requests: Sequence[Mapping[str, Any]], *, actor: str) -> list[Submitted]:
    """Queue all `requests`, or none. Answers are in the order of the requests.

    A request holds instance, properties (in normal form), payload, and optionally key, priority, units, label,
    locality_hint, timeout_seconds, queue_timeout_seconds, dedup_key, max_attempts, retry_failed, preferred_properties
    (in normal form), prefer_seconds and metadata. A request whose key was used before in its instance gets the earlier
    job, also if that is not kept any more; raises Conflict `key_reused` when that one was submitted with another
    content, QueueFull when a label or an instance has no room for all of its new jobs, BadInput when a class or a
    service level is not known, or when a new job would break a limit that operators have set.
    """
    values = {"requests": to_json(list(requests)).decode(), "actor": actor}
    if not requests:
        return []
    (answers,) = submitted_rows(connection, SUBMIT, values, requests=requests)
    if answers.other is not None:
        raise _key_conflict(answers.other, requests[answers.other])
    return _answers(answers.job_ids, answers.public_ids, answers.created, count=len(requests))


def submit_at_once(driver: Session, requests: Sequence[Mapping[str, Any]], *, actor: str) -> list[Submitted]:
    """Queue all `requests`, or none, by one statement; for `Database.run_alone`.

    Takes, answers and raises what `submit` does. It saves two round trips and the work of the layers above the driver:
    a thirteenth of the time of 1,000 requests.
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
    """What `submit_alike` takes: what requests have in common, their payloads, and keys if any. None if they differ.

    Requests are in the form of `JobRequest.normal`, so that equal values are of one type and have one digest.
    """
    first = {**requests[0], **OWN}
    if any("payload" not in request or {**request, **OWN} != first for request in requests):
        return None
    common = {name: value for name, value in first.items() if name not in OWN}
    keys = [request.get("key") for request in requests]
    payloads = [request["payload"] for request in requests]
    return to_json(common), to_json(payloads), to_json(keys if any(key is not None for key in keys) else [])


def _answers(job_ids: str, public_ids: str, created: str | None, *, count: int) -> list[Submitted]:
    """Read arrays as the server writes them. created: None if all requests have made a job."""
    ids, names = job_ids[1:-1].split(","), public_ids[1:-1].split(",")
    assert len(ids) == len(names) == count
    are_new = repeat(True) if created is None else map("t".__eq__, created[1:-1].split(","))
    return list(map(Submitted, map(int, ids), names, are_new))


def submit_alone(driver: Session, request: Mapping[str, Any], *, actor: str) -> Submitted:
    """Queue one request; for `Database.run_alone`. Answers and raises what `submit` does.

    The request is in the form of `JobRequest.normal`.
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
    """The rows of a statement that submits `requests`, whose list is called `place`.

    Raises QueueFull when a queue has no room, BadInput when a class or a service level is not known or when a request
    breaks a limit.
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
    """What the function says by its SQLSTATE of these requests, by their place; None if it was something else."""
    reason = escaped(error.diag.message_primary or "", 300)
    match error.sqlstate:
        case code if code == QUEUE_FULL:
            return QueueFull(reason)
        case code if code == KEY_REUSED:
            index = int(error.diag.message_detail or 0)
            return _key_conflict(index, requests[f"jobs.{index}"])
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
