"""Picks for a bot that has just finished something and asks for work."""

from collections.abc import Sequence
from dataclasses import dataclass

from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import Asker, Pick, ReadyJob, pick_jobs
from schema.picking.queues import PLAIN, open_queues
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import COHORT, offered, serves

# The bot serves the instance. Its quota leaves the whole capacity of the bot, or this call has just returned some of it
# (BuildGrid, proactive fetching under quotas).
_OPEN_TO_BOT = f"""
    AND EXISTS (
        SELECT FROM (
            SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
                CAST(:pool AS text) AS pool) b
        WHERE {COHORT.of(bot="b", want="w")} AND {serves("b", "w")})
    AND (w.headroom IS NULL OR w.headroom >= :capacity OR w.instance = ANY (CAST(:returned AS integer[])))"""

# Without `:any`, a queue whose rest after a look in vain is over is left to the assigners, and a queue that still rests
# is not. With `:literal`, a queue that does not rest at all is left to the assigners, too.
_MAY_FETCH = """
    AND (:any OR k.schedule_after >= now() OR NOT :literal AND k.looks = 0)"""


_OPEN = open_queues("waiting", which=f"{PLAIN} AND k.units <= :room") + _OPEN_TO_BOT + _MAY_FETCH
_BOT = Asker(
    room="room AS MATERIALIZED (SELECT CAST(:limit AS integer) AS jobs)",
    offered=f"""offered AS MATERIALIZED (
    SELECT q.* FROM ({_OPEN}) q
    WHERE EXISTS (
        {offered(platform="coalesce(q.preferred, q.platform)", kind="CAST(:kind AS integer)")} OFFSET 0)
)""",
    cohorts="{cohort} = :cohort",
    instances="(CAST(:instance AS integer) IS NULL OR {instance} = :instance)",
)
PICK = Statement(str(Pick(_BOT, "queues")))
PICK_FROM_FRONT = Statement(str(Pick(_BOT, "front")))


@dataclass(frozen=True)
class FetchingBot:
    """A bot that asks for work, or one that stands for several bots that are alike.

    returned: instances whose usage this call has lowered.
    """

    id: int
    name: str
    kind: int
    cohort: int
    instance: int | None
    pool: str | None
    capacity: int
    free_units: int
    returned: Sequence[int] = ()


def pick_for_bot(
    connection: Connection,
    bot: FetchingBot,
    *,
    limit: int,
    any_wait: bool,
    literal: bool,
    cooldown: Cooldown = EVICTION_COOLDOWN,
    cursor: HeadCursor | None = None,
) -> list[ReadyJob]:
    """Lock up to `limit` jobs that this bot can run and has room for, first those of instances below their minimum,
    most urgent first.

    any_wait: every ready job may be taken. Without it, jobs of queues that were never looked into in vain, and of
    queues that still rest, but not of queues whose rest is over, which are left to the assigners (BuildGrid, proactive
    fetching). literal: also leaves out the queues that were never looked into in vain, as a bare comparison of times
    would. A job that prefers some properties is taken only by a bot that offers them; for other bots assigners decide.
    cursor: what the caller remembers of the front of the bot's cohort; without it each queue is read.
    """
    values = {
        "kind": bot.kind,
        "cohort": bot.cohort,
        "instance": bot.instance,
        "pool": bot.pool,
        "capacity": bot.capacity,
        "returned": list(bot.returned),
        "room": bot.free_units,
        **cooldown.values(),
        "limit": limit,
        "any": any_wait,
        "literal": literal,
        "minimums_first": True,
    }
    return pick_jobs(
        connection,
        front=PICK_FROM_FRONT if any_wait or not literal else None,
        queues=PICK,
        values=values,
        cursor=cursor,
    )
