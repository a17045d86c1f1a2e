"""Gates of time: windows in which jobs of a class may start, and hours that a job prefers."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from schema import hours
from schema.gated import GatedQueue, Head
from schema.hours import Preferred
from schema.openings import Openings


class Timed(Protocol):
    """What these gates are judged by: the database's time, and the windows."""

    now: datetime
    openings: Openings


class _Free:
    """What waits for a time takes of nothing."""

    def takes(self, queue: GatedQueue) -> Mapping[str, float | None]:  # noqa: ARG002 - as every gate is asked
        return {}


@dataclass(frozen=True)
class Windows(_Free):
    """A window is open that takes the job's class, and the meter that it goes by has not come too far."""

    name: str = "window"
    asks: str = "a window is open in which jobs of its class may start"

    def closed_to(self, queue: GatedQueue, book: Timed) -> str | None:
        job_class = queue.terms.get("job_class")
        return None if job_class is None else book.openings.closed_to(job_class, book.now)

    def closed_for(self, head: Head, book: Timed) -> str | None:
        return self.closed_to(head.queue, book)


@dataclass(frozen=True)
class PreferredHours(_Free):
    """It is one of the hours of the day at which the job wants to start."""

    name: str = "preferred hours"
    asks: str = "it is one of the hours that it prefers"

    def closed_to(self, queue: GatedQueue, book: Timed) -> str | None:
        try:
            preferred = _preferred(queue)
        except ValueError as error:
            # Only who submits in SQL can say so.
            return f"the zone of the hours that it prefers cannot be used: {error}"
        if preferred is None or preferred.open_at(book.now):
            return None
        opens = preferred.opens(book.now)
        when = "never" if opens is None else f"from {hours.wall(opens, preferred.zone)} on"
        return f"it may start {when}, at the next of the hours that it prefers"

    def closed_for(self, head: Head, book: Timed) -> str | None:
        return self.closed_to(head.queue, book)


def windowed(queue: GatedQueue) -> bool:
    """Whether its jobs wait for windows, if there are any."""
    return "job_class" in queue.terms


def _preferred(queue: GatedQueue) -> Preferred | None:
    wanted = queue.terms.get("preferred_hours")
    if not wanted:
        return None
    return Preferred(frozenset(wanted), hours.zone(queue.terms.get("preferred_zone", "UTC")))
