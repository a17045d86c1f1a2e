"""Turns: so many at a time do something heavy; the others come again or wait before they begin, and hold nothing."""

import random

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

# Whoever has a turn has it until its transaction ends.
TAKE_SLOT = text("""
SELECT n FROM unnest(CAST(:turns AS integer[])) AS t (n)
WHERE pg_try_advisory_xact_lock(hashtext('leasehold.turn:' || :among), n) LIMIT 1
""")
TAKE_EXCLUSIVE = text("SELECT pg_try_advisory_xact_lock(hashtext('leasehold.gates'))")
# The wait is bounded from within: lock_timeout counts from the moment a lock is waited for.
WAIT_FOR_SLOT = text("""
SELECT set_config('lock_timeout', :patience, true), pg_advisory_xact_lock(hashtext('leasehold.turn:' || :among), :turn),
    set_config('lock_timeout', before, true)
FROM (SELECT current_setting('lock_timeout') AS before OFFSET 0) was
""")

#: Milliseconds at most for which a turn is waited for: far less than a bot has to acknowledge what it is given then.
SLOT_TIMEOUT = 3000


def try_take_slot(connection: Connection, slots: int, *, chance: random.Random, among: str = "") -> bool:
    """Take one of so many turns, to the end of the transaction, if one of them is free. `among`: whose turns these
    are."""
    wanted = {"turns": chance.sample(range(slots), slots), "among": among}
    return connection.execute(TAKE_SLOT, wanted).first() is not None


def wait_for_slot(
    connection: Connection, slots: int, *, chance: random.Random, among: str = "", patience: int = SLOT_TIMEOUT
) -> bool:
    """Take one of so many turns, which none has free, as soon as it is; false if that is not within `patience`
    milliseconds.

    Before the transaction locks anything: who holds rows while it waits makes others wait for them.
    """
    try:
        with connection.begin_nested():
            connection.execute(
                WAIT_FOR_SLOT, {"turn": chance.randrange(slots), "among": among, "patience": f"{patience}ms"}
            )
            return True
    except DBAPIError as error:
        # A statement may be given less time than a lock.
        if isinstance(error.orig, psycopg.errors.LockNotAvailable | psycopg.errors.QueryCanceled):
            return False
        raise


def try_take_exclusive(connection: Connection) -> bool:
    """Take the one turn at what is nearly used up, to the end of the transaction; false if somebody else has it."""
    return bool(connection.execute(TAKE_EXCLUSIVE).scalar_one())
