"""Waiting jobs move to another queue: that of another cohort, with constraints or without, or of bots with a task."""

from collections.abc import Iterable, Sequence

from schema.moves.backoff import wake_queues_for_bots
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ready_in

# Bots first: whoever synchronises waits for us before it holds any job.
BOTS = Statement("""
SELECT id FROM bots WHERE status <> 'gone' AND labels && CAST(:labels AS text[]) ORDER BY id FOR NO KEY UPDATE
""")
# Whoever has locked or written jobs has ended, and nobody locks or writes any until we have ended: whoever locks jobs
# first and writes them later would otherwise wait for us while we wait for it.
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
# Each label once: there are many jobs and few labels. Only the index finds a label's waiting jobs.
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
    """Give every present bot with some label of `of_bots`, and every waiting job with a label of `of_jobs`, the cohort
    that is theirs now. Jobs with a live lease keep theirs until they are queued again. The caller holds the advisory
    lock `leasehold.platforms` exclusively."""
    concerned = {"labels": sorted(of_bots)}
    connection.execute(BOTS, concerned)
    connection.execute(LOCK_ALL_JOBS)
    moved = connection.execute(MOVE_BOTS, concerned).all()
    connection.execute(MOVE_JOBS, {"labels": sorted(of_jobs)})
    wake_queues_for_bots(connection, {bot.id: bot.room for bot in moved})


# An instance gets a share of the pool, or has none any more: the jobs that wait go into the other kind of queue.
#
# Their state stays, so these moves write no event. They are placed all the while, from whichever queue they are in.


_READY_IN_QUEUE = f"""
    SELECT id FROM jobs WHERE {ready_in("q")}
    ORDER BY queue LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED"""

# Nobody knows what else was said when they were submitted, but they asked for nothing then.
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

# What each of them asked for stays known, should the instance get a share again.
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


# A bot has given these calls back because it has not imported their task. New rows are made in one order by all
# transactions, so that no two wait for each other's: requirement sets before queues, and those that jobs prefer before
# those that name them; then by task, and by what they come from.
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
    """Let these calls of tasks, which bots have given back, go only to bots that have imported their task or that do
    not tell. The caller has locked the jobs. longest: the most characters of the name of a task that a bot can tell.

    What they require changes, as if they had been submitted with it, so no other pick or grant has to look at tasks.
    """
    connection.execute(REQUIRE_TASKS, {"job_ids": sorted(job_ids), "longest": longest})


def add_constraints(connection: Connection, limit: int) -> int:
    """Up to `limit` ready jobs of managed instances that have no constraints get an empty set of them; returns how
    many. A job that runs, or waits until it is tried again, is taken over when it is ready."""
    return int(connection.execute(ADD_CONSTRAINTS, {"limit": limit}).scalar_one())


def remove_constraints(connection: Connection, limit: int) -> int:
    """Up to `limit` ready jobs with an empty set of constraints, of instances that are not managed any more, have none;
    returns how many."""
    return len(connection.execute(REMOVE_CONSTRAINTS, {"limit": limit}).all())
