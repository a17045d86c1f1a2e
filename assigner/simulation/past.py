"""The past that a simulation repeats: arrivals of jobs, how their attempts went, and the bots; and pasts made from it.

It was read from the live pool (history.py), recorded elsewhere (traces.py) or drawn by chance (generated.py).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from leasehold.errors import BadInput
from leasehold.wire import escaped

from assigner.simulation.records import Records

#: The part of the span by which a shaken arrival moves at most, and the most seconds.
JITTER, MOST_JITTER = 0.05, 300.0
#: The most bots and jobs of a simulation.
MOST_BOTS, MOST_JOBS = 20_000, 1_500_000


@dataclass(frozen=True)
class Attempt:
    """How one attempt went: it ran for `seconds`, and ended with `verdict`."""

    seconds: float
    verdict: str


@dataclass(frozen=True)
class PastJob:
    """One job.

    name: its number, or what the trace calls it. arrived, cancelled: seconds since 1970; cancelled: None unless it
    was cancelled before it ran. begun: it had started before the span. is_over: it has ended. request: as it was
    submitted, without its payload. attempts: those that ended by themselves, the first one first; never empty.
    public_id: None if the pool does not know it any more.
    """

    name: str
    arrived: float
    cancelled: float | None
    begun: bool
    is_over: bool
    request: Mapping[str, Any]
    attempts: Sequence[Attempt]
    public_id: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PastBot:
    """One session of a bot: what it offered, whom it served, and when.

    opened, ended: seconds since 1970; ended: None if the session goes on.
    """

    name: str
    capacity: int
    priority: int = 0
    properties: Mapping[str, Any] = field(default_factory=dict)
    exclusive: Sequence[str] = ()
    labels: Sequence[str] = ()
    instance: str | None = None
    pool: str | None = None
    opened: float = 0.0
    ended: float | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What bots have in common that differ in nothing but their names."""
        lists = (tuple(sorted(each)) for each in (self.exclusive, self.labels))
        return (self.capacity, self.priority, repr(sorted(self.properties.items())), *lists, self.instance, self.pool)


@dataclass(frozen=True)
class Past:
    """What happens from `since` to `until`, in seconds since 1970.

    guessed: jobs whose run times nobody knows. records: what the pool did; None if it is another scheduler's past, or
    nobody's. in_force: as of `read_in_force`; empty for what a new pool has. left_out: how many jobs are not in it, by
    what is wrong with them. bots_left_out: sessions of bots that are not in it, as wrong JSON is stored for them.
    journal_begins: when the first job of the journal ended, None if it is empty.
    judged_from: when what is judged begins, what was before only leads there; None = at the begin.
    """

    since: float
    until: float
    jobs: Sequence[PastJob]
    bots: Sequence[PastBot]
    guessed: int = 0
    records: Records | None = field(default=None, repr=False)
    in_force: Mapping[str, str] = field(default_factory=dict, repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict)
    bots_left_out: int = 0
    journal_begins: float | None = None
    judged_from: float | None = None


def shaken(past: Past, chance: random.Random) -> Past:
    """Return a past that might as well have happened.

    Arrivals within the span move by up to 5 % of it and at most 5 minutes. The run time of a job that ended at its
    first attempt is that of a job drawn from those of the same instance, class and label.
    """
    most = min(MOST_JITTER, JITTER * (past.until - past.since))
    runs: dict[tuple[object, ...], list[Attempt]] = defaultdict(list)
    for job in past.jobs:
        if _is_plain(job):
            runs[_alike(job)].append(job.attempts[0])
    jobs = []
    for job in past.jobs:
        arrived, cancelled = job.arrived, job.cancelled
        if arrived > past.since:
            arrived = min(max(past.since, arrived + chance.uniform(-most, most)), past.until)
            cancelled = None if cancelled is None else cancelled + arrived - job.arrived
        attempts = [chance.choice(runs[_alike(job)])] if _is_plain(job) else job.attempts
        jobs.append(replace(job, arrived=arrived, cancelled=cancelled, attempts=attempts))
    return replace(past, jobs=sorted(jobs, key=lambda job: job.arrived))


def _is_plain(job: PastJob) -> bool:
    return job.is_over and not job.begun and len(job.attempts) == 1


def _alike(job: PastJob) -> tuple[object, ...]:
    own = job.request.get("own") or {}
    return (job.request.get("instance"), own.get("class"), job.request.get("label"))


def with_more(past: Past, number: int, like: str | None) -> Past:
    """Return the past with `number` more bots, or fewer if it is negative.

    They are there from the begin. like: the name of a bot; the new ones are like it, and those that leave are of its
    kind, it the last of them. None = bots of the most frequent kind. Raises BadInput `--bots` if there is no such bot,
    or if they are too few or many.
    """
    present = [bot for bot in past.bots if bot.ended is None]
    kinds = Counter(bot.kind for bot in present)
    if like is None:
        if not kinds:
            raise BadInput("--bots", "no bot is there that others could be like")
        kind = max(kinds, key=lambda each: kinds[each])
        model = next(bot for bot in present if bot.kind == kind)
    else:
        found = next((bot for bot in present if bot.name == like), None)
        if found is None:
            raise BadInput("--bots", f"there is no bot '{escaped(like, 64)}'")
        model = found
    if kinds[model.kind] + number < 0:
        raise BadInput("--bots", f"of bots like '{escaped(model.name, 64)}' there are only {kinds[model.kind]}")
    if len(past.bots) + number > MOST_BOTS:
        raise BadInput("--bots", f"a simulation has at most {MOST_BOTS:,} bots")
    alike = [bot for bot in present if bot.kind == model.kind and bot is not model]
    leave = {bot.name for bot in [model, *alike][number:]} if number < 0 else set()
    names = {bot.name for bot in past.bots}
    new = (name for nth in count(1) if (name := f"added-{nth}") not in names)
    added = [replace(model, name=next(new), opened=0.0) for _ in range(number)]
    return replace(past, bots=[*(bot for bot in past.bots if bot.name not in leave), *added])


def first_part(past: Past, part: float) -> Past:
    """Return the past until this part of its span, 0 to 1."""
    until = past.since + part * (past.until - past.since)
    return replace(past, until=until, jobs=[job for job in past.jobs if job.arrived < until], records=None)


def onwards(past: Past) -> Past:
    """Return what may come after the past, as long as it was: what waits and runs at its end, then its arrivals again.

    What runs goes on for the rest of its time. Nothing is known of what the pool will do.
    """
    span = past.until - past.since
    begun = {lease.job: lease.granted for lease in past.records.leases if lease.ended is None} if past.records else {}
    left = []
    for job in past.jobs:
        if job.is_over:
            continue
        *before, last = job.attempts
        if job.name in begun:
            ran = past.until - max(begun[job.name], past.since)
            before, last = [], Attempt(max(1.0, last.seconds - ran), last.verdict)
        request = {**job.request}
        for name in ("deadline_seconds", "queue_timeout_seconds"):
            if request.get(name) is not None:
                request[name] = max(1.0, request[name] - (past.until - job.arrived))
        left.append(
            replace(job, request=request, arrived=past.until, begun=job.name in begun, attempts=[*before, last])
        )
    again = [
        replace(job, name=f"{job.name}+", public_id=None, arrived=job.arrived + span,
                cancelled=None if job.cancelled is None else job.cancelled + span)
        for job in past.jobs
        if job.arrived > past.since
    ]  # fmt: skip
    bots = [bot for bot in past.bots if bot.ended is None]
    return replace(past, since=past.until, until=past.until + span, jobs=[*left, *again], bots=bots, records=None)
