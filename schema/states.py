"""Job, lease and bot states, and the one table of legal transitions.

The strings are stored in the database and are part of the contract of the tables.
"""

from enum import StrEnum


class JobState(StrEnum):
    """State of a job. The last four are final: the database refuses to leave them."""

    BLOCKED = "blocked"  # a node of a graph that waits for the nodes it depends on
    QUEUED = "queued"
    PARKED = "parked"  # held aside until an operator releases it
    DEFERRED = "deferred"  # taken out of the queue while more jobs wait than the limit allows
    LEASED = "leased"  # granted to a bot that has not acknowledged it yet
    RUNNING = "running"
    CANCELLING = "cancelling"  # a caller asked to cancel it; its bot has not confirmed yet
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # reported by the bot: the command ended with a failure
    CANCELLED = "cancelled"
    DEAD = "dead"  # decided by the server: attempts used up, time-out, or it kept killing its bots


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


FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})
HELD = frozenset({JobState.LEASED, JobState.RUNNING, JobState.CANCELLING})
LIVE = frozenset({LeaseState.PENDING, LeaseState.ACTIVE, LeaseState.CANCELLING})

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
