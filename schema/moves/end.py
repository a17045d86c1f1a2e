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
from schema.fleet.credit import Credit, credit
from schema.moves.dependencies import ANY_OPEN_GRAPH, unblock
from schema.postgres import fragments
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_quota
from schema.postgres.statements import Row, Statement
from schema.predicates import STILL_LIVE
from schema.validation import MAX_AGAINS, MAX_KILLS


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


# The statement that ends attempts. Each step hands on the columns that later steps need. A later step could join an
# earlier one instead, but by a nested loop, because the planner does not know their sizes.

#: The attempts whose fence still holds, with what is told of them. Their jobs are locked.
_ATTEMPTS = f"""
    SELECT j.id, j.fence, j.state, j.attempts, j.max_attempts, j.kills, j.retry_failed,
        t.bot_id, t.bot_epoch, t.verdict, t.actor, t.details, t.result,
        CASE WHEN t.verdict = 'released' AND t.details ? 'again' THEN (
            SELECT count(*) FROM leases l WHERE l.job_id = j.id AND l.report ? 'again') END AS agains,
        CASE WHEN t.verdict = 'lost' THEN {fragments.most_lost("j.id", MAX_KILLS)} END AS max_lost
    FROM jobs j JOIN told t ON t.job_id = j.id AND t.fence = j.fence
    WHERE j.state IN ('leased', 'running', 'cancelling')
    ORDER BY j.id FOR NO KEY UPDATE OF j"""

# Of an attempt `a` and its lease `l`.
#: The bot had been told of the job, so that it may have started it.
_STARTED = "coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL"
#: The attempt is not charged to the job: the bot stopped it or gave it back, or was lost before it had been told.
_UNCHARGED = f"a.verdict IN ('stopped', 'released') OR a.verdict = 'lost' AND NOT ({_STARTED})"
#: The job may have killed the bot.
_KILLED = f"a.verdict = 'lost' AND {_STARTED}"
#: The state of the job afterwards: the first line that applies.
_NEXT_STATE = f"""CASE
            WHEN a.verdict = 'succeeded' THEN 'succeeded'
            WHEN a.verdict = 'failed' AND a.retry_failed AND a.attempts < a.max_attempts AND a.state <> 'cancelling'
                AND coalesce(a.details->>'final', '') <> 'true' THEN 'queued'
            WHEN a.verdict = 'failed' THEN 'failed'
            WHEN a.state = 'cancelling' THEN 'cancelled'
            WHEN l.stop_reason IN ('timeout', 'ceiling') THEN 'dead'
            WHEN a.agains >= {MAX_AGAINS} THEN 'dead'
            WHEN {_UNCHARGED} THEN 'queued'
            WHEN {_KILLED} AND a.kills + 1 >= a.max_lost THEN 'dead'
            WHEN a.attempts >= a.max_attempts THEN 'dead'
            ELSE 'queued' END"""

#: End the leases. Their rows keep what the history tells of the end (`schema/sql/views/job_events.sql`).
_LEASES = f"""
    UPDATE leases l SET ended_at = clock_timestamp(), due_at = NULL,
        state = CASE WHEN a.verdict IN ('succeeded', 'failed') THEN 'completed' ELSE 'cancelled' END,
        ended_event = nextval('stored_events_id_seq'), ended_by = a.actor, ended_from = a.state,
        ended_to = {_NEXT_STATE}, verdict = a.verdict, report = nullif(a.details, '{{}}')
    FROM attempts a
    WHERE l.job_id = a.id AND l.fence = a.fence AND l.bot_id = a.bot_id AND l.bot_epoch = a.bot_epoch AND {STILL_LIVE}
    RETURNING a.id, a.fence, a.bot_id, a.verdict, a.details, a.result, a.kills, a.max_lost, a.agains, l.cohort,
        l.instance, l.units, l.stop_reason, l.granted_at, l.ended_to AS to_state, {_UNCHARGED} AS uncharged,
        {_KILLED} AS killed,
        a.verdict IN ('stopped', 'released') AND l.stop_reason = 'preempt' AND l.ended_to = 'queued' AS evicted"""

#: When a job may run again whose command has asked for that.
_AGAIN_AT = "now() + make_interval(secs => CAST(e.details->>'again' AS double precision))"
#: Until when a job that is queued again rests: for the backoff of its retry, until the time for which its command has
#: asked, or as long as a lost bot may still run it.
_RESTS_UNTIL = f"""CASE WHEN e.to_state = 'queued' AND e.verdict IN ('failed', 'error')
            THEN now() + make_interval(secs => coalesce(CAST(e.details->>'retry_in' AS double precision),
                least(:retry_cap, :retry_base * 2.0 ^ (j.attempts - 1))))
            WHEN e.to_state = 'queued' AND e.agains IS NOT NULL THEN {_AGAIN_AT}
            WHEN e.to_state = 'queued' AND e.killed THEN (
                SELECT b.until FROM unnest(CAST(:held_bots AS bigint[]), CAST(:held_until AS timestamptz[]))
                    AS b (bot_id, until)
                WHERE b.bot_id = e.bot_id AND b.until > now()) END"""
#: Why the job did not succeed, for people.
_REASON = f"""CASE WHEN e.to_state = 'succeeded' THEN NULL
            WHEN e.to_state = 'dead' AND e.stop_reason = 'timeout' THEN 'ran longer than its timeout'
            WHEN e.to_state = 'dead' AND e.stop_reason = 'ceiling' THEN 'ran longer than the ceiling of its timeout'
            WHEN e.to_state = 'dead' AND e.killed AND e.kills + 1 >= e.max_lost THEN 'its bot was lost '
                || CASE e.max_lost WHEN 1 THEN 'once' WHEN 2 THEN 'twice' WHEN 3 THEN 'three times'
                    ELSE e.max_lost || ' times' END
            WHEN e.to_state = 'dead' AND e.agains >= {MAX_AGAINS} THEN 'asked {MAX_AGAINS} times to be run again'
            WHEN e.to_state = 'dead' THEN 'every attempt ended without a result'
            ELSE e.details->>'reason' END"""

