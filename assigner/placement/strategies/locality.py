"""The strategy `locality`: a bot that lately worked on the job's locality hint, whatever the others would score."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from assigner.placement.strategy import EVERY, Input, Policy, QuotaCopy, Score, Snapshot, Strategy, TurnCopy, decision
from schema.fleet.candidates import FreeBot
from schema.moves.grant import Placement
from schema.picking.pick import ReadyJob


@dataclass(frozen=True)
class Locality:
    """Takes, among the candidates that are locality hits and have room, the one with the highest weighted score.

    A job without a hint, or without such a candidate, is left to `fallback`, which is called `fallback_kind` in
    decisions. Jobs keep their order across both: a later job gets only what an earlier one left. Cost: one comparison
    for each job and hit, and one call of the fallback for each run of jobs between two that have hits.
    """

    fallback: Strategy
    fallback_kind: str

    @property
    def inputs(self) -> frozenset[Input]:
        """What its fallback goes by, and warm bots: a sample of a large fleet would hardly ever hold the few hits."""
        return self.fallback.inputs | {Input.WARM}

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        copy = _WorkingCopy(snapshot, policy)
        placements: list[Placement] = []
        run: list[ReadyJob] = []
        for job in snapshot.jobs:
            hits = copy.hits(job)
            if hits:
                placements += self._fall_back(copy, run, how)
                run = []
            if not copy.quotas.allows(job):
                continue
            bot = copy.best(job, hits)
            if bot is None:
                run.append(job)
                continue
            found = copy.score(job, bot)
            placements.append(Placement(job.id, bot.id, decision(bot, found.as_decision(), len(hits), how)))
            copy.take(job, bot.id)
        return placements + self._fall_back(copy, run, how)

    def _fall_back(self, copy: "_WorkingCopy", run: Sequence[ReadyJob], how: Mapping[str, object]) -> list[Placement]:
        if not run:
            return []
        jobs = {job.id: job for job in run}
        seen = copy.left_for(run, with_all=Input.TURNS in self.inputs)
        found = self.fallback.choose(seen, copy.policy, how={**how, "fallback": self.fallback_kind})
        for placement in found:
            copy.take(jobs[placement.job_id], placement.bot_id)
        return found


class _WorkingCopy:
    """A snapshot and the room that is left as jobs are placed."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.policy = policy
        self.free_units_of = {bot.id: bot.free_units for candidates in snapshot.candidates for bot in candidates}
        self.quotas, self.turns = QuotaCopy(snapshot.headrooms), TurnCopy(snapshot.turns)
        self._snapshot = snapshot
        self._group = {job.id: nth for nth, group in enumerate(snapshot.groups) for job in group.jobs}
        self._warm = snapshot.warm()

    def hits(self, job: ReadyJob) -> Sequence[FreeBot]:
        """The job's candidates that are locality hits, with or without room, in the order in which they came."""
        return () if job.locality_hint is None else self._warm.get((self._group[job.id], job.locality_hint), ())

    def best(self, job: ReadyJob, hits: Sequence[FreeBot]) -> FreeBot | None:
        """The first with the highest score of those that have room for the job."""
        fitting = [bot for bot in hits if self.free_units_of[bot.id] >= job.units]
        return max(fitting, key=lambda bot: self.score(job, bot).total, default=None)

    def score(self, job: ReadyJob, bot: FreeBot) -> Score:
        """What a bot that is a hit scores for the job."""
        rate = self._snapshot.rate(bot, self._snapshot.label(job))
        return self.policy.score(bot, free_units=self.free_units_of[bot.id], hit=True, rate=rate)

    def take(self, job: ReadyJob, bot_id: int) -> None:
        """The job goes to this bot."""
        self.free_units_of[bot_id] -= job.units
        self.quotas.take(job)
        self.turns.take(bot_id)

    def left_for(self, jobs: Sequence[ReadyJob], *, with_all: bool) -> Snapshot:
        """What these jobs see: of each group as many candidates as a sample for them alone would have given, or all."""
        members: dict[int, list[ReadyJob]] = defaultdict(list)
        for job in jobs:
            members[self._group[job.id]].append(job)
        groups = [replace(self._snapshot.groups[nth], jobs=tuple(some)) for nth, some in members.items()]
        size = EVERY if with_all else self.policy.sampling.sample_size
        candidates = [
            self._with_room(nth, units=group.units, count=group.wanted(size).count)
            for nth, group in zip(members, groups, strict=True)
        ]
        hints = {job.locality_hint for job in jobs}
        hits = frozenset(hit for hit in self._snapshot.hits if hit[1] in hints) if hints != {None} else frozenset()
        return replace(
            self._snapshot,
            jobs=jobs,
            groups=groups,
            candidates=candidates,
            hits=hits,
            headrooms=self.quotas.left,
            turns=self.turns.last,
        )

    def _with_room(self, group: int, *, units: int, count: int) -> list[FreeBot]:
        found: list[FreeBot] = []
        for bot in self._snapshot.candidates[group]:
            if len(found) == count:
                break
            free_units = self.free_units_of[bot.id]
            if free_units >= units:
                found.append(bot if free_units == bot.free_units else bot._replace(free_units=free_units))
        return found
