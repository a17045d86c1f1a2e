"""nothing -> queued: submit."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import psycopg
from leasehold.errors import BadInput, Conflict, LeaseholdError, QueueFull
from leasehold.wire import escaped
from pydantic_core import to_json
from sqlalchemy import Connection, Row, TextClause, text
from sqlalchemy.exc import DBAPIError

from schema.policy.new_instances import UNKNOWN_INSTANCE, refusal, refused_instance
from schema.policy.priority_classes import UNKNOWN_POINTS, unknown_points
from schema.postgres import engine
from schema.postgres.kept_statements import SessionConnection

# The functions are the one implementation, for callers in SQL as well as for this one.
# All answers are one row of texts: reading a row of its own for each of a thousand jobs takes the client 1.5 ms.
SUBMIT = text("""
SELECT CAST(job_ids AS text) AS job_ids, CAST(public_ids AS text) AS public_ids, CAST(created AS text) AS created,
    array_position(same, false) - 1 AS other
FROM submit_all(CAST(:requests AS jsonb), :actor)
""")
SUBMIT_ALONE = b"SELECT submit_alone($1, $2)"
SUBMIT_AT_ONCE = b"SELECT job_ids, public_ids, created FROM submit_all($1, $2, true)"
SUBMIT_ALIKE = b"SELECT job_ids, public_ids, created FROM submit_alike($1, $2, $3, $4)"
# One job into a queue that is known, with a key or without one, as by the function `submit_alone`. Without a key it
# takes 0.85 of the processor time, with one 0.93: the server sets up one statement instead of three. No row comes back
# if the queue is about to be deleted, if its instance has become managed, if operators have set limits, or if the key
# was used before: the function has to be asked then. Parameters: queue, payload, actor, the fields in `_COLUMNS`; of a
# request with a key also the key and the request. `is_awaited` is asked first because it is a part of the plan, unlike
# `wake`.
_CLAIMED = """
), claimed AS (
    INSERT INTO submit_keys AS k (instance, key, request_hash, job_id, public_id)
    SELECT n.instance, $9, sha256(convert_to(($10::jsonb - 'key')::text, 'UTF8')), n.id, new_public_id(n.id) FROM new n
    ON CONFLICT (instance, key) DO UPDATE SET job_id = k.job_id WHERE false
    RETURNING k.public_id"""
SUBMIT_TO_QUEUE = {
    keyed: text(f"""
WITH new AS MATERIALIZED (
    SELECT nextval('jobs_id_seq') AS id, q.id AS queue, q.instance, q.platform, q.units
    FROM queues q JOIN instances i ON i.id = q.instance AND NOT i.managed
    WHERE q.id = $1::integer AND q.idle_since IS NULL AND NOT EXISTS (SELECT FROM submit_checks){claimed}
), job AS (
    INSERT INTO jobs (id, public_id, queue, instance, platform, units, priority, rank, locality_hint,
                      timeout_seconds, max_attempts, retry_failed)
    SELECT n.id, {"claimed.public_id" if keyed else "new_public_id(n.id)"}, n.queue, n.instance, n.platform, n.units,
        coalesce($4::integer, 0), coalesce($4::integer, 0), $5, $6::double precision, coalesce($7::integer, 5),
        coalesce($8::boolean, false)
    FROM new n{" CROSS JOIN claimed" if keyed else ""}
    RETURNING id, public_id
), payload AS (
    INSERT INTO job_payloads (job_id, payload, submitted_by) SELECT j.id, $2::jsonb, $3 FROM job j
)
SELECT id, public_id, CASE WHEN is_awaited('jobs') THEN wake('jobs') END FROM job
""")
    for keyed, claimed in ((False, ""), (True, _CLAIMED))
}
_TO_QUEUE = {keyed: statement.text.encode() for keyed, statement in SUBMIT_TO_QUEUE.items()}
#: The fields of a request that are its parameters $4 to $8.
_COLUMNS = ("priority", "locality_hint", "timeout_seconds", "max_attempts", "retry_failed")
#: All fields that such a request may have. The last four mean nothing for a job without constraints.
_PLAIN = frozenset({
    "instance", "properties", "units", "label", "payload", "key", *_COLUMNS,
    "estimated_cost", "estimated_seconds", "deadline_seconds", "own",
})  # fmt: skip
FIND_QUEUE = b"SELECT (SELECT id FROM known_queue($1) WHERE NOT EXISTS (SELECT FROM submit_checks))"
#: How many kinds of requests a session remembers at most. A kind with more than so many bytes of properties is not
#: remembered.
_REMEMBERED, _LONGEST = 1000, 500
#: How many requests of a kind the function takes before a session asks for their queue: when the first one comes, and
#: when there was no queue for them.
_FIRST, _AGAIN = 1, 100
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


def submit_at_once(
    driver: "psycopg.Connection[Any]", requests: Sequence[Mapping[str, Any]], *, actor: str
) -> list[Submitted]:
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


def submit_alone(driver: "psycopg.Connection[Any]", request: Mapping[str, Any], *, actor: str) -> Submitted:
    """Queue one request; for `Database.run_alone`. Answers and raises what `submit` does.

    The request is in the form of `JobRequest.normal`. Each statement is a transaction; only the last one makes a job.
    """
    try:
        if isinstance(driver, SessionConnection) and (made := _submit_to_queue(driver, request, actor)) is not None:
            return made
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


def _submit_to_queue(driver: SessionConnection, request: Mapping[str, Any], actor: str) -> Submitted | None:
    """Queue a request whose queue this session knows; None if the function has to do it."""
    payload = request.get("payload")
    if not isinstance(payload, dict) or not isinstance(payload.get("command"), list):
        return None
    # Requests of a kind have the same fields and the same queue. Of a kind is remembered the queue's id, or minus the
    # number of requests that the function takes until the queue is asked for.
    properties = to_json(request.get("properties"))
    kind = (*request, request.get("instance"), request.get("units"), request.get("label"), properties)
    queue = driver.remembered.get(kind, -_FIRST)
    if queue <= 0 and not (queue := _find_queue(driver, request, kind, waits=-queue)):
        return None
    values: list[bytes | None] = [b"%d" % queue, to_json(payload), actor.encode()]
    values += [None if value is None else str(value).encode() for value in map(request.get, _COLUMNS)]
    if (key := request.get("key")) is not None:
        values += [key.encode(), to_json(request)]
    made = engine.row_if_any(driver, _TO_QUEUE[key is not None], *values)
    if made is None:
        driver.remembered[kind] = 0
        return None
    job_id, public_id, _ = made
    assert job_id is not None
    assert public_id is not None
    return Submitted(int(job_id), public_id.decode(), True)


def _find_queue(driver: SessionConnection, request: Mapping[str, Any], kind: tuple[Any, ...], *, waits: int) -> int:
    """Ask for the queue of this kind of requests, unless more of them have to come before; 0 if it is not known."""
    queues = driver.remembered
    if waits > 0:
        if request.keys() <= _PLAIN and not request.get("label") and len(kind[-1]) <= _LONGEST:
            if len(queues) >= _REMEMBERED and kind not in queues:
                queues.clear()
            queues[kind] = 1 - waits
        return 0
    (found,) = engine.single_row(driver, FIND_QUEUE, to_json(request))
    queues[kind] = -_AGAIN if found is None else int(found)
    return max(0, queues[kind])


def submitted_rows(
    connection: Connection,
    statement: TextClause,
    values: Mapping[str, Any],
    *,
    requests: Sequence[Mapping[str, Any]] = (),
    place: str = "jobs",
) -> Sequence[Row[Any]]:
    """The rows of a statement that submits `requests`, whose list is called `place`.

    Raises QueueFull when a queue has no room, BadInput when a class or a service level is not known or when a request
    breaks a limit.
    """
    try:
        return connection.execute(statement, values).all()
    except DBAPIError as error:
        placed = {f"{place}.{index}": request for index, request in enumerate(requests)}
        if isinstance(error.orig, psycopg.Error) and (refused := _refused(error.orig, placed)) is not None:
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
