"""An instance gets a share of the pool, or has none any more: the jobs that wait go into the other kind of queue.

Their state stays, so these moves write no event. They are placed all the while, from whichever queue they are in.
"""

from sqlalchemy import Connection, text

from schema.gated import BEGINNING, STEP
from schema.gates import GATED, READY, RESTING

#: What was counted, or not, for a job that room is reserved for stays so until the room is given up.
_UNRESERVED = "NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = jobs.id)"
_OF = "cohort = c.id AND instance = a.instance"
_PLACES = "(SELECT instance FROM accounts ORDER BY instance OFFSET 0) a CROSS JOIN (SELECT id FROM cohorts OFFSET 0) c"

# Nobody knows what else was said when they were submitted, but they asked for nothing then.
ADOPT = text(f"""
WITH ready AS MATERIALIZED (
    SELECT j.id FROM {_PLACES} CROSS JOIN LATERAL (
        SELECT id FROM jobs WHERE {_OF} AND {READY} AND {_UNRESERVED}
        ORDER BY cohort, instance, platform LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
), resting AS MATERIALIZED (
    SELECT j.id FROM {_PLACES} CROSS JOIN LATERAL (
        SELECT id FROM jobs WHERE {_OF} AND {RESTING}
            AND {_UNRESERVED}
        ORDER BY cohort, instance, platform LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
), moved AS (
    UPDATE jobs j SET constraint_set = (SELECT intern_constraint_set('{{}}')),
        rank = rank_of(jsonb_build_object('priority', j.priority))
    WHERE j.id = ANY (ARRAY(SELECT id FROM ready UNION ALL SELECT id FROM resting))
    RETURNING j.id, j.priority
), termed AS (
    INSERT INTO job_constraints (job_id, estimate, seconds, deadline, priority_inputs)
    SELECT m.id, w.* FROM moved m CROSS JOIN LATERAL own_constraints(jsonb_build_object('priority', m.priority)) w
    ON CONFLICT (job_id) DO NOTHING
)
SELECT count(*) FROM moved
""")

# What each of them asked for stays known, should the instance get a share again.
DISMISS = text(f"""
WITH RECURSIVE gated AS (
    SELECT first.* FROM ({STEP.format(before=", ".join(map(str, BEGINNING)))}) first
    UNION ALL
    SELECT following.* FROM gated g
    CROSS JOIN LATERAL ({STEP.format(before="g.cohort, g.instance, g.platform, g.constraint_set")}) following
), alone AS MATERIALIZED (
    SELECT j.id FROM gated g
    JOIN instances i ON i.id = g.instance AND NOT i.managed
    JOIN constraint_sets t ON t.id = g.constraint_set AND t.terms = '{{}}'
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = g.cohort AND instance = g.instance AND platform = g.platform
            AND constraint_set = g.constraint_set AND {GATED}
            AND {_UNRESERVED}
        ORDER BY cohort, instance, platform, constraint_set LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
)
UPDATE jobs j SET constraint_set = NULL, rank = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM alone)) RETURNING j.id
""")


def adopt(connection: Connection, limit: int) -> int:
    """Up to `limit` ready and `limit` resting jobs of managed instances that do not wait at gates yet do from now on;
    returns how many. A job that runs is taken over when it is queued again."""
    return int(connection.execute(ADOPT, {"limit": limit}).scalar_one())


def dismiss(connection: Connection, limit: int) -> int:
    """Up to `limit` ready jobs that ask for nothing but a place, of instances that are not managed any more, wait for a
    place alone; returns how many."""
    return len(connection.execute(DISMISS, {"limit": limit}).all())
