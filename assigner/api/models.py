"""What callers and operators are told, as documented models, and how rows become them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import BaseModel, Field

from assigner.operator_resources.tenancy import Quota
from schema import validation
from schema.states import FINAL, HELD
from schema.states import JobState as JobStates


class SubmittedJob(BaseModel):
    id: str
    created: bool = Field(
        description="false: no job was made; the key had been used before by an equal request, or the submission "
        "joined the job that has its `dedup_key`"
    )


class SubmitAnswer(BaseModel):
    """In the order of the request."""

    jobs: list[SubmittedJob]


class Event(BaseModel):
    move: str
    from_: str | None = Field(alias="from")
    to: str
    at: datetime
    actor: str
    fence: int
    details: dict[str, Any] | None = None


class WaitingFor(BaseModel):
    """Why a waiting job does not run."""

    unmatchable: bool = Field(description="no present bot could run it, even if it were idle")
    sentence: str


class NodeOf(BaseModel):
    id: UUID
    name: str
    node: int
    depth: int


class JobRow(BaseModel):
    """A job in a list."""

    id: UUID
    instance: str
    label: str
    state: str
    priority: int
    units: int
    attempts: int
    max_attempts: int
    reason: str | None
    created_at: datetime
    queued_at: datetime
    schedule_after: datetime | None = Field(description="in backoff until then; unset = ready")
    started_at: datetime | None
    finished_at: datetime | None
    bot: str | None = Field(description="that has it, or had it last")


class Job(JobRow):
    """Everything the pool tells of one job, as the submission with this id sees it.

    A submission that was cancelled is `cancelled`, also while its job goes on for others.
    """

    joined: UUID | None = Field(description="own id of the job that this submission joined; unset = `id` is its own")
    submissions: int = Field(description="that share the job and were not cancelled")
    dedup_key: str | None
    queue_deadline: datetime | None = Field(description="if it still waits then, it is given up")
    properties: dict[str, list[str]]
    timeout_seconds: float | None
    locality_hint: str | None
    terms: dict[str, Any] | None = Field(description="what it asks for beside a place; null = nothing")
    estimated_cost: float | None = Field(description="of a job that asks for more than a place")
    retry_failed: bool
    kills: int = Field(description="bots that were lost while they ran it")
    considered: int = Field(description="times it was looked at since it was queued, without finding a place")
    payload: dict[str, Any] | None
    result: dict[str, Any] | None
    events: list[Event]
    waiting: WaitingFor | None = None
    graph: NodeOf | None = Field(default=None, description="the graph that it is a node of")


class JobList(BaseModel):
    """One page, newest first; the next page is `before` the id of the last.

    A job that several submissions share is listed once, under its own id, with its own state.
    """

    jobs: list[JobRow]


class CancelledJob(BaseModel):
    id: str
    state: str | None = Field(description="afterwards; null = there is no such job")
    changed: bool = Field(description="whether this call changed anything; a finished job keeps its result")


class CancelAnswer(BaseModel):
    """In the order of the request."""

    jobs: list[CancelledJob]


class HeldJob(BaseModel):
    id: str
    state: str | None = Field(description="afterwards; null = there is no such job")
    changed: bool = Field(description="whether this call changed anything")


class HeldAnswer(BaseModel):
    """In the order of the request."""

    jobs: list[HeldJob]


class RequeuedJob(HeldJob):
    job: str | None = Field(
        description="what is to be run now: a new job in place of a final one, or the same; null = it succeeded"
    )


class RequeueAnswer(BaseModel):
    """In the order of the request."""

    jobs: list[RequeuedJob]


class PrioritisedJob(HeldJob):
    priority: int | None = Field(description="afterwards")


class PriorityAnswer(BaseModel):
    """`jobs` in the order of the request's ids; none for a filter."""

    jobs: list[PrioritisedJob]
    changed: int = Field(description="how many jobs have another priority now")
    more: bool = Field(description="the filter's bound was reached: the same request changes others")


class JobState(BaseModel):
    id: UUID
    joined: UUID | None = Field(description="own id of the job that this submission joined; unset = `id` is its own")
    state: str
    reason: str | None
    attempts: int
    finished_at: datetime | None
    result: dict[str, Any] | None


class WaitAnswer(BaseModel):
    """In the order of the request; `done` if all are final."""

    jobs: list[JobState]
    done: bool


