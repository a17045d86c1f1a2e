"""Limits by the beginning of a name: a pattern gives every lock of an instance, or every rate, its limit at first use.

A pattern is the beginning of a name and one `*` at its end, such as `customer-*` of locks, `api-*` of classes and
`api/*` of the models of a class. A limit that is set by the whole name wins; of several patterns the longest wins. A
pattern writes its limit into the counters and buckets that there are. `limited_by` of such a row is its prefix.

Two advisory locks, of locks and of rates, keep a row from being made with the limit of a pattern that changes
meanwhile. Operators wait for them before they lock any row. Who makes a row for a job tries them and waits for nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import NAME, check_name, escaped

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement

#: What stands for the rest of a name, at the end of a pattern.
STAR = "*"
#: Of a counter or a bucket: an operator has set its limit by its name.
BY_NAME = ""
#: Seconds for which nothing has used a counter or a bucket of a pattern before it is deleted (a day).
KEPT = 86_400.0

CHANGE_LOCKS = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.lock_patterns'))")
CHANGE_RATES = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.rate_patterns'))")
#: Whether buckets may be made: beside others who make some, whom one then waits for, or alone.
TRY_MAKE_BUCKETS = {
    True: Statement("SELECT pg_try_advisory_xact_lock_shared(hashtext('leasehold.rate_patterns'))"),
    False: Statement("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.rate_patterns'))"),
}

_FIND = Statement("SELECT most::double precision AS most, rate, burst FROM limit_patterns WHERE prefix = :prefix")
_PUT = Statement("""
INSERT INTO limit_patterns (prefix, most, rate, burst) VALUES (:prefix, :most, :rate, :burst)
ON CONFLICT (prefix) DO UPDATE SET most = EXCLUDED.most, rate = EXCLUDED.rate, burst = EXCLUDED.burst
""")
_REMOVE = Statement("DELETE FROM limit_patterns WHERE prefix = :prefix")

# Locks whose limit follows from patterns, once more by the patterns that there are now. Where none is left, one slot
# counts until nobody holds the lock.
_APPLY_TO_LOCKS = Statement("""
WITH locked AS MATERIALIZED (
    SELECT name FROM counters WHERE starts_with(name, :prefix) AND limited_by IS DISTINCT FROM ''
    ORDER BY name COLLATE "C" FOR NO KEY UPDATE
)
UPDATE counters c SET most = coalesce(p.most, 1), limited_by = p.prefix
FROM (SELECT name, limit_pattern(name) AS found FROM locked OFFSET 0) l CROSS JOIN LATERAL (SELECT (l.found).*) p
WHERE c.name = l.name AND (p.prefix IS NOT NULL OR c.limited_by IS NOT NULL)
""")
_LOCK_BUCKETS = """
WITH locked AS MATERIALIZED (
    SELECT name FROM rate_buckets WHERE starts_with(name, :prefix) AND limited_by IS NOT NULL
    ORDER BY name COLLATE "C" FOR NO KEY UPDATE
), found AS MATERIALIZED (
    SELECT l.name, (l.found).rate, (l.found).burst, (l.found).prefix
    FROM (SELECT name, limit_pattern(name) AS found FROM locked OFFSET 0) l
)"""
# A changed bucket keeps its tokens, up to the smaller burst.
_APPLY_TO_BUCKETS = Statement(f"""{_LOCK_BUCKETS}
UPDATE rate_buckets b SET rate = f.rate, burst = f.burst, limited_by = f.prefix, tokens = least(f.burst, b.burst,
        b.tokens + b.rate * greatest(extract(epoch FROM clock_timestamp() - b.refilled_at), 0)),
    refilled_at = greatest(b.refilled_at, clock_timestamp())
FROM found f WHERE b.name = f.name AND f.prefix IS NOT NULL
""")
_DROP_BUCKETS = Statement(f"""{_LOCK_BUCKETS}
DELETE FROM rate_buckets b USING found f WHERE b.name = f.name AND f.prefix IS NULL
""")

LOCK_LIMITS = Statement("""
SELECT name, most::double precision, prefix FROM matching_patterns(CAST(:names AS text[]))
""")

_OF_LOCKS = Statement("""
SELECT p.prefix, p.most::double precision AS most, count(c.name) AS keys,
    coalesce(sum(c.used), 0)::double precision AS used
