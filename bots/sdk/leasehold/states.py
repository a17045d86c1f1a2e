"""States of a job, and how jobs end that do not succeed.

The strings of the states are stored in the database and are part of the contract of the tables.
"""

from enum import StrEnum


class JobState(StrEnum):
    """State of a job. The last four are final: the database refuses to leave them."""

    BLOCKED = "blocked"  # a node of a graph that waits for the nodes it depends on
    QUEUED = "queued"
    PARKED = "parked"  # held by an operator until it is released
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


class EndKind(StrEnum):
    """How a job ended that has not succeeded, or a task that has no value and raised no error."""

    TIMEOUT = "timeout"  # it ran longer than its timeout, or than the ceiling of timeouts
    QUEUE_TIMEOUT = "queue_timeout"  # it waited longer than its queue timeout, or than the ceiling of queue ages
    KILLED = "killed"  # by a signal that nobody in the pool sent for another reason, such as for lack of memory
    LOST = "lost"  # its bot was lost too often
    CANCELLED = "cancelled"
    EXIT_CODE = "exit_code"  # its command ended with an exit code other than 0
    NO_RESULT = "no_result"  # it was not run, or left nothing, for another reason


#: How the reasons of such ends begin, as the database and bots word them.
_REASONS = {
    "timeout after ": EndKind.TIMEOUT,
    "ran longer than ": EndKind.TIMEOUT,
    "waited longer than ": EndKind.QUEUE_TIMEOUT,
    "killed by ": EndKind.KILLED,
    "its bot was lost ": EndKind.LOST,
    "exit code ": EndKind.EXIT_CODE,
}


def end_kind(state: str, reason: str | None) -> EndKind:
    """Return how a job ended that is in this final state for this reason, and has left nothing that tells more."""
    if state == JobState.CANCELLED:
        return EndKind.CANCELLED
    return next((kind for begin, kind in _REASONS.items() if (reason or "").startswith(begin)), EndKind.NO_RESULT)
