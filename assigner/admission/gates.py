"""Gates of what is counted for the pool and for an instance: jobs that run, their cost, locks and slots."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from schema.accounting import rates as rate_rows
from schema.accounting.counters import Counter, instance_counter, lock_counter
from schema.accounting.fair_share import Shares
from schema.accounting.rates import Advice, Bucket
from schema.picking.constrained import ConstrainedQueue, QueueHead
from schema.policy import time_windows
from schema.policy.time_windows import PreferredHours, WindowSchedule
from schema.validation import load_zone

# Quotas of owners and of projects: what their jobs may cost within the rolling window.


class Counted(Protocol):
    """Something that knows counters by their names."""

    def of(self, name: str) -> Counter:
        """The counter of that name."""


def owner_counters(queue: ConstrainedQueue) -> list[str]:
    """The counters of the owner and the project of the queue's jobs, if they have any."""
    return [name for name, _ in _limited_owners(queue)]


@dataclass(frozen=True)
class OwnerQuotaGate:
    """A job whose owner or project has used its quota waits until enough of that is older than the window."""

    name: str = "owner quota"
    requirement: str = "the quotas of its owner and its project leave enough"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Counted) -> str | None:
        return _closed_reason(queue, admission_state, 0.0)

    def closed_for_job(self, head: QueueHead, admission_state: Counted) -> str | None:
        return _closed_reason(head.queue, admission_state, head.estimate)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return dict.fromkeys(owner_counters(queue))


def _limited_owners(queue: ConstrainedQueue) -> Iterator[tuple[str, str]]:
    for kind, word in (("owner", "User"), ("project", "Project")):
        if kind in queue.constraints:
            yield f"{kind}:{queue.instance_name}:{queue.constraints[kind]}:cost", word


def _closed_reason(queue: ConstrainedQueue, admission_state: Counted, estimate: float) -> str | None:
    for name, word in _limited_owners(queue):
        counter = admission_state.of(name)
        if not counter.leaves(estimate):
            needs = f", and this job is estimated at {estimate:g}" if estimate else ""
            return f"{word} quota exceeded: {counter.used:g} of {counter.most:g} used{needs}"
    return None


#: The names of counters that all jobs of the pool take of.
POOL_JOBS, POOL_COST = "pool:jobs", "pool:cost"


class Tally(Counted, Protocol):
    """What these gates look at."""

    @property
    def reserve(self) -> bool:
        """An estimate has to fit into what is left of a budget."""

    @property
    def shares(self) -> Shares | None:
        """Of the instances, None where none is managed."""


@dataclass(frozen=True)
class ConcurrencyGate:
    """Live leases of the pool and of an instance."""

    name: str = "concurrency"
    requirement: str = "fewer jobs run than may run at once"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Tally) -> str | None:
        for counted, whose in (
            (POOL_JOBS, "the pool"),
            (instance_counter(queue.instance_name, "jobs"), "its instance"),
        ):
            counter = admission_state.of(counted)
            if not counter.leaves(1.0):
                return f"{whose} runs {counter.used:g} of at most {counter.most:g} jobs"
        return None

    def closed_for_job(self, head: QueueHead, admission_state: Tally) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {POOL_JOBS: 1.0, instance_counter(queue.instance_name, "jobs"): 1.0}


@dataclass(frozen=True)
class BudgetGate:
    """Cost of the pool and of an instance, within the rolling window or reserved for what runs."""

    name: str = "budget"
    requirement: str = "what was used and what is reserved leave enough of the budget"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Tally) -> str | None:
        for counted, whose in self._counted(queue):
            counter = admission_state.of(counted)
            if not counter.leaves(0.0):
                return f"{whose} has used {counter.used:g} of its budget of {counter.most:g}"
        return None

    def closed_for_job(self, head: QueueHead, admission_state: Tally) -> str | None:
        for counted, whose in self._counted(head.queue):
            counter = admission_state.of(counted)
            if not counter.leaves(head.estimate if admission_state.reserve else 0.0):
                return (
                    f"{whose} has used {counter.used:g} of its budget of {counter.most:g}, "
                    f"and this job is estimated at {head.estimate:g}"
                )
        return None

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {name: None for name, _ in self._counted(queue)}

    @staticmethod
    def _counted(queue: ConstrainedQueue) -> tuple[tuple[str, str], ...]:
        return (POOL_COST, "the pool"), (instance_counter(queue.instance_name, "cost"), "its instance")


@dataclass(frozen=True)
class LocksGate:
    """Named locks of an instance; each is held by so many jobs at once as it has slots, by one if nobody says."""

    name: str = "locks"
    requirement: str = "the locks that it names are free"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Tally) -> str | None:
        for lock in queue.constraints.get("locks", ()):
            counter = admission_state.of(lock_counter(queue.instance_name, lock))
            if not counter.leaves(1.0):
                return f"lock '{lock}' is held {counter.used:g} times of {counter.most:g}"
        return None

    def closed_for_job(self, head: QueueHead, admission_state: Tally) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {lock_counter(queue.instance_name, lock): 1.0 for lock in queue.constraints.get("locks", ())}


@dataclass(frozen=True)
class SlotsGate:
    """Places in which an instance's jobs work, one for each; an instance for which nobody says has any number."""

    name: str = "slots"
    requirement: str = "its instance has a slot free"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Tally) -> str | None:
        counter = admission_state.of(instance_counter(queue.instance_name, "slots"))
        if not counter.leaves(1.0):
            return f"its instance uses {counter.used:g} of {counter.most:g} slots"
        if counter.most is None and admission_state.shares is not None and admission_state.shares.slotted:
            return "its instance has no slots, while others have"
        return None

    def closed_for_job(self, head: QueueHead, admission_state: Tally) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {instance_counter(queue.instance_name, "slots"): 1.0}


