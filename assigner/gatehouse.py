"""The way of jobs that ask for more than a place: their queues are read, those that may start go through and count."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from assigner import admission, fairness, metrics, terms
from assigner.fairness import Fair
from assigner.terms import Book
from schema import counters, gated, shares
from schema.counters import Charge
from schema.gated import GatedQueue, Head
from schema.moves import Granted
from schema.ready import Scope
from schema.shares import FairShareSettings

#: In which order instances come.
ORDERING = Fair()


@dataclass(frozen=True)
class Admitted:
    """Jobs that may start, locked, in their order, and the queue behind which the next walk begins."""

    heads: Sequence[Head]
    last: tuple[int, int, int, int] = gated.BEGINNING


def pick(
    connection: Connection,
    scope: Scope,
    *,
    batch: int,
    chance: random.Random,
    after: tuple[int, int, int, int],
    fair: FairShareSettings,
) -> Admitted:
    """Lock up to `batch` jobs that go through their gates and for which a free bot is there."""
    found = gated.queues(connection, scope, batch=batch, start=chance.random(), after=after)
    if found.now is None or not found.queues or not found.room:
        return Admitted([], found.last)
    queues = _noted(connection, found.queues, fair)
    book = opened(connection, queues, now=found.now, fair=fair)
    if book.shares is not None:
        metrics.observe_fairness(fairness.index(book.shares, book))
    heads = gated.heads(connection, terms.open_queues(queues, book), room=found.room)
    return Admitted(admission.admit(heads, book, room=found.room, ordering=ORDERING), found.last)


def opened(connection: Connection, queues: Sequence[GatedQueue], *, now: datetime, fair: FairShareSettings) -> Book:
    """All that the gates of these queues are judged by."""
    names = sorted({name for queue in queues for name in terms.names(queue)})
    book = Book(now, counters.read(connection, names), reserve=fair.budget_reserve)
    if any(queue.managed for queue in queues):
        book.shares = shares.read(connection, _instances(queues), fair)
    return book


def _noted(connection: Connection, queues: Sequence[GatedQueue], fair: FairShareSettings) -> Sequence[GatedQueue]:
    """Note who asks for something; leaves out those of whom somebody else notes that they have come back."""
    if not any(queue.managed for queue in queues):
        return queues
    others = shares.note_demand(connection, _instances(queues), fair)
    return [queue for queue in queues if queue.instance not in others]


def _instances(queues: Sequence[GatedQueue]) -> list[int]:
    return sorted({queue.instance for queue in queues})


def charge(
    connection: Connection, admitted: Sequence[Head], granted: Sequence[Granted], *, fair: FairShareSettings
) -> None:
    """Count what the jobs that have got a lease take. A limit that was reached meanwhile undoes the transaction."""
    fences = {lease.job_id: lease.fence for lease in granted}
    counters.take(
        connection,
        [Charge(head.job.id, fences[head.job.id], terms.amounts(head)) for head in admitted if head.job.id in fences],
        may_overshoot=not fair.budget_reserve,
    )
