"""One consistent read of the bots that a batch of jobs could go to."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil, gcd
from typing import TypeVar

from sqlalchemy import Connection

from assigner.placement.strategy import Group, Snapshot, group_jobs
from schema.fleet import bulk_candidates, candidates, success
from schema.fleet.bulk_candidates import WHOLE_RING, Part, SampledBot, WindowScan
from schema.fleet.candidates import MAX_BOTS_READ, CandidateRequest, FreeBot
from schema.picking.pick import ReadyJob

# What an assigner remembers of its pool: which kinds of bots offer what which requirement sets ask for.


#: Facts remembered at most, of about a hundred bytes each; beyond that it is begun anew.
FACTS = 100_000
#: Samples in which a group is left out of the window at most, once it has fallen short there.
SKIPPED = 32

#: What makes jobs a group.
GroupKey = tuple[int, int, int, int]


class OfferCache:
    """(requirement set, kind of bots) → whether they offer it, as far as it is known.

    Such a fact never changes, and forgetting one only costs a question. It belongs to one database and one thread.
    Besides, `kinds` is how many kinds of bots the latest window held, and groups of jobs that so few bots could take
    that a window does not hold enough of them are passed by: once, then twice, four times, at most `SKIPPED` times.
    """

    def __init__(self, limit: int = FACTS) -> None:
        self.kinds = 1
        self._limit, self._size = limit, 0
        self._known: dict[int, dict[int, bool]] = {}
        self._rare: dict[GroupKey, tuple[int, int]] = {}

    def of(self, platform: int) -> dict[int, bool]:
        """Kind → whether its bots offer it, for one requirement set."""
        return self._known.get(platform, {})

    def learn(self, facts: Iterable[tuple[int, int, bool]]) -> None:
        """Remember facts: the requirement set, the kind, and whether its bots offer it."""
        for platform, kind, offered in facts:
            if self._size >= self._limit:
                self._forget()
            kinds = self._known.setdefault(platform, {})
            self._size += kind not in kinds
            kinds[kind] = offered

    def is_skipped(self, group: GroupKey) -> bool:
        """Whether a group is to be left out this time."""
        left, turns = self._rare.get(group, (0, 0))
        if left:
            self._rare[group] = left - 1, turns
        return left > 0

    def record_shortage(self, group: GroupKey) -> None:
        """A window did not hold enough bots for it."""
        if len(self._rare) >= self._limit:
            self._forget()
        _, turns = self._rare.get(group, (0, 0))
        turns = min(2 * turns or 1, SKIPPED)
        self._rare[group] = turns, turns

    def record_enough(self, group: GroupKey) -> None:
        """A window did hold enough."""
        self._rare.pop(group, None)

    def _forget(self) -> None:
        self._known.clear()
        self._rare.clear()
        self._size = 0


# Candidates for many groups of jobs at once, drawn from one window of free bots.


#: Rounds in which groups draw; between two of them it is asked what the kinds that they came upon offer.
ROUNDS = 3
#: Facts that are asked for at once, each at some 3 µs of the server and as much of ours.
KINDS_PER_QUERY = 10_000
#: How many times the room that a group needs fewer bots than it wants to draw must have to suffice.
AMPLE = 2
#: Kinds of bots up to which a window is sorted by kind; of more, groups look at one bot after another.
SORTED = 64

#: Cohort, instance, pool of the bots of one walk.
ServiceWay = tuple[int, int | None, str | None]


@dataclass(frozen=True)
class CandidatePile:
    """Bots of a window, those of one walk or those that serve one instance; `whole` if no others are free."""

    bots: list[SampledBot]
    kinds: dict[int, list[SampledBot]]
    is_complete: bool

    @cached_property
    def _offering(self) -> dict[tuple[int, ...], list[SampledBot]]:
        return {tuple(self.kinds): self.bots}

    def offering(self, known: dict[int, bool]) -> list[SampledBot]:
        """The bots of the kinds that are known to offer something."""
        kinds = tuple(kind for kind in self.kinds if known[kind])
        if kinds not in self._offering:
            self._offering[kinds] = [seen for kind in kinds for seen in self.kinds[kind]]
        return self._offering[kinds]


@dataclass
class GroupSampler:
    """A group with the bots to draw from, and where it begins and how it goes on, of which chance decides once."""

    want: CandidateRequest
    jobs: int
    sample_size: int
    pile: CandidatePile
    start: float
    stride: float
    found: list[FreeBot] | None = None

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What its jobs have in common."""
        return self.want.cohort, self.want.instance, self.want.platform, self.want.units

    def draw(self, known: dict[int, bool]) -> list[SampledBot]:
        """Draw, or else return bots of which it has to be known whether they offer what the group requires."""
        if len(self.pile.kinds) <= SORTED:
            unknown = [bots[0] for kind, bots in self.pile.kinds.items() if kind not in known]
            if unknown:
                return unknown
            bots = self.pile.offering(known)
        else:
            bots = self.pile.bots
        drawn, unknown = self._around(bots, known)
        if not unknown and (self.pile.is_complete or len(drawn) == self.want.count or self._is_enough(drawn)):
            self.found = [seen.bot for seen in drawn]
            self._reserve_units(drawn)
        return unknown

    def _is_enough(self, drawn: Sequence[SampledBot]) -> bool:
        """Whether they are a sample, and have together so much room that its jobs will not fill them."""
        need = AMPLE * self.want.units * self.jobs
        return len(drawn) >= self.sample_size and sum(seen.left for seen in drawn) >= need

    def _around(self, bots: list[SampledBot], known: dict[int, bool]) -> tuple[list[SampledBot], list[SampledBot]]:
        """Enough bots that may do, and those of them that are not known to: from a random place in random steps, so
        that two groups that begin with the same bot go on with different ones."""
        drawn: list[SampledBot] = []
        unknown: list[SampledBot] = []
        is_complete, units, count, size = self.pile.is_complete, self.want.units, self.want.count, len(bots)
        at, step = int(self.start * size), _step(self.stride, size)
        for _ in range(size):
            seen = bots[at]
            at = (at + step) % size
            if (seen.bot.free_units if is_complete else seen.left) < units:
                continue
            offered = known.get(seen.kind)
            if offered is None:
                unknown.append(seen)
            elif not offered:
                continue
            drawn.append(seen)
            if len(drawn) == count:
                break
        return drawn, unknown

    def _reserve_units(self, drawn: Sequence[SampledBot]) -> None:
        """Its jobs may go to the first of them: of bots that are not all, no more are drawn than they have room for."""
        if not self.pile.is_complete:
            each = ceil(self.jobs / len(drawn))
            for seen in islice(drawn, self.jobs):
                seen.left -= self.want.units * each


