"""Strategies by name: those that are built in, and those that installed packages offer as entry points."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from leasehold.errors import LeaseholdError
from pydantic import field_validator

from assigner.config import plugins
from assigner.placement.strategies.capacity import Capacity
from assigner.placement.strategies.first import FIRST, First
from assigner.placement.strategies.fragmentation import Fragmentation
from assigner.placement.strategies.locality import Locality
from assigner.placement.strategies.pack import Pack
from assigner.placement.strategies.rate_only import RateOnly
from assigner.placement.strategies.round_robin import RoundRobin
from assigner.placement.strategies.success import Success
from assigner.placement.strategy import EVERY, NOTHING_ELSE, Input, Policy, SamplingSettings, Snapshot, Strategy
from schema.moves.grant import Placement

GROUP = "leasehold.strategies"
CAPACITY, LOCALITY, SUCCESS = "capacity", "locality", "success"
RATE_ONLY, ROUND_ROBIN = "rate-only", "round-robin"
PACK, FRAGMENTATION = "pack", "fragmentation"

#: Strategies by their names, but for `locality`, which needs another one.
BUILT_IN: Mapping[str, type[Strategy]] = {
    CAPACITY: Capacity,
    SUCCESS: Success,
    RATE_ONLY: RateOnly,
    ROUND_ROBIN: RoundRobin,
    PACK: Pack,
    FRAGMENTATION: Fragmentation,
}


class StrategySettings(Policy):
    """Which strategy chooses the bot, and what it goes by.

    kind: `capacity`, `locality`, `success`, `rate-only`, `round-robin`, `pack`, `fragmentation`, or the name of an
        entry point of the group `leasehold.strategies`; built-in names cannot be taken by packages.
    fallback: the strategy that `locality` leaves a job to if it has no hint, or no candidate is a hit.
    """

    kind: str = CAPACITY
    fallback: str = CAPACITY

    @field_validator("kind")
    @classmethod
    def _kind_is_a_strategy(cls, kind: str) -> str:
        if kind != LOCALITY:
            load(kind)
        return kind

    @field_validator("fallback")
    @classmethod
    def _fallback_is_another_strategy(cls, fallback: str) -> str:
        if fallback == LOCALITY:
            raise ValueError(f"'{LOCALITY}' cannot be the fallback of itself")
        load(fallback)
        return fallback

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy that `kind` names."""
        return Locality(load(self.fallback), self.fallback) if self.kind == LOCALITY else load(self.kind)

    @cached_property
    def chooser(self) -> tuple[Strategy, str]:
        """The strategy that chooses, and its name: where sampling is off, the one that takes the first bot."""
        return (self.strategy, self.kind) if self.sampling.enabled else (First(), FIRST)

    @cached_property
    def inputs(self) -> frozenset[Input]:
        """What the strategy goes by; without sampling by nothing else, and by success if it has a weight."""
        if not self.sampling.enabled:
            return NOTHING_ELSE
        return self.strategy.inputs | ({Input.SUCCESS} if self.weights.success else NOTHING_ELSE)

    @cached_property
    def sampled(self) -> SamplingSettings:
        """How candidates are read: where turns count, all of them."""
        return self.sampling.model_copy(update={"sample_size": EVERY}) if Input.TURNS in self.inputs else self.sampling


def load(kind: str) -> Strategy:
    """The strategy of this name, but for `locality`, which needs another one.

    Raises ValueError if there is none, several packages offer one, or it cannot be used.
    """
    if kind in BUILT_IN:
        return BUILT_IN[kind]()
    place, made = plugins.load_entry_point(GROUP, kind, noun="a strategy", built_in=(LOCALITY, *BUILT_IN))
    try:
        inputs = frozenset(map(Input, getattr(made, "inputs", NOTHING_ELSE)))
    except (TypeError, ValueError):
        listed = ", ".join(f"'{each}'" for each in Input)
        raise ValueError(f"{place} is not a strategy: its inputs are no set of {listed}") from None
    try:
        inspect.signature(made.choose).bind(None, None, how={})
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{place} is not a strategy: it has no choose(snapshot, policy, *, how)") from None
    return PluginStrategy(kind, made, inputs)


@dataclass(frozen=True)
class PluginStrategy:
    """A strategy of somebody else, whose answers are checked before anything is made of them."""

    kind: str
    strategy: Strategy
    inputs: frozenset[Input]

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """Its placements. Raises LeaseholdError for a job that was not asked for or comes twice, and for a bot that is
        not a candidate."""
        placements = self.strategy.choose(snapshot, policy, how=how)
        allowed: dict[int, set[int]] = {}
        for group, candidates in zip(snapshot.groups, snapshot.candidates, strict=True):
            bot_ids = {bot.id for bot in candidates}
            allowed |= {job.id: bot_ids for job in group.jobs}
        for placement in placements:
            if placement.bot_id not in allowed.pop(placement.job_id, ()):
                raise LeaseholdError(
                    f"strategy '{self.kind}' put job {placement.job_id} on bot {placement.bot_id}, "
                    "but it may place each of its jobs once, on one of the job's candidates"
                )
        return placements
