"""Checks of limits that others keep: optional, by name, and without any nothing is checked."""

import inspect
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from assigner.config import plugins
from schema.accounting.rates import ALL_CLASSES, Advice

RATE_LIMITS, BACKPRESSURES = "leasehold.rate_limit_checkers", "leasehold.backpressure_checkers"
NONE = "none"
#: What a checker may raise: the check has failed, and the job is looked at again. Anything else is a defect.
FAILURES = (RuntimeError, ValueError, OSError)


class RateLimitChecker(Protocol):
    """Whether a resource may be used now, as somebody else counts it (Marianne)."""

    def is_rate_limited(self, resource_class: str, model: str | None) -> bool:
        """Whether no job of it may start now. Called inside a transaction: it has to answer within milliseconds."""


class BackpressureChecker(Protocol):
    """Whether the place is fit for more work (Marianne)."""

    def can_start(self) -> tuple[bool, float]:
        """Whether jobs may start, and the seconds to wait before some do. Called like the other."""


class NoLimit:
    """Nothing is limited by anybody else."""

    def is_rate_limited(self, _resource_class: str, _model: str | None) -> bool:
        return False


class NoPressure:
    """Everything may start."""

    def can_start(self) -> tuple[bool, float]:
        return True, 0.0


@dataclass(frozen=True)
class LimitAnswers:
    """Why jobs of some resources may not start now, by resource. failed: the errors of checks that failed."""

    refused: Mapping[str, str]
    failed: Mapping[str, str]


class CheckerSettings(BaseModel):
    """Who else is asked before a job that uses a resource class starts.

    rate_limit: entry point of the group `leasehold.rate_limit_checkers`, or `none`.
    backpressure: entry point of the group `leasehold.backpressure_checkers`, or `none`.
    max_rate_limit_skips: checks of a job's rate limit that may fail one after the other, an assigner's interval apart;
        then it is parked. Doubling it waits twice as long for a checker that is broken.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rate_limit: str = NONE
    backpressure: str = NONE
    max_rate_limit_skips: int = Field(default=10, ge=1, le=1000)

    def model_post_init(self, _context: object) -> None:
        """Refuse what cannot be loaded."""
        _ = self.limits, self.pressure

    @property
    def checks_limits(self) -> bool:
        """Whether anybody is asked about rates."""
        return self.rate_limit != NONE

    def ask_limits(self, used: Iterable[str]) -> LimitAnswers:
        """Ask about each of these resources, which are a class or a class, a slash and a model."""
        refused, failed = dict[str, str](), dict[str, str]()
        for each in sorted(used):
            resource_class, _, model = each.partition("/")
            try:
                if self.limits.is_rate_limited(resource_class, model or None):
                    refused[each] = f"'{each}' is limited, says the checker '{self.rate_limit}'"
            except FAILURES as error:
                failed[each] = f"{type(error).__name__}: {error}"
                refused[each] = f"the rate limit of '{each}' cannot be checked: {failed[each]}"
        return LimitAnswers(refused, failed)

    def add_pressure(self, advice: MutableMapping[str, Advice]) -> None:
        """Add what the checker of backpressure advises to the advice for all jobs. Raises one of `FAILURES`."""
        allowed, delay = self.pressure.can_start()
        if not allowed or delay > 0:
            given = advice.get(ALL_CLASSES, Advice(allowed=True))
            advice[ALL_CLASSES] = Advice(given.allowed and allowed, max(given.delay, delay))

    @cached_property
    def limits(self) -> RateLimitChecker:
        """The checker that `rate_limit` names."""
        if not self.checks_limits:
            return NoLimit()
        made: RateLimitChecker = _load_checker(
            RATE_LIMITS, self.rate_limit, "is_rate_limited", "resource_class", "model"
        )
        return made

    @cached_property
    def pressure(self) -> BackpressureChecker:
        """The checker that `backpressure` names."""
        if self.backpressure == NONE:
            return NoPressure()
        made: BackpressureChecker = _load_checker(BACKPRESSURES, self.backpressure, "can_start")
        return made


def _load_checker(group: str, kind: str, method: str, *arguments: str) -> Any:
    place, made = plugins.load_entry_point(group, kind, noun="a checker", built_in=(NONE,))
    try:
        inspect.signature(getattr(made, method)).bind(*arguments)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{place} is not a checker: it has no {method}({', '.join(arguments)})") from None
    return made
