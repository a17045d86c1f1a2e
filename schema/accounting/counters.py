"""Counters: how much of something is in use, and how much of it may be.

A counter is taken from in the transaction that grants a lease, up to its limit, and given back in the one that ends the
lease, whoever ends it. Its name says what it counts: `instance:NAME:jobs` live leases, `instance:NAME:cost` what was
used within the rolling window and what is reserved for live leases, `lock:NAME` who holds a lock. They are locked after
quotas, in the order of their names.
"""

import json
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import NamedTuple

from sqlalchemy import Connection, text

from schema import audit
from schema.errors import BadInput, NotFound
from schema.postgres.notify import wake
from schema.predicates import CONSTRAINED, HEALTHY, READY
from schema.validation import check_name, escaped

READ = text("""
SELECT name, used::double precision, most::double precision FROM counters WHERE name = ANY (CAST(:names AS text[]))
""")
# What was taken for a lease before, when room was reserved for it, is not taken again. Jobs of one queue take of the
# same counters, and mostly as much: that comes once.
NOTE = text("""
WITH kinds AS MATERIALIZED (
    SELECT k.nth, ARRAY(SELECT jsonb_array_elements_text(k.taken->0)) AS names,
        CAST(ARRAY(SELECT jsonb_array_elements_text(k.taken->1)) AS numeric[]) AS amounts
    FROM jsonb_array_elements(CAST(:kinds AS jsonb)) WITH ORDINALITY AS k (taken, nth)
)
INSERT INTO charges (job_id, fence, names, amounts)
SELECT c.job_id, c.fence, k.names, k.amounts
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:of_kind AS integer[]))
    AS c (job_id, fence, kind)
JOIN kinds k ON k.nth = c.kind
WHERE NOT EXISTS (SELECT FROM charges d WHERE d.job_id = c.job_id AND d.fence = c.fence OFFSET 0)
RETURNING job_id
""")
TAKE = text("SELECT charge(CAST(:names AS text[]), CAST(:amounts AS numeric[]), :may_overshoot)")
CHARGES_OF = text("""
SELECT t.name, t.amount FROM charges c CROSS JOIN LATERAL unnest(c.names, c.amounts) AS t (name, amount)
WHERE c.job_id = :job_id
""")
SETTLE = text("SELECT settle(CAST(:spent AS jsonb))")
LIMIT = text("""
INSERT INTO counters (name, most) VALUES (:name, :most) ON CONFLICT (name) DO UPDATE SET most = :most
""")
ROLL = text("SELECT roll_usage(:window, :limit)")

# How busy the healthy bots are in a minute in which jobs are ready; whoever comes first says so.
SAMPLE = text(f"""
INSERT INTO usage (name, bucket, amount, rolled)
SELECT s.name, date_trunc('minute', clock_timestamp()), s.units, true
FROM (SELECT sum(in_use) AS busy, sum(capacity) AS available FROM bots WHERE {HEALTHY.of(bot="")}) b
CROSS JOIN LATERAL (VALUES ('pool:busy', b.busy), ('pool:available', b.available)) AS s (name, units)
WHERE s.units IS NOT NULL AND (EXISTS (SELECT FROM jobs WHERE {READY}) OR EXISTS (SELECT FROM jobs WHERE {CONSTRAINED}))
ON CONFLICT (name, bucket) DO NOTHING
""")


@dataclass(slots=True)
class Counter:
    """How much of it is in use, and how much may be, None for any amount. A working copy counts in it."""

    used: float = 0.0
    most: float | None = None

    def leaves(self, amount: float) -> bool:
        """Whether so much more may be taken. A limit that is reached is closed also to what takes nothing."""
        return self.most is None or (self.used < self.most and self.used + amount <= self.most)


class Charge(NamedTuple):
    """What one lease takes of counters: amounts by their names."""

    job_id: int
    fence: int
    amounts: Mapping[str, float]


@dataclass(frozen=True)
class Settlement:
    """One lease that is over. `usage`: what its bot says it has used, by unit; `seconds`: how long it ran, None if
    nobody says; `final`: its job will not run again."""

    job_id: int
    fence: int
    usage: Mapping[str, float]
    seconds: float | None
    final: bool


def instance_counter(name: str, what: str) -> str:
    """The name of the counter of `what` (jobs, cost, slots) an instance has."""
    return f"instance:{name}:{what}"


def lock_counter(instance: str, lock: str) -> str:
    """The name of the counter of an instance's lock."""
    return f"lock:{instance}:{lock}"


def read(connection: Connection, names: Sequence[str]) -> dict[str, Counter]:
    """Those of the counters that exist, by name."""
    if not names:
        return {}
    rows = connection.execute(READ, {"names": list(names)})
    return {name: Counter(used, most) for name, used, most in rows}


def charges_of(connection: Connection, job_id: int) -> dict[str, float]:
    """What has been taken for the job's lease, or for one that room is reserved for."""
    return {row.name: float(row.amount) for row in connection.execute(CHARGES_OF, {"job_id": job_id})}


