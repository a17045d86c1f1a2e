"""Search for better values of what decides, by simulations: successive halving, and a judgement on unseen jobs.

Candidates are drawn by chance. All of them are replayed on the first part of the history, the best third of them on
twice as much, and so on: K. Jamieson, A. Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", 2016. The best one is judged on the last fifth of the history, which no candidate was chosen by, and on
shaken copies of it.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leasehold.errors import BadInput
from leasehold.wire import escaped

from assigner.simulation.past import Past, first_part
from assigner.simulation.report import Measured, Waits, error_of, quantile
from assigner.simulation.runs import Outcome, Trial

#: The most parameters of a search.
MOST_PARAMETERS = 12
#: The part of the history by which candidates are chosen, and the parts of that which the rungs replay.
SEEN, RUNGS = 0.8, (0.25, 0.5, 1.0)
#: One of this many candidates goes on from a rung to the next.
KEPT_OF = 3
#: A change without which the objective is worse by less than this part is not proposed.
WORTH = 0.01
#: The chance that a candidate leaves a parameter as it is.
LEFT = 0.4
#: A range that spans more than this factor is drawn from on a logarithmic scale.
WIDE = 20.0

# Of each section of a version's settings: the path of a value, its range, and whether it is a whole number.
_OF_ASSIGNERS = (
    ("strategy.weights.priority", -20.0, 20.0, False),
    ("strategy.weights.locality", -20.0, 20.0, False),
    ("strategy.weights.capacity", -20.0, 20.0, False),
    ("strategy.weights.success", -20.0, 20.0, False),
    ("strategy.sampling.sample_size", 1.0, 200.0, True),
    ("priority_percentage", 0.0, 100.0, True),
)
_OF_SECTIONS = (
    ("quotas", "preemption_delay", 1.0, 600.0, False),
    ("quotas", "eviction_cooldown", 1.0, 3600.0, False),
    ("ordering", "ageing_rate", 0.0, 20.0, False),
    ("fair_share", "rolling_window_hours", 0.1, 168.0, False),
    ("fair_share", "min_task_guarantee", 0.0, 20.0, True),
)
#: The factor by which a weight of an account, or a quota, is raised or lowered at most.
FACTOR = 8.0

#: A value of each parameter.
Values = tuple[float, ...]


@dataclass(frozen=True)
class Parameter:
    """A number that decides. path: where a version has it. now: its value in force."""

    path: tuple[str, ...]
    low: float
    high: float
    whole: bool
    now: float

    @property
    def name(self) -> str:
        """What people call it: as `policy diff` does."""
        section, *others = self.path[1:]
        return f"{section} {'.'.join(others)}" if self.path[0] == "settings" else f"{section} {' '.join(others)}"

    def draw(self, chance: random.Random) -> float:
        """Draw a value from the range."""
        if self.low > 0 and self.high / self.low > WIDE:
            value = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = chance.uniform(self.low, self.high)
        return max(float(math.ceil(self.low)), float(round(value))) if self.whole else float(f"{value:.3g}")


def parameters_of(content: Mapping[str, Any], *, wanted: Sequence[str], with_quotas: bool) -> list[Parameter]:
    """Return the parameters of a version's content: all, or those whose names contain one of `wanted`.

    Raises BadInput `--parameter` for a word that no parameter has, and if there are more than MOST_PARAMETERS.
    """
    found = [*_parameters(content, with_quotas=with_quotas)]
    for word in wanted:
        if not any(word in each.name for each in found):
            raise BadInput("--parameter", f"no parameter is called '{escaped(word, 64)}'")
    chosen = [each for each in found if not wanted or any(word in each.name for word in wanted)]
    if len(chosen) > MOST_PARAMETERS:
        names = ", ".join(each.name for each in chosen)
        raise BadInput("--parameter", f"choose at most {MOST_PARAMETERS} of: {names}")
    return chosen


def _parameters(content: Mapping[str, Any], *, with_quotas: bool) -> Iterator[Parameter]:
    settings, limits = content["settings"], content.get("limits", {})
    for entry in settings.get("assigners", {}):
        for path, low, high, whole in _OF_ASSIGNERS:
            yield _parameter(content, ("settings", "assigners", entry, *path.split(".")), low, high, whole=whole)
    for section, field, low, high, whole in _OF_SECTIONS:
        if field in settings.get(section, {}):
            yield _parameter(content, ("settings", section, field), low, high, whole=whole)
    of_limits = {"account": ("weight",), **({"quota": ("min", "max")} if with_quotas else {})}
    for resource, fields in of_limits.items():
        for name in sorted(limits.get(resource, {})):
            for field in fields:
                now = limits[resource][name].get(field)
                if now:
                    whole = resource == "quota"
                    yield _parameter(
                        content, ("limits", resource, name, field), now / FACTOR, now * FACTOR, whole=whole
                    )


def _parameter(content: Mapping[str, Any], path: tuple[str, ...], low: float, high: float, *, whole: bool) -> Parameter:
    value: Any = content
    for name in path:
        value = value[name]
    return Parameter(path, min(low, value), max(high, value), whole, float(value))


def changed(content: Mapping[str, Any], parameters: Sequence[Parameter], values: Values) -> dict[str, Any]:
    """Return a content with these values. What is left as it is stays the same number."""
    found = dict(content)
    for parameter, value in zip(parameters, values, strict=True):
        if value == parameter.now:
            continue
        inner = found
        for name in parameter.path[:-1]:
            inner[name] = dict(inner[name])
            inner = inner[name]
        inner[parameter.path[-1]] = int(value) if parameter.whole else value
    return found


# Figures that people ask for


_TERM = re.compile(
    r"(?P<figure>[a-z0-9_]+)(?::(?P<kind>instance|class)=(?P<name>[^<>=\s]+))?"
    r"(?:(?P<way><=|>=)(?P<bound>now|\d+(?:\.\d+)?x?))?"
)
_OF_SECONDS = {"p50_wait": "p50", "p95_wait": "p95", "max_wait": "most"}
_OF_WAITS = {**_OF_SECONDS, "unstarted": "waiting"}
_OF_POOL: Mapping[str, Callable[[Measured], float | None]] = {
    "evictions": lambda each: each.evictions,
    "starts": lambda each: each.starts,
    "in_use": lambda each: each.utilisation,
    "lost": lambda each: each.lost,
    "jain": lambda each: each.fairness,
    "late": lambda each: each.late,
    "near": lambda each: each.near / each.hinted if each.hinted else None,
}
#: Figures that are parts, 0 to 1.
_PARTS = frozenset({"in_use", "lost", "jain", "near"})
#: Figures that are better when they are larger.
MORE = frozenset({"starts", "in_use", "jain", "near"})


@dataclass(frozen=True)
class Term:
    """A figure, of the pool, an instance or a class; and a bound on it: a value, or a factor of what it is now."""

    text: str
    figure: str
    kind: str | None
    name: str | None
    way: str | None
    bound: str | None

    def of(self, measured: Measured) -> float | None:
        """Return the figure of what a pool did; None if it has none."""
        if self.figure == "unmet":
            found = measured.unmet
            return sum(found.values()) if self.name is None else found.get(self.name)
        if self.figure in _OF_POOL:
            return _OF_POOL[self.figure](measured)
        waits: Waits | None = measured.overall
        if self.name is not None:
            waits = (measured.classes if self.kind == "class" else measured.waits).get(self.name)
        return None if waits is None else float(getattr(waits, _OF_WAITS[self.figure]))

    def excess(self, measured: Measured, now: Measured) -> float:
        """Return by how much a bound is broken, as a part of it: 0 if it is kept, infinite without a value."""
        value, before = self.of(measured), self.of(now)
        if self.bound is None:
            return 0.0
        if value is None:
            return math.inf
        if self.bound == "now" or self.bound.endswith("x"):
            factor = 1.0 if self.bound == "now" else float(self.bound[:-1])
            limit = factor * (0.0 if before is None else before)
        else:
            limit = float(self.bound)
        over = value - limit if self.way == "<=" else limit - value
        return max(0.0, over) / max(abs(limit), 1.0 if self.figure not in _PARTS else 0.01)


def term(field: str, text: str, *, bounded: bool) -> Term:
    """Parse a figure such as `p95_wait:class=serious`, or a bound such as `jain>=0.9`, `evictions<=now`,
    `p95_wait<=1.2x`. Raises BadInput that names the option `field`."""
    found = _TERM.fullmatch(text.replace(" ", ""))
    figures = sorted({*_OF_WAITS, *_OF_POOL, "unmet"})
    if found is None or found["figure"] not in figures:
        raise BadInput(field, f"'{escaped(text, 64)}' is no figure: there are {', '.join(figures)}")
    if (found["way"] is not None) != bounded:
        wanted = "needs a bound, such as evictions<=now" if bounded else "has a bound, which only --keep takes"
        raise BadInput(field, f"'{escaped(text, 64)}' {wanted}")
    if found["kind"] is not None and found["figure"] in _OF_POOL:
        raise BadInput(field, f"{found['figure']} is a figure of the whole pool")
    if found["kind"] == "class" and found["figure"] == "unmet":
        raise BadInput(field, "unmet is a figure of instances")
    return Term(text, **found.groupdict())


# The search


@dataclass(frozen=True)
class Wish:
    """What is wanted: an objective, and bounds that must hold."""

    objective: Term
    keeps: Sequence[Term]

    def require_values(self, now: Measured) -> None:
        """Raise BadInput if a wanted figure has no value, as those of a class without jobs."""
        for option, each in (("--objective", self.objective), *(("--keep", keep) for keep in self.keeps)):
            if each.of(now) is None:
                raise BadInput(option, f"{escaped(each.text, 64)} has no value in this past")

    def cost(self, measured: Measured) -> float:
        """The objective, so that less is better."""
        value = self.objective.of(measured)
        if value is None:
            return math.inf
        return -value if self.objective.figure in MORE else value

    def rank(self, measured: Measured, now: Measured) -> tuple[float, float]:
        """What candidates are ordered by: what they break, and what they cost."""
        return sum(each.excess(measured, now) for each in self.keeps), self.cost(measured)

    def broken(self, measured: Measured, now: Measured) -> list[str]:
        """The bounds that do not hold."""
        return [each.text for each in self.keeps if each.excess(measured, now) > 0]

    def gain(self, before: Measured, after: Measured) -> float | None:
        """The part of the objective now by which it is better, negative if it is worse; None if either has no value.

        Less than a second, one, or a hundredth of a part counts as that.
        """
        found = self._values(before, after)
        if found is None:
            return None
        one, two = found
        return (two - one if self.objective.figure in MORE else one - two) / one

    def error(self, real: Measured, replayed: Measured) -> float | None:
        """By which part the replay is off in the objective: the larger value, as a part of the smaller one, less 1.

        Of waits it is at least that of `error_of`. None if it is not known.
        """
        found = self._values(real, replayed)
        known = [] if found is None else [max(found) / min(found) - 1.0]
        if self.objective.figure in _OF_SECONDS and (of_waits := error_of(real, replayed)) is not None:
            known.append(of_waits)
        return max(known, default=None)

    def exceeds(self, gain: float, error: float) -> bool:
        """Whether a gain is more than the error: that says by which part the larger value is larger, and a gain where
        less is better by which part the smaller one is smaller."""
        if self.objective.figure in MORE:
            return gain > error
        return gain >= 1.0 or gain / (1.0 - gain) > error

    def _values(self, *measured: Measured) -> list[float] | None:
        """The objective of each, at least a second, one, or a hundredth of a part; None if one has none."""
        floor = 0.01 if self.objective.figure in _PARTS else 1.0
        found = [max(value, floor) for each in measured if (value := self.objective.of(each)) is not None]
        return found if len(found) == len(measured) else None


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    values: of the proposal, as `parameters`. seen: the objective on the seen part, now and with the proposal; without:
    for each parameter that it changes, with that one left as it is, None if it has no value or there is no such policy;
    empty if no candidate was better. before, after: what the pool did on the unseen part, or on the seen one if no
    candidate was better. broken: bounds that do not hold on either. gains: on each replay of the unseen part; None
    where the objective has no value. tried: replays that were made.
    """

    values: Values
    seen: tuple[float | None, float | None]
    without: Mapping[int, float | None]
    before: Measured
    after: Measured
    broken: Sequence[str]
    gains: Sequence[float | None]
    tried: int

    def interval(self) -> tuple[float, float, float]:
        """The median gain, and what 90 % of the gains lie between; a gain without a value counts as none."""
        ordered = sorted(each or 0.0 for each in self.gains)
        return quantile(ordered, 0.5), quantile(ordered, 0.05), quantile(ordered, 0.95)

    def refusal(self, wish: Wish, error: float | None) -> str | None:
        """Return why nothing is proposed; None if the proposal is good. error: as of `Wish.error`; None = unknown."""
        median, low, _ = self.interval()
        if not self.without:
            return "no candidate was better than what is in force"
        if None in self.gains:
            return f"the jobs that it had not seen tell nothing of {wish.objective.text}"
        if self.broken:
            return f"the best candidate breaks {', '.join(self.broken)}"
        if low <= 0:
            return f"on jobs that it had not seen the gain was {median:.1%}, and in some replays only {low:.1%}"
        if error is not None and not wish.exceeds(median, error):
            return f"the gain of {median:.1%} is less than the error of the simulation, {error:.1%}"
        return None


