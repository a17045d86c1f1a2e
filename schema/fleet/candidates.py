"""Candidates: bots that could take a job now, sampled at a cost that does not depend on the size of the fleet.

Eligibility of a bot is one expression: it satisfies the requirement set (`bot_platforms`), it is free (healthy, with
a session, not draining, with room), it is of the job's cohort, it serves the instance, and its room is enough.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.postgres.fragments import newest_version
from schema.predicates import can_take

# Rings: short walks over bots in the order of their random sample keys, from a random place and once around.
#
# Two kinds of walk find bots for a queue: over the bots that offer what it requires, good when many of them are free,
# and over the free bots that serve its instance, good when few are. The cost of neither depends on the size of the
# fleet.


# How a bot may serve an instance: for every one, for that one, for its pool. Each is one range of the indexes of bots,
# so that a few bots of one tenant are found among any number of others'.
_SERVING = (
    "instance IS NULL AND pool IS NULL",
    "instance = {want}.instance AND pool IS NULL",
    "instance IS NULL AND pool = {want}.pool",
)
#: The order of the indexes of bots. It is named in full, because the planner does not take what is null for constant.
BOTS_ORDER = "cohort, instance, pool, sample_key"


def serving_bots(columns: str, want: str, *, which: str, limit: str) -> str:
    """A query of up to `limit` bots in each way of serving the instance of `want`, in its cohort, that are `which`."""
    return "\n UNION ALL ".join(
        f"(SELECT {columns} FROM bots WHERE {which} AND cohort = {want}.cohort AND {served.format(want=want)}"
        f" ORDER BY {BOTS_ORDER} LIMIT {limit})"
        for served in _SERVING
    )


def offering_bots(want: str, *, start: str, limit: str) -> str:
    """A query of `bot_id`: bots of the cohort that offer what `want` requires."""
    where = f"platform = {want}.platform AND cohort = {want}.cohort"
    return ring_walk("bot_id", "bot_platforms", where, start=start, limit=limit, order="sample_key")


def free_bots(want: str, *, start: str, limit: str) -> str:
    """A query of `bot_id`: free bots of the cohort that serve the instance of `want`, up to `limit` in each way."""
    return "\n UNION ALL ".join(free_bots_by_service("id AS bot_id", want, start=start, limit=limit))


def free_bots_by_service(
    columns: str, want: str, *, start: str, limit: str, within: str = "true"
) -> tuple[str, str, str]:
    """A query of free bots of the cohort, those `within` a part of the ring, for each way of serving: every instance,
    the instance of `want`, its pool."""
    every, own, pooled = (
        ring_walk(
            columns,
            "bots",
            f"free AND cohort = {want}.cohort AND {served.format(want=want)} AND {within}",
            start=start,
            limit=limit,
            order=BOTS_ORDER,
        )
        for served in _SERVING
    )
    return every, own, pooled


def ring_walk(columns: str, table: str, where: str, *, start: str, limit: str, order: str) -> str:
    return f"""
    (SELECT * FROM (
        (SELECT {columns} FROM {table} WHERE {where} AND sample_key >= {start} ORDER BY {order} LIMIT {limit})
        UNION ALL
        (SELECT {columns} FROM {table} WHERE {where} AND sample_key < {start} ORDER BY {order} LIMIT {limit})
    ) ring LIMIT {limit})"""


#: Entries of the ring of bots read for each candidate that is wanted; the busy ones among them fall out.
RING = 4

#: Bots, and as many free bots in each way of serving an instance, looked at before a requirement set counts as without
#: a free bot for now. Where more than so many bots satisfy it, nearly all of them are full, and more than so many
#: others that serve the instance are free, a look may miss the few that are free; the next one begins at another place.
MAX_BOTS_READ = 256

#: Bots that are added to a sample for one locality hint, and those that hold the hint looked at for them, latest first.
WARM_LIMIT, MAX_WARM_READ = 16, 64


@dataclass(frozen=True)
class CandidateRequest:
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
    free_units: int
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
        {offering_bots("w", start="w.start", limit="w.count * :ring")}
        UNION
        SELECT f.bot_id FROM ({free_bots("w", start="w.start", limit="w.count * :ring")}) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) near
    CROSS JOIN LATERAL (
        SELECT c.id, c.name, c.priority, c.capacity, c.capacity - c.in_use - c.reserved AS room, c.sample_key
        FROM {newest_version("bots", "id", "near.bot_id")} c
        WHERE {can_take("c", "w")}
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
        {offering_bots("w", start="w.start", limit=":look")}
        UNION ALL
        SELECT f.bot_id FROM ({free_bots("w", start="w.start", limit=":look")}) f
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = f.bot_id OFFSET 0) bp
    ) n
)
SELECT b.id, b.name, b.priority, b.capacity, b.capacity - b.in_use - b.reserved AS room
FROM bots b CROSS JOIN w
WHERE b.id = ANY (ARRAY(SELECT bot_id FROM near)) AND {can_take("b", "w")}
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
        FROM {newest_version("bots", "id", "near.bot_id")} c
        WHERE {can_take("c", "w")}
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


def sample(connection: Connection, wanted: Sequence[CandidateRequest], *, chance: random.Random) -> list[list[FreeBot]]:
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


def any_free(connection: Connection, want: CandidateRequest) -> list[FreeBot]:
    """Lock up to `want.count` free bots, the first that are not locked by others."""
    rows = connection.execute(
        ANY_FREE,
        {
            "units": want.units,
            "cohort": want.cohort,
            "instance": want.instance,
            "platform": want.platform,
            "count": want.count,
            "look": max(MAX_BOTS_READ, want.count * RING),
        },
    )
    return [FreeBot(row.id, row.name, row.priority, row.room, row.capacity) for row in rows.all()]


def warm(connection: Connection, wanted: Sequence[tuple[CandidateRequest, str]]) -> list[list[FreeBot]]:
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
            "look": MAX_WARM_READ,
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


# Requirement sets, interned once, and which bots satisfy which: containment, decided when either of them appears.
#
# Interning happens where jobs are submitted (the database function `intern_platform`). A session that opens holds the
# same advisory lock shared, so that a bot and a requirement set that appear together cannot miss each other; likewise
# a bot and the verdict that there is no such bot.


FREEZE_REQUIREMENT_SETS = text("SELECT pg_advisory_xact_lock_shared(hashtext('leasehold.platforms'))")
TRY_BLOCK_NEW_SESSIONS = text("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.platforms'))")
UNLINK_BOTS = text("DELETE FROM bot_platforms WHERE bot_id = ANY (CAST(:bot_ids AS bigint[]))")
LINK_BOT = text("""
INSERT INTO bot_platforms (platform, bot_id, cohort, sample_key)
SELECT p.id, b.id, b.cohort, b.sample_key FROM bots b JOIN platforms p ON b.properties @> p.properties
WHERE b.id = :bot_id
""")


def freeze_requirement_sets(connection: Connection) -> None:
    """No new requirement set appears until this transaction ends. Comes before any row lock."""
    connection.execute(FREEZE_REQUIREMENT_SETS)


def try_block_new_sessions(connection: Connection) -> bool:
    """Keep sessions from opening until this transaction ends, unless one is opening right now: then False.

    What is concluded from the absence of a bot needs this, or it could be written after the bot has looked for it.
    """
    alone: bool = connection.execute(TRY_BLOCK_NEW_SESSIONS).scalar_one()
    return alone


def link_bot(connection: Connection, bot_id: int) -> None:
    """Record every requirement set that the bot's properties contain. The caller holds the bot's row."""
    unlink_bots(connection, [bot_id])
    connection.execute(LINK_BOT, {"bot_id": bot_id})


def unlink_bots(connection: Connection, bot_ids: Sequence[int]) -> None:
    """Bots without a session satisfy nothing, so that samples do not wade through them."""
    connection.execute(UNLINK_BOTS, {"bot_ids": list(bot_ids)})
