"""A change of priority while a job waits. Its state stays, its place in the order does not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leasehold.states import JobState

from schema.moves import submissions
from schema.moves.submissions import Submission
from schema.policy import versions
from schema.postgres.connection import Connection
from schema.postgres.fragments import WANTED_SUBMISSIONS, stored_seconds
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, READY_CONSTRAINED, STILL_READY, ready_in


@dataclass(frozen=True)
class Prioritised:
    """What a change of priority found. `state` and `priority` are those afterwards, None if there is no job to see;
    a submission that was withdrawn is cancelled and has no priority."""

    public_id: str
    state: str | None
    priority: int | None
    changed: bool


@dataclass(frozen=True)
class ManyPrioritised:
    """How many jobs a bulk change changed, and whether it left others that it would have changed as well."""

    changed: int
    more: bool


#: Job `j` is not shared by several submissions, or those may change as well.
_ALLOWED = f"(:shared OR j.dedup_key IS NULL OR {WANTED_SUBMISSIONS} < 2)"

CHANGE = Statement(f"""
WITH found AS MATERIALIZED (
    SELECT id, state, priority FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))
), moved AS (
    UPDATE jobs j SET priority = :priority,
        rank = CASE WHEN j.rank < -1000 THEN j.rank ELSE :priority END
    FROM found f
    WHERE j.id = f.id AND f.state IN ('blocked', 'queued', 'parked') AND j.state = f.state AND f.priority <> :priority
        AND {_ALLOWED}
    RETURNING j.id, j.state, j.fence, j.priority, f.priority AS before
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'prioritise', state, state, fence, :actor, jsonb_strip_nulls(jsonb_build_object(
        'before', before, 'after', priority, 'reason', CAST(:reason AS text)))
    FROM moved
), told AS (
    SELECT wake('jobs') FROM moved WHERE state = 'queued' HAVING count(*) > 0
)
SELECT f.id, f.state, coalesce(m.priority, f.priority) AS priority, m.id IS NOT NULL AS changed,
    (SELECT count(*) FROM told) AS woken
