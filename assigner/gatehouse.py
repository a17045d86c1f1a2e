"""The way of jobs that ask for more than a place: their queues are read, those that may start go through and count."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from assigner import admission, terms
from assigner.admission import Ordering
from assigner.terms import Book
from schema import counters, gated
from schema.counters import Charge
from schema.gated import GatedQueue, Head
from schema.moves import Granted
from schema.ready import Scope


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
    ordering: Ordering,
) -> Admitted:
    """Lock up to `batch` jobs that go through their gates and for which a free bot is there."""
    found = gated.queues(connection, scope, batch=batch, start=chance.random(), after=after)
    if found.now is None or not found.queues or not found.room:
        return Admitted([], found.last)
    book = opened(connection, found.queues, now=found.now)
    heads = gated.heads(connection, terms.open_queues(found.queues, book), room=found.room)
    return Admitted(admission.admit(heads, book, room=found.room, ordering=ordering), found.last)


def opened(connection: Connection, queues: Sequence[GatedQueue], *, now: datetime) -> Book:
    """All that the gates of these queues are judged by."""
    names = sorted({name for queue in queues for name in terms.names(queue)})
    return Book(now, counters.read(connection, names))


def charge(connection: Connection, admitted: Sequence[Head], granted: Sequence[Granted]) -> None:
    """Count what the jobs that have got a lease take. A limit that was reached meanwhile undoes the transaction."""
    fences = {lease.job_id: lease.fence for lease in granted}
    counters.take(
        connection,
        [Charge(head.job.id, fences[head.job.id], terms.amounts(head)) for head in admitted if head.job.id in fences],
    )
