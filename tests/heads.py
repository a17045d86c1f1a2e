"""Heads of queues as the pure core takes them, without a database, at a virtual time."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from assigner.terms import Book
from schema.gated import GatedQueue, Head
from schema.ready import ReadyJob

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """So many seconds after noon."""
    return NOON + timedelta(seconds=seconds)


def queue(*, instance: str = "default", constraint_set: int = 1, **terms: Any) -> GatedQueue:
    """A queue of an instance whose jobs share these terms."""
    return GatedQueue(0, hash(instance) % 1000, 1, constraint_set, instance, terms, None, 0)


def head(
    nth: int,
    rank: float,
    *,
    since: float = 0.0,
    of: GatedQueue | None = None,
    seconds: float | None = None,
    deadline: float | None = None,
    priority_inputs: Mapping[str, Any] | None = None,
) -> Head:
    """A job that has been queued since so many seconds after noon, and is due so many after it."""
    found = of or queue()
    job = ReadyJob(nth, str(nth), found.cohort, found.instance, found.platform, round(rank), 1, None, 0)
    due = None if deadline is None else at(deadline)
    return Head(job, found, rank, at(since), 0, 1.0, seconds, due, priority_inputs or {})


def book(seconds: float = 0.0, **fields: Any) -> Book:
    """What is counted at so many seconds after noon."""
    return Book(at(seconds), **fields)
