"""Candidates: bots that could take a job now, sampled at a cost that does not depend on the size of the fleet.

Eligibility of a bot is one expression: it satisfies the requirement set (`bot_platforms`), it is free (healthy, with
a session, not draining, with room), it serves the instance, and its room is enough.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

#: Entries of the ring of bots read for each candidate that is wanted; the busy ones among them fall out.
RING = 4

#: Bots, and as many free bots, looked at before a requirement set counts as without a free bot for now. Where more
#: than so many bots satisfy it, nearly all of them are full, and more than so many others are free, a look may miss the
#: few that are free; the next one begins at another place.
LOOK = 256

#: Bots that are added to a sample for one locality hint, and those that hold the hint looked at for them, latest first.
WARM_LIMIT, WARM_LOOK = 16, 64


@dataclass(frozen=True)
class Wanted:
    """Jobs that are alike for the choice of a bot, and how many candidates are wanted for them."""

    instance: int
    platform: int
    units: int
    count: int


@dataclass(frozen=True)
class FreeBot:
    """A candidate: `room` is its free units when it was read, `capacity` all of its units."""

    id: int
    name: str
    priority: int
    room: int
    capacity: int


# Two short walks along the ring of sample keys from a random place: over the bots of the requirement set, good when
# many are free, and over the free bots, good when few are. Neither depends on the size of the fleet. Lateral
# subqueries with OFFSET 0 keep the planner from reading whole tables when its statistics are old or missing.
SAMPLE = text("""
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM unnest(CAST(:instances AS integer[]), CAST(:platforms AS integer[]), CAST(:units AS integer[]),
            CAST(:counts AS integer[]), CAST(:starts AS double precision[]))
    WITH ORDINALITY AS w (instance, platform, units, count, start, nth)
CROSS JOIN LATERAL (
    SELECT b.id, b.name, b.priority, b.capacity, b.room
    FROM (
        (SELECT bot_id FROM (
            (SELECT bot_id FROM bot_platforms
             WHERE platform = w.platform AND sample_key >= w.start ORDER BY sample_key LIMIT w.count * :ring)
            UNION ALL
            (SELECT bot_id FROM bot_platforms
             WHERE platform = w.platform AND sample_key < w.start ORDER BY sample_key LIMIT w.count * :ring)
        ) members LIMIT w.count * :ring)
        UNION
        SELECT f.id FROM (
            SELECT id FROM (
                (SELECT id FROM bots WHERE free AND sample_key >= w.start ORDER BY sample_key LIMIT w.count * :ring)
                UNION ALL
                (SELECT id FROM bots WHERE free AND sample_key < w.start ORDER BY sample_key LIMIT w.count * :ring)
            ) around LIMIT w.count * :ring
        ) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.id OFFSET 0) bp
    ) near
    CROSS JOIN LATERAL (
        SELECT id, name, priority, capacity, capacity - in_use AS room, sample_key FROM bots
        WHERE id = near.bot_id AND free AND capacity - in_use >= w.units AND (instance IS NULL OR instance = w.instance)
        OFFSET 0
    ) b
    ORDER BY b.sample_key < w.start, b.sample_key LIMIT w.count
) s
""")

# The last resort: any free bot that nobody else has locked, and it stays locked until we are done. The same two walks,
# longer ones, so that a requirement set that few bots satisfy is decided for certain.
ANY_FREE = text("""
WITH w AS MATERIALIZED (SELECT random() AS start), near AS MATERIALIZED (
    (SELECT bot_id FROM (
        (SELECT bot_id FROM bot_platforms
         WHERE platform = :platform AND sample_key >= (SELECT start FROM w) ORDER BY sample_key LIMIT :look)
        UNION ALL
        (SELECT bot_id FROM bot_platforms
         WHERE platform = :platform AND sample_key < (SELECT start FROM w) ORDER BY sample_key LIMIT :look)
    ) members LIMIT :look)
    UNION ALL
    SELECT f.id FROM (
        SELECT id FROM (
            (SELECT id FROM bots WHERE free AND sample_key >= (SELECT start FROM w) ORDER BY sample_key LIMIT :look)
            UNION ALL
            (SELECT id FROM bots WHERE free AND sample_key < (SELECT start FROM w) ORDER BY sample_key LIMIT :look)
        ) around LIMIT :look
    ) f
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = :platform AND bp.bot_id = f.id OFFSET 0) bp
)
SELECT b.id, b.name, b.priority, b.capacity, b.capacity - b.in_use AS room
FROM bots b
WHERE b.id = ANY (ARRAY(SELECT bot_id FROM near)) AND b.free AND b.capacity - b.in_use >= :units
    AND (b.instance IS NULL OR b.instance = :instance)
