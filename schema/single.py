"""One statement that is a transaction of its own, through libpq and nothing above it.

What the layers above spend on a statement is worth it for most, and more than the whole of a short one.
"""

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors, pq

UNKNOWN_STATEMENT = b"26000"


@dataclass(frozen=True)
class Statement:
    """A statement that each connection prepares once, under this name. Its parameters are $1, $2 and so on."""

    name: bytes
    sql: bytes


def row(driver: "psycopg.Connection[Any]", statement: Statement, *values: str) -> list[str | None]:
    """The one row that the statement answers with, as text; it has been committed then.

    The connection must be outside a transaction. Raises psycopg.Error.
    """
    encoding = driver.info.encoding
    parameters = [value.encode(encoding) for value in values]
    result = driver.pgconn.exec_prepared(statement.name, parameters)
    # Not yet, or not any more: the driver forgets all when a transaction is rolled back.
    if result.status != pq.ExecStatus.TUPLES_OK and _code(result) == UNKNOWN_STATEMENT:
        made = driver.pgconn.prepare(statement.name, statement.sql)
        if made.status != pq.ExecStatus.COMMAND_OK:
            raise _error(driver, made, encoding)
        result = driver.pgconn.exec_prepared(statement.name, parameters)
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise _error(driver, result, encoding)
    fields = (result.get_value(0, column) for column in range(result.nfields))
    return [None if field is None else field.decode(encoding) for field in fields]


def _code(result: pq.abc.PGresult) -> bytes | None:
    return result.error_field(pq.DiagnosticField.SQLSTATE)


def _error(driver: "psycopg.Connection[Any]", result: pq.abc.PGresult, encoding: str) -> psycopg.Error:
    if _code(result) is None:
        return psycopg.OperationalError(driver.pgconn.get_error_message(encoding))
    return errors.error_from_result(result, encoding)
