"""The gates on constrained jobs.

A gate is a condition that is judged on a working copy of what is counted (`AdmissionState`), without a look at the
database. The assigner's cycle and `explain` ask the same gates. To add a gate, write its class, add it to `GATES`, and
describe it in ops/docs/constraints.md. A gate that counts says so in `charges`: its counters are then read, charged
with the grant, and given back when the lease ends. Whatever else a start takes of is in a gate's `tokens`. The gate
itself stores that, if it is stored, once the jobs have `started`.

One module because the gates are one list, in which each takes a few lines. `assigner.admission.judging` asks them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from assigner.admission.graph_share import ALL_GRAPHS, graph_counter, graph_of
from assigner.admission.state import POOL_COST, POOL_JOBS, AdmissionState
from schema import graphs as graph_reads
from schema.accounting import class_reserves, limit_patterns
from schema.accounting import rates as rate_rows
from schema.accounting.counters import instance_counter, lock_counter
from schema.picking import constrained
from schema.picking.constrained import ConstrainedQueue, QueueHead
from schema.policy import time_windows
from schema.policy.time_windows import PreferredHours
from schema.postgres.connection import Connection
from schema.validation import load_zone


@dataclass(frozen=True)
class ReleaseTime:
    """When something that waits may start. due: seconds until then. slack: seconds of delay that cost nothing."""

    due: float
    slack: float


class Gate:
    """One condition. `name`: what it is called; `requirement`: the condition in words for people; `only_counts`: it is
    closed for a queue only if one of the queue's `charges` is used up."""

    name: str
    requirement: str
    only_counts = False

    def may_close(self, state: AdmissionState) -> bool:  # noqa: ARG002
        """Return whether the gate can be closed now for queues none of whose `charges` is used up."""
        return not self.only_counts

    def concerns(self, queue: ConstrainedQueue) -> bool:  # noqa: ARG002
        """Return whether the gate can ever be closed for jobs with the constraints of the queue."""
        return True

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:  # noqa: ARG002
        """Return why no job of the queue may start; None if they may, or if it depends on the job."""
        return None

    def closed_for_job(self, head: QueueHead, state: AdmissionState) -> str | None:
        """Return why this job may not start now."""
        return self.closed_for_queue(head.queue, state)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:  # noqa: ARG002
        """Return the counters that a running job of the queue charges, each with the amount. None stands for the job's
        estimate."""
        return {}

    def tokens(self, queue: ConstrainedQueue) -> Iterable[str]:  # noqa: ARG002
        """Return the names of further counters of the working copy. Each start takes 1 of each. The lease does not note
        that, so its end gives nothing back."""
        return ()

    def started(self, connection: Connection, starts: Mapping[ConstrainedQueue, int], state: AdmissionState) -> None:
        """Write what these starts change beyond `charges`, in the transaction of the grant. starts: jobs by queue."""

    def release_time(self, queue: ConstrainedQueue, state: AdmissionState) -> ReleaseTime | None:  # noqa: ARG002
        """Return when the closed gate opens for the queue, if time alone opens it and the assigner knows when."""
        return None

    def opens_in(self, queue: ConstrainedQueue, state: AdmissionState) -> float | None:
        """Return the seconds until the closed gate opens for the queue; None if nobody knows."""
        time = self.release_time(queue, state)
        return None if time is None else time.due

    def pace(self, queue: ConstrainedQueue, state: AdmissionState) -> float | None:  # noqa: ARG002
        """Return how many jobs of the queue a second the gate lets through at most in the long run; None for any."""
        return None


# Quotas of owners and of projects: what their jobs may cost within the rolling window.


class OwnerQuotaGate(Gate):
    """A job whose owner or project has used its quota waits until enough of that is older than the window."""

    name = "owner quota"
    requirement = "the quotas of its owner and its project leave enough"
    only_counts = True

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        return _closed_reason(queue, state, 0.0)

    def closed_for_job(self, head: QueueHead, state: AdmissionState) -> str | None:
        return _closed_reason(head.queue, state, head.estimate)

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {name: None for name, _ in _limited_owners(queue)}


