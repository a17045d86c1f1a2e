"""What a strategy is: it chooses bots for jobs, as a pure function of what was read.

Built in are `capacity`, `locality`, `success`, `rate-only`, `round-robin`, `pack` and `fragmentation`. Another one is a
class without constructor arguments, or an object, that has what `Strategy` asks for, in a package that names it:

    [project.entry-points."leasehold.strategies"]
    roomiest = "my_package:Roomiest"

`[assigners.strategy] kind = "roomiest"` then uses it; the package must be installed wherever that file is read. It can
be tested with plain values, without a database:

    job = ReadyJob(1, "1", 1, cohort=0, instance=1, platform=1, priority=0, units=1, locality_hint=None, tried=False)
    bots = [FreeBot(7, "bot-7", priority=0, free_units=2, capacity=2)]
    snapshot = Snapshot([job], group_jobs([job]), [bots], hits=frozenset())
    (placement,) = Roomiest().choose(snapshot, Policy(), how={})
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from assigner.placement.room import Declared, Demand, Need, WaitingDemand, demand_of
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.fleet.success import UNKNOWN
from schema.moves.grant import PREFERRED, REQUIRED, Placement
from schema.picking.pick import ReadyJob
from schema.validation import MAX_UNITS

# How good a bot is for a job: one number, with the parts it is made of.


_LIMIT = 1e6

CapacityTerm = Literal["raw", "normalised"]


class Weights(BaseModel):
    """Weights of the score's terms; finite, |w| ≤ 1e6. Defaults are BuildGrid's.

    priority: per step of the bot's priority number. Negative, so that a lower number is preferred; doubling it makes
        a preferred bot outweigh twice as much spare capacity.
    locality: for a bot that lately worked on the job's locality hint. Doubling it makes warm caches outweigh twice
        as much spare capacity.
    capacity: per free unit. Doubling it spreads load more evenly, against locality; negative packs bots full.
    success: for a bot whose work with the job's label always succeeded and that is idle, see `SuccessScore`; 0 leaves
        it out, and then nothing about it is read. Doubling it makes reliable, idle bots outweigh twice as much of the
        rest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    priority: float = Field(default=-10.0, ge=-_LIMIT, le=_LIMIT)
    locality: float = Field(default=5.0, ge=-_LIMIT, le=_LIMIT)
    capacity: float = Field(default=1.0, ge=-_LIMIT, le=_LIMIT)
    success: float = Field(default=0.0, ge=-_LIMIT, le=_LIMIT)