FROM limit_patterns p LEFT JOIN counters c ON c.limited_by = p.prefix
WHERE p.prefix LIKE 'lock:%' GROUP BY p.prefix ORDER BY p.prefix COLLATE "C"
""")
_OF_RATES = Statement("""
SELECT p.prefix, p.rate, p.burst, count(b.name) AS keys
FROM limit_patterns p LEFT JOIN rate_buckets b ON b.limited_by = p.prefix
WHERE p.prefix LIKE 'rate:%' GROUP BY p.prefix ORDER BY p.prefix COLLATE "C"
""")

# Rows that somebody has locked are skipped, and a condition is tested once more on the newest version of a row. So what
# a job begins to use stays. A job that comes later makes the row anew, as it would be now: nobody holds such a lock,
# and such a bucket is full.
DELETE_IDLE_LOCKS = Statement("""
DELETE FROM counters WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM counters
    WHERE name LIKE 'lock:%' AND used = 0 AND limited_by IS DISTINCT FROM ''
        AND coalesce(charged_at, '-infinity') < now() - make_interval(secs => :age)
    LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
DELETE_IDLE_BUCKETS = Statement("""
DELETE FROM rate_buckets WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM rate_buckets
    WHERE limited_by IS NOT NULL AND refilled_at < now() - make_interval(secs => :age)
        AND tokens + rate * extract(epoch FROM now() - refilled_at) >= burst
    LIMIT :limit FOR UPDATE SKIP LOCKED))
""")


@dataclass(frozen=True)
class LockPattern:
    """The slots of each lock of an instance whose name matches. keys: how many such locks have been used lately; used:
    how many jobs hold them."""

    instance: str
    pattern: str
    slots: float
    keys: int
    used: float


@dataclass(frozen=True)
class RatePattern:
    """The rate of each class, or each model of a class, whose name matches; keys: how many have been used lately."""

    pattern: str
    per_second: float
    burst: int
    keys: int


def is_pattern(name: str) -> bool:
    """True if the text is meant as a pattern: it holds a star."""
    return STAR in name


def check(field: str, value: str) -> None:
    """Raise BadInput unless `value` is a name, or the beginning of one and a star."""
    if not is_pattern(value):
        check_name(field, value)
        return
    if value == STAR:
        raise BadInput(field, f"'{STAR}' alone would hold for every name: put the beginning of the names before it")
    if not value.endswith(STAR) or STAR in value[:-1]:
        raise BadInput(
            field, f"'{escaped(value, 80)}' has a '*' that is not its end: a pattern is such as 'customer-*'"
        )
    if not NAME.fullmatch(value[:-1]) or len(value) > 63:
        raise BadInput(
            field, f"'{escaped(value, 80)}' is no pattern: use a-z, 0-9, '.', '_', '-' before the '*', at most 62"
        )


def put_lock(
    connection: Connection, counter: str, most: float, *, actor: str, reason: str = "", note: bool = True
) -> None:
    """Give the locks whose counters match `counter`, a name with a star at its end, this many slots each.

    note: write the audit, and wake assigners; otherwise the caller does.
    """
    prefix = counter.removesuffix(STAR)
    connection.execute(CHANGE_LOCKS)
    connection.execute(_PUT, {"prefix": prefix, "most": most, "rate": None, "burst": None})
    connection.execute(_APPLY_TO_LOCKS, {"prefix": prefix})
    if note:
        _note(connection, "limit.set", counter, {"most": most, "reason": reason}, actor=actor)


def remove_lock(connection: Connection, counter: str, *, actor: str, reason: str = "") -> None:
    """Remove a pattern of locks. Raises NotFound if there is none."""
    prefix = counter.removesuffix(STAR)
    connection.execute(CHANGE_LOCKS)
    if not connection.execute(_REMOVE, {"prefix": prefix}).rowcount:
        raise NotFound(f"lock: '{escaped(counter.removeprefix('lock:').replace(':', '/'), 127)}' has no limit")
    connection.execute(_APPLY_TO_LOCKS, {"prefix": prefix})
    _note(connection, "limit.rm", counter, {"most": None, "reason": reason}, actor=actor)


