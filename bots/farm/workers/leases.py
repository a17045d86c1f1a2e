"""Between a worker's session and the calls of a bot: names, what a worker reports, what it is told. Pure.

What a worker leaves of an action is written as `leasehold-action` leaves it, so the door reads one form.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import code_pb2
from leasehold.errors import BadInput, NotFound
from leasehold.wire import NAME_FORM, escaped

from bots.farm.protos import remote_execution_pb2, remote_workers_pb2
from bots.farm.storage.upstream import MOST_READ, Digest
from bots.protocol import MAX_REASON, LeaseReport, OpenSession, Outcome
from bots.sync.call import Due
from bots.sync.leases import JOB_ID
from schema.states import LeaseState
from schema.validation import FARM, MAX_UNITS, NAME, OF_FARM, PRIORITY_MAX, PRIORITY_MIN

_BOT, _LEASE = remote_workers_pb2.BotStatus, remote_workers_pb2.LeaseState
#: The type of an action's result and of its digest, in leases.
RESULT, DIGEST = (f"type.googleapis.com/{each.DESCRIPTOR.full_name}" for each in (
    remote_execution_pb2.ActionResult, remote_execution_pb2.Digest))  # fmt: skip
#: Bytes of a result that are left with the job; more go into the storage. In base64 and JSON that is below 64 KiB.
MOST_LEFT = 42 * 1024
#: Seconds after which a worker with leases shall call again: buildbox-worker sleeps for most of them while it is full.
CALL_AGAIN = 1.0
#: Seconds that a worker gets to end an action, beyond the period of its calls.
KILL_GRACE = 5.0
STATUSES: Mapping[int, str] = {
    _BOT.BOT_STATUS_UNSPECIFIED: "ok",
    _BOT.OK: "ok",
    _BOT.UNHEALTHY: "unhealthy",
    _BOT.HOST_REBOOTING: "draining",
    _BOT.INITIALIZING: "draining",
    _BOT.BOT_TERMINATING: "draining",
}
_ENDED = (_LEASE.COMPLETED, _LEASE.CANCELLED)
_STATES = {
    LeaseState.PENDING: _LEASE.PENDING,
    LeaseState.ACTIVE: _LEASE.ACTIVE,
    LeaseState.CANCELLING: _LEASE.CANCELLED,
}


@dataclass(frozen=True)
class SessionName:
    """The name of a worker's session, by which any door takes it over: `PARENT/BOT.EPOCH.SECRET`."""

    parent: str
    bot: str
    epoch: int
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "SessionName":
        """Return the name that a text is. Raises NotFound, which does not say the text: it may hold a secret."""
        parent, _, name = text.rpartition("/")
        try:
            bot, epoch, secret = name.rsplit(".", 2)
            return cls(parent, bot, int(epoch), secret)
        except ValueError:
            raise NotFound("name: is not that of a session") from None

    def __str__(self) -> str:
        return f"{self.parent}/{self.bot}.{self.epoch}.{self.secret}"


def opening(asked: Any, *, instance: str | None) -> OpenSession:
    """Return the session that a worker wants. instance: that it serves, None = all. Raises BadInput, ValidationError.

    Its properties are those of its first device; whatever it says, it runs actions and nothing else.
    """
    if not NAME.fullmatch(asked.bot_id):
        raise BadInput("bot_session.bot_id", f"'{escaped(asked.bot_id, 80)}' is not a name: {NAME_FORM}")
    offered: dict[str, str | list[str]] = {}
    said = [each for device in asked.worker.devices[:1] for each in device.properties]
    for name in {each.key for each in said}:
        offered[name] = [each.value for each in said if each.key == name]
    configs = {each.key: each.value for each in asked.worker.configs}
    return OpenSession(
        bot=asked.bot_id,
        capacity=_number(configs, "capacity", 1, least=0, most=MAX_UNITS),
        priority=_number(configs, "priority", 0, least=PRIORITY_MIN, most=PRIORITY_MAX),
        properties=offered | {FARM: [OF_FARM]},
        exclusive=[FARM],
        instance=instance,
        kill_grace=KILL_GRACE,
    )


def _number(configs: Mapping[str, str], name: str, default: int, *, least: int, most: int) -> int:
    try:
        found = int(configs.get(name, default))
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        reason = f"'{escaped(configs[name], 40)}' is no whole number from {least} to {most}"
        raise BadInput(f"bot_session.worker.configs.{name}", reason)
    return found


def status(session: Any) -> str:
    """Return what a bot would say of itself. A worker that ends is gone once it has ended all its leases."""
    if session.status == _BOT.BOT_TERMINATING and all(lease.state in _ENDED for lease in session.leases):
        return "gone"
    return STATUSES.get(session.status, "unhealthy")


def large(session: Any) -> dict[str, bytes]:
    """Return the results that are too large to be left with their jobs, by the ids of their leases."""
    return {
        lease.id: lease.result.value
        for lease in session.leases
        if lease.state in _ENDED
        and lease.result.type_url == RESULT
        and MOST_LEFT < len(lease.result.value) <= MOST_READ
    }


