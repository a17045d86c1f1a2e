"""Loads and bots that a file describes: a past that never was, drawn by chance."""

import math
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from leasehold.errors import BadInput
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from assigner.config import loading
from assigner.simulation.past import MOST_BOTS, MOST_JOBS, Attempt, Past, PastBot, PastJob
from schema.fields import first_error
from schema.requests import JobRequest
from schema.validation import YEAR

#: When a generated span begins: a Monday.
BEGIN = datetime(2026, 1, 5, tzinfo=UTC).timestamp()
#: The length of a generated span, in seconds, at most.
MOST_SECONDS = 366 * 86400.0


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BotGroup(_Part):
    """Bots that are alike."""

    count: int = Field(ge=1, le=MOST_BOTS, description="How many bots.")
    capacity: int = Field(default=1, ge=1, le=1_000_000, description="Units of each.")
    priority: int = Field(default=0, ge=-1000, le=1000)
    properties: dict[str, str | list[str]] = Field(default_factory=dict)
    exclusive: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    instance: str | None = None

    def bots(self, group: int) -> list[PastBot]:
        """The bots, named by the number of their group and their own."""
        own = self.model_dump(exclude={"count"})
        return [PastBot(name=f"bot-{group}-{nth}", **own) for nth in range(1, self.count + 1)]


class Load(_Part):
    """Jobs that are alike: bursts arrive as a Poisson process, and run times are lognormal."""

    per_hour: float = Field(gt=0, le=10_000_000, description="Jobs in an hour on average.")
    burst: int = Field(default=1, ge=1, le=10_000, description="Jobs that arrive together.")
    seconds: float = Field(gt=0, le=YEAR, description="Median of the run times.")
    spread: float = Field(default=1.0, ge=1, le=100, description="95 % quantile of the run times ÷ their median.")
    failing: float = Field(default=0.0, ge=0, lt=1, description="Part of the attempts that fail.")
    hints: int = Field(default=0, ge=0, le=100_000, description="Different locality hints of the jobs; 0 = none.")
    job: dict[str, Any] = Field(default_factory=dict, description="Fields of each request, as in JSON lines.")

    def jobs(self, group: int, seconds: float, chance: random.Random) -> list[PastJob]:
        """Draw the jobs of a span. Raises BadInput for a wrong field of the request."""
        request = self._request(group)
        found: list[PastJob] = []
        at = 0.0
        while (at := at + chance.expovariate(self.per_hour / self.burst / 3600.0)) < seconds:
            for _ in range(self.burst):
                found.append(self._job(f"{group}-{len(found) + 1}", BEGIN + at, request, chance))
            if len(found) > MOST_JOBS:
                break
        return found

    def _request(self, group: int) -> Mapping[str, Any]:
        try:
            return JobRequest.model_validate({"command": ["true"], **self.job}).normal()
        except ValidationError as error:
            field, said = first_error(error)
            raise BadInput(f"load.{group}.job.{field}", said) from None

    def _job(self, name: str, at: float, request: Mapping[str, Any], chance: random.Random) -> PastJob:
        # The 95 % quantile of a lognormal distribution is median · exp(1.645 σ).
        seconds = self.seconds * math.exp(chance.gauss(0.0, math.log(self.spread) / 1.645))
        attempts = [Attempt(seconds, "succeeded")]
        while chance.random() < self.failing and len(attempts) < request["max_attempts"]:
            attempts.insert(0, Attempt(seconds, "failed"))
        if self.hints:
            request = {**request, "locality_hint": f"{name.partition('-')[0]}-{chance.randrange(self.hints)}"}
        return PastJob(name, at, None, False, True, request, attempts)


class Spec(loading.ConfigModel):
    """A file of a generated past."""

    seconds: float = Field(default=3600.0, ge=60, le=MOST_SECONDS, description="Length of the span.")
    bots: tuple[BotGroup, ...] = Field(min_length=1, max_length=1000)
    load: tuple[Load, ...] = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _few_bots(self) -> Self:
        if sum(each.count for each in self.bots) > MOST_BOTS:
            raise ValueError(f"bots: a simulation has at most {MOST_BOTS:,}")
        return self


class BotFile(loading.ConfigModel):
    """A file of bots that take the place of a past's."""

    bots: tuple[BotGroup, ...] = Field(min_length=1, max_length=1000)


def generate(path: Path, *, seed: int) -> Past:
    """Draw the past that the file at `path` describes. Equal seeds give equal pasts. Raises BadInput."""
    spec = loading.load(path, Spec, {})
    jobs: list[PastJob] = []
    for group, load in enumerate(spec.load, 1):
        jobs += load.jobs(group, spec.seconds, random.Random(f"{seed} load {group}"))
    if len(jobs) > MOST_JOBS:
        raise BadInput(str(path), f"describes more than {MOST_JOBS:,} jobs: make the span shorter")
    jobs.sort(key=lambda job: job.arrived)
    return Past(BEGIN, BEGIN + spec.seconds, jobs, bots_in(spec.bots))


def read_bots(path: Path) -> list[PastBot]:
    """Read a file of bots: the tables `bots` of a file as `generate` takes it. Raises BadInput."""
    return bots_in(loading.load(path, BotFile, {}).bots)


def bots_in(groups: Sequence[BotGroup]) -> list[PastBot]:
    """Return the bots of all groups."""
    return [bot for nth, group in enumerate(groups, 1) for bot in group.bots(nth)]