def _limited_owners(queue: ConstrainedQueue) -> Iterator[tuple[str, str]]:
    for kind, word in (("owner", "User"), ("project", "Project")):
        if kind in queue.constraints:
            yield f"{kind}:{queue.instance_name}:{queue.constraints[kind]}:cost", word


def _closed_reason(queue: ConstrainedQueue, state: AdmissionState, estimate: float) -> str | None:
    for name, word in _limited_owners(queue):
        counter = state.of(name)
        if not counter.leaves(estimate):
            needs = f", and this job is estimated at {estimate:g}" if estimate else ""
            return f"{word} quota exceeded: {counter.used:g} of {counter.most:g} used{needs}"
    return None


class ConcurrencyGate(Gate):
    """Live leases of the pool and of an instance."""

    name = "concurrency"
    requirement = "fewer jobs run than may run at once"
    only_counts = True

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        for counted, whose in (
            (POOL_JOBS, "the pool"),
            (instance_counter(queue.instance_name, "jobs"), "its instance"),
        ):
            counter = state.of(counted)
            if not counter.leaves(1.0):
                return f"{whose} runs {counter.used:g} of at most {counter.most:g} jobs"
        return None

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return {POOL_JOBS: 1.0, instance_counter(queue.instance_name, "jobs"): 1.0}


class BudgetGate(Gate):
    """Cost of the pool and of an instance, within the rolling window or reserved for what runs."""

    name = "budget"
    requirement = "what was used and what is reserved leave enough of the budget"
    only_counts = True

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        for counted, whose in self._counted(queue):
            counter = state.of(counted)
            if not counter.leaves(0.0):
                return f"{whose} has used {counter.used:g} of its budget of {counter.most:g}"
        return None

    def closed_for_job(self, head: QueueHead, state: AdmissionState) -> str | None:
        for counted, whose in self._counted(head.queue):
            counter = state.of(counted)
            if not counter.leaves(head.estimate if state.reserve else 0.0):
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


class LocksGate(Gate):
    """Named locks of an instance. A lock is held by one job at a time, or by as many as it has slots.

    An operator gives it slots by its name or by a pattern. If none has, the jobs do, as in `customer-7:2`.
    """

    name = "locks"
    requirement = "the locks that it names are free"
    only_counts = True

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        for name in lock_numbers(queue):
            counter = state.of(name)
            if not counter.leaves(1.0):
                lock, whose = name.rpartition(":")[2], _of_pattern(counter.limited_by)
                return f"{counter.used:g} of {counter.most:g} slots of lock '{lock}' are held{whose}"
        return None

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return dict.fromkeys(lock_numbers(queue), 1.0)


def lock_numbers(queue: ConstrainedQueue) -> dict[str, float]:
    """Return the counters of the locks that a job of the queue takes, with the slots that it gives them itself: 1, or
    the number behind the colon of a lock."""
    found: dict[str, float] = {}
    for each in queue.constraints.get("locks", ()):
        lock, _, number = each.partition(":")
        found[lock_counter(queue.instance_name, lock)] = float(number or 1)
    return found


def _of_pattern(limited_by: str | None) -> str:
    return f", the limit of '{limit_patterns.pattern_of(limited_by)}'" if limited_by else ""


class SlotsGate(Gate):
    """Slots of an instance, one for each running job. Without a setting their number is not limited."""

    name = "slots"
    requirement = "its instance has a slot free"

    def may_close(self, state: AdmissionState) -> bool:
        return state.shares is not None and state.shares.slotted

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        counter = state.of(instance_counter(queue.instance_name, "slots"))
        if not counter.leaves(1.0):
            return f"its instance uses {counter.used:g} of {counter.most:g} slots"
        if counter.most is None and state.shares is not None and state.shares.slotted:
            return "its instance has no slots, while others have"
        return None

    def tokens(self, queue: ConstrainedQueue) -> Iterable[str]:
        """Return the counter of slots. It has no row of its own: each running job takes one slot."""
        return (instance_counter(queue.instance_name, "slots"),)