def sample_window(
    connection: Connection,
    groups: Sequence[Group],
    *,
    sample_size: int,
    offer_cache: OfferCache,
    chance: random.Random,
    within: Part = WHOLE_RING,
) -> list[list[FreeBot]]:
    """Candidates for each group, read without locks: a random draw from a window that is a random part of the free
    bots `within` a part of the ring, as large as the batch.

    A group for which the window holds too few, though there may be more, is sampled by itself.
    """
    piles = _read_piles(
        connection, groups, sample_size=sample_size, kinds=offer_cache.kinds, chance=chance, within=within
    )
    if within == WHOLE_RING:
        offer_cache.kinds = max(len(pile.kinds) for pile in piles.values())
    drawers = [
        GroupSampler(
            group.wanted(sample_size),
            len(group.jobs),
            sample_size,
            piles[group.cohort, group.instance],
            chance.random(),
            chance.random(),
        )
        for group in groups
    ]
    tried = waiting = [each for each in drawers if within != WHOLE_RING or not offer_cache.is_skipped(each.key)]
    for turn in range(ROUNDS):
        unknown: dict[tuple[int, int], int] = {}
        undecided: list[GroupSampler] = []
        for each in waiting:
            platform = each.want.platform
            new = each.draw(offer_cache.of(platform))
            if new:
                undecided.append(each)
                unknown |= {(platform, seen.kind): seen.bot.id for seen in new}
        waiting = undecided
        if not unknown or turn == ROUNDS - 1:
            break
        asked = [(platform, bot_id) for (platform, _), bot_id in islice(unknown.items(), KINDS_PER_QUERY)]
        offer_cache.learn(bulk_candidates.read_offers(connection, asked))
    # That a part of the bots does not do for a group says nothing of the next part.
    for each in tried if within == WHOLE_RING else ():
        (offer_cache.record_shortage if each.found is None else offer_cache.record_enough)(each.key)
    _sample_alone(connection, [each for each in drawers if each.found is None], chance=chance)
    return [each.found or [] for each in drawers]


