"""Quotas of owners and of projects: what their jobs may cost within the rolling window."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from schema.counters import Counter
from schema.gated import GatedQueue, Head


class Counted(Protocol):
    """Something that knows counters by their names."""

    def of(self, name: str) -> Counter:
        """The counter of that name."""


def names(queue: GatedQueue) -> list[str]:
    """The counters of the owner and the project of the queue's jobs, if they have any."""
    return [name for name, _ in _counted(queue)]


@dataclass(frozen=True)
class OwnerQuota:
    """A job whose owner or project has used its quota waits until enough of that is older than the window."""

    name: str = "owner quota"
    asks: str = "the quotas of its owner and its project leave enough"

    def closed_to(self, queue: GatedQueue, book: Counted) -> str | None:
        return _closed(queue, book, 0.0)

    def closed_for(self, head: Head, book: Counted) -> str | None:
        return _closed(head.queue, book, head.estimate)

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:
        return dict.fromkeys(names(queue))


def _counted(queue: GatedQueue) -> Iterator[tuple[str, str]]:
    for kind, word in (("owner", "User"), ("project", "Project")):
        if kind in queue.terms:
            yield f"{kind}:{queue.instance_name}:{queue.terms[kind]}:cost", word


def _closed(queue: GatedQueue, book: Counted, estimate: float) -> str | None:
    for name, word in _counted(queue):
        counter = book.of(name)
        if not counter.leaves(estimate):
            needs = f", and this job is estimated at {estimate:g}" if estimate else ""
            return f"{word} quota exceeded: {counter.used:g} of {counter.most:g} used{needs}"
    return None
