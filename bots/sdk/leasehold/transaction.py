"""Submits inside a transaction of the caller, by the SQL function `leasehold.submit`, on the caller's own connection.

The connection may be one of psycopg 3 or of SQLAlchemy 2, each in its blocking and its asynchronous form, a session of
SQLAlchemy, or a connection of Django, psycopg 2 or asyncpg. It is recognised by its methods, so that none of these is
imported here. Jobs exist from the caller's commit on, and never if the caller rolls back.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from leasehold import wire
from leasehold.client import Client, in_parts, moved
from leasehold.errors import KEY_TAKEN, BadInput, Conflict, Forbidden, LeaseholdError, NotReady, QueueFull
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
    Raises Conflict `key_reused` if another request used the key of one, BadInput for a request or an object that is no
    connection, QueueFull, NotReady if the database holds no pool or its schema is being upgraded, Forbidden if the
    connection's role may not submit.
    After one of these the caller's transaction can only be rolled back. What else the database says, such as a lost
    connection or a serialisation failure, is the driver's error.
    """
    if (instead := Client.substitute) is not None:
        # Jobs that run in this process have no transaction to wait for.
        made = then([(job.id, job.created) for job in instead.submit(requests)])
        return _at_once(made) if _is_asynchronous(connection) else made
    documents = [wire.written(part) for part in in_parts(requests)]
    if hasattr(connection, "is_in_transaction"):
        return _awaited(_by_asyncpg, connection, documents, then)
    for method, run, run_async in (
        ("ensure_connection", _by_django, None),
        ("exec_driver_sql", _by_sqlalchemy, _by_sqlalchemy_async),
        ("get_bind", _by_session, _by_session_async),
        ("pgconn", _by_psycopg, _by_psycopg_async),
        ("cursor", _by_psycopg2, None),
    ):
        if hasattr(connection, method):
            waits = {"get_bind": "connection", "pgconn": "commit"}.get(method, method)
            if run_async is not None and inspect.iscoroutinefunction(getattr(connection, waits)):
                return _awaited(run_async, connection, documents, then)
            rows: list[Any] = []
            for document in documents:
                with _refusals(len(rows)):
                    rows += run(connection, document)
            return then(_submitted(rows))
    raise BadInput(
        "connection", f"a '{type(connection).__name__}' is no connection of psycopg, asyncpg, SQLAlchemy or Django"
    )


def _is_asynchronous(connection: Any) -> bool:
    is_of_asyncpg = hasattr(connection, "is_in_transaction")
    return is_of_asyncpg or any(
        inspect.iscoroutinefunction(getattr(connection, name, None)) for name in ("commit", "connection")
    )


async def _at_once(made: T) -> T:
    return made


async def _awaited(
    run: Callable[[Any, str], Awaitable[Any]], connection: Any, documents: Sequence[str], then: Callable[[Created], T]
) -> T:
    rows: list[Any] = []
    for document in documents:
        with _refusals(len(rows)):
            rows += await run(connection, document)
    return then(_submitted(rows))


def _submitted(rows: Sequence[Sequence[Any]]) -> Created:
    for number, (_, _, same) in enumerate(rows):
        if not same:
            raise Conflict("key_reused", f"jobs.{number}.key: was used by a different request")
    return [(job, created) for job, created, _ in rows]


@contextmanager
def _refusals(submitted: int) -> Iterator[None]:
    """Raise a refusal of the database as an error of this library, without the statement and its parameters.

    submitted: the jobs of earlier statements, which come before those that the refusal counts.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise BadInput("connection", f"its encoding '{error.encoding}' cannot write a text of the request") from None
    except Exception as error:
        refused = _refusal(*_sentence(error), submitted)
        if refused is None:
            raise
        raise refused from None


def _sentence(error: Exception) -> tuple[str | None, str]:
    """Return the SQLSTATE and the sentence of an error of the database, whichever driver tells it."""
    raised: Any = getattr(error, "orig", None) or error  # SQLAlchemy keeps the driver's error there
    for each in (raised, raised.__cause__):  # Django and asyncpg raise one error from another
        diagnosis = getattr(each, "diag", None)
        code = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if code is not None:
            said = getattr(diagnosis, "message_primary", None) or getattr(each, "message", None) or str(each)
            return code, str(said).partition("\n")[0]
    match raised.args:
        case ({"C": str(code), "M": str(said)}, *_):  # pg8000
            return code, said
        case _:
            return None, ""


def _refusal(code: str | None, said: str, submitted: int) -> LeaseholdError | None:
    """Return the error that this SQLSTATE and sentence stand for; None if they are no refusal."""
    match code:
        case "22023" | "LH004":
            field, _, reason = said.partition(": ")
            return BadInput(moved(field, submitted), reason) if reason else BadInput("jobs", said)
        case "LH003":
            return BadInput("service_level" if "service level" in said else "job_class", said)
        case "LH001":
            return QueueFull(said)
        case "LH007":
            return BadInput("instance", said)
        case "LH008":
            return Conflict(KEY_TAKEN, said)
        case "42883" if "leasehold.submit(" not in said:
            upgrade = "as for a moment of 'leasehold db upgrade'"
            return NotReady(f"the pool lacks a function, {upgrade}: {said}; repeat the transaction")
        case "3F000" | "42883":
            return NotReady(f"the database of this connection holds no pool: {said}")
        case "42501":
            remedy = "the owner of the schema lets it by: leasehold db grant-submit ROLE"
            return Forbidden(f"the role of this connection may not submit jobs: {said}; {remedy}")
        case _:
            return None


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


def _by_django(connection: Any, document: str) -> Any:
    if connection.vendor != "postgresql":
        raise BadInput("connection", f"is one to {connection.vendor}, and a pool's tables are in PostgreSQL")
    with connection.cursor() as cursor:
        cursor.execute(_SUBMIT.format("%s"), (document,))
        return cursor.fetchall()


def _by_psycopg(connection: Any, document: str) -> Any:
    # The connection may make rows of another kind.
    with connection.cursor(row_factory=lambda _cursor: tuple) as cursor:
        cursor.execute(_SUBMIT.format("%s"), (document,))
        return cursor.fetchall()


async def _by_psycopg_async(connection: Any, document: str) -> Any:
    async with connection.cursor(row_factory=lambda _cursor: tuple) as cursor:
        await cursor.execute(_SUBMIT.format("%s"), (document,))
        return await cursor.fetchall()


async def _by_asyncpg(connection: Any, document: str) -> Any:
    # As text: the connection may write jsonb in a way of its own.
    return await connection.fetch(_SUBMIT.format("$1::text"), document)


def _by_psycopg2(connection: Any, document: str) -> Any:
    with closing(connection.cursor()) as cursor:
        cursor.execute(_SUBMIT.format("%s"), (document,))
        # The connection may make rows of another kind.
        return [tuple(row.values()) if isinstance(row, Mapping) else row for row in cursor.fetchall()]
