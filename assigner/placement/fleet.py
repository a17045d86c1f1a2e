"""What an assigner remembers of its fleet, and where in it the bots are that could be of use to some jobs.

It is a cache: it holds which bots are healthy, whom they serve and what they offer, not what they have left. The grant
judges every placement again on the locked row.
"""

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeVar

from schema import clock
from schema.fleet import kinds, members
from schema.fleet.members import Member, Service
from schema.postgres.connection import Connection

#: Kinds of bots that offer a requirement set, up to which they are remembered. Where more kinds do, most bots are
#: likely to be of one of them, and one bot after another is looked at.
MANY_KINDS = 1000
#: The most requirement sets that are remembered. If there are more, all of them are forgotten first.
MAX_PLATFORMS = 10_000
#: The fewest bots of a part. A batch would crowd a smaller one, beside bots that get nothing.
SMALL = 64
#: Refreshes after which all bots are read again.
REFRESHES = 10_000


class Part(NamedTuple):
    """One of several equal parts of the fleet, numbered from 0. Assigners with much to place have one each, so that
    they do not want the same bots."""

    number: int
    parts: int


class Cell:
    """Bots of one kind that serve the same instances: a list of their ids, from which one can be taken out in constant
    time."""

    def __init__(self, member: Member) -> None:
        self.service, self.kind = member
        self.ids: list[int] = []
        self._places: dict[int, int] = {}
        self._parts: dict[Part, list[int]] = {}

    def part(self, part: Part) -> list[int]:
        """Those of the bots that are in this part of the fleet."""
        if part not in self._parts:
            self._parts[part] = [bot_id for bot_id in self.ids if bot_id % part.parts == part.number]
        return self._parts[part]

    def add(self, bot_id: int) -> None:
        self._places[bot_id] = len(self.ids)
        self.ids.append(bot_id)
        self._parts.clear()

    def remove(self, bot_id: int) -> None:
        self._parts.clear()
        place, last = self._places.pop(bot_id), self.ids.pop()
        if last != bot_id:
            self.ids[place] = last
            self._places[last] = place


@dataclass(frozen=True, eq=False)
class Domain:
    """The cells that hold all bots which could be of use to some jobs.

    wanted: what the jobs ask for, if some bots of the cells may not offer it; otherwise None.
    """

    cells: Sequence[Cell]
    wanted: kinds.Wanted | None = None


