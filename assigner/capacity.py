"""The strategy `capacity`: the highest weighted score among the candidates (BuildGrid's AssignByCapacity)."""

import heapq
from collections.abc import Mapping, Sequence

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
        rooms = {bot.id: bot.room for candidates in snapshot.candidates for bot in candidates}
        warm = snapshot.warm()
        benches = {
            job.id: (nth, bench)
            for nth, (group, bots) in enumerate(zip(snapshot.groups, snapshot.candidates, strict=True))
            for bench in [_Bench(bots, rooms, units=group.units, policy=policy)]
            for job in group.jobs
        }
        placements: list[Placement] = []
        for job in snapshot.jobs:
            nth, bench = benches[job.id]
            hits = () if job.locality_hint is None else warm.get((nth, job.locality_hint), ())
            bot = bench.best(hits)
            if bot is None:
                continue
            found = policy.score(bot, room=rooms[bot.id], hit=bot in hits)
            rooms[bot.id] -= job.units
            bench.changed(bot)
            placements.append(Placement(job.id, bot.id, decision(bot, found, bench.size, how)))
        return placements


class _Bench:
    """A group's candidates in a heap by score. Entries go stale when a job takes room; `best` mends them."""

    def __init__(self, bots: Sequence[FreeBot], rooms: dict[int, int], *, units: int, policy: Policy) -> None:
        self._bots, self._rooms, self._units, self._policy = bots, rooms, units, policy
        self._nth = {bot.id: nth for nth, bot in enumerate(bots)}
        self._heap = [self._entry(bot) for bot in bots]
        heapq.heapify(self._heap)

    @property
    def size(self) -> int:
        """How many candidates there were."""
        return len(self._bots)

    def best(self, warm: Sequence[FreeBot]) -> FreeBot | None:
        """The candidate with the highest score that has room for the group's units; `warm` are locality hits."""
        top = self._top()
        if top is None or not warm:
            return top
        contenders = [top, *warm] if self._policy.weights.locality >= 0 else self._bots
        ids = {bot.id for bot in warm}
        return max(
            (bot for bot in contenders if self._rooms[bot.id] >= self._units),
            key=lambda bot: (self._total(bot, hit=bot.id in ids), -self._nth[bot.id]),
        )

    def _top(self) -> FreeBot | None:
        """The first with the highest score of those with room, locality aside."""
        while self._heap:
            _, nth, seen = self._heap[0]
            bot = self._bots[nth]
            if self._rooms[bot.id] < self._units:
                heapq.heappop(self._heap)
            elif self._rooms[bot.id] != seen:
                heapq.heapreplace(self._heap, self._entry(bot))
            else:
                return bot
        return None

    def changed(self, bot: FreeBot) -> None:
        """The bot has less room; a score that has risen by that, and only such a one, would otherwise stay buried."""
        if self._policy.weights.capacity < 0:
            heapq.heappush(self._heap, self._entry(bot))

    def _entry(self, bot: FreeBot) -> tuple[float, int, int]:
        return -self._total(bot), self._nth[bot.id], self._rooms[bot.id]

    def _total(self, bot: FreeBot, *, hit: bool = False) -> float:
        return self._policy.score(bot, room=self._rooms[bot.id], hit=hit).total
