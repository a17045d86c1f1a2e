"""The units of each bot that are in use or reserved, and its number of live leases: copies of what these leases and its
reservations say.

They change together, on the bot's locked row, wherever a lease or a reservation begins or ends. A copy that is too high
leaves a bot idle, one that is too low gives it more than it can hold, or hides its oldest lease from it.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, text

# Whoever begins or ends leases or reservations of a bot holds its row; such a bot is left for the next time.
LOCK = text("""
SELECT b.id FROM bots b
LEFT JOIN (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM live GROUP BY bot_id) l ON l.bot_id = b.id
LEFT JOIN (SELECT bot_id, sum(units) AS units FROM reservations GROUP BY bot_id) r ON r.bot_id = b.id
WHERE b.in_use <> coalesce(l.units, 0) OR b.held <> coalesce(l.leases, 0) OR b.reserved <> coalesce(r.units, 0)
ORDER BY b.id FOR NO KEY UPDATE OF b SKIP LOCKED
""")
# Judged again on the locked rows: the query before this one may have seen a row newer than the leases.
REPAIR = text("""
WITH wrong AS MATERIALIZED (
    SELECT b.id, b.name, b.in_use, b.held, b.reserved, s.leased, s.leases, s.kept FROM bots b
    CROSS JOIN LATERAL (SELECT
        (SELECT coalesce(sum(l.units), 0) FROM live l WHERE l.bot_id = b.id) AS leased,
        (SELECT count(*) FROM live l WHERE l.bot_id = b.id) AS leases,
        (SELECT coalesce(sum(r.units), 0) FROM reservations r WHERE r.bot_id = b.id) AS kept) s
    WHERE b.id = ANY (CAST(:bot_ids AS bigint[])) AND (b.in_use, b.held, b.reserved) <> (s.leased, s.leases, s.kept)
), mended AS (
    UPDATE bots b SET in_use = w.leased, held = w.leases, reserved = w.kept, capacity = greatest(b.capacity, w.leased)
    FROM wrong w WHERE b.id = w.id
)
SELECT name, in_use, leased, held, leases, reserved, kept FROM wrong ORDER BY id
""")


@dataclass(frozen=True)
class Drift:
    """A bot whose `in_use` is not `leased`, the units of its live leases, whose `held` is not their number, `leases`,
    or whose `reserved` is not `kept`, the units of its reservations."""

    bot: str
    in_use: int
    leased: int
    held: int
    leases: int
    reserved: int
    kept: int


def reconcile(connection: Connection) -> list[Drift]:
    """Compare the units of every bot with its live leases and reservations; those that differ are repaired and come
    back.

    On a sound database there are none, and nothing is locked: a drift is an alarm, not a routine.
    """
    bot_ids = [row.id for row in connection.execute(LOCK)]
    if not bot_ids:
        return []
    found = connection.execute(REPAIR, {"bot_ids": bot_ids})
    return [
        Drift(row.name, row.in_use, int(row.leased), row.held, row.leases, row.reserved, int(row.kept)) for row in found
    ]
