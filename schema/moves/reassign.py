"""Waiting jobs move to another queue: their cohort changes, they get or lose constraints, or they require a task.

The state of a job stays, so these moves write no event.
"""

from collections.abc import Iterable, Sequence

from schema.moves.waiting.backoff import wake_queues_for_bots
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ready_in

# Cohorts


# Bots are locked before jobs, so that the sync of such a bot waits here before it has locked a job.
BOTS = Statement("""
SELECT id FROM bots WHERE status <> 'gone' AND labels && CAST(:labels AS text[]) ORDER BY id FOR NO KEY UPDATE
""")
# This waits for all transactions that have locked or written jobs, and keeps others from doing so until this one ends.
# Otherwise one that locks jobs first and writes them later could wait for us while we wait for it.
LOCK_ALL_JOBS = Statement("LOCK TABLE jobs IN EXCLUSIVE MODE")
MOVE_BOTS = Statement("""
WITH concerned AS MATERIALIZED (
    SELECT id, labels FROM bots WHERE status <> 'gone' AND labels && CAST(:labels AS text[])
), belongs AS MATERIALIZED (
    SELECT labels, cohort_of(labels) AS cohort FROM (SELECT DISTINCT labels FROM concerned) sets
), moved AS (
    UPDATE bots b SET cohort = s.cohort, kept_units = 0 FROM concerned c JOIN belongs s ON s.labels = c.labels
    WHERE b.id = c.id AND b.cohort <> s.cohort
    RETURNING b.id, b.capacity - b.in_use AS room
)
SELECT id, room FROM moved ORDER BY id
""")
# The cohort is looked up once for each label, because there are many jobs and few labels. With `OFFSET 0` the index of
# labels finds the waiting jobs of each.
MOVE_JOBS = Statement("""
WITH belongs AS MATERIALIZED (
    SELECT label, cohort_of(label) AS cohort FROM unnest(CAST(:labels AS text[])) AS label
), strangers AS MATERIALIZED (
    SELECT w.id, b.cohort FROM belongs b CROSS JOIN LATERAL (
        SELECT j.id FROM jobs j
        WHERE j.label = b.label AND j.label <> '' AND j.state IN ('queued', 'parked') AND j.cohort <> b.cohort
        OFFSET 0) w
)
UPDATE jobs j SET cohort = s.cohort, queue = queue_in_cohort(j.queue, s.cohort) FROM strangers s WHERE j.id = s.id
""")


def reassign_cohorts(connection: Connection, *, of_bots: Iterable[str], of_jobs: Iterable[str]) -> None:
    """Give bots and waiting jobs the cohorts that their labels lead to now.

    of_bots: labels; each present bot with at least one of them is looked at. of_jobs: labels of waiting jobs. A job
    with a live lease keeps its cohort until it is queued again. The caller holds the advisory lock
    `leasehold.platforms` exclusively.
    """
    concerned = {"labels": sorted(of_bots)}
    connection.execute(BOTS, concerned)
    connection.execute(LOCK_ALL_JOBS)
    moved = connection.execute(MOVE_BOTS, concerned).all()
    connection.execute(MOVE_JOBS, {"labels": sorted(of_jobs)})
    wake_queues_for_bots(connection, {bot.id: bot.room for bot in moved})


# Constraints. All jobs of an instance that has a share of the pool have a set of them, if only the empty one. When it
# gets a share or loses it, its jobs move little by little, and assigners place each from whichever queue it is in.


_READY_IN_QUEUE = f"""
    SELECT id FROM jobs WHERE {ready_in("q")}
    ORDER BY queue LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED"""

# Jobs without constraints have asked for none, so they get the empty set.
ADD_CONSTRAINTS = Statement(f"""
WITH plain AS MATERIALIZED (
    SELECT j.id FROM accounts a JOIN queues q ON q.instance = a.instance AND q.constraint_set IS NULL
    CROSS JOIN LATERAL ({_READY_IN_QUEUE}) j
    LIMIT :limit
), moved AS (
    UPDATE jobs j SET queue = queue_with_constraints(j.queue, intern_constraint_set('{{}}')), constrained = true
    WHERE j.id = ANY (ARRAY(SELECT id FROM plain))
    RETURNING j.id
)
SELECT count(*) FROM moved
""")