def _sample_alone(connection: Connection, short: Sequence[GroupSampler], *, chance: random.Random) -> None:
    if short:
        sampled = candidates.sample(connection, [each.want for each in short], chance=chance)
        for each, found in zip(short, sampled, strict=True):
            each.found = found


def _read_piles(
    connection: Connection,
    groups: Sequence[Group],
    *,
    sample_size: int,
    kinds: int,
    chance: random.Random,
    within: Part,
) -> dict[tuple[int, int], CandidatePile]:
    """By cohort and instance. Each walk is as long as it has jobs, and longer by its share of a margin, at least by a
    sample: then the last job finds as many bots that are free still as the first. The margin is `LOOK`, or two samples
    of each of the `kinds` that are expected, four times as many at most."""
    pools = bulk_candidates.pools_of(connection, {group.instance for group in groups})
    ways = {
        (group.cohort, group.instance): _service_ways(group.cohort, group.instance, pools.get(group.instance))
        for group in groups
    }
    jobs: Counter[ServiceWay] = Counter()
    for group in groups:
        for way in ways[group.cohort, group.instance]:
            jobs[way] += len(group.jobs)
    share = min(max(MAX_BOTS_READ, 2 * sample_size * kinds), 4 * MAX_BOTS_READ) / sum(
        len(group.jobs) for group in groups
    )
    scans = [WindowScan(*way, limit=some + max(sample_size, ceil(share * some))) for way, some in jobs.items()]
    found = bulk_candidates.read_windows(connection, scans, chance=chance, within=within)
    parts = {
        way: CandidatePile(bots, _by_kind(bots), is_complete=within == WHOLE_RING and len(bots) < scan.limit)
        for way, scan, bots in zip(jobs, scans, found, strict=True)
    }
    return {key: _joined_pile([parts[way] for way in own]) for key, own in ways.items()}


def _service_ways(cohort: int, instance: int, pool: str | None) -> list[ServiceWay]:
    ways: list[ServiceWay] = [(cohort, None, None), (cohort, instance, None)]
    return ways if pool is None else [*ways, (cohort, None, pool)]


def _by_kind(bots: Sequence[SampledBot]) -> dict[int, list[SampledBot]]:
    found: dict[int, list[SampledBot]] = {}
    for seen in bots:
        found.setdefault(seen.kind, []).append(seen)
    return found


def _joined_pile(parts: Sequence[CandidatePile]) -> CandidatePile:
    joined, *others = [part for part in parts if part.bots] or parts[:1]
    for part in others:
        kinds = joined.kinds | {kind: [*joined.kinds.get(kind, ()), *bots] for kind, bots in part.kinds.items()}
        joined = CandidatePile([*joined.bots, *part.bots], kinds, is_complete=joined.is_complete and part.is_complete)
    return joined


def _step(stride: float, size: int) -> int:
    """A step, by chance `stride` from 0 to 1, that comes to all of `size` places before it is back at the first."""
    step = 1 + int(stride * size)
    while gcd(step, size) > 1:
        step = step % size + 1
    return step


S = TypeVar("S", bound=Snapshot)

#: Jobs from which on assigners keep out of each other's way: with large batches they want the same bots.
CROWD = 20
#: Groups up to which each is sampled by itself if they have few jobs, and from a part of the bots where nobody else
#: places if they have many. More groups share a window, and all of the bots.
FEW = 4


