"""The strategy `capacity`: the highest weighted score among the candidates (BuildGrid's AssignByCapacity)."""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

from assigner.placement.strategy import NOTHING_ELSE, Policy, QuotaCopy, Score, Snapshot, decision
from schema.fleet.candidates import FreeBot
from schema.fleet.success import UNKNOWN
from schema.moves.grant import Placement


class Capacity:
    """Places job after job on the best of its candidates, on a working copy of the bots' room.

    A later job sees what an earlier one took, also where groups share bots. Equal scores go to the candidate
    that came first. Cost: O((jobs + candidates) log candidates), and one comparison for each job and locality hit;
    with a negative weight of locality, for each such job and candidate.
    """

    inputs = NOTHING_ELSE

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        copy, quotas = _WorkingCopy(snapshot, policy), QuotaCopy(snapshot.headrooms)
        warm = snapshot.warm()
        benches: dict[tuple[int, str], _CandidateHeap] = {}
        places: dict[int, tuple[int, _CandidateHeap]] = {}
        for nth, (group, bots) in enumerate(zip(snapshot.groups, snapshot.candidates, strict=True)):
            for job in group.jobs:
                label = snapshot.label(job)
                if (bench := benches.get((nth, label))) is None:
                    bench = benches[nth, label] = _CandidateHeap(bots, copy, label, units=group.units)
                places[job.id] = nth, bench
        placements: list[Placement] = []
        for job in snapshot.jobs:
            if not quotas.allows(job):
                continue
            nth, bench = places[job.id]
            hits = () if job.locality_hint is None else warm.get((nth, job.locality_hint), ())
            bot = bench.best(hits)
            if bot is None:
                continue
            found = copy.score(bot, bench.label, hit=bot in hits)
            copy.take(bot, job.units)
            quotas.take(job)
            if copy.rises:
                for each in benches.values():
                    each.changed(bot)
            placements.append(Placement(job.id, bot.id, decision(bot, found.as_decision(), bench.size, how)))
        return placements


class _WorkingCopy:
    """The working copy: of each bot the room that is left, and what it scores with that, locality aside."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.snapshot, self.policy = snapshot, policy
        self.rises = policy.weights.capacity < 0 or policy.weights.success < 0
        self._by_rate = policy.weights.success != 0
        self._bots = {bot.id: bot for some in snapshot.candidates for bot in some}
        self.free_units_of = {bot.id: bot.free_units for bot in self._bots.values()}
        self._totals: dict[str, dict[int, float]] = {}
        self._scores: dict[Hashable, Score] = {}

    def totals(self, label: str) -> dict[int, float]:
        """What each bot scores for jobs of this label, kept current."""
        if label not in self._totals:
            self._totals[label] = {bot.id: self.score(bot, label, hit=False).total for bot in self._bots.values()}
        return self._totals[label]

    def take(self, bot: FreeBot, units: int) -> None:
        """A job takes so many units of the bot."""
        self.free_units_of[bot.id] -= units
        for label, totals in self._totals.items():
            totals[bot.id] = self.score(bot, label, hit=False).total

    def score(self, bot: FreeBot, label: str, *, hit: bool) -> Score:
        """Its score for a job of this label, with the room that it has left. Most of a batch's bots are alike, so each
        score is worked out once."""
        free_units = self.free_units_of[bot.id]
        rate = self.snapshot.rate(bot, label) if self._by_rate else UNKNOWN
        alike = bot.priority, bot.capacity, free_units, hit, rate
        if (found := self._scores.get(alike)) is None:
            found = self._scores[alike] = self.policy.score(bot, free_units=free_units, hit=hit, rate=rate)
        return found


class _CandidateHeap:
    """The candidates of a group's jobs of one label in a heap by score. Entries go stale when a job takes room; `best`
    mends them."""

    def __init__(self, bots: Sequence[FreeBot], copy: _WorkingCopy, label: str, *, units: int) -> None:
        self.label, self._bots, self._copy, self._units = label, bots, copy, units
        self._totals = copy.totals(label)

    @cached_property
    def _nth(self) -> dict[int, int]:
        return {bot.id: nth for nth, bot in enumerate(self._bots)}

    @cached_property
    def _heap(self) -> list[tuple[float, int, int]]:
        totals, free_units_of = self._totals, self._copy.free_units_of
        heap = [(-totals[bot.id], nth, free_units_of[bot.id]) for nth, bot in enumerate(self._bots)]
        heapq.heapify(heap)
        return heap

    @property
    def size(self) -> int:
        """How many candidates there were."""
        return len(self._bots)

    def best(self, warm: Sequence[FreeBot]) -> FreeBot | None:
        """The candidate with the highest score that has room for the group's units; `warm` are locality hits."""
        top = self._top()
        if top is None or not warm:
            return top
        policy, free_units_of = self._copy.policy, self._copy.free_units_of
        contenders = [top, *warm] if policy.weights.locality >= 0 else self._bots
        ids = {bot.id for bot in warm}
        return max(
            (bot for bot in contenders if free_units_of[bot.id] >= self._units),
            key=lambda bot: (self._copy.score(bot, self.label, hit=bot.id in ids).total, -self._nth[bot.id]),
        )

    def _top(self) -> FreeBot | None:
        """The first with the highest score of those with room, locality aside."""
        heap, free_units_of = self._heap, self._copy.free_units_of
        while heap:
            _, nth, seen = heap[0]
            bot = self._bots[nth]
            free_units = free_units_of[bot.id]
            if free_units < self._units:
                heapq.heappop(heap)
            elif free_units != seen:
                heapq.heapreplace(heap, (-self._totals[bot.id], nth, free_units))
            else:
                return bot
        return None

    def changed(self, bot: FreeBot) -> None:
        """The bot has less room and may score more for that, which would otherwise stay buried."""
        nth = self._nth.get(bot.id)
        if nth is not None:
            heapq.heappush(self._heap, (-self._totals[bot.id], nth, self._copy.free_units_of[bot.id]))
