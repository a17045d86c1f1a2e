"""Windows: free bots read once for a whole batch, from which candidates for each kind of its jobs can be drawn.

Of what the bots offer only their kind is read: bots of one kind offer the same properties, so that whether a kind
offers what a requirement set asks for never changes and may be remembered.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.fleet import candidates
from schema.fleet.candidates import FreeBot

#: Parts of the ring of bots that assigners with much to place claim, one each, so that they do not want the same bots.
PARTS = 8
#: A part of the ring: sample keys from the first up to the second, without it.
Part = tuple[float, float]
WHOLE_RING: Part = (0.0, 1.0)


@dataclass(frozen=True)
class WindowScan:
    """One walk over the free bots of a cohort that serve every instance, or that instance, or that pool."""

    cohort: int
    instance: int | None
    pool: str | None
    limit: int


@dataclass(slots=True)
class SampledBot:
    """A bot in a window. `left` is its room, less what whoever draws from the window reckons to be taken."""

    bot: FreeBot
    kind: int
    left: int


POOLS_OF = text("SELECT id, pool FROM instances WHERE id = ANY (CAST(:instances AS integer[])) AND pool IS NOT NULL")

# Who has claimed a part has it until its transaction ends; whoever finds all of them claimed does without.
CLAIM_PART = text("""
SELECT part FROM unnest(CAST(:parts AS integer[])) AS p (part)
WHERE pg_try_advisory_xact_lock(hashtext('leasehold.part'), part) LIMIT 1
""")
_WITHIN = "sample_key >= :low AND sample_key < :high"
_COLUMNS = "id, name, priority, capacity, capacity - in_use - reserved AS room, kind"
_EVERY, _OWN, _POOLED = candidates.free_bots_by_service(_COLUMNS, "w", start=":start", limit="w.upto", within=_WITHIN)
# Most cohorts have no bot that serves one instance only, which one look decides for all of their instances.
WINDOW = text(f"""
WITH walks AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:pools AS text[]),
                         CAST(:limits AS integer[]))
        WITH ORDINALITY AS g (cohort, instance, pool, upto, nth)
), apart AS MATERIALIZED (
    SELECT c.cohort FROM (SELECT DISTINCT cohort FROM walks WHERE instance IS NOT NULL) c
    CROSS JOIN LATERAL (
        SELECT FROM bots WHERE free AND cohort = c.cohort AND instance IS NOT NULL
        ORDER BY {candidates.BOTS_ORDER} LIMIT 1) own
)
SELECT w.nth, b.* FROM (SELECT * FROM walks WHERE instance IS NULL AND pool IS NULL OFFSET 0) w
CROSS JOIN LATERAL ({_EVERY}) b
UNION ALL
SELECT w.nth, b.* FROM (
    SELECT * FROM walks WHERE instance IS NOT NULL AND cohort = ANY (ARRAY(SELECT cohort FROM apart)) OFFSET 0) w
CROSS JOIN LATERAL ({_OWN}) b
UNION ALL
SELECT w.nth, b.* FROM (SELECT * FROM walks WHERE pool IS NOT NULL OFFSET 0) w
CROSS JOIN LATERAL ({_POOLED}) b
""")

# Links appear and go in one transaction with the properties that they are of, or with the session. In a comparison of
# rows nothing but the primary key can answer: a bot may offer thousands of requirement sets.
READ_OFFERS = text("""
SELECT w.platform, b.kind, bp.bot_id IS NOT NULL AS offered
FROM (SELECT * FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:platforms AS integer[])) AS g (bot_id, platform)
      OFFSET 0) w
CROSS JOIN LATERAL (SELECT kind FROM bots WHERE id = w.bot_id AND status <> 'gone' OFFSET 0) b
LEFT JOIN LATERAL (
    SELECT bot_id FROM bot_platforms
    WHERE (platform, bot_id) >= (w.platform, w.bot_id) AND (platform, bot_id) <= (w.platform, w.bot_id)
    ORDER BY platform, bot_id LIMIT 1) bp ON true
""")


def pools_of(connection: Connection, instances: Collection[int]) -> dict[int, str]:
    """The pools of those of the instances that are in one."""
    return {row.id: row.pool for row in connection.execute(POOLS_OF, {"instances": list(instances)})}


def claim_part(connection: Connection, *, chance: random.Random) -> Part:
    """A part of the ring that no other assigner places on, until the transaction ends; the whole ring, unclaimed, if
    others have all of the parts."""
    parts = chance.sample(range(PARTS), PARTS)
    part = connection.execute(CLAIM_PART, {"parts": parts}).scalar_one_or_none()
    return WHOLE_RING if part is None else (part / PARTS, (part + 1) / PARTS)


def read_windows(
    connection: Connection, scans: Sequence[WindowScan], *, chance: random.Random, within: Part = WHOLE_RING
) -> list[list[SampledBot]]:
    """The free bots of each walk that are `within` that part of the ring, without locks, from a random place in it;
    fewer than its limit are all there are."""
    low, high = within
    rows = connection.execute(
        WINDOW,
        {
            "cohorts": [scan.cohort for scan in scans],
            "instances": [scan.instance for scan in scans],
            "pools": [scan.pool for scan in scans],
            "limits": [scan.limit for scan in scans],
            "start": chance.uniform(low, high),
            "low": low,
            "high": high,
        },
    )
    found: list[list[SampledBot]] = [[] for _ in scans]
    for nth, bot_id, name, priority, capacity, room, kind in rows.all():
        found[nth - 1].append(SampledBot(FreeBot(bot_id, name, priority, room, capacity), kind, room))
    return found


def read_offers(connection: Connection, pairs: Collection[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """For pairs of a requirement set and a bot: the set, the bot's kind, and whether bots of that kind offer it."""
    rows = connection.execute(
        READ_OFFERS, {"platforms": [platform for platform, _ in pairs], "bot_ids": [bot_id for _, bot_id in pairs]}
    )
    return [(row.platform, row.kind, row.offered) for row in rows.all()]
