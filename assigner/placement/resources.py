"""Placement of jobs that take resources of bots, and of batches that go to one bot together."""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from assigner.placement import sampling
from assigner.placement.fleet import Fleet
from assigner.placement.room import (
    AMOUNTS,
    Declared,
    Demand,
    Need,
    Room,
    RoomCopy,
    WaitingDemand,
    choose_gpus,
    demand_of,
    fits,
    gpu_amounts,
    times,
)
from assigner.placement.strategy import (
    Group,
    Input,
    Policy,
    QuotaCopy,
    SamplingSettings,
    Snapshot,
    Strategy,
    TurnCopy,
    with_phase,
)
from schema.accounting.counters import Counter, declared_gpus, declared_resources, gpu_counter, resource_counter
from schema.fleet import candidates, localities
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.moves.grant import Placement
from schema.picking.constrained import UNUSABLE, ConstrainedQueue, QueueHead, QueueId, usable
from schema.picking.pick import ReadyJob
from schema.picking.queues import waiting_jobs
from schema.postgres.connection import Connection
from schema.validation import RESOURCES, WHOLE_GPU, ResourceName

#: The most bots with room whose resources are checked for one group of alike jobs.
MAX_BOTS_READ = 256
#: The resources of which several jobs on one bot take the sum of what each takes.
SUMS: frozenset[ResourceName] = frozenset({"cpu_milli", "memory_mib", "disk_mib"})
#: The most choices made one after another, each on what the one before it has left.
ROUNDS = 20


class _WorkingCopy:
    """What the choices so far have left of a snapshot: of the bots, of the quotas, and of the turns."""

    def __init__(self, seen: Snapshot) -> None:
        self._seen, self.rooms = seen, RoomCopy(seen.bots, seen.declared)
        self.quotas, self._turns = QuotaCopy(seen.headrooms), TurnCopy(seen.turns)

    def take(self, job: ReadyJob, bot_id: int) -> None:
        """Count a job that has been placed on the bot."""
        self.rooms.take(bot_id, self._seen.demand(job))
        self.quotas.take(job)
        self._turns.take(bot_id)

    def snapshot(
        self, jobs: Sequence[ReadyJob], groups: Sequence[Group], candidates: Sequence[Sequence[FreeBot]]
    ) -> Snapshot:
        """Return what a strategy sees now of these jobs and of these candidates."""
        seen = self._seen
        return Snapshot(
            jobs,
            groups,
            [[self.rooms.left(bot) for bot in bots] for bots in candidates],
            seen.hits,
            seen.labels,
            seen.rates,
            self.quotas.left,
            turns=self._turns.last,
            needs=seen.needs,
            declared=self.rooms.declared(),
            waiting=seen.waiting,
        )