def lock_slots(connection: Connection, counter: str) -> float | None:
    """Return the slots that a pattern of locks gives, by its counters' name with a star; None if there is none."""
    found = connection.execute(_FIND, {"prefix": counter.removesuffix(STAR)}).one_or_none()
    return None if found is None else found.most


def put_rate(
    connection: Connection, bucket: str, *, per_second: float, burst: int, actor: str, reason: str = ""
) -> None:
    """Give each bucket that matches `bucket`, a name with a star at its end, this rate."""
    prefix = bucket.removesuffix(STAR)
    connection.execute(CHANGE_RATES)
    before = connection.execute(_FIND, {"prefix": prefix}).one_or_none()
    connection.execute(_PUT, {"prefix": prefix, "most": None, "rate": per_second, "burst": burst})
    connection.execute(_APPLY_TO_BUCKETS, {"prefix": prefix})
    known = None if before is None else {"per_second": before.rate, "burst": before.burst}
    details = {"before": known, "after": {"per_second": per_second, "burst": burst}, "reason": reason}
    _note(connection, "rate.set", bucket, details, actor=actor)


def remove_rate(connection: Connection, bucket: str, *, actor: str, reason: str = "") -> None:
    """Remove a pattern of rates, with the buckets that have their rate from no other. Raises NotFound."""
    prefix = bucket.removesuffix(STAR)
    connection.execute(CHANGE_RATES)
    before = connection.execute(_FIND, {"prefix": prefix}).one_or_none()
    if before is None:
        raise NotFound(f"rate: '{escaped(bucket.removeprefix('rate:'), 127)}' has none")
    connection.execute(_REMOVE, {"prefix": prefix})
    connection.execute(_APPLY_TO_BUCKETS, {"prefix": prefix})
    connection.execute(_DROP_BUCKETS, {"prefix": prefix})
    details = {"before": {"per_second": before.rate, "burst": before.burst}, "after": None, "reason": reason}
    _note(connection, "rate.rm", bucket, details, actor=actor)


def _note(connection: Connection, action: str, subject: str, details: dict[str, Any], *, actor: str) -> None:
    audit.write(connection, action, actor=actor, subject=subject, details=details)
    wake(connection, "jobs")


def lock_limits(connection: Connection, names: Sequence[str]) -> dict[str, tuple[float, str]]:
    """Return the slots and the prefix of the pattern for those of these counters of locks that a pattern gives them."""
    if not names:
        return {}
    return {name: (most, prefix) for name, most, prefix in connection.execute(LOCK_LIMITS, {"names": list(names)})}


def lock_patterns(connection: Connection) -> list[LockPattern]:
    """Every pattern of locks, ordered by instance and name."""
    found = []
    for row in connection.execute(_OF_LOCKS):
        _, instance, begin = row.prefix.split(":")
        found.append(LockPattern(instance, begin + STAR, row.most, row.keys, row.used))
    return found


def rate_patterns(connection: Connection) -> list[RatePattern]:
    """Every pattern of rates, ordered by name."""
    return [
        RatePattern(row.prefix.removeprefix("rate:") + STAR, row.rate, row.burst, row.keys)
        for row in connection.execute(_OF_RATES)
    ]


def pattern_of(prefix: str) -> str:
    """Return the pattern as operators write it, of the prefix of a counter's or bucket's name."""
    return prefix.rpartition(":")[2] + STAR


def delete_idle(connection: Connection, *, age: float, limit: int) -> int:
    """Delete up to `limit` counters, and as many buckets, that no operator has set by name and that nothing has used
    for `age` seconds; returns the larger number."""
    values = {"age": age, "limit": limit}
    return max(connection.execute(each, values).rowcount for each in (DELETE_IDLE_LOCKS, DELETE_IDLE_BUCKETS))