def take(connection: Connection, charges: Sequence[Charge], *, may_overshoot: bool = False) -> None:
    """Take what these leases need, all of it. Of a cost of which anything is left, the last one of them `may_overshoot`
    the limit.

    If a limit was reached since it was looked at, the transaction has to begin anew: raises DBAPIError with the
    SQLSTATE of a serialization failure, which `Database.run` repeats.
    """
    taking = [charge for charge in charges if charge.amounts]
    if not taking:
        return
    # Those that take the same mostly do so as one object.
    kinds: dict[int, tuple[int, Mapping[str, float]]] = {}
    for charge in taking:
        kinds.setdefault(id(charge.amounts), (len(kinds) + 1, charge.amounts))
    noted = connection.execute(
        NOTE,
        {
            "kinds": json.dumps([[list(amounts), list(amounts.values())] for _, amounts in kinds.values()]),
            "job_ids": [charge.job_id for charge in taking],
            "fences": [charge.fence for charge in taking],
            "of_kind": [kinds[id(charge.amounts)][0] for charge in taking],
        },
    )
    ids = set(noted.scalars().all())
    new = [charge.amounts for charge in taking if charge.job_id in ids]
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for kind, times in Tally(map(id, new)).items():
        for name, amount in kinds[kind][1].items():
            sums[name] += times * _exact(amount)
    last: dict[str, Decimal] = {}
    if may_overshoot:
        # The last one comes apart from the others, because it alone may.
        for amounts in new:
            last |= {name: _exact(amount) for name, amount in amounts.items()}
    parts = [*((name, amount - last.get(name, 0)) for name, amount in sums.items()), *last.items()]
    if parts:
        names, totals = zip(*parts, strict=True)
        connection.execute(TAKE, {"names": list(names), "amounts": list(totals), "may_overshoot": may_overshoot})


def _exact(amount: float) -> Decimal:
    """As it is written, so that sums are what the database makes of them."""
    return Decimal(repr(amount))


def settle(connection: Connection, spent: Sequence[Settlement]) -> None:
    """Give back what these leases have taken, once. Of a cost, what was used stays counted until it is older than the
    window: what the bot said of the unit in which its instance counts, or the estimate if its job has ended and nobody
    said."""
    if spent:
        connection.execute(SETTLE, {"spent": json.dumps([asdict(each) for each in spent])})


def limit(connection: Connection, name: str, most: float | None) -> None:
    """Set how much of it there may be in use; what is in use above that stays."""
    connection.execute(LIMIT, {"name": name, "most": most})


def roll(connection: Connection, *, window: float, limit: int) -> int:
    """Forget up to `limit` minutes of usage older than `window` seconds; returns how many."""
    return int(connection.execute(ROLL, {"window": window, "limit": limit}).scalar_one())


def sample(connection: Connection) -> None:
    """Note how busy the pool is in this minute, if jobs are ready and nobody has noted it yet."""
    connection.execute(SAMPLE)


# Limits of counters that operators set by name: of classes, of owners and projects of an instance, of its locks.


#: The largest cost, and the largest number of jobs, that a limit may be.
MAX_COST, MAX_JOBS = 1e12, 1_000_000_000

# Names hold no colon, so that each part of a counter's name is one of the parts by which operators name it.
_LIST = text("""
SELECT name, used::double precision, most::double precision FROM counters
WHERE name LIKE :pattern AND (most IS NOT NULL OR :unlimited) ORDER BY name COLLATE "C"
""")
_HELD = text("SELECT most::double precision FROM counters WHERE name = :name FOR NO KEY UPDATE")


@dataclass(frozen=True)
class Kind:
    """What is limited. `noun`: in sentences. `first`, `last`: around the names in that of the counter.
    `unnamed`: the limit of one that nobody has set; None = any amount."""

    noun: str
    first: str
    names: int
    last: str = ""
    unnamed: float | None = None

    def counter(self, names: Sequence[str]) -> str:
        """The counter of what has these names."""
        return ":".join([self.first, *names, *([self.last] if self.last else [])])

    def named(self, counter: str) -> tuple[str, ...]:
        """The names in that of a counter."""
        return tuple(counter.split(":")[1 : 1 + self.names])


JOBS_OF_CLASS = Kind("class", "class", 1, "jobs")
COST_OF_OWNER = Kind("owner", "owner", 2, "cost")
COST_OF_PROJECT = Kind("project", "project", 2, "cost")
#: A lock has one slot unless it is given more.
SLOTS_OF_LOCK = Kind("lock", "lock", 2, unnamed=1.0)


@dataclass(frozen=True)
class CounterLimit:
    """How much of something is in use, with what is reserved for what runs, and how much may be; None = any amount."""

    names: tuple[str, ...]
    used: float
    most: float | None


def limits(connection: Connection, kind: Kind) -> list[CounterLimit]:
    """Every limit of a kind, by name; of locks also those that jobs have used without one."""
    pattern = kind.counter(["%"] * kind.names)
    rows = connection.execute(_LIST, {"pattern": pattern, "unlimited": kind.unnamed is not None})
    return [CounterLimit(kind.named(row.name), row.used, row.most) for row in rows]


def set_limit(
    connection: Connection, kind: Kind, names: Sequence[str], most: float | None, *, actor: str, reason: str = ""
) -> None:
    """Limit what has these names; None = any amount. What is in use above the limit stays. Raises BadInput."""
    for name in names:
        check_name("name", name)
    if most is not None and not 0 <= most <= MAX_COST:
        raise BadInput("limit", f"must be between 0 and {MAX_COST:g}")
    _write(connection, kind.counter(names), most, "limit.set", actor=actor, reason=reason)


def remove_limit(connection: Connection, kind: Kind, names: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Limit it no more than what nobody has set a limit for. Raises NotFound if nobody has."""
    counter = kind.counter(names)
    held = connection.execute(_HELD, {"name": counter}).one_or_none()
    if held is None or held.most == kind.unnamed:
        raise NotFound(f"{kind.noun}: '{escaped('/'.join(names), 127)}' has no limit")
    _write(connection, counter, kind.unnamed, "limit.rm", actor=actor, reason=reason)


def _write(connection: Connection, counter: str, most: float | None, action: str, *, actor: str, reason: str) -> None:
    limit(connection, counter, most)
    audit.write(connection, action, actor=actor, subject=counter, details={"most": most, "reason": reason})
    wake(connection, "jobs")