# How many jobs of a class may run at once, which keeps the rest of the pool for the other classes.


def class_counters(queue: ConstrainedQueue) -> list[str]:
    """The counter of the class of the queue's jobs, if they have one."""
    return [f"class:{queue.constraints['job_class']}:jobs"] if "job_class" in queue.constraints else []


@dataclass(frozen=True)
class ClassLimitGate:
    """Live leases of a class; what is not left to it stays free for more urgent work."""

    name: str = "class limit"
    requirement: str = "fewer jobs of its class run than may run at once"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Counted) -> str | None:
        for name in class_counters(queue):
            counter = admission_state.of(name)
            if not counter.leaves(1.0):
                return (
                    f"class '{queue.constraints['job_class']}' runs {counter.used:g} of at most {counter.most:g} jobs"
                )
        return None

    def closed_for_job(self, head: QueueHead, admission_state: Counted) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return dict.fromkeys(class_counters(queue), 1.0)


# Gates of time: windows in which jobs of a class may start, and hours that a job prefers.


class Timed(Protocol):
    """What these gates are judged by: the database's time, and the windows."""

    now: datetime
    openings: WindowSchedule


class _NoCharge:
    """What waits for a time takes of nothing."""

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:  # noqa: ARG002 - as every gate is asked
        return {}


@dataclass(frozen=True)
class WindowsGate(_NoCharge):
    """A window is open that takes the job's class, and the meter that it goes by has not come too far."""

    name: str = "window"
    requirement: str = "a window is open in which jobs of its class may start"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Timed) -> str | None:
        job_class = queue.constraints.get("job_class")
        return None if job_class is None else admission_state.openings.closed_for_class(job_class, admission_state.now)

    def closed_for_job(self, head: QueueHead, admission_state: Timed) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)


@dataclass(frozen=True)
class PreferredHoursGate(_NoCharge):
    """It is one of the hours of the day at which the job wants to start."""

    name: str = "preferred hours"
    requirement: str = "it is one of the hours that it prefers"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Timed) -> str | None:
        try:
            preferred = _preferred_hours(queue)
        except ValueError as error:
            # Only who submits in SQL can say so.
            return f"the zone of the hours that it prefers cannot be used: {error}"
        if preferred is None or preferred.open_at(admission_state.now):
            return None
        opens = preferred.opens(admission_state.now)
        when = "never" if opens is None else f"from {time_windows.local_time(opens, preferred.zone)} on"
        return f"it may start {when}, at the next of the hours that it prefers"

    def closed_for_job(self, head: QueueHead, admission_state: Timed) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)


def waits_for_windows(queue: ConstrainedQueue) -> bool:
    """Whether its jobs wait for windows, if there are any."""
    return "job_class" in queue.constraints


def _preferred_hours(queue: ConstrainedQueue) -> PreferredHours | None:
    wanted = queue.constraints.get("preferred_hours")
    if not wanted:
        return None
    return PreferredHours(frozenset(wanted), load_zone(queue.constraints.get("preferred_zone", "UTC")))


# The gate of rates: how fast jobs of a resource class, or of a model of it, may start.


@dataclass(frozen=True)
class ReleaseTime:
    """Seconds until something that waits may start, and those by which one may be late without a loss."""

    due: float
    slack: float


class Paced(Protocol):
    """What the gate looks at: the buckets of the queues, by name."""

    @property
    def rates(self) -> Mapping[str, Bucket]:
        """One that is not there has no limit."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Resources of which a checker says that they are limited, or cannot say anything, and what it says."""


@dataclass(frozen=True)
class RateGate:
    """Tokens of the class and of the model that a job uses. They are taken when it starts, and do not come back."""

    name: str = "rate"
    requirement: str = "the rates of what it uses leave a token"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Paced) -> str | None:
        refused = admission_state.refused.get(rate_rows.resource_of(queue.constraints) or "")
        if refused is not None:
            return refused
        for name in rate_rows.bucket_names(queue.constraints):
            bucket = admission_state.rates.get(name)
            if bucket is not None and bucket.tokens < 1.0:
                wait = (1.0 - bucket.tokens) / bucket.rate
                used = name.removeprefix(rate_rows.PREFIX)
                return f"'{used}' may start {bucket.rate:g} jobs per second, the next one in {wait:.2f} s"
        return None

    def closed_for_job(self, head: QueueHead, admission_state: Paced) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)

    def charges(self, _queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {}


# The gate of backpressure: advice to start nothing for now, or to wait between starts.


class Advised(Protocol):
    """What the gate looks at."""

    @property
    def advice(self) -> Mapping[str, Advice]:
        """By resource class, '' for all."""

    @property
    def waits(self) -> Mapping[str, float]:
        """Seconds that this assigner still waits before it starts jobs of a class, '' for those of none."""


@dataclass(frozen=True)
class BackpressureGate:
    """Advice of operators, and of a checker. It is best effort: what runs goes on."""

    name: str = "backpressure"
    requirement: str = "nobody advises to hold it back"

    def closed_for_queue(self, queue: ConstrainedQueue, admission_state: Advised) -> str | None:
        used = queue.constraints.get("resource_class")
        if not rate_rows.advice_for(admission_state.advice, used).allowed:
            return f"to start jobs{'' if used is None else f' that use {used!r}'} is advised against for now"
        wait = admission_state.waits.get(used or rate_rows.ALL_CLASSES, 0.0)
        return f"the wait that is advised between starts goes on for another {wait:.2f} s" if wait > 0 else None

    def closed_for_job(self, head: QueueHead, admission_state: Advised) -> str | None:
        return self.closed_for_queue(head.queue, admission_state)

    def charges(self, _queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {}
