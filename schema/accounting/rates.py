"""Rates of starts per resource class or model, and backpressure: advice to start fewer constrained jobs.

A rate is a token bucket that all assigners share. Its fill is computed from database time whenever it is read. A grant
takes one token from the bucket of its class and one from that of its model, where they exist, in its own transaction.
So no span of s seconds contains more than burst + rate x s grants. Buckets are locked before quotas, in the order of
their names. An assigner locks them once it has chosen bots, and then grants only as many jobs as there are tokens for.

Backpressure is advice of an operator: start no constrained jobs, or pause between starts. It applies to one resource
class or to all constrained jobs, and it may end after a given time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field

from schema import audit, declarations
from schema.accounting import limit_patterns
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.validation import NAME, YEAR, check_name

#: The largest rate, jobs per second, and the largest burst, jobs.
MAX_RATE, MAX_BURST = 1e6, 1_000_000
#: The lowest rate, one start in 31 years: PostgreSQL refuses products of doubles that are too small to be told from 0.
MIN_RATE = 1e-9
#: Seconds for which tokens may gather, so that a fast bucket is not read for each single token.
GATHER_SECONDS = 0.1

PREFIX = "rate:"
_BEGIN = "[a-z0-9][a-z0-9._-]{0,61}"

_FILLED = "least(burst, tokens + rate * extract(epoch FROM now() - refilled_at))"
# What is read before the buckets are locked is a guess, so seconds may be doubles, which take less time.
READ_BUCKETS = Statement("""
SELECT name, rate, burst, least(burst, tokens + rate * date_part('epoch', now() - refilled_at)) AS tokens, limited_by
FROM rate_buckets WHERE name = ANY (CAST(:names AS text[]))
""")
# A bucket that a pattern will make is full.
_READ_PATTERNS = Statement("""
SELECT name, rate, burst, CAST(burst AS double precision) AS tokens, prefix, true AS missing
FROM matching_patterns(CAST(:names AS text[])) WHERE rate IS NOT NULL
""")
# It is full at the beginning of this transaction, at which jobs that start count as started.
_MAKE_BUCKETS = Statement("""
INSERT INTO rate_buckets (name, rate, burst, tokens, refilled_at, limited_by)
SELECT name, rate, burst, burst, now(), prefix FROM matching_patterns(CAST(:names AS text[])) WHERE rate IS NOT NULL
ORDER BY name COLLATE "C" ON CONFLICT (name) DO NOTHING RETURNING name, tokens
""")
_LOCK_BUCKETS = f"""
SELECT name, {_FILLED} AS tokens FROM rate_buckets WHERE name = ANY (CAST(:names AS text[]))
ORDER BY name COLLATE "C" FOR NO KEY UPDATE"""
LOCK_BUCKETS = {True: Statement(_LOCK_BUCKETS), False: Statement(f"{_LOCK_BUCKETS} SKIP LOCKED")}
DRAW_TOKENS = Statement("SELECT draw(CAST(:names AS text[]), CAST(:jobs AS integer[]))")
_FOLLOW_CLOCK = Statement("""
UPDATE rate_buckets SET refilled_at = now() WHERE name = ANY (ARRAY(
    SELECT name FROM rate_buckets WHERE refilled_at > now() ORDER BY name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED))
""")
_FOUND_RATES = Statement("""
SELECT name, rate, burst FROM rate_buckets WHERE name = ANY (CAST(:names AS text[])) AND limited_by IS NULL
ORDER BY name COLLATE "C" FOR NO KEY UPDATE
""")
# A new bucket is full. A changed bucket keeps its tokens, up to the smaller burst.
_PUT_RATES = Statement("""
INSERT INTO rate_buckets AS b (name, rate, burst, tokens)
SELECT w.name, w.rate, w.burst, w.burst
FROM unnest(CAST(:names AS text[]), CAST(:rates AS double precision[]), CAST(:bursts AS integer[]))
    AS w (name, rate, burst)
