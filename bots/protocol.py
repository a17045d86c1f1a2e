"""Messages between bots and the gateway: JSON over HTTP, one model per message.

A bot opens a session (`POST /v1/sessions`) and then calls `POST /v1/sync` until it leaves. A sync is idempotent: the
bot lists every lease that it holds, and the answer lists every lease that the bot should hold. An unset field means
"no change". A bot may leave out leases for which nothing has changed; it says how many (`unlisted`). Earlier gateways
take a lease for lost that runs and is left out, so agents leave out only what they hold in advance.

Bots and gateways may have different versions. A bot ignores fields of answers that it does not know. A gateway refuses
fields of requests that it does not know, because to ignore one could break what the bot relies on, such as a property
that it keeps exclusive. So a bot leaves out what equals its default: it can then use every gateway that knows what the
bot really asks for. A default that has been released therefore never changes. What it tells only for people it leaves
out once a gateway has refused it (`ONLY_TOLD`, and the progress that comes with the end of an attempt).
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from leasehold import wire
from leasehold.errors import BadInput
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from schema import validation
from schema.fields import Name, Supply
from schema.timing import KILL_GRACE

#: A name of a machine: printable ASCII without spaces.
HOST = r"^[!-~]{1,253}$"
#: A version of the agent's software: printable ASCII without spaces.
VERSION = r"^[!-~]{1,64}$"
#: Fields of OpenSession without which a session works too. An agent whose gateway is too old for them leaves them out.
ONLY_TOLD = ("version",)
#: The largest number that the database's counters can hold.
MAX_COUNT = 2**63 - 1
#: Exit codes that some system has: negative for signals, and 32 bits without a sign on Windows.
LEAST_EXIT_CODE, MOST_EXIT_CODE = -(2**31), 2**32 - 1
#: Characters of the reason that a bot gives for the end of an attempt.
MAX_REASON = 500
#: The most tasks that a bot tells, the most characters of the name of one, and the most bytes of all as JSON in ASCII.
MAX_TASKS, MAX_TASK, MAX_TASKS_BYTES = 4096, 200, 128 * 1024
#: The most results of parents in one answer: together they have at most 2 MiB.
MAX_INPUTS = 32
#: The most leases in one sync, and therefore the most commands that a bot may run at once.
MAX_LEASES = 10_000


#: The most units in which one attempt may report its usage, and the largest amount of each.
MAX_UNITS_USED, MAX_USED = 16, 1e12
#: Amounts by the name of their unit, such as `tokens`, `seconds` or `cost`.
Usage = Annotated[
    dict[Name, Annotated[float, Field(ge=0, le=MAX_USED, allow_inf_nan=False, strict=True)]],
    Field(max_length=MAX_UNITS_USED),
]


def _json_text(field: str, limit: int) -> AfterValidator:
    def check(document: str) -> str:
        try:
            return validation.check_json(field, validation.check_text(field, document, limit).encode(), limit)
        except BadInput as error:
            raise ValueError(error.reason) from None

    return AfterValidator(check)


#: JSON as a text, which the database keeps as it is.
Result = Annotated[str, _json_text("result", validation.MAX_RESULT_BYTES)]
Checkpoint = Annotated[str, _json_text("checkpoint", validation.MAX_CHECKPOINT_BYTES)]


class Message(BaseModel):
    """The base of every message: immutable, strict in its types, without unknown fields, with finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Answer(Message):
    """The base of what the gateway answers. Fields that a newer gateway has added are ignored."""

    model_config = ConfigDict(extra="ignore")