FROM found f LEFT JOIN moved m ON m.id = f.id
""")


# Two stretches of an index that is ordered by priority: what has the new priority already is never read.
def _others(source: str, *, order: str = "priority") -> str:
    changes = f"{source} AND {_ALLOWED} AND priority <> :priority"
    return f"""
        (SELECT id FROM jobs j WHERE {changes} AND {order} < :priority ORDER BY {order} LIMIT :limit)
        UNION ALL
        (SELECT id FROM jobs j WHERE {changes} AND {order} > :priority ORDER BY {order} LIMIT :limit)"""


# The rank of a job with constraints may be what its priority is not.
_IN_QUEUE = ready_in("q")
OF_INSTANCES = Statement(f"""
WITH visible AS MATERIALIZED (
    SELECT id FROM instances WHERE name = ANY (CAST(:instances AS text[]))
), visible_queues AS MATERIALIZED (
    SELECT q.id, q.constraint_set FROM queues q WHERE q.instance = ANY (ARRAY(SELECT id FROM visible))
)
SELECT id FROM (
    SELECT j.id FROM visible_queues q CROSS JOIN LATERAL (
        {_others(_IN_QUEUE, order="rank")}
        UNION ALL
        (SELECT id FROM jobs j WHERE {_IN_QUEUE} AND q.constraint_set IS NOT NULL AND rank = :priority
            AND {_ALLOWED} AND priority <> :priority ORDER BY rank LIMIT :limit)) j
    UNION ALL
    (SELECT id FROM jobs j WHERE {AT_REST} AND instance = ANY (ARRAY(SELECT id FROM visible))
        AND {_ALLOWED} AND priority <> :priority ORDER BY schedule_after LIMIT :limit)
    UNION ALL
    SELECT j.id FROM visible i CROSS JOIN LATERAL ({_others("instance = i.id AND state = 'parked'")}) j
) waiting LIMIT :limit
""")

_LABELLED = """label = :label AND label <> '' AND state IN ('queued', 'parked') AND state = s.state
        AND instance = i.id"""

OF_LABEL = Statement(f"""
SELECT j.id FROM instances i CROSS JOIN (VALUES ('queued'), ('parked')) s (state)
CROSS JOIN LATERAL ({_others(_LABELLED)}) j
WHERE CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[]))
LIMIT :limit
""")


def set_priority(
    connection: Connection,
    public_ids: Sequence[str],
    priority: int,
    *,
    instances: Sequence[str] | None,
    shared: bool = True,
    reason: str | None,
    actor: str,
) -> list[Prioritised]:
    """Give blocked, queued and held-aside jobs another priority (lower = more urgent); all others keep theirs.

    Only jobs of `instances` are seen, None means all; of those, jobs that several submissions share are left unless
    `shared`. Answers are in the order of `public_ids`, which must be UUIDs.
    """
    known = submissions.find_submissions(connection, public_ids, instances=instances)
    found = _change(
        connection, submissions.wanted_job_ids(known.values()), priority, shared=shared, reason=reason, actor=actor
    )
    return [_prioritised(public_id, known.get(public_id), found) for public_id in public_ids]


def set_priority_where(
    connection: Connection,
    priority: int,
    *,
    instances: Sequence[str] | None,
    label: str | None,
    shared: bool = True,
    limit: int,
    reason: str | None,
    actor: str,
) -> ManyPrioritised:
    """Give up to `limit` queued and held-aside jobs of these instances, or with this label, another priority.

    With both it is the jobs of these instances that have the label. `instances` None means all of them and needs a
    label, which must not be empty. Jobs that several submissions share are left unless `shared`.
    """
    assert instances is not None or label, "all jobs of the pool are never meant"
    visible = None if instances is None else list(instances)
    where = {"instances": visible, "priority": priority, "shared": shared, "limit": limit + 1}
    if label is None:
        rows = connection.execute(OF_INSTANCES, where)
    else:
        rows = connection.execute(OF_LABEL, where | {"label": label})
    ids = [row.id for row in rows]
    found = _change(connection, ids[:limit], priority, shared=shared, reason=reason, actor=actor)
    return ManyPrioritised(sum(changed for _, _, changed in found.values()), more=len(ids) > limit)


def _change(
    connection: Connection, ids: Sequence[int], priority: int, *, shared: bool, reason: str | None, actor: str
) -> dict[int, tuple[str, int, bool]]:
    submissions.lock_jobs(connection, ids)
    values = {"ids": list(ids), "priority": priority, "shared": shared, "reason": reason, "actor": actor}
    return {row.id: (row.state, row.priority, row.changed) for row in connection.execute(CHANGE, values)}


def _prioritised(
    public_id: str, submission: Submission | None, found: Mapping[int, tuple[str, int, bool]]
) -> Prioritised:
    if submission is not None and submission.withdrawn:
        return Prioritised(public_id, JobState.CANCELLED, None, changed=False)
    absent = (None, None, False)
    state, priority, changed = absent if submission is None else found.get(submission.job_id, absent)
    return Prioritised(public_id, state, priority, changed=changed)


# queued -> queued: reprice, when a class, a service level or what holds for all classes has changed.


_ORDER = "queue, rank, queued_at, id"
#: The condition that a walk through the waiting jobs is not over.
REPRICING = "origin -> 'repricing' -> 'after' <> 'null'"
# Where the walk is. A look at it that waits has the policy locked already.
_WALK = "SELECT origin -> 'repricing' FROM policy_in_force FOR NO KEY UPDATE"
_WALKS = {True: Statement(_WALK), False: Statement(f"{_WALK} SKIP LOCKED")}
_NOTE_WALK = Statement("""
UPDATE policy_in_force SET origin = origin || jsonb_build_object('repricing', CAST(:walk AS jsonb))
""")

# One stretch of the index of ready jobs that have constraints. A job whose priority is no longer
# what its points came to has been given another by somebody, and keeps it. What has been promoted or hastened stays
# where it is, unless it gains by it.
REPRICE = Statement(f"""
WITH part AS MATERIALIZED (
    SELECT {_ORDER} FROM jobs WHERE {READY_CONSTRAINED} AND ({_ORDER}) > (
        :queue, CAST(:rank AS float8), CAST(:queued_at AS timestamptz), :id)
    ORDER BY {_ORDER} LIMIT :limit
), held AS MATERIALIZED (
    SELECT id, fence, priority, rank FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM part)) AND {STILL_READY}
    ORDER BY id FOR NO KEY UPDATE
), priced AS MATERIALIZED (
    SELECT h.*, t.price AS before, p.price
    FROM held h JOIN job_constraints t ON t.job_id = h.id CROSS JOIN LATERAL points_of(t.priority_inputs) p
    WHERE t.price IS NOT NULL
), moved AS (
    UPDATE jobs j SET priority = p.price,
        rank = CASE WHEN p.rank = p.priority THEN p.price ELSE least(p.rank, p.price) END
    FROM priced p WHERE j.id = p.id AND p.priority = p.before AND p.price <> p.before
    RETURNING j.id, j.fence, p.before, j.priority AS after
), kept AS (
    UPDATE job_constraints t SET price = p.price, watch_at = least(t.watch_at, now())
    FROM priced p WHERE t.job_id = p.id
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'reprice', 'queued', 'queued', fence, :actor, jsonb_build_object('before', before, 'after', after)
    FROM moved
)
SELECT (SELECT count(*) FROM moved) AS changed, (SELECT count(*) FROM part) AS looked, last.*
FROM (SELECT) one LEFT JOIN LATERAL (
    SELECT {_ORDER} FROM part ORDER BY queue DESC, rank DESC, queued_at DESC, id DESC LIMIT 1
) last ON true
""")


@dataclass(frozen=True)
class Repriced:
    """How many jobs the walk through the waiting jobs has changed so far, and whether it is over."""

    changed: int
    is_over: bool


def reprice(connection: Connection, *, limit: int, actor: str, wait: bool = False) -> Repriced:
    """Give the next `limit` waiting jobs the priority that their points come to now, if points were changed.

    All processes go on with one walk, which a change of points begins in its own transaction. So a process that dies
    leaves no job without its priority. wait: for a change of the policy that is under way; otherwise nothing is done
    during one. The pool goes on meanwhile. A job that rests, is held aside or deferred keeps what it has.
    """
    if wait:
        versions.hold(connection)
    walk = connection.execute(_WALKS[wait]).scalar_one_or_none() or {"after": None, "changed": 0}
    if walk["after"] is None:
        return Repriced(walk["changed"], is_over=True)
    names = ("queue", "rank", "queued_at", "id")
    values = dict(zip(names, walk["after"], strict=True))
    row = connection.execute(REPRICE, {**values, "limit": limit, "actor": actor}).one()
    after = [row.queue, row.rank, row.queued_at.isoformat(), row.id] if row.looked == limit else None
    changed = walk["changed"] + row.changed
    connection.execute(_NOTE_WALK, {"walk": json.dumps({"after": after, "changed": changed})})
    return Repriced(changed, is_over=after is None)


# queued -> queued: promote a job that starves, hasten one whose deadline is near, and say that one will miss it.


#: A job is hastened when its slack is less than this part of the time that remains.
SLACK = 0.2
#: The condition that a job is to be looked at.
WATCHED = "watch_at IS NOT NULL AND watch_at <= now()"
#: Seconds after which a job is looked at again that does not wait, or to which nothing can happen as it is: its
#: priority or the policy may have been changed meanwhile.
LATER = 600

# A job is expected to run as long as it was said to, else as nine of ten of its class did. `latest` is when it has to
# start; that, and when it is hastened, do not depend on the time, so each job is looked at when something changes and
# not before. A hastened job's rank is below every priority, in the order of the slack. One that is promoted heads the
# level above, so that nothing that keeps coming in can keep it waiting.
REVIEW_WAITING = Statement(f"""
WITH held AS MATERIALIZED (
    SELECT j.id, j.public_id, j.state, j.fence, j.rank, j.queued_at, j.queue, j.constrained, j.finished_at
    FROM job_constraints t JOIN jobs j ON j.id = t.job_id
    WHERE {WATCHED}
    ORDER BY t.watch_at LIMIT :limit FOR NO KEY UPDATE OF j, t SKIP LOCKED
), known AS MATERIALIZED (
    SELECT h.*, t.deadline, t.promoted_at, t.at_risk, s.critical, s.high, s.normal,
        h.constrained AND h.state = 'queued' AS waits,
        t.price IS NOT NULL AS priced, {stored_seconds("s.starvation_seconds")} AS patience,
        {stored_seconds("coalesce(t.seconds, c.seconds_high, 0)")} AS expected
    FROM held h JOIN job_constraints t ON t.job_id = h.id CROSS JOIN scheduling s
    JOIN queues q ON q.id = h.queue
    LEFT JOIN constraint_sets g ON g.id = q.constraint_set LEFT JOIN job_classes c ON c.name = g.terms->>'job_class'
), judged AS MATERIALIZED (
    SELECT k.*, deadline - expected AS latest,
        waits AND rank >= -1000 AND deadline - expected / {1 - SLACK} <= now() AS hastened,
        waits AND NOT at_risk AND deadline - expected <= now() AS endangered,
        waits AND priced AND rank > critical AND greatest(queued_at, promoted_at) + patience <= now() AS starved
    FROM known k
), ranked AS MATERIALIZED (
    SELECT j.*, CASE WHEN hastened THEN -1e6 + (extract(epoch FROM latest) - 1.7e9) / 1e4
        WHEN NOT starved IS TRUE THEN rank WHEN rank > normal THEN high + 0.5
        WHEN rank > high THEN critical + 0.5 ELSE -1000 END AS becomes,
        starved AND hastened IS NOT TRUE AS promoted
    FROM judged j
), moved AS (
    UPDATE jobs j SET rank = r.becomes FROM ranked r WHERE j.id = r.id AND r.becomes <> r.rank
), timed AS (
    UPDATE job_constraints t SET promoted_at = CASE WHEN r.promoted THEN now() ELSE t.promoted_at END,
        at_risk = t.at_risk OR r.endangered IS TRUE,
        watch_at = CASE WHEN r.finished_at IS NOT NULL THEN NULL
            WHEN NOT r.waits OR next.at IS NULL THEN now() + make_interval(secs => {LATER})
            ELSE greatest(now() + interval '1 s', next.at) END
    FROM ranked r CROSS JOIN LATERAL (
        SELECT least(
            CASE WHEN r.becomes >= -1000 THEN r.deadline - r.expected / {1 - SLACK} END,
            CASE WHEN NOT r.at_risk AND r.endangered IS NOT TRUE THEN r.latest END,
            CASE WHEN r.priced AND r.becomes > r.critical
                THEN greatest(r.queued_at, CASE WHEN r.promoted THEN now() ELSE r.promoted_at END) + r.patience
            END) AS at) next
    WHERE t.job_id = r.id
), told AS MATERIALIZED (
    SELECT r.id, r.public_id, r.fence, w.move, w.details FROM ranked r CROSS JOIN LATERAL (
        SELECT 'promote' AS move, jsonb_build_object('from', level_of(r.rank), 'to', level_of(r.becomes),
            'waited_seconds', round(extract(epoch FROM now() - r.queued_at), 3)) AS details WHERE r.promoted
        UNION ALL
        SELECT 'hasten', jsonb_build_object('deadline', r.deadline, 'latest_start', r.latest) WHERE r.hastened
        UNION ALL
        SELECT 'at_risk', jsonb_build_object('deadline', r.deadline, 'latest_start', r.latest) WHERE r.endangered) w
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, move, 'queued', 'queued', fence, :actor, details FROM told
)
SELECT (SELECT count(*) FROM held) AS looked, t.public_id, t.move, t.details->>'to' AS level
FROM (SELECT) one LEFT JOIN told t ON true
""")


@dataclass(frozen=True)
class ReviewedJob:
    """What has become of one waiting job: `move` is `promote`, `hasten` or `at_risk`; `level`: what it was promoted
    to."""

    public_id: str
    move: str
    level: str | None


def review_waiting(connection: Connection, limit: int, *, actor: str) -> tuple[int, list[ReviewedJob]]:
    """Look at up to `limit` jobs that are due for it; returns how many, and what has become of them.

    A job that has stayed in one level for as long as the policy allows moves up by one; its class stays. Rows that
    somebody else has locked are left for the next time.
    """
    rows = connection.execute(REVIEW_WAITING, {"limit": limit, "actor": actor}).all()
    return rows[0].looked, [
        ReviewedJob(str(row.public_id), row.move, row.level) for row in rows if row.move is not None
    ]
