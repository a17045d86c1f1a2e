"""Requirement sets, interned once, and which bots satisfy which: containment, decided when either of them appears.

Interning happens where jobs are submitted (the database function `intern_platform`). A session that opens holds the
same advisory lock shared, so that a bot and a requirement set that appear together cannot miss each other; likewise
a bot and the verdict that there is no such bot.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, text

HOLD_STILL = text("SELECT pg_advisory_xact_lock_shared(hashtext('leasehold.platforms'))")
NOBODY_ARRIVES = text("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.platforms'))")
UNLINK = text("DELETE FROM bot_platforms WHERE bot_id = ANY (CAST(:bot_ids AS bigint[]))")
LINK = text("""
INSERT INTO bot_platforms (platform, bot_id, cohort, sample_key)
SELECT p.id, b.id, b.cohort, b.sample_key FROM bots b JOIN platforms p ON b.properties @> p.properties
WHERE b.id = :bot_id
""")


def hold_still(connection: Connection) -> None:
    """No new requirement set appears until this transaction ends. Comes before any row lock."""
    connection.execute(HOLD_STILL)


def nobody_arrives(connection: Connection) -> bool:
    """Keep sessions from opening until this transaction ends, unless one is opening right now: then False.

    What is concluded from the absence of a bot needs this, or it could be written after the bot has looked for it.
    """
    alone: bool = connection.execute(NOBODY_ARRIVES).scalar_one()
    return alone


def link(connection: Connection, bot_id: int) -> None:
    """Record every requirement set that the bot's properties contain. The caller holds the bot's row."""
    unlink(connection, [bot_id])
    connection.execute(LINK, {"bot_id": bot_id})


def unlink(connection: Connection, bot_ids: Sequence[int]) -> None:
    """Bots without a session satisfy nothing, so that samples do not wade through them."""
    connection.execute(UNLINK, {"bot_ids": list(bot_ids)})
