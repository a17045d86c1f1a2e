"""Numbered slots made of advisory locks: they limit how many transactions do something heavy at the same time.

A transaction without a slot comes back later, or waits before it locks anything.
"""

import random

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

# A slot is held until the transaction ends.
TAKE_SLOT = text("""
SELECT n FROM unnest(CAST(:turns AS integer[])) AS t (n)
WHERE pg_try_advisory_xact_lock(hashtext('leasehold.turn:' || :among), n) LIMIT 1
""")
TAKE_EXCLUSIVE = text("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.gates'))")
# The statement sets its own lock_timeout, which counts from the moment it begins to wait, and restores the old one.
WAIT_FOR_SLOT = text("""
SELECT set_config('lock_timeout', :patience, true), pg_advisory_xact_lock(hashtext('leasehold.turn:' || :among), :turn),
    set_config('lock_timeout', before, true)
FROM (SELECT current_setting('lock_timeout') AS before OFFSET 0) was
""")

#: Longest wait for a slot, in milliseconds: far less than a bot has to acknowledge a lease.
SLOT_TIMEOUT = 3000


def try_take_slot(connection: Connection, slots: int, *, chance: random.Random, among: str = "") -> bool:
    """Take one of `slots` slots until the transaction ends; false if none is free.

    among: name of the set of slots.
    """
    wanted = {"turns": chance.sample(range(slots), slots), "among": among}
    return connection.execute(TAKE_SLOT, wanted).first() is not None


def wait_for_slot(
    connection: Connection, slots: int, *, chance: random.Random, among: str = "", patience: int = SLOT_TIMEOUT
) -> bool:
    """Wait for one of `slots` slots, chosen by chance; false if it is not free within `patience` milliseconds.

    To be called before the transaction locks any row, because others would wait for those rows meanwhile.
    """
    try:
        with connection.begin_nested():
            connection.execute(
                WAIT_FOR_SLOT, {"turn": chance.randrange(slots), "among": among, "patience": f"{patience}ms"}
            )
            return True
    except DBAPIError as error:
        # The statement's time-out may be shorter than the lock's.
        if isinstance(error.orig, psycopg.errors.LockNotAvailable | psycopg.errors.QueryCanceled):
            return False
        raise


def try_take_exclusive(connection: Connection) -> bool:
    """Take the only slot for grants against limits that are nearly reached, until the transaction ends; false if taken.

    Without it, transactions would compete for the last of a limit and all but one would have to start again.
    """
    return bool(connection.execute(TAKE_EXCLUSIVE).scalar_one())
