"""The strategy `capacity`: the highest weighted score among the candidates (BuildGrid's AssignByCapacity)."""

import heapq
from collections.abc import Mapping, Sequence
from functools import cached_property

from assigner.strategies import Policy, Snapshot, decision
from schema.candidates import FreeBot
from schema.moves import Placement


class Capacity:
    """Places job after job on the best of its candidates, on a working copy of the bots' room.

    A later job sees what an earlier one took, also where groups share bots. Equal scores go to the candidate
    that came first. Cost: O((jobs + candidates) log candidates), and one comparison for each job and locality hit;
    with a negative weight of locality, for each such job and candidate.
    """

    wants_warm = False

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        copy = _Copy(snapshot.candidates, policy)
        warm = snapshot.warm()
        benches = {
            job.id: (nth, bench)
            for nth, (group, bots) in enumerate(zip(snapshot.groups, snapshot.candidates, strict=True))
            for bench in [_Bench(bots, copy, units=group.units)]
            for job in group.jobs
        }
        placements: list[Placement] = []
        for job in snapshot.jobs:
            nth, bench = benches[job.id]
            hits = () if job.locality_hint is None else warm.get((nth, job.locality_hint), ())
            bot = bench.best(hits)
            if bot is None:
                continue
            found = policy.score(bot, room=copy.rooms[bot.id], hit=bot in hits)
            copy.take(bot, job.units)
            bench.changed(bot)
            placements.append(Placement(job.id, bot.id, decision(bot, found, bench.size, how)))
        return placements


class _Copy:
    """The working copy: of each bot the room that is left, and what it scores with that, locality aside."""

    def __init__(self, candidates: Sequence[Sequence[FreeBot]], policy: Policy) -> None:
        self.policy = policy
        bots = {bot.id: bot for some in candidates for bot in some}
        self.rooms = {bot.id: bot.room for bot in bots.values()}
        self.totals = {bot.id: policy.score(bot, room=bot.room, hit=False).total for bot in bots.values()}

    def take(self, bot: FreeBot, units: int) -> None:
        """A job takes so many units of the bot."""
        self.rooms[bot.id] = room = self.rooms[bot.id] - units
        self.totals[bot.id] = self.policy.score(bot, room=room, hit=False).total


class _Bench:
    """A group's candidates in a heap by score. Entries go stale when a job takes room; `best` mends them."""

    def __init__(self, bots: Sequence[FreeBot], copy: _Copy, *, units: int) -> None:
        self._bots, self._copy, self._units = bots, copy, units

    @cached_property
    def _nth(self) -> dict[int, int]:
        return {bot.id: nth for nth, bot in enumerate(self._bots)}

    @cached_property
    def _heap(self) -> list[tuple[float, int, int]]:
        totals, rooms = self._copy.totals, self._copy.rooms
        heap = [(-totals[bot.id], nth, rooms[bot.id]) for nth, bot in enumerate(self._bots)]
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
        policy, rooms = self._copy.policy, self._copy.rooms
        contenders = [top, *warm] if policy.weights.locality >= 0 else self._bots
        ids = {bot.id for bot in warm}
        return max(
            (bot for bot in contenders if rooms[bot.id] >= self._units),
            key=lambda bot: (policy.score(bot, room=rooms[bot.id], hit=bot.id in ids).total, -self._nth[bot.id]),
        )

    def _top(self) -> FreeBot | None:
        """The first with the highest score of those with room, locality aside."""
        heap, rooms = self._heap, self._copy.rooms
        while heap:
            _, nth, seen = heap[0]
            bot = self._bots[nth]
            room = rooms[bot.id]
            if room < self._units:
                heapq.heappop(heap)
            elif room != seen:
                heapq.heapreplace(heap, (-self._copy.totals[bot.id], nth, room))
            else:
                return bot
        return None

    def changed(self, bot: FreeBot) -> None:
        """The bot has less room; a score that has risen by that, and only such a one, would otherwise stay buried."""
        if self._copy.policy.weights.capacity < 0:
            entry = -self._copy.totals[bot.id], self._nth[bot.id], self._copy.rooms[bot.id]
            heapq.heappush(self._heap, entry)
