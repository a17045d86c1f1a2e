"""Predicted run times per job class, estimated costs of jobs whose request gives none, and advice on stated run times.

A predictor learns from the latest jobs of each class how long the next one will run. Upkeep runs it and stores the
predictions; assigners only read them. The configuration names the predictor.

An estimator guesses a job's cost once, when the job is submitted. Nothing is guessed unless `[estimates] estimator`
names one: "usage", which is built in, or an entry point of the group "leasehold.estimators". Such an entry point is a
function that takes one request as the gateway takes it, and returns a number:

    [project.entry-points."leasehold.estimators"]
    measured = "my_package:measured"

Advice compares the run time that a request states with those of like jobs that have ended. It refuses nothing.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import quantiles
from typing import Any, Protocol

from leasehold.errors import LeaseholdError
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field, field_validator

from assigner.config import plugins
from schema import clock
from schema.policy import priority_classes
from schema.policy.priority_classes import Prediction, RunTimes
from schema.postgres.engine import Database
from schema.requests import DEFAULT_INSTANCE, MAX_COST
from schema.validation import YEAR

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
        if not 0 <= each.seconds <= each.high <= YEAR:
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
    advice_factor: the answer to a submit carries advice where the stated run time is more than this many times the
        median of like jobs, or less than that part of it. Doubling it advises only on estimates twice as far off.
        Unset: no advice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    estimator: str | None = None
    advice_factor: float | None = Field(default=None, gt=1, le=1e6)

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


# Advice on stated run times.

#: Seconds for which the run times that were read are used.
REMEMBERED_SECONDS = 60.0
#: The most jobs of one submit that get advice.
MAX_ADVICE = 20


class RunTimeAdvice:
    """Compares stated run times with the newest run times of like jobs, which it reads at most once a minute.

    Jobs are alike if they have the same instance and label; without a label, the same instance and command.
    """

    def __init__(self, database: Database, factor: float, *, now: clock.Monotonic = clock.monotonic) -> None:
        self._database, self._factor, self._now = database, factor, now
        self._reading = threading.Lock()
        self._known: Mapping[tuple[str, str, bytes | None], RunTimes] = {}
        self._known_until = now()

    def advise(self, requests: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return a sentence for each request whose stated run time is far off, by its index; at most `MAX_ADVICE`.

        requests: in the form in which they are stored. If none states a run time, nothing is read.
        """
        stated = [(index, each) for index, each in enumerate(requests) if "estimated_seconds" in each]
        if not stated:
            return {}
        known = self._run_times()
        advice: dict[int, str] = {}
        for index, request in stated:
            label, command = request["label"], request["payload"]["command"]
            ran = known.get((request["instance"], label, None if label else priority_classes.command_digest(command)))
            seconds = request["estimated_seconds"]
            if ran is None or ran.median / self._factor <= seconds <= ran.median * self._factor:
                continue
            alike = f"with label '{escaped(label, 64)}'" if label else "with this command"
            advice[index] = (
                f"it is estimated at {seconds:g} s, but half of the last {ran.jobs} jobs {alike} "
                f"took at most {ran.median:.3g} s"
            )
            if len(advice) == MAX_ADVICE:
                break
        return advice

    def _run_times(self) -> Mapping[tuple[str, str, bytes | None], RunTimes]:
        with self._reading:
            if self._now() >= self._known_until:
                self._known = self._database.run(
                    lambda connection: priority_classes.run_times_alike(connection, enough=ENOUGH)
                )
                self._known_until = self._now() + REMEMBERED_SECONDS
            return self._known
