"""What one bot may take when it has just finished something: picks for a bot that asks for work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from schema.accounting.quotas import HEADROOM, Guard
from schema.picking import head_cursor
from schema.picking.head_cursor import HeadCursor
from schema.picking.queues import BELOW_MINIMUM, backoff_queues, fitting_jobs, open_queues, ready_queues
from schema.picking.ready import COLUMNS, MAX_JOBS_READ, SIZES, WIDTHS, ReadyJob, is_contended, ready_job
from schema.predicates import COHORT, QUOTA, READY, RESTING, serves

# Without `:any`, ready jobs that an assigner has tried
# before are left to the assigners, while those still waiting out their backoff are not.
_FOR_BOT_HEADS = """
    SELECT q.cohort, q.instance, q.platform, h.id, h.priority, h.queued_at FROM {queues} q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM (
            SELECT id, priority, queued_at, units, considered, schedule_after FROM jobs
            WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
                AND {waiting}
            ORDER BY priority, queued_at, id LIMIT :look) first
        WHERE units <= :room AND {within} AND {condition}
        ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE {gate}"""

# Instances that the bot is for, and whose quota would not be used up even if it took nothing else, or that have just
# got something of it back by this very call (BuildGrid, proactive fetching under quotas).
_OPEN_TO_BOT = """
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE {ours})
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))"""

_NEW, _NEW_GATE = "(:any OR considered = 0)", "(:any OR NOT :literal)"
# A job that rests because an attempt failed, and not because no bot was found, has been considered by nobody.
_RESTED = "considered > 0 AND (:any OR schedule_after >= now())"


def _open_to_bot(queues: str) -> str:
    ours = f"{COHORT.of(bot='b', want='w')} AND {serves('b', 'w')}"
    return open_queues(queues, HEADROOM[Guard.MAX]) + _OPEN_TO_BOT.format(ours=ours)


def _heads_for_bot(queues: str, waiting: str, *, condition: str, gate: str) -> str:
    within = QUOTA.of(job="", headroom="q.headroom")
    return _FOR_BOT_HEADS.format(queues=queues, waiting=waiting, within=within, condition=condition, gate=gate)


# Jobs that fit behind any number of others that need more than the bot has, or than the quota leaves.
_FITTING_HEADS = f"""
    SELECT q.cohort, q.instance, q.platform, h.id, h.priority, h.queued_at FROM open_queues q
    LEFT JOIN (SELECT cohort, instance, platform, count(*) AS found FROM first_heads GROUP BY 1, 2, 3) f
        ON f.cohort = q.cohort AND f.instance = q.instance AND f.platform = q.platform
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, priority, queued_at FROM ({fitting_jobs("q", units="least(:room, q.headroom)", limit=":look")}) fit
        WHERE {_NEW} ORDER BY priority, queued_at, id LIMIT :reach) h
    WHERE {_NEW_GATE} AND coalesce(f.found, 0) < :reach"""

_PICKED = f"""picked AS MATERIALIZED (
    SELECT {", ".join(f"j.{column}" for column in COLUMNS.split(", "))}
    FROM unnest(ARRAY(SELECT id FROM heads)) WITH ORDINALITY AS h (id, nth) JOIN jobs j ON j.id = h.id
    WHERE j.state = 'queued' AND (coalesce(j.schedule_after, '-infinity') = '-infinity' OR j.considered > 0)
    ORDER BY h.nth LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
)"""
_RESTING_HEADS = _heads_for_bot("open_resting", RESTING, condition=_RESTED, gate="true")

# Whoever is below the minimum comes first: what it gets here need not be taken from others by evictions.
FOR_BOT = text(f"""
WITH RECURSIVE {ready_queues("queues")},
{backoff_queues("resting")},
open_queues AS MATERIALIZED ({_open_to_bot("queues")}),
open_resting AS MATERIALIZED ({_open_to_bot("resting")}),
first_heads AS MATERIALIZED ({_heads_for_bot("open_queues", READY, condition=_NEW, gate=_NEW_GATE)}),
both_kinds AS MATERIALIZED (
        SELECT * FROM first_heads
        UNION
        {_FITTING_HEADS}
        UNION ALL
        {_RESTING_HEADS}
), ranked AS MATERIALIZED (
    SELECT b.*, coalesce(q.min_quota - q.usage, 0) < row_number() OVER (
        PARTITION BY b.cohort, b.instance ORDER BY b.priority, b.queued_at, b.id) AS beyond_minimum
    FROM both_kinds b LEFT JOIN quotas q ON q.cohort = b.cohort AND q.instance = b.instance
), heads AS MATERIALIZED (
    SELECT id FROM ranked ORDER BY beyond_minimum, priority, queued_at, id LIMIT :reach
), {_PICKED}
SELECT r.heads, p.* FROM (SELECT count(*) AS heads FROM heads) r LEFT JOIN picked p ON true
""")
# While nobody who waits is below the minimum, the order is that of the front.
FROM_HEAD_CURSOR_FOR_BOT = text(f"""
WITH RECURSIVE below AS MATERIALIZED (SELECT EXISTS ({BELOW_MINIMUM} AND q.cohort = :cohort) AS is),
{head_cursor.head_jobs(cohorts="c.id = :cohort", limit=":reach")},
queues AS MATERIALIZED (SELECT DISTINCT cohort, instance, platform FROM front),
{backoff_queues("resting")},
open_queues AS MATERIALIZED ({_open_to_bot("queues")}),
open_resting AS MATERIALIZED ({_open_to_bot("resting")}),
offered AS MATERIALIZED (
    SELECT q.* FROM open_queues q CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
), fit AS MATERIALIZED (
    SELECT f.id, f.priority, f.queued_at FROM front f JOIN offered q USING (cohort, instance, platform)
    WHERE f.units <= :room AND {QUOTA.of(job="f", headroom="q.headroom")} AND {_NEW}
), heads AS MATERIALIZED (
    SELECT id FROM (
        SELECT * FROM fit
        UNION ALL
        SELECT id, priority, queued_at FROM ({_RESTING_HEADS}) resting
        WHERE (SELECT count(*) FROM front) < :reach OR (priority, queued_at, id) <= (
            SELECT priority, queued_at, id FROM front ORDER BY priority DESC, queued_at DESC, id DESC LIMIT 1)
    ) both_kinds
    WHERE NOT (SELECT below.is FROM below)
    ORDER BY priority, queued_at, id LIMIT :reach
), {_PICKED}
SELECT r.fit, r.below, CASE WHEN row_number() OVER () = 1 THEN ({head_cursor.SCANNED}) END AS walked, p.* FROM (
    SELECT (SELECT count(*) FROM fit) AS fit, (SELECT below.is FROM below) AS below) r
