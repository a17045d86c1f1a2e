"""Submits inside a transaction of the caller, by the SQL function `leasehold.submit`, on the caller's own connection.

The connection may be one of psycopg 3 or of SQLAlchemy 2, each in its blocking and its asynchronous form, or a session
of SQLAlchemy. It is recognised by its methods, so neither package is imported here. Jobs exist from the caller's
commit on, and never if the caller rolls back.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from leasehold.client import in_parts
from leasehold.errors import BadInput, Conflict
from leasehold.transport import Record

T = TypeVar("T")
#: The id of each job, and whether it was made now; see `TaskJob.created`.
Created = list[tuple[str, bool]]

# `{}` stands for the one parameter, in the style of the driver.
_SUBMIT = "SELECT public_id::text, created, same FROM leasehold.submit(CAST({} AS jsonb)) ORDER BY n"
#: How drivers write the first parameter of a statement, by the name of their style in DB-API and SQLAlchemy.
_PARAMETER = {"format": "%s", "pyformat": "%s", "numeric_dollar": "$1", "qmark": "?"}


def submit_in(connection: Any, requests: Sequence[Record], then: Callable[[Created], T]) -> T | Awaitable[T]:
    """Submit in the transaction of this connection, and return what `then` makes of the submitted jobs.

    Each statement submits up to 10,000 jobs or 8 MB. With an asynchronous connection the answer has to be awaited.
    Raises Conflict `key_reused` if another request used the key of one; any other refusal is the driver's error with
    the database's sentence. Raises BadInput for an object that is no connection.
    """
    documents = [json.dumps(part) for part in in_parts(requests)]
    for method, run, run_async in (
        ("exec_driver_sql", _by_sqlalchemy, _by_sqlalchemy_async),
        ("get_bind", _by_session, _by_session_async),
        ("cursor", _by_psycopg, _by_psycopg_async),
    ):
        if hasattr(connection, method):
            waits = {"get_bind": "connection", "cursor": "commit"}.get(method, method)
            if inspect.iscoroutinefunction(getattr(connection, waits)):
                return _awaited(run_async, connection, documents, then)
            return then(_submitted([row for document in documents for row in run(connection, document)]))
    raise BadInput("connection", f"a '{type(connection).__name__}' is no connection of psycopg or SQLAlchemy")


async def _awaited(
    run: Callable[[Any, str], Awaitable[Any]], connection: Any, documents: Sequence[str], then: Callable[[Created], T]
) -> T:
    return then(_submitted([row for document in documents for row in await run(connection, document)]))


def _submitted(rows: Sequence[Sequence[Any]]) -> Created:
    for number, (_, _, same) in enumerate(rows):
        if not same:
            raise Conflict("key_reused", f"jobs.{number}.key: was used by a different request")
    return [(job, created) for job, created, _ in rows]


def _statement(connection: Any) -> str:
    return _SUBMIT.format(_PARAMETER[connection.dialect.paramstyle])


def _by_sqlalchemy(connection: Any, document: str) -> Any:
    return connection.exec_driver_sql(_statement(connection), (document,)).fetchall()


async def _by_sqlalchemy_async(connection: Any, document: str) -> Any:
    return (await connection.exec_driver_sql(_statement(connection), (document,))).fetchall()


def _by_session(session: Any, document: str) -> Any:
    return _by_sqlalchemy(session.connection(), document)


async def _by_session_async(session: Any, document: str) -> Any:
    return await _by_sqlalchemy_async(await session.connection(), document)


def _by_psycopg(connection: Any, document: str) -> Any:
    # The connection may make rows of another kind.
    with connection.cursor(row_factory=lambda _cursor: tuple) as cursor:
        cursor.execute(_SUBMIT.format("%s"), (document,))
        return cursor.fetchall()


async def _by_psycopg_async(connection: Any, document: str) -> Any:
    async with connection.cursor(row_factory=lambda _cursor: tuple) as cursor:
        await cursor.execute(_SUBMIT.format("%s"), (document,))
        return await cursor.fetchall()
