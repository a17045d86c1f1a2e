"""Predicted run times per job class, and estimated costs of jobs whose request gives none.

A predictor learns from the latest jobs of each class how long the next one will run. Upkeep runs it and stores the
predictions; assigners only read them. The configuration names the predictor.

An estimator guesses a job's cost once, when the job is submitted. Nothing is guessed unless `[estimates] estimator`
names one: "usage", which is built in, or an entry point of the group "leasehold.estimators". Such an entry point is a
function that takes one request as the gateway takes it, and returns a number:

    [project.entry-points."leasehold.estimators"]
    measured = "my_package:measured"
"""

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
#: Ended jobs of a class that are needed before a prediction is made for it.
ENOUGH = 5


class Predictor(Protocol):
    """Predicts run times from the latest ended jobs."""

    def predict(self, ran: Mapping[str, Sequence[float]]) -> Mapping[str, Prediction]:
        """Return a prediction per class. `ran`: for each class, the run times of its latest jobs, in seconds."""


class Quantiles:
    """Predict the median and the 90th percentile of the latest run times."""

    def predict(self, ran: Mapping[str, Sequence[float]]) -> Mapping[str, Prediction]:
        found = {name: quantiles(each, n=10, method="inclusive") for name, each in ran.items() if len(each) >= ENOUGH}
        return {name: Prediction(tenths[4], tenths[8]) for name, tenths in found.items()}


def load_predictor(kind: str) -> Predictor:
    """Return the predictor of this name.

    Raises ValueError if there is none, if several packages offer one, or if it cannot be used.
    """
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
    """Predict run times from the latest jobs of each class, and store the predictions.

    Raises LeaseholdError if a prediction is negative, out of order or above the largest timeout.
    """
    ran = database.run(priority_classes.recent_run_times)
    if not ran:
        return
    found = load_predictor(kind).predict(ran)
    for name, each in found.items():
        if not 0 <= each.seconds <= each.high <= MAX_TIMEOUT:
            raise LeaseholdError(f"predictor '{kind}' gave {each.seconds} and {each.high} seconds for '{name}'")
    database.run(lambda connection: priority_classes.store_predictions(connection, found))


# Estimated costs.

ESTIMATORS_GROUP = "leasehold.estimators"
USAGE = "usage"

#: Takes one request in the form in which it is stored; returns its estimated cost.
Estimator = Callable[[Mapping[str, Any]], float]


class EstimateSettings(BaseModel):
    """Settings of the cost estimate.

    estimator: what estimates the cost of a job whose request gives none, in the unit of budgets and meters: "usage",
        or the name of an entry point of the group "leasehold.estimators". Unset: no estimate, and the job counts as 1.
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
        """The configured estimator, or None."""
        return None if self.estimator is None else load_estimator(self.estimator)


def guess_usage(request: Mapping[str, Any]) -> float:
    """Estimate a job's usage in messages, by the rule of Sleepless Agent.

    A job counts as 3, doubled if the word "complex" is in its label or command. A job of an instance other than the
    default one, which stands for a project, counts 2 more.
    """
    described = " ".join([request["label"], *request["payload"]["command"]]).lower()
    return 3.0 * (2 if "complex" in described else 1) + (2 if request["instance"] != DEFAULT_INSTANCE else 0)


def load_estimator(name: str) -> Estimator:
    """Return the estimator of this name. Raises ValueError if there is none, or if it cannot be used."""
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
    """Return the request with an estimated cost, unless it gives one. `of`: fields that its graph adds to it."""
    if estimate is None or "estimated_cost" in request:
        return request
    return request | {"estimated_cost": estimate(request | of)}
