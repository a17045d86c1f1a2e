"""Job, lease and bot states, and the one table of legal transitions.

The strings are stored in the database and are part of the contract of the tables.
"""

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. The last four are final: the database refuses to leave them."""

    BLOCKED = "blocked"  # a node of a graph that waits for what it depends on
    QUEUED = "queued"
    PARKED = "parked"  # held aside until an operator releases it
    DEFERRED = "deferred"  # taken off the queue while more jobs wait than may
    LEASED = "leased"  # granted to a bot that has not acknowledged it yet
    RUNNING = "running"
    CANCELLING = "cancelling"  # somebody asked to cancel it; its bot has not confirmed
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the bot's verdict: the command ended with a failure
    CANCELLED = "cancelled"
    DEAD = "dead"  # the server's verdict: attempts used up, deadline, poison


class LeaseState(StrEnum):
    """The life of one grant, in the terms of the Remote Workers API."""

    PENDING = "pending"
    ACTIVE = "active"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class BotStatus(StrEnum):
    """What a bot says of itself; `gone` is the server's word for a bot without a session."""

    OK = "ok"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})
HELD = frozenset({JobState.LEASED, JobState.RUNNING, JobState.CANCELLING})
LIVE = frozenset({LeaseState.PENDING, LeaseState.ACTIVE, LeaseState.CANCELLING})

_J = JobState

#: from → every state that one move may lead to. A job is born `queued`, or in a graph `blocked`.
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