ORDER BY w.name COLLATE "C"
ON CONFLICT (name) DO UPDATE SET rate = EXCLUDED.rate, burst = EXCLUDED.burst,
    tokens = least(EXCLUDED.burst, b.burst,
        b.tokens + b.rate * greatest(extract(epoch FROM clock_timestamp() - b.refilled_at), 0)),
    refilled_at = greatest(b.refilled_at, clock_timestamp()), limited_by = NULL
""")
_REMOVE_RATES = Statement("""
WITH held AS MATERIALIZED (
    SELECT name FROM rate_buckets WHERE name = ANY (CAST(:names AS text[])) AND limited_by IS NULL
    ORDER BY name COLLATE "C" FOR UPDATE
)
DELETE FROM rate_buckets b USING held h WHERE b.name = h.name RETURNING b.name, b.rate, b.burst
""")
_LIST_RATES = Statement(f"""
SELECT name, rate, burst, greatest({_FILLED}, 0) AS tokens, limited_by FROM rate_buckets
WHERE limited_by IS NULL OR name = :name ORDER BY name COLLATE "C"
""")


class Bucket(NamedTuple):
    """The state of a token bucket.

    rate: tokens per second. burst: the most tokens it holds. tokens: what it holds now. limited_by: the prefix of the
    pattern that gives it its rate; None = it has it by its name. missing: the pattern has to make it first.
    """

    rate: float
    burst: int
    tokens: float
    limited_by: str | None = None
    missing: bool = False

    def minus(self, tokens: float) -> "Bucket":
        """The bucket after `tokens` have been taken out."""
        return self._replace(tokens=self.tokens - tokens)

    @property
    def due(self) -> float:
        """Seconds until the bucket should be read again.

        By then it holds one token, or those of `GATHER_SECONDS` if they are more, but at most half of the burst.
        """
        return max(0.0, (self._tokens_awaited - self.tokens) / self.rate)

    @property
    def slack(self) -> float:
        """Seconds by which that read may be late before the bucket is full and tokens are lost."""
        return (self.burst - self._tokens_awaited) / self.rate

    @property
    def _tokens_awaited(self) -> float:
        return max(1.0, min(self.burst / 2, self.rate * GATHER_SECONDS))


@dataclass(frozen=True)
class Rate:
    """One rate as an operator sees it: jobs per second, burst in jobs, and the tokens it holds now.

    pattern: that gives it its rate; None = it is set by its name.
    """

    resource: str
    per_second: float
    burst: int
    tokens: float
    pattern: str | None = None


class RateTerms(NamedTuple):
    """How fast jobs may start: on average per second, and at once after a quiet time."""

    per_second: float
    burst: int


class RateSettings(BaseModel):
    """How fast jobs of one resource class, or of one model of it, may start.

    resource: CLASS or CLASS/MODEL. Jobs of a model also count for its class. A pattern such as `api-*` or `api/*`
        stands for every class, or model of a class, whose name begins so; each has a rate of its own.
    per_second: average starts per second; unset removes the rate. Doubling it doubles throughput.
    burst: starts at once after a quiet time. Doubling it doubles the number of starts that one second may have beyond
        the rate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    resource: str = Field(
        pattern=rf"^({NAME.pattern}(/{NAME.pattern})?|({NAME.pattern}/)?{_BEGIN}\*|{NAME.pattern}/\*)$"
    )
    per_second: float | None = Field(default=None, ge=MIN_RATE, le=MAX_RATE)
    burst: int = Field(default=1, ge=1, le=MAX_BURST)


def resource_of(constraints: Mapping[str, Any]) -> str | None:
    """The resource that a job with these constraints uses: CLASS, CLASS/MODEL, or None."""
    of_class, model = constraints.get("resource_class"), constraints.get("model")
    return of_class if of_class is None or model is None else f"{of_class}/{model}"


def bucket_names(constraints: Mapping[str, Any]) -> list[str]:
    """The names of the buckets that jobs with these constraints draw from, if they exist."""
    of_class, model = constraints.get("resource_class"), constraints.get("model")
    if of_class is None:
        return []
    return [PREFIX + of_class] if not model else [PREFIX + of_class, f"{PREFIX}{of_class}/{model}"]


