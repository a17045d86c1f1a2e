"""What the end of a job on one bot means for another: a charge given back, or probation, which is one lease at a time
until it succeeds, or for a while.

It is decided where attempts end (`moves.crediting`). Whoever finishes a job there may not lock the other bot, which is
done here.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.wakeups import wake

#: Charges that one review gives back.
LIMIT = 500

# A charge may have lost some of its weight meanwhile. Bots that somebody else is at work on are left for the next time.
RETURN = text("""
WITH due AS MATERIALIZED (
    SELECT job_id, bot_id FROM blames WHERE returned_at IS NOT NULL AND bot_id IS NOT NULL LIMIT :limit
), held AS MATERIALIZED (
    SELECT id FROM bots WHERE id = ANY (ARRAY(SELECT bot_id FROM due)) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), given AS MATERIALIZED (
    SELECT d.job_id, d.bot_id, j.label FROM due d
    CROSS JOIN LATERAL (SELECT label FROM jobs WHERE id = d.job_id OFFSET 0) j
    WHERE d.bot_id = ANY (ARRAY(SELECT id FROM held))
), back AS (
    UPDATE bot_success s SET failures = greatest(0, s.failures - g.charges), returned = s.returned + g.charges
    FROM (SELECT bot_id, label, count(*) AS charges FROM given GROUP BY bot_id, label) g
    WHERE s.bot_id = g.bot_id AND s.label = g.label
)
UPDATE blames SET bot_id = NULL WHERE job_id = ANY (ARRAY(SELECT job_id FROM given))
""")
REVIEW = text("""
WITH suspects AS MATERIALIZED (
    SELECT bot_id FROM blames WHERE upheld_at IS NOT NULL AND bot_id IS NOT NULL
    GROUP BY bot_id HAVING count(*) >= (SELECT probation_failures FROM success_policy WHERE probation_failures > 0)
), held AS MATERIALIZED (
    SELECT id, name, id = ANY (ARRAY(SELECT bot_id FROM suspects)) AS suspect FROM bots
    WHERE id = ANY (ARRAY(
        SELECT bot_id FROM suspects
        UNION ALL
        SELECT id FROM bots WHERE probation_until IS NOT NULL
            AND (probation_until < now() OR NOT EXISTS (SELECT FROM success_policy))))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), told AS (
    UPDATE bots b SET probation_until = CASE WHEN h.suspect
        THEN now() + make_interval(secs => (SELECT probation_seconds FROM success_policy)) END
    FROM held h WHERE b.id = h.id
), settled AS (
    DELETE FROM blames WHERE bot_id = ANY (ARRAY(SELECT id FROM held WHERE suspect)) AND upheld_at IS NOT NULL
)
SELECT name, suspect FROM held ORDER BY name
""")


@dataclass(frozen=True)
class Reviewed:
    """Names of bots that have been put on probation, and of those whose probation is over."""

    begun: list[str]
    over: list[str]


def review(connection: Connection) -> Reviewed:
    """Give charges back, put those bots on probation for which it is time, and end it where its time is over, or
    nothing is counted any more."""
    connection.execute(RETURN, {"limit": LIMIT})
    rows = connection.execute(REVIEW).all()
    found = Reviewed([row.name for row in rows if row.suspect], [row.name for row in rows if not row.suspect])
    if found.over:
        wake(connection, "jobs")
    return found
