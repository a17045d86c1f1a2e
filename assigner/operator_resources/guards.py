"""Guards of a trial: what was counted of jobs becomes figures, and a guard holds, is broken, or is not known. Pure.

A figure is of a sample. So it has a lower and an upper bound; that the true figure lies outside has a small chance. A
guard is broken only if the lower bound is above the limit that the upper bound of the time before gives. Otherwise one
slow job of twenty would count as the slowest twentieth of all.

Jobs that wait at the same time wait alike, so that many of them count as few. Their number follows from how seldom
successive jobs cross the quantile (A. Raftery, S. Lewis, "How many iterations in the Gibbs sampler?", 1992).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from leasehold.errors import BadInput
from leasehold.wire import escaped

from schema.policy.canaries import CROSSED, QUANTILES, Counted

#: Seconds before a trial that its figures are compared with.
BEFORE = 3600.0
#: Figures below this count as this, in seconds or of 1,000. A wait of 20 ms is not ten times worse than one of 2 ms.
LEAST_VALUE = 1.0
#: Starts that must be expected before it counts that there was none. With fewer, chance alone may let none happen.
EXPECTED = 5.0
#: How improbable it is that chance alone puts a figure above its `…_low`, or below its `…_high`. A step of half an hour
#: has 360 looks.
CHANCE = 0.001
#: The same in standard deviations of a normal distribution, and the samples above which that is used.
DEVIATIONS, _EXACT = 3.09, 500
_FIGURES = ("p50_wait", "p95_wait", "max_wait", "evictions", "failures")
_GUARD = re.compile(r"(?P<others>others:)?(?P<figure>[a-z0-9_]+)<=(?P<bound>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<times>x?)")


@dataclass(frozen=True)
class Figures:
    """What was measured of some jobs.

    sample: waits that are known, of jobs that have started and of those that still wait. fetched: starts that bots
    fetched themselves. …_wait: seconds. evictions: of 1,000 starts. failures: of 1,000 jobs that ended. …_low, …_high:
    what the figure is at least, and at most, but for a chance of CHANCE that so few jobs show more, or less, than is
    so. A trial that an earlier release has begun has no …_high. max_wait_low: what would be longer than the longest
    wait of before by chance alone. independent: waits that, if each came about by itself, would tell as much of the
    slowest twentieth.
    """

    sample: int = 0
    starts: int = 0
    fetched: int = 0
    p50_wait: float | None = None
    p95_wait: float | None = None
    max_wait: float | None = None
    evictions: float | None = None
    failures: float | None = None
    p50_wait_low: float | None = None
    p95_wait_low: float | None = None
    max_wait_low: float | None = None
    evictions_low: float | None = None
    failures_low: float | None = None
    p50_wait_high: float | None = None
    p95_wait_high: float | None = None
    evictions_high: float | None = None
    failures_high: float | None = None
    independent: int = 0


@dataclass(frozen=True)
class Arms:
    """What was measured where a version is tried, and of all others."""

    tried: Figures
    others: Figures


def measured(counted: tuple[Counted, Counted], *, seconds: float = BEFORE, before: Arms | None = None) -> Arms:
    """Return the figures of a count over some seconds: of the names under trial, and of all others.

    before: those of the BEFORE seconds before the trial. They tell how many starts were to be expected. If there was
    none of them, all waiting jobs count, however long they have waited.
    """

    def of(now: Counted, was: Figures) -> Figures:
        expects = before is not None and (was.starts == 0 or was.starts * seconds / BEFORE >= EXPECTED)
        if expects and now.starts == 0:
            return _figures(replace(now, sample=now.waiting, waits=now.all_waiting, crossed=None), was)
        return _figures(now, was)

    was = before or Arms(Figures(), Figures())
    return Arms(of(counted[0], was.tried), of(counted[1], was.others))


def _figures(counted: Counted, was: Figures) -> Figures:
    waits, sample, crossed = counted.waits, counted.sample, counted.crossed or (None, None)
    middle, slow = (independent(sample, each, of) for each, of in zip(CROSSED, crossed, strict=True))
    return Figures(
        sample=sample,
        starts=counted.starts,
        fetched=counted.fetched,
        p50_wait=_quantile(waits, 0.5),
        p95_wait=_quantile(waits, 0.95),
        max_wait=_quantile(waits, 1.0),
        evictions=_of_thousand(counted.evicted, counted.starts),
        failures=_of_thousand(counted.failed, counted.ended),
        p50_wait_low=_quantile(waits, low_quantile(middle, 0.5)),
        p95_wait_low=_quantile(waits, low_quantile(slow, 0.95)),
        max_wait_low=_quantile(waits, quantile_of_longest(slow, was.independent or was.sample)),
        evictions_low=_of_thousand(low_count(counted.evicted), counted.starts),
        failures_low=_of_thousand(low_count(counted.failed), counted.ended),
        p50_wait_high=_quantile(waits, high_quantile(middle, 0.5), up=True),
        p95_wait_high=_quantile(waits, high_quantile(slow, 0.95), up=True),
        evictions_high=_of_thousand(high_count(counted.evicted), counted.starts),
        failures_high=_of_thousand(high_count(counted.failed), counted.ended),
        independent=slow,
    )


def _of_thousand(count: float, of: int) -> float | None:
    return 1000.0 * float(count) / of if of else None


def _quantile(waits: Sequence[float], part: float, *, up: bool = False) -> float | None:
    """The nearest known quantile that is not above `part`, or with `up` not below it."""
    nth = math.ceil(part * QUANTILES) if up else int(part * QUANTILES)
    return waits[nth] if waits else None


def independent(sample: int, part: float, crossed: int | None) -> int:
    """Return how many independent waits tell as much of the quantile `part` as these do.

    crossed: how often of two successive waits only one is above it; None = as often as if each came about by itself.
    If whether one is above follows from the one before by a fixed chance, the mean of n of them varies as much as that
    of n · (1 - r) ÷ (1 + r) independent ones. r is the correlation of two successive ones.
    """
    expected = 2.0 * sample * part * (1.0 - part)
    if crossed is None or crossed >= expected:
        return sample
    apart = max(1, crossed) / max(1.0, expected)
    return min(sample, math.ceil(sample * apart / (2.0 - apart)))


def low_quantile(sample: int, part: float) -> float:
    """Return the quantile of a sample that is above the quantile `part` of what it was drawn from with a probability of
    at most CHANCE: more values would be above that than the binomial distribution allows."""
    if sample > _EXACT:
        return part - DEVIATIONS * math.sqrt(part * (1.0 - part) / sample)
    above, chance, at_least = 0, part**sample, 1.0
    while at_least > CHANCE and above < sample:
        at_least -= chance
        above += 1
        chance *= (sample - above + 1) / above * (1.0 - part) / part
    return 0.0 if at_least > CHANCE else (sample - above) / sample


def high_quantile(sample: int, part: float) -> float:
    """Return the quantile of a sample that is below the quantile `part` of what it was drawn from with a probability of
    at most CHANCE. Of a small sample that is the longest, although it may be below with a higher one."""
    if sample > _EXACT:
        return part + DEVIATIONS * math.sqrt(part * (1.0 - part) / sample)
    below, chance, at_least = sample, part**sample, 0.0
    while below > 0 and at_least + chance <= CHANCE:
        at_least += chance
        chance *= below / (sample - below + 1) * (1.0 - part) / part
        below -= 1
    return min(1.0, (below + 1) / sample) if sample else 1.0


def quantile_of_longest(sample: int, before: int) -> float:
    """Return the quantile of a sample above which it hardly has only values that are longer than all `before`.

    If all were drawn alike, the k longest of both are all of the sample with the probability of drawing k of it.
    """
    longer, chance = 0, 1.0
    while chance > CHANCE and longer < sample:
        chance *= (sample - longer) / (sample + before - longer)
        longer += 1
    return 1.0 - (longer - 1) / sample if longer else 1.0


def low_count(count: int) -> float:
    """Return what a count of rare events is at least, but for CHANCE: Anscombe's root of a Poisson count has a standard
    deviation of a half."""
    return max(0.0, math.sqrt(count + 0.375) - DEVIATIONS / 2) ** 2 if count else 0.0


def high_count(count: int) -> float:
    """Return what a count of rare events is at most, but for CHANCE: so few come of more with the same root."""
    return (math.sqrt(count + 1.0) + DEVIATIONS / 2) ** 2


def told(arms: Arms) -> dict[str, Any]:
    """Return what was measured as JSON has it."""
    return asdict(arms)


def read_arms(stored: Mapping[str, Any]) -> Arms:
    """Return what `told` has made JSON of."""
    return Arms(Figures(**stored["tried"]), Figures(**stored["others"]))


@dataclass(frozen=True)
class Guard:
    """A bound on a figure. of_others: of all that the trial does not reach. times: the bound is a factor of what the
    figure would be without the trial."""

    text: str
    figure: str
    bound: float
    times: bool
    of_others: bool


@dataclass(frozen=True)
class Judged:
    """A guard and what was found. value: None = nothing was measured. limit: what the value may be; None = nothing is
    known of before. holds: None = too little is known to say so."""

    guard: str
    value: float | None
    limit: float | None
    holds: bool | None


def guard(text: str) -> Guard:
    """Parse a guard such as `p95_wait<=2x`, `evictions<=20`, `others:p95_wait<=2x`. Raises BadInput."""
    found = _GUARD.fullmatch(text.replace(" ", ""))
    if found is None or found["figure"] not in _FIGURES:
        raise BadInput("guard", f"'{escaped(text, 60)}' is no guard such as p95_wait<=2x: a figure of "
                                f"{', '.join(_FIGURES)}, <=, and a factor or a value")  # fmt: skip
    return Guard(found[0], found["figure"], float(found["bound"]), bool(found["times"]), found["others"] is not None)


def judge(each: Guard, now: Arms, before: Arms, *, least: int) -> Judged:
    """Compare what is measured with what would be so without the trial.

    What was before stands for that. If others are worse off now than before, by some factor, as much more is expected
    of those under trial: work comes and goes. Fewer than `least` waits on either side say nothing. A guard is broken
    only if so few jobs, now and before, would hardly show it by chance.
    """
    one, was = (now.others, before.others) if each.of_others else (now.tried, before.tried)
    value = _value(one, each.figure)
    if not each.times:
        # That a job has waited for so long is a fact, and no sample of anything.
        low = value if each.figure == "max_wait" else _value(one, f"{each.figure}_low")
        return Judged(each.text, value, each.bound, _holds(one, value, low, each.bound, each.bound, least=least))
    if (expected := _value(was, each.figure)) is None or was.sample < least:
        return Judged(each.text, value, None, None)
    factor = each.bound
    if not each.of_others and min(now.others.sample, before.others.sample) >= least:
        ours, theirs = _value(now.others, each.figure), _value(before.others, each.figure)
        if ours is not None and theirs is not None:
            factor *= max(1.0, max(ours, LEAST_VALUE) / max(theirs, LEAST_VALUE))
    high = _value(was, f"{each.figure}_high") if each.figure != "max_wait" else None
    limit, broken = (factor * max(of, LEAST_VALUE) for of in (expected, expected if high is None else high))
    low = _value(one, f"{each.figure}_low")
    return Judged(each.text, value, limit, _holds(one, value, low, limit, broken, least=least))


def _holds(
    now: Figures, value: float | None, low: float | None, limit: float, broken: float, *, least: int
) -> bool | None:
    """Whether a figure is within its limit; None if that is not known. broken: above which its lower bound is not."""
    if value is None or low is None or now.sample < least:
        return None
    if value <= limit:
        return True
    return False if low > broken else None


def _value(figures: Figures, name: str) -> float | None:
    found: float | None = getattr(figures, name)
    return found
