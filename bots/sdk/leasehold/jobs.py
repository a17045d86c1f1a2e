"""Jobs as a program sees them: what it may ask for, what it is told of a job, and how a job ended.

The classes are made from the gateway's JSON objects. They leave out fields that they do not know, so that a newer
gateway can be used; `/openapi.json` of a gateway describes all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, TypedDict

from leasehold.calls import backlog
from leasehold.client import Job
from leasehold.errors import BadInput, NotSucceeded
from leasehold.states import FINAL, JobState

Record = Mapping[str, Any]


class TaskFields(TypedDict, total=False):
    """The fields of a request that a task may have too, under the same name and with the same type."""

    env: Mapping[str, str]
    label: str
    metadata: Mapping[str, str]
    schedule_after: str
    delay: float
    on_conflict: Literal["join", "replace", "refuse"]
    unique_for: float
    debounce: float
    debounce_max: float
    retry: Mapping[str, Any]
    max_lost: int
    preferred_properties: Mapping[str, str | Sequence[str]]
    prefer_seconds: float
    units: int
    resources: Mapping[str, int]
    locality_hint: str
    batch_key: str
    job_class: str
    user_priority: int
    service_level: str
    graph_priority: int
    deadline_seconds: float
    estimated_seconds: float
    preferred_hours: Sequence[int]
    preferred_zone: str
    locks: Sequence[str]
    resource_class: str
    model: str
    estimated_cost: float
    queue_timeout_seconds: float
    owner: str
    project: str


class NodeFields(TaskFields, total=False):
    """The fields of a request that a node of a graph may have too, except its command; `leasehold submit --help` says
    what each of them means. Durations are in seconds; `schedule_after` is a time with an offset, in ISO 8601."""

    stdin: str
    properties: Mapping[str, str | Sequence[str]]
    priority: int
    timeout_seconds: float
    max_attempts: int
    retry_failed: bool


class JobFields(NodeFields, total=False):
    """The fields of a request, except its command."""

    instance: str
    key: str
    dedup_key: str


class JobRequest(JobFields):
    """A request for one job, as a dictionary."""

    command: Sequence[str]


class JobFilter(TypedDict, total=False):
    """What jobs must be like, all of it together; see `leasehold list --help`. Times are datetimes with a zone."""

    state: JobState | Sequence[JobState]
    instance: str
    cohort: str
    label: str
    task: str
    metadata: Mapping[str, str]
    properties: Mapping[str, str]
    job_class: str
    owner: str
    project: str
    unmatchable: bool
    bot: str
    min_priority: int
    max_priority: int
    submitted_after: datetime
    submitted_before: datetime
    queued_after: datetime
    queued_before: datetime
    started_after: datetime
    started_before: datetime
    ended_after: datetime
    ended_before: datetime


Sort: TypeAlias = Literal["submitted", "queued", "started", "ended", "priority"]


@dataclass(frozen=True, kw_only=True)
class ListedJob:
    """What a list tells of a job, as it was at the time of the call.

    priority: lower is more urgent. attempts: those that count. reason: why it is in its state, if anything is known.
    schedule_after: it waits at least until then. bot: the bot that has it, or had it last.
    """

    id: str
    instance: str
    label: str
    state: JobState
    priority: int
    units: int
    attempts: int
    max_attempts: int
    reason: str | None
    created_at: datetime
    queued_at: datetime
    schedule_after: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    bot: str | None
    metadata: Mapping[str, str]

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self.state in FINAL

    @classmethod
    def of(cls, record: Record) -> Self:
        return cls(**_known(cls, record))


@dataclass(frozen=True, kw_only=True)
class Event:
    """One change of a job's state. actor: who made it. fence: the fence of the job's attempt at that time."""

    move: str
    before: JobState | None
    after: JobState
    at: datetime
    actor: str
    fence: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the newest attempt of a job says that it is, and when it said so.

    share: of the whole work, from 0 to 1.
    """

    share: float
    text: str
    at: datetime

    @classmethod
    def of(cls, record: Record) -> Self:
        return cls(share=record["share"], text=record["text"], at=datetime.fromisoformat(record["at"]))


def progress_news(tell: Callable[[str, Progress], object]) -> Callable[[Record], None]:
    """Return what takes records of jobs with their progress, and calls `tell` with an id where that has changed."""
    known: dict[str, Progress] = {}

    def told(record: Record) -> None:
        found = Progress.of(record["progress"])
        if known.get(record["id"]) != found:
            known[record["id"]] = found
            tell(record["id"], found)

    return told


