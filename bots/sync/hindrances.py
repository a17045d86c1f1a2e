"""Leases that cannot begin or end as their bot reports, because somebody holds a row or one is wrong: they are put off.

Before the calls are settled such leases are tried one after the other, and at last all trials are undone. If one fails,
the report of its lease is left out. The bot reports it again, and then only this lease is tried: the other calls of its
batch pay for no more than a short wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psycopg
import structlog

from bots.sync.call import SyncCall
from schema.accounting.held_rows import Trials
from schema.clock import Monotonic
from schema.moves.acknowledge import Start
from schema.moves.end import AttemptEnd
from schema.postgres.statements import Row

M = TypeVar("M", Start, AttemptEnd)

#: Seconds for which calls wait only shortly for a lock, after one could not be had in time; and after which a lease
#: that is still put off is told again, and tried with as long a wait as at first.
CAREFUL = 30.0
#: Seconds for which all ends of an instance are put off, after its quota could not be had.
HELD = 1.0

_log = structlog.get_logger(__name__)


class Hindrances:
    """What one process remembers of them. Threads share it: each entry is read and written at once."""

    def __init__(self, now: Monotonic) -> None:
        self.now = now
        self._careful_until = now()
        #: By job and fence of leases that are put off, the time from which this is told again.
        self.leases: dict[tuple[int, int], float] = {}
        #: By cohort and instance of quotas that somebody holds, the time up to which nobody tries to have them.
        self.quotas: dict[tuple[int, str], float] = {}

    @property
    def is_careful(self) -> bool:
        """Return whether a lock could not be had lately. Waits in vain meanwhile do not make this last longer."""
        return self.now() < self._careful_until

    def note(self, error: Exception) -> None:
        """Be careful for a while if the error is a wait in vain for a lock."""
        if isinstance(error, psycopg.errors.LockNotAvailable) and not self.is_careful:
            self._careful_until = self.now() + CAREFUL
            _log.warning("a lock could not be had, so calls of bots wait only shortly for locks", seconds=CAREFUL)

    def forget_old(self) -> None:
        """Forget leases that were not reported again."""
        for key, until in self.leases.copy().items():
            if until < self.now() - CAREFUL:
                self.leases.pop(key, None)

    def put_off(self, sync_call: SyncCall, lease: Row, error: psycopg.Error) -> None:
        """Remember that the report of a lease is left out; log it, but once in `CAREFUL` seconds."""
        key, now = (lease.job_id, lease.fence), self.now()
        if self.leases.get(key, now) <= now:
            self.leases[key] = now + CAREFUL
            told = {"job": lease.public_id, "bot": sync_call.bot.name, "error": type(error).__name__}
            told["sqlstate"] = error.sqlstate
            _log.warning("the report of a lease is put off, as somebody holds a row or one is wrong", **told)


@dataclass
class ReportTrials:
    """The trials of the reports of one transaction. everything: also of leases that were not put off before."""

    trials: Trials
    hindrances: Hindrances
    everything: bool

    def possible(self, sync_call: SyncCall, moves: Sequence[M], move: Callable[[M], object]) -> list[M]:
        """Return those of the starts or ends of a call that can be applied. The caller undoes what was tried."""
        leases = {lease.job_id: lease for lease in (*sync_call.held, *sync_call.of_older_sessions)}
        found = list[M]()
        for each in moves:
            lease = leases[each.job_id]
            quota = (sync_call.bot.cohort, lease.instance) if isinstance(each, AttemptEnd) else None
            error = self._hindrance(lease, quota, partial(move, each))
            if error is None:
                found.append(each)
            else:
                self.hindrances.put_off(sync_call, lease, error)
        return found

    def _hindrance(self, lease: Row, quota: tuple[int, str] | None, move: Callable[[], object]) -> psycopg.Error | None:
        """Return why the move cannot be applied, None if it can. quota: the one that the move needs."""
        known, key, now = self.hindrances, (lease.job_id, lease.fence), self.hindrances.now()
        if quota is not None and (quota in self.trials.held or known.quotas.get(quota, now) > now):
            return psycopg.errors.LockNotAvailable()
        if not self.everything and key not in known.leases:
            return None
        waits_briefly = self.trials.has_waited or known.leases.get(key, now) > now
        error = self.trials.hindrance(move, quota=quota, briefly=waits_briefly)
        if error is None:
            known.leases.pop(key, None)
        elif quota is not None and quota in self.trials.held and not waits_briefly:
            known.quotas[quota] = known.now() + HELD
        return error
