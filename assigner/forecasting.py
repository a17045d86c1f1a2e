"""When a waiting job will start: a formula, and how far the same formula was off for jobs like it.

All functions are pure: what the pool has, what lies ahead and what past forecasts were off by are arguments, and times
are seconds from now.

The formula is that of a tank which drains: what is ahead takes as many unit-seconds as its jobs usually do, the bots
that could run the job give as many units a second as they have, and jobs of better rank that come meanwhile take their
part of that. What an instance may not use at once because of its maximum is taken by others, so of an instance no more
counts than its maximum lets it use until then.

Work comes and goes in jobs, so the time at which the tank is empty is that at which a Brownian motion with drift is
first at zero: it has an inverse Gaussian distribution (Cox and Miller 1965). Its median is the answer: where few jobs
are ahead and most of the capacity goes to others, that is much less than its mean. Its standard deviation, and a part
of the answer because nobody knows how many jobs will come, are the scale of errors.

The interval is that of split conformal prediction (Vovk, Gammerman and Shafer 2005; Lei et al. 2018): of n past
forecasts the k-th smallest error, k = ceil((n + 1) * 0.9), is an upper bound for the next one in nine of ten cases, if
it is like them. Errors count in units of the forecast's own scale, so that those of long and short waits are alike.
Jobs that wait at the same time are late together, so some errors count as one, and k is greater.

What is told as the middle is the mean of three answers: that of the formula, the jobs ahead divided by how fast jobs
ended lately, and what the last jobs of the instance waited. Each has a weight that is the inverse square of its mean
error in the past (Bates and Granger 1969), and the formula twice as much. So where a simple guess does better, that one
counts. None of them is corrected by its past errors: when the load changes these are those of another load.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
#: Forecasts of one time that count as one.
ALIKE = 4
#: The part of the units that jobs which come later never take for ever, and of a time by which it may be wrong because
#: other jobs come than lately.
NOT_TAKEN, UNCERTAIN = 0.1, 0.25
#: Seconds that are added to a wait before an error is divided by it, and the least such error.
SHORT, LEAST_ERROR = 10.0, 1e-3
#: The weight of the formula beside an equally good guess: it alone sees what changes.
OF_FORMULA = 2.0
#: Halvings after which a median is near enough; and a ratio of the squared mean to the variance above which it is the
#: mean within 2 %.
HALVINGS, NARROW = 30, 25.0


@dataclass(frozen=True)
class Ahead:
    """Jobs of one instance ahead of a job. work: unit-seconds that one of them takes. most: units that the instance may
    use at once; None = any. later: jobs a second that come later and are ahead of it all the same."""

    jobs: int
    work: float
    most: int | None = None
    later: float = 0.0


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
    earliest: seconds before which it does not start in any case; None = it may start now.
    """

    seconds: float | None = None
    upper: float | None = None
    reason: str | None = None
    misses_deadline: bool = False
    earliest: float | None = None

    @property
    def sentence(self) -> str:
        """It in words."""
        if self.seconds is None or self.upper is None:
            if self.earliest is not None:
                return f"in {duration(self.earliest)} at the earliest; more is not known, because {self.reason}"
            return f"not known, because {self.reason}"
        late = "; it would miss its deadline" if self.misses_deadline else ""
        if self.upper < AT_ONCE:
            return f"starts at once in 9 of 10 cases{late}"
        return f"starts in about {duration(self.seconds)}, within {duration(self.upper)} in 9 of 10 cases{late}"


@dataclass(frozen=True)
class _Tank:
    """Unit-seconds that have to be done, and how many more are done than come in a second; always positive."""

    work: float
    drift: float

    @property
    def seconds(self) -> float:
        """The seconds after which it is empty on average."""
        return max(0.0, self.work / self.drift)


def predict(standing: Standing) -> Prediction:
    """Return when the job gets a place by the formula. `units` are positive.

    Twice as many jobs ahead take twice as long, twice as many units half as long, if none come later.
    """
    own, units = standing.own, standing.units
    before = own.jobs * own.work + standing.work
    capacity = units
    tank = _drained(before - standing.free * standing.seconds, own, standing.others, units)
    if own.most is not None:
        most = max(1, own.most)
        left = own.most - standing.used
        drift = max(NOT_TAKEN * most, most - own.later * own.work)
        of_quota = _Tank(before - left * standing.seconds, drift)
        if of_quota.seconds > tank.seconds:
            tank, capacity = of_quota, most
    counts = [(each.jobs + each.later * tank.seconds, each.work) for each in (own, *standing.others)]
    jobs = sum(number for number, _ in counts)
    size = sum(number * work for number, work in counts) / jobs if jobs else standing.work
    middle, deviation = _first_empty(tank, capacity, size)
    found = max(middle, standing.earliest)
    return Prediction(found, UNCERTAIN * found + deviation + standing.work / units + AT_ONCE)


