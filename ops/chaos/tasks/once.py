"""Effects that happen once: each step of a job is done by one attempt, the newest, and by no later one again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import leasehold
import psycopg

#: One row for each job: the newest fence, and how many steps are done.
TABLE = """
CREATE TABLE IF NOT EXISTS task_steps (
    job uuid PRIMARY KEY, fence bigint NOT NULL, done integer NOT NULL, began timestamptz NOT NULL DEFAULT now())"""
BEGIN = """
INSERT INTO task_steps AS known (job, fence, done) VALUES (%(job)s, %(fence)s, 0)
ON CONFLICT (job) DO UPDATE SET fence = excluded.fence WHERE known.fence <= excluded.fence
RETURNING done"""
STEP = "UPDATE task_steps SET done = %(step)s WHERE job = %(job)s AND fence = %(fence)s RETURNING done"


class Superseded(Exception):
    """A later attempt of this job has begun, and this one changes nothing any more."""


def begin(connection: psycopg.Connection[Any]) -> int:
    """Shut out all earlier attempts of this job; return how many steps they have done."""
    return _done(connection, BEGIN)


@contextmanager
def step(connection: psycopg.Connection[Any], number: int) -> Iterator[None]:
    """Do step `number`, counted from 1, in one transaction with what the block changes."""
    with connection.transaction():
        _done(connection, STEP, step=number)
        yield


def _done(connection: psycopg.Connection[Any], statement: str, **values: int) -> int:
    here = leasehold.current()
    row = connection.execute(statement.encode(), {"job": here.job, "fence": here.fence, **values}).fetchone()
    if row is None:
        raise Superseded
    done: int = row[0]
    return done