class OpenSession(Message):
    """A bot opens a session.

    This raises the bot's epoch. An older session of the same name ends at once, and its jobs return to the queue. A
    job that the older session already knew waits until that session would have expired, because the older agent
    learns that its session has ended only at its next call, and may run the job until then.
    """

    bot: Name
    capacity: int = Field(
        default=1, ge=0, le=validation.MAX_UNITS, description="units of work that the bot can hold at once"
    )
    priority: int = Field(
        default=0, ge=validation.PRIORITY_MIN, le=validation.PRIORITY_MAX, description="lower = preferred"
    )
    properties: dict[str, str | list[str]] = Field(
        default={}, description="what the bot offers; a job may require a part of it"
    )
    exclusive: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        max_length=validation.MAX_PROPERTIES,
        description="names of properties that the bot offers and keeps for jobs that ask for them: it runs only jobs "
        "that require or prefer each of these",
    )
    instance: Name | None = Field(default=None, description="serve only this instance; unset = every instance")
    pool: Name | None = Field(default=None, description="serve the instances of this pool; not together with instance")
    labels: list[Annotated[str, Field(min_length=1, max_length=validation.MAX_LABEL)]] = Field(
        default=[],
        max_length=64,
        description="choose the bot's cohort: the first that has all these labels; none = the default cohort",
    )
    resources: Supply = Field(
        default={}, description="the bot's amount of each resource; a resource that is not named is unlimited"
    )
    secret: str | None = Field(
        default=None,
        min_length=32,
        max_length=200,
        description="the session's secret, drawn by the bot at random. A repeated request with the same secret "
        "returns the session that the first one opened. Unset = the server draws one",
    )
    dead_session: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256, in hex, of the secret of an earlier session. The bot has made sure that no command of "
        "that session runs any more. If this request ends that session, its jobs need not wait. Unset = not known",
    )
    cut_off: bool = Field(
        default=False,
        description="the bot itself has held `dead_session`, went on all the time, and lost it because no gateway "
        "answered. The jobs of that session are not charged with a lost bot",
    )

    host: str | None = Field(
        default=None, pattern=HOST, description="name of the agent's machine, for people. Unset = not told"
    )
    pid: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="the agent's process id there, for people. Unset = not told"
    )
    version: str | None = Field(
        default=None, pattern=VERSION, description="version of the agent's software, for people. Unset = not told"
    )

    kill_grace: float = Field(
        default=KILL_GRACE,
        ge=0,
        le=600,
        description="seconds that the bot gives a job between SIGTERM and SIGKILL: the server waits as much longer for "
        "the end of a job that is to stop, before it ends the session",
    )

    tasks: list[Annotated[str, Field(min_length=1, max_length=MAX_TASK)]] | None = Field(
        default=None,
        max_length=MAX_TASKS,
        description="names of the tasks that the bot has imported: a call of another task that it has given back for "
        "want of that task goes only to bots that have imported it, or that do not tell. Unset = not told",
    )

    @field_validator("tasks")
    @classmethod
    def _fits(cls, tasks: list[str] | None) -> list[str] | None:
        if tasks is not None and len(json.dumps(tasks)) > MAX_TASKS_BYTES:
            raise ValueError(f"is longer than {MAX_TASKS_BYTES} bytes as JSON")
        return tasks

    @field_validator("pool")
    @classmethod
    def _serves_an_instance_or_a_pool(cls, pool: str | None, info: ValidationInfo) -> str | None:
        if pool is not None and info.data.get("instance") is not None:
            raise ValueError("means nothing together with instance: a bot serves one of them")
        return pool


class Session(Answer):
    """The answer to OpenSession. `secret` is shown once. `expires_in` counts from the moment of the request."""

    bot: Name
    epoch: int
    secret: str
    expires_in: float = Field(description="seconds until the session expires unless the bot syncs")
    sync_in: float = Field(description="seconds within which the server expects the next sync")


