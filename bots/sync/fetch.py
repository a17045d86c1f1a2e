"""Proactive fetching: bots that have just finished something are given more in the same call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from bots.sync import call
from bots.sync.call import Visit
from schema.accounting import quotas
from schema.moves.backoff import release
from schema.moves.end import RetryPace, Room
from schema.moves.grant import Placement, grant_held
from schema.moves.preempt import claims
from schema.moves.sessions import RELEASE_LIMIT
from schema.picking import for_bot
from schema.picking.for_bot import Fetcher
from schema.picking.head_cursor import Fronts
from schema.picking.ready import ReadyJob
from schema.postgres.notify import wake
from schema.states import JobState

STRATEGY = "proactive"


class FetchSettings(BaseModel):
    """What a bot's sync does beside settling its leases; names and defaults are BuildGrid's where it has them.

    enabled: give bots work at a sync at all; without it only assigners place jobs.
    to_capacity: false gives at most as many jobs as were just completed, and only new ones and those still
        in backoff (jobs whose backoff has run out are left to the assigners); true fills all spare
        capacity at every sync, whatever the backoff.
    backoff: `considered` knows new jobs by a column; `literal` compares times alone, by which a job is never
        new, as its time is past when somebody looks.
    bot_locality_hint_limit: the most recent locality hints that are kept for each bot; 0 keeps none. Doubling it
        makes more locality hits, of which more are stale.
    retry_base: seconds a job waits after its first attempt that failed or could not start, doubled with each further
        one. Doubling it doubles every wait below `retry_cap`.
    retry_cap: the longest such wait, seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = True
    to_capacity: bool = False
    backoff: Literal["considered", "literal"] = "considered"
    bot_locality_hint_limit: int = Field(default=10, ge=0, le=1000)
    retry_base: float = Field(default=1.0, ge=0, le=86400)
    retry_cap: float = Field(default=60.0, ge=0, le=86400)

    def model_post_init(self, _context: object) -> None:
        """Refuse what no single field can show to be wrong."""
        if self.retry_cap < self.retry_base:
            raise ValueError("retry_cap must not be less than retry_base")

    @property
    def pace(self) -> RetryPace:
        """How long retries wait."""
        return RetryPace(base=self.retry_base, cap=self.retry_cap)

    def limit(self, *, completed: int, room: int) -> int:
        """How many jobs may be fetched, given how many this sync completed and the free units."""
        if not self.enabled:
            return 0
        return room if self.to_capacity else min(completed, room)


@dataclass(frozen=True)
class Wish:
    """A free bot that has just completed so many jobs. `kind`: bots of one kind offer the same properties."""

    bot: Fetcher
    kind: int
    completed: int


@dataclass
class _Seats:
    """What a bot may still be given: so many jobs, so many units."""

    bot: Fetcher
    jobs: int
    units: int


def fetch(
    connection: Connection,
    settings: FetchSettings,
    wishes: Sequence[Wish],
    rooms: Mapping[int, Room],
    *,
    ack: float,
    cooldown: float,
    fronts: Fronts,
) -> None:
    """Grant the bots the most urgent jobs that they may have, to those that are alike together.

    The caller holds the bots' rows, writes to them later what `rooms` say then, and tells the bots before the
    transaction ends. `fronts` is what the process remembers of the jobs in front.
    """
    alike: dict[tuple[object, ...], list[_Seats]] = {}
    for wish in wishes:
        bot = wish.bot
        limit = settings.limit(completed=wish.completed, room=bot.room)
        if limit > 0:
            key = (wish.kind, bot.cohort, bot.instance, bot.pool, bot.capacity, tuple(bot.returned))
            alike.setdefault(key, []).append(_Seats(bot, limit, bot.room))
    for seats in alike.values():
        left_over = _fill(connection, settings, seats, rooms, ack=ack, cooldown=cooldown, fronts=fronts)
        # What was too large for the room that was left must not keep smaller jobs behind it from a bot; and under a
        # maximum, what one bot is given decides whether the next one may fetch from that instance at all.
        for each in left_over if len(seats) > 1 else ():
            _fill(connection, settings, [each], rooms, ack=ack, cooldown=cooldown, fronts=fronts)


def _fill(
    connection: Connection,
    settings: FetchSettings,
    seats: list[_Seats],
    rooms: Mapping[int, Room],
    *,
    ack: float,
    cooldown: float,
    fronts: Fronts,
) -> list[_Seats]:
    """Pick for these bots, as for one that has the room of the largest, and grant; returns the bots that may have more
    while a job was too large for every one of them, or all, untouched, if a job's instance is near its maximum."""
    largest = max(seats, key=lambda each: each.units)
    jobs = for_bot.pick_for_bot(
        connection,
        replace(largest.bot, room=largest.units),
        limit=sum(each.jobs for each in seats),
        any_wait=settings.to_capacity,
        literal=settings.backoff == "literal",
        cooldown=cooldown,
        line=fronts.of(largest.bot.cohort),
    )
    # Were all the others served first, a maximum would still have to leave the last bot its whole capacity.
    if (
        len(seats) > 1
        and jobs
        and quotas.short_among(
            connection,
            largest.bot.cohort,
            {job.instance for job in jobs},
            units=sum(each.units for each in seats) + largest.bot.capacity,
            cooldown=cooldown,
        )
    ):
        return seats
    seated = _seated(jobs, seats)
    grant_held(
        connection,
        [Placement(job.id, bot.id, {"bot": bot.name, "strategy": STRATEGY}) for job, bot in seated],
        rooms,
        assigner=[f"bot:{bot.name}" for _, bot in seated],
        strategy=STRATEGY,
        ack=ack,
        cooldown=cooldown,
    )
    return [each for each in seats if each.jobs > 0 and each.units > 0] if len(seated) < len(jobs) else []


def _seated(jobs: Sequence[ReadyJob], seats: Sequence[_Seats]) -> list[tuple[ReadyJob, Fetcher]]:
    """Each job, in its order, on the first of the bots that may have it; takes it off what that one may have."""
    open_seats, seated = list(seats), []
    for job in jobs:
        for each in open_seats:
            if each.units >= job.units:
                each.jobs -= 1
                each.units -= job.units
                seated.append((job, each.bot))
                if each.jobs == 0 or each.units == 0:
                    open_seats.remove(each)
                break
    return seated


# What bots are given at their calls beside what assigners have given them.


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
        release(connection, more, limit=RELEASE_LIMIT)
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
            sum(job.verdict in call.COMPLETED for job in visit.ended),
        )
        for visit in free
    ]
    # What a call has returned matters only under a maximum; without one, bots are alike whatever they returned.
    if len({tuple(wish.bot.returned) for wish in wishes}) > 1 and not quotas.anybody_limited(connection):
        return [replace(wish, bot=replace(wish.bot, returned=())) for wish in wishes]
    return wishes


def _claim(connection: Connection, visit: Visit, *, ack: float, cooldown: float) -> None:
    """Start the jobs for which an eviction has freed room here; this transaction holds their quotas."""
    bot = visit.bot
    ids = claims(connection, bot.id, room=visit.room.unused)
    grant_held(
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
