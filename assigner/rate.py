"""The gate of rates: how fast jobs of a resource class, or of a model of it, may start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from schema import rates
from schema.gated import GatedQueue, Head
from schema.rates import Bucket


@dataclass(frozen=True)
class Return:
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
class Rate:
    """Tokens of the class and of the model that a job uses. They are taken when it starts, and do not come back."""

    name: str = "rate"
    asks: str = "the rates of what it uses leave a token"

    def closed_to(self, queue: GatedQueue, book: Paced) -> str | None:
        refused = book.refused.get(rates.resource(queue.terms) or "")
        if refused is not None:
            return refused
        for name in rates.names(queue.terms):
            bucket = book.rates.get(name)
            if bucket is not None and bucket.tokens < 1.0:
                wait = (1.0 - bucket.tokens) / bucket.rate
                used = name.removeprefix(rates.PREFIX)
                return f"'{used}' may start {bucket.rate:g} jobs per second, the next one in {wait:.2f} s"
        return None

    def closed_for(self, head: Head, book: Paced) -> str | None:
        return self.closed_to(head.queue, book)

    def takes(self, _queue: GatedQueue) -> Mapping[str, float | None]:
        return {}
