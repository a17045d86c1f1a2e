"""leased, running, cancelling -> final or queued: the end of an attempt.

All ends are one statement, so that a lease stops being live and gives its units back in one place. They differ by their
verdict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from leasehold.states import FINAL

from schema.accounting import counters
from schema.accounting.counters import Settlement
from schema.accounting.quotas import EFFECTIVE_MAX, EVICTION_COOLDOWN, Cooldown
from schema.accounting.units import BotCapacity, ReturnedUnits
from schema.moves.dependencies import ANY_OPEN_GRAPH, unblock
from schema.postgres import fragments
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_quota
from schema.postgres.statements import Row, Statement
from schema.predicates import STILL_LIVE
from schema.validation import MAX_AGAINS, MAX_KILLS

# Credit for the ends of attempts, in the transaction that ends them.
#
# Only the first failure of a job counts against the bot. If the job fails on another bot too, the job is to blame, and
# the failure no longer counts. If it succeeds on another bot, the failure is upheld.


#: The most labels for which a bot's successes are stored, those of its latest attempts.
LABELS = 100


@dataclass(frozen=True)
class Credit:
    """An attempt that has ended: its fence, its verdict, and the state of its job afterwards."""

    job_id: int
    fence: int
    verdict: str
    state: str


# An attempt that was asked to stop says nothing about its bot, unless it ran too long. The counts of a bot change only
# while its row is locked, and only the bots of these attempts are locked here. So a failure of another bot that no
# longer counts is only marked (`returned`). Upkeep takes it back later.
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


class Verdict(StrEnum):
    """Why an attempt ended."""

    #: The bot reports a result.
    SUCCEEDED = "succeeded"
    #: The bot reports a failure. The job is tried again if it asks for that.
    FAILED = "failed"
    #: The bot could not run the job. This counts as an attempt.
    ERROR = "error"
    #: The bot confirms that it has stopped, as it was asked to. This does not count as an attempt.
    STOPPED = "stopped"
    #: The bot gives the job back unfinished. This does not count as an attempt.
    RELEASED = "released"
    #: The bot is gone. This counts as an attempt if the bot had been told of the job, because it may have started it.
    LOST = "lost"


#: Verdicts by their names.
VERDICTS = {verdict.value: verdict for verdict in Verdict}
#: The details of an end that has none.
NO_DETAILS: Mapping[str, Any] = {}


class AttemptEnd(NamedTuple):
    """One lease and how it ended. The first four fields identify the lease."""

    job_id: int
    fence: int
    bot_id: int
    bot_epoch: int
    verdict: Verdict
    #: What the bot reports of the end.
    details: Mapping[str, Any] = NO_DETAILS
    #: JSON that the command left as its result. It is kept if the job is final.
    result: str | None = None


class EndedAttempt(NamedTuple):
    """What became of a job whose attempt ended."""

    job_id: int
    public_id: str
    bot_id: int
    instance: int
    verdict: Verdict
    state: str
    fence: int
    units: int
    locality_hint: str | None

    @classmethod
    def of(cls, row: Row) -> "EndedAttempt":
        """Read a row of the statement that ends attempts, which begins with these columns."""
        return cls._make((*row[:4], VERDICTS[row.verdict], *row[5:9]))


# The state of a job after its attempt. `h` is the job with what is told of the attempt, `l` is the lease. An attempt is
# not charged if the bot stopped it or gave it back, or if the bot was lost before it had been told of the job.
_STARTED = "coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL"
_UNCHARGED = f"h.verdict IN ('stopped', 'released') OR h.verdict = 'lost' AND NOT ({_STARTED})"
_KILLED = f"h.verdict = 'lost' AND {_STARTED}"
_NEXT_STATE = f"""CASE
            WHEN h.verdict = 'succeeded' THEN 'succeeded'
            WHEN h.verdict = 'failed' AND h.retry_failed AND h.attempts < h.max_attempts AND h.state <> 'cancelling'
                AND coalesce(h.details->>'final', '') <> 'true' THEN 'queued'
            WHEN h.verdict = 'failed' THEN 'failed'
            WHEN h.state = 'cancelling' THEN 'cancelled'
            WHEN l.stop_reason IN ('timeout', 'ceiling') THEN 'dead'
            WHEN h.agains >= {MAX_AGAINS} THEN 'dead'
            WHEN {_UNCHARGED} THEN 'queued'
            WHEN {_KILLED} AND h.kills + 1 >= h.max_lost THEN 'dead'
            WHEN h.attempts >= h.max_attempts THEN 'dead'
            ELSE 'queued' END"""

#: When a job may run again whose command has asked for that.
_AGAIN_AT = "now() + make_interval(secs => CAST(d.details->>'again' AS double precision))"

# Each step hands on the columns that later steps need. A later step could join an earlier one instead, but by a nested
# loop, because the planner does not know their sizes.
#
# `over` ends the lease, whose row keeps what the history tells of the end (`schema/sql/views/job_events.sql`).
# `moved` moves the job. Its fence stays if the bot reports a result, and grows if the server cancels the lease.
# `logged` records the eviction of a job that was asked to stop for another instance's minimum, unless the job has ended
# by itself meanwhile. The event `preempted` was written when it was asked.
# `stored` keeps the result of an attempt that ends its job.
_END = f"""
WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:bot_ids AS bigint[]),
                         CAST(:epochs AS bigint[]), CAST(:verdicts AS text[]), CAST(:actors AS text[]),
                         {fragments.json_array("details")}, CAST(:results AS text[]))
        AS t (job_id, fence, bot_id, bot_epoch, verdict, actor, details, result)
), held AS MATERIALIZED (
    SELECT j.id, j.fence, j.state, j.attempts, j.max_attempts, j.kills, j.retry_failed,
        t.bot_id, t.bot_epoch, t.verdict, t.actor, t.details, t.result,
        CASE WHEN t.verdict = 'released' AND t.details ? 'again' THEN (
            SELECT count(*) FROM leases l WHERE l.job_id = j.id AND l.report ? 'again') END AS agains,
        CASE WHEN t.verdict = 'lost' THEN {fragments.most_lost("j.id", MAX_KILLS)} END AS max_lost
    FROM jobs j JOIN told t ON t.job_id = j.id AND t.fence = j.fence
    WHERE j.state IN ('leased', 'running', 'cancelling')
    ORDER BY j.id FOR NO KEY UPDATE OF j
), over AS (
    UPDATE leases l SET ended_at = clock_timestamp(), due_at = NULL,
        state = CASE WHEN h.verdict IN ('succeeded', 'failed') THEN 'completed' ELSE 'cancelled' END,
        ended_event = nextval('stored_events_id_seq'), ended_by = h.actor, ended_from = h.state,
        ended_to = {_NEXT_STATE}, verdict = h.verdict, report = nullif(h.details, '{{{{}}}}')
    FROM held h
    WHERE l.job_id = h.id AND l.fence = h.fence AND l.bot_id = h.bot_id AND l.bot_epoch = h.bot_epoch AND {STILL_LIVE}
    RETURNING h.id, h.fence, h.bot_id, h.verdict, h.details, h.result, h.kills, h.max_lost, h.agains, l.cohort,
        l.instance, l.units, l.stop_reason, l.granted_at, l.ended_to AS to_state, {_UNCHARGED} AS uncharged,
        {_KILLED} AS killed,
        h.verdict IN ('stopped', 'released') AND l.stop_reason = 'preempt' AND l.ended_to = 'queued' AS evicted
), moved AS (
    UPDATE jobs j SET
        state = d.to_state,
        fence = CASE WHEN d.to_state IN ('succeeded', 'failed') THEN j.fence ELSE j.fence + 1 END,
        result_fence = CASE WHEN d.to_state IN ('succeeded', 'failed') THEN j.fence END,
        attempts = CASE WHEN d.uncharged AND d.to_state = 'queued' THEN j.attempts - 1 ELSE j.attempts END,
        evictions = j.evictions + CASE WHEN d.evicted THEN 1 ELSE 0 END,
        cohort = CASE WHEN d.to_state = 'queued' THEN cohort_of(j.label) ELSE j.cohort END,
        queue = CASE WHEN d.to_state = 'queued' THEN queue_in_cohort(j.queue, cohort_of(j.label)) ELSE j.queue END,
        kills = CASE WHEN d.killed THEN least(j.kills + 1, d.max_lost) ELSE j.kills END,
        finished_at = CASE WHEN d.to_state <> 'queued' THEN clock_timestamp() END,
        started_at = CASE WHEN d.to_state IN ('succeeded', 'failed') THEN coalesce(j.started_at, d.granted_at)
            WHEN d.to_state <> 'queued' THEN j.started_at END,
        queued_at = CASE WHEN d.to_state = 'queued' AND d.agains IS NOT NULL THEN {_AGAIN_AT} ELSE j.queued_at END,
        schedule_after = CASE WHEN d.to_state = 'queued' AND d.verdict IN ('failed', 'error')
            THEN now() + make_interval(secs => coalesce(CAST(d.details->>'retry_in' AS double precision),
                least(:retry_cap, :retry_base * 2.0 ^ (j.attempts - 1))))
            WHEN d.to_state = 'queued' AND d.agains IS NOT NULL THEN {_AGAIN_AT}
            WHEN d.to_state = 'queued' AND d.killed THEN (
                SELECT h.until FROM unnest(CAST(:held_bots AS bigint[]), CAST(:held_until AS timestamptz[]))
                    AS h (bot_id, until)
                WHERE h.bot_id = d.bot_id AND h.until > now()) END,
        queue_deadline = CASE WHEN NOT (d.killed OR d.verdict = 'failed' OR d.agains IS NOT NULL)
            THEN j.queue_deadline END,
        reason = CASE WHEN d.to_state = 'succeeded' THEN NULL
            WHEN d.to_state = 'dead' AND d.stop_reason = 'timeout' THEN 'ran longer than its timeout'
            WHEN d.to_state = 'dead' AND d.stop_reason = 'ceiling' THEN 'ran longer than the ceiling of its timeout'
            WHEN d.to_state = 'dead' AND d.killed AND d.kills + 1 >= d.max_lost THEN 'its bot was lost '
                || CASE d.max_lost WHEN 1 THEN 'once' WHEN 2 THEN 'twice' WHEN 3 THEN 'three times'
                    ELSE d.max_lost || ' times' END
            WHEN d.to_state = 'dead' AND d.agains >= {MAX_AGAINS} THEN 'asked {MAX_AGAINS} times to be run again'
            WHEN d.to_state = 'dead' THEN 'every attempt ended without a result'
            ELSE d.details->>'reason' END
    FROM over d WHERE j.id = d.id
    RETURNING j.id, j.public_id, j.instance, j.state, j.locality_hint, d.units, j.fence, d.verdict, d.bot_id,
        d.evicted, d.fence AS ended_fence, d.cohort, j.constrained AS gated
), logged AS (
    INSERT INTO evictions (cohort, instance, job_id, fence, bot_id, preemptor, preemptor_instance, rule, details)
    SELECT o.cohort, o.instance, m.id, m.ended_fence, m.bot_id, p.id, p.instance, e.details->>'rule', e.details
    FROM moved m JOIN over o ON o.id = m.id
    CROSS JOIN LATERAL (
        SELECT details FROM stored_events
        WHERE job_id = m.id AND move = 'preempted' AND fence = m.ended_fence ORDER BY id DESC LIMIT 1) e
    JOIN jobs p ON p.public_id = CAST(e.details->'preemptor'->>'job' AS uuid)
    WHERE m.evicted
), stored AS (
    INSERT INTO job_results (job_id, fence, result)
    SELECT id, fence, CAST(result AS json) FROM over WHERE to_state <> 'queued' AND result IS NOT NULL
{{freed}}), counted AS MATERIALIZED (
    SELECT CASE WHEN bool_or(q.min_quota > 0) THEN 0 ELSE min(({EFFECTIVE_MAX}) - q.usage - s.stopped) END AS room
    FROM (SELECT cohort, instance, count(*) FILTER (WHERE stop_reason = 'preempt') AS stopped
          FROM over GROUP BY cohort, instance) s
    CROSS JOIN LATERAL {newest_quota("s", columns="*")} q
), woken AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM moved WHERE state <> 'queued' HAVING count(*) > 0
)
SELECT id, public_id::text AS public_id, bot_id, instance, verdict, state, fence, units, locality_hint, ended_fence,
    cohort, gated, (SELECT room FROM counted) AS room, (SELECT count(*) FROM woken), {ANY_OPEN_GRAPH} AS graphs,
    (SELECT EXISTS (SELECT FROM success_policy)) AS credited
