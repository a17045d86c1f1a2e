"""One consistent read of the bots that a batch of jobs could go to: a random sample for each group of alike jobs.

One module because what is drawn for a group depends on what the other groups of the batch need and were shown.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import ceil, sqrt
from typing import TypeVar

from assigner.placement.fleet import SMALL, Cell, Domain, Fleet, Part, joined, shuffled
from assigner.placement.strategy import Group, Input, Snapshot, group_jobs, preference, with_phase
from schema.fleet import candidates, localities, success
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.fleet.members import Service
from schema.moves.grant import PREEMPTION, Placement
from schema.picking.pick import ReadyJob
from schema.postgres.connection import Connection

# Samples. Bots are drawn in memory from the fleet that the assigner remembers. The database then tells what these bots
# have left. The first draw is for all groups of the batch together. If it does not hold enough bots for a group, more
# bots are drawn for that group. What is enough is said by `Enough`, of a draw as of a group.
#
# Every free bot that could take a job of a group is as likely to be in its sample as any other such bot, and every pair
# of them as any other pair. There are two exceptions. A large batch draws from a part of the fleet. And a group may not
# see bots that earlier groups are likely to fill.


#: The first draw has a whole sample for each of so many groups; for further groups it has one bot for each job.
MANY_GROUPS = 32
#: Standard deviations by which more bots are drawn than are enough on average.
DEVIATIONS = 1.0
#: The most further draws for groups that have too few bots after the first one.
ROUNDS = 3
#: The most bots whose offers are checked for one group, if many kinds of bots offer what it asks for.
MAX_LOOKS = 4000
#: Jobs from which on, and domains up to which, a batch is placed on a part of the fleet where nobody else places.
#: Groups of many domains together need all bots. Groups of one domain, however many, can share a sample.
CROWD, FEW = 20, 4
#: Bots over which a batch with a part is spread, even if fewer have room for it: so few rows cost little.
SPREAD = 256
#: Room is ample if it is this many times what the jobs take: jobs of one unit, and larger ones. Nearly half of the room
#: of a bot may be too small for a job of several units.
AMPLE, AMPLE_IF_LARGE = 1.5, 2.0

#: What says which bots could take a job: its cohort, its instance, and its requirement set.
Requirement = tuple[int, int, int]


@dataclass(frozen=True)
class Enough:
    """How many free bots are enough for some jobs: `bots`, or only a `sample` if these have `room` units together.

    So of bots with room for several jobs fewer are read, and fewer have to be locked and written.
    """

    bots: int
    sample: int
    room: float

    @classmethod
    def of(cls, jobs: int, *, sample: int, units: int, largest: int) -> "Enough":
        """For these jobs: a sample, and one more bot for each job but the first.

        units: what all of the jobs take. largest: the most that one of them takes.
        """
        return cls(sample + jobs - 1, sample, (AMPLE if largest == 1 else AMPLE_IF_LARGE) * units)

    def spread(self) -> "Enough":
        """Return the same for a batch that is to leave no bots idle beside full ones: with a larger sample."""
        return replace(self, sample=max(self.sample, min(SPREAD, self.bots)))

    def are(self, bots: int, room: int) -> bool:
        """Return whether this number of bots with this room together is enough."""
        return bots >= self.bots or (bots >= self.sample and room >= self.room)


@dataclass(eq=False)
class Draw:
    """What a group of jobs wants, and the bots that could be of use to it.

    units: what each of its jobs takes. others: the bots that the first draw left out, in random order. tried: how many
    of them have been read for this group. own: those of them that are free.
    """

    domain: Domain
    units: int
    jobs: int
    enough: Enough
    others: Iterator[int] | None = None
    own: list[FreeBot] = field(default_factory=list)
    tried: int = 0


class ShuffledBots:
    """Bots in random order. Each group is shown the bots that follow those of the group before it.

    left: the room of bots that have less room now than when they were read.
    """

    def __init__(self, bots: Sequence[FreeBot], units: int, left: Mapping[int, int]) -> None:
        self._bots, self._units, self._left = list(bots), units, left
        self._place = len(bots)

    def following(self, count: int, chance: random.Random) -> list[FreeBot]:
        """Return the next `count` bots with room for the units. At the end of the list, the bots are put into a new
        random order and the group is shown the first ones. The answer is shorter only if fewer bots have room."""
        found = self._next(count)
        if len(found) < count:
            roomy = [bot for bot in self._bots if self._left.get(bot.id, bot.free_units) >= self._units]
            self._bots, self._place = sorted(roomy, key=lambda _: chance.random()), 0
            found = self._next(count)
        return found

    def _next(self, count: int) -> list[FreeBot]:
        found: list[FreeBot] = []
        bots, left, units, place = self._bots, self._left, self._units, self._place
        while place < len(bots) and len(found) < count:
            bot = bots[place]
            place += 1
            if left.get(bot.id, bot.free_units) >= units:
                found.append(bot)
        self._place = place
        return found


class FreeBots:
    """The free bots that have been read for a batch: of a random part of the bots in some domains, or of all."""

    def __init__(
        self, connection: Connection, fleet: Fleet, domains: Iterable[Domain], *, chance: random.Random
    ) -> None:
        self._connection, self._fleet, self._chance = connection, fleet, chance
        different = dict.fromkeys(domains)
        #: The number of domains.
        self.domains = len(different)
        self._cells = dict.fromkeys(chain.from_iterable(domain.cells for domain in different))
        self._cost_of_all = fleet.size({cell.service.cohort for cell in self._cells})
        self._everything = joined([cell.ids for cell in self._cells])
        self._known: dict[int, FreeBot | None] = {}
        self._left: dict[int, int] = {}
        self._expected = max(fleet.share, 1 / max(len(fleet), 1))
        self._begin()

    def _begin(self) -> None:
        self._drawn: set[int] = set()
        self._filed: dict[Cell, list[FreeBot]] = defaultdict(list)
        self._free = self._units = 0
        self._bots_of: dict[int, list[FreeBot]] = {}
        self._shuffled: dict[tuple[Domain, int], ShuffledBots] = {}
        self._drawn_in: Counter[Cell] | None = None
        self.is_complete = False

    def read(self, wanted: int) -> None:
        """Draw and read random bots until `wanted` free ones are known, or until all bots have been read."""
        others = (each for each in shuffled(self._everything, self._chance) if each not in self._drawn)
        while self._free < wanted and len(self._drawn) < len(self._everything):
            more = self._needed(wanted - self._free)
            if self._would_cost_more(more):
                self._read_all()
            else:
                self._draw(islice(others, more))
        self.is_complete = self.is_complete or len(self._drawn) == len(self._everything)
        if self._drawn:
            self._fleet.share = self._free / len(self._drawn)

    @property
    def kinds(self) -> str:
        """Return a name for the kinds of these bots."""
        return " ".join(map(str, sorted({cell.kind for cell in self._cells})))

    def has_parts(self, part: Part) -> bool:
        """Return whether each part of these bots has enough of them for a batch."""
        return len(self._everything) >= SMALL * part.parts

    def read_part(self, part: Part, enough: Enough) -> bool:
        """Draw and read random bots of one part of the fleet until they are enough. Return whether they are; if not,
        they are dropped.

        The first draw assumes that free bots have as much room as lately, and that those of any one domain may have to
        take all jobs.
        """
        those = joined([cell.part(part) for cell in self._cells])
        order, spread = shuffled(those, self._chance), enough.spread()
        while not spread.are(self._free, self._units):
            roomy = max(spread.sample, ceil(self.domains * enough.room / self._fleet.room))
            more = min(self._needed(min(enough.bots, roomy) - self._free), len(those) - len(self._drawn))
            if not more or self._would_cost_more(more):
                break
            self._draw(islice(order, more))
            self._fleet.room = max(self._units / max(self._free, 1), 1.0)
        if not enough.are(self._free, self._units):
            self._begin()
            return False
        return True

    def read_for(self, missing: Sequence[tuple[Draw, int]]) -> bool:
        """Read more bots for groups that lack some, given with the number that each lacks. If it costs less, read all
        free bots instead. Return False if no more bots could be of use."""
        chosen = [
            (draw, list(islice(self._others(draw), self._needed(some, self._share_for(draw)))))
            for draw, some in missing
        ]
        ids = {bot_id for _, some in chosen for bot_id in some}
        if self._would_cost_more(len(ids)):
            self._read_all()
            return True
        self._learn(ids)
        for draw, some in chosen:
            draw.tried += len(some)
            draw.own += [bot for bot_id in some if (bot := self._known[bot_id]) is not None]
        return bool(ids)

    def sample(self, draw: Draw) -> list[FreeBot]:
        """A random sample of the bots that could take a job of the group; a smaller one if no more are known."""
        units, count, domain = draw.units, draw.enough.bots, draw.domain
        if domain.wanted is not None:
            order = islice(shuffled(self._bots(domain), self._chance), MAX_LOOKS)
            found = list(
                islice((bot for bot in order if self._room(bot) >= units and self._offers(bot, domain)), count)
            )
        else:
            if (domain, units) not in self._shuffled:
                self._shuffled[domain, units] = ShuffledBots(self._bots(domain), units, self._left)
            found = self._shuffled[domain, units].following(count, self._chance)
        own = () if self.is_complete else (bot for bot in draw.own if self._room(bot) >= units)
        return [*found, *islice(own, count - len(found))]

    def are_enough(self, found: Sequence[FreeBot], draw: Draw) -> bool:
        """Return whether the group needs no more bots than these: they are enough, or there are no more."""
        return self.is_complete or draw.enough.are(len(found), sum(map(self._room, found)))

    def reserve(self, draw: Draw, found: Sequence[FreeBot]) -> None:
        """Take the room that the group's jobs need off the first of these bots, so that the groups that follow are not
        shown bots without room. This is not done if all free bots are known."""
        if found and not self.is_complete:
            each = draw.units * ceil(draw.jobs / len(found))
            for bot in found[: draw.jobs]:
                self._left[bot.id] = self._room(bot) - each

    @property
    def _share(self) -> float:
        """The share of free bots among those that were drawn and one more, for which the share at the time of the last
        sample counts."""
        return (self._free + self._expected) / (len(self._drawn) + 1)

    def _needed(self, free: int, share: float | None = None) -> int:
        """How many bots to draw to find so many free ones, most likely, where this share of them is free: the number of
        those that are not has a binomial distribution."""
        share = self._share if share is None else share
        return ceil((free + DEVIATIONS * sqrt(free * max(1 - share, 0.0))) / share)

    def _share_for(self, draw: Draw) -> float:
        """The same of the bots that could be of use to a group."""
        if self._drawn_in is None:
            self._drawn_in = Counter(cell for each in self._drawn if (cell := self._fleet.cell_of(each)) is not None)
        drawn = sum(self._drawn_in[cell] for cell in draw.domain.cells) + draw.tried
        return (len(self._bots(draw.domain)) + len(draw.own) + self._expected) / (drawn + 1)

    def _would_cost_more(self, bots: int) -> bool:
        """Whether it costs more to read so many bots than to read all that are free."""
        return bots > self._share * self._cost_of_all

    def _room(self, bot: FreeBot) -> int:
        return self._left.get(bot.id, bot.free_units)

    def _offers(self, bot: FreeBot, domain: Domain) -> bool:
        cell = self._fleet.cell_of(bot.id)
        return cell is not None and self._fleet.offers(cell, domain)

    def _bots(self, domain: Domain) -> list[FreeBot]:
        """The free bots of the domain among those that were drawn."""
        cells = domain.cells
        if id(cells) not in self._bots_of:
            if len(cells) > len(self._filed):
                those = set(cells)
                found = [bot for cell, bots in self._filed.items() if cell in those for bot in bots]
            else:
                found = [bot for cell in cells for bot in self._filed.get(cell, ())]
            self._bots_of[id(cells)] = found
        return self._bots_of[id(cells)]

    def _others(self, draw: Draw) -> Iterator[int]:
        """Bots that have not been drawn yet and that offer what the group asks for."""
        if draw.others is None:
            order: Iterator[int] = shuffled(joined([cell.ids for cell in draw.domain.cells]), self._chance)
            if draw.domain.wanted is not None:
                order = (
                    each
                    for each in islice(order, MAX_LOOKS)
                    if (cell := self._fleet.cell_of(each)) is not None and self._fleet.offers(cell, draw.domain)
                )
            draw.others = (each for each in order if each not in self._drawn)
        return draw.others

    def _draw(self, bot_ids: Iterable[int]) -> None:
        drawn = list(bot_ids)
        self._learn(drawn)
        self._drawn.update(drawn)
        self._file(bot for bot_id in drawn if (bot := self._known[bot_id]) is not None)

    def _learn(self, bot_ids: Iterable[int]) -> None:
        unknown = sorted(bot_id for bot_id in bot_ids if bot_id not in self._known)
        self._known.update(dict.fromkeys(unknown))
        self._known.update((bot.id, bot) for bot in candidates.free_among(self._connection, unknown))

    def _read_all(self) -> None:
        self._begin()
        self._drawn.update(self._everything)
        self._file(candidates.all_free(self._connection, {cell.service.cohort for cell in self._cells}))
        self.is_complete = True

    def _file(self, bots: Iterable[FreeBot]) -> None:
        self._bots_of.clear()
        self._shuffled.clear()
        self._drawn_in = None
        for bot in bots:
            cell = self._fleet.cell_of(bot.id)
            # A bot that keeps all its room for an instance has none for a sample.
            if cell is not None and cell in self._cells and bot.free_units > 0:
                self._filed[cell].append(bot)
                self._free += 1
                self._units += bot.free_units


def sample(
    connection: Connection,
    fleet: Fleet,
    wanted: Sequence[CandidateRequest],
    *,
    sample_size: int,
    chance: random.Random,
    will_place: bool = True,
) -> list[list[FreeBot]]:
    """Random free bots for each group of alike jobs, read without locks: as many as it wants, which is `sample_size`
    and one more for each job but the first; fewer if few are free.

    will_place: the jobs of each group are to be placed, so that groups that follow are shown other bots.
    """
    fleet.refresh(connection)
    domain_of = _domains(connection, fleet, {_requirement(want) for want in wanted})
    draws = [_draw(want, domain_of, sample_size=sample_size) for want in wanted]
    reserving = range(len(draws)) if will_place else ()
    return _sample(connection, fleet, draws, sample_size=sample_size, chance=chance, reserving=reserving)


def _sample(
    connection: Connection,
    fleet: Fleet,
    draws: Sequence[Draw],
    *,
    sample_size: int,
    chance: random.Random,
    reserving: Collection[int],
    part: Part | None = None,
    wait_for_turn: Callable[[str], None] | None = None,
) -> list[list[FreeBot]]:
    """Random free bots for each of these draws.

    part: the part of the fleet from which to draw; other bots are read if it has too few.
    wait_for_turn: called with the name of their kinds before all bots are read, if they are too few for parts.
    reserving: numbers of the draws that hide the room which their jobs need from the draws that follow.
    """
    free = FreeBots(connection, fleet, (draw.domain for draw in draws), chance=chance)
    _first_draw(free, draws, sample_size=sample_size, part=part, wait_for_turn=wait_for_turn)
    found: list[list[FreeBot]] = [[] for _ in draws]
    short = list(range(len(draws)))
    for more in range(ROUNDS + 1):
        waiting, short = short, []
        for nth in waiting:
            found[nth] = free.sample(draws[nth])
            if more < ROUNDS and not free.are_enough(found[nth], draws[nth]):
                short.append(nth)
            elif nth in reserving:
                free.reserve(draws[nth], found[nth])
        if not short or not free.read_for([(draws[nth], draws[nth].enough.bots - len(found[nth])) for nth in short]):
            break
    return found


def _first_draw(
    free: FreeBots,
    draws: Sequence[Draw],
    *,
    sample_size: int,
    part: Part | None,
    wait_for_turn: Callable[[str], None] | None,
) -> None:
    """Read bots for all of these draws together: of the part, if the batch is large and the part has enough of them,
    otherwise of the whole fleet. If that is too small for parts, large batches take turns."""
    jobs = sum(draw.jobs for draw in draws)
    if part is not None and free.domains <= FEW and jobs >= CROWD:
        units, largest = sum(draw.jobs * draw.units for draw in draws), max(draw.units for draw in draws)
        if not free.has_parts(part):
            if wait_for_turn is not None:
                wait_for_turn(free.kinds)
        elif free.read_part(part, Enough.of(jobs, sample=sample_size * free.domains, units=units, largest=largest)):
            return
    free.read(sample_size * min(len(draws), MANY_GROUPS) + jobs - 1)


def _requirement(of: CandidateRequest | ReadyJob) -> Requirement:
    return of.cohort, of.instance, of.platform


def _draw(want: CandidateRequest, domain_of: Mapping[Requirement, Domain], *, sample_size: int) -> Draw:
    jobs, units = want.count - sample_size + 1, want.units
    enough = Enough.of(jobs, sample=sample_size, units=jobs * units, largest=units)
    return Draw(domain_of[_requirement(want)], units, jobs, enough)


def _domains(connection: Connection, fleet: Fleet, wanted: Collection[Requirement]) -> dict[Requirement, Domain]:
    """Where the bots are that could take such jobs; equal places are one object."""
    fleet.learn(connection, {platform for _, _, platform in wanted})
    pooled = {instance for cohort, instance, _ in wanted if fleet.has_pools(cohort)}
    pools = candidates.pools_of(connection, pooled) if pooled else {}
    present: dict[tuple[int, int], tuple[Service, ...]] = {}
    domains: dict[tuple[tuple[Service, ...], int], Domain] = {}
    found = {}
    for requirement in wanted:
        cohort, instance, platform = requirement
        tenant = cohort, instance
        if tenant not in present:
            services = [Service(cohort, None, None), Service(cohort, instance, None)]
            if instance in pools:
                services.append(Service(cohort, None, pools[instance]))
            present[tenant] = fleet.present(services)
        offering = fleet.kinds_offering(platform)
        # Equal kinds are one object. Where there are many, each requirement set has a domain of its own.
        key = present[tenant], -platform if offering is None else id(offering)
        if key not in domains:
            domains[key] = fleet.domain(present[tenant], platform)
        found[requirement] = domains[key]
    return found


S = TypeVar("S", bound=Snapshot)


def sample_snapshot(
    connection: Connection,
    jobs: Sequence[ReadyJob],
    *,
    sample_size: int,
    fleet: Fleet,
    chance: random.Random,
    part: Part | None = None,
    wait_for_turn: Callable[[str], None] | None = None,
    inputs: Collection[Input] = (),
) -> Snapshot:
    """Candidates for every group of the jobs, read without locks, and what the strategy goes by beside them.

    `fleet` is what the caller remembers of this pool's bots; it is brought up to date.
    """
    fleet.refresh(connection)
    required = {_requirement(job) for job in jobs}
    preferred = {(job.cohort, job.instance, job.preferred) for job in jobs if job.preferred is not None}
    domain_of = _domains(connection, fleet, required | preferred)
    groups = _groups(jobs, domain_of)
    looked_for = _with_preferred(groups)
    found = _sample(
        connection,
        fleet,
        [_draw(group.wanted(sample_size), domain_of, sample_size=sample_size) for group in looked_for],
        sample_size=sample_size,
        chance=chance,
        part=part,
        wait_for_turn=wait_for_turn,
        # Jobs that prefer some bots are in two groups. The second one hides nothing from others.
        reserving={nth for nth, group in enumerate(looked_for) if group.preferred is None},
    )
    if Input.WARM in inputs:
        found = _with_warm(connection, looked_for, found)
    seen = _with_hits(connection, jobs, groups, found)
    return with_rates(connection, seen) if Input.SUCCESS in inputs else seen


def healthy_snapshot(
    connection: Connection,
    jobs: Sequence[ReadyJob],
    *,
    fleet: Fleet,
    of_all: bool = False,
    inputs: Collection[Input] = (),
) -> Snapshot:
    """Lock as many free bots for each group as it has jobs: the first ones that nobody else has locked.

    They are chosen among some bots, or among all, however many these are, if `of_all` is true. `fleet` is brought up to
    date, as for a sample.
    """
    fleet.refresh(connection)
    required = {_requirement(job) for job in jobs}
    groups = _groups(jobs, _domains(connection, fleet, required))
    found = [candidates.any_free(connection, group.wanted(1), of_all=of_all) for group in _with_preferred(groups)]
    seen = _with_hits(connection, jobs, groups, found)
    return with_rates(connection, seen) if Input.SUCCESS in inputs else seen


def _with_preferred(groups: Sequence[Group]) -> list[Group]:
    """The groups, and before them those that prefer some bots, as if they required these: what a sample shows to a
    group it may not show to those that follow."""
    return [*(twin for group in groups if (twin := group.of_preferred) is not None), *groups]


def _groups(jobs: Sequence[ReadyJob], domain_of: Mapping[Requirement, Domain]) -> list[Group]:
    """Jobs that the same bots could take, as one group with one sample, but for jobs that prefer some bots.

    So one heap of bots does for jobs of 500 requirement sets. Of 500 heaps each would be out of date after each job.
    """
    found: dict[Hashable, list[ReadyJob]] = {}
    for job in jobs:
        required, preferred = _requirement(job), preference(job)
        key = (domain_of[required], job.units) if preferred is None else (required, job.units, preferred)
        found.setdefault(key, []).append(job)
    return [Group.of(alike) for alike in found.values()]


def without_candidates(seen: Snapshot) -> list[Group]:
    """The groups for which not one candidate was found."""
    return [
        group
        for nth, (group, found) in enumerate(zip(seen.groups, seen.candidates, strict=True))
        if not found and not seen.preferred.get(nth)
    ]


def groups_too_large(connection: Connection, groups: Sequence[Group]) -> list[Group]:
    """Those groups whose jobs need more units than any of the free bots has.

    Where no bot is free at all, another assigner has been faster, and the jobs simply wait for their turn.
    """
    return [
        group
        for group in groups
        if group.units > 1
        and candidates.is_any_free(connection, replace(group.wanted(1), units=1))
        and not candidates.is_any_free(connection, group.wanted(1))
    ]


def _with_warm(
    connection: Connection, groups: Sequence[Group], found: Sequence[Sequence[FreeBot]]
) -> list[list[FreeBot]]:
    """The candidates of each group, then those bots that hold a hint of its jobs and are not among them."""
    wanted = [
        (nth, hint)
        for nth, group in enumerate(groups)
        for hint in dict.fromkeys(job.locality_hint for job in group.jobs)
        if hint is not None
    ]
    warm = localities.warm(
        connection, [(replace(groups[nth].wanted(1), count=localities.WARM_LIMIT), hint) for nth, hint in wanted]
    )
    merged = [{bot.id: bot for bot in bots} for bots in found]
    for (nth, _), bots in zip(wanted, warm, strict=True):
        for bot in bots:
            merged[nth].setdefault(bot.id, bot)
    return [list(bots.values()) for bots in merged]


def _with_hits(
    connection: Connection, jobs: Sequence[ReadyJob], groups: Sequence[Group], found: Sequence[Sequence[FreeBot]]
) -> Snapshot:
    bot_ids = {bot.id for bots in found for bot in bots}
    hints = {job.locality_hint for job in jobs if job.locality_hint is not None}
    hits = localities.hinted(connection, sorted(bot_ids), sorted(hints))
    preferring = [nth for nth, group in enumerate(groups) if group.preferred is not None]
    twins = len(preferring)
    preferred = dict(zip(preferring, found[:twins], strict=True))
    return Snapshot(jobs, groups, found[twins:], hits, preferred=preferred)


def with_rates(connection: Connection, seen: S) -> S:
    """The snapshot with what is known of how the candidates have succeeded with jobs of the same labels."""
    labels = success.job_labels(connection, [job.id for job in seen.jobs])
    bot_ids = sorted({bot.id for bot in seen.bots})
    return replace(seen, labels=labels, rates=success.success_rates(connection, bot_ids, sorted({*labels.values()})))


# Kept units: what preemption has freed on bots for instances below their minimum quota. They are placed before the
# strategy chooses among samples. A bot that keeps units has more room for one instance than for the others, while a
# strategy knows one number for each bot.


def place_on_kept(connection: Connection, jobs: Sequence[ReadyJob]) -> list[Placement]:
    """Place these jobs, in their order, on units that bots keep for their instances and that are all free.

    A job goes to the bot that keeps the fewest units of those that keep enough, so that small jobs do not take what was
    gathered for a large one.
    """
    groups = group_jobs(jobs)
    found = candidates.keeping(connection, [group.wanted(1) for group in groups])
    bots = {job.id: those for group, those in zip(groups, found, strict=True) if those for job in group.jobs}
    used: Counter[int] = Counter()
    placements: list[Placement] = []
    for job in jobs:
        fitting = [bot for bot in bots.get(job.id, ()) if bot.kept_units - used[bot.id] >= job.units]
        if fitting:
            bot = min(fitting, key=lambda each: (each.kept_units - used[each.id], each.id))
            used[bot.id] += job.units
            placements.append(with_phase(Placement(job.id, bot.id, {"bot": bot.name, "strategy": PREEMPTION}), job))
    return placements