# How many jobs of a class may run at once, which keeps the rest of the pool for the other classes.


def class_counters(queue: ConstrainedQueue) -> list[str]:
    """The counter of the class of the queue's jobs, if they have one."""
    return [f"class:{queue.constraints['job_class']}:jobs"] if "job_class" in queue.constraints else []


class ClassLimitGate(Gate):
    """Live leases of a class. Its limit keeps the rest of the pool free for other classes."""

    name = "class limit"
    requirement = "fewer jobs of its class run than may run at once"
    only_counts = True

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        for name in class_counters(queue):
            counter = state.of(name)
            if not counter.leaves(1.0):
                return (
                    f"class '{queue.constraints['job_class']}' runs {counter.used:g} of at most {counter.most:g} jobs"
                )
        return None

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        return dict.fromkeys(class_counters(queue), 1.0)


class ClassReserveGate(Gate):
    """The part of the pool's limit of jobs that is kept for other classes. The gate is open for a job whose own class
    has reserve left."""

    name = "class reserve"
    requirement = "the pool's limit leaves room beside what is kept for other classes"

    def may_close(self, state: AdmissionState) -> bool:
        return bool(state.reserves)

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        pool, own = state.of(POOL_JOBS), queue.constraints.get("job_class")
        if not state.reserves or pool.most is None:
            return None
        unused = {name: jobs - self._running(name, state) for name, jobs in state.reserves.items()}
        if own is not None and unused.get(own, 0) > 0:
            return None
        kept = {name: jobs for name, jobs in unused.items() if jobs > 0}
        if not kept or pool.used + 1.0 + sum(kept.values()) <= pool.most:
            return None
        listed = ", ".join(f"{jobs:g} for class '{name}'" for name, jobs in kept.items())
        return f"the pool runs {pool.used:g} of at most {pool.most:g} jobs and keeps {listed}"

    def started(self, connection: Connection, starts: Mapping[ConstrainedQueue, int], state: AdmissionState) -> None:
        """Undo the transaction if these jobs took of a reserve, because another assigner has started jobs meanwhile."""
        if state.reserves:
            class_reserves.keep_reserves(connection, {queue.constraints.get("job_class") for queue in starts})

    @staticmethod
    def _running(name: str, state: AdmissionState) -> float:
        return state.of(class_reserves.running_counter(name)).used


# Gates of time: windows in which jobs of a class may start, and hours that a job prefers.


class WindowsGate(Gate):
    """A window for the job's class is open, and its meter is below the threshold."""

    name = "window"
    requirement = "a window is open in which jobs of its class may start"

    def concerns(self, queue: ConstrainedQueue) -> bool:
        return waits_for_windows(queue)

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        job_class = queue.constraints.get("job_class")
        return None if job_class is None else state.openings.closed_for_class(job_class, state.now)

    def opens_in(self, queue: ConstrainedQueue, state: AdmissionState) -> float | None:
        opens = state.openings.opens_for_class(queue.constraints["job_class"], state.now)
        return None if opens is None else (opens - state.now).total_seconds()


class PreferredHoursGate(Gate):
    """The hours of the day at which the job prefers to start."""

    name = "preferred hours"
    requirement = "the current hour is one that it prefers"

    def concerns(self, queue: ConstrainedQueue) -> bool:
        return bool(queue.constraints.get("preferred_hours"))

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        try:
            preferred = _preferred_hours(queue)
        except ValueError as error:
            # Only a submit in SQL can store such a zone.
            return f"the zone of the hours that it prefers cannot be used: {error}"
        if preferred is None or preferred.open_at(state.now):
            return None
        opens = preferred.opens(state.now)
        if opens is None:
            return "none of the hours that it prefers ever comes"
        when = time_windows.local_time(opens, preferred.zone)
        return f"it may start from {when} on, at the next of the hours that it prefers"

    def opens_in(self, queue: ConstrainedQueue, state: AdmissionState) -> float | None:
        with suppress(ValueError):
            preferred = _preferred_hours(queue)
            opens = None if preferred is None else preferred.opens(state.now)
            return None if opens is None else (opens - state.now).total_seconds()
        return None


