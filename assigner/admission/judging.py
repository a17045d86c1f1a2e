"""How the jobs of a queue are judged on one state: which gate is closed, how many may start, and when more may.

What holds for all jobs of a queue is found once for them, and what holds for all queues that differ only in their keys
once for these. `charges.py` says what the jobs take.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from assigner.admission.charges import Charges, SharedCharges, queue_charges
from assigner.admission.gates import GATES, OF_KEYS, TIMED, Gate, ReleaseTime
from assigner.admission.state import AdmissionState
from schema.accounting.counters import Counter as UsageCounter
from schema.picking.constrained import ConstrainedQueue, QueueHead

#: Counters of the working copy that a job takes of, each with the amount; None stands for the job's estimate.
Taken = list[tuple[UsageCounter, float | None]]


class SharedAdmission:
    """What queues that differ only in their keys are judged by.

    counters: those that a job takes of beside its keys. limited: those of them that have a limit. gates: those that may
    be closed for the queues although no counter is used up.
    """

    __slots__ = ("counters", "gates", "limited")

    def __init__(self, charges: SharedCharges, state: AdmissionState) -> None:
        self.counters = _counters(charges, state)
        self.limited = _limited(self.counters)
        asked = _may_close(state)
        # What a gate of keys is closed for, a queue without keys does not tell.
        asks_keys = any(gate in OF_KEYS for gate in asked)
        self.gates: Sequence[Gate] = GATES if asks_keys else [gate for gate in asked if gate in charges.gates]


def _counters(charges: Charges | SharedCharges, state: AdmissionState) -> Taken:
    found = [(state.counter(name), amount) for name, amount in charges.counters.items()]
    if charges.tokens:
        found += [(state.counters[name], 1.0) for name in charges.tokens if name in state.counters]
    return found


def _limited(counters: Taken) -> Taken:
    return [each for each in counters if each[0].most is not None]


class QueueAdmission:
    """What each job of a queue is judged by.

    charges: what it takes. shut: the gate that closed the queue as a whole before any job started. units: units that
    its instance has been given since.
    """

    # A reference back to the state would make a cycle of references, which only the garbage collector frees.
    __slots__ = ("_counters", "_limited", "charges", "shut", "units")

    def __init__(self, queue: ConstrainedQueue, state: AdmissionState) -> None:
        self.charges = charges = queue_charges(queue, state.charges)
        self.units = state.given_units(queue)
        shared: SharedAdmission | None = state.shared_admissions.get(charges.shared)
        if shared is None:
            shared = state.shared_admissions[charges.shared] = SharedAdmission(charges.shared, state)
        own = _counters(charges, state)
        self._counters = shared.counters, own
        self._limited = [*shared.limited, *_limited(own)]
        asked = shared.gates
        for counter, amount in self._limited:
            if not counter.leaves(amount or 0.0):
                asked = GATES
                break
        self.shut = closing_gate(queue, state, asked) if asked else None

    def closed(self, head: QueueHead, state: AdmissionState) -> tuple[Gate, str] | None:
        """Return the first gate that is closed for the job, and why; None if all are open."""
        if self.shut is None and not state.reserves:
            # Then only the limits of counters can close a gate for one job. A reserve depends on several counters.
            for counter, amount in self._limited:
                if not counter.leaves(head.estimate if amount is None else amount):
                    break
            else:
                return None
        for gate in GATES:
            why = gate.closed_for_job(head, state)
            if why is not None:
                return gate, why
        return None

    @property
    def left(self) -> float:
        """Return how many more jobs the tightest counter of jobs allows, at least 0; infinite if none has a limit."""
        found = math.inf
        for counter, amount in self._limited:
            if amount is not None and (counter.most or 0.0) - counter.used < found:
                found = (counter.most or 0.0) - counter.used
        return max(0.0, found)

    @property
    def is_used_up(self) -> bool:
        """Return whether a counter leaves nothing for any further job of the queue."""
        return any(not counter.leaves(amount or 0.0) for counter, amount in self._limited)

    def take(self, head: QueueHead) -> None:
        """Count what the job takes, because it starts."""
        self.units.used += head.job.units
        self.charge(1, estimate=head.estimate)

    def charge(self, jobs: float, *, estimate: float) -> None:
        """Add to the counters what this number of jobs takes of them."""
        for counters in self._counters:
            for counter, amount in counters:
                counter.used += jobs * (estimate if amount is None else amount)


def job_charges(head: QueueHead, state: AdmissionState) -> Mapping[str, float]:
    """Return what the job takes of counters while it runs; mostly the same object for equal jobs."""
    return queue_admission(head.queue, state).charges.amounts[head.estimate]


def closing_gate(queue: ConstrainedQueue, state: AdmissionState, asked: Sequence[Gate] | None = None) -> Gate | None:
    """Return the first gate that closes the queue as a whole: of those `asked`, or of all gates."""
    for gate in GATES if asked is None else asked:
        if gate.closed_for_queue(queue, state) is not None:
            return gate
    return None


def _may_close(state: AdmissionState) -> Sequence[Gate]:
    """Return the gates that may close a queue none of whose counters is used up."""
    if not state.asked_gates:
        state.asked_gates = [gate for gate in GATES if gate.may_close(state)]
    found: Sequence[Gate] = state.asked_gates
    return found


def max_starts(queue: ConstrainedQueue, state: AdmissionState) -> float:
    """Return how many jobs of the queue may start at once, by counters of jobs and tokens."""
    return queue_admission(queue, state).left


def release_times(queues: Iterable[ConstrainedQueue], state: AdmissionState) -> Iterator[ReleaseTime]:
    """For each queue that waits for time alone, yield when it opens."""
    for queue in queues if state.rates or state.waits else ():
        for gate in TIMED:
            time = gate.release_time(queue, state)
            if time is not None and closing_gate(queue, state) is gate:
                yield time


def queue_admission(queue: ConstrainedQueue, state: AdmissionState) -> QueueAdmission:
    """Return what each job of the queue is judged by. It is found once for each queue and state."""
    found: QueueAdmission | None = state.queue_admissions.get(queue)
    if found is None:
        found = state.queue_admissions[queue] = QueueAdmission(queue, state)
    return found
