"""Demand: how many jobs wait, for which bots, what holds them back, and for how many bots they are work.

A row is one cohort with one requirement set: the jobs that ask for the same properties, of all instances. A queue is
the smallest thing that is read. Jobs are counted up to a bound in the index of their queue, so that the cost grows with
the queues and not with the jobs. A row whose count was cut short says so.

Limits are judged as an assigner judges them: the quota and the drain of the instance, and the gates on constrained
jobs, in the order of the queues' ids. What the jobs of one queue would take of a limit is not left for the next. Two
things are not judged: resources other than units, because only a bot that is there tells what it has, and costs that
are charged by a job's own estimate. Each such job counts as 1.

A job that starts later is no demand yet.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, inf
from typing import NamedTuple

from leasehold.errors import BadInput
from leasehold.wire import escaped

from assigner.admission import judging
from assigner.admission import rules as admission_rules
from assigner.admission.judging import queue_admission
from assigner.admission.rules import Rules
from assigner.admission.state import AdmissionState
from schema.accounting.quotas import EVICTION_COOLDOWN, HEADROOM, Cooldown
from schema.fleet import kinds
from schema.fleet.kinds import Offer, Wanted
from schema.moves.waiting import pause
from schema.picking.constrained import ConstrainedQueue, usable
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import AT_REST, DRAIN, HEALTHY, PAUSE, PAUSED_UNTIL, ready_in, ready_queues
from schema.validation import Properties

#: The most queues that are read; and the most jobs counted in all of them together, and of each queue at least.
MAX_QUEUES, MAX_COUNTED, LEAST_COUNTED = 1_000, 100_000, 100
#: The most groups of alike bots, and of pairs of requirement set and kind of bots, that are read.
MAX_GROUPS, MAX_LINKS = 2_000, 100_000
#: The most units that a bot may be said to have, and the most bots that may be suggested.
MAX_UNITS, MAX_BOTS = 1_000_000, 1_000_000


def _queues(unpaused: str) -> str:
    return f"""
WITH RECURSIVE {ready_queues("plain")}, {ready_queues("needy", constrained=True)}, retrying AS MATERIALIZED (
    SELECT j.queue, count(*) AS jobs, min(j.queued_at) AS oldest, bool_or(j.more) AS more
    FROM (SELECT first.*, count(*) OVER () > :most AS more
          FROM (SELECT queue, queued_at FROM jobs WHERE {AT_REST} AND schedule_after < {PAUSED_UNTIL}
                ORDER BY schedule_after LIMIT :most + 1) first) j
    WHERE j.queued_at <= now() GROUP BY j.queue
), held AS MATERIALIZED (
    SELECT k.*, greatest(CAST(:least AS bigint), CAST(:most AS bigint) / count(*) OVER ()) AS share FROM queues k
    WHERE k.id = ANY (ARRAY(SELECT queue FROM plain UNION SELECT queue FROM needy UNION SELECT queue FROM retrying))
    ORDER BY k.id LIMIT :queues + 1
)
SELECT k.id, k.cohort, coalesce(c.name, 'default') AS cohort_name, k.instance, i.name, i.pool, i.managed,
    {DRAIN.of(instance="i")} AS undrained, k.units, coalesce(k.required, k.platform) AS platform, p.properties,
    k.constraint_set, t.terms, {HEADROOM} AS headroom, n.jobs AS ready, coalesce(r.jobs, 0) AS retrying,
    n.jobs >= k.share OR coalesce(r.more, false) AS more,
    extract(epoch FROM now() - least(n.oldest, r.oldest))::float AS oldest, now() AS now
FROM held k JOIN instances i ON i.id = k.instance JOIN platforms p ON p.id = coalesce(k.required, k.platform)
LEFT JOIN cohorts c ON c.id = k.cohort LEFT JOIN constraint_sets t ON t.id = k.constraint_set
LEFT JOIN quotas q ON q.cohort = k.cohort AND q.instance = k.instance LEFT JOIN retrying r ON r.queue = k.id
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs, min(queued_at) AS oldest FROM (
        SELECT queued_at FROM jobs WHERE {ready_in("k")}{unpaused}
        ORDER BY queue, rank, queued_at, id LIMIT k.share) counted) n
