"""Units of bots and of quotas while a transaction ends and grants leases. Each row is written once, at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_quota
from schema.postgres.statements import Statement


@dataclass
class BotCapacity:
    """The units of a bot whose row this transaction has locked: all units, units in use, and units kept for an
    instance; and its number of live leases (`held`). Moves that end or grant leases change it; `record_syncs` writes
    the row."""

    capacity: int
    in_use: int
    held: int
    kept: int

    @property
    def unused(self) -> int:
        """Return the units without a lease."""
        return self.capacity - self.in_use

    @property
    def units(self) -> int:
        """Return the units without a lease that are not kept for an instance."""
        return self.unused - self.kept

    def give_back(self, units: int) -> None:
        """Take note of a lease that has ended."""
        self.in_use -= units
        self.held = max(0, self.held - 1)

    def take(self, units: int) -> None:
        """Take note of a lease that has begun."""
        self.in_use += units
        self.held += 1


RETURN_UNITS = Statement(f"""
WITH returned AS MATERIALIZED (
    SELECT s.* FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:units AS bigint[]))
        AS s (cohort, instance, units)
    CROSS JOIN LATERAL {newest_quota("s", columns="usage", lock="FOR NO KEY UPDATE")} q
)
UPDATE quotas q SET usage = q.usage - r.units FROM returned r
WHERE q.cohort = r.cohort AND q.instance = r.instance AND r.units <> 0
""")


@dataclass
class ReturnedUnits:
    """Units of attempts that this transaction has ended, by cohort and instance, while quotas still count them as used.

    Saves transactions that settle calls at the same time the wait for each other: 11,100 jobs/s without it, 14,500 with
    it, of two processes and one quota. A transaction that grants the units again to the same instance changes no usage,
    and needs no lock on the quota. What is left over is written at the end.

    room: the units that each of these instances may have at least, beside these; None = no instance has a maximum. 0
        if some instance has a minimum: then the pick has to see what calls that are settled at the same time return.
    """

    units: dict[tuple[int, int], int] = field(default_factory=dict)
    room: int | None = None

    def add(self, cohort: int, instance: int, units: int) -> None:
        """Take note of a lease that has ended."""
        self.units[cohort, instance] = self.units.get((cohort, instance), 0) + units

    def covers(self, wanted: Mapping[tuple[int, int], int]) -> bool:
        """True if these units, by cohort and instance, are among the returned ones."""
        return all(self.units.get(key, 0) >= units for key, units in wanted.items())

    def take(self, cohort: int, instance: int, units: int) -> None:
        """Take note of a lease that has begun with returned units."""
        self.units[cohort, instance] -= units

    def write(self, connection: Connection, *, before_grant: bool = False) -> None:
        """Take what is left off the usage of the quotas. This locks their rows.

        before_grant: also lock the quotas whose returned units have all been granted again. The grant that follows
            skips quotas that other transactions have locked.
        """
        left = sorted((*key, units) for key, units in self.units.items() if units or before_grant)
        self.units.clear()
        if left:
            cohorts, instances, units = zip(*left, strict=True)
            values = {"cohorts": list(cohorts), "instances": list(instances), "units": list(units)}
            connection.execute_later(RETURN_UNITS, values)
