"""One statement that is a transaction of its own, through libpq and nothing above it.

What the layers above spend on a statement is worth it for most, and more than the whole of a short one.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import psycopg
from psycopg import errors, pq

UNKNOWN_STATEMENT = b"26000"
TUPLES = pq.ExecStatus.TUPLES_OK


def row(driver: "psycopg.Connection[Any]", statement: bytes, *values: bytes) -> list[bytes | None]:
    """The one row that the statement, with parameters $1, $2 and so on, answers with; it has been committed then.

    All is text in UTF-8, so the connection must be one of `schema.engine`; it is outside a transaction. Raises
    psycopg.Error.
    """
    result = driver.pgconn.exec_prepared(_name(statement), values)
    if result.status != TUPLES:
        result = _unprepared(driver, result, statement, values)
    return [result.get_value(0, column) for column in range(result.nfields)]


@cache
def _name(statement: bytes) -> bytes:
    """What the statement is prepared as. Whoever has prepared something by this name has prepared the same."""
    return b"leasehold_" + sha256(statement).hexdigest()[:16].encode()


def _unprepared(
    driver: "psycopg.Connection[Any]", failed: pq.abc.PGresult, statement: bytes, values: Sequence[bytes]
) -> pq.abc.PGresult:
    """The result without what was prepared, if only that was missing.

    Not prepared yet, or not any more: the driver forgets all when a transaction is rolled back, and behind a pooler
    each statement may meet another session. What is prepared now is for the next time, and may be there already.
    """
    if _code(failed) != UNKNOWN_STATEMENT:
        raise _error(driver, failed)
    result = driver.pgconn.exec_params(statement, values)
    if result.status != TUPLES:
        raise _error(driver, result)
    driver.pgconn.prepare(_name(statement), statement)
    return result


def _code(result: pq.abc.PGresult) -> bytes | None:
    return result.error_field(pq.DiagnosticField.SQLSTATE)


def _error(driver: "psycopg.Connection[Any]", result: pq.abc.PGresult) -> psycopg.Error:
    if _code(result) is None:
        return psycopg.OperationalError(driver.pgconn.get_error_message())
    return errors.error_from_result(result)
