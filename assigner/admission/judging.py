"""How the jobs of a queue are judged on one state: which gate is closed, how many may start, and when more may.

What holds for all jobs of a queue is found once for them, and what holds for all queues that differ only in their keys
once for these. `charges.py` says what the jobs take.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from assigner.admission.charges import SharedCharges, queue_charges
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
        self.counters: Taken = [(state.counter(name), amount) for name, amount in charges.counters.items()]
        self.counters += [(state.counters[name], 1.0) for name in charges.tokens if name in state.counters]
        self.limited = [each for each in self.counters if each[0].most is not None]
        asked = _may_close(state)
        # What a gate of keys is closed for, a queue without keys does not tell.
        asks_keys = any(gate in OF_KEYS for gate in asked)
        self.gates: Sequence[Gate] = GATES if asks_keys else [gate for gate in asked if gate in charges.gates]


class QueueAdmission:
    """What each job of a queue is judged by.

    charges: what it takes. shut: the gate that closed the queue as a whole before any job started. units: units that
    its instance has been given since.
    """

    # A reference back to the state would make a cycle of references, which only the garbage collector frees.
    __slots__ = ("_of_keys", "_shared", "charges", "shut", "units")

    def __init__(self, queue: ConstrainedQueue, state: AdmissionState) -> None:
        self.charges = charges = queue_charges(queue, state.charges)
        self.units = state.given_units(queue)
        shared: SharedAdmission | None = state.shared_admissions.get(charges.shared)
        if shared is None:
            shared = state.shared_admissions[charges.shared] = SharedAdmission(charges.shared, state)
        self._shared = shared
        self._of_keys = [state.counter(name) for name in charges.keys]
        if charges.tokens:
            self._of_keys += [state.counters[name] for name in charges.tokens if name in state.counters]
        asked = shared.gates if self.leaves(0.0) else GATES
        self.shut = closing_gate(queue, state, asked) if asked else None

    def closed(self, head: QueueHead, state: AdmissionState) -> tuple[Gate, str] | None:
        """Return the first gate that is closed for the job, and why; None if all are open."""
        # If the queue is open, only the limits of counters can close a gate for one job. A reserve depends on several
        # counters.
        if self.shut is None and not state.reserves and self.leaves(head.estimate):
            return None
        for gate in GATES:
            why = gate.closed_for_job(head, state)
            if why is not None:
                return gate, why
        return None

    @property
    def left(self) -> float:
        """Return how many more jobs the tightest counter of jobs allows, at least 0; infinite if none has a limit."""
        counters = [*self._of_keys, *(counter for counter, amount in self._shared.limited if amount is not None)]
        left = [each.most - each.used for each in counters if each.most is not None]
        return max(0.0, min(left, default=math.inf))

    def leaves(self, estimate: float) -> bool:
        """Return whether the counters leave enough for one more job with this estimate."""
        for counter in self._of_keys:
            if not counter.leaves(1.0):
                return False
        limited = self._shared.limited
        return not limited or all(each.leaves(estimate if amount is None else amount) for each, amount in limited)

    def take(self, head: QueueHead) -> None:
        """Count what the job takes, because it starts."""
        self.units.used += head.job.units
        self.charge(1, estimate=head.estimate)

    def charge(self, jobs: float, *, estimate: float) -> None:
        """Add to the counters what this number of jobs takes of them."""
        for counter in self._of_keys:
            counter.used += jobs
        for counter, amount in self._shared.counters:
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
