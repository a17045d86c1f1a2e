"""Rates at which jobs of a resource class, or of a model of it, may start: token buckets that all assigners share.

A bucket fills by itself, by database time and when somebody looks. A grant takes a token of its class's bucket and one
of its model's, where they exist, in its own transaction: no span of s seconds holds more than burst + rate x s grants.
Buckets are locked after counters, in the order of their names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, text

from schema import audit, declarations
from schema.errors import BadInput, NotFound
from schema.postgres.notify import wake
from schema.validation import NAME, check_name, escaped

#: The largest rate, jobs per second, and the largest burst, jobs.
MAX_RATE, MAX_BURST = 1e6, 1_000_000
#: Seconds for which tokens are left to gather, so that a fast bucket is not looked at for each of them.
GATHER_SECONDS = 0.1

PREFIX = "rate:"

_FILLED = "least(burst, tokens + rate * extract(epoch FROM now() - refilled_at))"
READ_BUCKETS = text(f"""
SELECT name, rate, burst, {_FILLED} AS tokens FROM rate_buckets WHERE name = ANY (CAST(:names AS text[]))
""")
DRAW_TOKENS = text("SELECT draw(CAST(:names AS text[]), CAST(:jobs AS integer[]))")
_FOUND_RATE = text("SELECT rate, burst FROM rate_buckets WHERE name = :name FOR NO KEY UPDATE")
# A new bucket is full; one that changes keeps what is in it.
_PUT_RATE = text("""
INSERT INTO rate_buckets AS b (name, rate, burst, tokens) VALUES (:name, :rate, :burst, :burst)
ON CONFLICT (name) DO UPDATE SET rate = EXCLUDED.rate, burst = EXCLUDED.burst,
    tokens = least(EXCLUDED.burst, b.burst,
        b.tokens + b.rate * greatest(extract(epoch FROM clock_timestamp() - b.refilled_at), 0)),
    refilled_at = greatest(b.refilled_at, clock_timestamp())
""")
_REMOVE_RATE = text("DELETE FROM rate_buckets WHERE name = :name RETURNING rate, burst")
_LIST_RATES = text(f"""
SELECT name, rate, burst, greatest({_FILLED}, 0) AS tokens FROM rate_buckets ORDER BY name COLLATE "C"
""")


@dataclass(frozen=True)
class Bucket:
    """`rate`: jobs per second; `burst`: tokens at most; `tokens`: what there is now, below 0 for who comes late."""

    rate: float
    burst: int
    tokens: float

    def minus(self, jobs: int) -> "Bucket":
        """After so many more jobs."""
        return replace(self, tokens=self.tokens - jobs)

    @property
    def due(self) -> float:
        """Seconds until another look is worth it: a token is there, or those that come within `GATHER`, but at most
        half of the burst."""
        return max(0.0, (self._tokens_awaited - self.tokens) / self.rate)

    @property
    def slack(self) -> float:
        """Seconds by which that look may be late before the bucket is full and tokens are lost."""
        return (self.burst - self._tokens_awaited) / self.rate

    @property
    def _tokens_awaited(self) -> float:
        return max(1.0, min(self.burst / 2, self.rate * GATHER_SECONDS))


@dataclass(frozen=True)
class Rate:
    """One row for an operator: jobs per second, burst in jobs, and the tokens that are there now."""

    resource: str
    per_second: float
    burst: int
    tokens: float


class RateSettings(BaseModel):
    """How fast jobs of one resource class, or of one model of it, may start.

    resource: CLASS or CLASS/MODEL; a model's jobs also count for its class.
    per_second: jobs that start in a second in the long run; unset takes a rate away. Doubling it doubles throughput.
    burst: jobs that may start at once after a quiet time. Doubling it doubles how far a second may be above the rate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    resource: str = Field(pattern=f"^{NAME.pattern}(/{NAME.pattern})?$")
    per_second: float | None = Field(default=None, gt=0, le=MAX_RATE)
    burst: int = Field(default=1, ge=1, le=MAX_BURST)


def resource_of(constraints: Mapping[str, Any]) -> str | None:
    """What these terms use: CLASS, CLASS/MODEL, or None."""
    of_class, model = constraints.get("resource_class"), constraints.get("model")
    return of_class if of_class is None or model is None else f"{of_class}/{model}"


def bucket_names(constraints: Mapping[str, Any]) -> list[str]:
    """The buckets that jobs with these terms take of, where they exist."""
    used = resource_of(constraints)
    if used is None:
        return []
    of_class, _, model = used.partition("/")
    return [PREFIX + of_class, PREFIX + used] if model else [PREFIX + of_class]


