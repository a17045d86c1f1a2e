"""Choose which running jobs to stop so that an instance gets its minimum: a pure function of what was read.

A plan names a bot on which the job fits once its victims have stopped, and would not fit if any of them went on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.picking.preemption import Occupant, OccupiedBot, StarvedJob

# What operators tune about quotas and preemption. The quotas themselves are in the database.


DAY = 86400.0


class QuotaSettings(BaseModel):
    """Preemption on behalf of minimum quotas, and what is told of them. Times are seconds.

    Names and defaults are BuildGrid's where it has them.

    preemption: reclaim units for instances below their minimum at all.
    preemption_delay: how long a job of such an instance waits for a free bot first. Doubling it halves the evictions
        that a short wait would have spared and doubles the time until a minimum is met.
    eviction_cooldown: each eviction takes one off the maximum of the evicted instance for so long. Doubling
        it makes instances that were evicted come back half as fast; 0 lets them come back at once.
    cooldown: `contended` does so only while another instance that is below its own maximum has jobs waiting in the
        cohort, so that no room stays idle; `literal` does so in any case, as BuildGrid.
    max_evictions: a job evicted so often is exempt. Doubling it lets one job lose twice as much work.
    min_run_time: a job that has run for less is left alone. Doubling it protects short jobs.
    reservation: how long what an eviction frees is kept for the instance that it was for, on top of the time the bot
        has to stop. Doubling it leaves a bot idle twice as long when the instance's jobs have gone meanwhile.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preemption: bool = True
    preemption_delay: float = Field(default=20.0, ge=0, le=DAY)
    eviction_cooldown: float = Field(default=EVICTION_COOLDOWN.seconds, ge=0, le=DAY)
    cooldown: Literal["contended", "literal"] = "contended"
    max_evictions: int = Field(default=5, ge=0, le=1000)
    min_run_time: float = Field(default=0.0, ge=0, le=DAY)
    reservation: float = Field(default=10.0, gt=0, le=3600)
    metric_pairs: int = Field(default=1000, ge=0, le=100_000)

    @property
    def of_evictions(self) -> Cooldown:
        """Return what evictions do to the maximum of an instance."""
        return Cooldown(self.eviction_cooldown, literal=self.cooldown == "literal")


#: The rule of a cohort by which urgency protects no job. By the other one, `lower_priority_only`, it does.
ANY = "any"


@dataclass(frozen=True)
class Eviction:
    """Victims on one bot, and the receipt: the numbers that justify them, stored with both jobs."""

    preemptor: StarvedJob
    bot: OccupiedBot
    victims: tuple[Occupant, ...]
    rule: str
    receipt: Mapping[str, Any]


def plan(
    starved: StarvedJob, bots: Sequence[OccupiedBot], settings: QuotaSettings, *, now: datetime
) -> Eviction | None:
    """Return the cheapest eviction that lets the job start. None if there is none, or if the job fits without one.

    On each bot, victims are taken least urgent first, then most recently queued (BuildGrid), until the job fits beside
    the jobs that stay. The bot with the fewest victims wins, then the one whose most urgent victim is least urgent and
    most recently queued. A victim's instance keeps its own minimum.
    """
    if any(bot.free_units >= starved.units for bot in bots):
        return None
    best: tuple[tuple[Any, ...], OccupiedBot, tuple[Occupant, ...]] | None = None
    for bot in bots:
        victims = _enough(starved, bot, settings, now)
        if not victims:
            continue
        last = victims[-1]
        cost = (len(victims), -last.priority, -last.queued_at.timestamp(), bot.id)
        if best is None or cost < best[0]:
            best = cost, bot, victims
    if best is None:
        return None
    _, bot, victims = best
    return Eviction(starved, bot, victims, starved.rule, _receipt(starved, bot, victims, settings))


class Protection(Enum):
    """Why the rules do not allow stopping a job for another one."""

    OWN = auto()  # it is of the same instance
    PASSING = auto()  # it only starts, or stops already
    EVICTED = auto()  # it was evicted `max_evictions` times
    YOUNG = auto()  # it has run for less than `min_run_time`
    URGENT = auto()  # it is not less urgent, and the cohort's rule is `lower_priority_only`
    MINIMUM = auto()  # its instance would fall below its own minimum


def protection(
    starved: StarvedJob, occupant: Occupant, settings: QuotaSettings, *, now: datetime, spare: float
) -> Protection | None:
    """Return why the occupant may not be stopped for this job; None if it may. spare: units that its instance has left
    above its minimum."""
    if occupant.instance == starved.instance:
        return Protection.OWN
    if not occupant.running:
        return Protection.PASSING
    if occupant.evictions >= settings.max_evictions:
        return Protection.EVICTED
    if (now - occupant.started_at).total_seconds() < settings.min_run_time:
        return Protection.YOUNG
    if starved.rule != ANY and occupant.priority <= starved.priority:
        return Protection.URGENT
    return Protection.MINIMUM if spare < occupant.units else None


def _enough(starved: StarvedJob, bot: OccupiedBot, settings: QuotaSettings, now: datetime) -> tuple[Occupant, ...]:
    """Return the first victims, in order, with which the job fits on the bot, without those that later ones make
    unnecessary; none if the job does not fit with any number of victims."""
    missing = starved.units - bot.free_units
    if starved.units > bot.capacity:
        return ()
    spare: dict[tuple[int, int], float] = {}
    taken: list[Occupant] = []
    order = sorted(bot.occupants, key=lambda each: (-each.priority, -each.queued_at.timestamp(), each.job_id))
    for occupant in order:
        of = occupant.cohort, occupant.instance
        left = spare.setdefault(of, occupant.spare)
        if protection(starved, occupant, settings, now=now, spare=left) is not None:
            continue
        spare[of] = left - occupant.units
        taken.append(occupant)
        missing -= occupant.units
        if missing <= 0:
            return _needed(taken, too_many=-missing)
    return ()


def _needed(taken: Sequence[Occupant], *, too_many: int) -> tuple[Occupant, ...]:
    """Return the victims that remain if `too_many` units need not be freed; the most urgent are spared first."""
    needed: list[Occupant] = []
    for occupant in reversed(taken):
        if occupant.units <= too_many:
            too_many -= occupant.units
        else:
            needed.insert(0, occupant)
    return tuple(needed)


def _receipt(
    starved: StarvedJob, bot: OccupiedBot, victims: Sequence[Occupant], settings: QuotaSettings
) -> dict[str, Any]:
    return {
        "rule": starved.rule,
        "bot": bot.name,
        "preemptor": {
            "job": starved.public_id,
            "instance": starved.instance_name,
            "priority": starved.priority,
            "units": starved.units,
            "waited_seconds": round(starved.waited, 3),
            "preemption_delay": settings.preemption_delay,
            "usage": starved.usage,
            "min_quota": starved.min_quota,
        },
        "victims": [
            {
                "job": victim.public_id,
                "instance": victim.instance_name,
                "priority": victim.priority,
                "units": victim.units,
                "evictions_before": victim.evictions,
                "above_minimum_by": None if victim.spare == float("inf") else int(victim.spare),
            }
            for victim in victims
        ],
    }
