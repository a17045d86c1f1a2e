"""The gate of backpressure: advice to start nothing for now, or to wait between starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from schema import backpressure
from schema.backpressure import Advice
from schema.gated import GatedQueue, Head


class Advised(Protocol):
    """What the gate looks at."""

    @property
    def advice(self) -> Mapping[str, Advice]:
        """By resource class, '' for all."""

    @property
    def waits(self) -> Mapping[str, float]:
        """Seconds that this assigner still waits before it starts jobs of a class, '' for those of none."""


@dataclass(frozen=True)
class Backpressure:
    """Advice of operators, and of a checker. It is best effort: what runs goes on."""

    name: str = "backpressure"
    asks: str = "nobody advises to hold it back"

    def closed_to(self, queue: GatedQueue, book: Advised) -> str | None:
        used = queue.terms.get("resource_class")
        if not backpressure.of(book.advice, used).allowed:
            return f"to start jobs{'' if used is None else f' that use {used!r}'} is advised against for now"
        wait = book.waits.get(used or backpressure.ALL, 0.0)
        return f"the wait that is advised between starts goes on for another {wait:.2f} s" if wait > 0 else None

    def closed_for(self, head: Head, book: Advised) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, _queue: GatedQueue) -> Mapping[str, float | None]:
        return {}
