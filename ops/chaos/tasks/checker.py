"""The checker of kill runs: compares what calls were to do with the effects, the results and the execution log.

It is a pure function of these records.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leasehold.errors import TaskFailed

from ops.chaos.execution import Attempt

#: Seconds for which the processes of a bot that was stopped may run on after they were continued.
AFTERWARDS = 5.0


class Kind(StrEnum):
    """What can be violated."""

    DOUBLED = "doubled"  # an effect happened twice
    LOST = "lost"  # an effect of a call that succeeded is absent
    WRONG = "wrong"  # another amount or result than that of the call, or an end that no fault explains
    LATE = "late"  # an effect of an older attempt, after a newer one had begun
    OVERLAP = "overlaps"  # two attempts beside each other, although their bot was not stopped
    SURVIVOR = "survivors"  # a process that lives although its bot has left
    INVARIANT = "invariants"  # `leasehold db verify` finds something
    STUCK = "stuck"  # the pool does not get done


@dataclass(frozen=True)
class Violation:
    """One violation."""

    kind: Kind
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@dataclass(frozen=True)
class Call:
    """What a task is asked to do: an effect for each amount, with a pause in seconds before it; `beside` others."""

    cents: tuple[int, ...]
    pause: float
    beside: bool = False


@dataclass(frozen=True)
class Effect:
    """A row that a task has written. `place`: its place among all effects and beginnings of attempts."""

    place: int
    job: str
    fence: int
    step: int
    cents: int


@dataclass(frozen=True)
class Begun:
    """An attempt that has shut out the earlier ones of its job."""

    place: int
    job: str
    fence: int


@dataclass(frozen=True)
class Stop:
    """A bot of which every process was stopped, and when, on the monotonic clock; its guardian could kill nothing."""

    bot: str
    began: float
    ended: float

    def explains(self, attempt: Attempt) -> bool:
        """Return whether this attempt may have gone on beside a later one because of this stop."""
        return attempt.first.bot == self.bot and self.began <= attempt.last.at <= self.ended + AFTERWARDS


def of_effects(
    calls: Mapping[str, Call], effects: Sequence[Effect], begun: Sequence[Begun], unfinished: set[str]
) -> Iterator[Violation]:
    """Find effects that are doubled, lost, wrong or late. unfinished: jobs that need not have all of their effects."""
    found: dict[tuple[str, int], list[Effect]] = {}
    for effect in effects:
        found.setdefault((effect.job, effect.step), []).append(effect)
    for job, call in calls.items():
        for step, cents in enumerate(call.cents, 1):
            rows = found.pop((job, step), [])
            if len(rows) > 1:
                fences = ", ".join(str(row.fence) for row in rows)
                yield Violation(Kind.DOUBLED, f"job {job} step {step} was done by the fences {fences}")
            if not rows and job not in unfinished:
                yield Violation(Kind.LOST, f"job {job} step {step} was never done")
            for row in rows:
                if row.cents != cents:
                    yield Violation(Kind.WRONG, f"job {job} step {step} wrote {row.cents}, not {cents}")
    for job, step in found:
        yield Violation(Kind.WRONG, f"job {job} has a step {step} that nobody has asked for")
    yield from _late(effects, begun)


def _late(effects: Sequence[Effect], begun: Sequence[Begun]) -> Iterator[Violation]:
    newest: dict[str, int] = {}
    written: list[Effect | Begun] = [*effects, *begun]
    for each in sorted(written, key=lambda row: row.place):
        known = newest.get(each.job, 0)
        if isinstance(each, Begun):
            newest[each.job] = max(each.fence, known)
        elif each.fence < known:
            what = f"job {each.job} step {each.step} was done by fence {each.fence} after fence {known} had begun"
            yield Violation(Kind.LATE, what)


def of_results(
    calls: Mapping[str, Call], results: Mapping[str, Any], states: Mapping[str, tuple[str, str]]
) -> Iterator[Violation]:
    """Find wrong results. states: the state of each job, and the reason of its end."""
    for job, call in calls.items():
        state, reason = states.get(job, ("absent", ""))
        value = results.get(job)
        if is_given_up(state, reason):
            continue
        if state != "succeeded" or isinstance(value, TaskFailed):
            yield Violation(Kind.WRONG, f"job {job} is {state}: {reason or value}")
        elif value != sum(call.cents):
            yield Violation(Kind.WRONG, f"job {job} returned {value}, not {sum(call.cents)}")


def is_given_up(state: str, reason: str) -> bool:
    """Return whether the pool has given a job up for the one reason for which it may."""
    return state == "dead" and reason == "its bot was lost three times"


def overlaps(ran: Mapping[str, Sequence[Attempt]]) -> list[tuple[Attempt, Attempt]]:
    """Return each attempt that wrote a line after a later attempt of its job had started, with the latter."""
    return [
        (earlier, later)
        for tries in ran.values()
        for place, later in enumerate(tries)
        for earlier in tries[:place]
        if earlier.last.place > later.first.place
    ]


def of_overlaps(found: Sequence[tuple[Attempt, Attempt]], stops: Sequence[Stop]) -> Iterator[Violation]:
    """Find overlaps that no stop of a whole bot explains."""
    for earlier, later in found:
        if not any(stop.explains(earlier) for stop in stops):
            what = f"job {earlier.job} fence {earlier.fence} on {earlier.first.bot} wrote '{earlier.last.what}'"
            yield Violation(Kind.OVERLAP, f"{what} after fence {later.fence} on {later.first.bot} had started")
