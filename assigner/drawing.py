"""Candidates for many groups of jobs at once, drawn from one window of free bots."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import ceil, gcd

from sqlalchemy import Connection

from assigner.offers import Offers
from assigner.sampling import Group
from schema import candidates, windows
from schema.candidates import LOOK, FreeBot, Wanted
from schema.windows import WHOLE, Part, Seen, Walk

#: Rounds in which groups draw; between two of them it is asked what the kinds that they came upon offer.
ROUNDS = 3
#: Facts that are asked for at once, each at some 3 µs of the server and as much of ours.
ASKED = 10_000
#: How many times the room that a group needs fewer bots than it wants to draw must have to suffice.
AMPLE = 2
#: Kinds of bots up to which a window is sorted by kind; of more, groups look at one bot after another.
SORTED = 64

#: Cohort, instance, pool of the bots of one walk.
Way = tuple[int, int | None, str | None]


@dataclass(frozen=True)
class _Pile:
    """Bots of a window, those of one walk or those that serve one instance; `whole` if no others are free."""

    bots: list[Seen]
    kinds: dict[int, list[Seen]]
    whole: bool

    @cached_property
    def _offering(self) -> dict[tuple[int, ...], list[Seen]]:
        return {tuple(self.kinds): self.bots}

    def offering(self, known: dict[int, bool]) -> list[Seen]:
        """The bots of the kinds that are known to offer something."""
        kinds = tuple(kind for kind in self.kinds if known[kind])
        if kinds not in self._offering:
            self._offering[kinds] = [seen for kind in kinds for seen in self.kinds[kind]]
        return self._offering[kinds]


@dataclass
class _Drawer:
    """A group with the bots to draw from, and where it begins and how it goes on, of which chance decides once."""

    want: Wanted
    jobs: int
    sample_size: int
    pile: _Pile
    start: float
    stride: float
    found: list[FreeBot] | None = None

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What its jobs have in common."""
        return self.want.cohort, self.want.instance, self.want.platform, self.want.units

    def draw(self, known: dict[int, bool]) -> list[Seen]:
        """Draw, or else return bots of which it has to be known whether they offer what the group requires."""
        if len(self.pile.kinds) <= SORTED:
            unknown = [bots[0] for kind, bots in self.pile.kinds.items() if kind not in known]
            if unknown:
                return unknown
            bots = self.pile.offering(known)
        else:
            bots = self.pile.bots
        drawn, unknown = self._around(bots, known)
        if not unknown and (self.pile.whole or len(drawn) == self.want.count or self._ample(drawn)):
            self.found = [seen.bot for seen in drawn]
            self._reckon(drawn)
        return unknown

    def _ample(self, drawn: Sequence[Seen]) -> bool:
        """Whether they are a sample, and have together so much room that its jobs will not fill them."""
        need = AMPLE * self.want.units * self.jobs
        return len(drawn) >= self.sample_size and sum(seen.left for seen in drawn) >= need

    def _around(self, bots: list[Seen], known: dict[int, bool]) -> tuple[list[Seen], list[Seen]]:
        """Enough bots that may do, and those of them that are not known to: from a random place in random steps, so
        that two groups that begin with the same bot go on with different ones."""
        drawn: list[Seen] = []
        unknown: list[Seen] = []
        whole, units, count, size = self.pile.whole, self.want.units, self.want.count, len(bots)
        at, step = int(self.start * size), _step(self.stride, size)
        for _ in range(size):
            seen = bots[at]
            at = (at + step) % size
            if (seen.bot.room if whole else seen.left) < units:
                continue
            offered = known.get(seen.kind)
            if offered is None:
                unknown.append(seen)
            elif not offered:
                continue
            drawn.append(seen)
            if len(drawn) == count:
                break
        return drawn, unknown

    def _reckon(self, drawn: Sequence[Seen]) -> None:
        """Its jobs may go to the first of them: of bots that are not all, no more are drawn than they have room for."""
        if not self.pile.whole:
            each = ceil(self.jobs / len(drawn))
            for seen in islice(drawn, self.jobs):
                seen.left -= self.want.units * each


