"""States of a job. The strings are stored in the database and are part of the contract of the tables."""

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


#: The states of a job that no bot has, in the order in which people are shown them.
WAITING = (JobState.BLOCKED, JobState.QUEUED, JobState.PARKED, JobState.DEFERRED)
#: The states that a job never leaves.
FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})
