"""Forecasts of some waiting jobs are stored and judged, so that the pool measures its own promises.

A submit stores none, because it must cost nothing: a pass finds some of the newest waiting jobs, and a later one what
became of them. What foresees a job is handed in by the process, which knows the rules.
"""

from collections.abc import Callable
from functools import partial

import structlog

from assigner import metrics
from schema.accounting import forecasts
from schema.accounting.forecasts import Stored
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement

log = structlog.get_logger()

SNAPSHOT = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
#: Seconds between two passes, and the most jobs of one.
INTERVAL, SAMPLED = 10.0, 5
#: Forecasts that a pass looks at to judge them; the next one goes on behind them.
JUDGED = 500

#: Foresees the start of the job with this id; None if it does not wait any more.
Foresee = Callable[[Connection, int], Stored | None]


class Forecasts:
    """Stores and judges forecasts."""

    def __init__(self, database: Database, foresee: Foresee) -> None:
        self._database, self._foresee = database, foresee
        self._after, self._pass = 0, 0

    def run_once(self) -> None:
        """Judge some forecasts and make some."""
        after, run = self._after, self._database.run
        self._after = run(lambda connection: forecasts.judge(connection, after=after, limit=JUDGED)) or 0
        self._pass += 1
        for job in run(lambda connection: forecasts.jobs_without(connection, limit=SAMPLED, nth=self._pass)):
            try:
                run(partial(self._make, job=job))
            except Exception:
                log.exception("the start of a job could not be foreseen", job=job)

    def _make(self, connection: Connection, job: int) -> None:
        """Foresee a job and store that, in one snapshot, in which it waits."""
        connection.execute(SNAPSHOT)
        found = self._foresee(connection, job)
        if found is not None:
            forecasts.store(connection, [found])

    def measure(self) -> None:
        """Measure how long leases take, and tell what became of the forecasts of the last day."""
        self._database.run(forecasts.measure_times)
        metrics.observe_forecasts(self._database.run(forecasts.judged))