def drawn(
    connection: Connection,
    groups: Sequence[Group],
    *,
    sample_size: int,
    offers: Offers,
    chance: random.Random,
    within: Part = WHOLE,
) -> list[list[FreeBot]]:
    """Candidates for each group, read without locks: a random draw from a window that is a random part of the free
    bots `within` a part of the ring, as large as the batch.

    A group for which the window holds too few, though there may be more, is sampled by itself.
    """
    piles = _piles(connection, groups, sample_size=sample_size, kinds=offers.kinds, chance=chance, within=within)
    if within == WHOLE:
        offers.kinds = max(len(pile.kinds) for pile in piles.values())
    drawers = [
        _Drawer(
            group.wanted(sample_size),
            len(group.jobs),
            sample_size,
            piles[group.cohort, group.instance],
            chance.random(),
            chance.random(),
        )
        for group in groups
    ]
    tried = waiting = [each for each in drawers if within != WHOLE or not offers.passed_by(each.key)]
    for turn in range(ROUNDS):
        unknown: dict[tuple[int, int], int] = {}
        undecided: list[_Drawer] = []
        for each in waiting:
            platform = each.want.platform
            new = each.draw(offers.of(platform))
            if new:
                undecided.append(each)
                unknown |= {(platform, seen.kind): seen.bot.id for seen in new}
        waiting = undecided
        if not unknown or turn == ROUNDS - 1:
            break
        asked = [(platform, bot_id) for (platform, _), bot_id in islice(unknown.items(), ASKED)]
        offers.learn(windows.offered(connection, asked))
    # That a part of the bots does not do for a group says nothing of the next part.
    for each in tried if within == WHOLE else ():
        (offers.fell_short if each.found is None else offers.sufficed)(each.key)
    _alone(connection, [each for each in drawers if each.found is None], chance=chance)
    return [each.found or [] for each in drawers]


def _alone(connection: Connection, short: Sequence[_Drawer], *, chance: random.Random) -> None:
    if short:
        sampled = candidates.sample(connection, [each.want for each in short], chance=chance)
        for each, found in zip(short, sampled, strict=True):
            each.found = found


def _piles(
    connection: Connection,
    groups: Sequence[Group],
    *,
    sample_size: int,
    kinds: int,
    chance: random.Random,
    within: Part,
) -> dict[tuple[int, int], _Pile]:
    """By cohort and instance. Each walk is as long as it has jobs, and longer by its share of a margin, at least by a
    sample: then the last job finds as many bots that are free still as the first. The margin is `LOOK`, or two samples
    of each of the `kinds` that are expected, four times as many at most."""
    pools = windows.pools(connection, {group.instance for group in groups})
    ways = {
        (group.cohort, group.instance): _ways(group.cohort, group.instance, pools.get(group.instance))
        for group in groups
    }
    jobs: Counter[Way] = Counter()
    for group in groups:
        for way in ways[group.cohort, group.instance]:
            jobs[way] += len(group.jobs)
    share = min(max(LOOK, 2 * sample_size * kinds), 4 * LOOK) / sum(len(group.jobs) for group in groups)
    walks = [Walk(*way, limit=some + max(sample_size, ceil(share * some))) for way, some in jobs.items()]
    found = windows.look(connection, walks, chance=chance, within=within)
    parts = {
        way: _Pile(bots, _by_kind(bots), whole=within == WHOLE and len(bots) < walk.limit)
        for way, walk, bots in zip(jobs, walks, found, strict=True)
    }
    return {key: _joined([parts[way] for way in own]) for key, own in ways.items()}


def _ways(cohort: int, instance: int, pool: str | None) -> list[Way]:
    ways: list[Way] = [(cohort, None, None), (cohort, instance, None)]
    return ways if pool is None else [*ways, (cohort, None, pool)]


def _by_kind(bots: Sequence[Seen]) -> dict[int, list[Seen]]:
    found: dict[int, list[Seen]] = {}
    for seen in bots:
        found.setdefault(seen.kind, []).append(seen)
    return found


def _joined(parts: Sequence[_Pile]) -> _Pile:
    joined, *others = [part for part in parts if part.bots] or parts[:1]
    for part in others:
        kinds = joined.kinds | {kind: [*joined.kinds.get(kind, ()), *bots] for kind, bots in part.kinds.items()}
        joined = _Pile([*joined.bots, *part.bots], kinds, whole=joined.whole and part.whole)
    return joined


def _step(stride: float, size: int) -> int:
    """A step, by chance `stride` from 0 to 1, that comes to all of `size` places before it is back at the first."""
    step = 1 + int(stride * size)
    while gcd(step, size) > 1:
        step = step % size + 1
    return step
