"""Credit for the ends of attempts: what each says of its bot, counted in the transaction that ends it.

Only the first failure of a job counts against the bot. If the job fails on another bot too, the job is to blame, and
the failure no longer counts. If it succeeds on another bot, the failure is upheld. `schema/fleet/success.py` says what
the counts come to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: The most labels for which a bot's successes are stored, those of its latest attempts.
LABELS = 100


@dataclass(frozen=True)
class Credit:
    """An attempt that has ended: its fence, its verdict, and the state of its job afterwards."""

    job_id: int
    fence: int
    verdict: str
    state: str


# `over` has the attempts that say something about their bots. One that was asked to stop says nothing, unless it ran
# too long. `known`: the job has failed before. `blamed`: the bot against which that counts now. `due`: it has to be
# taken back from a bot.
#
# A row of `blames` is the first failure of a job. It is made while the job is to run again (`blamed`). It is marked
# when the job fails on another bot (`returned`) or succeeds there (`upheld`). It goes when the job ends on the bot
# itself and nothing is due (`settled`), and an upheld one when the bot succeeds with any job (`forgiven`).
#
# The counts of a bot change only while its row is locked, and only the bots of these attempts are locked here. So what
# was returned is taken back by upkeep later.
RECORD = Statement("""
WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:verdicts AS text[]),
                         CAST(:states AS text[])) AS t (job_id, fence, verdict, state)
), over AS MATERIALIZED (
    SELECT t.job_id, t.state, l.bot_id, j.label, t.verdict = 'succeeded' AS ok, b.known, b.blamed, b.due,
        t.verdict IN ('succeeded', 'failed') AS finished, l.seconds
    FROM told t
    CROSS JOIN LATERAL (
        SELECT bot_id, stop_reason, coalesce(acknowledged_at, delivered_at) IS NOT NULL AS started,
            extract(epoch FROM ended_at - coalesce(acknowledged_at, delivered_at, granted_at)) AS seconds
        FROM leases WHERE job_id = t.job_id AND fence = t.fence OFFSET 0) l
    CROSS JOIN LATERAL (SELECT label FROM jobs WHERE id = t.job_id OFFSET 0) j
    CROSS JOIN LATERAL (
        SELECT count(*) > 0 AS known, max(bot_id) FILTER (WHERE returned_at IS NULL) AS blamed,
            count(*) FILTER (WHERE returned_at IS NOT NULL AND bot_id IS NOT NULL) > 0 AS due
        FROM blames WHERE job_id = t.job_id OFFSET 0) b
    WHERE t.verdict = 'succeeded' OR l.stop_reason = 'timeout'
        OR l.stop_reason IS NULL AND (t.verdict IN ('failed', 'error') OR t.verdict = 'lost' AND l.started)
), blamed AS (
    INSERT INTO blames (job_id, bot_id) SELECT job_id, bot_id FROM over WHERE NOT ok AND NOT known AND state = 'queued'
), returned AS (
    UPDATE blames SET returned_at = clock_timestamp()
    WHERE job_id = ANY (ARRAY(SELECT job_id FROM over WHERE NOT ok AND blamed <> bot_id))
), upheld AS (
    UPDATE blames SET upheld_at = clock_timestamp()
    WHERE job_id = ANY (ARRAY(SELECT job_id FROM over WHERE ok AND blamed <> bot_id))
), settled AS (
    DELETE FROM blames WHERE job_id = ANY (ARRAY(
        SELECT job_id FROM over
        WHERE known AND NOT due AND (ok OR state <> 'queued') AND coalesce(blamed, bot_id) = bot_id))
), forgiven AS (
    DELETE FROM blames WHERE bot_id = ANY (ARRAY(SELECT bot_id FROM over WHERE ok)) AND upheld_at IS NOT NULL
), lifted AS (
    UPDATE bots SET probation_until = NULL
    WHERE id = ANY (ARRAY(SELECT bot_id FROM over WHERE ok)) AND probation_until IS NOT NULL
), counted AS (
    INSERT INTO bot_success AS s (bot_id, label, successes, failures, finished, seconds)
    SELECT bot_id, label, count(*) FILTER (WHERE ok), count(*) FILTER (WHERE NOT ok), count(*) FILTER (WHERE finished),
        coalesce(sum(seconds) FILTER (WHERE finished), 0)
    FROM over WHERE ok OR NOT known GROUP BY bot_id, label
    ON CONFLICT (bot_id, label) DO UPDATE SET (successes, failures, returned, finished, seconds, at) = (
        SELECT (s.successes + EXCLUDED.successes) * w.share, (s.failures + EXCLUDED.failures) * w.share,
            s.returned * w.share, (s.finished + EXCLUDED.finished) * w.share,
            (s.seconds + EXCLUDED.seconds) * w.share, clock_timestamp()
        FROM (SELECT least(1, (SELECT memory FROM success_policy)
            / (s.successes + s.failures + EXCLUDED.successes + EXCLUDED.failures)) AS share) w)
    RETURNING s.bot_id, s.xmax = 0 AS new
)
SELECT array_agg(bot_id) AS bot_ids FROM counted WHERE new
""")
TRIM = Statement("""
DELETE FROM bot_success s WHERE s.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND s.label NOT IN (
    SELECT r.label FROM bot_success r WHERE r.bot_id = s.bot_id ORDER BY r.at DESC, r.label LIMIT :limit)
""")


def credit(connection: Connection, credits: Sequence[Credit]) -> None:
    """Count these ends for their bots; a success ends the probation of its bot.

    The caller has locked the bots and the jobs, has just ended the attempts, and has found a row in `success_policy`,
    without which nothing is counted.
    """
    new = connection.execute(
        RECORD,
        {
            "job_ids": [one.job_id for one in credits],
            "fences": [one.fence for one in credits],
            "verdicts": [one.verdict for one in credits],
            "states": [one.state for one in credits],
        },
    ).scalar_one()
    if new:
        connection.execute(TRIM, {"bot_ids": sorted(set(new)), "limit": LABELS})
