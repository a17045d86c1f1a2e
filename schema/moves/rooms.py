"""The units of a bot while its call is settled: its row is written once, when all is known."""

from dataclasses import dataclass


@dataclass
class Room:
    """A bot whose row this transaction holds: all of its units, those in use, its live leases, and units that are kept
    for evictors. Whoever ends leases or grants some notes it here; `synced` writes it to the row."""

    capacity: int
    in_use: int
    held: int
    reserved: int

    @property
    def unused(self) -> int:
        """Units without a lease."""
        return self.capacity - self.in_use

    @property
    def units(self) -> int:
        """Units for anybody."""
        return self.unused - self.reserved

    def give_back(self, units: int) -> None:
        """A lease has ended."""
        self.in_use -= units
        self.held = max(0, self.held - 1)

    def take(self, units: int, *, reserved: int) -> None:
        """A lease has begun; so many of its units were reserved for it."""
        self.in_use += units
        self.held += 1
        self.reserved -= reserved