def _drained(own: float, of_own: Ahead, others: Sequence[Ahead], units: int) -> _Tank:
    """What `units` have to do: the own work, that of the others, and what comes until then; of each time the latest."""
    comes = sum(each.later * each.work for each in (of_own, *others))
    part = min(1.0, (1.0 - NOT_TAKEN) * units / comes) if comes else 1.0
    found, until = _Tank(0.0, units), math.inf
    # What is found from a time that is too late is earlier, but not too early; in each step more of the others are at
    # their maximum.
    for _ in range(len(others) + 1):
        work, drift = own, units - part * of_own.later * of_own.work
        for each in others:
            ahead, rate = each.jobs * each.work, part * each.later * each.work
            if each.most is not None and ahead > (each.most - rate) * until:
                drift -= each.most
            else:
                work, drift = work + ahead, drift - rate
        if work <= 0.0:
            return _Tank(0.0, units)
        if not work < drift * until:
            break
        found = _Tank(work, drift)
        until = found.seconds
    return found


def _first_empty(tank: _Tank, capacity: float, size: float) -> tuple[float, float]:
    """The median and the standard deviation of the time at which it is empty, if work comes and goes in jobs.

    size: unit-seconds of a job. capacity: unit-seconds that are done in a second.
    """
    mean = tank.seconds
    if mean == 0.0 or size == 0.0:
        return mean, 0.0
    noise = (2.0 * capacity - tank.drift) * size
    shape = tank.work * tank.drift / noise
    deviation = mean / math.sqrt(shape)
    if shape > NARROW:
        return mean, deviation
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        at = (low + high) / 2.0
        root = math.sqrt(shape / at)
        before = _normal(root * (at - 1.0)) + math.exp(2.0 * shape) * _normal(-root * (at + 1.0))
        low, high = (at, high) if before < 0.5 else (low, at)
    return mean * high, deviation


def _normal(value: float) -> float:
    """The part of a standard normal distribution below a value."""
    return math.erfc(-value / math.sqrt(2.0)) / 2.0


@dataclass(frozen=True)
class Guesses:
    """Seconds until a start by three ways: the formula, the rate at which jobs end, and what the last jobs waited.

    by_rate, by_waits: None if nobody knows.
    """

    formula: float
    by_rate: float | None
    by_waits: float | None

    @property
    def each(self) -> tuple[float | None, ...]:
        """All three."""
        return self.formula, self.by_rate, self.by_waits


def guess(standing: Standing, formula: float, *, per_second: float, waited: float | None, age: float) -> Guesses:
    """Return the three guesses for a job.

    per_second: jobs that end a second. waited: seconds for which the last jobs of its instance waited, None if nobody
    knows. age: seconds for which it has waited itself. A job for which units are free starts at once by all of them.
    """
    if formula <= 0.0:
        return Guesses(0.0, 0.0, 0.0)
    ahead = standing.own.jobs + sum(each.jobs for each in standing.others)
    by_rate = (ahead + 1) / per_second if per_second > 0.0 else None
    by_waits = None if waited is None else max(0.0, waited - age)
    low = standing.earliest
    return Guesses(formula, *(None if each is None else max(low, each) for each in (by_rate, by_waits)))


def weigh(guesses: Guesses, past: Sequence[tuple[Guesses, float]]) -> float:
    """Return the mean of the guesses, after the earlier guesses of `past` and the seconds until these starts.

    A guess with fewer than ENOUGH earlier ones has no weight; where no other has any, it is that of the formula.
    """
    weights = list[tuple[float, float]]()
    factor = OF_FORMULA
    for now, *before in zip(guesses.each, *(each.each for each, _ in past), strict=True):
        errors = [
            abs(then - waited) / (waited + SHORT)
            for then, (_, waited) in zip(before, past, strict=True)
            if then is not None
        ]
        if now is not None and len(errors) >= ENOUGH:
            weights.append((now, factor * max(sum(errors) / len(errors), LEAST_ERROR) ** -2.0))
        factor = 1.0
    if len(weights) < 2:
        return guesses.formula
    return sum(each * weight for each, weight in weights) / sum(weight for _, weight in weights)


def score(prediction: Prediction, waited: float) -> float:
    """Return how far a prediction was off, in units of its scale; positive if the job started later."""
    return (waited - prediction.seconds) / prediction.scale


def promise(
    prediction: Prediction, scores: Sequence[float], *, middle: float | None = None, deadline: float | None = None
) -> Forecast:
    """Return the forecast after the scores of past predictions, the newest first.

    middle: the seconds in which half of such jobs start; None = what the formula says. deadline: the latest start that
    is in time, in seconds. With fewer than ENOUGH scores it is not known. Of all scores and the newest ones, those
    count that promise less: so a promise is soon longer when waits become longer.
    """
    if len(scores) < ENOUGH:
        return Forecast(reason=TOO_LITTLE_PAST)
    bound = max(_bound(scores, len(scores) / ALIKE), _bound(scores[:RECENT], min(len(scores), RECENT)))
    upper = max(0.0, prediction.seconds + bound * prediction.scale)
    seconds = min(prediction.seconds if middle is None else middle, upper)
    return Forecast(seconds, upper, None, deadline is not None and seconds > deadline)


def _bound(scores: Sequence[float], number: float) -> float:
    """The score below which the next one is in nine of ten cases, if they are as good as this number of scores."""
    rank = math.ceil((number + 1) * PROMISED / number * len(scores))
    return sorted(scores)[min(rank, len(scores)) - 1]


def shares(times: Mapping[int, tuple[int, float]]) -> float:
    """Return the mean over all jobs; 0 without any. times: the number of jobs and their mean, by instance."""
    jobs = sum(number for number, _ in times.values())
    return sum(number * value for number, value in times.values()) / jobs if jobs else 0.0
