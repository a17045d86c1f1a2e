"""Choosing bots for jobs: pure functions of what was read, with no database, clock or chance of their own."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from assigner.sampling import Group, SamplingSettings
from assigner.scoring import Score, Weights, score
from schema.candidates import FreeBot
from schema.moves import Placement
from schema.ready import ReadyJob


class StrategySettings(BaseModel):
    """Which strategy chooses the bot, and what it weighs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["capacity"] = "capacity"
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    weights: Weights = Field(default_factory=Weights)


@dataclass(frozen=True)
class Snapshot:
    """What a choice is made from: the jobs in their order, for each group of them its candidates in random order,
    and the (bot, hint) pairs that are locality hits."""

    jobs: Sequence[ReadyJob]
    groups: Sequence[Group]
    candidates: Sequence[Sequence[FreeBot]]
    hits: frozenset[tuple[int, str]]


def choose(snapshot: Snapshot, weights: Weights, *, how: Mapping[str, object]) -> list[Placement]:
    """Place job after job on the best of its candidates, on a working copy of the bots' room.

    A later job sees what an earlier one took, also where groups share bots. Equal scores go to the candidate
    that came first, and candidates come in random order. `how` is stored with every decision. Cost:
    O((jobs + candidates) log candidates); a job with a locality hit compares all its candidates.
    """
    rooms = {bot.id: bot.room for candidates in snapshot.candidates for bot in candidates}
    benches = {
        job.id: bench
        for group, bots in zip(snapshot.groups, snapshot.candidates, strict=True)
        for bench in [_Bench(bots, rooms, units=group.units, weights=weights)]
        for job in group.jobs
    }
    placements: list[Placement] = []
    for job in snapshot.jobs:
        bench = benches[job.id]
        bot = bench.best(job, snapshot.hits)
        if bot is None:
            continue
        hit = job.locality_hint is not None and (bot.id, job.locality_hint) in snapshot.hits
        found = score(bot, room=rooms[bot.id], hit=hit, weights=weights)
        rooms[bot.id] -= job.units
        bench.changed(bot)
        placements.append(Placement(job.id, bot.id, _decision(bot, found, bench.size, how)))
    return placements


class _Bench:
    """A group's candidates in a heap by score. Entries go stale when a job takes room; `best` mends them."""

    def __init__(self, bots: Sequence[FreeBot], rooms: dict[int, int], *, units: int, weights: Weights) -> None:
        self._bots, self._rooms, self._units, self._weights = bots, rooms, units, weights
        self._nth = {bot.id: nth for nth, bot in enumerate(bots)}
        self._heap = [self._entry(bot) for bot in bots]
        heapq.heapify(self._heap)

    @property
    def size(self) -> int:
        """How many candidates there were."""
        return len(self._bots)

    def best(self, job: ReadyJob, hits: frozenset[tuple[int, str]]) -> FreeBot | None:
        """The candidate with the highest score that has room for the group's units."""
        hint = job.locality_hint
        if hint is not None:
            warm = {bot.id for bot in self._bots if (bot.id, hint) in hits}
            if warm:
                return self._best_of_all(warm)
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
        """The bot's room has changed; a score that has risen by that would otherwise stay buried."""
        heapq.heappush(self._heap, self._entry(bot))

    def _entry(self, bot: FreeBot) -> tuple[float, int, int]:
        return -self._total(bot), self._nth[bot.id], self._rooms[bot.id]

    def _best_of_all(self, warm: set[int]) -> FreeBot | None:
        fitting = [bot for bot in self._bots if self._rooms[bot.id] >= self._units]
        return max(fitting, key=lambda bot: self._total(bot, hit=bot.id in warm), default=None)

    def _total(self, bot: FreeBot, *, hit: bool = False) -> float:
        return score(bot, room=self._rooms[bot.id], hit=hit, weights=self._weights).total


def _decision(bot: FreeBot, found: Score, candidates: int, how: Mapping[str, object]) -> dict[str, object]:
    return {"bot": bot.name, "candidates": candidates, "score": found.stored(), **how}
