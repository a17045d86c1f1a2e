"""What a job is expected to use, where whoever submits it does not say: a guess that is made once, at the submit.

Nothing is guessed unless `[estimates] estimator` names who does it: "usage", which is built in, or an entry point of
the group "leasehold.estimators", a function of one request as the gateway takes it that gives a number:

    [project.entry-points."leasehold.estimators"]
    measured = "my_package:measured"
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from assigner import plugins
from schema.errors import LeaseholdError
from schema.limits import escaped
from schema.requests import DEFAULT_INSTANCE, MAX_COST

GROUP = "leasehold.estimators"
USAGE = "usage"

#: Of one request in the form in which it is stored.
Estimator = Callable[[Mapping[str, Any]], float]


class EstimateSettings(BaseModel):
    """What is guessed of jobs.

    estimator: who says what a job is expected to use if its request does not, in the unit of budgets and meters:
        "usage", or the name of an entry point of the group "leasehold.estimators". Unset: nobody, and it counts as 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    estimator: str | None = None

    @field_validator("estimator")
    @classmethod
    def _estimator_is_there(cls, name: str | None) -> str | None:
        if name is not None:
            load(name)
        return name

    @cached_property
    def estimate(self) -> Estimator | None:
        """The estimator, if there is to be one."""
        return None if self.estimator is None else load(self.estimator)


def usage(request: Mapping[str, Any]) -> float:
    """3, twice that if the word "complex" is in the label or the command, and 2 more for a job of an instance other
    than the default one, which stands for a project (Sleepless Agent's usage estimate, in messages)."""
    described = " ".join([request["label"], *request["payload"]["command"]]).lower()
    return 3.0 * (2 if "complex" in described else 1) + (2 if request["instance"] != DEFAULT_INSTANCE else 0)


def load(name: str) -> Estimator:
    """The estimator of this name. Raises ValueError if there is none, or it cannot be used."""
    if name == USAGE:
        return usage
    place, made = plugins.offered(GROUP, name, noun="an estimator", built_in=(USAGE,))
    if not callable(made):
        raise ValueError(f"{place} is not an estimator: it cannot be called")
    estimator: Estimator = made

    def checked(request: Mapping[str, Any]) -> float:
        guessed = estimator(request)
        if isinstance(guessed, bool) or not isinstance(guessed, int | float) or not 0 <= guessed <= MAX_COST:
            raise LeaseholdError(f"estimator '{name}' gave {escaped(repr(guessed), 60)}, not a number from 0 to 1e12")
        return float(guessed)

    return checked


def with_estimate(request: dict[str, Any], estimate: Estimator | None, **of: str) -> dict[str, Any]:
    """The request with what the job is expected to use, if it does not say so itself; `of`: fields that it has from its
    graph."""
    if estimate is None or "estimated_cost" in request:
        return request
    return request | {"estimated_cost": estimate(request | of)}
