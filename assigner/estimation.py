"""Predictors: from how long jobs of a class ran, how long the next one will. They run beside the assigners, which only
read what was written; which one, the configuration says."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import quantiles
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, field_validator

from assigner.config import plugins
from schema.errors import LeaseholdError
from schema.policy import priority_classes
from schema.policy.priority_classes import Prediction
from schema.postgres.engine import Database
from schema.requests import DEFAULT_INSTANCE, MAX_COST, MAX_TIMEOUT
from schema.validation import escaped

PREDICTORS_GROUP = "leasehold.predictors"
QUANTILES = "quantiles"
#: Jobs of a class that have to be known before anything is predicted for it.
ENOUGH = 5


class Predictor(Protocol):
    """Something that learns from the jobs that ran last."""

    def predict(self, ran: Mapping[str, Sequence[float]]) -> Mapping[str, Prediction]:
        """How long jobs of a class will run, from the seconds that jobs of each class ran."""


class Quantiles:
    """The median, and what nine of ten stay below."""

    def predict(self, ran: Mapping[str, Sequence[float]]) -> Mapping[str, Prediction]:
        found = {name: quantiles(each, n=10, method="inclusive") for name, each in ran.items() if len(each) >= ENOUGH}
        return {name: Prediction(tenths[4], tenths[8]) for name, tenths in found.items()}


def load_predictor(kind: str) -> Predictor:
    """The predictor of this name. Raises ValueError if there is none, several packages offer one, or it cannot be
    used."""
    if kind == QUANTILES:
        return Quantiles()
    place, made = plugins.load_entry_point(PREDICTORS_GROUP, kind, noun="a predictor", built_in=(QUANTILES,))
    try:
        inspect.signature(made.predict).bind({})
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{place} is not a predictor: it has no predict(ran)") from None
    predictor: Predictor = made
    return predictor


def predict(database: Database, kind: str) -> None:
    """Look at the jobs of each class that ran last, and write what the predictor makes of them.

    Raises LeaseholdError if that makes no sense.
    """
    ran = database.run(priority_classes.recent_run_times)
    if not ran:
        return
    found = load_predictor(kind).predict(ran)
    for name, each in found.items():
        if not 0 <= each.seconds <= each.high <= MAX_TIMEOUT:
            raise LeaseholdError(f"predictor '{kind}' gave {each.seconds} and {each.high} seconds for '{name}'")
    database.run(lambda connection: priority_classes.store_predictions(connection, found))


# What a job is expected to use, where whoever submits it does not say: a guess that is made once, at the submit.
#
# Nothing is guessed unless `[estimates] estimator` names who does it: "usage", which is built in, or an entry point of
# the group "leasehold.estimators", a function of one request as the gateway takes it that gives a number:
#
# [project.entry-points."leasehold.estimators"]
# measured = "my_package:measured"


ESTIMATORS_GROUP = "leasehold.estimators"
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
            load_estimator(name)
        return name

    @cached_property
    def estimate(self) -> Estimator | None:
        """The estimator, if there is to be one."""
        return None if self.estimator is None else load_estimator(self.estimator)


def guess_usage(request: Mapping[str, Any]) -> float:
    """3, twice that if the word "complex" is in the label or the command, and 2 more for a job of an instance other
    than the default one, which stands for a project (Sleepless Agent's usage estimate, in messages)."""
    described = " ".join([request["label"], *request["payload"]["command"]]).lower()
    return 3.0 * (2 if "complex" in described else 1) + (2 if request["instance"] != DEFAULT_INSTANCE else 0)


def load_estimator(name: str) -> Estimator:
    """The estimator of this name. Raises ValueError if there is none, or it cannot be used."""
    if name == USAGE:
        return guess_usage
    place, made = plugins.load_entry_point(ESTIMATORS_GROUP, name, noun="an estimator", built_in=(USAGE,))
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
