"""One statement that is a transaction of its own, through libpq and nothing above it.

What the layers above spend on a statement is worth it for most, and more than the whole of a short one. It is not
prepared: a pooler between us and the server may forget that it was.
"""

from typing import Any

import psycopg
from psycopg import errors, pq


def row(driver: "psycopg.Connection[Any]", statement: bytes, *values: str) -> list[str | None]:
    """The one row that the statement, with parameters $1, $2 and so on, answers with, as text; it has been committed
    then.

    The connection must be outside a transaction. Raises psycopg.Error.
    """
    encoding = driver.info.encoding
    result = driver.pgconn.exec_params(statement, [value.encode(encoding) for value in values])
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise _error(driver, result, encoding)
    fields = (result.get_value(0, column) for column in range(result.nfields))
    return [None if field is None else field.decode(encoding) for field in fields]


def _error(driver: "psycopg.Connection[Any]", result: pq.abc.PGresult, encoding: str) -> psycopg.Error:
    if result.error_field(pq.DiagnosticField.SQLSTATE) is None:
        return psycopg.OperationalError(driver.pgconn.get_error_message(encoding))
    return errors.error_from_result(result, encoding)
