"""The answer that shows the pool at a glance."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from assigner.operator_resources.tenancy import Quota
from schema.states import FINAL, HELD, JobState


class Tick(BaseModel):
    name: str
    age_seconds: float
    grace: bool = Field(description="nothing is expired for now, because this duty itself had a gap")


class BotsAtAGlance(BaseModel):
    bots: int
    capacity: int
    in_use: int


class Swarm(BaseModel):
    """The bots of one cohort, in units; averages are over those that are present, unset without any."""

    cohort: str
    total: int
    idle: int
    busy: int
    offline: int
    on_probation: int
    total_in_flight: int
    avg_success_rate: float | None = Field(description="0 to 1; unset while successes are not counted")
    avg_load: float | None = Field(description="0 to 1")
    concentration: float | None = Field(
        description="Herfindahl index of the units in use: 1 if one bot has all, one over their number if they are even"
    )
    even_concentration: float | None = Field(description="the same if every bot were loaded alike")


class Rates(BaseModel):
    """Jobs per second over the last minute, or over `span` seconds of it when more happens than is looked at."""

    submitted: float
    granted: float = Field(
        description="leased to a bot; where the job came back, counted once it is leased again or final"
    )
    started: float = Field(description="that their bots say run; one that ends at once may never be said to")
    finished: float = Field(description="in any final state; the four that follow are its parts")
    succeeded: float
    failed: float
    cancelled: float
    dead: float
    span: float = Field(description="seconds that the rates cover, at most 60")


class Waits(BaseModel):
    """Seconds from the queue to the lease, of jobs that were leased in the last minute, at most the newest 5,000."""

    jobs: int = Field(description="that were measured")
    p50: float | None = Field(description="unset = none were")
    p95: float | None
    p99: float | None


class Status(BaseModel):
    """The pool at a glance; a caller of one instance sees that instance's jobs and bots only."""

    jobs: dict[str, int] = Field(description="by state")
    instances: dict[str, dict[str, int]] = Field(description="by instance and state")
    at_least: list[str] = Field(
        description="states, and fields of this answer, whose number is a lower bound because not all was counted"
    )
    finished_estimate: int | None = Field(
        description="finished jobs that are kept, as of the last vacuum; unset = unknown, or not the caller's to know"
    )
    oldest_queued_seconds: float | None
    unmatchable: int = Field(description="queued jobs that no present bot could run")
    bots: dict[str, BotsAtAGlance] = Field(description="by status")
    swarm: list[Swarm] = Field(description="by cohort; only for callers of every instance")
    capacity: int = Field(description="units of the bots that have a session")
    in_use: int
    upkeep: list[Tick]
    rates: Rates
    waits: Waits
    quotas: list[Quota]


def status(found: Mapping[str, Any]) -> Status:
    """The pool as `glance.pool` found it."""
    jobs: dict[str, int] = {}
    instances: dict[str, dict[str, int]] = {}
    for count in found["counts"]:
        state, number = str(count["state"]), int(count["jobs"])
        jobs[state] = jobs.get(state, 0) + number
        instances.setdefault(count["instance"], {})[state] = number
    queued = [count for count in found["counts"] if count["state"] == JobState.QUEUED]
    ages = [count["oldest_seconds"] for count in queued] + [found["oldest"]["seconds"]]
    bots = {row["status"]: BotsAtAGlance.model_validate(row) for row in found["bots"]}
    present = [seen for status, seen in bots.items() if status != "gone"]
    return Status(
        jobs=jobs,
        instances=dict(sorted(instances.items())),
        at_least=_at_least(found),
        finished_estimate=_kept(found["finished_estimate"], sum(jobs.get(state, 0) for state in FINAL)),
        oldest_queued_seconds=max((float(age) for age in ages if age is not None), default=None),
        unmatchable=sum(int(count["unmatchable"]) for count in queued),
        bots=bots,
        swarm=[Swarm.model_validate(one) for one in found["swarm"]],
        capacity=sum(seen.capacity for seen in present),
        in_use=sum(seen.in_use for seen in present),
        upkeep=[Tick.model_validate(tick) for tick in found["ticks"]],
        quotas=[Quota.model_validate(quota) for quota in found["quotas"]],
        rates=_rates(found["rates"]),
        waits=_waits(found["rates"]),
    )


def _at_least(found: Mapping[str, Any]) -> list[str]:
    """Where the newest finished jobs end the count, every final state may have more, also one that shows none. What
    bots have is what rates of grants and starts come from."""
    short = set(found["more"])
    if short & FINAL:
        short |= {str(state) for state in FINAL}
    if JobState.QUEUED in short:
        short |= {"unmatchable", "oldest_queued_seconds"}
    if short & HELD:
        short |= {"rates.granted", "rates.started"}
    if found["oldest"]["more"]:
        short.add("oldest_queued_seconds")
    return sorted(short)


def _kept(estimate: int | None, counted: int) -> int | None:
    """The estimate may be older than what was counted."""
    return None if estimate is None else max(estimate, counted)


def _rates(row: Mapping[str, Any]) -> Rates:
    span = float(row["span"])
    counted = Rates.model_fields.keys() - {"span"}
    return Rates(span=round(span, 3), **{name: round(row[name] / span, 3) for name in counted})


def _waits(row: Mapping[str, Any]) -> Waits:
    p50, p95, p99 = (None if each is None else round(each, 6) for each in row["percentiles"] or (None, None, None))
    return Waits(jobs=row["waits"], p50=p50, p95=p95, p99=p99)