def read_buckets(connection: Connection, wanted: Sequence[str]) -> dict[str, Bucket]:
    """The wanted buckets that exist, or that a pattern will make, by name, as they are when this transaction begins."""
    if not wanted:
        return {}
    found = {name: Bucket(*bucket) for name, *bucket in connection.execute(READ_BUCKETS, {"names": list(wanted)})}
    if missing := [name for name in wanted if name not in found]:
        found |= {name: Bucket(*bucket) for name, *bucket in connection.execute(_READ_PATTERNS, {"names": missing})}
    return found


def lock_buckets(
    connection: Connection, wanted: Sequence[str], *, missing: Sequence[str], wait: bool
) -> dict[str, float]:
    """Lock the wanted buckets that exist until this transaction ends; returns what each holds now, in tokens.

    missing: those of them that a pattern has to make first. None is made while an operator changes a rate, and without
    `wait` while another assigner makes some.
    wait: wait for buckets that another transaction has locked or is making. Without it they are left out, which is
    right for a transaction that may hold locks on quotas, because to wait out of order could deadlock. All make buckets
    in the order of names, before they lock any, so that nobody who waits for one keeps its maker waiting.
    """
    made: dict[str, float] = {}
    if missing and connection.execute(limit_patterns.TRY_MAKE_BUCKETS[wait]).scalar_one():
        made = dict(connection.execute(_MAKE_BUCKETS, {"names": list(missing)}).all())
    # Nobody else sees what this transaction has made.
    others = [name for name in wanted if name not in made]
    found = connection.execute(LOCK_BUCKETS[wait], {"names": others}).all() if others else []
    return made | {name: float(tokens) for name, tokens in found}


def draw_tokens(connection: Connection, wanted: Mapping[str, int]) -> None:
    """Take these numbers of tokens from the buckets that exist, for jobs granted in this transaction.

    If a bucket that the caller has not locked holds fewer tokens, raises psycopg.Error with the SQLSTATE of a
    serialization failure, so that `Database.run` repeats the transaction.
    """
    if wanted:
        connection.execute(DRAW_TOKENS, {"names": [*wanted], "jobs": [*wanted.values()]})


def follow_clock(connection: Connection) -> None:
    """The clock was set back: let buckets fill from now on, and not only once it has come to where it was."""
    connection.execute(_FOLLOW_CLOCK)


def set_rates(connection: Connection, wanted: Mapping[str, RateTerms], *, actor: str, reason: str = "") -> None:
    """Limit the starts of jobs of each CLASS or CLASS/MODEL to its rate.

    A pattern such as `api-*` limits each class, or each model of a class, whose name begins so. It takes as many
    statements for many as for one, but that each pattern has its own. Raises BadInput for a malformed name or a value
    out of range.
    """
    for used, terms in wanted.items():
        check_resource("resource", used)
        if not MIN_RATE <= terms.per_second <= MAX_RATE:
            raise BadInput("per_second", f"must be from {MIN_RATE:g} to {MAX_RATE:.0f}")
        if not 1 <= terms.burst <= MAX_BURST:
            raise BadInput("burst", f"must be between 1 and {MAX_BURST}")
    named = {PREFIX + used: terms for used, terms in wanted.items()}
    for name in filter(limit_patterns.is_pattern, list(named)):
        limit_patterns.put_rate(connection, name, **named.pop(name)._asdict(), actor=actor, reason=reason)
    if not named:
        return
    connection.execute(limit_patterns.CHANGE_RATES)
    before = {row.name: RateTerms(row.rate, row.burst)._asdict()
              for row in connection.execute(_FOUND_RATES, {"names": list(named)})}  # fmt: skip
    rates, bursts = zip(*named.values(), strict=True)
    connection.execute(_PUT_RATES, {"names": list(named), "rates": list(rates), "bursts": list(bursts)})
    noted = {
        name: {"before": before.get(name), "after": terms._asdict(), "reason": reason} for name, terms in named.items()
    }
    audit.write_all(connection, "rate.set", noted, actor=actor)
    wake(connection, "jobs")


