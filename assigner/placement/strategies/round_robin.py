"""The strategy `round-robin`: one bot after the other, and what an assigner remembers of whose turn it was."""

import heapq
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from assigner.placement.strategy import Input, Policy, QuotaCopy, Snapshot, TurnCopy
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement

#: The most bots whose turns an assigner remembers. If there are more, it forgets the half that was served longest ago.
MAX_REMEMBERED = 100_000


class RoundRobin:
    """Places job after job on the candidate that has waited longest for a job of this assigner.

    A bot that has not had one yet comes before all others; of several such bots the one that was registered first. A
    bot without room is passed over and comes as soon as it has room. Neither load nor success nor the bot's priority
    counts. Cost: O((jobs + candidates) log candidates) for each group of alike jobs.
    """

    inputs = frozenset({Input.TURNS})

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        free_units_of = {bot.id: bot.free_units for bots in snapshot.candidates for bot in bots}
        group = {job.id: nth for nth, group in enumerate(snapshot.groups) for job in group.jobs}
        turns, quotas = TurnCopy(snapshot.turns), QuotaCopy(snapshot.headrooms)
        queues = [_BotQueue(bots, free_units_of, turns) for bots in snapshot.candidates]
        placements: list[Placement] = []
        for job in snapshot.jobs:
            if not quotas.allows(job):
                continue
            queue = queues[group[job.id]]
            bot = queue.first(job.units)
            if bot is None:
                continue
            details = {"bot": bot.name, "candidates": queue.size, "last_turn": turns.last.get(bot.id)}
            placements.append(Placement(job.id, bot.id, {**details, **how}))
            free_units_of[bot.id] -= job.units
            turns.take(bot.id)
            quotas.take(job)
        return placements


class _BotQueue:
    """A group's candidates in a heap by the turn that each last had. A turn only moves a bot back, so that an entry is
    never too late; `first` mends those that are too early."""

    def __init__(self, bots: Sequence[FreeBot], free_units_of: Mapping[int, int], turns: TurnCopy) -> None:
        self.size = len(bots)
        self._free_units_of, self._turns = free_units_of, turns
        self._bots = {bot.id: bot for bot in bots}
        self._heap = [(turns.last.get(bot.id, 0), bot.id) for bot in bots]
        heapq.heapify(self._heap)

    def first(self, units: int) -> FreeBot | None:
        """The candidate with so many free units that has waited longest; all jobs of a group take as many units."""
        while self._heap:
            seen, bot_id = self._heap[0]
            turn = self._turns.last.get(bot_id, 0)
            if self._free_units_of[bot_id] < units:
                heapq.heappop(self._heap)
            elif turn != seen:
                heapq.heapreplace(self._heap, (turn, bot_id))
            else:
                return self._bots[bot_id]
        return None


class Rotation:
    """The turn in which each bot last received a job from one assigner. It belongs to one thread.

    A turn counts once its transaction has been committed; until then `undo` takes it back.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._before: dict[int, int | None] = {}
        self._turn = 0

    @property
    def last(self) -> Mapping[int, int]:
        """The turns by the bots' ids, from 1; a bot that has received nothing, or is forgotten, has none."""
        return MappingProxyType(self._last)

    def give(self, bot_ids: Sequence[int]) -> None:
        """These bots have received a job each, in this order."""
        for bot_id in bot_ids:
            self._turn += 1
            self._before.setdefault(bot_id, self._last.get(bot_id))
            self._last[bot_id] = self._turn

    def keep(self) -> None:
        """The turns since the last call are committed."""
        self._before.clear()
        if len(self._last) > MAX_REMEMBERED:
            latest = heapq.nlargest(MAX_REMEMBERED // 2, self._last.items(), key=lambda each: each[1])
            self._last = dict(latest)

    def undo(self) -> None:
        """Forget the turns that were not committed."""
        for bot_id, turn in self._before.items():
            if turn is None:
                del self._last[bot_id]
            else:
                self._last[bot_id] = turn
        self._before.clear()
