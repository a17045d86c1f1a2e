"""Proactive fetching: bots that have just finished something are given more in the same call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from schema import fetching, ledger, moves
from schema.fetching import Fetcher
from schema.front import Fronts
from schema.moves import Placement, RetryPace, Room
from schema.ready import ReadyJob

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
    jobs = fetching.pick_for_bot(
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
        and ledger.short_among(
            connection,
            largest.bot.cohort,
            {job.instance for job in jobs},
            units=sum(each.units for each in seats) + largest.bot.capacity,
            cooldown=cooldown,
        )
    ):
        return seats
    seated = _seated(jobs, seats)
    moves.grant_held(
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