# Only jobs with the empty set lose it. Jobs that have asked for constraints keep them, whether the instance has a share
# or not. Their rows in `job_constraints` stay, in case the instance gets a share again.
REMOVE_CONSTRAINTS = Statement(f"""
WITH alone AS MATERIALIZED (
    SELECT j.id FROM queues q
    JOIN instances i ON i.id = q.instance AND NOT i.managed
    JOIN constraint_sets t ON t.id = q.constraint_set AND t.terms = '{{}}'
    CROSS JOIN LATERAL ({_READY_IN_QUEUE}) j
    LIMIT :limit
)
UPDATE jobs j SET queue = queue_with_constraints(j.queue, NULL), constrained = false, rank = j.priority
WHERE j.id = ANY (ARRAY(SELECT id FROM alone)) RETURNING j.id
""")


# Tasks


# All transactions make new rows in one order, so that no two wait for each other. Requirement sets come before queues.
# A set that jobs prefer comes before the sets that name it. Then follow the task, and the id of the old row.
REQUIRE_TASKS = Statement("""
WITH calls AS MATERIALIZED (
    SELECT j.id, j.queue, j.platform, j.preferred, p.payload #>> '{command,2}' AS task
    FROM jobs j JOIN job_payloads p ON p.job_id = j.id
    WHERE j.id = ANY (CAST(:job_ids AS bigint[])) AND j.finished_at IS NULL
        AND length(p.payload #>> '{command,2}') BETWEEN 1 AND :longest
), old_platforms AS MATERIALIZED (
    SELECT DISTINCT p.preferred IS NOT NULL AS prefers, c.task, p.id
    FROM calls c JOIN queues q ON q.id = c.queue
    JOIN platforms u ON u.id IN (c.platform, c.preferred, q.platform, q.preferred, q.required)
    JOIN platforms p ON p.id IN (u.id, u.preferred)
    ORDER BY prefers, c.task, p.id
), new_platforms AS MATERIALIZED (
    SELECT id, task, platform_with_task(id, task) AS platform FROM old_platforms
), old_queues AS MATERIALIZED (
    SELECT DISTINCT task, queue FROM calls WHERE (SELECT count(platform) FROM new_platforms) > 0 ORDER BY task, queue
), new_queues AS MATERIALIZED (
    SELECT task, queue AS old, queue_with_task(queue, task) AS queue FROM old_queues
)
UPDATE jobs j SET queue = q.queue, platform = p.platform, preferred = f.platform
FROM calls c JOIN new_queues q ON q.old = c.queue AND q.task = c.task
JOIN new_platforms p ON p.id = c.platform AND p.task = c.task
LEFT JOIN new_platforms f ON f.id = c.preferred AND f.task = c.task
WHERE j.id = c.id
""")


def require_tasks(connection: Connection, job_ids: Sequence[int], *, longest: int) -> None:
    """Let calls of tasks go only to bots that have imported the task, or that do not tell which tasks they have.

    job_ids: calls that bots have given back because they have not imported the task; the caller has locked them.
    longest: the most characters of the name of a task that a bot can tell. The calls become as if they had been
    submitted with this requirement, so that no pick and no grant has to look at tasks.
    """
    connection.execute(REQUIRE_TASKS, {"job_ids": sorted(job_ids), "longest": longest})


def add_constraints(connection: Connection, limit: int) -> int:
    """Give the empty set of constraints to up to `limit` ready jobs without constraints of managed instances.

    Returns how many. A job that runs, or that waits for its next attempt, gets it in a later call, once it is ready.
    """
    return int(connection.execute(ADD_CONSTRAINTS, {"limit": limit}).scalar_one())


def remove_constraints(connection: Connection, limit: int) -> int:
    """Take the empty set of constraints from up to `limit` ready jobs of instances that are not managed any more.

    Returns how many.
    """
    return len(connection.execute(REMOVE_CONSTRAINTS, {"limit": limit}).all())
