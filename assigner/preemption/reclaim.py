"""Preemption in a cycle: find who is below the minimum and waits, plan, and ask bots to stop."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import Connection

from assigner.preemption.plan import Eviction, QuotaSettings, plan
from schema.fleet import candidates
from schema.fleet.candidates import CandidateRequest
from schema.moves.preempt import preempt
from schema.picking import preemption
from schema.picking.preemption import StarvedJob
from schema.picking.ready import Scope

#: Jobs of instances below their minimum that one cycle reclaims for.
BATCH = 20


def reclaim(
    connection: Connection, scope: Scope, settings: QuotaSettings, *, sync: float, actor: str, again: bool
) -> int:
    """Evict for jobs whose match has failed for `preemption_delay` seconds; returns the victims that were asked.

    A job for which a free bot is there is left to the next pick. `again`: this transaction has granted leases.
    """
    waiting, now = preemption.starved_jobs(connection, scope, delay=settings.preemption_delay, sync=sync, limit=BATCH)
    return sum(evicted for _, evicted in _reclaimed(connection, waiting, now, settings, sync, actor, again=again))


def reclaim_admitted(
    connection: Connection, scope: Scope, job_ids: Sequence[int], settings: QuotaSettings, *, sync: float, actor: str
) -> tuple[list[StarvedJob], int]:
    """As `reclaim`, for jobs that have gone through their gates, whose rows are locked: those for which room has been
    reserved, and the number of victims."""
    waiting, now = preemption.starved_among(connection, scope, job_ids, delay=settings.preemption_delay, sync=sync)
    found = list(_reclaimed(connection, waiting, now, settings, sync, actor, again=False))
    return [job for job, _ in found], sum(evicted for _, evicted in found)


def _reclaimed(
    connection: Connection,
    waiting: Sequence[StarvedJob],
    now: datetime | None,
    settings: QuotaSettings,
    sync: float,
    actor: str,
    *,
    again: bool,
) -> Iterator[tuple[StarvedJob, int]]:
    """The jobs for which room is being freed, each with the number of its victims."""
    freed: Counter[tuple[int, int]] = Counter()
    # Jobs come most urgent first: where none could be evicted for one, none can for the next that is like it.
    hopeless: set[CandidateRequest] = set()
    for job in waiting:
        assert now is not None
        wanted = CandidateRequest(job.cohort, job.instance, job.platform, job.units, 1)
        of = job.cohort, job.instance
        if wanted in hopeless or freed[of] + job.units > job.short or candidates.any_free(connection, wanted):
            continue
        eviction = plan(job, preemption.occupied_bots(connection, job), settings, now=now)
        if eviction is None:
            hopeless.add(wanted)
            continue
        if _carry_out(connection, eviction, settings, sync=sync, actor=actor, again=again):
            freed[of] += job.units
            yield job, len(eviction.victims)
        # Also one that came to nothing keeps the quotas that it has locked.
        again = True


def _carry_out(
    connection: Connection, eviction: Eviction, settings: QuotaSettings, *, sync: float, actor: str, again: bool
) -> bool:
    return preempt(
        connection,
        preemptor=eviction.preemptor.id,
        units=eviction.preemptor.units,
        cohort=eviction.preemptor.cohort,
        bot_id=eviction.bot.id,
        victims=[(victim.job_id, victim.fence) for victim in eviction.victims],
        rule=eviction.rule,
        receipt=eviction.receipt,
        sync=sync,
        reservation=settings.reservation,
        actor=actor,
        again=again,
    )
