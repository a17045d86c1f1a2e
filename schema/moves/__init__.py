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
