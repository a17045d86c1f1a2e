"""The strategy `success`: the bot whose work succeeds most, for the load that it has (Vapora, ADR-018)."""

import heapq
from collections.abc import Mapping, Sequence

from assigner.placement.strategy import Input, Policy, QuotaCopy, Snapshot, SuccessScore, decision, success_score
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement


class Success:
    """Places job after job on the candidate that is worth most: success_rate / (1 + load)^load_power.

    The rate is that of the bot with jobs of the same label, 1 as long as nothing is known of it. Each placement adds to
    the load that the next one sees, which keeps the best bot from getting everything. Equals go to the lower bot id;
    a bot without units is no candidate. Cost: O((jobs + candidates x labels) log candidates).
    """

    inputs = frozenset({Input.SUCCESS})

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        free_units_of = {bot.id: bot.free_units for bots in snapshot.candidates for bot in bots}
        group = {job.id: nth for nth, group in enumerate(snapshot.groups) for job in group.jobs}
        benches: dict[tuple[int, str], _CandidateHeap] = {}
        quotas = QuotaCopy(snapshot.headrooms)
        placements: list[Placement] = []
        for job in snapshot.jobs:
            if not quotas.allows(job):
                continue
            key = group[job.id], snapshot.label(job)
            if (bench := benches.get(key)) is None:
                rates = {bot.id: snapshot.rate(bot, key[1]) for bot in snapshot.candidates[key[0]]}
                bench = benches[key] = _CandidateHeap(
                    snapshot.candidates[key[0]], rates, free_units_of, policy.load_power
                )
            bot = bench.best(job.units)
            if bot is None:
                continue
            placements.append(
                Placement(job.id, bot.id, decision(bot, bench.success_score(bot).as_decision(), bench.size, how))
            )
            free_units_of[bot.id] -= job.units
            quotas.take(job)
        return placements


class _CandidateHeap:
    """A group's candidates in a heap by what they are worth for jobs of one label. Load only makes a bot worth less, so
    that an entry is never too low; `best` mends those that are too high."""

    def __init__(
        self, bots: Sequence[FreeBot], rates: Mapping[int, float], free_units_of: Mapping[int, int], load_power: float
    ) -> None:
        self.size = len(bots)
        self._rates, self._free_units_of, self._load_power = rates, free_units_of, load_power
        self._bots = {bot.id: bot for bot in bots if bot.capacity > 0}
        self._heap = [(-self.success_score(bot).total, bot.id, free_units_of[bot.id]) for bot in self._bots.values()]
        heapq.heapify(self._heap)

    def success_score(self, bot: FreeBot) -> SuccessScore:
        """What the bot is worth with the room that it has left."""
        return success_score(
            bot, free_units=self._free_units_of[bot.id], rate=self._rates[bot.id], load_power=self._load_power
        )

    def best(self, units: int) -> FreeBot | None:
        """The candidate that is worth most of those with so many free units."""
        while self._heap:
            _, bot_id, seen = self._heap[0]
            bot, free_units = self._bots[bot_id], self._free_units_of[bot_id]
            if free_units < units:
                heapq.heappop(self._heap)
            elif free_units != seen:
                heapq.heapreplace(self._heap, (-self.success_score(bot).total, bot_id, free_units))
            else:
                return bot
        return None