ORDER BY b.sample_key LIMIT :count FOR NO KEY UPDATE SKIP LOCKED
""")

# Bots that worked on a hint lately, the latest first. A bot has to be as eligible for the jobs as in a sample.
WARM = text("""
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM unnest(CAST(:instances AS integer[]), CAST(:platforms AS integer[]), CAST(:units AS integer[]),
            CAST(:counts AS integer[]), CAST(:hints AS text[]))
    WITH ORDINALITY AS w (instance, platform, units, count, hint, nth)
CROSS JOIN LATERAL (
    SELECT b.id, b.name, b.priority, b.capacity, b.room, near.seq
    FROM (SELECT bot_id, seq FROM bot_localities WHERE hint = w.hint ORDER BY seq DESC LIMIT :look) near
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = near.bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id, name, priority, capacity, capacity - in_use AS room FROM bots
        WHERE id = near.bot_id AND free AND capacity - in_use >= w.units AND (instance IS NULL OR instance = w.instance)
        OFFSET 0
    ) b
    ORDER BY near.seq DESC LIMIT w.count
) s
ORDER BY w.nth, s.seq DESC
""")

HINTED = text("""
SELECT bot_id, hint FROM bot_localities
WHERE bot_id = ANY (CAST(:bot_ids AS bigint[])) AND hint = ANY (CAST(:hints AS text[]))
""")


def sample(connection: Connection, wanted: Sequence[Wanted], *, chance: random.Random) -> list[list[FreeBot]]:
    """Read candidates for each of `wanted`, without locks, at random: at most its count, fewer if few are free."""
    rows = connection.execute(
        SAMPLE,
        {
            "instances": [want.instance for want in wanted],
            "platforms": [want.platform for want in wanted],
            "units": [want.units for want in wanted],
            "counts": [want.count for want in wanted],
            "starts": [chance.random() for _ in wanted],
            "ring": RING,
        },
    )
    found: list[list[FreeBot]] = [[] for _ in wanted]
    for row in rows:
        found[row.nth - 1].append(FreeBot(row.id, row.name, row.priority, row.room, row.capacity))
    return found


def any_free(connection: Connection, want: Wanted) -> list[FreeBot]:
    """Lock up to `want.count` free bots, the first that are not locked by others."""
    rows = connection.execute(
        ANY_FREE,
        {
            "units": want.units,
            "instance": want.instance,
            "platform": want.platform,
            "count": want.count,
            "look": max(LOOK, want.count * RING),
        },
    )
    return [FreeBot(row.id, row.name, row.priority, row.room, row.capacity) for row in rows]


def warm(connection: Connection, wanted: Sequence[tuple[Wanted, str]]) -> list[list[FreeBot]]:
    """Read, for each of `wanted` and its locality hint, the bots that worked on the hint lately, without locks.

    At most its count, the latest first; of bots that hold the hint only the latest `WARM_LOOK` are looked at.
    """
    if not wanted:
        return []
    rows = connection.execute(
        WARM,
        {
            "instances": [want.instance for want, _ in wanted],
            "platforms": [want.platform for want, _ in wanted],
            "units": [want.units for want, _ in wanted],
            "counts": [want.count for want, _ in wanted],
            "hints": [hint for _, hint in wanted],
            "look": WARM_LOOK,
        },
    )
    found: list[list[FreeBot]] = [[] for _ in wanted]
    for row in rows:
        found[row.nth - 1].append(FreeBot(row.id, row.name, row.priority, row.room, row.capacity))
    return found


def hinted(connection: Connection, bot_ids: Sequence[int], hints: Sequence[str]) -> frozenset[tuple[int, str]]:
    """Which of these bots have worked on which of these locality hints lately."""
    if not bot_ids or not hints:
        return frozenset()
    rows = connection.execute(HINTED, {"bot_ids": list(bot_ids), "hints": list(hints)})
    return frozenset((row.bot_id, row.hint) for row in rows)
