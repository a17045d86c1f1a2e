"""How many jobs of a class may run at once, which keeps the rest of the pool for the other classes."""

from collections.abc import Mapping
from dataclasses import dataclass

from assigner.owners import Counted
from schema.gated import GatedQueue, Head


def names(queue: GatedQueue) -> list[str]:
    """The counter of the class of the queue's jobs, if they have one."""
    return [f"class:{queue.terms['job_class']}:jobs"] if "job_class" in queue.terms else []


@dataclass(frozen=True)
class ClassLimit:
    """Live leases of a class; what is not left to it stays free for more urgent work."""

    name: str = "class limit"
    asks: str = "fewer jobs of its class run than may run at once"

    def closed_to(self, queue: GatedQueue, book: Counted) -> str | None:
        for name in names(queue):
            counter = book.of(name)
            if not counter.leaves(1.0):
                return f"class '{queue.terms['job_class']}' runs {counter.used:g} of at most {counter.most:g} jobs"
        return None

    def closed_for(self, head: Head, book: Counted) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        return dict.fromkeys(names(queue), 1.0)
