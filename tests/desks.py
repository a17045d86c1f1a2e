"""One call at a desk, for tests that ask what becomes of a single one."""

from bots.leases import Answer, Call, Desk
from bots.protocol import Sync
from bots.visits import Asked, Waiting
from schema import clock
from schema.errors import LeaseholdError


def settled(desk: Desk, call: Call) -> Answer:
    """The answer to this call; raises what it is refused with."""
    (answer,) = desk.answer([call])
    if isinstance(answer, LeaseholdError):
        raise answer
    return answer


def synced(desk: Desk, message: Sync) -> Answer:
    """The answer to a call that has just come."""
    return settled(desk, Asked(message, clock.monotonic()))


def answered(desk: Desk, message: Sync) -> bytes:
    """The same, also where the call would have been held."""
    answer = synced(desk, message)
    if isinstance(answer, Waiting):
        answer = settled(desk, answer)
    assert isinstance(answer, bytes)
    return answer