WHERE n.jobs > 0 OR r.jobs > 0
ORDER BY k.id
"""


# By whether something is paused: to look at each job for that takes its row, and not the entry of an index alone.
QUEUES = {True: Statement(_queues(f" AND {PAUSE.of(job='')}")), False: Statement(_queues(""))}

# Healthy bots that are alike. A bot on probation takes one lease at a time; units that are kept are for one instance.
BOTS = Statement(f"""
SELECT coalesce(c.name, 'default') AS cohort, b.kind, b.instance, b.pool, b.capacity,
    CASE WHEN b.free THEN greatest(0, b.capacity - b.in_use - b.kept_units) ELSE 0 END AS room,
    count(*) AS bots, sum(b.in_use) AS in_use
FROM bots b LEFT JOIN cohorts c ON c.id = b.cohort
WHERE b.status <> 'gone' AND {HEALTHY.of(bot="b")} GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6 LIMIT :most + 1
""")
LINKS = Statement("""
SELECT platform, kind FROM kind_platforms
WHERE platform = ANY (CAST(:platforms AS integer[])) AND kind = ANY (CAST(:kinds AS integer[])) LIMIT :most + 1
""")
COHORT = Statement("SELECT EXISTS (SELECT FROM cohorts WHERE name = :name)")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Between what bounds, and for bots of what size, the number of bots is suggested.

    least, most: the bounds, in bots. units_per_bot: units of one further bot; None: as many as the largest of the
    healthy bots that could serve the jobs has, or 1 if there is none.
    """

    least: int = 0
    most: int = 100
    units_per_bot: int | None = None

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise BadInput("min", f"{self.least} is more than max, {self.most}")


@dataclass(frozen=True)
class Demand:
    """The jobs of one cohort that ask for the same properties, and the bots that could serve them.

    queued: all that are queued: ready + limited + retrying. ready: those that start as soon as bots have room.
    limited: those that wait for a limit: a quota, the drain of their instance, or a gate. retrying: those that wait
    until they may be tried again. units: what the queued jobs take. oldest_seconds: for how long the oldest of them is
    queued.
    bots, units_in_use, free_units: healthy bots that offer the properties and serve one of the instances; their units.
    What a bot keeps for one instance is not free.
    units_per_bot: the size of a further bot. too_large: ready jobs that would not fit on it.
    would_start_with_one_more_bot: ready jobs that would start on it, after the free units are filled, small ones first.
    suggested_bots: see `suggested`. at_least: true: not all jobs or bots were read, so the counts are lower bounds.
    """

    cohort: str
    properties: Properties
    queued: int
    ready: int
    limited: int
    retrying: int
    units: int
    oldest_seconds: float
    bots: int
    units_in_use: int
    free_units: int
    units_per_bot: int
    too_large: int
    would_start_with_one_more_bot: int
    suggested_bots: int
    at_least: bool


@dataclass(frozen=True)
class DemandList:
    """The demand by cohort and requirement set, the longest wait first. at_least: true: more queues wait than were
    read."""

    demand: list[Demand]
    at_least: bool


@dataclass(frozen=True)
class DemandValue:
    """One number, as autoscalers read it: the number of bots that is suggested."""

    value: int


# What would start, and what bots have room for it. Pure.