FROM moved ORDER BY id
"""
_FREED = """), freed AS (
    UPDATE bots b SET in_use = b.in_use - s.units, held = b.held - s.leases
    FROM (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM over GROUP BY bot_id) s
    WHERE b.id = s.bot_id
"""


#: By whether the statement gives the units back in the rows of the bots. Otherwise the caller writes these rows.
END = {written: Statement(_END.format(freed=_FREED if written else "")) for written in (False, True)}


@dataclass(frozen=True)
class RetryPace:
    """Seconds before a retry: base x 2^(attempts - 1), at most cap. Doubling the base doubles every wait below it."""

    base: float = 1.0
    cap: float = 60.0


def end(
    connection: Connection,
    endings: Sequence[AttemptEnd],
    *,
    actor: str | Sequence[str],
    pace: RetryPace | None = None,
    hold_until: Mapping[int, datetime] | None = None,
    capacities: Mapping[int, BotCapacity] | None = None,
    returned: ReturnedUnits | None = None,
    cooldown: Cooldown = EVICTION_COOLDOWN,
) -> list[EndedAttempt]:
    """End the attempts whose fences still hold, and return them. The others stay as they are.

    The caller has locked the bots. Bots and quotas get the units back. The verdict, the number of attempts and a
    pending cancellation decide the next state of each job. Callers that wait for a final job are woken, and nodes of
    graphs that depend on it are unblocked.

    actor: who ends the attempts, one name for all or one for each.
    pace: the backoff of retries.
    hold_until: by bot id, the time (of the database) until which a lost bot may still run its jobs. A job that the bot
        had been told of is not granted again before.
    capacities: by bot id, the units of bots whose rows the caller writes later. They get their units back here.
    returned: collects the units that quotas get back, for the caller to write before its transaction ends. They are
        written here if rows are locked afterwards that come after quotas in the order of locks.
    """
    if not endings:
        return []
    pace = pace or RetryPace()
    rows = connection.execute(
        END[capacities is None],
        {
            "job_ids": [ending.job_id for ending in endings],
            "fences": [ending.fence for ending in endings],
            "bot_ids": [ending.bot_id for ending in endings],
            "epochs": [ending.bot_epoch for ending in endings],
            "verdicts": [ending.verdict.value for ending in endings],
            "details": fragments.json_documents(ending.details for ending in endings),
            "results": [ending.result for ending in endings],
            "actors": [actor] * len(endings) if isinstance(actor, str) else list(actor),
            "retry_base": pace.base,
            "retry_cap": pace.cap,
            "held_bots": list(hold_until or ()),
            "held_until": list((hold_until or {}).values()),
            **cooldown.values(),
        },
    ).all()
    final = {row.id: row.state for row in rows if row.state in FINAL}
    unblocks = bool(final) and rows[0].graphs
    _return_units(connection, rows, returned, locks_more=unblocks or any(row.gated for row in rows))
    _settle(connection, rows, endings)
    if rows and rows[0].credited:
        credit(connection, [Credit(row.id, row.ended_fence, row.verdict, row.state) for row in rows])
    ended = [EndedAttempt.of(row) for row in rows]
    if unblocks:
        unblock(connection, final)
    if capacities is not None:
        for job in ended:
            capacities[job.bot_id].give_back(job.units)
    return ended


def _return_units(
    connection: Connection, rows: Sequence[Row], returned: ReturnedUnits | None, *, locks_more: bool
) -> None:
    found = ReturnedUnits() if returned is None else returned
    for row in rows:
        found.add(row.cohort, row.instance, row.units)
    if rows:
        found.room = rows[0].room
    if returned is None or locks_more:
        found.write(connection)


def _settle(connection: Connection, rows: Sequence[Row], endings: Sequence[AttemptEnd]) -> None:
    """Give back what attempts have taken of counters. Their cost is what the bot reports."""
    if not any(row.gated for row in rows):
        return
    told = {(ending.job_id, ending.fence): ending.details for ending in endings}
    settlements = []
    for row in rows:
        if row.gated:
            said = told[row.id, row.ended_fence]
            used, seconds = said.get("usage") or {}, said.get("seconds")
            settlements.append(Settlement(row.id, row.ended_fence, used, seconds, row.state in FINAL))
    counters.settle(connection, settlements)