#: Replays a past under policies, shaken so often.
Run = Callable[[Past, Sequence[Trial], int], list[Outcome]]


def tune(
    past: Past,
    parameters: Sequence[Parameter],
    wish: Wish,
    *,
    trial: Callable[[Values], Trial],
    run: Run,
    candidates: int,
    shakes: int,
    chance: random.Random,
) -> Tuned:
    """Search for values that serve the wish better.

    trial: makes the policy of some values; raises BadInput for values that go together with nothing. candidates: how
    many are drawn. shakes: shaken replays of the unseen part. Raises BadInput if no other values make a policy.
    """
    now = tuple(each.now for each in parameters)
    left = [now, *_drawn(parameters, trial, candidates, chance)]
    if left == [now]:
        raise BadInput("--parameter", "no other values of these make a policy that is valid")
    seen, tried = first_part(past, SEEN), 0

    def replays(part: Past, tries: Sequence[Values], shakes: int = 0) -> list[Outcome]:
        nonlocal tried
        tried += len(tries) * (shakes + 1)
        return run(part, [trial(each) for each in tries], shakes)

    found: dict[Values, Measured] = {}
    for rung in RUNGS:
        outcomes = replays(first_part(seen, rung), left)
        found = {values: each.replayed.measured for values, each in zip(left, outcomes, strict=True)}
        order = sorted(left[1:], key=lambda values: wish.rank(found[values], found[now]))
        left = [now, *order[: max(1, len(order) // KEPT_OF)]]
    best = min(left[:2], key=lambda values: wish.rank(found[values], found[now]))
    best, measured, without = _needed(best, now, found, wish, trial, lambda tries: replays(seen, tries))
    base, value = found[now], wish.objective.of
    of_seen = (value(base), value(measured))
    if best == now:
        return Tuned(now, of_seen, {}, base, base, [], [0.0], tried)
    begin = past.since + SEEN * (past.until - past.since)
    before, after = replays(replace(past, records=None, judged_from=begin), [now, best], shakes)
    unseen = (before.replayed.measured, after.replayed.measured)
    broken = dict.fromkeys([*wish.broken(measured, base), *wish.broken(unseen[1], unseen[0])])
    pairs = [unseen, *zip(before.shaken, after.shaken, strict=True)]
    told = {nth: None if each is None else value(each) for nth, each in without.items()}
    return Tuned(best, of_seen, told, *unseen, [*broken], [wish.gain(*pair) for pair in pairs], tried)


def _needed(
    best: Values,
    now: Values,
    found: Mapping[Values, Measured],
    wish: Wish,
    trial: Callable[[Values], Trial],
    replays: Callable[[Sequence[Values]], list[Outcome]],
) -> tuple[Values, Measured, Mapping[int, Measured | None]]:
    """Take changes of the best candidate back that are worth less than WORTH; return what is left and what it did.

    With it what the pool did without each of the changes that are left; None if there is no such policy, as of a
    minimum that was raised together with its maximum. found: what the pool did on the seen part, which `replays` has.
    """
    base, measured = found[now], found[best]
    while best != now:
        changes = [nth for nth, value in enumerate(best) if value != now[nth]]
        back = {nth: tuple(now[at] if at == nth else value for at, value in enumerate(best)) for nth in changes}
        back = {nth: values for nth, values in back.items() if _is_valid(trial, values)}
        outcomes = replays([*back.values()]) if [*back.values()] != [now] else None
        did = [base] if outcomes is None else [each.replayed.measured for each in outcomes]
        without = dict(zip(back, did, strict=True))
        least = min(without, key=lambda nth: wish.rank(without[nth], base), default=None)
        cost = wish.cost(measured)
        if least is None or wish.rank(without[least], base) > (0.0, cost + WORTH * abs(cost)):
            return best, measured, {nth: without.get(nth) for nth in changes}
        best, measured = back[least], without[least]
    return now, base, {}


def _is_valid(trial: Callable[[Values], Trial], values: Values) -> bool:
    try:
        trial(values)
    except BadInput:
        return False
    return True


def _drawn(
    parameters: Sequence[Parameter], trial: Callable[[Values], Trial], candidates: int, chance: random.Random
) -> list[Values]:
    """Draw different candidates that are valid policies."""
    found: dict[Values, None] = {}
    for _ in range(candidates * 20):
        values = tuple(each.now if chance.random() < LEFT else each.draw(chance) for each in parameters)
        if all(value == each.now for value, each in zip(values, parameters, strict=True)) or values in found:
            continue
        if _is_valid(trial, values):
            found[values] = None
        if len(found) == candidates:
            break
    return [*found]
