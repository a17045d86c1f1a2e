"""What the configuration says of jobs that ask for more than a place, and the book that they are judged by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection

from assigner.admission import gates, graph_share, state
from assigner.admission.checkers import CheckerSettings
from assigner.admission.gates import POOL_JOBS
from assigner.admission.ordering import OrderingSettings
from assigner.admission.state import Book
from assigner.placement import resources
from schema import graphs
from schema.accounting import counters, fair_share, rates
from schema.accounting.fair_share import FairShareSettings
from schema.picking.constrained import GatedQueue
from schema.policy import priority_classes, time_windows
from schema.policy.time_windows import Openings


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
    names = sorted({name for queue in queues for name in state.names(queue)})
    buckets = sorted({name for queue in queues for name in rates.names(queue.terms)})
    classes = sorted({queue.terms["job_class"] for queue in queues if "job_class" in queue.terms})
    book = Book(
        now,
        counters.read(connection, names),
        reserve=rules.fair.budget_reserve,
        rates=rates.read_buckets(connection, buckets),
        seconds=priority_classes.expected(connection, classes),
        openings=time_windows.read(connection) if any(map(gates.windowed, queues)) else Openings(),
        lacking=resources.lacking(connection, queues),
    )
    if any(queue.managed for queue in queues):
        book.shares = fair_share.read(connection, instances(queues), rules.fair)
    if pressed:
        book.advice = rates.read_advice(connection)
    if rules.ordering.kind == "graph":
        limit = book.of(POOL_JOBS).most
        book.portion = graph_share.portion(rules.ordering, limit=limit, graphs=graphs.active(connection))
    return book


def instances(queues: Sequence[GatedQueue]) -> list[int]:
    """Those whose queues these are, by id."""
    return sorted({queue.instance for queue in queues})
