"""Guards of a trial: what was counted of jobs becomes figures, and a guard holds, is broken, or is not known. Pure.

A figure is a sample. So it has a lower bound too, which it is above but for a small chance, and a guard is broken only
if that is above the limit: of twenty jobs one slow one says nothing of the slowest twentieth.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leasehold.errors import BadInput
from leasehold.wire import escaped

from schema.policy.canaries import QUANTILES, Counted

#: Seconds before a trial that its figures are compared with.
BEFORE = 3600.0
#: Figures below this count as this, in seconds or of 1,000. A wait of 20 ms is not ten times worse than one of 2 ms.
LEAST_VALUE = 1.0
#: Starts that must be expected before it counts that there was none. With fewer, chance alone may let none happen.
EXPECTED = 5.0
#: How improbable it is that chance alone puts a figure above its `…_low`.
CHANCE = 0.01
#: The same in standard deviations of a normal distribution, and the samples above which that is used.
DEVIATIONS, _EXACT = 2.33, 500
_FIGURES = ("p50_wait", "p95_wait", "max_wait", "evictions", "failures")
_GUARD = re.compile(r"(?P<others>others:)?(?P<figure>[a-z0-9_]+)<=(?P<bound>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<times>x?)")


@dataclass(frozen=True)
class Figures:
    """What was measured of some jobs.

    sample: waits that are known, of jobs that have started and of those that still wait. fetched: starts that bots
    fetched themselves. …_wait: seconds. evictions: of 1,000 starts. failures: of 1,000 jobs that ended. …_low: what the
    figure is at least, but for a chance of CHANCE that so few jobs show more than is so.
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
        stands = expects and now.starts == 0
        return _figures(now, *((now.waiting, now.all_waiting) if stands else (now.sample, now.waits)))

    was = before or Arms(Figures(), Figures())
    return Arms(of(counted[0], was.tried), of(counted[1], was.others))


def _figures(counted: Counted, sample: int, waits: Sequence[float]) -> Figures:
    most = _quantile(waits, 1.0)
    return Figures(
        sample=sample,
        starts=counted.starts,
        fetched=counted.fetched,
        p50_wait=_quantile(waits, 0.5),
        p95_wait=_quantile(waits, 0.95),
        max_wait=most,
        evictions=_of_thousand(counted.evicted, counted.starts),
        failures=_of_thousand(counted.failed, counted.ended),
        p50_wait_low=_quantile(waits, low_quantile(sample, 0.5)),
        p95_wait_low=_quantile(waits, low_quantile(sample, 0.95)),
        max_wait_low=most,
        evictions_low=_of_thousand(low_count(counted.evicted), counted.starts),
        failures_low=_of_thousand(low_count(counted.failed), counted.ended),
    )


def _of_thousand(count: float, of: int) -> float | None:
    return 1000.0 * float(count) / of if of else None


def _quantile(waits: Sequence[float], part: float) -> float | None:
    return waits[int(part * QUANTILES)] if waits else None


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


def low_count(count: int) -> float:
    """Return what a count of rare events is at least, but for CHANCE: Anscombe's root of a Poisson count has a standard
    deviation of a half."""
    return max(0.0, math.sqrt(count + 0.375) - DEVIATIONS / 2) ** 2 if count else 0.0


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
    """Parse a guard such as `p95_wait<=1.2x`, `evictions<=20`, `others:p95_wait<=2x`. Raises BadInput."""
    found = _GUARD.fullmatch(text.replace(" ", ""))
    if found is None or found["figure"] not in _FIGURES:
        raise BadInput("guard", f"'{escaped(text, 60)}' is no guard such as p95_wait<=1.2x: a figure of "
                                f"{', '.join(_FIGURES)}, <=, and a factor or a value")  # fmt: skip
    return Guard(found[0], found["figure"], float(found["bound"]), bool(found["times"]), found["others"] is not None)


def judge(each: Guard, now: Arms, before: Arms, *, least: int) -> Judged:
    """Compare what is measured with what would be so without the trial.

    What was before stands for that. If others are worse off now than before, by some factor, as much more is expected
    of those under trial: work comes and goes. Fewer than `least` waits on either side say nothing. A guard is broken
    only if so few jobs would hardly show it by chance.
    """
    one, was = (now.others, before.others) if each.of_others else (now.tried, before.tried)
    value = _value(one, each.figure)
    if not each.times:
        return Judged(each.text, value, each.bound, _holds(one, each.figure, each.bound, least=least))
    if (expected := _value(was, each.figure)) is None or was.sample < least:
        return Judged(each.text, value, None, None)
    limit = each.bound * max(expected, LEAST_VALUE)
    if not each.of_others and min(now.others.sample, before.others.sample) >= least:
        ours, theirs = _value(now.others, each.figure), _value(before.others, each.figure)
        if ours is not None and theirs is not None:
            limit *= max(1.0, max(ours, LEAST_VALUE) / max(theirs, LEAST_VALUE))
    return Judged(each.text, value, limit, _holds(one, each.figure, limit, least=least))


def _holds(now: Figures, figure: str, limit: float, *, least: int) -> bool | None:
    value, low = _value(now, figure), _value(now, f"{figure}_low")
    if value is None or low is None or now.sample < least:
        return None
    if value <= limit:
        return True
    return False if low > limit else None


def _value(figures: Figures, name: str) -> float | None:
    found: float | None = getattr(figures, name)
    return found
