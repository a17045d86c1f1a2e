"""queued -> queued: reprice, when a class, a service level or what holds for all classes has changed."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.gates import GATED, STILL_READY

_ORDER = "cohort, instance, platform, constraint_set, rank, queued_at, id"
#: Before every job.
BEGINNING = (-1, -1, -1, -1, "-infinity", "-infinity", -1)

# One stretch of the index of gated jobs. One whose priority is no longer what its points came to has been given
# another by somebody, and keeps it. What has been promoted or hastened stays where it is, unless it gains by it.
REPRICE = text(f"""
WITH part AS MATERIALIZED (
    SELECT {_ORDER} FROM jobs WHERE {GATED} AND ({_ORDER}) > (:cohort, :instance, :platform, :constraint_set,
        CAST(:rank AS float8), CAST(:queued_at AS timestamptz), :id)
    ORDER BY {_ORDER} LIMIT :limit
), held AS MATERIALIZED (
    SELECT id, fence, priority, rank FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM part)) AND {STILL_READY}
    ORDER BY id FOR NO KEY UPDATE
), priced AS MATERIALIZED (
    SELECT h.*, t.price AS before, priced(t.priority_inputs) AS price
    FROM held h JOIN job_constraints t ON t.job_id = h.id
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
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'reprice', 'queued', 'queued', fence, :actor, jsonb_build_object('before', before, 'after', after)
    FROM moved
)
SELECT (SELECT count(*) FROM moved) AS changed, (SELECT count(*) FROM part) AS looked, last.*
FROM (SELECT) one LEFT JOIN LATERAL (
    SELECT cohort, instance, platform, constraint_set, rank, queued_at, id FROM part
    ORDER BY cohort DESC, instance DESC, platform DESC, constraint_set DESC, rank DESC, queued_at DESC, id DESC LIMIT 1
) last ON true
""")


@dataclass(frozen=True)
class Repriced:
    """How many jobs a batch changed, and where the next one begins, None after the last."""

    changed: int
    after: tuple[object, ...] | None


def reprice(connection: Connection, after: tuple[object, ...] = BEGINNING, *, limit: int, actor: str) -> Repriced:
    """Give up to `limit` waiting jobs behind `after` the priority that their points come to now.

    The pool goes on meanwhile; what is repeated changes nothing. A job that rests, is held aside or deferred keeps what
    it has.
    """
    names = ("cohort", "instance", "platform", "constraint_set", "rank", "queued_at", "id")
    values = dict(zip(names, after, strict=True))
    row = connection.execute(REPRICE, {**values, "limit": limit, "actor": actor}).one()
    return Repriced(row.changed, tuple(getattr(row, name) for name in names) if row.looked == limit else None)