def suggested(sizes: Mapping[int, int], *, in_use: int, units_per_bot: int, scale: Scale) -> int:
    """Return how many bots of `units_per_bot` units would hold what runs and what could start.

    sizes: units of a job → ready jobs. in_use: units in use on the bots there are. It is, within the bounds,
    ceil(in_use / U + sum of jobs / floor(U / units)) for U = units_per_bot: a bot of 5 units holds two jobs of 2. Jobs
    of more units than U are left out. Twice the jobs in wait ask for twice the bots.
    """
    wanted = Fraction(in_use, units_per_bot)
    wanted += sum(Fraction(jobs, units_per_bot // units) for units, jobs in sizes.items() if units <= units_per_bot)
    return min(max(ceil(wanted), scale.least), scale.most)


def unplaced(sizes: Mapping[int, int], rooms: Mapping[int, int]) -> dict[int, int]:
    """Return the jobs that are left once bots have been filled with as many as they have room for, small ones first.

    sizes: units of a job → jobs. rooms: free units of a bot → such bots.
    """
    left, free = dict[int, int](), Counter(rooms)
    for units, jobs in sorted(sizes.items()):
        for room, bots in sorted(free.items(), reverse=True):
            fit = room // units
            if not fit or not jobs:
                continue
            filled, rest = divmod(min(jobs, fit * bots), fit)
            jobs -= filled * fit + rest
            free[room] -= filled + bool(rest)
            free[room - fit * units] += filled
            if rest:
                free[room - rest * units] += 1
        left[units] = jobs
    return left


# The limits on waiting jobs, as the gates judge them.


class WaitingQueue(NamedTuple):
    """A queue with jobs that wait, and how many of its ready jobs no limit holds back."""

    row: Row
    startable: int


def _within_limits(connection: Connection, rows: Sequence[Row], rules: Rules) -> list[WaitingQueue]:
    """Judge the queues one after another by one working copy of what is counted."""
    if not rows:
        return []
    constrained = {row.id: _constrained(row) for row in rows if row.terms is not None and row.undrained and row.ready}
    state = AdmissionState(now := rows[0].now)
    if constrained:
        queues = list(constrained.values())
        state = admission_rules.read_admission_state(connection, queues, now=now, rules=rules)
    left = dict[tuple[int, int], float]()
    found = []
    for row in rows:
        place = (row.cohort, row.instance)
        units = left.setdefault(place, inf if row.headroom is None else max(0, row.headroom))
        jobs = min(row.ready, units // row.units) if row.undrained else 0
        if (queue := constrained.get(row.id)) is not None:
            admission = queue_admission(queue, state)
            jobs = 0 if admission.shut is not None else min(jobs, max(0.0, judging.max_starts(queue, state) // 1))
            admission.charge(jobs, estimate=1.0)
        left[place] = units - jobs * row.units
        found.append(WaitingQueue(row, int(jobs)))
    return found


def _constrained(row: Row) -> ConstrainedQueue:
    place = (row.id, row.cohort, row.instance, row.platform, row.constraint_set)
    return ConstrainedQueue(*place, row.name, usable(row.terms), row.headroom, 0, row.managed)


# The bots, and the rows of the answer.


@dataclass
class _Fleet:
    """The healthy bots that could serve some jobs: free units of a bot → such bots."""

    bots: int = 0
    in_use: int = 0
    largest: int = 0
    rooms: Counter[int] = field(default_factory=Counter)

    def add(self, group: Row) -> None:
        self.bots += group.bots
        self.in_use += group.in_use
        self.largest = max(self.largest, group.capacity)
        self.rooms[group.room] += group.bots


@dataclass(frozen=True)
class _Reading:
    """What has been read: queues, groups of bots, and whether there are more of either."""

    queues: Sequence[WaitingQueue]
    groups: Sequence[Row]
    more_queues: bool
    more_groups: bool


def _read(connection: Connection, *, cooldown: Cooldown = EVICTION_COOLDOWN, rules: Rules) -> _Reading:
    values = {"most": MAX_COUNTED, "least": LEAST_COUNTED, "queues": MAX_QUEUES, **cooldown.values()}
    rows = connection.execute(QUEUES[pause.any_pause(connection)], values).all()
    groups = connection.execute(BOTS, {"most": MAX_GROUPS}).all()
    queues = _within_limits(connection, rows[:MAX_QUEUES], rules)
    return _Reading(queues, groups[:MAX_GROUPS], len(rows) > MAX_QUEUES, len(groups) > MAX_GROUPS)


def demand(connection: Connection, scale: Scale, *, cooldown: Cooldown = EVICTION_COOLDOWN, rules: Rules) -> DemandList:
    """Read the demand of every cohort and requirement set with queued jobs."""
    found = _read(connection, cooldown=cooldown, rules=rules)
    platforms = {queue.row.platform for queue in found.queues}
    wanted = {"platforms": list(platforms), "kinds": [*{group.kind for group in found.groups}], "most": MAX_LINKS}
    links = connection.execute(LINKS, wanted).all()
    offering = defaultdict[int, set[int]](set)
    for platform, kind in links[:MAX_LINKS]:
        offering[platform].add(kind)
    # Requirement sets that differ only in what jobs prefer ask for the same properties.
    alike = defaultdict[tuple[str, frozenset[kinds.Clause]], list[WaitingQueue]](list)
    for queue in found.queues:
        alike[queue.row.cohort_name, kinds.clauses(queue.row.properties)].append(queue)
    more = found.more_groups or len(links) > MAX_LINKS
    rows = []
    for (cohort, _), queues in alike.items():
        kinds_offering = set[int]().union(*(offering[queue.row.platform] for queue in queues))
        fleet = _serving(found.groups, cohort, kinds_offering, queues)
        rows.append(_row(cohort, queues, fleet, scale, more=more))
    rows.sort(key=lambda each: (-each.oldest_seconds, each.cohort))
    return DemandList(rows, at_least=found.more_queues)


def demand_value(
    connection: Connection,
    cohort: str,
    offer: Offer,
    scale: Scale,
    *,
    cooldown: Cooldown = EVICTION_COOLDOWN,
    rules: Rules,
) -> DemandValue:
    """Suggest a number of bots of `cohort` that offer this: for all jobs that such bots could serve, whatever they
    require, and with what runs on bots that offer at least this. Raises BadInput without such a cohort."""
    if not connection.execute(COHORT, {"name": cohort}).scalar_one():
        raise BadInput("cohort", f"there is no cohort '{escaped(cohort, 63)}'")
    found = _read(connection, cooldown=cooldown, rules=rules)
    offered = kinds.offers(connection, {group.kind for group in found.groups})
    fleet = _Fleet()
    for group in found.groups:
        if group.cohort == cohort and offer.clauses <= offered[group.kind].clauses:
            fleet.add(group)
    mine = [
        queue
        for queue in found.queues
        if queue.row.cohort_name == cohort and offer.is_open_to(Wanted(kinds.clauses(queue.row.properties)))
    ]
    return DemandValue(_row(cohort, mine, fleet, scale, more=False).suggested_bots)


def _serving(groups: Iterable[Row], cohort: str, offering: set[int], queues: Sequence[WaitingQueue]) -> _Fleet:
    """The bots of these kinds that serve an instance of one of the queues."""
    instances, pools = {queue.row.instance for queue in queues}, {queue.row.pool for queue in queues} - {None}
    fleet = _Fleet()
    for group in groups:
        for_all = group.instance is None and group.pool is None
        serves = for_all or group.instance in instances or group.pool in pools
        if group.cohort == cohort and group.kind in offering and serves:
            fleet.add(group)
    return fleet


def _row(cohort: str, queues: Sequence[WaitingQueue], fleet: _Fleet, scale: Scale, *, more: bool) -> Demand:
    sizes, ready, startable = Counter[int](), 0, 0
    for queue in queues:
        sizes[queue.row.units] += queue.startable
        ready, startable = ready + queue.row.ready, startable + queue.startable
    units_per_bot = scale.units_per_bot or fleet.largest or 1
    left = unplaced(sizes, fleet.rooms)
    after = unplaced(left, {units_per_bot: 1})
    retrying = sum(queue.row.retrying for queue in queues)
    return Demand(
        cohort,
        queues[0].row.properties if queues else {},
        queued=ready + retrying,
        ready=startable,
        limited=ready - startable,
        retrying=retrying,
        units=sum(queue.row.units * (queue.row.ready + queue.row.retrying) for queue in queues),
        oldest_seconds=max((queue.row.oldest for queue in queues), default=0.0),
        bots=fleet.bots,
        units_in_use=fleet.in_use,
        free_units=sum(room * bots for room, bots in fleet.rooms.items()),
        units_per_bot=units_per_bot,
        too_large=sum(jobs for units, jobs in sizes.items() if units > units_per_bot),
        would_start_with_one_more_bot=sum(left.values()) - sum(after.values()),
        suggested_bots=suggested(sizes, in_use=fleet.in_use, units_per_bot=units_per_bot, scale=scale),
        at_least=more or any(queue.row.more for queue in queues),
    )
