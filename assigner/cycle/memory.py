"""What an assigner carries from one cycle to the next."""

import random
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

from assigner.admission.controller import AdmissionMemory
from assigner.cycle.pacing import Batch, ConflictBackoff, CyclePacer
from assigner.placement.fleet import Fleet
from assigner.placement.room import WaitingDemand
from assigner.placement.strategies.round_robin import Rotation
from schema.clock import Monotonic, Throttle
from schema.picking.head_cursor import HeadCursor


@dataclass
class Memory:
    """All that one assigner remembers. Losing it costs time and never a job: it is the assigner's pace, and caches.

    now: the monotonic clock, in seconds. All times here are times of this clock.
    """

    now: Monotonic
    chance: InitVar[random.Random]
    #: Which bots are healthy, whom they serve and what they offer.
    fleet: Fleet = field(default_factory=Fleet)
    #: The turn in which each bot last received a job.
    rotation: Rotation = field(default_factory=Rotation)
    #: Queues, pauses and demand, as admission has seen them.
    admission: AdmissionMemory = field(default_factory=AdmissionMemory)
    #: The size of the next batch.
    batch: Batch = field(default_factory=Batch)
    #: Jobs for which the last cycle has chosen bots.
    chosen: int = 0
    #: How often in a row nothing matched.
    pace: CyclePacer = field(init=False)
    #: When a transaction was last undone.
    conflicts: ConflictBackoff = field(init=False)
    #: Where in the index the first ready jobs without constraints of each cohort begin.
    head_cursor: HeadCursor = field(init=False)
    #: The same of jobs with constraints.
    constrained_cursor: HeadCursor = field(init=False)
    #: When a quiet pool was last looked at for ready jobs before a pick.
    quiet_look: Throttle = field(init=False)
    #: When queues that no bot can serve were last looked for.
    unserved: Throttle = field(init=False)
    #: Queues that it has put to rest lately, with the time; and when they were last looked at again.
    rested: dict[int, float] = field(default_factory=dict)
    look_again: Throttle = field(init=False)
    #: When the assigner may evict again for plain jobs, and for constrained ones.
    reclaim_due: float = field(init=False)
    admitted_reclaim_due: float = field(init=False)
    #: What waiting jobs take, by cohort, and when it is read again.
    waiting: Mapping[int, WaitingDemand] = field(default_factory=dict)
    waiting_due: float = field(init=False)

    def __post_init__(self, chance: random.Random) -> None:
        self.pace, self.conflicts = CyclePacer(chance), ConflictBackoff(self.now)
        self.quiet_look = Throttle(self.now)
        self.reclaim_due = self.admitted_reclaim_due = self.waiting_due = self.now()
        self.undone()

    def undone(self) -> None:
        """Forget what an undone transaction saw of its own writes, and the turns that it gave to bots."""
        self.rotation.undo()
        self.head_cursor, self.constrained_cursor = HeadCursor(self.now), HeadCursor(self.now)
        self.unserved, self.look_again = Throttle(self.now), Throttle(self.now)