def read_buckets(connection: Connection, wanted: Sequence[str]) -> dict[str, Bucket]:
    """Those of the buckets that exist, as they are for this transaction, by name."""
    if not wanted:
        return {}
    rows = connection.execute(READ_BUCKETS, {"names": list(wanted)})
    return {row.name: Bucket(row.rate, row.burst, float(row.tokens)) for row in rows}


def draw_tokens(connection: Connection, wanted: Mapping[str, int]) -> None:
    """Take so many tokens of these buckets, as far as they exist, for jobs granted in this transaction.

    If there are fewer since they were looked at, the transaction has to begin anew: raises DBAPIError with the SQLSTATE
    of a serialization failure, which `Database.run` repeats.
    """
    if wanted:
        connection.execute(DRAW_TOKENS, {"names": sorted(wanted), "jobs": [wanted[name] for name in sorted(wanted)]})


def set_rate(connection: Connection, used: str, *, per_second: float, burst: int, actor: str, reason: str = "") -> None:
    """Let jobs of `used`, CLASS or CLASS/MODEL, start at this rate, with at most `burst` at once.

    Raises BadInput for what is no such name, or out of range.
    """
    check_resource("resource", used)
    if not 0 < per_second <= MAX_RATE:
        raise BadInput("per_second", f"must be above 0 and at most {MAX_RATE:.0f}")
    if not 1 <= burst <= MAX_BURST:
        raise BadInput("burst", f"must be between 1 and {MAX_BURST}")
    name = PREFIX + used
    before = connection.execute(_FOUND_RATE, {"name": name}).one_or_none()
    connection.execute(_PUT_RATE, {"name": name, "rate": per_second, "burst": burst})
    audit.write(
        connection,
        "rate.set",
        actor=actor,
        subject=name,
        details={
            "before": None if before is None else {"per_second": before.rate, "burst": before.burst},
            "after": {"per_second": per_second, "burst": burst},
            "reason": reason,
        },
    )
    wake(connection, "jobs")


def remove_rate(connection: Connection, used: str, *, actor: str, reason: str = "") -> None:
    """Let jobs of `used` start at any rate. Raises NotFound if it has none."""
    before = connection.execute(_REMOVE_RATE, {"name": PREFIX + used}).one_or_none()
    if before is None:
        raise NotFound(f"rate: '{escaped(used, 127)}' has none")
    details = {"before": {"per_second": before.rate, "burst": before.burst}, "after": None, "reason": reason}
    audit.write(connection, "rate.rm", actor=actor, subject=PREFIX + used, details=details)
    wake(connection, "jobs")


def rates(connection: Connection) -> list[Rate]:
    """Every rate, by name."""
    return [
        Rate(row.name.removeprefix(PREFIX), row.rate, row.burst, round(float(row.tokens), 3))
        for row in connection.execute(_LIST_RATES)
    ]


def declare(connection: Connection, wanted: Sequence[RateSettings], *, actor: str) -> None:
    """Give the named resources the rates that the configuration says; the others keep theirs."""
    declarations.replace(connection, "rate", (each.resource for each in wanted))
    known = {each.resource: (each.per_second, each.burst) for each in rates(connection)}
    for each in sorted(wanted, key=lambda one: one.resource):
        if each.per_second is None:
            if each.resource in known:
                remove_rate(connection, each.resource, actor=actor, reason="configuration")
        elif known.get(each.resource) != (each.per_second, each.burst):
            set_rate(
                connection,
                each.resource,
                per_second=each.per_second,
                burst=each.burst,
                actor=actor,
                reason="configuration",
            )


def check_resource(field: str, used: str) -> None:
    """Raise BadInput unless it is CLASS or CLASS/MODEL."""
    of_class, slash, model = used.partition("/")
    check_name(field, of_class)
    if slash:
        check_name(field, model)


# Advice of operators on jobs that ask for more than a place: start none for now, or wait between starts.
#
# It is for one resource class or for all such jobs, and ends by itself if it was given for a time.


#: Seconds: the longest delay, and the longest time that advice is given for (a year).
MAX_DELAY, MAX_TIME = 3600.0, 31_536_000.0
#: Of advice that is for all jobs.
ALL_CLASSES = ""