def waits_for_windows(queue: ConstrainedQueue) -> bool:
    """Return whether the jobs of the queue wait for windows, if there are any."""
    return "job_class" in queue.constraints


def _preferred_hours(queue: ConstrainedQueue) -> PreferredHours | None:
    wanted = queue.constraints.get("preferred_hours")
    if not wanted:
        return None
    return PreferredHours(frozenset(wanted), load_zone(queue.constraints.get("preferred_zone", "UTC")))


class GraphShareGate(Gate):
    """The most jobs that all graphs run together, and the most that one graph runs at once, whatever its score."""

    name = "graph share"
    requirement = "all graphs together, and its own graph, run fewer jobs than they may"

    def concerns(self, queue: ConstrainedQueue) -> bool:
        return graph_of(queue.constraints) is not None

    def may_close(self, state: AdmissionState) -> bool:
        return state.graph_share is not None

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        graph, share = graph_of(queue.constraints), state.graph_share
        if graph is None or share is None:
            return None
        together, now = state.of(ALL_GRAPHS), state.running_jobs(graph)
        if now >= share.cap:
            return f"its graph runs {now:g} jobs, its share is {share.share:g} and the most is {share.cap}"
        if not together.leaves(1.0):
            return f"all graphs together run {together.used:g} of at most {together.most:g} jobs"
        return None

    def charges(self, queue: ConstrainedQueue) -> Mapping[str, float | None]:
        graph = graph_of(queue.constraints)
        return {} if graph is None else {graph_counter(graph): 1.0, ALL_GRAPHS: 1.0}

    def started(self, connection: Connection, starts: Mapping[ConstrainedQueue, int], state: AdmissionState) -> None:
        """Undo the transaction if another assigner has started jobs of graphs, so that there are too many now."""
        if state.graph_share is not None:
            names = {name for queue in starts for name in self.charges(queue)}
            limits = {ALL_GRAPHS: state.graph_share.together}
            caps = {name: limits.get(name, state.graph_share.cap) for name in sorted(names)}
            graph_reads.enforce_caps(connection, {name: cap for name, cap in caps.items() if cap is not None})


class ResourcesGate(Gate):
    """Resources of bots. What a job takes of them is charged once its bot is known."""

    name = "resources"
    requirement = "a bot has enough left of the resources that it takes"

    def may_close(self, state: AdmissionState) -> bool:
        return bool(state.lacking)

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        return state.lacking.get(queue.id)


# The gate of rates: how fast jobs of a resource class, or of a model of it, may start.


