"""Models of the answers to callers and operators, and the functions that make them from rows.

One module because it is one list: what each route for callers answers.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from leasehold.states import FINAL
from leasehold.states import JobState as JobStates
from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from assigner.explain.forecast import StartForecast
from assigner.operator_resources.tenancy import Quota
from schema.fleet.kinds import UNUSABLE, clauses
from schema.states import HELD

#: The key under which an answer shows stored JSON that has another form than it must. Another version may have written
#: it, or somebody with psql. The rest of the answer is right.
WRONG = "unusable"


def _properties(stored: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(stored)
    except ValidationError:
        return {WRONG: [json.dumps(stored)]}


def _object(stored: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(stored)
    except ValidationError:
        return {WRONG: stored}


def _payload(stored: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Return a payload whose command is a list of words, because all who read one rely on that."""
    command = stored.get("command", []) if isinstance(stored, dict) else None
    if isinstance(command, list) and all(isinstance(word, str) for word in command):
        return check(stored)
    return {"command": [], WRONG: stored}


StoredProperties = Annotated[dict[str, list[str]], WrapValidator(_properties)]
StoredObject = Annotated[dict[str, Any], WrapValidator(_object)]
StoredPayload = Annotated[dict[str, Any], WrapValidator(_payload)]


class SubmittedJob(BaseModel):
    id: str
    created: bool = Field(
        description="false: no job was made, because an equal request with the same key came before, or because the "
        "submission joined the job with its `dedup_key`"
    )


class EstimateAdvice(BaseModel):
    job: int = Field(description="index of the job in the request")
    text: str = Field(description="how its estimated_seconds differ from what like jobs took")


class SubmitAnswer(BaseModel):
    """Answers in the order of the request. Advice changes nothing: the jobs are stored as they were sent."""

    jobs: list[SubmittedJob]
    advice: list[EstimateAdvice] = Field(
        default=[], description="for at most 20 jobs, and only if the gateway is configured to give it"
    )


class Event(BaseModel):
    move: str
    from_: str | None = Field(alias="from")
    to: str
    at: datetime
    actor: str
    fence: int
    details: StoredObject | None = None


class WaitingFor(BaseModel):
    """Why a blocked or queued job does not run, in the words of `explain`."""

    unmatchable: bool = Field(description="no present bot could run it, even if it were idle")
    sentence: str


class NodeOf(BaseModel):
    id: UUID
    name: str
    node: int
    depth: int


class JobProgress(BaseModel):
    """How far the newest attempt says that it is."""

    share: float = Field(description="of the whole work, from 0 to 1")
    text: str = Field(description="what is being done, in words")
    at: datetime = Field(description="when it was told")


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
    schedule_after: datetime | None = Field(
        description="earliest start, or the end of a rest after a failure; unset = ready"
    )
    started_at: datetime | None
    finished_at: datetime | None
    bot: str | None = Field(description="bot that has the job or had it last")
    metadata: dict[str, str]


class Job(JobRow):
    """Everything about one job, as the submission with this id sees it.

    A cancelled submission has the state `cancelled`, even while its job goes on for other submissions.
    """

    joined: UUID | None = Field(
        description="id of the job that this submission joined; unset = the job was made for this submission"
    )
    submissions: int = Field(description="submissions that share the job and were not cancelled")
    dedup_key: str | None
    dedup_key_until: datetime | None = Field(description="until then it keeps the key, also once it has succeeded")
    queue_deadline: datetime | None = Field(description="if the job still waits then, it becomes dead")
    properties: StoredProperties
    preferred_properties: StoredProperties = Field(description="beside the required ones; empty = none")
    prefer_until: datetime | None = Field(description="until then it only takes bots with the preferred properties")
    timeout_seconds: float | None
    locality_hint: str | None
    terms: StoredObject | None = Field(description="constraints on its start; null = it is no constrained job")
    estimated_cost: float | None = Field(description="estimated cost of a constrained job")
    service_level: str | None = Field(description="the service level that it named, or got by default; null = none")
    retry_failed: bool
    kills: int = Field(description="number of bots that were lost while they ran it")
    considered: int = Field(
        description="times in a row that an assigner looked into its queue and found no bot for any job of it"
    )
    policy: int | None = Field(description="version of the policy by which its newest attempt began; unset = none")
    payload: StoredPayload | None
    result: dict[str, Any] | None = Field(description="how it ended, as its bot reported it: exit_code, seconds, …")
    has_result: bool = Field(description="true: its command left a result, which `/v1/jobs/{id}/result` returns")
    progress: JobProgress | None = Field(default=None, description="unset = its newest attempt has told none")
    events: list[Event]
    waiting: WaitingFor | None = None
    forecast: StartForecast | None = Field(default=None, description="unset = it does not wait, or was not asked for")
    graph: NodeOf | None = Field(default=None, description="graph that contains the job")


