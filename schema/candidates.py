"""Candidates: bots that could take a job now, sampled at a cost that does not depend on the size of the fleet.

Eligibility of a bot is one expression: it satisfies the requirement set (`bot_platforms`), it is free (healthy, with
a session, not draining, with room), it is of the job's cohort, it serves the instance, and its room is enough.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema import rings
from schema.gates import able
from schema.newest import newest

#: Entries of the ring of bots read for each candidate that is wanted; the busy ones among them fall out.
RING = 4

#: Bots, and as many free bots in each way of serving an instance, looked at before a requirement set counts as without
#: a free bot for now. Where more than so many bots satisfy it, nearly all of them are full, and more than so many
#: others that serve the instance are free, a look may miss the few that are free; the next one begins at another place.
LOOK = 256

#: Bots that are added to a sample for one locality hint, and those that hold the hint looked at for them, latest first.
WARM_LIMIT, WARM_LOOK = 16, 64


@dataclass(frozen=True)
class Wanted:
    """Jobs that are alike for the choice of a bot, and how many candidates are wanted for them."""

    cohort: int
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


# Lateral subqueries with OFFSET 0 keep the planner from reading whole tables when its statistics are old or missing.
# Of an array that is the value of a subquery the planner does not count the elements, and so makes one plan for all.
SAMPLE = text(f"""
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest((SELECT CAST(:cohorts AS integer[])), (SELECT CAST(:instances AS integer[])),
                (SELECT CAST(:platforms AS integer[])), (SELECT CAST(:units AS integer[])),
                (SELECT CAST(:counts AS integer[])), (SELECT CAST(:starts AS double precision[])))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, start, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.id, b.name, b.priority, b.capacity, b.room
    FROM (
        {rings.offering("w", start="w.start", limit="w.count * :ring")}
        UNION
        SELECT f.bot_id FROM ({rings.free("w", start="w.start", limit="w.count * :ring")}) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) near
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room, c.sample_key
        FROM {newest("bots", "id", "near.bot_id")} c
        WHERE {able("c", "w")}
        OFFSET 0
    ) b
    ORDER BY b.sample_key < w.start, b.sample_key LIMIT w.count
) s
""")

# The last resort: any free bot that nobody else has locked, and it stays locked until we are done. The same walks,
# longer ones, so that a requirement set that few bots satisfy is decided for certain.
ANY_FREE = text(f"""
WITH w AS MATERIALIZED (
    SELECT random() AS start, CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
        CAST(:platform AS integer) AS platform, (SELECT pool FROM instances WHERE id = :instance) AS pool,
        CAST(:units AS integer) AS units
), near AS MATERIALIZED (
    SELECT n.bot_id FROM w CROSS JOIN LATERAL (
        {rings.offering("w", start="w.start", limit=":look")}
        UNION ALL
        SELECT f.bot_id FROM ({rings.free("w", start="w.start", limit=":look")}) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) n
)
SELECT b.id, b.name, b.priority, b.capacity, b.capacity - b.in_use - b.reserved AS room
FROM bots b CROSS JOIN w
WHERE b.id = ANY (ARRAY(SELECT bot_id FROM near)) AND {able("b", "w")}
ORDER BY b.sample_key LIMIT :count FOR NO KEY UPDATE OF b SKIP LOCKED
""")

# Bots that worked on a hint lately, the latest first. A bot has to be as eligible for the jobs as in a sample.
WARM = text(f"""
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[]), CAST(:counts AS integer[]), CAST(:hints AS text[]))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, hint, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.id, b.name, b.priority, b.capacity, b.room, near.seq
    FROM (SELECT bot_id, seq FROM bot_localities WHERE hint = w.hint ORDER BY seq DESC LIMIT :look) near
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = near.bot_id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room
        FROM {newest("bots", "id", "near.bot_id")} c
        WHERE {able("c", "w")}
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
            "cohorts": [want.cohort for want in wanted],
            "instances": [want.instance for want in wanted],
            "platforms": [want.platform for want in wanted],
            "units": [want.units for want in wanted],
            "counts": [want.count for want in wanted],
            "starts": [chance.random() for _ in wanted],
            "ring": RING,
        },
    )
    found: list[list[FreeBot]] = [[] for _ in wanted]
    for row in rows.all():
        found[row.nth - 1].append(FreeBot(row.id, row.name, row.priority, row.room, row.capacity))
    return found


def any_free(connection: Connection, want: Wanted) -> list[FreeBot]:
    """Lock up to `want.count` free bots, the first that are not locked by others."""
    rows = connection.execute(
        ANY_FREE,
        {
            "units": want.units,
            "cohort": want.cohort,
            "instance": want.instance,
            "platform": want.platform,
            "count": want.count,
            "look": max(LOOK, want.count * RING),
        },
    )
    return [FreeBot(row.id, row.name, row.priority, row.room, row.capacity) for row in rows.all()]


def warm(connection: Connection, wanted: Sequence[tuple[Wanted, str]]) -> list[list[FreeBot]]:
    """Read, for each of `wanted` and its locality hint, the bots that worked on the hint lately, without locks.

    At most its count, the latest first; of bots that hold the hint only the latest `WARM_LOOK` are looked at.
    """
    if not wanted:
        return []
    rows = connection.execute(
        WARM,
        {
            "cohorts": [want.cohort for want, _ in wanted],
            "instances": [want.instance for want, _ in wanted],
            "platforms": [want.platform for want, _ in wanted],
            "units": [want.units for want, _ in wanted],
            "counts": [want.count for want, _ in wanted],
            "hints": [hint for _, hint in wanted],
            "look": WARM_LOOK,
        },
    )
    found: list[list[FreeBot]] = [[] for _ in wanted]
    for row in rows.all():
        found[row.nth - 1].append(FreeBot(row.id, row.name, row.priority, row.room, row.capacity))
    return found


def hinted(connection: Connection, bot_ids: Sequence[int], hints: Sequence[str]) -> frozenset[tuple[int, str]]:
    """Which of these bots have worked on which of these locality hints lately."""
    if not bot_ids or not hints:
        return frozenset()
    rows = connection.execute(HINTED, {"bot_ids": list(bot_ids), "hints": list(hints)})
    return frozenset((row.bot_id, row.hint) for row in rows)