class Chunk(Message):
    """Bytes of a job's output: stdout and stderr together in the order of writing, encoded as base64.

    `start` is the offset of the first byte in the output of this attempt. Sending a chunk twice changes nothing.
    """

    start: int = Field(ge=0, le=MAX_COUNT)
    data: str = Field(max_length=validation.MAX_OUTPUT_BYTES * 4 // 3 + 8)


class Outcome(Message):
    """How an attempt ended.

    `error`: the bot could not run the command; the attempt counts, and another bot may try. `stopped`: confirms a
    requested stop. `released`: a bot that leaves returns the job, and the attempt does not count.
    """

    verdict: Literal["succeeded", "failed", "error", "stopped", "released"]
    exit_code: int | None = Field(
        default=None,
        ge=LEAST_EXIT_CODE,
        le=MOST_EXIT_CODE,
        description="exit code of the command; negative = killed by that signal",
    )
    reason: str | None = Field(default=None, max_length=MAX_REASON, description="e.g. `timeout after 60 s`")
    seconds: float | None = Field(default=None, ge=0, le=MAX_USED, description="run time on the bot's monotonic clock")
    output_bytes: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="bytes written by the command, including those that were cut off",
    )
    output_truncated: bool = False
    usage: Usage | None = Field(default=None, description="what the attempt used, by unit: tokens, seconds, cost")
    result: Result | None = Field(
        default=None,
        description="JSON of at most 64 KiB that the command left as its result, as a text. It is stored if this "
        "attempt ends the job",
    )
    again: float | None = Field(
        default=None,
        ge=0,
        le=validation.YEAR,
        description="with `released`: the seconds after which the command asks to be run again",
    )
    retry_in: float | None = Field(
        default=None,
        ge=0,
        le=validation.YEAR,
        description="with `failed`: seconds until the next attempt, if the job is tried again; unset: as the pool says",
    )
    final: bool | None = Field(default=None, description="with `failed`: true: the job is not tried again")
    unknown_task: bool | None = Field(
        default=None,
        description="with `released`: the job is a call of a task that the bot has not imported. From then on it goes "
        "only to bots that have, or that do not tell which they have",
    )


class Progress(Message):
    """How far a command says that it is, or that it was when it ended."""

    share: float = Field(ge=0, le=1, description="0 = nothing is done, 1 = everything")
    text: str = Field(default="", max_length=wire.MAX_PROGRESS_TEXT, description="what is being done, in words")
    number: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="counts what the attempt has told: a late call replaces no later one",
    )


class LeaseReport(Message):
    """The bot's report on one lease that it holds."""

    job: str = Field(max_length=64, description="public id of the job")
    fence: int = Field(ge=0, le=MAX_COUNT, description="the lease's fence; a report with another fence changes nothing")
    state: Literal["pending", "active", "completed"]
    outcome: Outcome | None = Field(default=None, description="set if and only if the state is `completed`")
    output: list[Chunk] = Field(default_factory=list, max_length=64, description="output not sent before")
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="JSON of at most 64 KiB, as a text: the latest checkpoint of the command, if it was not sent "
        "before. The next attempt of the job is given it",
    )
    checkpoint_number: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="counts the checkpoints of this attempt: a late call with an earlier one replaces no later one",
    )
    progress: Progress | None = Field(
        default=None, description="the last one of a command that has ended, if it was not sent before"
    )


class Sync(Message):
    """The one call of a bot: it reports its leases and receives the leases it should have.

    `seq` starts at 1 and grows by 1 with each new call of a session. A repeated call carries the same seq and body.
    Its report is not applied twice, and its answer is the leases that the bot should have now.
    """

    bot: Name
    epoch: int = Field(ge=1, le=MAX_COUNT)
    secret: str = Field(max_length=200)
    seq: int = Field(ge=1, le=MAX_COUNT)
    status: Literal["ok", "unhealthy", "draining", "gone"] = Field(
        default="ok",
        description="`draining`: the bot takes no new work; the call is not held unless an operator drains it. `gone`: "
        "closes the session and queues the jobs that it still held; the same call again is answered with "
        "`session_over`",
    )
    capacity: int | None = Field(default=None, ge=0, le=validation.MAX_UNITS)
    leases: list[LeaseReport] = Field(default_factory=list, max_length=MAX_LEASES, fail_fast=True)
    unlisted: int = Field(
        default=0,
        ge=0,
        le=MAX_LEASES,
        description="how many leases the bot holds beside the listed ones. It was told of them, has reported no end of "
        "them, and has no news of them. 0 = every lease is listed",
    )
    ahead: bool = Field(
        default=False,
        description="a part of the capacity is for leases of short tasks in advance. A call that completes a job then "
        "fills all of it, unless constrained jobs wait that an assigner could place on the bot",
    )
    wait: float = Field(
        default=0.0,
        ge=0,
        le=60,
        description="seconds for which the server may hold the answer while it has no news for the bot, if all leases "
        "are listed and active. A later call of the session ends that",
    )

    # One validator for the whole list: a Python call for each report would make the validation of a large sync slower.
    @field_validator("leases")
    @classmethod
    def _contradicts_nothing(cls, leases: Sequence[LeaseReport]) -> Sequence[LeaseReport]:
        said = set[tuple[str, int]]()
        for number, report in enumerate(leases):
            if (report.outcome is None) == (report.state == "completed"):
                needed = "is required" if report.outcome is None else "means nothing"
                raise _contradiction((number, "outcome"), f"{needed} when the state is '{report.state}'")
            if (report.job, report.fence) in said:
                raise _contradiction((number, "job"), "is reported twice with the same fence")
            said.add((report.job, report.fence))
        return leases