class ListedJob(JobRow):
    """A job in a list, with what people ask of it first."""

    command: list[str] = Field(
        description="the first and last words of what it runs, each cut in its middle; empty = no longer stored"
    )
    arguments: str | None = Field(
        default=None, description="of a task's call, cut in their middle: `7, cents=1250`; unset = it calls no task"
    )
    waited_seconds: float = Field(description="from when it was queued to its last start, or so far")
    ran_seconds: float | None = Field(description="from its last start to its end, or so far; unset = not started")
    why: str | None = Field(description="in few words, why it waits or how it ended; unset = nothing is to be said")
    forecast: StartForecast | None = Field(default=None, description="unset = it does not wait, or was not asked for")


class JobList(BaseModel):
    """One page. A job that several submissions share is listed once, under its own id, with its own state."""

    jobs: list[ListedJob]
    next: str | None = Field(description="`cursor` of the page that follows; null = there is none")


class FoundIds(BaseModel):
    """Whole ids, in the order of the request's names."""

    ids: list[str]


class SelectedAnswer(BaseModel):
    """Answers in the order of the request's ids, or of the jobs that its filter chose."""

    next: str | None = Field(default=None, description="`cursor` of the call for the next jobs; null = there are none")


class ChangedJob(BaseModel):
    id: str
    state: str | None = Field(description="state after the call; null = there is no such job")
    changed: bool = Field(description="true: this call changed the job; a finished job keeps its result")
    why: str | None = Field(
        default=None,
        description="why the call left the job as it is, and what would do it; null = it changed it, or there is none",
    )


class CancelAnswer(SelectedAnswer):
    jobs: list[ChangedJob]


class HeldAnswer(SelectedAnswer):
    jobs: list[ChangedJob]


class RequeuedJob(ChangedJob):
    job: str | None = Field(
        description="job that will run now: a new job for a final one, else the same; null = the job succeeded"
    )
    left_out: bool = Field(default=False, description="true: of a filter, and it was requeued before, as `job`")


class RequeueAnswer(SelectedAnswer):
    jobs: list[RequeuedJob]


class PrioritisedJob(ChangedJob):
    priority: int | None = Field(description="priority after the call")


class PriorityAnswer(SelectedAnswer):
    """`jobs` is in the order of the request's ids or of `where`, and empty for an instance or a label."""

    jobs: list[PrioritisedJob]
    changed: int = Field(description="number of jobs whose priority changed")
    more: bool = Field(
        description="true: more jobs match; repeat the request, if it has `where` with the cursor `next`"
    )


class RescheduledJob(ChangedJob):
    starts_at: datetime | None = Field(description="earliest start after the call; unset = it may start now")


class RescheduleAnswer(SelectedAnswer):
    """In the order of the request's ids, or of `where`."""

    jobs: list[RescheduledJob]


class JobState(BaseModel):
    id: UUID
    joined: UUID | None = Field(
        description="id of the job that this submission joined; unset = the job was made for this submission"
    )
    state: str
    reason: str | None
    attempts: int
    created_at: datetime
    started_at: datetime | None = Field(description="start of the newest attempt; unset = none has started")
    finished_at: datetime | None
    result: dict[str, Any] | None
    progress: JobProgress | None = Field(default=None, description="of a job that is not final, if it was asked for")


class WaitAnswer(BaseModel):
    """Answers in the order of the request. `done`: true if all the jobs are final."""

    jobs: list[JobState]
    done: bool


class OutputAnswer(BaseModel):
    """Output of an attempt from offset `start`. Ask again with `next`; a new `attempt` starts at 0."""

    start: int
    data: str = Field(description="base64")
    next: int
    state: str
    attempt: int = Field(description="number of the attempt, from 1; 0 = none yet")
    final: bool = Field(description="true: the job, or the attempt that was asked for, has ended; no output follows")
    lost: bool = Field(description="true: the bot was lost before the end; what it had not sent by then is missing")


class ResultAnswer(BaseModel):
    result: Any = Field(description="the JSON that the job's command left, as it wrote it")
    fence: int = Field(description="fence of the attempt that left it")