#: Move the jobs. The fence stays if the bot reports a result, and grows if the server cancels the lease.
_JOBS = f"""
    UPDATE jobs j SET
        state = e.to_state,
        fence = CASE WHEN e.to_state IN ('succeeded', 'failed') THEN j.fence ELSE j.fence + 1 END,
        result_fence = CASE WHEN e.to_state IN ('succeeded', 'failed') THEN j.fence END,
        attempts = CASE WHEN e.uncharged AND e.to_state = 'queued' THEN j.attempts - 1 ELSE j.attempts END,
        evictions = j.evictions + CASE WHEN e.evicted THEN 1 ELSE 0 END,
        cohort = CASE WHEN e.to_state = 'queued' THEN cohort_of(j.label) ELSE j.cohort END,
        queue = CASE WHEN e.to_state = 'queued' THEN queue_in_cohort(j.queue, cohort_of(j.label)) ELSE j.queue END,
        kills = CASE WHEN e.killed THEN least(j.kills + 1, e.max_lost) ELSE j.kills END,
        finished_at = CASE WHEN e.to_state <> 'queued' THEN clock_timestamp() END,
        started_at = CASE WHEN e.to_state IN ('succeeded', 'failed') THEN coalesce(j.started_at, e.granted_at)
            WHEN e.to_state <> 'queued' THEN j.started_at END,
        queued_at = CASE WHEN e.to_state = 'queued' AND e.agains IS NOT NULL THEN {_AGAIN_AT} ELSE j.queued_at END,
        schedule_after = {_RESTS_UNTIL},
        queue_deadline = CASE WHEN NOT (e.killed OR e.verdict = 'failed' OR e.agains IS NOT NULL)
            THEN j.queue_deadline END,
        reason = {_REASON}
    FROM ended e WHERE j.id = e.id
    RETURNING j.id, j.public_id, j.instance, j.state, j.locality_hint, e.units, j.fence, e.verdict, e.bot_id,
        e.evicted, e.fence AS ended_fence, e.cohort, j.constrained AS gated"""

#: Record the evictions of jobs that were asked to stop for another instance's minimum, unless they have ended by
#: themselves meanwhile. The event `preempted` was written when they were asked.
_EVICTIONS = """
    INSERT INTO evictions (cohort, instance, job_id, fence, bot_id, preemptor, preemptor_instance, rule, details)
    SELECT e.cohort, e.instance, m.id, m.ended_fence, m.bot_id, p.id, p.instance, asked.details->>'rule', asked.details
    FROM moved m JOIN ended e ON e.id = m.id
    CROSS JOIN LATERAL (
        SELECT details FROM stored_events
        WHERE job_id = m.id AND move = 'preempted' AND fence = m.ended_fence ORDER BY id DESC LIMIT 1) asked
    JOIN jobs p ON p.public_id = CAST(asked.details->'preemptor'->>'job' AS uuid)
    WHERE m.evicted"""

#: Store the results of attempts that end their jobs.
_RESULTS = """
    INSERT INTO job_results (job_id, fence, result)
    SELECT id, fence, CAST(result AS json) FROM ended WHERE to_state <> 'queued' AND result IS NOT NULL"""

#: Give the bots their units back.
_BOTS = """
    UPDATE bots b SET in_use = b.in_use - s.units, held = b.held - s.leases
    FROM (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM ended GROUP BY bot_id) s
    WHERE b.id = s.bot_id"""

#: The units that each of these instances may have, beside these; see `ReturnedUnits`.
_ROOM = f"""
    SELECT CASE WHEN bool_or(q.min_quota > 0) THEN 0 ELSE min(({EFFECTIVE_MAX}) - q.usage - s.stopped) END AS units
    FROM (SELECT cohort, instance, count(*) FILTER (WHERE stop_reason = 'preempt') AS stopped
          FROM ended GROUP BY cohort, instance) s
    CROSS JOIN LATERAL {newest_quota("s", columns="*")} q"""


def _end(*, frees_bots: bool) -> Statement:
    freed = f", freed AS ({_BOTS}\n)" if frees_bots else ""
    return Statement(f"""
WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:bot_ids AS bigint[]),
                         CAST(:epochs AS bigint[]), CAST(:verdicts AS text[]), CAST(:actors AS text[]),
                         {fragments.json_array("details")}, CAST(:results AS text[]))
        AS t (job_id, fence, bot_id, bot_epoch, verdict, actor, details, result)
), attempts AS MATERIALIZED ({_ATTEMPTS}
), ended AS ({_LEASES}
), moved AS ({_JOBS}
), logged AS ({_EVICTIONS}
), stored AS ({_RESULTS}
){freed}, room AS MATERIALIZED ({_ROOM}
), woken AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM moved WHERE state <> 'queued' HAVING count(*) > 0
)
SELECT id, public_id::text AS public_id, bot_id, instance, verdict, state, fence, units, locality_hint, ended_fence,
    cohort, gated, (SELECT units FROM room) AS room, (SELECT count(*) FROM woken), {ANY_OPEN_GRAPH} AS graphs,
    (SELECT EXISTS (SELECT FROM success_policy)) AS credited
FROM moved ORDER BY id
""")


#: By whether the statement gives the units back in the rows of the bots. Otherwise the caller writes these rows.
END = {written: _end(frees_bots=written) for written in (False, True)}


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
