"""Job, lease and bot states, and the one table of legal transitions.

The strings are stored in the database and are part of the contract of the tables.
"""

from enum import StrEnum

from leasehold.states import FINAL, JobState


class LeaseState(StrEnum):
    """State of a lease, in the words of the Remote Workers API."""

    PENDING = "pending"
    ACTIVE = "active"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class BotStatus(StrEnum):
    """State of a bot as it reports it; the server sets `gone` for a bot without a session."""

    OK = "ok"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


#: The strategy of a lease that a bot has fetched itself when it had room: nobody compared it with other bots.
FETCHED = "proactive"

HELD = frozenset({JobState.LEASED, JobState.RUNNING, JobState.CANCELLING})

_J = JobState

#: State → every state that one move may lead to. A new job is `queued`; a node of a graph may begin `blocked`.
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _J.BLOCKED: frozenset({_J.QUEUED, _J.CANCELLED}),
    _J.QUEUED: frozenset({_J.LEASED, _J.PARKED, _J.DEFERRED, _J.CANCELLED, _J.DEAD}),
    _J.DEFERRED: frozenset({_J.QUEUED, _J.CANCELLED}),
    _J.PARKED: frozenset({_J.QUEUED, _J.CANCELLED}),
    _J.LEASED: frozenset({_J.RUNNING, _J.CANCELLING, _J.QUEUED} | FINAL),
    _J.RUNNING: frozenset({_J.CANCELLING, _J.QUEUED} | FINAL),
    _J.CANCELLING: frozenset(FINAL),
    _J.SUCCEEDED: frozenset(),
    _J.FAILED: frozenset(),
    _J.CANCELLED: frozenset(),
    _J.DEAD: frozenset(),
}

#: What a sample of the pool counts: jobs that wait and run, and ends by state.
COUNTS = ("waiting", "running", "succeeded", "failed", "cancelled", "dead")
