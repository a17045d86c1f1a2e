"""Proactive fetching: bots that have just finished jobs are given others in the same call."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from leasehold.states import JobState
from pydantic import BaseModel, ConfigDict, Field

from bots.sync import call
from bots.sync.call import SyncCall
from schema.accounting import quotas
from schema.accounting.quotas import Cooldown
from schema.accounting.units import BotCapacity, ReturnedUnits
from schema.moves.end import RetryPace
from schema.moves.grant import PREFERRED, FetchedLease, Placement, grant_locked
from schema.moves.waiting.backoff import wake_queues, wake_queues_for_bots
from schema.picking import for_bot
from schema.picking.for_bot import FetchingBot
from schema.picking.head_cursor import HeadCursors
from schema.picking.pick import ReadyJob
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.states import FETCHED


class FetchSettings(BaseModel):
    """What a bot's sync does beside settling its leases; names and defaults are BuildGrid's where it has them.

    enabled: give bots work at a sync at all; default true. Without it only assigners place jobs.
    to_capacity: false, the default, gives at most as many jobs as were just completed, but fills the room of a bot that
        holds leases of short tasks in advance; true fills all spare capacity at every sync, whatever `filter` says.
    filter: `considered`, the default, gives new jobs and those whose queue still rests, but not those whose queue's
        rest is over, which are left to the assigners. A job is new while no assigner has looked into its queue without
        success. `literal` compares times alone, by which a job is never new, as its time is past when somebody looks.
        `none` gives every ready job (BuildGrid's proactive-fetch-full-queue).
    bot_locality_hint_limit: the most recent locality hints that are kept for each bot, 0 to 1,000; default 10; 0 keeps
        none. Doubling it makes more locality hits, and more of them are stale.
    retry_base: seconds that a job waits after its first attempt that failed or could not start, 0 to 86,400; default 1.
        The wait doubles with each further one. Doubling it doubles every wait below `retry_cap`.
    retry_cap: the longest such wait in seconds, `retry_base` to 86,400; default 60. Doubling it halves the load of jobs
        that never succeed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = True
    to_capacity: bool = False
    filter: Literal["considered", "literal", "none"] = "considered"
    bot_locality_hint_limit: int = Field(default=10, ge=0, le=1000)
    retry_base: float = Field(default=1.0, ge=0, le=86400)
    retry_cap: float = Field(default=60.0, ge=0, le=86400)

    def model_post_init(self, _context: object) -> None:
        """Check fields against each other."""
        if self.retry_cap < self.retry_base:
            raise ValueError("retry_cap must not be less than retry_base")

    @property
    def pace(self) -> RetryPace:
        """Return the backoff of retries."""
        return RetryPace(base=self.retry_base, cap=self.retry_cap)

    def limit(self, *, completed: int, free_units: int, ahead: bool = False) -> int:
        """Return how many jobs a call may fetch. completed: jobs that it has completed. free_units: those of the
        bot. ahead: the bot holds leases of short tasks in advance, which assigners could grant only between its calls.
        """
        if not self.enabled:
            return 0
        return free_units if self.to_capacity or (ahead and completed) else min(completed, free_units)


@dataclass(frozen=True)
class FetchRequest:
    """A bot with free units, and the number of jobs that it may be given."""

    bot: FetchingBot
    limit: int


@dataclass
class FetchAllowance:
    """The jobs and units that a bot may still be given."""

    bot: FetchingBot
    jobs: int
    units: int


def fetch(
    connection: Connection,
    settings: FetchSettings,
    requests: Sequence[FetchRequest],
    capacities: Mapping[int, BotCapacity],
    returned: ReturnedUnits,
    *,
    ack: float,
    cooldown: Cooldown,
    head_cursors: HeadCursors,
    policy: int | None = None,
) -> list[FetchedLease]:
    """Grant the bots the most urgent jobs that they may have. Bots that are alike are served together.

    The caller has locked the bots, writes their rows later from `capacities`, and the quotas from `returned`, and tells
    the bots before the transaction ends. head_cursors: what the process remembers of the front of each cohort.
    policy: the version of the policy by which it works.
    """
    alike: dict[tuple[object, ...], list[FetchAllowance]] = {}
    for request in requests:
        bot = request.bot
        key = (bot.kind, bot.cohort, bot.instance, bot.pool, bot.capacity, tuple(bot.returned))
        alike.setdefault(key, []).append(FetchAllowance(bot, request.limit, bot.free_units))
    # Near a maximum or with a minimum, each unit decides which job is next.
    free = sum(each.units for seats in alike.values() for each in seats)
    if alike and returned.room is not None and returned.room < free + max(request.bot.capacity for request in requests):
        returned.write(connection)
    fetched: list[FetchedLease] = []
    fill = partial(
        _fill,
        connection,
        settings,
        capacities,
        returned,
        fetched,
        ack=ack,
        cooldown=cooldown,
        head_cursors=head_cursors,
        policy=policy,
    )
    for seats in alike.values():
        left_over = fill(seats)
        # A job that was too large for the rest of the room must not keep smaller jobs behind it from a bot. And under a
        # maximum, the jobs of one bot decide whether the next one may fetch from that instance at all.
        for each in left_over if len(seats) > 1 else ():
            fill([each])
    return fetched


def _fill(
    connection: Connection,
    settings: FetchSettings,
    capacities: Mapping[int, BotCapacity],
    returned: ReturnedUnits,
    fetched: list[FetchedLease],
    seats: list[FetchAllowance],
    *,
    ack: float,
    cooldown: Cooldown,
    head_cursors: HeadCursors,
    policy: int | None,
) -> list[FetchAllowance]:
    """Pick as for one bot with the room of the largest of these, grant, and add the leases to `fetched`.

    Returns the bots that may still be given jobs, if some job was too large for each of them; or all bots, without a
    grant, if the instance of some job is near its maximum.
    """
    largest = max(seats, key=lambda each: each.units)
    jobs = for_bot.pick_for_bot(
        connection,
        replace(largest.bot, free_units=largest.units),
        limit=sum(each.jobs for each in seats),
        any_wait=settings.to_capacity or settings.filter == "none",
        literal=settings.filter == "literal",
        cooldown=cooldown,
        cursor=head_cursors.of(largest.bot.cohort),
    )
    # A maximum has to leave the last bot its whole capacity, even if all the others are served first.
    cohort, wanted = largest.bot.cohort, Counter[int]()
    for job in jobs:
        wanted[job.instance] += job.units
    # The room of instances that units were returned to has been compared before.
    unknown = {instance for instance in wanted if (cohort, instance) not in returned.units}
    if (
        len(seats) > 1
        and unknown
        and quotas.any_short_of_quota(
            connection,
            cohort,
            unknown,
            units=sum(each.units for each in seats) + largest.bot.capacity,
            cooldown=cooldown,
        )
    ):
        return seats
    seated = _assign_bots(jobs, seats)
    granted = grant_locked(
        connection,
        [_placement(job, bot) for job, bot in seated],
        capacities,
        returned,
        cohort=cohort,
        wanted=wanted,
        assigner=[f"bot:{bot.name}" for _, bot in seated],
        strategy=FETCHED,
        ack=ack,
        cooldown=cooldown,
        policy=policy,
    )
    fetched += granted
    started = {lease.job_id for lease in granted}
    wake_queues(connection, {job.queue for job in jobs if job.tried and job.id in started})
    return [each for each in seats if each.jobs > 0 and each.units > 0] if len(seated) < len(jobs) else []


def _placement(job: ReadyJob, bot: FetchingBot) -> Placement:
    phase = {} if job.preferred is None else {"phase": PREFERRED}
    return Placement(job.id, bot.id, {"bot": bot.name, "strategy": FETCHED} | phase)


def _assign_bots(jobs: Sequence[ReadyJob], seats: Sequence[FetchAllowance]) -> list[tuple[ReadyJob, FetchingBot]]:
    """Assign each job, in its order, to the first bot that may have it, and reduce what that bot may still have."""
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


# Fetching in a call of a bot.


def fetch_after_sync(
    connection: Connection,
    settled: Sequence[SyncCall],
    settings: FetchSettings,
    *,
    ack: float,
    cooldown: Cooldown,
    head_cursors: HeadCursors,
    returned: ReturnedUnits,
    policy: int | None = None,
) -> None:
    """Fetch for each bot, unless its call leaves the room to constrained jobs. The caller tells the bots of their
    leases.

    Room that a bot gained and still has is left to the assigners, and so are units that it keeps for an instance.
    Queues that such a bot could serve are woken.
    """
    spoken = [sync_call for sync_call in settled if sync_call.sync is not None and sync_call.healthy]
    free = [sync_call for sync_call in spoken if sync_call.bot_capacity.units > 0]
    units_before = {sync_call.bot.id: sync_call.bot_capacity.unused for sync_call in spoken}
    capacities = {sync_call.bot.id: sync_call.bot_capacity for sync_call in free}
    requests = _fetch_requests(
        connection, settings, [sync_call for sync_call in free if not sync_call.constrained_first]
    )
    fetched = fetch(
        connection,
        settings,
        requests,
        capacities,
        returned,
        ack=ack,
        cooldown=cooldown,
        head_cursors=head_cursors,
        policy=policy,
    )
    by_bot = {sync_call.bot.id: sync_call for sync_call in free}
    for lease in fetched:
        by_bot[lease.bot_id].fetched.append(lease)
    spare = [sync_call for sync_call in spoken if sync_call.bot_capacity.unused > 0]
    more = {
        sync_call.bot.id: sync_call.bot_capacity.unused
        for sync_call in spare
        if units_before[sync_call.bot.id] > _free_units_before(sync_call)
    }
    if more:
        wake_queues_for_bots(connection, more)
    if more or any(job.state == JobState.QUEUED for sync_call in spare for job in sync_call.ended):
        wake(connection, "jobs")


def _fetch_requests(connection: Connection, settings: FetchSettings, free: Sequence[SyncCall]) -> list[FetchRequest]:
    """Return the requests of those bots that may be given a job."""
    wanting = list[tuple[SyncCall, int, tuple[int, ...]]]()
    for sync_call in free:
        ended = sync_call.ended
        completed = sum(job.verdict in call.COMPLETED for job in ended)
        # Room that a call has left to constrained jobs stays free until an assigner uses it.
        ahead = sync_call.sync is not None and sync_call.sync.ahead and not sync_call.bot.gated
        limit = settings.limit(completed=completed, free_units=sync_call.bot_capacity.units, ahead=ahead)
        if limit > 0:
            wanting.append((sync_call, limit, tuple(sorted({job.instance for job in ended}))))
    # The instances whose units a call has returned matter only if some instance has a maximum.
    matter = len({returned for _, _, returned in wanting}) <= 1 or quotas.any_maximum(connection)
    return [
        FetchRequest(_fetching(sync_call, returned if matter else ()), limit) for sync_call, limit, returned in wanting
    ]


def _fetching(sync_call: SyncCall, returned: Sequence[int]) -> FetchingBot:
    bot, free_units = sync_call.bot, sync_call.bot_capacity.units
    return FetchingBot(
        bot.id, bot.name, bot.kind, bot.cohort, bot.instance, bot.pool, bot.capacity, free_units, returned=returned
    )


def _free_units_before(sync_call: SyncCall) -> int:
    """Return the free units of the bot before its call."""
    bot = sync_call.bot
    return int(bot.capacity - bot.in_use) if bot.free else 0
