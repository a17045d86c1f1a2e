"""When a waiting job will start: a formula, and how far the same formula was off for jobs like it.

All functions are pure: what the pool has, what lies ahead and what past forecasts were off by are arguments, and times
are seconds from now.

The formula is that of a server with many places which are all busy: what is ahead takes as many unit-seconds as its
jobs usually do, and the bots that could run the job give as many units a second as they have. What an instance may not
use at once because of its maximum is taken by others meanwhile, so of an instance ahead no more counts than its maximum
lets it use until then.

The interval is that of split conformal prediction (Vovk, Gammerman and Shafer 2005; Lei et al. 2018): of n past
forecasts the k-th smallest error, k = ceil((n + 1) * 0.9), is an upper bound for the next one in nine of ten cases, if
it is like them. Errors count in units of the forecast's own scale, so that those of long and short waits are alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schema.readable import duration

#: The part of jobs that start within their promised time.
PROMISED = 0.9
#: Past forecasts without which nothing is promised.
ENOUGH = 20
#: Seconds that are added to the scale of errors: what starts at once still waits for a call of a bot.
AT_ONCE = 1.0
#: The newest past forecasts, which count by themselves as well.
RECENT = 100
TOO_LITTLE_PAST = "too few jobs like it have started lately"
#: Steps after which the time of all that is ahead is near enough.
STEPS = 50


@dataclass(frozen=True)
class Ahead:
    """Jobs of one instance ahead of a job. work: unit-seconds that one of them takes. most: units that the instance may
    use at once; None = any."""

    jobs: int
    work: float
    most: int | None = None


@dataclass(frozen=True)
class Standing:
    """Where a job stands among those that compete with it for the same bots.

    units, free: units of the bots that could run it, and those of them that are free. own: jobs of its instance ahead
    of it. others: those of other instances. work: unit-seconds that it takes. seconds: how long it runs. used: units
    that its instance uses. earliest: seconds for which a gate keeps it in any case.
    """

    units: int
    free: int
    own: Ahead
    others: Sequence[Ahead]
    work: float
    seconds: float
    used: int = 0
    earliest: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What the formula says: seconds until the start, and the scale of its errors in seconds; always positive."""

    seconds: float
    scale: float


@dataclass(frozen=True)
class Forecast:
    """When a job will start: within `upper` seconds in nine of ten cases, half of the time within `seconds`.

    If that is not known both are None, and `reason` says why. misses_deadline: it would end later than it has to.
    """

    seconds: float | None = None
    upper: float | None = None
    reason: str | None = None
    misses_deadline: bool = False

    @property
    def sentence(self) -> str:
        """It in words."""
        if self.seconds is None or self.upper is None:
            return f"not known, because {self.reason}"
        late = "; it would miss its deadline" if self.misses_deadline else ""
        if self.upper < AT_ONCE:
            return f"starts at once in 9 of 10 cases{late}"
        return f"starts in about {duration(self.seconds)}, within {duration(self.upper)} in 9 of 10 cases{late}"


def predict(standing: Standing) -> Prediction:
    """Return when the job gets a place by the formula. `units` are positive.

    Twice as many jobs ahead take twice as long, twice as many units half as long.
    """
    own = standing.own.jobs * standing.own.work + standing.work - standing.free * standing.seconds
    found = _spent(own, standing.others, standing.units)
    if standing.own.most is not None:
        left = standing.own.most - standing.used
        of_quota = standing.own.jobs * standing.own.work + standing.work - left * standing.seconds
        found = max(found, of_quota / max(1, standing.own.most))
    found = max(0.0, found, standing.earliest)
    return Prediction(found, found + standing.work / standing.units + AT_ONCE)


def _spent(own: float, others: Sequence[Ahead], units: int) -> float:
    """The seconds in which `units` do the own work and what the others may do meanwhile: the largest solution."""
    found = (own + sum(each.jobs * each.work for each in others)) / units
    for _ in range(STEPS):
        meanwhile = sum(
            each.jobs * each.work if each.most is None else min(each.jobs * each.work, each.most * max(0.0, found))
            for each in others
        )
        before, found = found, (own + meanwhile) / units
        if before - found < 1e-3 * before:
            break
    return found


def score(prediction: Prediction, waited: float) -> float:
    """Return how far a prediction was off, in units of its scale; positive if the job started later."""
    return (waited - prediction.seconds) / prediction.scale


def promise(prediction: Prediction, scores: Sequence[float], *, deadline: float | None = None) -> Forecast:
    """Return the forecast after the scores of past predictions, the newest first.

    deadline: the latest start that is in time, in seconds. With fewer than ENOUGH scores it is not known. Of all scores
    and the newest ones, those count that promise less: so a promise is soon longer when waits become longer.
    """
    if len(scores) < ENOUGH:
        return Forecast(reason=TOO_LITTLE_PAST)
    bound = max(_bound(scores), _bound(scores[:RECENT]))
    upper = max(0.0, prediction.seconds + bound * prediction.scale)
    seconds = max(0.0, prediction.seconds + _bias(scores) * prediction.scale)
    seconds = min(seconds, upper)
    return Forecast(seconds, upper, None, deadline is not None and seconds > deadline)


def _bound(scores: Sequence[float]) -> float:
    """The score below which the next one is in nine of ten cases."""
    rank = math.ceil((len(scores) + 1) * PROMISED)
    return sorted(scores)[min(rank, len(scores)) - 1]


def _bias(scores: Sequence[float]) -> float:
    """What half of the scores are below, if to take it off the older half would have made the newer half better."""
    newer, older = scores[: len(scores) // 2], scores[len(scores) // 2 :]
    found = median(older)
    is_better = median(abs(each - found) for each in newer) < median(map(abs, newer))
    return median(scores) if is_better else 0.0


def shares(times: Mapping[int, tuple[int, float]]) -> float:
    """Return the mean over all jobs; 0 without any. times: the number of jobs and their mean, by instance."""
    jobs = sum(number for number, _ in times.values())
    return sum(number * value for number, value in times.values()) / jobs if jobs else 0.0