#: The condition that there is any, for a statement that runs anyway.
ANY_ADVICE = "EXISTS (SELECT FROM backpressure)"
IN_FORCE = "(until IS NULL OR until > now())"
READ_ADVICE = text(f"SELECT resource_class, allowed, delay FROM backpressure WHERE {IN_FORCE}")
_LIST_ADVICE = text(f"SELECT * FROM backpressure WHERE {IN_FORCE} ORDER BY resource_class")
_DELETE_EXPIRED_ADVICE = text("DELETE FROM backpressure WHERE until <= now()")
_PUT_ADVICE = text("""
INSERT INTO backpressure (resource_class, allowed, delay, until)
VALUES (:resource_class, :allowed, :delay, clock_timestamp() + make_interval(secs => :seconds))
ON CONFLICT (resource_class)
DO UPDATE SET allowed = EXCLUDED.allowed, delay = EXCLUDED.delay, until = EXCLUDED.until
""")
_REMOVE_ADVICE = text("DELETE FROM backpressure WHERE resource_class = :resource_class RETURNING allowed, delay")


@dataclass(frozen=True)
class Advice:
    """`allowed`: whether jobs may start; `delay`: seconds that each assigner waits after it has started some."""

    allowed: bool
    delay: float = 0.0


@dataclass(frozen=True)
class AdviceInForce:
    """One row for an operator. `resource_class` None is all jobs; `until` None is until it is taken back."""

    resource_class: str | None
    allowed: bool
    delay: float
    until: datetime | None


def read_advice(connection: Connection) -> dict[str, Advice]:
    """What is advised now, by resource class, '' for all."""
    return {row.resource_class: Advice(row.allowed, row.delay) for row in connection.execute(READ_ADVICE)}


def advice_for(advice: Mapping[str, Advice], resource_class: str | None) -> Advice:
    """What is advised for a class: the stricter of its own advice and that for all."""
    found = [advice[name] for name in {ALL_CLASSES, resource_class or ALL_CLASSES} if name in advice]
    return Advice(all(each.allowed for each in found), max((each.delay for each in found), default=0.0))


def advise(
    connection: Connection,
    resource_class: str | None,
    *,
    allowed: bool,
    delay: float = 0.0,
    seconds: float | None = None,
    actor: str,
    reason: str = "",
) -> None:
    """Advise this for a class, or for all jobs that ask for more than a place, for so many seconds, or until it is
    taken back. Raises BadInput for what is out of range, or says nothing."""
    if resource_class is not None:
        check_name("resource_class", resource_class)
    if not 0 <= delay <= MAX_DELAY:
        raise BadInput("delay", f"must be between 0 and {MAX_DELAY:.0f}")
    if seconds is not None and not 0 < seconds <= MAX_TIME:
        raise BadInput("seconds", f"must be above 0 and at most {MAX_TIME:.0f}")
    if allowed and not delay:
        raise BadInput("delay", "must be above 0 where jobs may start")
    connection.execute(_DELETE_EXPIRED_ADVICE)
    values = {"resource_class": resource_class or ALL_CLASSES, "allowed": allowed, "delay": delay, "seconds": seconds}
    connection.execute(_PUT_ADVICE, values)
    details = {"allowed": allowed, "delay": delay, "seconds": seconds, "reason": reason}
    audit.write(connection, "backpressure.set", actor=actor, subject=_subject(resource_class), details=details)
    wake(connection, "jobs")


def withdraw_advice(connection: Connection, resource_class: str | None, *, actor: str, reason: str = "") -> None:
    """Advise nothing any more. Raises NotFound if nothing is advised."""
    connection.execute(_DELETE_EXPIRED_ADVICE)
    before = connection.execute(_REMOVE_ADVICE, {"resource_class": resource_class or ALL_CLASSES}).one_or_none()
    if before is None:
        whom = "all jobs" if resource_class is None else f"'{escaped(resource_class, 63)}'"
        raise NotFound(f"backpressure: nothing is advised for {whom}")
    details = {"before": {"allowed": before.allowed, "delay": before.delay}, "after": None, "reason": reason}
    audit.write(connection, "backpressure.rm", actor=actor, subject=_subject(resource_class), details=details)
    wake(connection, "jobs")


def advice_in_force(connection: Connection) -> list[AdviceInForce]:
    """All advice in force, that for all jobs first."""
    return [
        AdviceInForce(row.resource_class or None, row.allowed, row.delay, row.until)
        for row in connection.execute(_LIST_ADVICE)
    ]


def _subject(resource_class: str | None) -> str:
    return f"backpressure:{resource_class or '*'}"
