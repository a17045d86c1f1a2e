"""What one queue's jobs are judged by: what each takes, which gate is closed, how many may start, and when more may.

What is the same for all jobs of a queue is found once for them.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from assigner.admission.gates import GATES, KEYS, OF_KEYS, TIMED, Gate, ReleaseTime, lock_numbers
from assigner.admission.state import AdmissionState
from schema.accounting.counters import Counter as UsageCounter
from schema.picking.constrained import ConstrainedQueue, QueueHead

#: Estimates of one queue's jobs, at most, whose amounts are remembered.
MAX_ESTIMATES = 8


class Charges:
    """What each job of a queue takes, which depends on its instance and its constraints alone.

    own: amounts by counter that it takes for its keys; None stands for the job's estimate. tokens: names of further
        counters of its keys. Each start takes 1 of each in the working copy; gates write them themselves. A token
        without a counter has no limit.
    others: what it takes beside its keys, the same object for all queues that take the same.
    numbers: the slots that its jobs themselves give the locks that they take.
    """

    __slots__ = ("_amounts", "numbers", "others", "own", "tokens")

    def __init__(self, queue: ConstrainedQueue, others: "ChargesBesideKeys") -> None:
        self.others, self.own, self._amounts = others, dict[str, float | None](), dict[float, Mapping[str, float]]()
        for gate in OF_KEYS:
            self.own.update(gate.charges(queue))
        self.tokens = tuple([name for gate in OF_KEYS for name in gate.tokens(queue)])
        self.numbers = lock_numbers(queue)

    def amounts(self, estimate: float) -> Mapping[str, float]:
        """Return what a job with this estimate takes of counters; mostly the same object for equal estimates."""
        found = self._amounts.get(estimate)
        if found is None:
            if len(self._amounts) >= MAX_ESTIMATES:
                self._amounts.clear()
            found = self._amounts[estimate] = self.others.amounts(estimate) | _estimated(self.own, estimate)
        return found


class ChargesBesideKeys:
    """What jobs take beside their keys.

    counters, tokens: as of `Charges`. beside_shares: names of the counters that are not read together with the share of
    the instance. gates: the gates that can be closed for such jobs.
    """

    __slots__ = ("_amounts", "beside_shares", "counters", "gates", "tokens")

    def __init__(self, queue: ConstrainedQueue) -> None:
        """Ask all gates about a queue without keys."""
        self.counters, self._amounts = dict[str, float | None](), dict[float, dict[str, float]]()
        for gate in GATES:
            self.counters.update(gate.charges(queue))
        self.tokens = tuple({name: None for gate in GATES for name in gate.tokens(queue)})
        self.gates = frozenset(gate for gate in GATES if gate.concerns(queue))
        self.beside_shares = tuple(name for name in self.counters if not name.startswith("instance:"))

    def amounts(self, estimate: float) -> dict[str, float]:
        """Return what a job with this estimate takes of these counters."""
        found = self._amounts.get(estimate)
        if found is None:
            if len(self._amounts) >= MAX_ESTIMATES:
                self._amounts.clear()
            found = self._amounts[estimate] = _estimated(self.counters, estimate)
        return found


def _estimated(counters: Mapping[str, float | None], estimate: float) -> dict[str, float]:
    return {name: estimate if amount is None else amount for name, amount in counters.items()}


def smallest_numbers(charged: Iterable[Charges]) -> dict[str, float]:
    """Return the smallest number of slots that one of these queues gives a lock, by counter."""
    found: dict[str, float] = {}
    for charges in charged:
        for name, number in charges.numbers.items():
            found[name] = min(number, found.get(name, number))
    return found


def queue_charges(queue: ConstrainedQueue, known: MutableMapping[Hashable, Any]) -> Charges:
    """Return what jobs of the queue take, found once for each instance and constraint set, and kept in `known`."""
    key = queue.constraint_set, queue.instance
    found: Charges | None = known.get(key)
    if found is None:
        found = known[key] = Charges(queue, _beside_keys(queue, known))
    return found


def _beside_keys(queue: ConstrainedQueue, known: MutableMapping[Hashable, Any]) -> ChargesBesideKeys:
    """Return what jobs of the queue take beside their keys, found once for all that have the same other constraints,
    if these can be looked up."""
    rest = {name: value for name, value in queue.constraints.items() if name not in KEYS}
    try:
        key = queue.instance, frozenset(rest.items())
        found: ChargesBesideKeys | None = known.get(key)
    except TypeError:
        return ChargesBesideKeys(replace(queue, constraints=rest))
    if found is None:
        found = known[key] = ChargesBesideKeys(replace(queue, constraints=rest))
    return found


#: Counters of the working copy that a job takes of, each with the amount; None stands for the job's estimate.
Taken = list[tuple[UsageCounter, float | None]]


class InCommon:
    """What queues that differ only in their keys are judged by.

    counters: those that a job takes of. limited: those of them that have a limit. gates: those that may be closed
    although no counter is used up. asks_keys: a gate of keys may be closed so too.
    """

    __slots__ = ("asks_keys", "counters", "gates", "limited")

    def __init__(self, charges: ChargesBesideKeys, state: AdmissionState) -> None:
        tokens = [(name, 1.0) for name in charges.tokens if name in state.counters]
        self.counters: Taken = [(state.counter(name), amount) for name, amount in (*charges.counters.items(), *tokens)]
        self.limited = _limited(self.counters)
        asked = _may_close(state)
        self.gates = tuple(gate for gate in asked if gate in charges.gates)
        self.asks_keys = any(gate in OF_KEYS for gate in asked)


def _limited(counters: Taken) -> Taken:
    return [each for each in counters if each[0].most is not None]


class QueueAdmission:
    """What each job of a queue is judged by, found once for all of them.

    charges: what it takes. shut: the gate that closed the queue as a whole before any job started. units: units that
    its instance has been given since.
    """

    # A reference back to the state would make a cycle of references, which only the garbage collector frees.
    __slots__ = ("_counters", "_limited", "charges", "shut", "units")

    def __init__(self, queue: ConstrainedQueue, state: AdmissionState) -> None:
        self.charges = charges = queue_charges(queue, state.charges)
        self.units = state.given_units(queue)
        common: InCommon | None = state.common.get(charges.others)
        if common is None:
            common = state.common[charges.others] = InCommon(charges.others, state)
        own: Taken = [(state.counter(name), amount) for name, amount in charges.own.items()]
        own += [(state.counters[name], 1.0) for name in charges.tokens if name in state.counters]
        self._counters = common.counters, own
        self._limited = [*common.limited, *_limited(own)]
        asked: Sequence[Gate] = GATES if common.asks_keys else common.gates
        for counter, amount in self._limited:
            if not counter.leaves(amount or 0.0):
                asked = GATES
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
    return queue_admission(head.queue, state).charges.amounts(head.estimate)


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
