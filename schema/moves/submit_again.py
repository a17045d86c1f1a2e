"""nothing -> queued: a new job like one that is over, which stays what it is."""

from collections.abc import Collection, Mapping

from leasehold.errors import Conflict, Forbidden
from leasehold.wire import escaped

from schema.moves.submit import Submitted, submitted_rows
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: With the name of the job it has to fit into the key of a submit.
MAX_REQUEUE_KEY_BYTES = 150
# Weak enough not to get in the way of any move; retention passes over it, so that what is read next is all there.
LOCK_AGAINST_RETENTION = Statement("""
SELECT id, public_id, state FROM jobs WHERE id = ANY (CAST(:ids AS bigint[])) ORDER BY id FOR KEY SHARE
""")


def _without(key: str, of: str) -> str:
    """An SQL expression for an object without a key. Wrong JSON stays as it is, so that it stops no other request."""
    return f"CASE WHEN jsonb_typeof({of}) = 'object' THEN {of} - '{key}' ELSE {of} END"


#: What makes the priority of the job {job} with the constraints {terms}. A priority that an operator has set stands
#: against the points of a class or a service level.
OWN = """CASE WHEN jsonb_typeof({terms}.priority_inputs) = 'object' AND {terms}.price <> {job}.priority
            THEN {terms}.priority_inputs || jsonb_build_object('fixed', true) ELSE {terms}.priority_inputs END"""
# It is not joined with what asks for it (OFFSET 0): each job is found by its id. The new job has the priority that
# points give it now, later by the penalty with which the old one was met.
#: A query of the request of job {job}, whose public id is {name}, in the form that `submit_many` takes; without its
#: payload and its key. Which bots have imported the task is found out anew: nobody may submit that requirement.
LIKE_JOB = (
    """
    SELECT jsonb_build_object(
        'from', {name},
        'instance', i.name, 'properties', """
    + _without("leasehold.task", "coalesce(r.properties, p.properties)")
    + """,
        'label', j.label,
        'priority', j.priority, 'units', j.units, 'locality_hint', j.locality_hint,
        'timeout_seconds', j.timeout_seconds, 'max_attempts', j.max_attempts, 'retry_failed', j.retry_failed,
        'queue_timeout_seconds', e.queue_timeout_seconds
    ) || jsonb_strip_nulls(jsonb_build_object(
        'preferred_properties', """
    + _without("leasehold.task", "f.properties")
    + """,
        'prefer_seconds', e.prefer_seconds,
        'terms', g.terms, 'estimated_cost', t.estimate, 'estimated_seconds', t.seconds,
        'own', """
    + OWN.format(terms="t", job="j")
    + """,
        'metadata', (SELECT jsonb_object_agg(m.key, m.value) FROM job_metadata m WHERE m.job_id = j.id)
    )) AS request
    FROM jobs j
    JOIN instances i ON i.id = j.instance
    JOIN queues q ON q.id = j.queue
    JOIN platforms p ON p.id = j.platform
    LEFT JOIN platforms r ON r.id = q.required
    LEFT JOIN platforms f ON f.id = q.preferred
    LEFT JOIN constraint_sets g ON g.id = q.constraint_set
    LEFT JOIN job_constraints t ON t.job_id = j.id
    LEFT JOIN LATERAL (
        SELECT details->'queue_timeout_seconds' AS queue_timeout_seconds, details->'prefer_seconds' AS prefer_seconds
        FROM job_events
        WHERE job_id = j.id AND move = 'submit' ORDER BY id LIMIT 1) e ON true
    WHERE j.id = {job} OFFSET 0"""
)

# Submitted like any other job, but it joins nobody: the new job has no deduplication key. Its time in the queue begins
# anew.
SUBMIT_AGAIN = Statement(f"""
WITH old AS MATERIALIZED (
    SELECT o.nth - 1 AS n, o.name, like_job.request || jsonb_build_object(
        'payload', (SELECT w.payload FROM job_payloads w WHERE w.job_id = o.id),
        'key', 'requeue:' || CAST(:key AS text) || ':' || o.name) AS request
    FROM unnest(CAST(:names AS uuid[]), CAST(:ids AS bigint[])) WITH ORDINALITY AS o (name, id, nth)
    CROSS JOIN LATERAL ({LIKE_JOB.format(job="o.id", name="o.name")}) like_job
)
SELECT o.name, s.job_id, s.public_id, coalesce(s.created, true) AS created, coalesce(s.same, true) AS same
FROM submit_many((SELECT jsonb_agg(request ORDER BY n) FROM old), :actor) a
CROSS JOIN LATERAL unnest(a.job_ids, a.public_ids, a.created, a.same) WITH ORDINALITY
    AS s (job_id, public_id, created, same, nth)
JOIN old o ON o.n = s.nth - 1
""")


# The newest job that was made like each of these, by the index of origins; without those that the same key has made.
COPIES = Statement("""
SELECT o.name, c.public_id
FROM unnest(CAST(:names AS uuid[])) AS o (name)
CROSS JOIN LATERAL (
    SELECT j.public_id, j.instance FROM job_payloads w JOIN jobs j ON j.id = w.job_id
    WHERE w.origin->>'from' = CAST(o.name AS text) ORDER BY w.job_id DESC LIMIT 1) c
WHERE NOT EXISTS (
    SELECT FROM submit_keys k
    WHERE k.instance = c.instance AND k.key = 'requeue:' || CAST(:key AS text) || ':' || CAST(o.name AS text))
""")
PRIORITIES = Statement("SELECT id, priority FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))")
TAKE_TURN = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.requeue'))")


def copies(connection: Connection, names: Collection[str], *, key: str | None) -> dict[str, str]:
    """Return the newest job that was made like each of these jobs, by public ids, unless this key has made one.

    Who asks takes turns with others until the end of the transaction, so that none of them makes a copy unseen.
    """
    connection.execute(TAKE_TURN)
    rows = connection.execute(COPIES, {"names": list(names), "key": key})
    return {str(row.name): str(row.public_id) for row in rows}


def submit_again(
    connection: Connection, jobs: Mapping[str, int], *, ceiling: int | None, key: str | None, actor: str
) -> dict[str, Submitted]:
    """Submit a job like each of these, given by public id and id. Returns the new ones by the public ids of the old.

    The same key (at most 150 bytes) makes no second job like the same one. Raises QueueFull, Conflict `key_reused` if
    somebody submitted another job with the key that this one makes, and Forbidden if a new job is more urgent than
    `ceiling` (None: any may be). The caller's transaction then ends without them.
    """
    values = {"names": list(jobs), "ids": list(jobs.values()), "key": key, "actor": actor}
    rows = submitted_rows(connection, SUBMIT_AGAIN, values)
    if not all(row.same for row in rows):
        raise Conflict("key_reused", f"key: what it makes of '{escaped(key or '', 80)}' was used for another job")
    made = {str(row.name): Submitted(row.job_id, str(row.public_id), row.created) for row in rows}
    if ceiling is not None:
        # Points may have changed, so that the new job is more urgent than the old one.
        ids = [each.job_id for each in made.values() if each.created]
        priorities = {row.id: row.priority for row in connection.execute(PRIORITIES, {"ids": ids})}
        for name, each in made.items():
            if (priority := priorities.get(each.job_id, ceiling)) < ceiling:
                said = f"another job like '{name}' would have the priority {priority}"
                raise Forbidden(f"id: {said}, this token may not exceed {ceiling}")
    return made
