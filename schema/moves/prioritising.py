"""A change of priority while a job waits. Its state stays, its place in the order does not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.gates import GATED, READY, RESTING
from schema.moves import finding
from schema.moves.finding import Submission
from schema.queues import gated_queues, ready_queues, resting_queues
from schema.states import JobState
from schema.submissions import WANTED


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
_ALLOWED = f"(:shared OR j.dedup_key IS NULL OR {WANTED} < 2)"

CHANGE = text(f"""
WITH found AS MATERIALIZED (
    SELECT id, state, priority FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))
), moved AS (
    UPDATE jobs j SET priority = :priority,
        rank = CASE WHEN j.constraint_set IS NOT NULL THEN CASE WHEN j.rank < -1000 THEN j.rank ELSE :priority END END
    FROM found f
    WHERE j.id = f.id AND f.state IN ('blocked', 'queued', 'parked') AND j.state = f.state AND f.priority <> :priority
        AND {_ALLOWED}
    RETURNING j.id, j.state, j.fence, j.priority, f.priority AS before
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
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
def _others(source: str) -> str:
    return f"""
        (SELECT id FROM jobs j WHERE {source} AND {_ALLOWED} AND priority < :priority ORDER BY priority LIMIT :limit)
        UNION ALL
        (SELECT id FROM jobs j WHERE {source} AND {_ALLOWED} AND priority > :priority ORDER BY priority LIMIT :limit)"""


def _in_queues(name: str, waiting: str) -> str:
    source = f"cohort = q.cohort AND instance = q.instance AND platform = q.platform AND {waiting}"
    return f"""
    SELECT j.id FROM {name} q JOIN visible i ON i.id = q.instance CROSS JOIN LATERAL ({_others(source)}) j"""


OF_INSTANCES = text(f"""
WITH RECURSIVE {ready_queues("ready")}, {resting_queues("resting")}, {gated_queues("gated")},
visible AS (
    SELECT id FROM instances WHERE name = ANY (CAST(:instances AS text[]))
)
SELECT id FROM (
    {_in_queues("ready", READY)}
    UNION ALL
    {_in_queues("resting", RESTING)}
    UNION ALL
    {_in_queues("gated", GATED)}
    UNION ALL
    SELECT j.id FROM visible i CROSS JOIN LATERAL ({_others("instance = i.id AND state = 'parked'")}) j
) waiting LIMIT :limit
""")

_LABELLED = """label = :label AND label <> '' AND state IN ('queued', 'parked') AND state = s.state
        AND instance = i.id"""

OF_LABEL = text(f"""
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
    known = finding.find(connection, public_ids, instances=instances)
    found = _change(connection, finding.wanted(known.values()), priority, shared=shared, reason=reason, actor=actor)
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
    finding.lock(connection, ids)
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
