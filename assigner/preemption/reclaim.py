"""Preemption in a cycle: find waiting jobs of instances below their minimum, plan, and ask bots to stop jobs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from assigner.preemption.plan import Eviction, QuotaSettings, plan
from schema.fleet import candidates
from schema.fleet.candidates import CandidateRequest
from schema.moves.preempt import preempt
from schema.picking import preemption
from schema.picking.preemption import OccupiedBot, StarvedJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.timing import KILL_ALLOWANCE

#: The most jobs of instances below their minimum for which one cycle evicts.
BATCH = 20
_NEVER = datetime.max.replace(tzinfo=UTC)
#: Told of each plan: the job, the bots and the moment that it was made from, and what came of it.
OnPlan = Callable[[StarvedJob, Sequence[OccupiedBot], datetime, Eviction | None], None]


def reclaim(
    connection: Connection,
    waiting: Sequence[StarvedJob],
    now: datetime | None,
    settings: QuotaSettings,
    *,
    sync: float,
    actor: str,
    again: bool,
    used: Counter[int],
    policy: int | None = None,
    on_plan: OnPlan | None = None,
) -> int:
    """Evict for these jobs, which come most urgent first; returns the number of victims that were asked.

    A job for which some bot has room is left to the next pick, and one that kept units of its instance cover needs
    nothing. now: the database's time; None without a job. again: this transaction has granted leases. used: kept units
    of each bot that cover jobs which were looked at before. The units that cover these jobs are added to it. policy:
    the version by which it is decided, which evictions name. on_plan: called with each plan.
    """
    freed: Counter[tuple[int, int]] = Counter()
    evicted, patience = 0, sync + KILL_ALLOWANCE + settings.reservation
    wanting = Counter(bot_id for job in waiting for bot_id in job.kept_bots)
    # Jobs come most urgent first. If nothing can be evicted for one job, nothing can for the next one that is alike and
    # is given up no later.
    hopeless: dict[CandidateRequest, datetime] = {}
    for job in waiting:
        assert now is not None
        wanted = CandidateRequest(job.cohort, job.instance, job.platform, job.units, 1)
        of = job.cohort, job.instance
        if (keeping := _covering(job, used, wanting)) is not None:
            used[keeping] += job.units
            continue
        deadline = job.queue_deadline or _NEVER
        if wanted in hopeless and deadline <= hopeless[wanted]:
            continue
        if freed[of] + job.units > job.short or candidates.some_free(connection, wanted):
            continue
        occupied = preemption.occupied_bots(connection, job, patience=patience, sync=sync)
        eviction = plan(job, occupied, settings, now=now)
        if on_plan is not None:
            on_plan(job, occupied, now, eviction)
        if eviction is None:
            hopeless[wanted] = deadline
            continue
        if _evict(connection, eviction, policy=policy, sync=sync, patience=patience, actor=actor, again=again):
            freed[of] += job.units
            evicted += len(eviction.victims)
        # An eviction that came to nothing has locked quotas, too.
        again = True
    return evicted


def _evict(
    connection: Connection,
    eviction: Eviction,
    *,
    policy: int | None,
    sync: float,
    patience: float,
    actor: str,
    again: bool,
) -> bool:
    job = eviction.preemptor
    return preempt(
        connection,
        preemptor=job.id,
        units=job.units,
        cohort=job.cohort,
        instance=job.instance,
        seen=job.kept_until,
        bot_id=eviction.bot.id,
        victims=[(victim.job_id, victim.fence) for victim in eviction.victims],
        rule=eviction.rule,
        receipt={**eviction.receipt, "policy": policy},
        sync=sync,
        patience=patience,
        actor=actor,
        again=again,
    )


@dataclass(frozen=True)
class Foreseen:
    """A job of an instance below its minimum, the bots that it could have, and what would be evicted for it once it has
    waited long enough; None = nothing."""

    job: StarvedJob
    bots: Sequence[OccupiedBot]
    eviction: Eviction | None
    now: datetime


def foresee(connection: Connection, job_id: int, settings: QuotaSettings, *, sync: float) -> Foreseen | None:
    """Return what would be evicted for a waiting job; None if its instance is not below its minimum, or units are kept
    for it already. Evicts nothing. sync: the bots' sync period, in seconds."""
    waiting, now = preemption.starved_among(connection, Scope(), [job_id], delay=0.0, sync=sync)
    if not waiting or _covering(waiting[0], Counter(), Counter()) is not None:
        return None
    assert now is not None
    (job,) = waiting
    patience = sync + KILL_ALLOWANCE + settings.reservation
    occupied = preemption.occupied_bots(connection, job, patience=patience, sync=sync)
    may = settings.preemption and job.units <= job.short
    return Foreseen(job, occupied, plan(job, occupied, settings, now=now) if may else None, now)


def _covering(job: StarvedJob, used: Counter[int], wanting: Counter[int]) -> int | None:
    """Return the bot whose kept units cover the job; None if there is none.

    It is the bot with the fewest units left that are enough, and of equal bots the one that the fewest of the waiting
    jobs could use.
    """
    left = {bot_id: units - used[bot_id] for bot_id, units in job.kept_bots.items()}
    fitting = [bot_id for bot_id, units in left.items() if units >= job.units]
    return min(fitting, key=lambda bot_id: (left[bot_id], wanting[bot_id], bot_id), default=None)
