"""Predictors: from how long jobs of a class ran, how long the next one will. They run beside the assigners, which only
read what was written; which one, the configuration says."""

import inspect
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Protocol

from assigner import plugins
from schema import predictions
from schema.engine import Database
from schema.errors import LeaseholdError
from schema.predictions import Prediction
from schema.requests import MAX_TIMEOUT

GROUP = "leasehold.predictors"
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


def load(kind: str) -> Predictor:
    """The predictor of this name. Raises ValueError if there is none, several packages offer one, or it cannot be
    used."""
    if kind == QUANTILES:
        return Quantiles()
    place, made = plugins.offered(GROUP, kind, noun="a predictor", built_in=(QUANTILES,))
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
    ran = database.run(predictions.ran)
    if not ran:
        return
    found = load(kind).predict(ran)
    for name, each in found.items():
        if not 0 <= each.seconds <= each.high <= MAX_TIMEOUT:
            raise LeaseholdError(f"predictor '{kind}' gave {each.seconds} and {each.high} seconds for '{name}'")
    database.run(lambda connection: predictions.keep(connection, found))
