"""Which bots worked on what lately, so that related jobs can find warm caches."""

from collections.abc import Sequence

from sqlalchemy import Connection, text

REMEMBER = text("""
INSERT INTO bot_localities AS l (bot_id, hint)
SELECT bot_id, hint FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:hints AS text[])) AS h (bot_id, hint)
ON CONFLICT (bot_id, hint) DO UPDATE SET seq = EXCLUDED.seq
""")
TRIM = text("""
DELETE FROM bot_localities l WHERE l.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND l.hint NOT IN (
    SELECT r.hint FROM bot_localities r WHERE r.bot_id = l.bot_id ORDER BY r.seq DESC LIMIT :limit)
""")


def remember_localities(connection: Connection, hints: Sequence[tuple[int, str]], *, limit: int) -> None:
    """Bots, given by their ids, have succeeded with jobs of these hints; each keeps its `limit` most recent ones, 0
    keeps none. The caller holds their rows."""
    if hints:
        bot_ids, names = zip(*dict.fromkeys(hints), strict=True)
        connection.execute(REMEMBER, {"bot_ids": list(bot_ids), "hints": list(names)})
        connection.execute(TRIM, {"bot_ids": list(dict.fromkeys(bot_ids)), "limit": limit})
