"""What a pool did in a span of time, in figures: computed alike of a real and of a simulated pool."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from assigner.simulation.records import JobRecord, LeaseRecord, Records

#: Verdicts of attempts whose work counts.
USEFUL = frozenset({"succeeded", "failed"})
#: By how much a part of many jobs may be off, for want of digits.
ROUNDING = 1e-9
#: Jobs of an instance, from which on its waits say something about the replay.
LEAST_JOBS = 20


@dataclass(frozen=True)
class Waits:
    """Of some jobs: how many became ready, those of them that have not started, and waits for the start in seconds.

    Of a job that has not started it is known only that it waits for longer than until it was given up, or the span
    ended. From then on it says no more: the quantiles are those of E. Kaplan, P. Meier, "Nonparametric estimation from
    incomplete observations", 1958. known: the part up to which they are known, 0 to 1; one above it is the longest wait
    so far, which is the least that it can be.
    """

    jobs: int
    waiting: int
    p50: float
    p95: float
    most: float
    known: float = 1.0

    def is_known(self, field: str) -> bool:
        """Return whether a wait is known, and not only the least that it can be."""
        return self.waiting == 0 if field == "most" else {"p50": 0.5, "p95": 0.95}[field] <= self.known + ROUNDING


@dataclass(frozen=True)
class Measured:
    """What a pool did.

    overall: waits of all jobs; None if there was none. waits: by instance. classes: waits by job class, of jobs that
    have one. starts: leases that began in the span. utilisation: the part of the bots' units that leases took, 0 to 1.
    lost: the part of these unit-seconds whose work did not count, because the attempt was stopped, lost or in error.
    unmet: by instance, the seconds in which it was below its minimum in a cohort while a job of it waited there.
    fairness: Jain's index of the service of the instances, see `fairness_of`; None with fewer than two of them. late:
    jobs that missed their deadline, of `due`. near: starts on a bot that had run a job with the same locality hint
    within the span, of `hinted`.
    """

    overall: Waits | None
    waits: Mapping[str, Waits]
    classes: Mapping[str, Waits]
    starts: int
    evictions: int
    utilisation: float
    lost: float
    unmet: Mapping[str, float]
    fairness: float | None
    late: int
    due: int
    near: int
    hinted: int


def measure(records: Records, *, without: Collection[str] = ()) -> Measured:
    """Compute the figures of a pool. Waits and starts are those of other jobs than `without`, by name."""
    jobs = [job for job in records.jobs if job.name not in without and _is_judged(job, records)]
    began = [lease for lease in records.leases if lease.granted >= records.since and lease.job not in without]
    waiting = [*_spans_of_waiting(records)]
    used = sum(lease.units * _seconds(lease, records) for lease in records.leases)
    lost = sum(
        lease.units * _seconds(lease, records)
        for lease in records.leases
        if lease.ended is not None and lease.verdict not in USEFUL
    )
    due = [job for job in records.jobs if job.deadline is not None and records.since <= job.deadline <= records.until]
    near, hinted = _near(records)
    return Measured(
        _of(jobs, records) if jobs else None,
        _waits(jobs, records, lambda job: job.instance),
        _waits(jobs, records, lambda job: job.job_class),
        len(began),
        records.evictions,
        used / records.unit_seconds if records.unit_seconds else 0.0,
        lost / used if used else 0.0,
        _unmet(records, waiting),
        fairness_of(records, waiting),
        sum(job.finished is None or job.finished > (job.deadline or 0.0) for job in due),
        len(due),
        near,
        hinted,
    )


def _is_judged(job: JobRecord, records: Records) -> bool:
    """Whether its wait tells something: it started in the span, or waited in it and nobody took it back."""
    return job.state != "cancelled" if job.started is None else job.started >= records.since


def wait_of(job: JobRecord, records: Records) -> float:
    """Return the seconds for which the job waited for its first start, at least: from `waits_from` on."""
    ends = (job.started, job.finished, records.until)
    return max(0.0, next(each for each in ends if each is not None) - max(job.queued, records.waits_from))


def _waits(jobs: Iterable[JobRecord], records: Records, group: Callable[[JobRecord], str | None]) -> dict[str, Waits]:
    found: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        name = group(job)
        if name is not None:
            found[name].append(job)
    return {name: _of(found[name], records) for name in sorted(found)}


def _of(jobs: Sequence[JobRecord], records: Records) -> Waits:
    # Of equal waits those that ended with a start come first: the others are longer.
    waits = sorted((wait_of(job, records), job.started is None) for job in jobs)
    waiting = sum(still for _, still in waits)
    longest, left, found = waits[-1][0], 1.0, list[float]()
    parts = [0.5, 0.95]
    for nth, (wait, still) in enumerate(waits):
        if not still:
            left *= 1.0 - 1.0 / (len(waits) - nth)
            while parts and 1.0 - left >= parts[0] - ROUNDING:
                found.append(wait)
                del parts[0]
    p50, p95 = [*found, *(longest for _ in parts)]
    return Waits(len(jobs), waiting, p50, p95, longest, 1.0 - left)


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the least value that at least this part of the ordered values does not exceed."""
    return ordered[max(0, ceil(part * len(ordered)) - 1)]


def _seconds(lease: LeaseRecord, records: Records) -> float:
    """The seconds of the lease within the span."""
    ended = records.until if lease.ended is None else min(lease.ended, records.until)
    return max(0.0, ended - max(lease.granted, records.since))


