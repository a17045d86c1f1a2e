"""What a client is told of an action, by what became of its job: one table. Pure.

A failing command is a result like another, which is not cached. What a bot's loss, a drain or a preemption does to a
job is not told: the client sees that the action waits again.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.rpc import code_pb2
from leasehold.errors import BadInput
from leasehold.states import FINAL, WAITING, EndKind, JobState, end_kind

from bots.farm.execution.actions import NOT_STARTED
from bots.farm.identity import ACTOR
from bots.farm.protos import remote_execution_pb2
from bots.farm.refusals import violations
from bots.farm.storage.upstream import Digest, parsed
from schema.validation import RUN_ACTION

_STAGE = remote_execution_pb2.ExecutionStage
#: The stage that a client is told of a job in each state.
STAGES: Mapping[JobState, int] = {
    **dict.fromkeys((*WAITING, JobState.LEASED), _STAGE.QUEUED),
    **dict.fromkeys((JobState.RUNNING, JobState.CANCELLING), _STAGE.EXECUTING),
    **dict.fromkeys(FINAL, _STAGE.COMPLETED),
}

#: What the end of a job without a result means to a client: code of google.rpc.Code. A client tries again what is
#: UNAVAILABLE or INTERNAL, and not what has a failed precondition.
_CODES: Mapping[EndKind, int] = {
    EndKind.TIMEOUT: code_pb2.DEADLINE_EXCEEDED,
    EndKind.QUEUE_TIMEOUT: code_pb2.UNAVAILABLE,
    EndKind.LOST: code_pb2.FAILED_PRECONDITION,
}
#: What the reason of a job means whose program has left nothing.
_NOT_STARTED = {f"exit code {code}": f"its bot could not start {RUN_ACTION}" for code in NOT_STARTED}


@dataclass(frozen=True)
class Left:
    """What `leasehold-action` has left of an action.

    code: of google.rpc.Code; 0 if the command ended by itself, whatever its exit code. message: what went wrong.
    result: the ActionResult. stored: the digest of one that is too large for the result of a job, which the storage
    has.
    """

    code: int = code_pb2.INTERNAL
    message: str = ""
    result: Any = None
    stored: Digest | None = None


def left(text: str | None) -> Left:
    """Read the result of a job. What is not one of `leasehold-action` says nothing."""
    try:
        found = json.loads(text or "null")
        # A lone surrogate is allowed in JSON, and in no message.
        code, message = int(found["code"]), str(found.get("message", "")).encode(errors="replace").decode()
        code_pb2.Code.Name(code)
        if "stored" in found:
            return Left(code, message, stored=Digest.parse(found["stored"]))
        if "result" not in found:
            return Left(code or code_pb2.INTERNAL, message)
        data = base64.b64decode(found["result"], validate=True)
        return Left(code, message, parsed(remote_execution_pb2.ActionResult, data, "result"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, binascii.Error, BadInput):
        return Left()


def has_waited_too_long(state: JobState, reason: str | None) -> bool:
    """Return whether an action was given up because no bot has taken it in time."""
    return state is JobState.DEAD and end_kind(state, reason) is EndKind.QUEUE_TIMEOUT


def is_suspect(state: JobState, reason: str | None, told: Left) -> bool:
    """Return whether an action could not be run, maybe for lack of inputs, so that the door looks for them."""
    if state is JobState.CANCELLED:
        return False
    code, _ = _verdict(state, reason or "", told)
    return bool(told.code == code_pb2.FAILED_PRECONDITION or code == code_pb2.INTERNAL)


def cancelled(by: str | None, *, rest: str = "") -> tuple[int, str]:
    """Return code and message for what was cancelled. by: the actor. rest: the end of the message.

    A client takes the code CANCELLED for its own doing, and Bazel then sends the action again if it has not asked for
    that. So the code stands for what the door was asked to cancel, or has withdrawn because the client had gone.
    """
    if by is None or by.startswith(ACTOR):
        return code_pb2.CANCELLED, f"cancelled{rest}"
    return code_pb2.FAILED_PRECONDITION, f"cancelled by {by}{rest}"


def response(
    state: JobState,
    reason: str | None,
    told: Left,
    *,
    job: str,
    missing: Sequence[Digest] = (),
    cancelled_by: str | None = None,
) -> Any:
    """Return the ExecuteResponse of a job that is over.

    job: its id, by which `leasehold show` tells more. missing: inputs that the storage does not have. cancelled_by: who
    has cancelled it.
    """
    if state is JobState.DEAD:
        told = Left(message=told.message)
    if state is JobState.CANCELLED:
        said = reason or "cancelled"
        rest = said.removeprefix("cancelled") if said.startswith("cancelled") else f"; {said}"
        code, message = cancelled(cancelled_by, rest=rest)
    else:
        code, message = _verdict(state, reason or "", told, len(missing))
    found = remote_execution_pb2.ExecuteResponse(message=f"job {job}")
    found.status.code = code
    found.status.message = message
    if missing and code == code_pb2.FAILED_PRECONDITION:
        found.status.details.add().Pack(violations(missing))
    if told.result is not None and code in (code_pb2.OK, code_pb2.DEADLINE_EXCEEDED):
        found.result.CopyFrom(told.result)
    return found


def _verdict(state: JobState, reason: str, told: Left, missing: int = 0) -> tuple[int, str]:
    """Code and message for a job that has ended otherwise. missing: inputs that the storage does not have."""
    if state in (JobState.SUCCEEDED, JobState.FAILED) and told.code == code_pb2.OK:
        return code_pb2.OK, ""
    if missing:
        return code_pb2.FAILED_PRECONDITION, f"the storage does not have {missing} of the action's blobs"
    if told.code == code_pb2.FAILED_PRECONDITION:
        return code_pb2.UNAVAILABLE, f"{told.message}; it has all of them now"
    if told.code != code_pb2.INTERNAL:
        return told.code, told.message or reason
    code = _CODES.get(end_kind(state, reason))
    if code is not None:
        return code, reason
    why = told.message or _NOT_STARTED.get(reason, "")
    return code_pb2.INTERNAL, ": ".join(each for each in (reason, why) if each) or "it was not run"


def is_cached(state: JobState, told: Left, *, cacheable: bool) -> bool:
    """Return whether a job's result is kept for others: only if the command has succeeded and the action allows it."""
    return (
        cacheable
        and state is JobState.SUCCEEDED
        and told.code == code_pb2.OK
        and told.result is not None
        and told.result.exit_code == 0
    )
