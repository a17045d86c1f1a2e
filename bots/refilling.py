"""What bots are given at their calls beside what assigners have given them."""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection

from bots import reports
from bots.fetch import FetchSettings, Wish, fetch
from bots.visits import Visit
from schema import ledger, moves
from schema.fetching import Fetcher
from schema.front import Fronts
from schema.moves import Placement
from schema.states import JobState
from schema.wakeups import wake


def refill(
    connection: Connection,
    settled: Sequence[Visit],
    settings: FetchSettings,
    *,
    ack: float,
    cooldown: float,
    fronts: Fronts,
) -> None:
    """Start what room was freed for, and fetch, but where it is the turn of jobs at gates; what room bots still have
    and had not before is for the assigners, also for jobs at rest. The caller tells the bots what they have been given.
    """
    spoken = [visit for visit in settled if visit.sync is not None and visit.healthy]
    free = [visit for visit in spoken if visit.room.units > 0]
    for visit in spoken:
        if visit.room.reserved:
            _claim(connection, visit, ack=ack, cooldown=cooldown)
    room = {visit.bot.id: visit.room.units for visit in free}
    rooms = {visit.bot.id: visit.room for visit in free}
    wishes = _wishes(connection, [visit for visit in free if not visit.yields])
    fetch(connection, settings, wishes, rooms, ack=ack, cooldown=cooldown, fronts=fronts)
    spare = [visit for visit in free if visit.room.units > 0]
    more = {visit.bot.id: visit.room.units for visit in spare if room[visit.bot.id] > _room_before(visit)}
    if more:
        moves.release(connection, more, limit=moves.RELEASE_LIMIT)
    if more or any(job.state == JobState.QUEUED for visit in spare for job in visit.ended):
        wake(connection, "jobs")


def _wishes(connection: Connection, free: Sequence[Visit]) -> list[Wish]:
    wishes = [
        Wish(
            Fetcher(
                visit.bot.id,
                visit.bot.name,
                visit.bot.cohort,
                visit.bot.instance,
                visit.bot.pool,
                visit.bot.capacity,
                visit.room.units,
                returned=sorted({job.instance for job in visit.ended}),
            ),
            visit.bot.kind,
            sum(job.verdict in reports.COMPLETED for job in visit.ended),
        )
        for visit in free
    ]
    # What a call has returned matters only under a maximum; without one, bots are alike whatever they returned.
    if len({tuple(wish.bot.returned) for wish in wishes}) > 1 and not ledger.anybody_limited(connection):
        return [replace(wish, bot=replace(wish.bot, returned=())) for wish in wishes]
    return wishes


def _claim(connection: Connection, visit: Visit, *, ack: float, cooldown: float) -> None:
    """Start the jobs for which an eviction has freed room here; this transaction holds their quotas."""
    bot = visit.bot
    ids = moves.claims(connection, bot.id, room=visit.room.unused)
    moves.grant_held(
        connection,
        [Placement(job_id, bot.id, {"bot": bot.name, "strategy": "preemption"}) for job_id in ids],
        {bot.id: visit.room},
        assigner=[visit.actor] * len(ids),
        strategy="preemption",
        ack=ack,
        cooldown=cooldown,
    )


def _room_before(visit: Visit) -> int:
    """The units that others could have given the bot before its call."""
    bot = visit.bot
    return int(bot.capacity - bot.in_use - bot.reserved) if bot.free else 0