LEFT JOIN picked p ON true
""")


@dataclass(frozen=True)
class FetchingBot:
    """A bot that asks for work, or one for several alike: what it serves, its units, and those of them that are free.

    `returned`: instances whose usage this very call has lowered.
    """

    id: int
    name: str
    cohort: int
    instance: int | None
    pool: str | None
    capacity: int
    free_units: int
    returned: Sequence[int] = ()


def pick_for_bot(
    connection: Connection,
    bot: FetchingBot,
    *,
    limit: int,
    any_wait: bool,
    literal: bool,
    cooldown: float,
    cursor: HeadCursor | None = None,
) -> list[ReadyJob]:
    """Lock up to `limit` jobs that this bot satisfies and that fit into its room, first those of instances below their
    minimum, most urgent first.

    Without `any_wait`: new jobs and jobs still in backoff, but none whose backoff has run out, which are the
    assigners' (BuildGrid, proactive fetching). `literal` leaves out the new ones too, as a bare comparison of times
    would. With `any_wait`: every queued job. `line`: what the caller remembers of the front of the bot's cohort;
    without it each queue is looked into.
    """
    values = {
        "bot_id": bot.id,
        "cohort": bot.cohort,
        "instance": bot.instance,
        "pool": bot.pool,
        "capacity": bot.capacity,
        "returned": list(bot.returned),
        "room": bot.free_units,
        "cooldown": cooldown,
        "limit": limit,
        "sizes": SIZES,
        "any": any_wait,
        "literal": literal,
    }
    if cursor is not None and (any_wait or not literal) and cursor.is_worthwhile():
        first = _from_head_cursor(connection, values, cursor, limit=limit)
        if first is not None:
            return first
        cursor.disable_for_a_while()
    for reach in WIDTHS:
        rows = connection.execute(FOR_BOT, values | _width_limits(limit, reach)).all()
        found = [ready_job(row) for row in rows if row.id is not None]
        if not is_contended(wanted=limit, heads=rows[0].heads, found=len(found), reach=reach):
            break
    return found


def _from_head_cursor(
    connection: Connection, values: dict[str, Any], cursor: HeadCursor, *, limit: int
) -> list[ReadyJob] | None:
    """Pick from the front alone; None if that does not do, because somebody is below the minimum or most of what the
    front holds is not for this bot."""
    for reach in cursor.widths(WIDTHS):
        scan = cursor.begin()
        rows = connection.execute(FROM_HEAD_CURSOR_FOR_BOT, values | scan.values() | _width_limits(limit, reach)).all()
        walked = cursor.learn(scan, rows[0].walked, limit=limit * reach)
        if rows[0].below:
            return None
        found = [ready_job(row) for row in rows if row.id is not None]
        if len(found) == limit or walked < limit * reach:
            cursor.remember_width(WIDTHS, reach)
            return found
        if 2 * rows[0].fit < walked:
            return None
    return found


def _width_limits(limit: int, reach: int) -> dict[str, int]:
    return {"look": max(MAX_JOBS_READ, limit * reach), "reach": limit * reach}
