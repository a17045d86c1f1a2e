"""Every change of a job or a lease, as named, fenced, set-based moves. Nothing else writes those tables.

A move takes a connection inside a transaction and lists of rows; its statement carries the fence in its WHERE and
writes the event of each row it changed. A row that does not come back lost a race, which is a normal outcome.
Locks are taken in one order, bot → job → lease, each sorted by id; what is taken out of order skips locked rows.

    queued -> leased: grant            leased -> running: acknowledge
    leased, running -> cancelling: cancel    queued -> cancelled: cancel
    leased, running, cancelling -> final, queued: the endings (finish, retry, requeue, expire)
"""

from schema.moves.cancelling import Cancelled, ask_stop, cancel
from schema.moves.considering import Alike, postpone, promote, release
from schema.moves.ending import Ended, Ending, RetryPace, Verdict, end
from schema.moves.granting import Granted, Placement, grant
from schema.moves.localities import remember_localities
from schema.moves.reporting import acknowledge, deliver, hold
from schema.moves.retention import delete_finished
from schema.moves.sessions import (
    RELEASE_LIMIT,
    Opened,
    Synced,
    close,
    close_overdue,
    drain,
    expire,
    open_session,
    synced,
)
from schema.moves.submitting import Submitted, submit

__all__ = [
    "RELEASE_LIMIT",
    "Alike",
    "Cancelled",
    "Ended",
    "Ending",
    "Granted",
    "Opened",
    "Placement",
    "RetryPace",
    "Submitted",
    "Synced",
    "Verdict",
    "acknowledge",
    "ask_stop",
    "cancel",
    "close",
    "close_overdue",
    "delete_finished",
    "deliver",
    "drain",
    "end",
    "expire",
    "grant",
    "hold",
    "open_session",
    "postpone",
    "promote",
    "release",
    "remember_localities",
    "submit",
    "synced",
]
