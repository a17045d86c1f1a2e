"""queued -> leased: grant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError

from schema import documents
from schema.gates import DRAIN, HEALTHY, RESERVATION, STATE, serves
from schema.ledger import EVICTION_COOLDOWN, LIMIT, Guard


@dataclass(frozen=True)
class Placement:
    """A wish: this job on that bot. `decision` is stored with the event, so that it can be explained later."""

    job_id: int
    bot_id: int
    decision: Mapping[str, Any]


@dataclass(frozen=True)
class Granted:
    """A lease that came to be."""

    job_id: int
    public_id: str
    bot_id: int
    fence: int
    units: int
    instance: int


# Bots are locked after jobs, out of order, hence SKIP LOCKED, or a short patience in the order of their ids; a bot
# takes placements in the order they are given for as long as they fit into the room that the locked row shows, and a
# quota likewise. The bot's row also decides what the bot may have: since it was chosen, a new session may have given it
# other properties, or another instance. A job's own reservation is room for that job, and for no other, on its bot and
# in its quota; it is read once its bot is locked, because whoever gives it up holds that and not the job.
_GRANT = """
WITH wanted AS MATERIALIZED (
    SELECT w.job_id, w.bot_id, w.actor, w.decision, w.nth, j.units, j.cohort, j.instance, i.pool, p.properties
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:bot_ids AS bigint[]), CAST(:actors AS text[]), {decisions})
        WITH ORDINALITY AS w (job_id, bot_id, actor, decision, nth)
    JOIN jobs j ON j.id = w.job_id AND {queued}
    JOIN instances i ON i.id = j.instance AND {undrained}
    JOIN platforms p ON p.id = j.platform
    LEFT JOIN reservations v ON v.job_id = w.job_id AND v.bot_id <> w.bot_id AND NOT {over}
    WHERE v.job_id IS NULL
), room AS MATERIALIZED (
    SELECT b.id, b.epoch, b.cohort, b.instance, b.pool, b.properties,
        b.capacity - b.in_use AS free, b.capacity - b.in_use - b.reserved AS units
    FROM bots b
    WHERE b.id = ANY (CAST(:bot_ids AS bigint[])) AND {healthy}
    ORDER BY b.id FOR NO KEY UPDATE {held}
), kept AS MATERIALIZED (
    SELECT job_id, bot_id, units FROM reservations
    WHERE job_id = ANY (CAST(:job_ids AS bigint[])) AND bot_id = ANY (ARRAY(SELECT id FROM room)) FOR UPDATE
), filled AS MATERIALIZED (
    SELECT w.*, coalesce(v.units, 0) AS reserved, r.epoch, r.free, r.units AS room,
        sum(w.units) OVER (PARTITION BY w.bot_id ORDER BY w.nth) AS upto,
        sum(w.units - coalesce(v.units, 0)) OVER (PARTITION BY w.bot_id ORDER BY w.nth) AS unreserved
    FROM wanted w JOIN room r ON r.id = w.bot_id AND r.cohort = w.cohort
        AND {serves} AND r.properties @> w.properties
    LEFT JOIN kept v ON v.job_id = w.job_id AND v.bot_id = w.bot_id
), seated AS MATERIALIZED (
    SELECT f.*, q.cohort IS NOT NULL AS counted FROM filled f
    LEFT JOIN quotas q ON q.cohort = f.cohort AND q.instance = f.instance
    WHERE f.upto <= f.free AND f.unreserved <= greatest(f.room, 0)
), allowed AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.min_quota, q.max_quota, q.usage FROM quotas q
    WHERE (q.cohort, q.instance) IN (SELECT s.cohort, s.instance FROM seated s WHERE s.counted)
    ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q {locked}
), left_over AS MATERIALIZED (
    SELECT q.cohort, q.instance, {limit} - q.usage AS headroom, kept_units(q.cohort, q.instance) AS kept FROM allowed q
), within AS MATERIALIZED (
    SELECT s.*, CASE WHEN NOT s.counted THEN {uncounted} WHEN a.cohort IS NULL THEN false
        WHEN a.headroom IS NULL THEN true
        ELSE sum(s.units) OVER (PARTITION BY s.cohort, s.instance ORDER BY s.nth) <= a.headroom
            AND sum(s.units - s.reserved) OVER (PARTITION BY s.cohort, s.instance ORDER BY s.nth)
                <= greatest(a.headroom - a.kept, 0)
        END AS fits
    FROM seated s LEFT JOIN left_over a ON a.cohort = s.cohort AND a.instance = s.instance
), moved AS (
    UPDATE jobs j SET state = 'leased', fence = j.fence + 1, attempts = j.attempts + 1,
        schedule_after = NULL, considered = 0, reason = NULL
    FROM within f
    WHERE j.id = f.job_id AND f.fits AND {queued}
    RETURNING j.id, j.public_id, j.cohort, j.instance, j.fence, j.units, f.bot_id, f.epoch, f.actor,
        f.decision, f.reserved
), taken AS (
    UPDATE bots b SET in_use = b.in_use + s.units, reserved = b.reserved - s.reserved
    FROM (SELECT bot_id, sum(units) AS units, sum(reserved) AS reserved FROM moved GROUP BY bot_id) s
    WHERE b.id = s.bot_id
), claimed AS (
    DELETE FROM reservations v WHERE v.job_id = ANY (ARRAY(SELECT id FROM moved WHERE reserved > 0))
), leased AS (
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, cohort, instance, units, assigner, strategy, due_at,
                        delivered_at)
    SELECT id, fence, bot_id, epoch, cohort, instance, units, actor, :strategy,
        now() + make_interval(secs => :ack), CASE WHEN NOT :tell THEN clock_timestamp() END
    FROM moved
), counted AS (
    UPDATE quotas q SET usage = q.usage + s.units
    FROM (SELECT cohort, instance, sum(units) AS units FROM moved GROUP BY cohort, instance) s
    WHERE q.cohort = s.cohort AND q.instance = s.instance
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'grant', 'queued', 'leased', fence, actor, decision FROM moved
), told AS (
    SELECT wake('bots', string_agg(DISTINCT bot_id::text, ',')) FROM moved WHERE :tell HAVING count(*) > 0
)
SELECT id, public_id, bot_id, fence, units, instance, (SELECT count(*) FROM told) FROM moved
"""


def _grant(guard: Guard, *, again: bool, patient: bool) -> TextClause:
    return text(
        _GRANT.format(
            decisions=documents.array("decisions"),
            queued=STATE.of(job="j"),
            undrained=DRAIN.of(instance="i"),
            over=f"({RESERVATION.of(reservation='v')})",
            healthy=HEALTHY.of(bot="b"),
            serves=serves("r", "w"),
            limit=LIMIT[guard],
            held="" if patient else "SKIP LOCKED",
            locked="SKIP LOCKED" if again else "",
            uncounted="true" if guard is Guard.MAX else "false",
        )
    )


GRANT: dict[tuple[Guard, bool, bool], TextClause] = {
    (guard, again, patient): _grant(guard, again=again, patient=patient)
    for guard in Guard
    for again, patient in ((False, False), (False, True), (True, False))
}
LOCK_TIMEOUT = text("SELECT set_config('lock_timeout', :timeout, true), current_setting('lock_timeout') AS before")
#: The lock that was waited for did not come in time.
LOCK_NOT_AVAILABLE = "55P03"


def grant(
    connection: Connection,
    placements: Sequence[Placement],
    *,
    assigner: str | Sequence[str],
    strategy: str,
    ack: float,
    tell: bool = True,
    guard: Guard = Guard.MAX,
    again: bool = False,
    cooldown: float = EVICTION_COOLDOWN,
    patience: float = 0.0,
) -> list[Granted]:
    """Give each job to its bot, where the bot is still there, free, allowed to have it and not locked by somebody else,
    and where the instance's quota allows it.

    The caller holds the jobs' rows locked. Placements that do not come back lost a race and their jobs are
    untouched. `assigner` is who chose, one for all or one for each. `ack` is the number of seconds the bot has to
    acknowledge. `tell` wakes the bots' long polls; without it the caller tells the bots of their leases itself, before
    the transaction ends, and they count as delivered. `guard` is the limit up to which quotas may be used; `again` says
    that this transaction has granted or ended leases before and so may hold quotas already: then those that somebody
    else holds count as used up, because waiting for them out of order could deadlock. `cooldown` is that of evictions,
    in seconds. With `patience`, bots that others hold are waited for, so many seconds at most, instead of losing the
    race at once; not together with `again`, for the same reason.
    """
    if not placements:
        return []
    values = {
        "job_ids": [placement.job_id for placement in placements],
        "bot_ids": [placement.bot_id for placement in placements],
        "decisions": documents.joined(placement.decision for placement in placements),
        "actors": [assigner] * len(placements) if isinstance(assigner, str) else list(assigner),
        "strategy": strategy,
        "ack": ack,
        "tell": tell,
        **({"cooldown": cooldown} if guard is Guard.MAX else {}),
    }
    granted = None
    if patience and not again:
        granted = _patiently(connection, GRANT[guard, False, True], values, patience)
    if granted is None:
        granted = _granted(connection, GRANT[guard, again, False], values)
    return granted


def _patiently(
    connection: Connection, statement: TextClause, values: Mapping[str, Any], patience: float
) -> list[Granted] | None:
    """What was granted, or None if somebody holds a bot, or a quota, for longer than that."""
    try:
        with connection.begin_nested():
            before = connection.execute(LOCK_TIMEOUT, {"timeout": f"{patience * 1000:.0f}ms"}).one().before
            granted = _granted(connection, statement, values)
            connection.execute(LOCK_TIMEOUT, {"timeout": before})
            return granted
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error) and error.orig.sqlstate == LOCK_NOT_AVAILABLE:
            return None
        raise


def _granted(connection: Connection, statement: TextClause, values: Mapping[str, Any]) -> list[Granted]:
    rows = connection.execute(statement, values)
    return [Granted(row.id, str(row.public_id), row.bot_id, row.fence, row.units, row.instance) for row in rows.all()]
