"""What becomes of a cycle."""

from dataclasses import dataclass, field

from assigner.gatehouse import Admitted
from schema.moves import Granted


@dataclass
class Cycle:
    """What one cycle did; it waited so many seconds for its turn, or was put off, or `yields` to jobs at gates."""

    picked: int = 0
    granted: list[Granted] = field(default_factory=list)
    postponed: int = 0
    lost: int = 0
    evicted: int = 0
    attempted: bool = False
    waited: float = 0.0
    put_off: bool = False
    gated: bool = False
    yields: bool = False
    owed: bool = False
    admitted: Admitted | None = None

    def add(self, other: "Cycle") -> None:
        """Another transaction did this as well."""
        self.picked += other.picked
        self.granted += other.granted
        self.postponed += other.postponed
        self.lost += other.lost
        self.evicted += other.evicted
        self.waited += other.waited
        self.put_off = self.put_off or other.put_off
        self.admitted = other.admitted or self.admitted
