"""Bots and waiting jobs move to the cohort that is theirs since the cohorts have changed."""

from collections.abc import Iterable

from sqlalchemy import Connection, text

from schema.moves.backoff import release
from schema.picking.constrained import FIRST_PLACE, STEP
from schema.predicates import CONSTRAINED, READY, RESTING

#: How many waiting jobs each bot that has moved makes ready at once; the others come back when their wait is over.
RELEASE_LIMIT = 1000

# Bots first: whoever synchronises waits for us before it holds any job.
BOTS = text("""
SELECT id FROM bots WHERE status <> 'gone' AND labels && CAST(:labels AS text[]) ORDER BY id FOR NO KEY UPDATE
""")
# Whoever has locked or written jobs has ended, and nobody locks or writes any until we have ended: whoever locks jobs
# first and writes them later would otherwise wait for us while we wait for it.
LOCK_ALL_JOBS = text("LOCK TABLE jobs IN EXCLUSIVE MODE")
MOVE_BOTS = text("""
WITH concerned AS MATERIALIZED (
    SELECT id, labels FROM bots WHERE status <> 'gone' AND labels && CAST(:labels AS text[])
), belongs AS MATERIALIZED (
    SELECT labels, cohort_of(labels) AS cohort FROM (SELECT DISTINCT labels FROM concerned) sets
), moved AS (
    UPDATE bots b SET cohort = s.cohort FROM concerned c JOIN belongs s ON s.labels = c.labels
    WHERE b.id = c.id AND b.cohort <> s.cohort
    RETURNING b.id, b.cohort, b.capacity - b.in_use - b.reserved AS room
), linked AS (
    UPDATE bot_platforms p SET cohort = m.cohort FROM moved m WHERE p.bot_id = m.id
)
SELECT id, room FROM moved ORDER BY id
""")
# Each label once: there are many jobs and few labels. Only the index finds a label's waiting jobs.
MOVE_JOBS = text("""
WITH belongs AS MATERIALIZED (
    SELECT label, cohort_of(label) AS cohort FROM unnest(CAST(:labels AS text[])) AS label
), strangers AS MATERIALIZED (
    SELECT w.id, b.cohort FROM belongs b CROSS JOIN LATERAL (
        SELECT j.id FROM jobs j
        WHERE j.label = b.label AND j.label <> '' AND j.state IN ('queued', 'parked') AND j.cohort <> b.cohort
        OFFSET 0) w
)
UPDATE jobs j SET cohort = s.cohort FROM strangers s WHERE j.id = s.id
""")


def reassign_cohorts(connection: Connection, *, of_bots: Iterable[str], of_jobs: Iterable[str]) -> None:
    """Give every present bot with some label of `of_bots`, and every waiting job with a label of `of_jobs`, the cohort
    that is theirs now. Jobs with a live lease keep theirs until they are queued again. The caller holds the advisory
    lock `leasehold.platforms` exclusively."""
    concerned = {"labels": sorted(of_bots)}
    connection.execute(BOTS, concerned)
    connection.execute(LOCK_ALL_JOBS)
    moved = connection.execute(MOVE_BOTS, concerned).all()
    connection.execute(MOVE_JOBS, {"labels": sorted(of_jobs)})
    release(connection, {bot.id: bot.room for bot in moved}, limit=RELEASE_LIMIT)


# An instance gets a share of the pool, or has none any more: the jobs that wait go into the other kind of queue.
#
# Their state stays, so these moves write no event. They are placed all the while, from whichever queue they are in.


#: What was counted, or not, for a job that room is reserved for stays so until the room is given up.
_UNRESERVED = "NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = jobs.id)"
_OF = "cohort = c.id AND instance = a.instance"
_PLACES = "(SELECT instance FROM accounts ORDER BY instance OFFSET 0) a CROSS JOIN (SELECT id FROM cohorts OFFSET 0) c"

# Nobody knows what else was said when they were submitted, but they asked for nothing then.
ADD_CONSTRAINTS = text(f"""
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
REMOVE_CONSTRAINTS = text(f"""
WITH RECURSIVE gated AS (
    SELECT first.* FROM ({STEP.format(before=", ".join(map(str, FIRST_PLACE)))}) first
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
            AND constraint_set = g.constraint_set AND {CONSTRAINED}
            AND {_UNRESERVED}
        ORDER BY cohort, instance, platform, constraint_set LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
)
UPDATE jobs j SET constraint_set = NULL, rank = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM alone)) RETURNING j.id
""")


def add_constraints(connection: Connection, limit: int) -> int:
    """Up to `limit` ready and `limit` resting jobs of managed instances that do not wait at gates yet do from now on;
    returns how many. A job that runs is taken over when it is queued again."""
    return int(connection.execute(ADD_CONSTRAINTS, {"limit": limit}).scalar_one())


def remove_constraints(connection: Connection, limit: int) -> int:
    """Up to `limit` ready jobs that ask for nothing but a place, of instances that are not managed any more, wait for a
    place alone; returns how many."""
    return len(connection.execute(REMOVE_CONSTRAINTS, {"limit": limit}).all())
