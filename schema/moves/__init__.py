"""The only writers of jobs and leases: every change of state is a named, fenced, set-based move.

A move takes a connection inside a transaction and lists of rows. Its statement carries the fence in its WHERE and
writes the event of each row that it changed. A row that does not come back lost a race, which is a normal outcome.
Locks are taken in one order, bot, job, lease, quota, node, each sorted by id; what is taken out of order skips
locked rows.

    nothing -> queued, blocked: submit.submit, submit.submit_at_once, submit.submit_alone, graphs.submit_graph
    a node that ended badly gets a new job, queued or blocked: graph_retry.retry_graph
    queued -> leased: grant.grant, grant.grant_locked
    leased -> running: acknowledge.acknowledge
    leased, running, cancelling -> succeeded, failed, cancelled, dead, queued: end.end
    leased, running -> queued: preempt.preempt (through end), sessions.expire, sessions.open_sessions
    an attempt that an expiry charged to its job is taken back: sessions.open_sessions
    leased, running -> cancelling: cancel.cancel        queued, parked, deferred, blocked -> cancelled: cancel.cancel
    queued -> deferred: overflow.defer                  deferred -> queued: overflow.return_deferred
    queued -> parked: hold.park, rate_skips.skip        parked -> queued: hold.unpark, requeue.requeue
    queued -> dead: timeouts.time_out, timeouts.age_out blocked -> queued, cancelled: dependencies.unblock_due
    queued -> queued: pause.set_aside, pause.set_aside_ready, pause.make_ready, backoff.promote
    queued -> queued: priority.review_waiting, priority.reprice, reschedule.reschedule, submit.submit
    rests of queues: backoff.rest_queues, backoff.wake_queues, backoff.wake_queues_for_bots

`backoff`, `hold`, `overflow`, `pause`, `priority`, `rate_skips`, `requeue`, `reschedule` and `timeouts` are in
`waiting/`.

It imports `schema.picking`, `schema.fleet`, `schema.accounting`, `schema.policy` and what these import. Read first:
grant.py and end.py.
"""
