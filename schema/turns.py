"""Turns: so many at a time do something heavy; the others wait before they begin, while they hold nothing yet."""

import random

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

# Whoever has a turn has it until its transaction ends.
FREE = text("""
SELECT n FROM unnest(CAST(:turns AS integer[])) AS t (n)
WHERE pg_try_advisory_xact_lock(hashtext('leasehold.turn'), n) LIMIT 1
""")
NEXT = text("SELECT pg_advisory_xact_lock(hashtext('leasehold.turn'), :turn)")


def take(connection: Connection, turns: int, *, chance: random.Random) -> bool:
    """Take one of so many turns, to the end of the transaction; false if none came within `lock_timeout`.

    Begin the transaction with it: who holds rows while it waits makes others wait for them.
    """
    order = chance.sample(range(turns), turns)
    if connection.execute(FREE, {"turns": order}).first() is not None:
        return True
    try:
        with connection.begin_nested():
            connection.execute(NEXT, {"turn": order[0]})
            return True
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.errors.LockNotAvailable):
            return False
        raise
