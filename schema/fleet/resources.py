"""Resources: what a bot has of CPU, memory, disk and GPU beside its units, and what jobs that ask for any take of it.

What is in use of a bot's is a counter named `bot:ID:KIND`, which exists only for what the bot has declared; of anything
else it has any amount. Whoever takes of these counters or changes them holds the bot's row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.accounting import counters
from schema.fleet import candidates
from schema.fleet.candidates import MAX_BOTS_READ, RING, CandidateRequest, FreeBot
from schema.postgres.fragments import newest_version
from schema.predicates import can_take
from schema.validation import KINDS, Kind

# A new session has nothing of what the one before it declared, of which nothing is in use any more.
FORGET = text("DELETE FROM counters WHERE name = ANY (CAST(:names AS text[]))")
DECLARE = text("""
INSERT INTO counters (name, most) SELECT * FROM unnest(CAST(:names AS text[]), CAST(:amounts AS numeric[])) AS d (n, a)
""")

# The same walks as those of any other choice; a bot counts if it could take the job but for the resources.
_NEAR = """
    (
        {offering}
        {union}
        SELECT f.bot_id FROM ({free}) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) near
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room, c.sample_key
        FROM {newest} c
        WHERE {able}
        OFFSET 0
    ) b"""


def _near(union: str) -> str:
    return _NEAR.format(
        offering=candidates.offering_bots("w", start="w.start", limit="w.look"),
        union=union,
        free=candidates.free_bots("w", start="w.start", limit="w.look"),
        newest=newest_version("bots", "id", "near.bot_id"),
        able=can_take("c", "w"),
    )


_ENOUGH = """NOT EXISTS (
        SELECT FROM jsonb_each_text(w.need) n JOIN counters k ON k.name = 'bot:' || b.id || ':' || n.key
        WHERE k.used + CAST(n.value AS numeric) > k.most)"""
_WANTED = """(
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool, random() AS start,
        greatest(:look, g.count * :ring) AS look
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[]), CAST(:counts AS integer[]),
                CAST(:needs AS jsonb[]))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, need, nth)
    OFFSET 0
) w"""
FITTING_BOTS = text(f"""
SELECT w.nth, s.id, s.name, s.priority, s.capacity, s.room
FROM {_WANTED}
CROSS JOIN LATERAL (
    SELECT b.* FROM {_near("UNION")}
    WHERE {_ENOUGH}
    ORDER BY b.sample_key < w.start, b.sample_key LIMIT w.count
) s
""")
# The first bot will do, which is why nothing is sorted.
FITS_ANY_BOT = text(f"""
SELECT w.nth FROM {_WANTED} CROSS JOIN LATERAL (SELECT FROM {_near("UNION ALL")} WHERE {_ENOUGH} LIMIT 1) s
""")
MOST_LEFT = text(f"""
SELECT w.nth, s.kind, s.most
FROM {_WANTED}
CROSS JOIN LATERAL (
    SELECT n.key AS kind, max(coalesce(k.most - k.used, 'Infinity')) AS most
    FROM {_near("UNION")}
    CROSS JOIN LATERAL jsonb_object_keys(w.need) AS n (key)
    LEFT JOIN counters k ON k.name = 'bot:' || b.id || ':' || n.key
    GROUP BY n.key
) s
""")


@dataclass(frozen=True)
class ResourceRequest:
    """Jobs that are alike for the choice of a bot, and what each of them takes of its resources."""

    want: CandidateRequest
    need: Mapping[Kind, int]


def resource_counter(bot_id: int, kind: str) -> str:
    """The name of the counter of one of a bot's resources."""
    return f"bot:{bot_id}:{kind}"


def declared_counters(
    connection: Connection, bot_ids: Sequence[int], kinds: Sequence[str]
) -> dict[str, counters.Counter]:
    """The counters of what these bots have declared of these kinds, by name."""
    return counters.read(connection, [resource_counter(bot_id, kind) for bot_id in bot_ids for kind in kinds])


def declare(connection: Connection, bot_id: int, supply: Mapping[Kind, int]) -> None:
    """The bot has so much, and any amount of what it does not name. The caller has ended its leases."""
    connection.execute(FORGET, {"names": [resource_counter(bot_id, kind) for kind in KINDS]})
    if supply:
        names = [resource_counter(bot_id, kind) for kind in supply]
        connection.execute(DECLARE, {"names": names, "amounts": list(supply.values())})


def fitting_bots(connection: Connection, requests: Sequence[ResourceRequest]) -> list[list[FreeBot]]:
    """Bots with room and enough left of everything, up to the count that each wants, read without locks, at random."""
    found: list[list[FreeBot]] = [[] for _ in requests]
    for row in connection.execute(FITTING_BOTS, _values(requests)):
        found[row.nth - 1].append(FreeBot(row.id, row.name, row.priority, row.room, row.capacity))
    return found


def fits_any_bot(connection: Connection, requests: Sequence[ResourceRequest]) -> list[bool]:
    """Of each of them, whether there is a bot with room and enough left of everything."""
    found = {row.nth for row in connection.execute(FITS_ANY_BOT, _values(requests))}
    return [nth in found for nth in range(1, len(requests) + 1)]


def most_left(connection: Connection, requests: Sequence[ResourceRequest]) -> list[dict[str, float]]:
    """The most that any one bot with room has left of each kind that is needed; nothing if no bot has room."""
    found: list[dict[str, float]] = [{} for _ in requests]
    for row in connection.execute(MOST_LEFT, _values(requests)):
        found[row.nth - 1][row.kind] = float(row.most)
    return found


def _values(requests: Sequence[ResourceRequest]) -> dict[str, object]:
    return {
        "cohorts": [each.want.cohort for each in requests],
        "instances": [each.want.instance for each in requests],
        "platforms": [each.want.platform for each in requests],
        "units": [each.want.units for each in requests],
        "counts": [each.want.count for each in requests],
        "needs": [json.dumps(dict(each.need)) for each in requests],
        "look": MAX_BOTS_READ,
        "ring": RING,
    }