def _contradiction(place: tuple[int, str], reason: str) -> ValidationError:
    problem = PydanticCustomError("contradiction", reason)
    return ValidationError.from_exception_data("Sync", [{"type": problem, "loc": place, "input": None}])


class Work(Answer):
    """One lease that the bot should have. It carries the payload until the bot has reported this lease."""

    job: str
    fence: int
    state: Literal["pending", "active", "cancelling"] = Field(description="`cancelling`: kill the command and confirm")
    stop_reason: str | None = Field(
        default=None,
        description="why the bot shall stop it; set if and only if the state is `cancelling`: `cancel`, `timeout`, "
        "`ceiling`, `preempt`, `drain`, `unacknowledged`, or a word of a newer gateway",
    )
    instance: str
    attempt: int = Field(description="1 for the first")
    timeout: float | None = Field(default=None, description="seconds of run time after which the bot kills the command")
    units: int | None = Field(default=None, description="units of the bot that the lease takes; unset = 1")
    payload: dict[str, Any] | None = None
    gpus: list[int] | None = Field(
        default=None,
        description="numbers of the bot's GPUs that the job is given, from 0; set, with the payload, for a job that "
        "takes some of a bot that has declared gpus",
    )
    checkpoint: str | None = Field(
        default=None,
        description="JSON as a text, set with the payload: the checkpoint that an earlier attempt of the job left",
    )


class SyncAnswer(Answer):
    """The leases that the bot should have, and when to call next.

    A lease that this answer does not list is over: the bot stops its command and forgets it. If `unlisted` is set, that
    is only true of leases that the bot has listed.
    """

    seq: int
    leases: list[Work]
    unlisted: int = Field(
        default=0,
        description="how many leases the bot still holds that neither it nor this answer lists: the number of the "
        "call, or 0 if the bot must forget them",
    )
    drain: bool = Field(default=False, description="an operator asks the bot to take no more work")
    expires_in: float = Field(description="seconds after the request by which the bot must have killed its commands")
    sync_in: float


class OutputReport(Message):
    """Output, checkpoint and progress of one running lease, sent between syncs (`POST /v1/output`)."""

    bot: Name
    epoch: int = Field(ge=1, le=MAX_COUNT)
    secret: str = Field(max_length=200)
    job: str = Field(max_length=64)
    fence: int = Field(ge=0, le=MAX_COUNT)
    output: list[Chunk] = Field(max_length=64)
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="JSON of at most 64 KiB, as a text: the latest checkpoint of the command, if it has changed. The "
        "next attempt of the job is given it",
    )
    checkpoint_number: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="counts the checkpoints of this attempt: a late call with an earlier one replaces no later one",
    )
    progress: Progress | None = Field(default=None, description="the latest, if it has changed")


class AskInputs(Message):
    """A bot asks for the results of nodes on which the node of one of its leases depends (`POST /v1/inputs`)."""

    bot: Name
    epoch: int = Field(ge=1, le=MAX_COUNT)
    secret: str = Field(max_length=200)
    job: str = Field(max_length=64)
    fence: int = Field(ge=0, le=MAX_COUNT)
    nodes: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(min_length=1, max_length=MAX_INPUTS)


class Inputs(Answer):
    """The results of those of the nodes that the leased one depends on, by number."""

    results: dict[str, dict[str, Any]] = Field(description="`state` of each node, and its `result`, null for none")