class JobResult(BaseModel):
    id: UUID
    state: str
    exit_code: int | None = Field(description="exit code of the command; unset if the job is not final or never ran")
    reason: str | None = Field(description="unset if the job is not final")
    has_result: bool
    result: Any = Field(description="the JSON that the job's command left; null also without a result")


class ResultsAnswer(BaseModel):
    """Answers in the order of the request."""

    jobs: list[JobResult]
    more: bool = Field(
        description="true: the results of all these jobs are too large for one answer, which is on the first of them; "
        "ask again for the others"
    )


class Bot(BaseModel):
    name: str
    status: str
    draining: bool = Field(description="true: an operator asked that it take no more jobs")
    instance: str | None = Field(description="the only instance it serves; unset = every instance")
    pool: str | None = Field(description="pool whose instances it serves; unset = as `instance` says")
    labels: list[str]
    cohort: str
    priority: int
    capacity: int
    in_use: int
    leases: int
    properties: StoredProperties
    exclusive: list[str] = Field(description="properties that it keeps for jobs that ask for them")
    epoch: int
    opened_at: datetime | None
    host: str | None = Field(description="machine of its agent; unset = the agent did not tell it")
    pid: int | None = Field(description="process id of its agent there; unset = the agent did not tell it")
    version: str | None = Field(description="version of its software; unset = not known: the agent did not tell it")
    expires_in: float | None = Field(description="seconds until its session expires without a sync")
    probation: float | None = Field(
        description="seconds of probation left unless a job succeeds: one lease at a time; unset = not on probation"
    )
    success_rate: float | None = Field(
        description="success rate of its latest attempts, 0 to 1; unset = none was counted"
    )
    avg_latency_ms: float | None = Field(
        description="average run time of its latest attempts with a result; unset = none was counted"
    )


class LabelSuccess(BaseModel):
    """A bot's latest attempts with jobs of one label. Older attempts count less, so counts may have fractions."""

    label: str
    successes: float
    failures: float
    returned: float = Field(description="failures no longer counted, because their jobs failed on other bots too")
    success_rate: float = Field(description="0 to 1, with a prior of two successes")
    avg_latency_ms: float | None = Field(description="average run time of attempts with a result; unset = none")
    at: datetime = Field(description="time of the latest change")


class ShownBot(Bot):
    success: list[LabelSuccess] = Field(
        description="by label, latest change first; empty while success statistics are off"
    )


class BotVersion(BaseModel):
    version: str | None = Field(description="unset = not known")
    bots: int


class BotList(BaseModel):
    """Bots by name; the next page is `after` the last."""

    bots: list[Bot]
    versions: list[BotVersion] = Field(
        description="versions of all bots that have a session, whatever the page; the most frequent first, at most 100"
    )


class LabelList(BaseModel):
    """Labels of waiting jobs, in their order."""

    labels: list[str]


class DrainAnswer(BaseModel):
    name: str
    draining: bool


def job(row: Mapping[str, Any]) -> Job:
    """Make the answer from the row of `assigner.queries.jobs.job`."""
    why = row["why_it_waits"]
    waiting = None if why is None else WaitingFor(unmatchable=row["unmatchable"], sentence=why)
    preferred = _preferred(row["properties"], row["wanted_properties"] or {})
    return Job.model_validate(dict(row) | {"waiting": waiting, "preferred_properties": preferred})


def _preferred(required: Any, wanted: Any) -> Any:
    """What is wanted beside what is required; all that is stored if one of them is stored as something else."""
    if UNUSABLE in (clauses(required), clauses(wanted)):
        return wanted
    more = {key: [each for each in values if each not in required.get(key, ())] for key, values in wanted.items()}
    return {key: values for key, values in more.items() if values}


# The state of the pool.


class Tick(BaseModel):
    name: str
    age_seconds: float
    grace: bool = Field(description="true: the duty expires nothing for now, because it did not run for a while itself")


class BotsAtAGlance(BaseModel):
    bots: int
    capacity: int
    in_use: int


class Swarm(BaseModel):
    """Statistics of one cohort's bots, in units. Averages are over present bots, and unset without any."""

    cohort: str
    total: int
    idle: int
    busy: int
    offline: int
    on_probation: int
    total_in_flight: int
    avg_success_rate: float | None = Field(description="0 to 1; unset while success statistics are off")
    avg_load: float | None = Field(description="units in use over capacity, 0 to 1")
    concentration: float | None = Field(
        description="Herfindahl index of the units in use: 1 if one bot has all, 1/n if n bots have equal parts"
    )
    even_concentration: float | None = Field(description="value of the index if all bots had equal load")
    avg_latency_ms: float | None = Field(
        description="average run time of the latest attempts with a result; unset while success statistics are off"
    )