def remove_rates(connection: Connection, wanted: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Remove the rates of these, which are names or patterns. Raises NotFound if one of them has none."""
    named = [PREFIX + used for used in wanted if not limit_patterns.is_pattern(used)]
    for used in filter(limit_patterns.is_pattern, wanted):
        limit_patterns.remove_rate(connection, PREFIX + used, actor=actor, reason=reason)
    if not named:
        return
    before = {row.name: RateTerms(row.rate, row.burst)._asdict()
              for row in connection.execute(_REMOVE_RATES, {"names": named})}  # fmt: skip
    for name in named:
        if name not in before:
            raise NotFound(f"rate: '{escaped(name.removeprefix(PREFIX), 127)}' has none")
    noted = {name: {"before": before[name], "after": None, "reason": reason} for name in named}
    audit.write_all(connection, "rate.rm", noted, actor=actor)
    wake(connection, "jobs")


def rates(connection: Connection, *, used: str | None = None) -> list[Rate]:
    """Every rate that is set by name, ordered by name, and with them that of `used`, which may be of a pattern."""
    return [
        Rate(
            row.name.removeprefix(PREFIX),
            row.rate,
            row.burst,
            round(float(row.tokens), 3),
            None if row.limited_by is None else limit_patterns.pattern_of(row.limited_by),
        )
        for row in connection.execute(_LIST_RATES, {"name": None if used is None else PREFIX + used})
    ]


def declare(connection: Connection, wanted: Sequence[RateSettings], *, actor: str) -> None:
    """Store the rates of the configuration. Other resources keep theirs."""
    declarations.replace(connection, "rate", (each.resource for each in wanted))
    patterns = limit_patterns.rate_patterns(connection)
    known = {each.resource: (each.per_second, each.burst) for each in rates(connection)}
    known |= {each.pattern: (each.per_second, each.burst) for each in patterns}
    terms = {each.resource: each.per_second and RateTerms(each.per_second, each.burst)
             for each in sorted(wanted, key=lambda one: one.resource)}  # fmt: skip
    gone = [used for used, rate in terms.items() if rate is None and used in known]
    remove_rates(connection, gone, actor=actor, reason="configuration")
    changed = {used: rate for used, rate in terms.items() if rate and known.get(used) != rate}
    set_rates(connection, changed, actor=actor, reason="configuration")


def check_resource(field: str, used: str) -> None:
    """Raise BadInput unless `used` is CLASS, CLASS/MODEL, or the beginning of one and a star."""
    of_class, slash, model = used.partition("/")
    if not slash:
        limit_patterns.check(field, of_class)
        return
    if limit_patterns.is_pattern(of_class):
        raise BadInput(field, f"'{escaped(used, 80)}' has a '*' that is not its end: a pattern is such as 'api/*'")
    check_name(field, of_class)
    if model != limit_patterns.STAR:
        limit_patterns.check(field, model)


# Backpressure.


#: The longest delay, and the longest time for which advice may be given (a year), both in seconds.
MAX_DELAY = 3600.0
#: The stored resource class of advice for all constrained jobs.
ALL_CLASSES = ""

#: The condition that any advice is stored, for use inside another statement.
ANY_ADVICE = "EXISTS (SELECT FROM backpressure)"
IN_FORCE = "(until IS NULL OR until > now())"
READ_ADVICE = Statement(f"SELECT resource_class, allowed, delay FROM backpressure WHERE {IN_FORCE}")
_LIST_ADVICE = Statement(f"SELECT * FROM backpressure WHERE {IN_FORCE} ORDER BY resource_class")
_DELETE_EXPIRED_ADVICE = Statement("DELETE FROM backpressure WHERE until <= now()")
_PUT_ADVICE = Statement("""
INSERT INTO backpressure (resource_class, allowed, delay, until)
VALUES (:resource_class, :allowed, :delay, clock_timestamp() + make_interval(secs => :seconds))
ON CONFLICT (resource_class)
DO UPDATE SET allowed = EXCLUDED.allowed, delay = EXCLUDED.delay, until = EXCLUDED.until
""")
_REMOVE_ADVICE = Statement("DELETE FROM backpressure WHERE resource_class = :resource_class RETURNING allowed, delay")


@dataclass(frozen=True)
class Advice:
    """Advice on starts. allowed: jobs may start. delay: seconds that each assigner pauses after each start."""

    allowed: bool
    delay: float = 0.0


@dataclass(frozen=True)
class AdviceInForce:
    """One piece of advice as an operator sees it.

    resource_class: None = all constrained jobs. until: None = until it is withdrawn. delay: in seconds.
    """

    resource_class: str | None
    allowed: bool
    delay: float
    until: datetime | None


def read_advice(connection: Connection) -> dict[str, Advice]:
    """The advice in force, by resource class; the key '' is for all constrained jobs."""
    return {row.resource_class: Advice(row.allowed, row.delay) for row in connection.execute(READ_ADVICE)}


def advised_as(resource_class: str | None) -> set[str]:
    """What advice for jobs of a class is stored as: for the class, and for all jobs."""
    return {ALL_CLASSES, resource_class or ALL_CLASSES}


def advice_for(advice: Mapping[str, Advice], resource_class: str | None) -> Advice:
    """The advice for a class: the stricter of its own and that for all constrained jobs."""
    found = [advice[name] for name in advised_as(resource_class) if name in advice]
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
    """Store advice for a resource class, or with None for all constrained jobs.

    It is in force for `seconds`, or with None until it is withdrawn. Raises BadInput for a value out of range, and for
    advice that allows starts without a delay.
    """
    if resource_class is not None:
        check_name("resource_class", resource_class)
    if not 0 <= delay <= MAX_DELAY:
        raise BadInput("delay", f"must be between 0 and {MAX_DELAY:.0f}")
    if seconds is not None and not 0 < seconds <= YEAR:
        raise BadInput("seconds", f"must be above 0 and at most {YEAR:.0f}")
    if allowed and not delay:
        raise BadInput("delay", "must be above 0 where jobs may start")
    connection.execute(_DELETE_EXPIRED_ADVICE)
    values = {"resource_class": resource_class or ALL_CLASSES, "allowed": allowed, "delay": delay, "seconds": seconds}
    connection.execute(_PUT_ADVICE, values)
    details = {"allowed": allowed, "delay": delay, "seconds": seconds, "reason": reason}
    audit.write(connection, "backpressure.set", actor=actor, subject=_subject(resource_class), details=details)
    wake(connection, "jobs")


def withdraw_advice(connection: Connection, resource_class: str | None, *, actor: str, reason: str = "") -> None:
    """Withdraw the advice for a resource class, or with None that for all. Raises NotFound if there is none."""
    connection.execute(_DELETE_EXPIRED_ADVICE)
    before = connection.execute(_REMOVE_ADVICE, {"resource_class": resource_class or ALL_CLASSES}).one_or_none()
    if before is None:
        whom = "all jobs" if resource_class is None else f"'{escaped(resource_class, 63)}'"
        raise NotFound(f"backpressure: nothing is advised for {whom}")
    details = {"before": {"allowed": before.allowed, "delay": before.delay}, "after": None, "reason": reason}
    audit.write(connection, "backpressure.rm", actor=actor, subject=_subject(resource_class), details=details)
    wake(connection, "jobs")


def advice_in_force(connection: Connection) -> list[AdviceInForce]:
    """All advice in force, that for all constrained jobs first."""
    return [
        AdviceInForce(row.resource_class or None, row.allowed, row.delay, row.until)
        for row in connection.execute(_LIST_ADVICE)
    ]


def _subject(resource_class: str | None) -> str:
    return f"backpressure:{resource_class or '*'}"
