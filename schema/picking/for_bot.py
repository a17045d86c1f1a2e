"""What one bot may take when it has just finished something: picks for a bot that asks for work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from schema.accounting.quotas import HEADROOM, Guard
from schema.picking import head_cursor
from schema.picking.head_cursor import HeadCursor
from schema.picking.queues import BELOW_MINIMUM, PLAIN, open_queues
from schema.picking.ready import COLUMNS, TRIED, WIDTHS, ReadyJob, is_contended, ready_job
from schema.predicates import COHORT, READY, STILL_READY, ready_queues, serves

# Instances that the bot is for, and whose quota would not be used up even if it took nothing else, or that have just
# got something of it back by this very call (BuildGrid, proactive fetching under quotas).
_OPEN_TO_BOT = """
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE {ours})
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))"""

# Without `:any`, a queue that has been looked into without success, and whose rest is over, is left to the assigners,
# while one that still rests is not. With `:literal`, so is a queue that does not rest at all.
_MAY_FETCH = """
    AND (:any OR k.schedule_after >= now() OR NOT :literal AND k.looks = 0)"""


def _open_to_bot() -> str:
    """The CTE `offered`: the queues of the CTE `waiting` from which the bot may take a job that fits."""
    ours = f"{COHORT.of(bot='b', want='w')} AND {serves('b', 'w')}"
    open_ones = open_queues("waiting", HEADROOM[Guard.MAX], which=f"{PLAIN} AND k.units <= :room")
    return f"""offered AS MATERIALIZED (
    SELECT q.* FROM ({open_ones}{_OPEN_TO_BOT.format(ours=ours)}{_MAY_FETCH}) q
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = :bot_id OFFSET 0) bp
)"""


_PICKED = f"""picked AS MATERIALIZED (
    SELECT {", ".join(f"j.{column}" for column in COLUMNS.split(", "))}
    FROM unnest(ARRAY(SELECT id FROM heads)) WITH ORDINALITY AS h (id, nth) JOIN jobs j ON j.id = h.id
    WHERE {STILL_READY}
    ORDER BY h.nth LIMIT :limit FOR NO KEY UPDATE OF j SKIP LOCKED
)"""

# Whoever is below the minimum comes first: what it gets here need not be taken from others by evictions.
FOR_BOT = text(f"""
WITH RECURSIVE {ready_queues("waiting")}, {_open_to_bot()}, first_heads AS MATERIALIZED (
    SELECT q.cohort, q.instance, h.* FROM offered q CROSS JOIN LATERAL (
        SELECT id, rank, queued_at FROM jobs WHERE queue = q.queue AND {READY}
        ORDER BY rank, queued_at, id LIMIT :reach) h
), ranked AS MATERIALIZED (
    SELECT b.*, coalesce(q.min_quota - q.usage, 0) < row_number() OVER (
        PARTITION BY b.cohort, b.instance ORDER BY b.rank, b.queued_at, b.id) AS beyond_minimum
    FROM first_heads b LEFT JOIN quotas q ON q.cohort = b.cohort AND q.instance = b.instance
), heads AS MATERIALIZED (
    SELECT id FROM ranked ORDER BY beyond_minimum, rank, queued_at, id LIMIT :reach
), {_PICKED}
SELECT r.heads, p.*, {TRIED.format(queues="offered")}
FROM (SELECT count(*) AS heads FROM heads) r LEFT JOIN picked p ON true
""")
# While nobody who waits is below the minimum, the order is that of the front.
FROM_HEAD_CURSOR_FOR_BOT = text(f"""
WITH RECURSIVE below AS MATERIALIZED (SELECT EXISTS ({BELOW_MINIMUM} AND q.cohort = :cohort) AS is),
{head_cursor.head_jobs(cohorts="c.id = :cohort", limit=":reach")},
waiting AS MATERIALIZED (SELECT DISTINCT queue FROM front), {_open_to_bot()}, fit AS MATERIALIZED (
    SELECT f.id, f.rank, f.queued_at FROM front f JOIN offered q USING (queue)
), heads AS MATERIALIZED (
    SELECT id FROM fit WHERE NOT (SELECT below.is FROM below) ORDER BY rank, queued_at, id LIMIT :reach
), {_PICKED}
SELECT r.fit, r.below, CASE WHEN row_number() OVER () = 1 THEN ({head_cursor.SCANNED}) END AS walked, p.*,
    {TRIED.format(queues="offered")} FROM (
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

    Without `any_wait`: jobs of queues that no assigner has looked into without success, and of queues that still rest,
    but none whose rest has run out, which are the assigners' (BuildGrid, proactive fetching). `literal` leaves out the
    former too, as a bare comparison of times would. With `any_wait`: every ready job. `cursor`: what the caller
    remembers of the front of the bot's cohort; without it each queue is looked into.
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
        "any": any_wait,
        "literal": literal,
    }
    if cursor is not None and (any_wait or not literal) and cursor.is_worthwhile():
        first = _from_head_cursor(connection, values, cursor, limit=limit)
        if first is not None:
            return first
        cursor.disable_for_a_while()
    for reach in WIDTHS:
        rows = connection.execute(FOR_BOT, values | {"reach": limit * reach}).all()
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
        rows = connection.execute(FROM_HEAD_CURSOR_FOR_BOT, values | scan.values() | {"reach": limit * reach}).all()
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