@dataclass(frozen=True)
class Score:
    """The weighted terms of one score; what is compared is their sum. success: None if success has no weight."""

    priority: float
    capacity: float
    locality: float
    success: float | None = None

    @property
    def total(self) -> float:
        """The score; higher is better."""
        return self.priority + self.capacity + self.locality + (self.success or 0.0)

    def as_decision(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""
        terms = {"priority": self.priority, "capacity": self.capacity, "locality": self.locality}
        return {"total": self.total} | terms | ({} if self.success is None else {"success": self.success})


@dataclass(frozen=True)
class SuccessScore:
    """success_rate / (1 + load)^load_power, from 0 to 1: Vapora's assignment score (ADR-018), where the power is 1.

    `rate` is that of the bot's attempts with jobs of the label, `load` the share of its units that are taken, both from
    0 to 1. A bot that is full is worth half of what it is worth idle; with a power of 2, a quarter; with 0, as much.
    """

    rate: float
    load: float
    load_power: float = 1.0

    @property
    def total(self) -> float:
        """The score; higher is better."""
        return float(self.rate / (1.0 + self.load) ** self.load_power)

    def as_decision(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""
        return {"total": self.total, "success_rate": self.rate, "load": self.load}


def success_score(bot: FreeBot, *, free_units: int, rate: float, load_power: float = 1.0) -> SuccessScore:
    """What a bot is worth that has succeeded at this `rate` and still has these free units, of at least one."""
    return SuccessScore(rate, (bot.capacity - free_units) / bot.capacity, load_power)


def outweighing_units(weights: Weights, term: CapacityTerm) -> int | None:
    """More free units from which capacity outweighs one step of bot priority; None if it never does.

    Of a normalised term the unit is the whole bot, so that the answer is 1 or None.
    """
    step, unit = abs(weights.priority), abs(weights.capacity)
    if unit * (MAX_UNITS if term == "raw" else 1) <= step:
        return None
    return math.floor(step / unit) + 1


def dominance(weights: Weights, term: CapacityTerm) -> str:
    """One line for people: which term of the score can dominate the others."""
    step, hit = abs(weights.priority), abs(weights.locality)
    verb = "outweighs" if step > hit else "weighs as much as" if step == hit else "is outweighed by"
    units = outweighing_units(weights, term)
    if units is None:
        free = "free capacity never outweighs it"
    elif term == "normalised":
        free = f"a bot that is wholly free ({abs(weights.capacity):g}) outweighs it"
    else:
        free = f"free capacity outweighs it from {units} more free unit{'s' if units > 1 else ''} on"
    success = f"; success adds at most {weights.success:g}" if weights.success else ""
    return f"one step of bot priority ({step:g}) {verb} a locality hit ({hit:g}); {free}{success}"


# How many candidates to look at, and for which jobs together.


#: A sample size that is larger than any fleet.
EVERY = 1_000_000_000


class SamplingSettings(BaseModel):
    """Sampling of bots, as BuildGrid's SamplingConfig; it has no default size, ours is 10.

    enabled: false = nothing is sampled or scored. A job then goes to the first healthy bot with room that nobody else
        has locked: the one with the lowest priority number, of these the one that was registered first.
    sample_size: candidates scored for each job. Doubling it costs one more short index walk per batch and finds a
        better bot; beyond some tens the gain vanishes.
    max_attempts: sampling rounds before the fall-back to any healthy bot. Doubling it matters only where
        assigners contend for few free bots.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    sample_size: int = Field(default=10, ge=1, le=1000)
    max_attempts: int = Field(default=1, ge=1, le=20)


@dataclass(frozen=True)
class Group:
    """Jobs that any bot suits alike, in the order in which they are to be placed.

    instance, platform: of the first job, if the same bots could take jobs of others.
    preferred: the requirement set of bots that they prefer, if they take others too.
    """

    cohort: int
    instance: int
    platform: int
    units: int
    jobs: tuple[ReadyJob, ...]
    preferred: int | None = None

    @classmethod
    def of(cls, jobs: Sequence[ReadyJob]) -> "Group":
        """Return these jobs as a group."""
        first = jobs[0]
        return cls(first.cohort, first.instance, first.platform, first.units, tuple(jobs), preference(first))

    @property
    def of_preferred(self) -> "Group | None":
        """The same jobs as if they required what they prefer; None if they prefer nothing."""
        return None if self.preferred is None else replace(self, platform=self.preferred, preferred=None)

    def wanted(self, sample_size: int) -> CandidateRequest:
        """What to sample: if every job before it fills a bot, the last one still sees `sample_size` candidates."""
        return CandidateRequest(self.cohort, self.instance, self.platform, self.units, sample_size + len(self.jobs) - 1)


def with_phase(placement: Placement, job: ReadyJob) -> Placement:
    """The placement of a job with preferred properties, with the phase in which its bot was found. A job that still
    waits for a preferred bot, or that is looked at as if it did, requires what it prefers."""
    if job.preferred is None:
        return placement
    phase = PREFERRED if job.preferred == job.platform else REQUIRED
    return placement._replace(decision={**placement.decision, "phase": phase})


def preference(job: ReadyJob) -> int | None:
    """Return the requirement set of bots that the job prefers, if it takes others too."""
    return None if job.preferred == job.platform else job.preferred


def group_jobs(jobs: Sequence[ReadyJob]) -> list[Group]:
    """Jobs by cohort, instance, requirement set, units and preference, in the order of their first appearance."""
    found: dict[tuple[int, int, int, int, int | None], list[ReadyJob]] = {}
    for job in jobs:
        found.setdefault((job.cohort, job.instance, job.platform, job.units, preference(job)), []).append(job)
    return [Group.of(alike) for alike in found.values()]


class Policy(BaseModel):
    """What every strategy may go by, from the configuration.

    capacity_term: what of a bot counts as its capacity. `raw` is its free units, as BuildGrid has it, so that large
        bots outweigh any preference; `normalised` is the free share of its units, 0 to 1.
    load_power: how much load counts against success, see `SuccessScore`; 1 is Vapora's, 0 leaves load out.
    min_batch_size: so many jobs of one batch key go to one bot together, if one has room for them; fewer go one by one.
        Doubling it makes fewer and larger batches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    capacity_term: CapacityTerm = "raw"
    load_power: float = Field(default=1.0, ge=0, le=10)
    min_batch_size: int = Field(default=2, ge=2, le=10_000)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    weights: Weights = Field(default_factory=Weights)

    def score(self, bot: FreeBot, *, free_units: int, hit: bool, rate: float = UNKNOWN) -> Score:
        """priority x w_priority + capacity x w_capacity + locality_hit x w_locality (BuildGrid's weighted score), and
        the success score x w_success of a bot that has succeeded at this `rate`, if that has a weight.

        `free_units` is the bot's units still free, without what this batch has taken; the capacity term is that number,
        or normalised, its share of all the bot's units. With the default weights a bot of priority 0 with 3 free units
        and no hit scores 3; a priority that is better by 1 outweighs a locality hit, or up to nine more free units.
        """
        weights, success = self.weights, None
        capacity = free_units if self.capacity_term == "raw" else free_units / bot.capacity
        if weights.success:
            value = success_score(bot, free_units=free_units, rate=rate, load_power=self.load_power).total
            success = value * weights.success
        return Score(
            priority=bot.priority * weights.priority,
            capacity=capacity * weights.capacity,
            locality=weights.locality if hit else 0.0,
            success=success,
        )


#: Units by (cohort, instance).
Headrooms = Mapping[tuple[int, int], int]


class QuotaCopy:
    """A working copy of what quotas leave: an instance without an entry may have any number of units.

    A job that its quota refuses takes no room of a bot, so that later jobs of the batch choose as if it were not there.
    """

    def __init__(self, headrooms: Headrooms = MappingProxyType({})) -> None:
        self.left = dict(headrooms)

    @classmethod
    def of(cls, jobs: Iterable[ReadyJob]) -> "QuotaCopy":
        """Return what quotas left the instances of these jobs when they were picked."""
        return cls({(job.cohort, job.instance): job.headroom for job in jobs if job.headroom is not None})

    def allows(self, job: ReadyJob) -> bool:
        """Return whether the quota leaves enough units for the job."""
        left = self.left.get((job.cohort, job.instance))
        return left is None or job.units <= left

    def times(self, job: ReadyJob, most: int) -> int:
        """Return how many jobs of the instance and size of this one the quota allows, at most `most`."""
        left = self.left.get((job.cohort, job.instance))
        return most if left is None else min(most, max(left, 0) // job.units)

    def take(self, job: ReadyJob) -> None:
        """Count the units of a job that has been placed."""
        key = job.cohort, job.instance
        if key in self.left:
            self.left[key] -= job.units


class TurnCopy:
    """A working copy of the turns in which bots last received a job; a bot that has received none has no turn."""

    def __init__(self, turns: Mapping[int, int]) -> None:
        self.last = dict(turns)
        self._now = max(self.last.values(), default=0)

    def take(self, bot_id: int) -> None:
        """The bot has received a job."""
        self._now += 1
        self.last[bot_id] = self._now


@dataclass(frozen=True)
class Snapshot:
    """What a choice is made from."""

    #: The jobs in their order, and the same in groups of jobs that any bot suits alike.
    jobs: Sequence[ReadyJob]
    groups: Sequence[Group]
    #: The candidates of each group in random order; bots that were added for their locality come last.
    candidates: Sequence[Sequence[FreeBot]]
    #: The (bot, hint) pairs that are locality hits.
    hits: frozenset[tuple[int, str]]
    #: Only where success counts: the jobs' labels, and the success rates of (bot, label) as far as anything is known.
    labels: Mapping[int, str] = field(default_factory=dict)
    rates: Mapping[tuple[int, str], float] = field(default_factory=dict)
    #: Units that quotas leave their instances.
    headrooms: Headrooms = field(default_factory=dict)
    #: Only where turns count: the turn in which each bot last received a job from this assigner; a later one is higher.
    turns: Mapping[int, int] = field(default_factory=dict)
    #: Of the groups that prefer some bots, by their numbers, the candidates that they prefer. The strategy sees either
    #: these or the others.
    preferred: Mapping[int, Sequence[FreeBot]] = field(default_factory=dict)
    #: The resources that jobs take, and what is left of those that bots have declared; empty for jobs that take only
    #: units.
    needs: Mapping[int, Need] = field(default_factory=dict)
    declared: Mapping[int, Declared] = field(default_factory=dict)
    #: What waiting jobs take, by cohort; only for a strategy that goes by them.
    waiting: Mapping[int, WaitingDemand] = field(default_factory=dict)

    @property
    def bots(self) -> Iterator[FreeBot]:
        """All candidates; a bot may come several times."""
        return chain.from_iterable([*self.candidates, *self.preferred.values()])

    def demand(self, job: ReadyJob) -> Demand:
        """What the job takes of a bot; the same for all jobs of a group."""
        return demand_of(job.units, self.needs.get(job.id, {}))

    def label(self, job: ReadyJob) -> str:
        """By what the job's bots are told apart; the same for all jobs where success does not count."""
        return self.labels.get(job.id, "")

    def rate(self, bot: FreeBot, label: str) -> float:
        """The success rate, 0 to 1, of the bot with jobs of this label."""
        return self.rates.get((bot.id, label), UNKNOWN)

    def chosen_by(self, strategy: "Strategy", policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """What the strategy wants. A job that prefers some bots is offered these first, and the others if they have no
        room. Jobs keep their order: a later job gets what an earlier one left.

        All jobs are placed at once, those that prefer some bots on these. Once such a job finds no room, no later job
        of its group does either: what was chosen for the jobs before it stands, and from it on all is chosen anew with
        all bots for its group. So there are no more rounds than groups that prefer some bots, and one.
        """
        if all(job.preferred is None for job in self.jobs):
            return strategy.choose(self, policy, how=how)
        group = {job.id: nth for nth, each in enumerate(self.groups) for job in each.jobs}
        free_units_of = {bot.id: bot.free_units for bot in self.bots}
        quotas, turns, placements = QuotaCopy(self.headrooms), TurnCopy(self.turns), list[Placement]()
        found, jobs, insisting = dict(enumerate(self.candidates)), self.jobs, dict(self.preferred)
        while jobs:
            for nth in [nth for nth, bots in insisting.items() if not self._has_room(nth, bots, free_units_of)]:
                del insisting[nth]
            seen = self._left_for(jobs, group, {**found, **insisting}, free_units_of)
            seen = replace(seen, headrooms=quotas.left, turns=turns.last)
            chosen = {each.job_id: each for each in strategy.choose(seen, policy, how=how)}
            missed = (n for n, job in enumerate(jobs) if group[job.id] in insisting and job.id not in chosen)
            end = next(missed, len(jobs))
            those = {job.id: job for job in jobs[:end]}
            for each in chosen.values():
                if (placed := those.get(each.job_id)) is None:
                    continue
                free_units_of[each.bot_id] -= placed.units
                quotas.take(placed)
                turns.take(each.bot_id)
                is_preferred = group[placed.id] in insisting
                placements.append(
                    each._replace(decision={**each.decision, "phase": PREFERRED})
                    if is_preferred
                    else with_phase(each, placed)
                )
            jobs = jobs[end:]
            if jobs:
                del insisting[group[jobs[0].id]]
        return placements

    def _has_room(self, nth: int, bots: Sequence[FreeBot], free_units_of: Mapping[int, int]) -> bool:
        return any(free_units_of[bot.id] >= self.groups[nth].units for bot in bots)

    def _left_for(
        self,
        jobs: Sequence[ReadyJob],
        group: Mapping[int, int],
        found: Mapping[int, Sequence[FreeBot]],
        free_units_of: Mapping[int, int],
    ) -> "Snapshot":
        """What some of the jobs see, of these candidates by group, when others have been placed."""
        members: dict[int, list[ReadyJob]] = defaultdict(list)
        for job in jobs:
            members[group[job.id]].append(job)
        return replace(
            self,
            jobs=jobs,
            groups=[replace(self.groups[nth], jobs=tuple(some)) for nth, some in members.items()],
            candidates=[
                [
                    bot._replace(free_units=free_units_of[bot.id])
                    for bot in found[nth]
                    if free_units_of[bot.id] >= self.groups[nth].units
                ]
                for nth in members
            ],
            preferred={},
        )

    def warm(self) -> dict[tuple[int, str], list[FreeBot]]:
        """(number of the group, hint) → its candidates that are locality hits, in their order; absent if there are
        none."""
        if not self.hits:
            return {}
        hints: dict[int, list[str]] = defaultdict(list)
        for bot_id, hint in self.hits:
            hints[bot_id].append(hint)
        found: dict[tuple[int, str], list[FreeBot]] = defaultdict(list)
        for nth, candidates in enumerate(self.candidates):
            for bot in candidates:
                for hint in hints.get(bot.id, ()):
                    found[nth, hint].append(bot)
        return dict(found)


class Input(StrEnum):
    """What a strategy may go by beside the free units of a random sample of bots. It is read only if asked for."""

    #: Candidates are also looked for among the bots that hold the jobs' locality hints. A sample may lack such bots.
    WARM = "warm"
    #: The bots' success rates. They are also read if they have a weight.
    SUCCESS = "success"
    #: The turns in which bots received jobs. Then all bots that could take a job are candidates.
    TURNS = "turns"
    #: All resources that bots have left; otherwise only those that the jobs take.
    RESOURCES = "resources"
    #: What waiting jobs take.
    WAITING = "waiting"


NOTHING_ELSE = frozenset[Input]()


class Strategy(Protocol):
    """One way to choose bots. It asks neither a database nor a clock nor a global source of chance: the order of the
    candidates is its chance."""

    @property
    def inputs(self) -> frozenset[Input]:
        """What it goes by beside what is always read. A package may leave this out: then by nothing else."""

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """Place each job at most once, on a candidate of its group; a job without a placement waits.

        A job for which its instance's quota leaves too little (`QuotaCopy`) is passed over.

        A bot takes placements in their order for as long as they fit into its room. A placement's `decision` is kept
        as JSON with the job's history; it should hold all of `how`.
        """


def decision(
    bot: FreeBot, score: Mapping[str, object], candidates: int, how: Mapping[str, object]
) -> dict[str, object]:
    """How a choice by score is kept: the bot's name, how many were compared, and what the score is made of."""
    return {"bot": bot.name, "candidates": candidates, "score": score, **how}
