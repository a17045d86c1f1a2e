"""Locality hints: which bots worked on what lately, so that related jobs can find warm caches."""

from collections.abc import Sequence

from schema.fleet.candidates import COLUMNS, CandidateRequest, FreeBot
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_version
from schema.postgres.statements import Statement
from schema.predicates import can_take

#: Bots that are added to a sample for one locality hint, and those that hold the hint looked at for them, latest first.
WARM_LIMIT, MAX_WARM_READ = 16, 64

# Bots that worked on a hint lately, the latest first. A bot has to be as eligible for the jobs as in a sample.
WARM = Statement(f"""
SELECT w.nth, s.id, s.name, s.priority, s.room, s.capacity
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[]), CAST(:counts AS integer[]), CAST(:hints AS text[]))
        WITH ORDINALITY AS g (cohort, instance, platform, units, count, hint, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT b.*, near.seq
    FROM (SELECT bot_id, seq FROM bot_localities WHERE hint = w.hint ORDER BY seq DESC LIMIT :look) near
    CROSS JOIN LATERAL (
        SELECT {COLUMNS} FROM {newest_version("bots", "id", "near.bot_id")} b WHERE {can_take("b", "w")} OFFSET 0
    ) b
    ORDER BY near.seq DESC LIMIT w.count
) s
ORDER BY w.nth, s.seq DESC
""")
HINTED = Statement("""
SELECT bot_id, hint FROM bot_localities
WHERE bot_id = ANY (CAST(:bot_ids AS bigint[])) AND hint = ANY (CAST(:hints AS text[]))
""")
REMEMBER = Statement("""
INSERT INTO bot_localities AS l (bot_id, hint)
SELECT bot_id, hint FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:hints AS text[])) AS h (bot_id, hint)
ON CONFLICT (bot_id, hint) DO UPDATE SET seq = EXCLUDED.seq
""")
TRIM = Statement("""
DELETE FROM bot_localities l WHERE l.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND l.hint NOT IN (
    SELECT r.hint FROM bot_localities r WHERE r.bot_id = l.bot_id ORDER BY r.seq DESC LIMIT :limit)
""")


def warm(connection: Connection, wanted: Sequence[tuple[CandidateRequest, str]]) -> list[list[FreeBot]]:
    """Read, for each of `wanted` and its locality hint, the bots that worked on the hint lately, without locks.

    At most its count, the latest first; of bots that hold the hint only the latest `MAX_WARM_READ` are looked at.
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
    for nth, *bot in rows.all():
        found[nth - 1].append(FreeBot._make(bot))
    return found


def hinted(connection: Connection, bot_ids: Sequence[int], hints: Sequence[str]) -> frozenset[tuple[int, str]]:
    """Which of these bots have worked on which of these locality hints lately."""
    if not bot_ids or not hints:
        return frozenset()
    rows = connection.execute(HINTED, {"bot_ids": list(bot_ids), "hints": list(hints)})
    return frozenset((row.bot_id, row.hint) for row in rows)


def remember(connection: Connection, hints: Sequence[tuple[int, str]], *, limit: int) -> None:
    """Store that bots have succeeded with jobs of these hints, given as (bot id, hint). The caller has locked the bots.

    limit: the most recent hints that are stored for each bot; 0 stores none.
    """
    if hints:
        bot_ids, names = zip(*dict.fromkeys(hints), strict=True)
        connection.execute(REMEMBER, {"bot_ids": list(bot_ids), "hints": list(names)})
        connection.execute(TRIM, {"bot_ids": list(dict.fromkeys(bot_ids)), "limit": limit})
