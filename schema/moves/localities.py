"""Which bots worked on what lately, so that related jobs can find warm caches."""

from collections.abc import Sequence

from sqlalchemy import Connection, text

REMEMBER = text("""
INSERT INTO bot_localities AS l (bot_id, hint)
SELECT :bot_id, hint FROM unnest(CAST(:hints AS text[])) AS h (hint)
ON CONFLICT (bot_id, hint) DO UPDATE SET seq = EXCLUDED.seq
""")
TRIM = text("""
DELETE FROM bot_localities WHERE bot_id = :bot_id AND hint NOT IN (
    SELECT hint FROM bot_localities WHERE bot_id = :bot_id ORDER BY seq DESC LIMIT :limit)
""")


def remember_localities(connection: Connection, bot_id: int, hints: Sequence[str], *, limit: int) -> None:
    """The bot has succeeded with jobs of these hints; it keeps its `limit` most recent ones, 0 keeps none."""
    if hints:
        connection.execute(REMEMBER, {"bot_id": bot_id, "hints": list(dict.fromkeys(hints))})
        connection.execute(TRIM, {"bot_id": bot_id, "limit": limit})
