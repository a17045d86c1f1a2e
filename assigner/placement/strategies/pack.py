"""The strategy `pack`: the bot that the job fits most tightly, so that others stay free for large jobs.

Best fit over several resources. What a bot would have left is a vector, and the bot with the smallest one is chosen.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from assigner.placement.room import AMOUNTS, Demand, Room, RoomCopy, after, choose_gpus, fits
from assigner.placement.strategy import Group, Input, Policy, QuotaCopy, Snapshot, decision
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement
from schema.validation import WHOLE_GPU


class Score(Protocol):
    """How well a job fits on a bot."""

    @property
    def key(self) -> tuple[float, ...]:
        """The numbers by which bots are compared; the smallest is best."""

    def as_decision(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""


#: Returns the score of a bot that has this room, for a job that takes this of it.
Judge = Callable[[Room, Demand], Score]


@dataclass(frozen=True)
class Tightness:
    """What a bot would have left beside the job: the sum of the shares of its resources; less is tighter."""

    left_over: float

    @property
    def key(self) -> tuple[float, ...]:
        return (self.left_over,)

    def as_decision(self) -> dict[str, Any]:
        return {"left_over": round(self.left_over, 6)}


class Scale:
    """The largest amount of each resource that any candidate has, by which what is left is divided."""

    def __init__(self, snapshot: Snapshot) -> None:
        bots = {bot.id: bot for some in snapshot.candidates for bot in some}
        declared = [snapshot.declared[bot_id] for bot_id in bots if bot_id in snapshot.declared]
        self._units = max((bot.capacity for bot in bots.values()), default=0) or 1
        self._amounts = [max((each.most[nth] or 0 for each in declared), default=0) for nth in range(len(AMOUNTS))]

    def left_over(self, room: Room, demand: Demand) -> float:
        """Return the sum of what the job leaves of units and of each amount, divided by the largest of the candidates,
        and of each GPU, divided by a whole one. What it leaves of the GPU that it shares counts twice.

        Each GPU counts by itself, because a bot's GPUs are mostly the scarcest of what it has. A bot has as much as the
        largest one of what it has not declared.
        """
        rest = after(room, demand)
        found = rest.units / self._units
        for left, most in zip(rest.amounts, self._amounts, strict=True):
            if most:
                found += 1.0 if left is None else left / most
        if rest.gpus:
            found += sum(rest.gpus) / WHOLE_GPU
            if demand.gpu_milli and (chosen := choose_gpus(room.gpus, demand)):
                found += rest.gpus[chosen[-1]] / WHOLE_GPU
        return found


class Pack:
    """Places job after job on the candidate that has least left afterwards, on a working copy of the bots' room.

    Equals go to the lower priority number, then to the candidate that came first. Weights do not count. Cost:
    O((jobs + candidates) log candidates), and one more judgement of a bot for each group that shares it and has a job
    placed after it changed.
    """

    inputs = frozenset({Input.RESOURCES})

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        scale = Scale(snapshot)

        def judge(room: Room, demand: Demand) -> Score:
            return Tightness(scale.left_over(room, demand))

        return choose_least(snapshot, lambda _: judge, how=how)


def choose_least(
    snapshot: Snapshot, judge_of: Callable[[Group], Judge], *, how: Mapping[str, object]
) -> list[Placement]:
    """Place each job on the candidate of the smallest score that it fits, each on what those before it have left."""
    copy = RoomCopy((bot for bots in snapshot.candidates for bot in bots), snapshot.declared)
    quotas, placements = QuotaCopy(snapshot.headrooms), list[Placement]()
    bench_of: dict[int, _Bench] = {}
    benches_of: dict[int, list[_Bench]] = defaultdict(list)
    for group, bots in zip(snapshot.groups, snapshot.candidates, strict=True):
        bench = _Bench(bots, copy, snapshot.demand(group.jobs[0]), judge_of(group))
        bench_of.update(dict.fromkeys((job.id for job in group.jobs), bench))
        for bot in bots:
            benches_of[bot.id].append(bench)
    for job in snapshot.jobs:
        if not quotas.allows(job):
            continue
        bench = bench_of[job.id]
        if (best := bench.best()) is None:
            continue
        bot, score = best
        copy.take(bot.id, bench.demand)
        quotas.take(job)
        for each in benches_of[bot.id]:
            each.changed.add(bot.id)
        placements.append(Placement(job.id, bot.id, decision(bot, score.as_decision(), bench.size, how)))
    return placements


class _Bench:
    """The candidates of one group of alike jobs in a heap by score.

    changed: bots that have less room than when they were last judged, at first all. They are judged again when the
    group's next job is placed, once however many jobs they have taken meanwhile.
    """

    def __init__(self, bots: Sequence[FreeBot], copy: RoomCopy, demand: Demand, judge: Judge) -> None:
        self.demand, self.size, self.changed = demand, len(bots), {bot.id for bot in bots}
        self._places = {bot.id: nth for nth, bot in enumerate(bots)}
        self._bots, self._copy, self._judge = bots, copy, judge
        self._heap: list[tuple[tuple[float, ...], int, int]] = []
        self._scores: dict[int, Score] = {}

    def best(self) -> tuple[FreeBot, Score] | None:
        """Return the candidate of the smallest score of those that the job fits, and the score."""
        for bot_id in self.changed:
            self._judge_again(bot_id)
        self.changed.clear()
        while self._heap:
            key, _, nth = self._heap[0]
            bot = self._bots[nth]
            score = self._scores.get(bot.id)
            if score is not None and score.key == key:
                return bot, score
            heapq.heappop(self._heap)
        return None

    def _judge_again(self, bot_id: int) -> None:
        nth, room = self._places[bot_id], self._copy.of(bot_id)
        if fits(room, self.demand):
            score = self._scores[bot_id] = self._judge(room, self.demand)
            heapq.heappush(self._heap, (score.key, self._bots[nth].priority, nth))
        else:
            self._scores.pop(bot_id, None)
