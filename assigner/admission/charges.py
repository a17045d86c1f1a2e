"""What a job of a queue takes of counters. It depends on its instance and its constraints alone, so assigners remember
it from cycle to cycle.

There may be thousands of queues that differ only in their keys (locks, resource classes, models). What their jobs take
beside the keys is found once for all of them.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from assigner.admission.gates import GATES, KEYS, OF_KEYS, lock_numbers
from schema.picking.constrained import ConstrainedQueue

#: Estimates at most for which the amounts of one queue's jobs are remembered.
MAX_ESTIMATES = 8


class AmountsByEstimate(dict[float, Mapping[str, float]]):
    """What a job takes of these counters, by its estimate; mostly the same object for equal estimates.

    counters: the amount by counter; None stands for the job's estimate. others: what it takes beside that.
    """

    __slots__ = ("_counters", "_others")

    def __init__(
        self, counters: Mapping[str, float | None], others: Mapping[float, Mapping[str, float]] | None = None
    ) -> None:
        super().__init__()
        self._counters, self._others = counters, others

    def __missing__(self, estimate: float) -> Mapping[str, float]:
        amounts = dict(self._others[estimate]) if self._others is not None else {}
        amounts.update((name, estimate if amount is None else amount) for name, amount in self._counters.items())
        if len(self) >= MAX_ESTIMATES:
            self.clear()
        self[estimate] = amounts
        return amounts


class SharedCharges:
    """What jobs take beside their keys, for all queues in which that is the same.

    counters: the amount by counter; None stands for the job's estimate. tokens: names of further counters. Each start
        takes 1 of each in the working copy; gates write them themselves. A token without a counter has no limit.
    beside_shares: names of the counters that are not read together with the share of the instance.
    gates: the gates that can be closed for such jobs.
    job_class: the class of such jobs, None if they have none.
    amounts: what a job takes of the counters, by its estimate.
    """

    __slots__ = ("amounts", "beside_shares", "counters", "gates", "job_class", "tokens")

    def __init__(self, queue: ConstrainedQueue) -> None:
        """Ask all gates about a queue without keys."""
        self.counters = dict[str, float | None]()
        for gate in GATES:
            self.counters.update(gate.charges(queue))
        self.tokens = tuple({name: None for gate in GATES for name in gate.tokens(queue)})
        self.gates = frozenset(gate for gate in GATES if gate.concerns(queue))
        self.job_class: str | None = queue.constraints.get("job_class")
        self.beside_shares = tuple(name for name in self.counters if not name.startswith("instance:"))
        self.amounts = AmountsByEstimate(self.counters)


class Charges:
    """What each job of a queue takes.

    shared: what it takes beside its keys. keys: the counters of its keys; a job takes 1 of each. tokens: as of
    `SharedCharges`, for its keys. numbers: the slots that its jobs themselves give the locks that they take.
    amounts: what a job takes of all these counters, by its estimate.
    """

    __slots__ = ("amounts", "keys", "numbers", "shared", "tokens")

    def __init__(self, queue: ConstrainedQueue, shared: SharedCharges) -> None:
        self.shared = shared
        self.keys = tuple([name for gate in OF_KEYS for name in gate.charges(queue)])
        self.tokens = tuple([name for gate in OF_KEYS for name in gate.tokens(queue)])
        self.numbers = lock_numbers(queue)
        self.amounts = AmountsByEstimate(dict.fromkeys(self.keys, 1.0), shared.amounts)


def queue_charges(queue: ConstrainedQueue, known: MutableMapping[Hashable, Any]) -> Charges:
    """Return what jobs of the queue take, found once for each instance and constraint set, and kept in `known`."""
    key = queue.constraint_set, queue.instance
    found: Charges | None = known.get(key)
    if found is None:
        found = known[key] = Charges(queue, _shared_charges(queue, known))
    return found


def _shared_charges(queue: ConstrainedQueue, known: MutableMapping[Hashable, Any]) -> SharedCharges:
    """Return what jobs of the queue take beside their keys, found once for all that have the same other constraints,
    if these can be looked up."""
    rest = {name: value for name, value in queue.constraints.items() if name not in KEYS}
    try:
        key = queue.instance, frozenset(rest.items())
        found: SharedCharges | None = known.get(key)
    except TypeError:
        return SharedCharges(replace(queue, constraints=rest))
    if found is None:
        found = known[key] = SharedCharges(replace(queue, constraints=rest))
    return found


def smallest_numbers(charged: Iterable[Charges]) -> dict[str, float]:
    """Return the smallest number of slots that one of these queues gives a lock, by counter."""
    found: dict[str, float] = {}
    for charges in charged:
        for name, number in charges.numbers.items():
            if number < found.get(name, math.inf):
                found[name] = number
    return found
