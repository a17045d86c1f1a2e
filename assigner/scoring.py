"""How good a bot is for a job: one number, with the parts it is made of."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from schema.candidates import FreeBot

_LIMIT = 1e6


class Weights(BaseModel):
    """Weights of the score's terms; finite, |w| ≤ 1e6. Defaults are BuildGrid's.

    priority: per step of the bot's priority number. Negative, so that a lower number is preferred; doubling it makes
        a preferred bot outweigh twice as much spare capacity.
    locality: for a bot that lately worked on the job's locality hint. Doubling it makes warm caches outweigh twice
        as much spare capacity.
    capacity: per free unit. Doubling it spreads load more evenly, against locality; negative packs bots full.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    priority: float = Field(default=-10.0, ge=-_LIMIT, le=_LIMIT)
    locality: float = Field(default=5.0, ge=-_LIMIT, le=_LIMIT)
    capacity: float = Field(default=1.0, ge=-_LIMIT, le=_LIMIT)


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


def score(bot: FreeBot, *, room: int, hit: bool, weights: Weights) -> Score:
    """priority x w_priority + capacity x w_capacity + locality_hit x w_locality (BuildGrid's weighted score).

    `room` is the bot's capacity term: its units still free, also counting what this batch has taken. With the default
    weights a bot of priority 0 with 3 free units and no hit scores 3; a priority that is better by 1 outweighs
    a locality hit, or ten free units.
    """
    return Score(
        priority=bot.priority * weights.priority,
        capacity=room * weights.capacity,
        locality=weights.locality if hit else 0.0,
    )
