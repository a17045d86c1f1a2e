"""How good a bot is for a job: one number, with the parts it is made of."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schema.candidates import FreeBot
from schema.limits import MAX_UNITS

_LIMIT = 1e6

CapacityTerm = Literal["raw", "normalised"]


class Weights(BaseModel):
    """Weights of the score's terms; finite, |w| ≤ 1e6. Defaults are BuildGrid's.

    priority: per step of the bot's priority number. Negative, so that a lower number is preferred; doubling it makes
        a preferred bot outweigh twice as much spare capacity.
    locality: for a bot that lately worked on the job's locality hint. Doubling it makes warm caches outweigh twice
        as much spare capacity.
    capacity: per free unit. Doubling it spreads load more evenly, against locality; negative packs bots full.
    success: for a bot whose work with the job's label always succeeded and that is idle, see `Worth`; 0 leaves it out,
        and then nothing about it is read. Doubling it makes reliable, idle bots outweigh twice as much of the rest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    priority: float = Field(default=-10.0, ge=-_LIMIT, le=_LIMIT)
    locality: float = Field(default=5.0, ge=-_LIMIT, le=_LIMIT)
    capacity: float = Field(default=1.0, ge=-_LIMIT, le=_LIMIT)
    success: float = Field(default=0.0, ge=-_LIMIT, le=_LIMIT)


@dataclass(frozen=True)
class Score:
    """The weighted terms of one score; what is compared is their sum."""

    priority: float
    capacity: float
    locality: float

    @property
    def total(self) -> float:
        """The score; higher is better."""
        return self.priority + self.capacity + self.locality

    def stored(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""
        return {
            "total": self.total,
            "priority": self.priority,
            "capacity": self.capacity,
            "locality": self.locality,
        }


@dataclass(frozen=True)
class FourTerms(Score):
    """The same where success has a weight."""

    success: float

    @property
    def total(self) -> float:
        """The score; higher is better."""
        return super().total + self.success

    def stored(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""
        return {**super().stored(), "success": self.success}


@dataclass(frozen=True)
class Worth:
    """success_rate / (1 + load)^load_power, from 0 to 1: Vapora's assignment score (ADR-018), where the power is 1.

    `rate` is that of the bot's attempts with jobs of the label, `load` the share of its units that are taken, both from
    0 to 1. A bot that is full is worth half of what it is worth idle; with a power of 2, a quarter; with 0, as much.
    """

    rate: float
    load: float
    load_power: float = 1.0

    @property
    def total(self) -> float:
        """The score; higher is better."""
        return float(self.rate / (1.0 + self.load) ** self.load_power)

    def stored(self) -> dict[str, Any]:
        """The form in which a decision keeps it."""
        return {"total": self.total, "success_rate": self.rate, "load": self.load}


def worth(bot: FreeBot, *, room: int, rate: float, load_power: float = 1.0) -> Worth:
    """What a bot is worth that has succeeded at this `rate` and still has `room` free units, of at least one."""
    return Worth(rate, (bot.capacity - room) / bot.capacity, load_power)


def score(bot: FreeBot, *, room: int, hit: bool, weights: Weights, term: CapacityTerm = "raw") -> Score:
    """priority x w_priority + capacity x w_capacity + locality_hit x w_locality (BuildGrid's weighted score).

    `room` is the bot's units still free, also counting what this batch has taken; the capacity term is that number, or
    normalised, its share of all the bot's units. With the default weights a bot of priority 0 with 3 free units and no
    hit scores 3; a priority that is better by 1 outweighs a locality hit, or up to nine more free units.
    """
    capacity = room if term == "raw" else room / bot.capacity
    return Score(
        priority=bot.priority * weights.priority,
        capacity=capacity * weights.capacity,
        locality=weights.locality if hit else 0.0,
    )


def outweighing_units(weights: Weights, term: CapacityTerm) -> int | None:
    """More free units from which capacity outweighs one step of bot priority; None if it never does.

    Of a normalised term the unit is the whole bot, so that the answer is 1 or None.
    """
    step, unit = abs(weights.priority), abs(weights.capacity)
    if unit * (MAX_UNITS if term == "raw" else 1) <= step:
        return None
    return math.floor(step / unit) + 1


def dominance(weights: Weights, term: CapacityTerm) -> str:
    """One line for people: which term of the score can dominate the others."""
    step, hit = abs(weights.priority), abs(weights.locality)
    verb = "outweighs" if step > hit else "weighs as much as" if step == hit else "is outweighed by"
    units = outweighing_units(weights, term)
    if units is None:
        free = "free capacity never outweighs it"
    elif term == "normalised":
        free = f"a bot that is wholly free ({abs(weights.capacity):g}) outweighs it"
    else:
        free = f"free capacity outweighs it from {units} more free unit{'s' if units > 1 else ''} on"
    success = f"; success adds at most {weights.success:g}" if weights.success else ""
    return f"one step of bot priority ({step:g}) {verb} a locality hit ({hit:g}); {free}{success}"
