"""In which order jobs that ask for more than a place start, as configured: the job within its instance, and the
instance. A new kind is a new entry of KINDS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from assigner import keys
from assigner.admission import Ordering
from assigner.fairness import Fair
from assigner.graph_order import ByGraph
from assigner.lines import ByRank, ByScore, Weights
from schema.gated import Ageing
from schema.limits import escaped


class OrderingSettings(BaseModel):
    """The order of jobs that ask for more than a place.

    kind: `rank` takes the lowest effective priority, then the oldest; `score` takes the highest sum of the weights;
        `graph` goes by the score of their graph, lower first, so that graphs share the pool:
        graph priority x 10 + depth - retries x 5 + estimated cost x 0.1 + penalty.
    ageing_rate: points that a job gains with every hour that it waits; 0 = none. Doubling it lets old work overtake
        twice as urgent new work.
    ageing_cap: the most points that it gains so.
    shortest_first: among jobs of one effective priority those that are expected to be done first come first, which lets
        more of them end in a time, and long ones wait.
    weight_priority, weight_wait, weight_efficiency, weight_window: what each term of a score counts, each of them
        between 0 and 1: points / 150; the wait / a day; 1 / (1 + the unit hours that it is expected to take), 1 if
        nobody knows; what the open windows of its class have left of their meters, 1 without.
    score_mode: `normalised`, or `raw` for the sum in which points are not brought down to 1.
    count_age_once: leaves the points of ageing out of a score that has a weight for the wait.
    max_concurrent: jobs that graphs share; the share of each is this / graphs that wait or run, at least 1. Unset: as
        many as the pool may run at once, and without such a limit nobody has a share.
    overage_penalty: added for each job that a graph runs at or above its share. Doubling it makes two points of graph
        priority weigh as one did.
    max_per_graph: a graph runs at most so many times its share, whatever waits. Doubling it lets one graph take twice
        as much of an idle pool, and keep it while others come.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str = "rank"
    ageing_rate: float = Field(default=0.0, ge=0, le=1000)
    ageing_cap: float = Field(default=20.0, ge=0, le=50)
    shortest_first: bool = False
    weight_priority: float = Field(default=0.4, ge=0, le=1)
    weight_wait: float = Field(default=0.3, ge=0, le=1)
    weight_efficiency: float = Field(default=0.2, ge=0, le=1)
    weight_window: float = Field(default=0.1, ge=0, le=1)
    score_mode: Literal["normalised", "raw"] = "normalised"
    count_age_once: bool = True
    max_concurrent: int | None = Field(default=None, ge=1, le=1_000_000)
    overage_penalty: float = Field(default=20.0, ge=0, le=1e6)
    max_per_graph: float = Field(default=2.0, gt=0, le=1e6)

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        if kind not in KINDS:
            listed = ", ".join(f"'{name}'" for name in sorted(KINDS))
            raise ValueError(f"'{escaped(kind, 80)}' is not an order: there are {listed}{keys.meant(kind, KINDS)}")
        return kind

    @property
    def ageing(self) -> Ageing | None:
        """How waiting makes jobs more urgent, None if it does not."""
        return Ageing(self.ageing_rate, self.ageing_cap) if self.ageing_rate and self.ageing_cap else None

    def made(self) -> "Arrangement":
        """The order that `kind` names."""
        return KINDS[self.kind](self)


@dataclass(frozen=True)
class Arrangement:
    """The order of instances and of the jobs of each, and how waiting makes these more urgent. `exact`: jobs of one
    queue start in the order in which they are read."""

    ordering: Ordering
    ageing: Ageing | None = None
    exact: bool = False


def _rank(settings: OrderingSettings) -> Arrangement:
    line = ByRank(settings.ageing, shortest_first=settings.shortest_first)
    return Arrangement(Fair(line), settings.ageing, exact=not settings.shortest_first)


def _score(settings: OrderingSettings) -> Arrangement:
    weights = Weights(
        settings.weight_priority,
        settings.weight_wait,
        settings.weight_efficiency,
        settings.weight_window,
        raw=settings.score_mode == "raw",
        count_age_once=settings.count_age_once,
    )
    line = ByScore(settings.ageing, weights)
    return Arrangement(Fair(line), settings.ageing)


def _graph(_settings: OrderingSettings) -> Arrangement:
    return Arrangement(ByGraph())


KINDS: dict[str, Callable[[OrderingSettings], Arrangement]] = {"rank": _rank, "score": _score, "graph": _graph}

#: The order of a configuration that says nothing of it.
BY_RANK = OrderingSettings()
