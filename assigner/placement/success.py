"""The strategy `success`: the bot whose work succeeds most, for the load that it has (Vapora, ADR-018)."""

import heapq
from collections.abc import Mapping, Sequence

from assigner.placement.strategy import Policy, Snapshot, Worth, decision, worth
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement


class Success:
    """Places job after job on the candidate that is worth most: success_rate / (1 + load)^load_power.

    The rate is that of the bot with jobs of the same label, 1 as long as nothing is known of it. Each placement adds to
    the load that the next one sees, which keeps the best bot from getting everything. Equals go to the lower bot id;
    a bot without units is no candidate. Cost: O((jobs + candidates x labels) log candidates).
    """

    wants_warm = False
    wants_success = True

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        rooms = {bot.id: bot.room for bots in snapshot.candidates for bot in bots}
        group = {job.id: nth for nth, group in enumerate(snapshot.groups) for job in group.jobs}
        benches: dict[tuple[int, str], _Bench] = {}
        placements: list[Placement] = []
        for job in snapshot.jobs:
            key = group[job.id], snapshot.label(job)
            if (bench := benches.get(key)) is None:
                rates = {bot.id: snapshot.rate(bot, key[1]) for bot in snapshot.candidates[key[0]]}
                bench = benches[key] = _Bench(snapshot.candidates[key[0]], rates, rooms, policy.load_power)
            bot = bench.best(job.units)
            if bot is None:
                continue
            placements.append(Placement(job.id, bot.id, decision(bot, bench.worth(bot), bench.size, how)))
            rooms[bot.id] -= job.units
        return placements


class _Bench:
    """A group's candidates in a heap by what they are worth for jobs of one label. Load only makes a bot worth less, so
    that an entry is never too low; `best` mends those that are too high."""

    def __init__(
        self, bots: Sequence[FreeBot], rates: Mapping[int, float], rooms: Mapping[int, int], load_power: float
    ) -> None:
        self.size = len(bots)
        self._rates, self._rooms, self._load_power = rates, rooms, load_power
        self._bots = {bot.id: bot for bot in bots if bot.capacity > 0}
        self._heap = [(-self.worth(bot).total, bot.id, rooms[bot.id]) for bot in self._bots.values()]
        heapq.heapify(self._heap)

    def worth(self, bot: FreeBot) -> Worth:
        """What the bot is worth with the room that it has left."""
        return worth(bot, room=self._rooms[bot.id], rate=self._rates[bot.id], load_power=self._load_power)

    def best(self, units: int) -> FreeBot | None:
        """The candidate that is worth most of those with so many free units."""
        while self._heap:
            _, bot_id, seen = self._heap[0]
            bot, room = self._bots[bot_id], self._rooms[bot_id]
            if room < units:
                heapq.heappop(self._heap)
            elif room != seen:
                heapq.heapreplace(self._heap, (-self.worth(bot).total, bot_id, room))
            else:
                return bot
        return None