def not_run(session: Any) -> dict[str, Digest]:
    """Return the actions that a worker could not run, as it says, by the ids of their leases.

    Workers do not say that inputs are missing, so the door looks for them. What it tells of that it finds itself.
    """
    found, digest = {}, remote_execution_pb2.Digest()
    for lease in session.leases:
        if lease.state == _LEASE.COMPLETED and lease.status.code == code_pb2.INTERNAL:
            try:
                lease.payload.Unpack(digest)
                found[lease.id] = Digest.read(digest, "payload")
            except (BadInput, DecodeError):
                continue
    return found


def reports(session: Any, stored: Mapping[str, Digest], absent: Mapping[str, int]) -> list[LeaseReport]:
    """Return what a bot would report of the leases that a worker lists. One that no door has named is left out.

    stored: the digests of large results, which the storage has. absent: how many inputs of actions it does not have.
    """
    leaves = session.status == _BOT.BOT_TERMINATING
    found = []
    for lease in session.leases:
        job, _, fence = lease.id.rpartition("/")[2].rpartition(".")
        if not (JOB_ID.fullmatch(job) and fence.isascii() and fence.isdecimal() and len(fence) < 19):
            continue
        if lease.state in _ENDED:
            ended = outcome(lease, leaves=leaves, stored=stored.get(lease.id), absent=absent.get(lease.id, 0))
            found.append(LeaseReport(job=job, fence=int(fence), state="completed", outcome=ended))
        else:
            active = lease.state == _LEASE.ACTIVE
            found.append(LeaseReport(job=job, fence=int(fence), state="active" if active else "pending"))
    return found


def outcome(lease: Any, *, leaves: bool, stored: Digest | None = None, absent: int = 0) -> Outcome:
    """Return how the attempt of a lease ended, by what its worker says. leaves: the worker ends.

    With absent inputs the action ends at once: no worker could run it, and this one has done nothing wrong.
    """
    code, message = lease.status.code, escaped(lease.status.message, 300)
    if lease.state == _LEASE.CANCELLED or code == code_pb2.CANCELLED:
        return Outcome(verdict="stopped")
    if code == code_pb2.UNAVAILABLE and leaves:
        return Outcome(verdict="released", reason="its worker ended")
    if absent:
        return _given_up(code_pb2.FAILED_PRECONDITION, f"the storage does not have {absent} of its blobs")
    if len(lease.result.value) > MOST_READ:
        return _given_up(code_pb2.INTERNAL, f"its result has more than {MOST_READ} bytes")
    exit_code = _exit_code(lease.result) if code in (code_pb2.OK, code_pb2.DEADLINE_EXCEEDED) else None
    if exit_code is None and code != code_pb2.DEADLINE_EXCEEDED:
        word = code_pb2.Code.Name(code) if code in code_pb2.Code.values() else f"code {code}"
        reason = "its worker left no result" if code == code_pb2.OK else f"{word}: {message}"
        told = json.dumps({"code": code_pb2.INTERNAL, "message": reason})
        return Outcome(verdict="error", reason=reason[:MAX_REASON], result=told)
    left: dict[str, Any] = {"code": code}
    if code:
        left["message"] = message or "the action ran longer than its timeout"
    if stored is not None:
        left["stored"] = str(stored)
    elif exit_code is not None:
        left["result"] = base64.b64encode(lease.result.value).decode()
    if code == code_pb2.OK and exit_code == 0:
        return Outcome(verdict="succeeded", exit_code=0, result=json.dumps(left))
    # The action's own exit code is in its result; here some would say that it was not run.
    return Outcome(verdict="failed", exit_code=1, final=True, result=json.dumps(left))


def _given_up(code: int, message: str) -> Outcome:
    told = json.dumps({"code": code, "message": message})
    return Outcome(verdict="failed", exit_code=1, final=True, reason=message, result=told)


def _exit_code(result: Any) -> int | None:
    if result.type_url != RESULT:
        return None
    try:
        code: int = remote_execution_pb2.ActionResult.FromString(result.value).exit_code
        return code
    except DecodeError:
        return None


def answer(said: Any, name: SessionName, told: Due, digests: Mapping[tuple[int, int], Digest], *, now: float) -> Any:
    """Return the session as it should be. digests: of the actions of leases, by job and fence. now: wall time."""
    found = remote_workers_pb2.BotSession()
    found.CopyFrom(said)
    found.name = str(name)
    del found.leases[:]
    for lease in told.leases:
        one = found.leases.add(id=lease_id(lease), state=_STATES[LeaseState(lease.state)])
        digest = digests.get((lease.job_id, lease.fence))
        if digest is not None:
            one.payload.type_url, one.payload.value = DIGEST, digest.message.SerializeToString()
    found.expire_time.FromNanoseconds(int((now + (CALL_AGAIN if told.leases else told.expires_in)) * 1e9))
    return found


def lease_id(lease: Any) -> str:
    """Return what a worker calls a lease: what is before the last `/` is the instance of its job."""
    return f"{lease.instance}/{lease.public_id}.{lease.fence}"


def refused(leases: Sequence[Any], unfit: Sequence[Any]) -> list[LeaseReport]:
    """Return reports of leases as they are, but that those which run no action of a door have ended."""
    ended = Outcome(verdict="error", reason="it runs no action that the farm door knows")
    return [
        LeaseReport(job=each.public_id, fence=each.fence, state="completed", outcome=ended)
        if each in unfit
        else LeaseReport(job=each.public_id, fence=each.fence, state=_reported(each.state))
        for each in leases
    ]


def _reported(state: str) -> Any:
    return "pending" if state == LeaseState.PENDING else "active"
