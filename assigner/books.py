"""What the configuration says of jobs that ask for more than a place, and the book that they are judged by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection

from assigner import fitting, portions, terms, timetable
from assigner.checkers import CheckerSettings
from assigner.counted import POOL_JOBS
from assigner.ordering import OrderingSettings
from assigner.terms import Book
from schema import backpressure, counters, graph_shares, openings, predictions, rates, shares
from schema.gated import GatedQueue
from schema.openings import Openings
from schema.shares import FairShareSettings


@dataclass(frozen=True)
class Rules:
    """What the configuration says of jobs that ask for more than a place."""

    ordering: OrderingSettings = field(default_factory=OrderingSettings)
    checkers: CheckerSettings = field(default_factory=CheckerSettings)
    fair: FairShareSettings = field(default_factory=FairShareSettings)


#: Those of a configuration that says nothing of them.
RULES = Rules()


def opened(
    connection: Connection,
    queues: Sequence[GatedQueue],
    *,
    now: datetime,
    rules: Rules,
    pressed: bool = True,
) -> Book:
    """All that the gates of these queues are judged by; `pressed`: there may be advice to hold back."""
    names = sorted({name for queue in queues for name in terms.names(queue)})
    buckets = sorted({name for queue in queues for name in rates.names(queue.terms)})
    classes = sorted({queue.terms["job_class"] for queue in queues if "job_class" in queue.terms})
    book = Book(
        now,
        counters.read(connection, names),
        reserve=rules.fair.budget_reserve,
        rates=rates.read(connection, buckets),
        seconds=predictions.expected(connection, classes),
        openings=openings.read(connection) if any(map(timetable.windowed, queues)) else Openings(),
        lacking=fitting.lacking(connection, queues),
    )
    if any(queue.managed for queue in queues):
        book.shares = shares.read(connection, instances(queues), rules.fair)
    if pressed:
        book.advice = backpressure.read(connection)
    if rules.ordering.kind == "graph":
        limit = book.of(POOL_JOBS).most
        book.portion = portions.portion(rules.ordering, limit=limit, graphs=graph_shares.active(connection))
    return book


def instances(queues: Sequence[GatedQueue]) -> list[int]:
    """Those whose queues these are, by id."""
    return sorted({queue.instance for queue in queues})
