"""Advisory locks: slots that limit how many transactions do something heavy, turns, and the lock of sessions that open.

A transaction without a slot comes back later; none waits for one. Who wants a turn waits.
"""

import random

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# A slot is held until the transaction ends.
TAKE_SLOT = Statement("""
SELECT n FROM unnest(CAST(:slots AS integer[])) AS s (n)
WHERE pg_try_advisory_xact_lock(hashtext('leasehold.slot:' || :among), n) LIMIT 1
""")
#: Seconds to wait for a turn. Those ahead are at work, each for as long as a large batch takes, and are no reason to go
#: round what they hold.
TURN_WITHIN = 5.0
WAIT_FOR_TURN = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.turn:' || :among))")
ANNOUNCE_SESSIONS = Statement("SELECT pg_advisory_xact_lock_shared(hashtext('leasehold.platforms'))")
TRY_BLOCK_NEW_SESSIONS = Statement("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.platforms'))")
TAKE_EXCLUSIVE = Statement("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.gates'))")
TAKE_OVERFLOW = Statement("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.overflow'))")


def try_take_slot(connection: Connection, slots: int, *, chance: random.Random, among: str = "") -> int | None:
    """Take one of `slots` slots until the transaction ends; returns its number from 0, None if none is free.

    among: name of the set of slots.
    """
    wanted = {"slots": chance.sample(range(slots), slots), "among": among}
    slot: int | None = connection.execute(TAKE_SLOT, wanted).scalar_one_or_none()
    return slot


def wait_for_turn(connection: Connection, *, among: str) -> None:
    """Wait until no other transaction has the turn of this name, and take it until this transaction ends.

    Who waits may hold jobs, and neither a rate nor a quota: the one whose turn it is may wait for these.
    """
    with connection.waiting_for_locks(TURN_WITHIN):
        connection.execute(WAIT_FOR_TURN, {"among": among})


def try_take_exclusive(connection: Connection) -> bool:
    """Take the only slot for grants against limits that are nearly reached, until the transaction ends; false if taken.

    Without it, transactions would compete for the last of a limit and all but one would have to start again.
    """
    return bool(connection.execute(TAKE_EXCLUSIVE).scalar_one())


def try_take_overflow(connection: Connection) -> bool:
    """Take the only slot for moving jobs beyond the pool's limit, until the transaction ends; false if taken."""
    return bool(connection.execute(TAKE_OVERFLOW).scalar_one())


def announce_sessions(connection: Connection) -> None:
    """Keep others from judging which bots there are until this transaction, which opens sessions, ends.

    Comes before any row lock.
    """
    connection.execute(ANNOUNCE_SESSIONS)


def try_block_new_sessions(connection: Connection) -> bool:
    """Keep sessions from opening until this transaction ends, unless one is opening right now: then False.

    What is concluded from the absence of a bot needs this, or it could be written after the bot has looked for it.
    Rests of queues do not, for their assigner looks for such bots afterwards.
    """
    alone: bool = connection.execute(TRY_BLOCK_NEW_SESSIONS).scalar_one()
    return alone
