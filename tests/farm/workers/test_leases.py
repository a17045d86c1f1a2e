"""What a worker says and is told, as tables: its status, the ends of its leases, and what it offers."""

import json
from typing import Any

import pytest
from google.rpc import code_pb2
from leasehold.errors import BadInput
from leasehold.states import JobState

from bots.farm.execution import outcome
from bots.farm.protos import remote_execution_pb2, remote_workers_pb2
from bots.farm.storage.upstream import MOST_READ, Digest
from bots.farm.workers import leases
from bots.protocol import Outcome
from tests.support.farm.workers import State, Status

C = code_pb2
RESULT = {"stdout_raw": b"said"}


def lease(code: int, *, state: int = State.COMPLETED, message: str = "why", **result: Any) -> Any:
    found = remote_workers_pb2.Lease(id="i/j.1", state=state)  # type: ignore[arg-type]  # the enum's values are numbers
    found.status.code, found.status.message = code, message
    if result:
        found.result.type_url = leases.RESULT
        found.result.value = remote_execution_pb2.ActionResult(**result).SerializeToString()
    return found


def test_each_end_of_a_lease_is_one_of_an_attempt() -> None:
    """Lease, whether its worker ends; verdict, the code that is left, and whether a result is."""
    garbled = lease(C.OK)
    garbled.result.type_url, garbled.result.value = leases.RESULT, b"\xff"
    other = lease(C.OK)
    other.result.type_url = leases.DIGEST
    for one, leaves, verdict, code, kept in (
        (lease(C.OK, **RESULT), False, "succeeded", C.OK, True),
        (lease(C.OK, exit_code=70, **RESULT), False, "failed", C.OK, True),
        (lease(C.DEADLINE_EXCEEDED, exit_code=137, **RESULT), False, "failed", C.DEADLINE_EXCEEDED, True),
        (lease(C.DEADLINE_EXCEEDED), False, "failed", C.DEADLINE_EXCEEDED, False),
        *((each, False, "error", C.INTERNAL, False) for each in (lease(C.OK), garbled, other, lease(C.INTERNAL))),
        (lease(C.UNAVAILABLE), False, "error", C.INTERNAL, False),
        (lease(999), False, "error", C.INTERNAL, False),
        (lease(C.UNAVAILABLE), True, "released", None, False),
        (lease(C.OK, **RESULT), True, "succeeded", C.OK, True),
        (lease(C.OK, stdout_raw=b"x" * MOST_READ), False, "failed", C.INTERNAL, False),
        (lease(C.CANCELLED), False, "stopped", None, False),
        (lease(C.OK, state=State.CANCELLED, **RESULT), False, "stopped", None, False),
    ):
        found = leases.outcome(one, leaves=leaves)
        # Nothing is tried again because of an exit code of the action.
        assert (found.verdict, found.final) == (verdict, True if verdict == "failed" else None)
        left = None if found.result is None else outcome.left(found.result)
        assert (left and left.code, bool(left and left.result)) == (code, kept), one
        state = JobState.SUCCEEDED if verdict == "succeeded" else JobState.FAILED
        assert outcome.is_cached(state, left or outcome.Left(), cacheable=True) is (verdict == "succeeded")
    assert outcome.left(leases.outcome(lease(C.INTERNAL), leaves=False, absent=2).result).code == C.FAILED_PRECONDITION
    stored = Digest.of(b"x")
    assert outcome.left(leases.outcome(lease(C.OK, **RESULT), leaves=False, stored=stored).result).stored == stored
    longest = leases.outcome(lease(C.OK, stdout_raw=b"x" * (leases.MOST_LEFT - 6)), leaves=False)
    assert Outcome.model_validate_json(longest.model_dump_json()), "it is not too long for a result"


def test_a_worker_that_ends_is_gone_once_nothing_runs_on_it() -> None:
    for status, ended, expected in (
        (Status.BOT_STATUS_UNSPECIFIED, [], "ok"),
        (Status.OK, [True], "ok"),
        (Status.UNHEALTHY, [], "unhealthy"),
        (Status.HOST_REBOOTING, [], "draining"),
        (Status.INITIALIZING, [], "draining"),
        (Status.BOT_TERMINATING, [True, False], "draining"),
        (Status.BOT_TERMINATING, [True, True], "gone"),
        (Status.BOT_TERMINATING, [], "gone"),
        (77, [], "unhealthy"),
    ):
        session = remote_workers_pb2.BotSession(status=status)  # type: ignore[arg-type]  # the enum's values are numbers
        for each in ended:
            session.leases.add(id="x", state=State.COMPLETED if each else State.ACTIVE)
        assert leases.status(session) == expected


def test_what_a_worker_offers_is_that_of_its_first_device_and_never_its_own_word_for_actions() -> None:
    asked = remote_workers_pb2.BotSession(bot_id="w1")
    for device in ([("a", "2"), ("leasehold.farm", "x"), ("a", "1")], [("b", "1")]):
        made = asked.worker.devices.add()
        for key, value in device:
            made.properties.add(key=key, value=value)
    found = leases.opening(asked, instance=None)
    assert found.properties == {"a": ["2", "1"], "leasehold.farm": ["action"]}
    assert (found.exclusive, found.capacity, found.priority) == (["leasehold.farm"], 1, 0)
    for key, value in (("capacity", "-1"), ("capacity", "many"), ("priority", "1.5"), ("priority", "1001")):
        bad = remote_workers_pb2.BotSession(bot_id="w1")
        bad.worker.configs.add(key=key, value=value)
        with pytest.raises(BadInput, match=f"configs.{key}: '{value}'"):
            leases.opening(bad, instance=None)
    name = leases.SessionName("ci/x", "w.1", 3, "s-_")
    assert (leases.SessionName.parse(str(name)), "s-_" in repr(name)) == (name, False)
    assert json.loads(leases.outcome(lease(C.INTERNAL), leaves=False).result or "")["message"] == "INTERNAL: why"