class RateGate(Gate):
    """Tokens of the resource class and of the model that a job uses. They are taken at its start and not given back."""

    name = "rate"
    requirement = "the rates of its resource class and model leave a token"

    def concerns(self, queue: ConstrainedQueue) -> bool:
        return rate_rows.resource_of(queue.constraints) is not None

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        refused = state.refused.get(rate_rows.resource_of(queue.constraints) or "")
        if refused is not None:
            return refused
        for name, bucket in self._empty(queue, state):
            wait = (1.0 - bucket.tokens) / bucket.rate
            used = name.removeprefix(rate_rows.PREFIX)
            of_pattern = _of_pattern(bucket.limited_by)
            return f"'{used}' may start {bucket.rate:g} jobs per second{of_pattern}, the next one in {wait:.2f} s"
        return None

    def may_close(self, state: AdmissionState) -> bool:
        return bool(state.refused)

    def tokens(self, queue: ConstrainedQueue) -> Iterable[str]:
        return rate_rows.bucket_names(queue.constraints)

    def started(
        self,
        connection: Connection,
        starts: Mapping[ConstrainedQueue, int],
        state: AdmissionState,  # noqa: ARG002
    ) -> None:
        """Take the tokens out of the buckets, which the controller has locked."""
        wanted = defaultdict[str, int](int)
        for queue, jobs in starts.items():
            if "resource_class" in queue.constraints:
                for name in self.tokens(queue):
                    wanted[name] += jobs
        rate_rows.draw_tokens(connection, wanted)

    def release_time(self, queue: ConstrainedQueue, state: AdmissionState) -> ReleaseTime | None:
        empty = [bucket for _, bucket in self._empty(queue, state)]
        if not empty:
            return None
        slowest = max(empty, key=lambda bucket: bucket.due)
        return ReleaseTime(slowest.due, slowest.slack)

    def pace(self, queue: ConstrainedQueue, state: AdmissionState) -> float | None:
        return min((state.rates[name].rate for name in self.tokens(queue) if name in state.rates), default=None)

    def _empty(self, queue: ConstrainedQueue, state: AdmissionState) -> Iterator[tuple[str, rate_rows.Bucket]]:
        """Yield the buckets that have less than a token left after the starts of the working copy."""
        for name in self.tokens(queue):
            bucket = state.rates.get(name)
            if bucket is not None and not state.of(name).leaves(1.0):
                yield name, bucket.minus(state.of(name).used)


# The gate of backpressure: advice to start nothing for now, or to wait between starts.


class BackpressureGate(Gate):
    """Advice of operators and of a checker to start less. Running jobs go on."""

    name = "backpressure"
    requirement = "nobody advises to hold it back"

    def may_close(self, state: AdmissionState) -> bool:
        return bool(state.advice or state.waits)

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:
        used = queue.constraints.get("resource_class")
        if not rate_rows.advice_for(state.advice, used).allowed:
            return f"starting jobs{'' if used is None else f' that use {used!r}'} is advised against for now"
        wait = self._wait(queue, state)
        return f"the wait that is advised between starts goes on for another {wait:.2f} s" if wait > 0 else None

    def release_time(self, queue: ConstrainedQueue, state: AdmissionState) -> ReleaseTime | None:
        wait = self._wait(queue, state)
        return ReleaseTime(wait, wait) if wait > 0 else None

    @staticmethod
    def _wait(queue: ConstrainedQueue, state: AdmissionState) -> float:
        return state.waits.get(queue.constraints.get("resource_class") or rate_rows.ALL_CLASSES, 0.0)


class FormGate(Gate):
    """Constraints whose stored form this version cannot use. They keep only their own jobs waiting."""

    name = "form"
    requirement = "this version can use the stored form of its constraints"

    def concerns(self, queue: ConstrainedQueue) -> bool:
        return constrained.UNUSABLE in queue.constraints

    def closed_for_queue(self, queue: ConstrainedQueue, state: AdmissionState) -> str | None:  # noqa: ARG002
        why = queue.constraints.get(constrained.UNUSABLE)
        return None if why is None else f"its constraints cannot be used: {why}"


#: Every gate, in the order in which the gates are asked.
GATES: tuple[Gate, ...] = (
    FormGate(),
    WindowsGate(),
    PreferredHoursGate(),
    BudgetGate(),
    OwnerQuotaGate(),
    SlotsGate(),
    LocksGate(),
    ClassLimitGate(),
    ConcurrencyGate(),
    ClassReserveGate(),
    GraphShareGate(),
    ResourcesGate(),
    BackpressureGate(),
    RateGate(),
)
#: The constraints that are keys: each job may have others. What a job takes for them, only the gates of keys say.
KEYS = frozenset(("locks", "resource_class", "model"))
OF_KEYS = tuple(gate for gate in GATES if isinstance(gate, LocksGate | RateGate))
#: Those that time alone may open.
TIMED = tuple(gate for gate in GATES if type(gate).release_time is not Gate.release_time)
