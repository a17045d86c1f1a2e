"""Placement of jobs that take resources of bots, and of batches that go to one bot together."""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from assigner.placement import sampling
from assigner.placement.fleet import Fleet
from assigner.placement.strategy import (
    Group,
    Policy,
    QuotaCopy,
    SamplingSettings,
    Snapshot,
    Strategy,
    TurnCopy,
    with_phase,
)
from schema.accounting.counters import Counter, declared_resources, resource_counter
from schema.fleet import candidates
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.moves.grant import Placement
from schema.picking.constrained import ConstrainedQueue, QueueHead, QueueId
from schema.picking.pick import ReadyJob
from schema.validation import KINDS, MAX_UNITS, Kind

#: The most bots with room whose resources are checked for one group of alike jobs.
MAX_BOTS_READ = 256
#: The most choices made one after another, each on what the one before it has left.
ROUNDS = 20

Need = Mapping[Kind, int]


class RemainingResources:
    """A working copy of the units and the declared resources that bots have left, and of their turns."""

    def __init__(self, bots: Iterable[FreeBot], amounts: Mapping[str, float], turns: Mapping[int, int]) -> None:
        self._free_units_of = {bot.id: bot.free_units for bot in bots}
        self._amounts = dict(amounts)
        self.turns = TurnCopy(turns)

    def left(self, bot: FreeBot) -> FreeBot:
        """The bot with the units that it has left."""
        return bot._replace(free_units=self._free_units_of[bot.id])

    def times(self, bot_id: int, units: int, need: Need) -> int:
        """Return how many jobs of this size fit on the bot."""
        of_resources = (
            int(self._amounts[name] // amount)
            for kind, amount in need.items()
            if (name := resource_counter(bot_id, kind)) in self._amounts
        )
        return min(self._free_units_of[bot_id] // units, *of_resources, MAX_UNITS)

    def take(self, bot_id: int, units: int, need: Need) -> None:
        """Take the units and resources of one job off the bot."""
        self._free_units_of[bot_id] -= units
        self.turns.take(bot_id)
        for kind, amount in need.items():
            name = resource_counter(bot_id, kind)
            if name in self._amounts:
                self._amounts[name] -= amount


@dataclass(frozen=True)
class ResourceSnapshot(Snapshot):
    """A snapshot of jobs that take resources or belong to a batch.

    needs: what each job takes. batched: jobs that go to one bot together with others of their group. amounts: what is
    left of the declared resources, by the name of the counter.
    """

    needs: Mapping[int, Need] = field(default_factory=dict)
    batched: frozenset[int] = frozenset()
    amounts: Mapping[str, float] = field(default_factory=dict)

    def chosen_by(self, strategy: Strategy, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """Return the placements of the strategy that fit. A job that does not fit is offered the bots that are left."""
        remaining = RemainingResources((bot for bots in self.candidates for bot in bots), self.amounts, self.turns)
        quotas, jobs = QuotaCopy(self.headrooms), {job.id: job for job in self.jobs}
        placements = {each.job_id: each for each in self._together(strategy, policy, remaining, quotas, how=how)}
        for _ in range(ROUNDS):
            seen = self._left(placements, remaining, quotas)
            wanted = strategy.choose(seen, policy, how=how) if seen.jobs else []
            before = len(placements)
            for each in wanted:
                need, job = self.needs[each.job_id], jobs[each.job_id]
                if remaining.times(each.bot_id, job.units, need):
                    remaining.take(each.bot_id, job.units, need)
                    quotas.take(job)
                    placements[each.job_id] = each
            if len(placements) - before == len(wanted):
                break
        return [with_phase(each, jobs[each.job_id]) for each in placements.values()]

    def _together(
        self,
        strategy: Strategy,
        policy: Policy,
        remaining: RemainingResources,
        quotas: QuotaCopy,
        *,
        how: Mapping[str, object],
    ) -> list[Placement]:
        """Place batches: as many jobs of one batch key as fit on one bot go there, chosen as if they were one job. This
        is repeated while enough jobs for a batch are left."""
        placements: list[Placement] = []
        for group, bots in zip(self.groups, self.candidates, strict=True):
            jobs = list(group.jobs) if group.jobs[0].id in self.batched else []
            while len(jobs) >= policy.min_batch_size:
                need = self.needs[jobs[0].id]
                most = quotas.times(jobs[0], len(jobs))
                times = {bot.id: min(remaining.times(bot.id, group.units, need), most) for bot in bots}
                size = max(times.values(), default=0)
                if size < policy.min_batch_size:
                    break
                one = jobs[0]._replace(units=group.units * size)
                fit = [remaining.left(bot) for bot in bots if times[bot.id] == size]
                groups = [replace(group, units=one.units, jobs=(one,))]
                turns = remaining.turns.last
                seen = Snapshot([one], groups, [fit], self.hits, self.labels, self.rates, turns=turns)
                found = strategy.choose(seen, policy, how={**how, "batch": size})
                if not found:
                    break
                for job in jobs[:size]:
                    remaining.take(found[0].bot_id, group.units, need)
                    quotas.take(job)
                    placements.append(found[0]._replace(job_id=job.id))
                jobs = jobs[size:]
        return placements

    def _left(self, placed: Mapping[int, Placement], remaining: RemainingResources, quotas: QuotaCopy) -> Snapshot:
        groups: list[Group] = []
        found: list[list[FreeBot]] = []
        for group, bots in zip(self.groups, self.candidates, strict=True):
            jobs = tuple(job for job in group.jobs if job.id not in placed)
            fit = [
                remaining.left(bot)
                for bot in bots
                if jobs and remaining.times(bot.id, group.units, self.needs[jobs[0].id])
            ]
            if fit:
                groups.append(replace(group, jobs=jobs))
                found.append(fit)
        among = {job.id for group in groups for job in group.jobs}
        jobs_left = [job for job in self.jobs if job.id in among]
        turns = remaining.turns.last
        return Snapshot(jobs_left, groups, found, self.hits, self.labels, self.rates, quotas.left, turns)


def split_by_resources(heads: Iterable[QueueHead]) -> tuple[list[QueueHead], list[ReadyJob]]:
    """Split the heads into jobs that take resources or belong to a batch, and the others."""
    needy: list[QueueHead] = []
    others: list[ReadyJob] = []
    asking: dict[QueueId, bool] = {}
    for head in heads:
        queue = head.queue
        if queue.id not in asking:
            asking[queue.id] = bool(need_of(queue)) or "batch_key" in queue.constraints
        if asking[queue.id]:
            needy.append(head)
        else:
            others.append(head.job)
    return needy, others


def need_of(queue: ConstrainedQueue) -> Need:
    """Return what each job of the queue takes of resources, by kind."""
    wanted = queue.constraints.get("resources") or {}
    return {kind: wanted[kind] for kind in KINDS if kind in wanted}


def read_resource_snapshot(
    connection: Connection,
    fleet: Fleet,
    heads: Sequence[QueueHead],
    settings: SamplingSettings,
    *,
    chance: random.Random,
) -> ResourceSnapshot:
    """Read, without locks, bots on which each of the jobs fits by itself, and what is left there."""
    alike: dict[tuple[object, ...], list[QueueHead]] = defaultdict(list)
    for head in heads:
        alike[head.queue.id, head.job.units].append(head)
    groups = [
        Group(queue.cohort, queue.instance, queue.platform, units, tuple(head.job for head in some))
        for some in alike.values()
        for queue, units in [(some[0].queue, some[0].job.units)]
    ]
    needs = [need_of(some[0].queue) for some in alike.values()]
    fitting, declared = _fitting(
        connection, fleet, [group.wanted(MAX_BOTS_READ) for group in groups], needs, chance=chance
    )
    size = settings.sample_size if settings.enabled else MAX_BOTS_READ
    found = [bots[: group.wanted(size).count] for group, bots in zip(groups, fitting, strict=True)]
    bot_ids = sorted({bot.id for bots in found for bot in bots})
    hints = sorted({head.job.locality_hint for head in heads if head.job.locality_hint is not None})
    return ResourceSnapshot(
        [head.job for head in heads],
        groups,
        found,
        candidates.hinted(connection, bot_ids, hints),
        needs={head.job.id: need_of(head.queue) for head in heads},
        batched=frozenset(head.job.id for head in heads if "batch_key" in head.queue.constraints),
        amounts=_left(declared),
    )


def as_preferring(heads: Sequence[QueueHead]) -> list[QueueHead]:
    """The heads as if their jobs required what they prefer."""
    queues = {head.queue.id: head for head in heads}
    wanted = {
        place: replace(head.queue, platform=head.job.preferred or head.queue.platform) for place, head in queues.items()
    }
    return [
        head._replace(queue=wanted[head.queue.id], job=head.job._replace(platform=wanted[head.queue.id].platform))
        for head in heads
    ]


def resource_charges(
    connection: Connection, heads: Sequence[QueueHead], placements: Sequence[Placement]
) -> dict[int, Mapping[str, float]]:
    """Return what the placed jobs take of declared resources, by job. The caller has locked the bots."""
    queues = {head.queue.id: head.queue for head in heads}
    of_queues = {place: need for place, queue in queues.items() if (need := need_of(queue))}
    if not of_queues:
        return {}
    needs = {head.job.id: of_queues[head.queue.id] for head in heads if head.queue.id in of_queues}
    placed = [each for each in placements if each.job_id in needs]
    known = declared_resources(connection, sorted({each.bot_id for each in placed}), KINDS)
    return {
        each.job_id: {
            name: float(amount)
            for kind, amount in needs[each.job_id].items()
            if (name := resource_counter(each.bot_id, kind)) in known
        }
        for each in placed
    }


def lacking_by_queue(
    connection: Connection, fleet: Fleet, queues: Sequence[ConstrainedQueue], *, chance: random.Random
) -> dict[QueueId, str]:
    """Of the queues whose jobs fit on no bot now, by their ids, what is missing first.

    Of more than `MAX_BOTS_READ` bots with room as many are looked at, others each time.
    """
    needy = [queue for queue in queues if need_of(queue)]
    if not needy:
        return {}
    needs = [need_of(queue) for queue in needy]
    wanted = [
        CandidateRequest(queue.cohort, queue.instance, queue.platform, queue.constraints.get("units", 1), MAX_BOTS_READ)
        for queue in needy
    ]
    fitting, declared = _fitting(connection, fleet, wanted, needs, chance=chance)
    # Whoever asks about one queue wants to know more than that it is closed.
    most = _most_left(declared, needs[0]) if len(queues) == 1 else None
    return {
        queue.id: missing_resource(need, most)
        for queue, need, bots in zip(needy, needs, fitting, strict=True)
        if not bots
    }


def _fitting(
    connection: Connection,
    fleet: Fleet,
    wanted: Sequence[CandidateRequest],
    needs: Sequence[Need],
    *,
    chance: random.Random,
) -> tuple[list[list[FreeBot]], dict[int, dict[Kind, Counter]]]:
    """For each group the bots that have enough left of what each of its jobs needs, in random order; and what the bots
    that were looked at have declared of resources, by bot."""
    roomy = sampling.sample(connection, fleet, wanted, sample_size=MAX_BOTS_READ, chance=chance, will_place=False)
    known = declared_resources(connection, sorted({bot.id for bots in roomy for bot in bots}), KINDS)
    declared = {
        bot.id: {kind: known[name] for kind in KINDS if (name := resource_counter(bot.id, kind)) in known}
        for bots in roomy
        for bot in bots
    }
    fitting = [
        [bot for bot in bots if all(_has_left(declared[bot.id].get(kind), need[kind]) for kind in need)]
        for bots, need in zip(roomy, needs, strict=True)
    ]
    return fitting, declared


def missing_resource(need: Need, most: Mapping[str, float] | None) -> str:
    """The first resource of which no bot has enough left; `most`: the most that any one has left of each, None if
    nobody has looked."""
    together = f"no bot with room has {' and '.join(f'{amount} {kind}' for kind, amount in need.items())} left at once"
    if most is None:
        return together
    for kind, amount in need.items():
        if kind in most and most[kind] < amount:
            return f"it takes {amount} {kind}, and no bot with room has more than {most[kind]:g} left"
    if not most:
        return "no bot has room"
    return together


def _has_left(declared: Counter | None, amount: float) -> bool:
    """Whether so much is left of a resource; a bot that does not declare it has any amount."""
    return declared is None or declared.most is None or declared.used + amount <= declared.most


def _left(declared: Mapping[int, Mapping[Kind, Counter]]) -> dict[str, float]:
    """What is left of the counters of these bots."""
    return {
        resource_counter(bot_id, kind): each.most - each.used
        for bot_id, kinds in declared.items()
        for kind, each in kinds.items()
        if each.most is not None
    }


def _most_left(declared: Mapping[int, Mapping[Kind, Counter]], need: Need) -> dict[str, float]:
    """The most that any one of these bots has left of each kind that is needed; nothing if there are no bots."""
    return {
        kind: max(
            math.inf if each is None or each.most is None else each.most - each.used
            for each in (kinds.get(kind) for kinds in declared.values())
        )
        for kind in (need if declared else ())
    }