class Fleet:
    """The healthy bots of the pool, as of the latest `refresh`. It belongs to one database and one thread.

    share: the share of bots that were free when some were last read, 0 to 1. room: the units that a free bot had left
    on average when some were last read for a large batch.
    """

    def __init__(self, *, many_kinds: int = MANY_KINDS) -> None:
        self._many_kinds = many_kinds
        self._clear()

    def _clear(self) -> None:
        self.share = self.room = 1.0
        # The snapshot of the latest read, and a monotonic time before it.
        self._snapshot: str | None = None
        self._seen_at = math.inf
        self._refreshes = 0
        self._members: dict[int, Cell] = {}
        self._cells: dict[Service, dict[int, Cell]] = {}
        self._all: dict[tuple[Service, ...], Sequence[Cell]] = {}
        self._sizes, self._pools = Counter[int](), Counter[int]()
        self._offered: dict[int, kinds.Offer] = {}
        self._wanted: dict[int, kinds.Wanted] = {}
        self._offering: dict[int, tuple[int, ...] | None] = {}
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def refresh(self, connection: Connection) -> None:
        """Bring it up to date: read all bots the first time, and then those that have changed."""
        # A refresh that fails leaves nothing half-known: then all bots are read again.
        seen, self._snapshot, seen_at = self._seen(connection), None, clock.monotonic()
        changes = members.read_changes(connection, seen)
        if changes.is_complete:
            self._clear()
        new = {member.kind for member in changes.bots.values() if member is not None} - self._offered.keys()
        if new:
            self._learn_kinds(dict.fromkeys(new, kinds.Offer(frozenset())) | kinds.offers(connection, new))
        if changes.bots:
            self._all.clear()
        # Rows come in an order that the server's pages decide; by their ids, equal chances draw equal bots.
        for bot_id, member in sorted(changes.bots.items(), key=itemgetter(0)):
            self._file(bot_id, member)
        self._refreshes += 1
        self._snapshot, self._seen_at = changes.snapshot, seen_at

    def _seen(self, connection: Connection) -> str | None:
        """Return the snapshot of the latest read, if what has changed since then can be found by it.

        A session that is younger than the snapshot may have begun after a crash of the server.
        """
        is_valid = self._refreshes < REFRESHES and connection.session.began <= self._seen_at
        return self._snapshot if is_valid else None

    def learn(self, connection: Connection, platforms: set[int]) -> None:
        """Read what these requirement sets ask for, as far as it is not known."""
        unknown = platforms - self._wanted.keys()
        if unknown:
            if len(self._wanted) + len(unknown) > MAX_PLATFORMS:
                self._wanted.clear()
                self._offering.clear()
                self._shared.clear()
                unknown = platforms
            self._wanted |= kinds.platform_clauses(connection, unknown)

    def size(self, cohorts: set[int]) -> int:
        """The number of bots of these cohorts."""
        return sum(self._sizes[cohort] for cohort in cohorts)

    def has_pools(self, cohort: int) -> bool:
        """Whether some bot of the cohort serves the instances of a pool."""
        return self._pools[cohort] > 0

    def present(self, services: Sequence[Service]) -> tuple[Service, ...]:
        """Those of the ways to serve in which some bot serves."""
        return tuple(service for service in services if service in self._cells)

    def kinds_offering(self, platform: int) -> tuple[int, ...] | None:
        """The kinds of bots that offer what the requirement set asks for; None if there are many. Equal answers are one
        object."""
        wanted = self._wanted.get(platform)
        if wanted is None:
            return ()
        if platform not in self._offering:
            self._remember(platform, tuple(kind for kind, offer in self._offered.items() if offer.is_open_to(wanted)))
        return self._offering[platform]

    def domain(self, present: tuple[Service, ...], platform: int) -> Domain:
        """Where the bots are that serve so, as `present` returned it, and that offer what the requirement set asks
        for."""
        offering = self.kinds_offering(platform)
        if offering is None:
            return Domain(self._all_cells(present), self._wanted[platform])
        return Domain(
            [here[kind] for here in (self._cells[each] for each in present) for kind in offering if kind in here]
        )

    def _all_cells(self, present: tuple[Service, ...]) -> Sequence[Cell]:
        """All cells of bots that serve so; one object until bots come or go."""
        if present not in self._all:
            self._all[present] = [cell for service in present for cell in self._cells[service].values()]
        return self._all[present]

    def cell_of(self, bot_id: int) -> Cell | None:
        """Where the bot is filed; None if it is not known to be healthy."""
        return self._members.get(bot_id)

    def offers(self, cell: Cell, domain: Domain) -> bool:
        """Whether the bots of a cell of the domain offer what is asked for."""
        return domain.wanted is None or self._offered[cell.kind].is_open_to(domain.wanted)

    def _learn_kinds(self, offered: dict[int, kinds.Offer]) -> None:
        self._offered |= offered
        for platform, known in list(self._offering.items()):
            wanted = self._wanted[platform]
            more = tuple(kind for kind, offer in offered.items() if offer.is_open_to(wanted))
            if more and known is not None:
                self._remember(platform, known + more)

    def _remember(self, platform: int, found: tuple[int, ...]) -> None:
        few = len(found) <= self._many_kinds
        self._offering[platform] = self._shared.setdefault(found, found) if few else None

    def _file(self, bot_id: int, member: Member | None) -> None:
        cell = self._members.get(bot_id)
        if cell is not None and member != (cell.service, cell.kind):
            self._take_out(bot_id, cell)
            cell = None
        if cell is None and member is not None:
            here = self._cells.setdefault(member.service, {})
            if member.kind not in here:
                here[member.kind] = Cell(member)
            here[member.kind].add(bot_id)
            self._members[bot_id] = here[member.kind]
            self._sizes[member.service.cohort] += 1
            self._pools[member.service.cohort] += member.service.pool is not None

    def _take_out(self, bot_id: int, cell: Cell) -> None:
        cell.remove(bot_id)
        del self._members[bot_id]
        self._sizes[cell.service.cohort] -= 1
        self._pools[cell.service.cohort] -= cell.service.pool is not None
        if not cell.ids:
            del self._cells[cell.service][cell.kind]
        if not self._cells[cell.service]:
            del self._cells[cell.service]


def joined(lists: Sequence[Sequence[int]]) -> Sequence[int]:
    """Several lists as one, without a copy of them."""
    return lists[0] if len(lists) == 1 else Joined(lists)


class Joined(Sequence[int]):
    """Several lists as one, without a copy of them."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._lists = lists
        self._ends = list(accumulate(map(len, lists)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> int:  # type: ignore[override]
        nth = bisect_right(self._ends, place)
        return self._lists[nth][place - (self._ends[nth - 1] if nth else 0)]


T = TypeVar("T")


def shuffled(elements: Sequence[T], chance: random.Random) -> Iterator[T]:
    """The elements in an order in which every one is as likely as any other, found out as far as it is read.

    The shuffle of Fisher and Yates; only the places that it has changed are remembered.
    """
    moved: dict[int, int] = {}
    size = len(elements)
    for place in range(size):
        other = place + int(chance.random() * (size - place))
        yield elements[moved.get(other, other)]
        moved[other] = moved.get(place, place)
