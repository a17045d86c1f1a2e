"""What bots and the gateway say to each other: JSON over HTTP, one model per message, every field explained.

A bot opens a session (`POST /v1/sessions`) and then calls `POST /v1/sync` for as long as it lives. Sync is one
idempotent statement of state: the bot lists every lease that it holds, the answer lists every lease that it should
have. Unset fields mean "carry on as before".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schema import validation
from schema.validation import Name, Supply

#: The largest number that the database's counters can hold.
MAX_COUNT = 2**63 - 1
#: Leases in one sync, and so the commands that a bot may run side by side.
MAX_LEASES = 10_000


#: Units in which one attempt may tell what it has used, and the largest amount of each.
MAX_UNITS_USED, MAX_USED = 16, 1e12
#: Amounts by unit, each of them a name: `tokens`, `seconds`, `cost`.
Usage = Annotated[
    dict[Name, Annotated[float, Field(ge=0, le=MAX_USED, allow_inf_nan=False, strict=True)]],
    Field(max_length=MAX_UNITS_USED),
]


class Message(BaseModel):
    """Every message is immutable, refuses unknown fields, and takes only finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OpenSession(Message):
    """A bot introduces itself. Opening raises the bot's epoch: an older session of the same name is over at once
    and the jobs it held are queued again. Those it had been told of are not given to anybody before that session
    would have expired, because its agent learns of its end only at its next call."""

    bot: Name
    capacity: int = Field(default=1, ge=0, le=validation.MAX_UNITS, description="units of work it can hold at once")
    priority: int = Field(
        default=0, ge=validation.PRIORITY_MIN, le=validation.PRIORITY_MAX, description="lower = preferred"
    )
    properties: dict[str, str | list[str]] = Field(default={}, description="what it offers; jobs require subsets")
    instance: Name | None = Field(default=None, description="serve only this instance; unset = every instance")
    pool: Name | None = Field(default=None, description="serve the instances of this pool; not together with instance")
    labels: list[Annotated[str, Field(min_length=1, max_length=validation.MAX_LABEL)]] = Field(
        default=[],
        max_length=64,
        description="decide its cohort: the first one whose labels contain all of them; none = the default cohort",
    )
    resources: Supply = Field(
        default={}, description="what it has of each for jobs that ask for it; any amount of what is not named"
    )
    secret: str | None = Field(
        default=None,
        min_length=32,
        max_length=200,
        description="of the session, made by the bot at random, so that an opening may be repeated: the same secret "
        "finds the session it has opened before; unset = the server makes one",
    )
    dead_session: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256, in hex, of the secret of an earlier session of which the bot knows for sure that "
        "nothing runs any more: if that is the one this opening ends, its jobs need not wait; unset = not known",
    )


class Session(Message):
    """The answer to OpenSession. `secret` is shown once; `expires_in` counts from when the request was sent."""

    bot: Name
    epoch: int
    secret: str
    expires_in: float = Field(description="seconds until the server gives this bot's work away unless it syncs")
    sync_in: float = Field(description="seconds after which the next sync is expected at the latest")


class Chunk(Message):
    """Bytes of a job's output: stdout and stderr in the order in which they were written, base64-encoded.
    `start` is the offset of the first byte since the attempt began; sending a chunk twice changes nothing."""

    start: int = Field(ge=0, le=MAX_COUNT)
    data: str = Field(max_length=validation.MAX_OUTPUT_BYTES * 4 // 3 + 8)


class Outcome(Message):
    """How an attempt ended. `error` means that the bot could not run the command at all, which is charged to the
    attempt and tried elsewhere; `stopped` confirms a requested stop; `released` gives back work that a draining bot
    will not finish, uncharged."""

    verdict: Literal["succeeded", "failed", "error", "stopped", "released"]
    exit_code: int | None = Field(default=None, description="of the command; negative = killed by that signal")
    reason: str | None = Field(default=None, max_length=500, description="e.g. `timeout after 60 s`")
    seconds: float | None = Field(default=None, ge=0, description="run time on the bot's monotonic clock")
    output_bytes: int | None = Field(default=None, ge=0, description="bytes written by the command, also those cut")
    output_truncated: bool = False
    usage: Usage | None = Field(default=None, description="what it has used, by unit: tokens, seconds, cost")


class LeaseReport(Message):
    """What the bot says of one lease it holds."""

    job: str = Field(max_length=64, description="public id of the job")
    fence: int = Field(ge=0, le=MAX_COUNT, description="of the lease; a report with another fence changes nothing")
    state: Literal["pending", "active", "completed"]
    outcome: Outcome | None = Field(default=None, description="set if and only if the state is `completed`")
    output: list[Chunk] = Field(default=[], max_length=64, description="output not sent before")


class Sync(Message):
    """The one call. `seq` starts at 1 and grows by 1 with every new call of a session; a repeated call carries the
    same seq and body and gets the same answer."""

    bot: Name
    epoch: int = Field(ge=1, le=MAX_COUNT)
    secret: str = Field(max_length=200)
    seq: int = Field(ge=1, le=MAX_COUNT)
    status: Literal["ok", "unhealthy", "draining", "gone"] = Field(
        default="ok",
        description="`draining` takes no new work; `gone` closes the session and queues what it still held; "
        "that call, repeated, is answered by `session_over`",
    )
    capacity: int | None = Field(default=None, ge=0, le=validation.MAX_UNITS)
    leases: list[LeaseReport] = Field(default=[], max_length=MAX_LEASES, fail_fast=True)
    wait: float = Field(default=0.0, ge=0, le=60, description="seconds an answer without news may be held back")


class Work(Message):
    """One lease the bot should have. The payload is present while the server has not heard that the bot has it."""

    job: str
    fence: int
    state: Literal["pending", "active", "cancelling"] = Field(description="`cancelling`: kill it and confirm")
    stop_reason: Literal["cancel", "timeout", "preempt", "drain", "unacknowledged"] | None = Field(
        default=None, description="why it is to be stopped; set if and only if the state is `cancelling`"
    )
    instance: str
    attempt: int = Field(description="1 for the first")
    timeout: float | None = Field(default=None, description="seconds of run time after which the bot kills it")
    payload: dict[str, Any] | None = None


class SyncAnswer(Message):
    """What the bot should have, and when to call next. A lease the bot reported that is not listed is over: stop it
    if it still runs and forget it."""

    seq: int
    leases: list[Work]
    drain: bool = Field(default=False, description="an operator asks the bot to take no more work")
    expires_in: float = Field(description="seconds from sending the request until the bot must have killed its work")
    sync_in: float


class OutputReport(Message):
    """Output of one running lease, streamed between syncs (`POST /v1/output`)."""

    bot: Name
    epoch: int = Field(ge=1, le=MAX_COUNT)
    secret: str = Field(max_length=200)
    job: str = Field(max_length=64)
    fence: int = Field(ge=0, le=MAX_COUNT)
    output: list[Chunk] = Field(max_length=64)
