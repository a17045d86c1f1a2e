"""How many candidates to look at, and for which jobs together."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from schema.candidates import Wanted
from schema.ready import ReadyJob


class SamplingSettings(BaseModel):
    """Sampling of bots, as BuildGrid's SamplingConfig; it has no default size, ours is 10.

    sample_size: candidates scored for each job. Doubling it costs one more short index walk per batch and finds a
        better bot; beyond some tens the gain vanishes.
    max_attempts: sampling rounds before the fall-back to any healthy bot. Doubling it matters only where
        assigners contend for few free bots.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_size: int = Field(default=10, ge=1, le=1000)
    max_attempts: int = Field(default=1, ge=1, le=20)


@dataclass(frozen=True)
class Group:
    """Jobs that any bot suits alike, in the order in which they are to be placed."""

    cohort: int
    instance: int
    platform: int
    units: int
    jobs: tuple[ReadyJob, ...]

    def wanted(self, sample_size: int) -> Wanted:
        """What to sample: if every job before it fills a bot, the last one still sees `sample_size` candidates."""
        return Wanted(self.cohort, self.instance, self.platform, self.units, sample_size + len(self.jobs) - 1)


def grouped(jobs: Sequence[ReadyJob]) -> list[Group]:
    """Jobs by cohort, instance, requirement set and units; groups and jobs keep the order of their first appearance."""
    found: dict[tuple[int, int, int, int], list[ReadyJob]] = {}
    for job in jobs:
        found.setdefault((job.cohort, job.instance, job.platform, job.units), []).append(job)
    return [Group(*key, tuple(members)) for key, members in found.items()]