class Rates(BaseModel):
    """Jobs per second over the last minute, or over `span` seconds if more jobs moved than are read."""

    submitted: float
    granted: float = Field(
        description="jobs leased to a bot; a job that came back counts again once it is leased again or final"
    )
    started: float = Field(description="jobs that their bots reported as running; one that ends at once may be missing")
    finished: float = Field(description="jobs that reached a final state; the next four rates are its parts")
    succeeded: float
    failed: float
    cancelled: float
    dead: float
    span: float = Field(description="seconds that the rates cover, at most 60")


class Waits(BaseModel):
    """Seconds from queue to lease, of the jobs leased in the last minute, at most the newest 5,000."""

    jobs: int = Field(description="number of jobs measured")
    p50: float | None = Field(description="unset = no job was measured")
    p95: float | None
    p99: float | None


class Reads(BaseModel):
    """Where the gateway reads lists and reports, this answer too, if it has a standby for that."""

    standby: bool = Field(description="from the standby; false = from the primary, for the reason")
    lag_seconds: float | None = Field(description="how far the standby is behind at most; unset = not known")
    reason: str | None


class Paused(BaseModel):
    """A paused label, task, instance or schedule: none of its further jobs starts."""

    kind: str
    name: str
    instance: str = Field(description="only the jobs of that instance; empty = of all")
    reason: str


class PoolStatus(BaseModel):
    """The state of the pool. A caller of one instance sees only that instance's jobs and bots."""

    jobs: dict[str, int] = Field(description="by state")
    instances: dict[str, dict[str, int]] = Field(description="by instance and state")
    at_least: list[str] = Field(
        description="states and fields of this answer whose number is a lower bound, because counting stopped early"
    )
    finished_estimate: int | None = Field(
        description="stored finished jobs as of the last vacuum; unset = unknown, or the caller may not see it"
    )
    oldest_queued_seconds: float | None
    later: int = Field(description="queued jobs whose earliest start is ahead")
    unmatchable: int = Field(description="queued jobs that no present bot could run")
    bots: dict[str, BotsAtAGlance] = Field(description="by status")
    swarm: list[Swarm] = Field(description="by cohort; empty for a caller of one instance")
    capacity: int = Field(description="units of the bots that have a session")
    in_use: int
    upkeep: list[Tick]
    rates: Rates
    waits: Waits
    quotas: list[Quota]
    paused: list[Paused] = Field(description="empty for a caller of one instance")
    reads: Reads | None = Field(description="unset without a standby, and for a caller of one instance")


def status_answer(found: Mapping[str, Any], reads: Reads | None = None) -> PoolStatus:
    """Make the answer from what `assigner.queries.status.pool_status` found."""
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
        later=sum(int(count["later"]) for count in queued),
        unmatchable=sum(int(count["unmatchable"]) for count in queued),
        bots=bots,
        swarm=[Swarm.model_validate(one) for one in found["swarm"]],
        capacity=sum(seen.capacity for seen in present),
        in_use=sum(seen.in_use for seen in present),
        upkeep=[Tick.model_validate(tick) for tick in found["ticks"]],
        quotas=[Quota.model_validate(quota) for quota in found["quotas"]],
        rates=_rates(found["rates"]),
        waits=_waits(found["rates"]),
        paused=[Paused.model_validate(vars(each)) for each in found["paused"]],
        reads=reads,
    )


def _at_least(found: Mapping[str, Any]) -> list[str]:
    """Return the states and fields whose number is a lower bound.

    If the count of finished jobs stopped early, every final state may have more jobs, even one that shows none. The
    rates of grants and starts are counted from the jobs on bots.
    """
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
    """Return the estimate, or the number that was counted if that is larger: the estimate may be old."""
    return None if estimate is None else max(estimate, counted)


def _rates(row: Mapping[str, Any]) -> Rates:
    span = float(row["span"])
    counted = Rates.model_fields.keys() - {"span"}
    return Rates(span=round(span, 3), **{name: round(row[name] / span, 3) for name in counted})


def _waits(row: Mapping[str, Any]) -> Waits:
    p50, p95, p99 = (None if each is None else round(each, 6) for each in row["percentiles"] or (None, None, None))
    return Waits(jobs=row["waits"], p50=p50, p95=p95, p99=p99)
