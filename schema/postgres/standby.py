"""Reads from a standby: answers that may be a little old, such as lists and reports, come from it while it keeps up.

How far it is behind is told by positions in the write-ahead log, so that no clock of another machine counts: each
second the primary is asked where it is. The standby is then behind by at most the age of the newest of these positions
that it has replayed.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import psycopg
import structlog
from leasehold.errors import NotReady

from schema import clock
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import describe_outage, is_conflict, is_outage
from schema.postgres.statements import Statement

T = TypeVar("T")

#: Seconds between two looks.
INTERVAL = 1.0

PRIMARY = Statement("""
SELECT CAST(pg_current_wal_lsn() - CAST('0/0' AS pg_lsn) AS bigint) AS position,
    (SELECT system_identifier FROM pg_control_system()) AS server, current_database() AS database
""")
STANDBY = Statement("""
SELECT pg_is_in_recovery() AS is_standby,
    CAST(coalesce(pg_last_wal_replay_lsn(), '0/0') - CAST('0/0' AS pg_lsn) AS bigint) AS position,
    (SELECT system_identifier FROM pg_control_system()) AS server, current_database() AS database
""")

log = structlog.get_logger()


class StandbyReads:
    """Reads of one process, on the standby or, while that is away or too far behind, on the primary.

    max_lag: seconds that the standby may be behind at a look, and that may pass until the next one. `run_once`, which
    looks, is for a loop; until it has run, the primary is read.
    """

    def __init__(
        self,
        primary: Database,
        standby: Database,
        *,
        max_lag: float,
        monotonic: clock.Monotonic = clock.monotonic,
    ) -> None:
        self._primary, self._standby, self._max_lag, self._now = primary, standby, max_lag, monotonic
        #: When the primary was at which position, the oldest first, from the last one that the standby has replayed on.
        self._positions: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        #: Seconds that the standby was behind at most at the last look, and when that was.
        self._lag: float | None = None
        self._looked_at = monotonic()
        self._trouble = "the standby has not been looked at yet"

    @property
    def lag(self) -> float | None:
        """Seconds that the standby is behind at most; None = not known, because the last look was too long ago."""
        return None if self._is_outdated else self._lag

    @property
    def trouble(self) -> str:
        """Why the primary is read; "" while the standby is."""
        return self._trouble or ("the primary does not say how far it is" if self._is_outdated else "")

    @property
    def _is_outdated(self) -> bool:
        return self._now() > self._looked_at + self._max_lag

    def run(self, work: Callable[[Connection], T], *, kept_plans: bool = False) -> T:
        """Run `work`, which only reads, in one transaction. Raises as `Database.run` does."""
        if not self.trouble:
            try:
                return self._standby.run(work, repeat=False, kept_plans=kept_plans)
            except (psycopg.Error, NotReady) as error:
                # A standby also cancels a read of rows that the primary has removed: a conflict.
                if is_outage(error):
                    self._tell(f"the standby: {describe_outage(error)}")
                elif not is_conflict(error):
                    raise
        return self._primary.run(work, kept_plans=kept_plans)

    def run_once(self) -> float:
        """Look how far the standby is behind. Returns the seconds until the next look. Raises as `Database.run`."""
        at = self._now()
        primary = self._primary.run(lambda connection: connection.execute(PRIMARY).one(), urgent=True)
        try:
            standby = self._standby.run(lambda connection: connection.execute(STANDBY).one(), urgent=True, repeat=False)
        except (psycopg.Error, NotReady) as error:
            self._lag = None
            self._tell(f"the standby: {describe_outage(error)}")
            return INTERVAL
        if not standby.is_standby:
            self._lag = None
            self._tell("the server at read_url is no standby: it takes writes")
        elif (standby.server, standby.database) != (primary.server, primary.database):
            self._lag = None
            self._tell("the server at read_url is a standby of another server, or has another database")
        else:
            self._measure(at, primary.position, standby.position)
        return INTERVAL

    def _measure(self, at: float, position: int, replayed: int) -> None:
        with self._lock:
            if self._positions and position < self._positions[-1][1]:
                self._positions.clear()  # another server is the primary now
            self._positions.append((at, position))
            while len(self._positions) > 1 and self._positions[1][1] <= replayed:
                self._positions.popleft()
            passed = self._positions[0]
            self._looked_at = at
            self._lag = (0.0 if replayed >= position else at - passed[0]) if passed[1] <= replayed else None
        if self._lag is None:
            self._tell("the standby has not caught up yet")
        elif self._lag > self._max_lag:
            self._tell(f"the standby is {self._lag:.0f} s behind, more than {self._max_lag:g} s")
        else:
            self._tell("")

    def _tell(self, trouble: str) -> None:
        """Note why the primary is read. The log has each change between the servers."""
        before, self._trouble = self._trouble, trouble
        if bool(before) != bool(trouble):
            if trouble:
                log.warning("reads go to the primary", reason=trouble)
            else:
                log.info("reads go to the standby", lag_seconds=self._lag)