def sample_snapshot(
    connection: Connection,
    jobs: Sequence[ReadyJob],
    *,
    sample_size: int,
    offer_cache: OfferCache,
    chance: random.Random,
    with_warm: bool = False,
    with_success: bool = False,
) -> Snapshot:
    """Candidates for every group of the jobs, read without locks; `with_warm` adds bots that hold the jobs' hints,
    `with_success` the rates at which the candidates have succeeded with jobs of the same labels.

    `offers` is what is remembered of this pool's bots; more of it may be learnt.
    """
    groups = group_jobs(jobs)
    if len(groups) <= FEW and len(jobs) < CROWD:
        found = candidates.sample(connection, [group.wanted(sample_size) for group in groups], chance=chance)
    else:
        part = (
            bulk_candidates.claim_part(connection, chance=chance) if len(groups) <= FEW else bulk_candidates.WHOLE_RING
        )
        found = sample_window(
            connection, groups, sample_size=sample_size, offer_cache=offer_cache, chance=chance, within=part
        )
    if with_warm:
        found = _with_warm(connection, groups, found)
    seen = _with_hits(connection, jobs, groups, found)
    return with_rates(connection, seen) if with_success else seen


def healthy_snapshot(connection: Connection, jobs: Sequence[ReadyJob], *, with_success: bool = False) -> Snapshot:
    """For every group as many free bots as it has jobs, the first that nobody else holds, locked."""
    groups = group_jobs(jobs)
    found = [candidates.any_free(connection, group.wanted(1)) for group in groups]
    seen = _with_hits(connection, jobs, groups, found)
    return with_rates(connection, seen) if with_success else seen


def without_candidates(seen: Snapshot) -> list[Group]:
    """The groups for which not one candidate was found."""
    return [group for group, found in zip(seen.groups, seen.candidates, strict=True) if not found]


def groups_too_large(connection: Connection, groups: Sequence[Group], *, chance: random.Random) -> list[Group]:
    """Those groups whose jobs need more units than any of the free bots has.

    Where no bot is free at all, another assigner has been faster, and the jobs simply wait for their turn.
    """
    groups = [group for group in groups if group.units > 1]
    if not groups:
        return []
    probes = [CandidateRequest(group.cohort, group.instance, group.platform, units=1, count=1) for group in groups]
    free = candidates.sample(connection, probes, chance=chance)
    return [group for group, found in zip(groups, free, strict=True) if found]


def _with_warm(
    connection: Connection, groups: Sequence[Group], found: Sequence[Sequence[FreeBot]]
) -> list[list[FreeBot]]:
    """The candidates of each group, then those bots that hold a hint of its jobs and are not among them."""
    wanted = [
        (nth, hint)
        for nth, group in enumerate(groups)
        for hint in dict.fromkeys(job.locality_hint for job in group.jobs)
        if hint is not None
    ]
    warm = candidates.warm(
        connection, [(replace(groups[nth].wanted(1), count=candidates.WARM_LIMIT), hint) for nth, hint in wanted]
    )
    merged = [{bot.id: bot for bot in bots} for bots in found]
    for (nth, _), bots in zip(wanted, warm, strict=True):
        for bot in bots:
            merged[nth].setdefault(bot.id, bot)
    return [list(bots.values()) for bots in merged]


def _with_hits(
    connection: Connection, jobs: Sequence[ReadyJob], groups: Sequence[Group], found: Sequence[Sequence[FreeBot]]
) -> Snapshot:
    bot_ids = {bot.id for bots in found for bot in bots}
    hints = {job.locality_hint for job in jobs if job.locality_hint is not None}
    return Snapshot(jobs, groups, found, candidates.hinted(connection, sorted(bot_ids), sorted(hints)))


def with_rates(connection: Connection, seen: S) -> S:
    """The snapshot with what is known of how the candidates have succeeded with jobs of the same labels."""
    labels = success.job_labels(connection, [job.id for job in seen.jobs])
    bot_ids = sorted({bot.id for bots in seen.candidates for bot in bots})
    return replace(seen, labels=labels, rates=success.success_rates(connection, bot_ids, sorted({*labels.values()})))
