"""Counters: how much of something is in use, and how much of it may be.

A counter is taken from in the transaction that grants a lease, up to its limit, and given back in the one that ends the
lease, whoever ends it. Its name says what it counts: `instance:NAME:jobs` live leases, `instance:NAME:cost` what was
used within the rolling window and what is reserved for live leases, `lock:NAME` who holds a lock. They are locked after
quotas, in the order of their names.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, text

from schema.gates import GATED, HEALTHY, READY

#: What a cost counter's name ends with: what its leases have taken is an estimate, which what they used replaces.
COST = ":cost"

READ = text("SELECT name, used, most FROM counters WHERE name = ANY (CAST(:names AS text[]))")
# What was taken for a lease before, when room was reserved for it, is not taken again.
TAKE = text("""
WITH wanted AS MATERIALIZED (
    SELECT w.* FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:names AS text[]),
                           CAST(:amounts AS numeric[])) WITH ORDINALITY AS w (job_id, fence, name, amount, nth)
    WHERE NOT EXISTS (SELECT FROM charges c WHERE c.job_id = w.job_id AND c.fence = w.fence)
), taken AS (
    INSERT INTO charges (job_id, fence, names, amounts)
    SELECT job_id, fence, array_agg(name ORDER BY name), array_agg(amount ORDER BY name) FROM wanted
    GROUP BY job_id, fence
)
SELECT charge(array_agg(name ORDER BY nth), array_agg(amount ORDER BY nth), :may_overshoot) FROM wanted
HAVING count(*) > 0
""")
HELD = text("""
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
WHERE s.units IS NOT NULL AND (EXISTS (SELECT FROM jobs WHERE {READY}) OR EXISTS (SELECT FROM jobs WHERE {GATED}))
ON CONFLICT (name, bucket) DO NOTHING
""")


@dataclass(frozen=True)
class Counter:
    """How much of it is in use, and how much may be, None for any amount."""

    used: float = 0.0
    most: float | None = None

    def leaves(self, amount: float) -> bool:
        """Whether so much more may be taken. A limit that is reached is closed also to what takes nothing."""
        return self.most is None or (self.used < self.most and self.used + amount <= self.most)


@dataclass(frozen=True)
class Charge:
    """What one lease takes of counters: amounts by their names."""

    job_id: int
    fence: int
    amounts: Mapping[str, float]


@dataclass(frozen=True)
class Spent:
    """One lease that is over. `usage`: what its bot says it has used, by unit; `seconds`: how long it ran, None if
    nobody says; `final`: its job will not run again."""

    job_id: int
    fence: int
    usage: Mapping[str, float]
    seconds: float | None
    final: bool


def of_instance(name: str, what: str) -> str:
    """The name of the counter of `what` (jobs, cost, slots) an instance has."""
    return f"instance:{name}:{what}"


def of_lock(instance: str, lock: str) -> str:
    """The name of the counter of an instance's lock."""
    return f"lock:{instance}:{lock}"


def read(connection: Connection, names: Sequence[str]) -> dict[str, Counter]:
    """Those of the counters that exist, by name."""
    if not names:
        return {}
    rows = connection.execute(READ, {"names": list(names)})
    return {row.name: Counter(float(row.used), None if row.most is None else float(row.most)) for row in rows}


def held(connection: Connection, job_id: int) -> dict[str, float]:
    """What has been taken for the job's lease, or for one that room is reserved for."""
    return {row.name: float(row.amount) for row in connection.execute(HELD, {"job_id": job_id})}


def take(connection: Connection, charges: Sequence[Charge], *, may_overshoot: bool = False) -> None:
    """Take what these leases need, all of it. Of a cost of which anything is left, the last one of them `may_overshoot`
    the limit.

    If a limit was reached since it was looked at, the transaction has to begin anew: raises DBAPIError with the
    SQLSTATE of a serialization failure, which `Database.run` repeats.
    """
    rows = [(charge, name, amount) for charge in charges for name, amount in sorted(charge.amounts.items())]
    if rows:
        connection.execute(
            TAKE,
            {
                "job_ids": [charge.job_id for charge, _, _ in rows],
                "fences": [charge.fence for charge, _, _ in rows],
                "names": [name for _, name, _ in rows],
                "amounts": [amount for _, _, amount in rows],
                "may_overshoot": may_overshoot,
            },
        )


def settle(connection: Connection, spent: Sequence[Spent]) -> None:
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