class OutputAnswer(BaseModel):
    """Bytes of the newest attempt from offset `start`; ask again with `next`. Another `attempt` starts at 0."""

    start: int
    data: str = Field(description="base64")
    next: int
    state: str
    attempt: int = Field(description="1 for the first, 0 before there is one")
    final: bool = Field(description="the job is over and nothing follows")


class Bot(BaseModel):
    name: str
    status: str
    draining: bool = Field(description="an operator asked it to take no more work")
    instance: str | None = Field(description="the only one it serves; unset = every one")
    pool: str | None = Field(description="whose instances it serves; unset = as `instance` says")
    labels: list[str]
    cohort: str
    priority: int
    capacity: int
    in_use: int
    leases: int
    properties: dict[str, list[str]]
    epoch: int
    opened_at: datetime | None
    expires_in: float | None = Field(description="seconds until its session ends unless it syncs")
    probation: float | None = Field(
        description="seconds for which it holds one lease at a time unless it succeeds; unset = not on probation"
    )
    success_rate: float | None = Field(description="0 to 1, of its latest attempts; unset = none was counted")
    avg_latency_ms: float | None = Field(description="of its latest attempts with a result; unset = none was counted")


class LabelSuccess(BaseModel):
    """A bot's latest attempts with jobs of one label. Counts are not whole numbers where older ones fade."""

    label: str
    successes: float
    failures: float
    returned: float = Field(description="failures that were given back, because their jobs failed elsewhere too")
    success_rate: float = Field(description="0 to 1, above a prior of two successes")
    avg_latency_ms: float | None
    at: datetime = Field(description="of the latest change")


class ShownBot(Bot):
    success: list[LabelSuccess] = Field(description="by label, the latest first; none while successes are not counted")


class BotList(BaseModel):
    """By name; the next page is `after` the last."""

    bots: list[Bot]


class DrainAnswer(BaseModel):
    name: str
    draining: bool


def job(row: Mapping[str, Any]) -> Job:
    """One job as `queries.job` found it."""
    chances = row.get("chances")
    waiting = None if chances is None else _waiting(row, chances)
    if row["state"] == JobStates.BLOCKED:
        waiting = WaitingFor(unmatchable=False, sentence=row["held_up"])
    return Job.model_validate(dict(row) | {"waiting": waiting})


def _waiting(row: Mapping[str, Any], chances: Mapping[str, int]) -> WaitingFor:
    matching, units = chances["matching"], row["units"]
    if matching == 0:
        wanted = ", ".join(f"{key}={'+'.join(values)}" for key, values in row["properties"].items())
        lack = f"offers {validation.escaped(wanted, 500)}" if wanted else "is there"
        return WaitingFor(unmatchable=True, sentence=f"no bot that serves the instance '{row['instance']}' {lack}")
    if chances["fitting"] == 0:
        sentence = f"it needs {units} units, the largest of {matching} matching bots has {chances['largest']}"
        return WaitingFor(unmatchable=True, sentence=sentence)
    if row["schedule_after"] is not None and row["backoff"] > 0:
        sentence = f"in backoff for another {row['backoff']:.1f} s after {row['considered']} looks without a place"
    elif row.get("held_up"):
        sentence = row["held_up"]
    elif chances["willing"] == 0:
        sentence = f"every one of {chances['fitting']} matching bots is unhealthy, draining or closing"
    elif chances["free"] == 0:
        sentence = f"{chances['willing']} matching bots have no room for {units} more units at the moment"
    else:
        sentence = f"{chances['free']} matching bots have room: the next assigner cycle considers it"
    return WaitingFor(unmatchable=False, sentence=sentence)


# The answer that shows the pool at a glance.


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


class PoolStatus(BaseModel):
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


def status_answer(found: Mapping[str, Any]) -> PoolStatus:
    """The pool as `glance.pool` found it."""
    jobs: dict[str, int] = {}
    instances: dict[str, dict[str, int]] = {}
    for count in found["counts"]:
        state, number = str(count["state"]), int(count["jobs"])
        jobs[state] = jobs.get(state, 0) + number
        instances.setdefault(count["instance"], {})[state] = number
    queued = [count for count in found["counts"] if count["state"] == JobStates.QUEUED]
    ages = [count["oldest_seconds"] for count in queued] + [found["oldest"]["seconds"]]
    bots = {row["status"]: BotsAtAGlance.model_validate(row) for row in found["bots"]}
    present = [seen for status, seen in bots.items() if status != "gone"]
    return PoolStatus(
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
    if JobStates.QUEUED in short:
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
