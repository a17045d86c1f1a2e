"""Gates of what is counted for the pool and for an instance: jobs that run, their cost, locks and slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from assigner.owners import Counted
from schema.counters import of_instance, of_lock
from schema.gated import GatedQueue, Head
from schema.shares import Shares

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
class Concurrency:
    """Live leases of the pool and of an instance."""

    name: str = "concurrency"
    asks: str = "fewer jobs run than may run at once"

    def closed_to(self, queue: GatedQueue, book: Tally) -> str | None:
        for counted, whose in ((POOL_JOBS, "the pool"), (of_instance(queue.instance_name, "jobs"), "its instance")):
            counter = book.of(counted)
            if not counter.leaves(1.0):
                return f"{whose} runs {counter.used:g} of at most {counter.most:g} jobs"
        return None

    def closed_for(self, head: Head, book: Tally) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        return {POOL_JOBS: 1.0, of_instance(queue.instance_name, "jobs"): 1.0}


@dataclass(frozen=True)
class Budget:
    """Cost of the pool and of an instance, within the rolling window or reserved for what runs."""

    name: str = "budget"
    asks: str = "what was used and what is reserved leave enough of the budget"

    def closed_to(self, queue: GatedQueue, book: Tally) -> str | None:
        for counted, whose in self._counted(queue):
            counter = book.of(counted)
            if not counter.leaves(0.0):
                return f"{whose} has used {counter.used:g} of its budget of {counter.most:g}"
        return None

    def closed_for(self, head: Head, book: Tally) -> str | None:
        for counted, whose in self._counted(head.queue):
            counter = book.of(counted)
            if not counter.leaves(head.estimate if book.reserve else 0.0):
                return (
                    f"{whose} has used {counter.used:g} of its budget of {counter.most:g}, "
                    f"and this job is estimated at {head.estimate:g}"
                )
        return None

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        return {name: None for name, _ in self._counted(queue)}

    @staticmethod
    def _counted(queue: GatedQueue) -> tuple[tuple[str, str], ...]:
        return (POOL_COST, "the pool"), (of_instance(queue.instance_name, "cost"), "its instance")


@dataclass(frozen=True)
class Locks:
    """Named locks of an instance; each is held by so many jobs at once as it has slots, by one if nobody says."""

    name: str = "locks"
    asks: str = "the locks that it names are free"

    def closed_to(self, queue: GatedQueue, book: Tally) -> str | None:
        for lock in queue.terms.get("locks", ()):
            counter = book.of(of_lock(queue.instance_name, lock))
            if not counter.leaves(1.0):
                return f"lock '{lock}' is held {counter.used:g} times of {counter.most:g}"
        return None

    def closed_for(self, head: Head, book: Tally) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        return {of_lock(queue.instance_name, lock): 1.0 for lock in queue.terms.get("locks", ())}


@dataclass(frozen=True)
class Slots:
    """Places in which an instance's jobs work, one for each; an instance for which nobody says has any number."""

    name: str = "slots"
    asks: str = "its instance has a slot free"

    def closed_to(self, queue: GatedQueue, book: Tally) -> str | None:
        counter = book.of(of_instance(queue.instance_name, "slots"))
        if not counter.leaves(1.0):
            return f"its instance uses {counter.used:g} of {counter.most:g} slots"
        if counter.most is None and book.shares is not None and book.shares.slotted:
            return "its instance has no slots, while others have"
        return None

    def closed_for(self, head: Head, book: Tally) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        return {of_instance(queue.instance_name, "slots"): 1.0}