@dataclass(frozen=True, kw_only=True)
class ShownJob(ListedJob):
    """Everything about one job, as it was at the time of the call.

    waiting: why a waiting job does not run. progress: None if it has told none. events: its history, oldest
    first. record: the gateway's whole answer.
    """

    properties: Mapping[str, Sequence[str]]
    waiting: str | None
    progress: Progress | None
    events: tuple[Event, ...]
    record: Record = field(repr=False, compare=False)

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments; empty if the gateway no longer has them."""
        return tuple((self.record.get("payload") or {}).get("command", ()))

    @classmethod
    def of(cls, record: Record) -> Self:
        waiting = record.get("waiting")
        events = tuple(
            Event(
                move=each["move"],
                before=None if each["from"] is None else JobState(each["from"]),
                after=JobState(each["to"]),
                at=datetime.fromisoformat(each["at"]),
                actor=each["actor"],
                fence=each["fence"],
            )
            for each in record["events"]
        )
        progress = record.get("progress")
        told = {
            "waiting": None if waiting is None else waiting["sentence"],
            "progress": None if progress is None else Progress.of(progress),
            "events": events,
            "record": record,
        }
        return cls(**_known(cls, record) | told)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The state of a job, and how it ended if it has.

    exit_code: of the command; negative = killed by that signal; None = it did not end by itself.
    seconds: run time of the last attempt. output_bytes: bytes that the command wrote, also those that were cut off.
    """

    id: str
    state: JobState
    reason: str | None
    attempts: int
    exit_code: int | None
    seconds: float | None
    output_bytes: int | None
    output_truncated: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    read: Callable[[str], bytes] = field(repr=False, compare=False)

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self.state in FINAL

    @property
    def succeeded(self) -> bool:
        """True if the command has exited with 0."""
        return self.state is JobState.SUCCEEDED

    @cached_property
    def output(self) -> bytes:
        """Standard output and error of the newest attempt in the order of writing, read from the gateway when asked."""
        return self.read(self.id)

    @property
    def text(self) -> str:
        """The output as UTF-8; other bytes are replaced."""
        return self.output.decode(errors="replace")

    def check(self) -> Self:
        """Return this result if the job has succeeded; raise NotSucceeded."""
        if not self.succeeded:
            raise NotSucceeded(self.id, self.state, self.reason, exit_code=self.exit_code)
        return self

    @classmethod
    def of(cls, record: Record, *, read: Callable[[str], bytes]) -> Self:
        told = record.get("result") or {}
        names = ("exit_code", "seconds", "output_bytes")
        ending = {name: told.get(name) for name in names} | {"output_truncated": bool(told.get("output_truncated"))}
        succeeded = record["state"] == JobState.SUCCEEDED
        reason = record["reason"] or (None if succeeded else told.get("reason"))
        return cls(**_known(cls, record) | ending | {"reason": reason, "read": read})


@dataclass(frozen=True)
class CancelledJob:
    """The answer to a cancel. state: after the call, None = there is no such job. changed: by this call."""

    id: str
    state: JobState | None
    changed: bool


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a job runs where it runs, or why it does not run.

    sentence: the cause in words. change: the smallest change that would start it. record: the gateway's whole answer,
    with the evidence for each gate.
    """

    id: str
    state: JobState
    sentence: str
    change: tuple[str, ...]
    record: Record = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What a submit would do, which has not been made.

    outcome: `new`, `join`, `replace`, or `known` = the job with the key would be the answer. job: the id of the job
    that is there already. sentence: why the job would run or wait; None if it is not kept any more. bot: the bot that
    would take it now, which only operators see. record: the gateway's whole answer.
    """

    outcome: Literal["new", "join", "replace", "known"]
    job: str | None
    sentence: str | None
    bot: str | None
    record: Record = field(repr=False, compare=False)

    @classmethod
    def of(cls, record: Record) -> Self:
        explanation, bot = record["explanation"], record["bot"]
        return cls(
            outcome=record["outcome"],
            job=record["job"],
            sentence=None if explanation is None else explanation["sentence"],
            bot=None if bot is None else bot["name"],
            record=record,
        )


#: Whatever names a job; the job of a task is a `Job` too.
AnyJob: TypeAlias = str | Job | ListedJob | Result


def job_id(job: AnyJob) -> str:
    """Return the id of a job. Raises BadInput if a text is none."""
    return backlog.job_id(job if isinstance(job, str) else job.id)


def job_ids(jobs: AnyJob | Iterable[AnyJob]) -> list[str]:
    """Return the ids of one job or of several, each once, in their order."""
    given = [jobs] if isinstance(jobs, str | Job | ListedJob | Result) else jobs
    return list(dict.fromkeys(map(job_id, given)))


def request(command: Sequence[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for one job. Raises BadInput if the command is a text, which no shell would split."""
    if isinstance(command, str | bytes):
        raise BadInput("command", "is a text; give a list of the program and its arguments, such as ['make', 'test']")
    return {**fields, "command": list(command)}


def requests(jobs: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the request of each of many jobs. Raises BadInput for what is no list of them."""
    if isinstance(jobs, str | bytes | Mapping):
        raise BadInput("jobs", f'are many, such as [{{"command": ["true"]}}], and not one \'{type(jobs).__name__}\'')
    for number, job in enumerate(jobs):
        if not isinstance(job, Mapping) or "command" not in job:
            raise BadInput(f"jobs.{number}", 'is not the fields of a job, such as {"command": ["true"]}')
        yield request(job["command"], job)


def query(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a filter in the form of the gateway's query."""
    return {name: _asked(value) for name, value in wanted.items()}


def _asked(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case Mapping():
            return [f"{key}={each}" for key, each in value.items()]
        case _:
            return value


def _known(cls: type, record: Record) -> dict[str, Any]:
    """The fields of `cls` that are in the record, in their types."""
    names = {each.name for each in fields(cls)}
    known = {name: value for name, value in record.items() if name in names}
    for name, value in known.items():
        if name == "state":
            known[name] = JobState(value)
        elif value is not None and (name.endswith("_at") or name == "schedule_after"):
            known[name] = datetime.fromisoformat(value)
    return known