@dataclass(frozen=True)
class ResourceSnapshot(Snapshot):
    """A snapshot of jobs that take resources or belong to a batch.

    batched: jobs that go to one bot together with others of their group.
    """

    batched: frozenset[int] = frozenset()

    def chosen_by(self, strategy: Strategy, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """Return the placements of the strategy that fit. A job that does not fit is offered the bots that are left."""
        copy, jobs = _WorkingCopy(self), {job.id: job for job in self.jobs}
        placements = {each.job_id: each for each in self._together(strategy, policy, copy, how=how)}
        for _ in range(ROUNDS):
            seen = self._left(placements, copy)
            wanted = strategy.choose(seen, policy, how=how) if seen.jobs else []
            before = len(placements)
            for each in wanted:
                job = jobs[each.job_id]
                if fits(copy.rooms.of(each.bot_id), self.demand(job)):
                    copy.take(job, each.bot_id)
                    placements[each.job_id] = each
            if len(placements) - before == len(wanted):
                break
        return [with_phase(each, jobs[each.job_id]) for each in placements.values()]

    def _together(
        self, strategy: Strategy, policy: Policy, copy: _WorkingCopy, *, how: Mapping[str, object]
    ) -> list[Placement]:
        """Place batches: as many jobs of one batch key as fit on one bot go there, chosen as if they were one job. This
        is repeated while enough jobs for a batch are left."""
        placements: list[Placement] = []
        for group, bots in zip(self.groups, self.candidates, strict=True):
            jobs = list(group.jobs) if group.jobs[0].id in self.batched else []
            while len(jobs) >= policy.min_batch_size:
                demand = self.demand(jobs[0])
                most = copy.quotas.times(jobs[0], len(jobs))
                fit = {bot.id: min(times(copy.rooms.of(bot.id), demand), most) for bot in bots}
                size = max(fit.values(), default=0)
                if size < policy.min_batch_size:
                    break
                one = jobs[0]._replace(units=group.units * size)
                seen = replace(
                    copy.snapshot(
                        [one],
                        [replace(group, units=one.units, jobs=(one,))],
                        [[bot for bot in bots if fit[bot.id] == size]],
                    ),
                    # Which GPUs each of them is given is decided one by one.
                    needs={
                        one.id: {name: amount * size for name, amount in self.needs[one.id].items() if name in SUMS}
                    },
                    headrooms={},
                )
                found = strategy.choose(seen, policy, how={**how, "batch": size})
                if not found:
                    break
                for job in jobs[:size]:
                    copy.take(job, found[0].bot_id)
                    placements.append(found[0]._replace(job_id=job.id))
                jobs = jobs[size:]
        return placements

    def _left(self, placed: Mapping[int, Placement], copy: _WorkingCopy) -> Snapshot:
        """Return what is left for the jobs that have no bot yet, but fit on one."""
        groups: list[Group] = []
        found: list[list[FreeBot]] = []
        for group, bots in zip(self.groups, self.candidates, strict=True):
            jobs = tuple(job for job in group.jobs if job.id not in placed)
            fit = [bot for bot in bots if jobs and fits(copy.rooms.of(bot.id), self.demand(jobs[0]))]
            if fit:
                groups.append(replace(group, jobs=jobs))
                found.append(fit)
        among = {job.id for group in groups for job in group.jobs}
        return copy.snapshot([job for job in self.jobs if job.id in among], groups, found)


def split_by_resources(jobs: Iterable[ReadyJob | QueueHead]) -> tuple[list[QueueHead], list[ReadyJob]]:
    """Split the jobs into those that take resources or belong to a batch, and the others."""
    needy: list[QueueHead] = []
    others: list[ReadyJob] = []
    for each in jobs:
        if not isinstance(each, QueueHead):
            others.append(each)
        elif "batch_key" in each.queue.constraints or need_of(each.queue):
            needy.append(each)
        else:
            others.append(each.job)
    return needy, others


def need_of(queue: ConstrainedQueue) -> Need:
    """Return what each job of the queue takes of resources, by their names."""
    wanted = queue.constraints.get("resources")
    return {name: wanted[name] for name in RESOURCES if name in wanted} if wanted else {}


def read_resource_snapshot(
    connection: Connection,
    fleet: Fleet,
    heads: Sequence[QueueHead],
    settings: SamplingSettings,
    *,
    chance: random.Random,
    inputs: Collection[Input] = (),
) -> ResourceSnapshot:
    """Read, without locks, bots on which each of the jobs fits by itself, what is left there of the resources that the
    jobs take, and what the strategy goes by beside them."""
    alike: dict[tuple[object, ...], list[QueueHead]] = defaultdict(list)
    for head in heads:
        alike[head.queue.id, head.job.units].append(head)
    groups = [
        Group(queue.cohort, queue.instance, queue.platform, units, tuple(head.job for head in some))
        for some in alike.values()
        for queue, units in [(some[0].queue, some[0].job.units)]
    ]
    needs = [need_of(some[0].queue) for some in alike.values()]
    wanted = [group.wanted(MAX_BOTS_READ) for group in groups]
    roomy = sampling.sample(connection, fleet, wanted, sample_size=MAX_BOTS_READ, chance=chance, will_place=False)
    fitting, declared = _fitting(
        connection, roomy, wanted, needs, names=RESOURCES if Input.RESOURCES in inputs else _deciding(needs)
    )
    size = settings.sample_size if settings.enabled else MAX_BOTS_READ
    found = [bots[: group.wanted(size).count] for group, bots in zip(groups, fitting, strict=True)]
    bot_ids = sorted({bot.id for bots in found for bot in bots})
    hints = sorted({head.job.locality_hint for head in heads if head.job.locality_hint is not None})
    seen = ResourceSnapshot(
        [head.job for head in heads],
        groups,
        found,
        localities.hinted(connection, bot_ids, hints),
        needs={head.job.id: need_of(head.queue) for head in heads},
        declared=declared,
        batched=frozenset(head.job.id for head in heads if "batch_key" in head.queue.constraints),
    )
    return sampling.with_rates(connection, seen) if Input.SUCCESS in inputs else seen


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


@dataclass(frozen=True)
class ResourceCharges:
    """What placed jobs take of declared resources, by job. lost: jobs for which the bot's GPUs do not suffice any more,
    and which take nothing."""

    amounts: Mapping[int, Mapping[str, float]]
    lost: frozenset[int] = frozenset()


def read_waiting_demand(connection: Connection) -> dict[int, WaitingDemand]:
    """Read what waiting jobs take, by cohort, without jobs whose constraints cannot be used."""
    found: dict[int, dict[Demand, int]] = defaultdict(lambda: defaultdict(int))
    for alike in waiting_jobs(connection):
        terms = {} if alike.terms is None else usable(alike.terms)
        if UNUSABLE not in terms:
            amounts = terms.get("resources", {})
            need = {each: amount for each in RESOURCES if (amount := amounts.get(each))}
            found[alike.cohort][demand_of(alike.units, need)] += alike.jobs
    return {cohort: WaitingDemand(jobs) for cohort, jobs in found.items()}


def resource_charges(
    connection: Connection, heads: Sequence[QueueHead], placements: Sequence[Placement]
) -> ResourceCharges:
    """Return what the placed jobs take of declared resources, and choose their GPUs. The caller has locked the bots."""
    queues = {head.queue.id: head.queue for head in heads}
    of_queues = {place: need for place, queue in queues.items() if (need := need_of(queue))}
    if not of_queues:
        return ResourceCharges({})
    needs = {head.job.id: of_queues[head.queue.id] for head in heads if head.queue.id in of_queues}
    placed = [each for each in placements if each.job_id in needs]
    known = declared_resources(connection, sorted({each.bot_id for each in placed}), _deciding(of_queues.values()))
    rooms = {bot_id: Room(0, gpus=gpus) for bot_id, gpus in _gpus(connection, known).items()}
    found: dict[int, dict[str, float]] = {}
    lost: set[int] = set()
    for each in placed:
        need, room = needs[each.job_id], rooms.get(each.bot_id, Room(0))
        demand = demand_of(1, need)
        chosen = choose_gpus(room.gpus, demand)
        if chosen is None:
            lost.add(each.job_id)
            continue
        amounts = found[each.job_id] = {
            name: float(amount)
            for resource, amount in need.items()
            if (name := resource_counter(each.bot_id, resource)) in known
        }
        left = list(room.gpus or ())
        for number, amount in zip(chosen, gpu_amounts(demand), strict=False):
            amounts[gpu_counter(each.bot_id, number)] = float(amount)
            left[number] -= amount
        if chosen:
            rooms[each.bot_id] = Room(0, gpus=tuple(left))
    return ResourceCharges(found, frozenset(lost))


def _deciding(needs: Iterable[Need]) -> list[ResourceName]:
    """The resources that decide whether such jobs fit: a part of a GPU is taken of a device if there are
    devices."""
    wanted = {name for need in needs for name in need}
    return [name for name in RESOURCES if name in wanted or (name == "gpus" and "gpu_milli" in wanted)]


def lacking_by_queue(
    connection: Connection, fleet: Fleet, queues: Sequence[ConstrainedQueue], *, chance: random.Random
) -> dict[QueueId, str]:
    """Of the queues whose jobs fit on no bot now, by their ids, what is missing.

    Of more than `MAX_BOTS_READ` bots with room as many are looked at, others each time.
    """
    needy = [queue for queue in queues if need_of(queue)]
    if not needy:
        return {}
    wanted = [_wanted(queue, MAX_BOTS_READ) for queue in needy]
    roomy = sampling.sample(connection, fleet, wanted, sample_size=MAX_BOTS_READ, chance=chance, will_place=False)
    needs = [need_of(queue) for queue in needy]
    fitting, _ = _fitting(connection, roomy, wanted, needs, names=_deciding(needs))
    return {
        queue.id: missing_resource(need, None)
        for queue, need, bots in zip(needy, needs, fitting, strict=True)
        if not bots
    }


def lacking(connection: Connection, queue: ConstrainedQueue, *, look: int) -> str | None:
    """What is missing first if the jobs of the queue fit on none of the first `look` bots with room; else None."""
    if not (need := need_of(queue)):
        return None
    wanted = _wanted(queue, look)
    roomy = candidates.some_free(connection, wanted)
    (fitting,), declared = _fitting(connection, [roomy], [wanted], [need], names=_deciding([need]))
    return None if fitting else missing_resource(need, declared.values())


def _wanted(queue: ConstrainedQueue, count: int) -> CandidateRequest:
    units = queue.constraints.get("units", 1)
    return CandidateRequest(queue.cohort, queue.instance, queue.platform, units, count)


def _fitting(
    connection: Connection,
    roomy: Sequence[Sequence[FreeBot]],
    wanted: Sequence[CandidateRequest],
    needs: Sequence[Need],
    *,
    names: Sequence[ResourceName],
) -> tuple[list[list[FreeBot]], dict[int, Declared]]:
    """For each group those of its roomy bots that have enough left of what each of its jobs needs, in their order; and
    what all of these bots have left of these resources, by bot."""
    bot_ids = sorted({bot.id for bots in roomy for bot in bots})
    known = declared_resources(connection, bot_ids, names)
    gpus = _gpus(connection, known)
    declared = {bot_id: _declared(bot_id, known, gpus.get(bot_id)) for bot_id in bot_ids}
    demands = [demand_of(want.units, need) for want, need in zip(wanted, needs, strict=True)]
    fitting = [
        [bot for bot in bots if fits(Room(bot.free_units, declared[bot.id].left, declared[bot.id].gpus), demand)]
        for bots, demand in zip(roomy, demands, strict=True)
    ]
    return fitting, declared


def _gpus(connection: Connection, known: Mapping[str, Counter]) -> dict[int, tuple[int, ...]]:
    """What is left of each GPU, in thousandths, by bot: of the bots whose number of GPUs is among these counters."""
    numbers = {
        int(name.split(":")[1]): int(counter.most or 0) for name, counter in known.items() if name.endswith(":gpus")
    }
    return declared_gpus(connection, numbers) if numbers else {}


def _declared(bot_id: int, known: Mapping[str, Counter], gpus: tuple[int, ...] | None) -> Declared:
    # A part of a GPU is taken of a device, which says more than the sum.
    found = [
        None if name == "gpu_milli" and gpus is not None else known.get(resource_counter(bot_id, name))
        for name in AMOUNTS
    ]
    return Declared(
        tuple(None if each is None or each.most is None else each.most - each.used for each in found),
        tuple(None if each is None else each.most for each in found),
        gpus,
    )


def missing_resource(need: Need, looked_at: Collection[Declared] | None) -> str:
    """The first resource of which no bot has enough left; `looked_at`: what these bots have, None if nobody has
    looked."""
    together = f"no bot with room has {' and '.join(f'{amount} {name}' for name, amount in need.items())} left at once"
    if looked_at is None:
        return together
    if not looked_at:
        return "no bot has room"
    for name, amount in need.items():
        most = max(_left_for(each, name) for each in looked_at)
        if most >= amount:
            continue
        if name == "gpus":
            return f"it takes {amount} whole GPUs, and no bot with room has more than {most:g} free"
        if name == "gpu_milli" and (sums := [sum(each.gpus) for each in looked_at if each.gpus]):
            although = f", although those of one bot have {max(sums)} together" if max(sums) >= amount else ""
            none = f"no GPU of a bot with room has more than {most:g} left{although}"
            return f"it takes {amount} gpu_milli of one GPU, and {none}"
        return f"it takes {amount} {name}, and no bot with room has more than {most:g} left"
    return together


def _left_for(declared: Declared, name: ResourceName) -> float:
    """The most of this resource that one job could be given of the bot."""
    if name == "gpus":
        return sum(left >= WHOLE_GPU for left in declared.gpus or ())
    if name == "gpu_milli" and declared.gpus is not None:
        return max(declared.gpus, default=0)
    left = declared.left[AMOUNTS.index(name)]
    return math.inf if left is None else left