#: A job, and from when to when it was ready and had no lease.
Waiting = tuple[JobRecord, float, float]


def _spans_of_waiting(records: Records) -> Iterator[Waiting]:
    """Each span in which a job was ready and had no lease: before its first one, and between two of them."""
    leases: dict[str, list[LeaseRecord]] = defaultdict(list)
    for lease in records.leases:
        leases[lease.job].append(lease)
    for job in records.jobs:
        free: float | None = job.queued
        for lease in leases.get(job.name, ()):
            if free is not None and lease.granted > max(free, records.since):
                yield job, max(free, records.since), lease.granted
            free = lease.ended
        end = records.until if job.finished is None else min(job.finished, records.until)
        if free is not None and end > max(free, records.since):
            yield job, max(free, records.since), end


def _unmet(records: Records, waiting: Iterable[Waiting]) -> dict[str, float]:
    """By instance with a minimum: the seconds below it in some cohort, while a job of it waited there."""
    changes: dict[tuple[int, str], list[tuple[float, int, int]]] = {place: [] for place in records.minimums}
    for job, start, end in waiting:
        if (job.cohort, job.instance) in changes:
            changes[job.cohort, job.instance] += [(start, 1, 0), (end, -1, 0)]
    for lease in records.leases:
        if (lease.cohort, lease.instance) in changes:
            ended = records.until if lease.ended is None else min(lease.ended, records.until)
            changes[lease.cohort, lease.instance] += [
                (max(lease.granted, records.since), 0, lease.units), (ended, 0, -lease.units)
            ]  # fmt: skip
    found = dict.fromkeys((instance for _, instance in records.minimums), 0.0)
    for (cohort, instance), minimum in records.minimums.items():
        jobs, used, last = 0, 0, records.since
        for at, step, units in sorted(changes[cohort, instance]):
            if jobs > 0 and used < minimum:
                found[instance] += at - last
            jobs, used, last = jobs + step, used + units, at
    return found


def fairness_of(records: Records, waiting: Iterable[Waiting]) -> float | None:
    """Return Jain's index of the instances' service: 1 if all are served alike, 1/n if one of n gets everything.

    The service of an instance is the part of its jobs' time in the pool, waiting or running, in which they ran. The
    index of x₁…xₙ is (Σx)² ÷ (n Σx²): R. Jain, D. Chiu, W. Hawe, "A quantitative measure of fairness and discrimination
    for resource allocation in shared computer systems", 1984.
    """
    ran: dict[str, float] = defaultdict(float)
    for lease in records.leases:
        ran[lease.instance] += _seconds(lease, records)
    waited: dict[str, float] = defaultdict(float)
    for job, start, end in waiting:
        waited[job.instance] += end - start
    service = [
        ran[name] / (ran[name] + waited[name]) for name in sorted({*ran, *waited}) if ran[name] + waited[name] > 0.0
    ]
    squares = sum(each * each for each in service)
    return sum(service) ** 2 / (len(service) * squares) if len(service) > 1 and squares else None


def _near(records: Records) -> tuple[int, int]:
    """First starts on a bot that had run a job with the same hint within the span, and those of jobs whose hint was
    known somewhere."""
    hints = {job.name: job.hint for job in records.jobs if job.hint is not None}
    bots: dict[str, set[str]] = defaultdict(set)
    near = known = 0
    for lease in records.leases:
        hint = hints.pop(lease.job, None)
        if hint is None or lease.bot is None:
            continue
        if bots[hint]:
            known += 1
            near += lease.bot in bots[hint]
        bots[hint].add(lease.bot)
    return near, known


def error_of(real: Measured, replayed: Measured) -> float | None:
    """Return by which part the replayed median and 95 % waits differ from the real ones, as `apart`: the largest over
    instances with at least LEAST_JOBS jobs; None if there is none."""
    found = []
    for name, there in real.waits.items():
        here = replayed.waits.get(name)
        if here is not None and there.jobs >= LEAST_JOBS:
            found += [apart(there.p50, here.p50), apart(there.p95, here.p95)]
    return max(found, default=None)


def apart(one: float, other: float) -> float:
    """Return by which part the longer of two waits is longer than the shorter. Waits below a second count as one."""
    low, high = sorted((max(1.0, one), max(1.0, other)))
    return high / low - 1.0


def is_told(before: float, after: float, *, error: float | None) -> bool:
    """Return whether a wait has changed by more than the error of the replay; differences below a second are none."""
    return abs(max(1.0, before) - max(1.0, after)) >= 1.0 and apart(before, after) > (error or 0.0)


@dataclass(frozen=True)
class Loser:
    """A job that waits longer under a tried policy: seconds before and then. waits: it has not started then."""

    name: str
    instance: str
    before: float
    after: float
    waits: bool


#: The most jobs that are named as losers.
LOSERS = 10


def losers(before: Records, after: Records) -> list[Loser]:
    """Return the jobs whose first start comes the most seconds later than before, the one that lost most first."""
    waits = {job.name: wait_of(job, before) for job in before.jobs if job.state != "cancelled"}
    found = [
        Loser(job.name, job.instance, waits[job.name], wait_of(job, after), job.started is None)
        for job in after.jobs
        if job.name in waits
    ]
    found.sort(key=lambda each: (each.before - each.after, each.name))
    return [each for each in found[:LOSERS] if each.after - each.before >= 1.0]
