"""What a strategy is: it chooses bots for jobs, as a pure function of what was read.

Built in are `capacity`, `locality` and `success`. Another one is a class without constructor arguments, or an object,
that has what `Strategy` asks for, in a package that names it:

    [project.entry-points."leasehold.strategies"]
    roomiest = "my_package:Roomiest"

`[assigners.strategy] kind = "roomiest"` then uses it; the package must be installed wherever that file is read. It can
be tested with plain values, without a database:

    job = ReadyJob(1, "1", 0, instance=1, platform=1, priority=0, units=1, locality_hint=None, considered=0)
    bots = [FreeBot(7, "bot-7", priority=0, room=2, capacity=2)]
    snapshot = Snapshot([job], grouped([job]), [bots], hits=frozenset())
    (placement,) = Roomiest().choose(snapshot, Policy(), how={})
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from assigner.sampling import Group, SamplingSettings
from assigner.scoring import CapacityTerm, FourTerms, Score, Weights, score, worth
from schema.candidates import FreeBot
from schema.moves import Placement
from schema.ready import ReadyJob
from schema.success import UNKNOWN


class Policy(BaseModel):
    """What every strategy may go by, from the configuration.

    capacity_term: what of a bot counts as its capacity. `raw` is its free units, as BuildGrid has it, so that large
        bots outweigh any preference; `normalised` is the free share of its units, 0 to 1.
    load_power: how much load counts against success, see `scoring.Worth`; 1 is Vapora's, 0 leaves load out.
    min_batch_size: so many jobs of one batch key go to one bot together, if one has room for them; fewer go one by one.
        Doubling it makes fewer and larger batches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    capacity_term: CapacityTerm = "raw"
    load_power: float = Field(default=1.0, ge=0, le=10)
    min_batch_size: int = Field(default=2, ge=2, le=10_000)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    weights: Weights = Field(default_factory=Weights)

    def score(self, bot: FreeBot, *, room: int, hit: bool, rate: float = UNKNOWN) -> Score:
        """The weighted score of a bot that still has `room` free units and has succeeded at this `rate`."""
        found = score(bot, room=room, hit=hit, weights=self.weights, term=self.capacity_term)
        if not self.weights.success:
            return found
        value = worth(bot, room=room, rate=rate, load_power=self.load_power).total
        return FourTerms(found.priority, found.capacity, found.locality, value * self.weights.success)


@dataclass(frozen=True)
class Snapshot:
    """What a choice is made from: the jobs in their order, for each group of them its candidates in random order
    (bots added for their locality come last), and the (bot, hint) pairs that are locality hits.

    Only where success counts: the jobs' labels, and the success rates of (bot, label) as far as anything is known.
    """

    jobs: Sequence[ReadyJob]
    groups: Sequence[Group]
    candidates: Sequence[Sequence[FreeBot]]
    hits: frozenset[tuple[int, str]]
    labels: Mapping[int, str] = field(default_factory=dict)
    rates: Mapping[tuple[int, str], float] = field(default_factory=dict)

    def label(self, job: ReadyJob) -> str:
        """By what the job's bots are told apart; the same for all jobs where success does not count."""
        return self.labels.get(job.id, "")

    def rate(self, bot: FreeBot, label: str) -> float:
        """The success rate, 0 to 1, of the bot with jobs of this label."""
        return self.rates.get((bot.id, label), UNKNOWN)

    def chosen_by(self, strategy: "Strategy", policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """What the strategy wants."""
        return strategy.choose(self, policy, how=how)

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


class Strategy(Protocol):
    """One way to choose bots. It asks neither a database nor a clock nor a global source of chance: the order of the
    candidates is its chance."""

    @property
    def wants_warm(self) -> bool:
        """Whether candidates are also to be looked for among the bots that hold the jobs' locality hints; otherwise
        they are a random sample, in which such a bot may be missing."""

    @property
    def wants_success(self) -> bool:
        """Whether it goes by the bots' success rates, which are otherwise only read if they have a weight. A package
        may leave this out: then it does not."""

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
        """Place each job at most once, on a candidate of its group; a job without a placement waits.

        A bot takes placements in their order for as long as they fit into its room. A placement's `decision` is kept
        as JSON with the job's history; it should hold all of `how`.
        """


class Stored(Protocol):
    """What a bot was chosen by."""

    def stored(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""


def decision(bot: FreeBot, found: Stored, candidates: int, how: Mapping[str, object]) -> dict[str, object]:
    """How a choice by score is kept: the bot's name, how many were compared, and what the score is made of."""
    return {"bot": bot.name, "candidates": candidates, "score": found.stored(), **how}
