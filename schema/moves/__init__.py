"""Every change of a job or a lease, as named, fenced, set-based moves. Nothing else writes those tables.

A move takes a connection inside a transaction and lists of rows; its statement carries the fence in its WHERE and
writes the event of each row it changed. A row that does not come back lost a race, which is a normal outcome.
Locks are taken in one order, bot → job → lease → quota → node, each sorted by id; what is taken out of order skips
locked rows.

    queued -> leased: grant            leased -> running: acknowledge
    leased, running -> cancelling: cancel    queued, parked, deferred -> cancelled: cancel
    queued -> deferred: defer                deferred -> queued: return_deferred
    queued -> parked: park, skip             parked -> queued: unpark, requeue
    queued -> dead: time_out                 queued -> queued: watch (promote, hasten, at_risk), reprice
    blocked -> queued: unblock               blocked -> cancelled: cancel
    leased, running, cancelling -> final, queued: the endings (finish, retry, requeue, evict, expire)
"""

from schema.moves.cancelling import Cancelled, ask_stop, cancel
from schema.moves.considering import Alike, postpone, promote, release
from schema.moves.deferring import defer, return_deferred
from schema.moves.draining import stop_drained
from schema.moves.ending import Ended, Ending, RetryPace, Verdict, end
from schema.moves.granting import Granted, Placement, grant, grant_held
from schema.moves.graphing import (
    CancelledGraph,
    SubmittedGraph,
    cancel_graph,
    cancel_left_over,
    finish_graphs,
    forget_graph,
    submit_graph,
)
from schema.moves.holding import Held, park, unpark
from schema.moves.localities import remember_localities
from schema.moves.managing import adopt, dismiss
from schema.moves.overdue import time_out
from schema.moves.preempting import claims, drop_reservations, expire_reservations, hold_quotas, preempt
from schema.moves.prioritising import ManyPrioritised, Prioritised, set_priority, set_priority_where
from schema.moves.rejoining import rejoin
from schema.moves.reporting import Start, acknowledge, deliver, hold
from schema.moves.repricing import Repriced, reprice
from schema.moves.requeueing import MAX_REQUEUE_KEY_BYTES, MAX_REQUEUED, Requeued, requeue
from schema.moves.retention import delete_finished
from schema.moves.rooms import Room
from schema.moves.sessions import (
    RELEASE_LIMIT,
    Opened,
    Word,
    close,
    close_overdue,
    drain,
    expire,
    open_session,
    renew,
    synced,
)
from schema.moves.skipping import Skipped, forget_skips, skip
from schema.moves.submitting import Submitted, submit, submit_alone
from schema.moves.unblocking import Settled, any_graph, count_dead_ends, settle_due
from schema.moves.watching import Warned, watch

__all__ = [
    "MAX_REQUEUED",
    "MAX_REQUEUE_KEY_BYTES",
    "RELEASE_LIMIT",
    "Alike",
    "Cancelled",
    "CancelledGraph",
    "Ended",
    "Ending",
    "Granted",
    "Held",
    "ManyPrioritised",
    "Opened",
    "Placement",
    "Prioritised",
    "Repriced",
    "Requeued",
    "RetryPace",
    "Room",
    "Settled",
    "Skipped",
    "Start",
    "Submitted",
    "SubmittedGraph",
    "Verdict",
    "Warned",
    "Word",
    "acknowledge",
    "adopt",
    "any_graph",
    "ask_stop",
    "cancel",
    "cancel_graph",
    "cancel_left_over",
    "claims",
    "close",
    "close_overdue",
    "count_dead_ends",
    "defer",
    "delete_finished",
    "deliver",
    "dismiss",
    "drain",
    "drop_reservations",
    "end",
    "expire",
    "expire_reservations",
    "finish_graphs",
    "forget_graph",
    "forget_skips",
    "grant",
    "grant_held",
    "hold",
    "hold_quotas",
    "open_session",
    "park",
    "postpone",
    "preempt",
    "promote",
    "rejoin",
    "release",
    "remember_localities",
    "renew",
    "reprice",
    "requeue",
    "return_deferred",
    "set_priority",
    "set_priority_where",
    "settle_due",
    "skip",
    "stop_drained",
    "submit",
    "submit_alone",
    "submit_graph",
    "synced",
    "time_out",
    "unpark",
    "watch",
]
