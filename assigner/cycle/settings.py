"""What operators tune of an assigner."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from assigner.placement.registry import StrategySettings
from schema.picking.pick import Order
from schema.validation import NAME


class AssignerSettings(BaseModel):
    """One kind of assigner; names and defaults are BuildGrid's where it has them. Times are seconds.

    kind: `priority-age` takes the most urgent job of all; `cohort` has one thread for each cohort, which takes the most
        urgent job there, and serves instances below their minimum quota first.
    minimums_first: serve instances below their minimum quota first. Unset means true for `cohort` and false for
        `priority-age`, as in BuildGrid. Where it is false, an assigner goes by priority and age alone, and preempts
        for an instance below its minimum after the delay.
    threads: priority-age assigners in each process. Doubling it raises throughput until the database is busy.
    interval: sleep between cycles, cut short by a wake-up. Doubling it halves the idle load and doubles
        the wait of a job whose wake-up was lost.
    jitter: up to so much is added to every sleep, so that assigners do not march in step.
    busy_sleep_factor: the sleep is multiplied by this after a cycle that placed something.
    priority_percentage: how many cycles in a hundred take the most urgent job first; the others take the oldest,
        which keeps unurgent work from starving.
    failure_backoff: how long a job that no bot can take is left alone; doubled with each further failure.
    failure_backoff_cap: the longest such wait. If it equals `failure_backoff`, every wait takes exactly so long.
    batch: the most jobs placed in one transaction; it takes fewer while there is little to do. Doubling it raises
        throughput under backlog and holds locks longer.
    at_once: the most assigners that place large batches at the same time, among those that serve the same jobs. Each of
        them gets a part of the bots, of at least 64, or they take turns where there are too few; the others try again
        about every half second. Unset means as many as this host has cores, or as the fleet has such parts, two at
        least. If there are more than the database server has cores, they wait for each other's jobs, bots and quotas.
        Assigners that serve the same jobs should have the same number.
    instances: serve only these and the others of their pools; unset means all.
    cohorts: of a cohort assigner, which cohorts it serves, with a thread for each; unset means all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["priority-age", "cohort"] = "priority-age"
    minimums_first: bool | None = None
    threads: int = Field(default=2, ge=1, le=64)
    interval: float = Field(default=1.0, gt=0, le=3600)
    jitter: float = Field(default=1.0, ge=0, le=3600)
    busy_sleep_factor: float = Field(default=0.01, ge=0, le=1)
    priority_percentage: int = Field(default=100, ge=0, le=100)
    failure_backoff: float = Field(default=5.0, ge=0, le=86400)
    failure_backoff_cap: float = Field(default=60.0, ge=0, le=86400)
    batch: int = Field(default=2000, ge=1, le=5000)
    at_once: int | None = Field(default=None, ge=1, le=1000)
    instances: tuple[str, ...] | None = Field(default=None, min_length=1)
    cohorts: tuple[str, ...] | None = Field(default=None, min_length=1)
    strategy: StrategySettings = Field(default_factory=StrategySettings)

    def order(self, roll: int) -> Order:
        """Return the order of a cycle's plain jobs. roll: a number that was drawn from 1 to 100."""
        return Order.PRIORITY if roll <= self.priority_percentage else Order.AGE

    @property
    def serves_minimums_first(self) -> bool:
        """Whether instances below their minimum quota come first."""
        return self.kind == "cohort" if self.minimums_first is None else self.minimums_first

    def model_post_init(self, _context: object) -> None:
        """Refuse what no single field can show to be wrong."""
        for key, names in {"instances": self.instances, "cohorts": self.cohorts}.items():
            for name in names or ():
                if not NAME.fullmatch(name):
                    raise ValueError(f"{key}: '{name}' is not a name")
        if self.kind == "cohort" and "threads" in self.model_fields_set:
            raise ValueError("threads: a cohort assigner has one thread for each cohort")
        if self.kind != "cohort" and self.cohorts is not None:
            raise ValueError("cohorts: only an assigner of kind 'cohort' is restricted to cohorts")
        if self.failure_backoff_cap < self.failure_backoff:
            raise ValueError("failure_backoff_cap must not be less than failure_backoff")
