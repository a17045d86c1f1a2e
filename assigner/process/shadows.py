"""The shadow of one assigner process: what of a version its assigners compare, and what they have counted, stored."""

from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from assigner import metrics
from assigner.cycle.shadow import Decider, Tally
from assigner.process.policies import Candidate, InForce, merged, unusable
from assigner.settings import PoolSettings
from schema import clock
from schema.clock import Monotonic
from schema.policy import shadows
from schema.postgres.connection import Connection
from schema.postgres.engine import Database

#: Seconds between two writes of what was counted.
WRITE_EVERY = 5.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Comparison:
    """What the assigners of a process compare with. share: of their cycles, 0 to 1."""

    settings: PoolSettings
    share: float
    tally: Tally

    def decider(self, entry: int) -> Decider | None:
        """Return by what the candidate decides for an entry; None if it has no such entry."""
        if entry >= len(self.settings.assigners):
            return None
        return Decider(self.settings.assigners[entry], self.settings.quotas, self.settings.ordering)


class Shadowing:
    """Follows the shadow for one process, and writes what its assigners count: seldom, in transactions of its own.

    One thread calls it. An assigner in a cycle may still count for a shadow that has just ended; that is left out.
    """

    def __init__(self, database: Database, name: str, *, now: Monotonic = clock.monotonic) -> None:
        self._database, self._name, self._now = database, name, now
        self._known: tuple[Candidate | None, PoolSettings | None] = (None, None)
        self._counted: list[tuple[int, Tally]] = []
        self._compares = False
        self._due = now()

    def follow(self, policy: InForce) -> tuple[bool, Comparison | None]:
        """Return whether there is another shadow now, or another file, and what the assigners are to compare with."""
        if self._known[0] is policy.shadow and self._known[1] is policy.file:
            if self._compares:
                self._counted[-1][1].forget_reasons()
            return False, None
        self._compares = False
        self._known, candidate = (policy.shadow, policy.file), policy.shadow
        self._due = self._now()  # what the last one counted, and what this one cannot use, is told at once
        if candidate is None:
            return True, None
        tally = Tally()
        self._counted.append((candidate.id, tally))
        try:
            settings = merged(policy.file, candidate.version, candidate.stored).settings
        except ValidationError as error:
            reason = unusable(candidate.version, error)
            log.error("a shadow cannot be used here", policy=candidate.version, error=reason)
            tally.reasons[reason] = None
            return True, None
        self._compares = True
        return True, Comparison(settings, candidate.share, tally)

    def run_once(self, *, last: bool = False) -> None:
        """Write what was counted, if it is time. last: in any case, because the process stops."""
        if not last and self._now() < self._due:
            return
        self._due = self._now() + WRITE_EVERY
        for shadow, tally in self._counted:
            self._write(shadow, tally)
        self._counted = [] if self._known[0] is None else self._counted[-1:]

    def _write(self, shadow: int, tally: Tally) -> None:
        taken = tally.take()

        def add(connection: Connection) -> None:
            shadows.add(
                connection,
                shadow,
                process=self._name,
                jobs=taken.jobs,
                cycles=taken.cycles,
                seconds=taken.seconds,
                reason="; ".join(taken.reasons) or None,
            )

        try:
            self._database.run(add)
        except Exception:
            tally.give_back(taken)
            raise
        metrics.observe_shadow(taken.jobs, taken.cycles)
