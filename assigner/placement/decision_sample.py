"""Samples of decisions: what a strategy saw of one job, and the same choice made again with other weights.

An assigner process samples a decision now and then. Only the first job of a batch is sampled: it saw the bots as they
were read, before other jobs of the batch took room. Scores are those of `Policy.score`, and the bot is chosen by the
strategy itself, so that both are what an assigner would have done.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from assigner.placement.registry import CAPACITY, LOCALITY, StrategySettings
from assigner.placement.strategy import Group, Input, Score, Snapshot
from schema.clock import Monotonic
from schema.fleet.candidates import FreeBot
from schema.fleet.success import UNKNOWN
from schema.moves.grant import Placement
from schema.picking.pick import ReadyJob

#: Seconds between two samples of a process. Halving it doubles the rows that are written, not the rows that are kept.
SAMPLE_SECONDS = 10.0
#: The most candidates of a sample; the bot that was chosen is always one of them.
MAX_CANDIDATES = 100
#: The strategies that compare bots by the weighted score.
BY_WEIGHTS = (CAPACITY, LOCALITY)


class Candidate(BaseModel):
    """A bot that the job might have gone to, as the strategy saw it.

    hit: it had lately worked on the job's locality hint. rate: its success rate, 0 to 1; None if it was not read.
    """

    model_config = ConfigDict(frozen=True)

    bot: str
    priority: int
    free_units: int
    capacity: int
    hit: bool
    rate: float | None


class Seen(BaseModel):
    """A job and its candidates in their order; of: how many candidates there were."""

    model_config = ConfigDict(frozen=True)

    units: int
    label: str
    locality_hint: str | None
    of: int
    candidates: tuple[Candidate, ...] = Field(max_length=MAX_CANDIDATES)


@dataclass(frozen=True)
class DecisionSample:
    """The choice of `bot` for the job with this public id, made by `policy` from what was `seen`."""

    job: str
    bot: str
    policy: StrategySettings
    seen: Seen


@dataclass(frozen=True)
class Rescored:
    """A decision with other settings. The scores have the order of the candidates.

    chosen: the bot that the strategy takes with these settings. None if it goes by more than a sample has: the turns of
    bots, their resources or what waiting jobs take.
    """

    scores: Sequence[Score]
    chosen: str | None


def sample_decision(
    snapshot: Snapshot, placements: Sequence[Placement], policy: StrategySettings
) -> DecisionSample | None:
    """Return a sample of the choice for the first job; None if it has no bot, or takes resources beyond units."""
    job = snapshot.jobs[0]
    placement = next((each for each in placements if each.job_id == job.id), None)
    if placement is None or snapshot.needs.get(job.id):
        return None
    nth = next(n for n, group in enumerate(snapshot.groups) if any(each.id == job.id for each in group.jobs))
    preferred = snapshot.preferred.get(nth, ())
    is_preferred = any(bot.id == placement.bot_id for bot in preferred)
    bots = preferred if is_preferred else snapshot.candidates[nth]
    chosen = next(bot for bot in bots if bot.id == placement.bot_id)
    kept = bots[:MAX_CANDIDATES]
    if chosen not in kept:
        kept = [*kept[: MAX_CANDIDATES - 1], chosen]
    label = snapshot.label(job)
    candidates = tuple(
        Candidate(
            bot=bot.name,
            priority=bot.priority,
            free_units=bot.free_units,
            capacity=bot.capacity,
            hit=job.locality_hint is not None and (bot.id, job.locality_hint) in snapshot.hits,
            rate=snapshot.rate(bot, label) if Input.SUCCESS in policy.inputs else None,
        )
        for bot in kept
    )
    seen = Seen(units=job.units, label=label, locality_hint=job.locality_hint, of=len(bots), candidates=candidates)
    return DecisionSample(job.public_id, chosen.name, policy, seen)


def rescore(seen: Seen, policy: StrategySettings) -> Rescored:
    """Score the candidates by `policy`, and choose one of them again. Unknown success rates count as 1."""
    bots = [
        FreeBot(number, each.bot, each.priority, each.free_units, each.capacity)
        for number, each in enumerate(seen.candidates)
    ]
    rates = [UNKNOWN if each.rate is None else each.rate for each in seen.candidates]
    scores = [
        policy.score(bot, free_units=bot.free_units, hit=each.hit, rate=rate)
        for bot, each, rate in zip(bots, seen.candidates, rates, strict=True)
    ]
    if policy.inputs & {Input.TURNS, Input.RESOURCES, Input.WAITING}:
        return Rescored(scores, None)
    snapshot = _snapshot(seen, bots, {(bot.id, seen.label): rate for bot, rate in zip(bots, rates, strict=True)})
    (placement, *_) = policy.chooser[0].choose(snapshot, policy, how={}) or (None,)
    return Rescored(scores, None if placement is None else seen.candidates[placement.bot_id].bot)


def _snapshot(seen: Seen, bots: Sequence[FreeBot], rates: Mapping[tuple[int, str], float]) -> Snapshot:
    """Return what the strategy saw, for this job alone. Bots and the job have numbers of their own here."""
    job = ReadyJob(0, "", 0, 0, 0, 0, 0, seen.units, seen.locality_hint, False)
    hint = seen.locality_hint
    hits = [] if hint is None else [(number, hint) for number, each in enumerate(seen.candidates) if each.hit]
    return Snapshot(
        [job],
        [Group(job.cohort, job.instance, job.platform, job.units, (job,))],
        [bots],
        hits=frozenset(hits),
        labels={job.id: seen.label},
        rates=rates,
    )


class DecisionRecorder:
    """Holds the newest sample of a process until it is written. Any thread may call it.

    `is_due` says whether a decision is to be sampled: one in `SAMPLE_SECONDS`.
    """

    def __init__(self, now: Monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._next = now()
        self._held: DecisionSample | None = None

    def is_due(self) -> bool:
        """Return whether the last sample is old enough for another one."""
        return self._now() >= self._next

    def keep(self, sample: DecisionSample) -> None:
        """Hold a sample of a committed decision."""
        with self._lock:
            self._held, self._next = sample, self._now() + SAMPLE_SECONDS

    def take(self) -> DecisionSample | None:
        """Return the sample that was not taken yet; None if there is none."""
        with self._lock:
            sample, self._held = self._held, None
        return sample


def stored(sample: DecisionSample) -> dict[str, Any]:
    """Return the sample as `schema.tenancy.processes.record_decision` takes it."""
    return {
        "job": sample.job,
        "bot": sample.bot,
        "policy": sample.policy.model_dump(mode="json"),
        "seen": sample.seen.model_dump(mode="json"),
    }
