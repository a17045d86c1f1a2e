"""Bots and waiting jobs move to the cohort that is theirs since the cohorts have changed."""

from collections.abc import Iterable

from sqlalchemy import Connection, text

from schema.moves.considering import release

#: How many waiting jobs each bot that has moved makes ready at once; the others come back when their wait is over.
RELEASE_LIMIT = 1000

# Bots first: whoever synchronises waits for us before it holds any job.
BOTS = text("""
SELECT id FROM bots WHERE status <> 'gone' AND labels && CAST(:labels AS text[]) ORDER BY id FOR NO KEY UPDATE
""")
# Whoever has locked or written jobs has ended, and nobody locks or writes any until we have ended: whoever locks jobs
# first and writes them later would otherwise wait for us while we wait for it.
ALONE = text("LOCK TABLE jobs IN EXCLUSIVE MODE")
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


def rejoin(connection: Connection, *, of_bots: Iterable[str], of_jobs: Iterable[str]) -> None:
    """Give every present bot with some label of `of_bots`, and every waiting job with a label of `of_jobs`, the cohort
    that is theirs now. Jobs with a live lease keep theirs until they are queued again. The caller holds the advisory
    lock `leasehold.platforms` exclusively."""
    concerned = {"labels": sorted(of_bots)}
    connection.execute(BOTS, concerned)
    connection.execute(ALONE)
    moved = connection.execute(MOVE_BOTS, concerned).all()
    connection.execute(MOVE_JOBS, {"labels": sorted(of_jobs)})
    release(connection, {bot.id: bot.room for bot in moved}, limit=RELEASE_LIMIT)
