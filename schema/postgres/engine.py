"""Connections, transactions and their two retry budgets.

Work is a function of a connection: it is called again, on a fresh transaction, when PostgreSQL says that the first
try did not happen. It must therefore be safe to repeat, which fenced moves are.
"""

import queue
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, TypeVar, cast

import psycopg
from psycopg import errors, pq
from psycopg.abc import DumperKey
from psycopg.adapt import PyFormat
from psycopg.pq import TransactionStatus
from psycopg.types.array import BaseListDumper, ListDumper
from psycopg.types.string import TextLoader
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from sqlalchemy import Connection, Engine, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.pool.base import _ConnectionRecord
from sqlalchemy.util.queue import Empty, Full, QueueCommon
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay
from tenacity.wait import wait_base

from schema import clock
from schema.errors import NotReady

# A pool of connections that also lends them as they are, for statements that are shorter than a proxy's life.


IDLE = TransactionStatus.IDLE


class _Stack(QueueCommon[ConnectionPoolEntry]):
    """The last one in is the first one out. The interpreter's own queue, of tokens, does the waiting."""

    def __init__(self, maxsize: int = 0, use_lifo: bool = True) -> None:
        assert use_lifo
        self.maxsize, self.use_lifo = maxsize, use_lifo
        self._entries: deque[ConnectionPoolEntry] = deque()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def qsize(self) -> int:
        return self._tokens.qsize()

    def put(self, item: ConnectionPoolEntry, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        if len(self._entries) >= self.maxsize:
            raise Full
        self._entries.append(item)
        self._tokens.put(None)

    def get(self, block: bool = True, timeout: float | None = None) -> ConnectionPoolEntry:
        try:
            self._tokens.get(block, timeout)
        except queue.Empty:
            raise Empty from None
        return self._entries.pop()


class LendingPool(QueuePool):
    """SQLAlchemy's pool, whose proxies cost a short statement as much again as its driver."""

    _queue_class = _Stack

    def lend(self) -> ConnectionPoolEntry:
        """One that is connected, outside a transaction; to be given back, whatever happens.

        Raises psycopg.Error, or sqlalchemy.exc.TimeoutError as any checkout.
        """
        entry = self._do_get()
        try:
            # Made anew if it was lost, or found to be older than an outage.
            cast(_ConnectionRecord, entry).get_connection()
        except BaseException:
            self._do_return_conn(entry)
            raise
        return entry

    def take_back(self, entry: ConnectionPoolEntry, driver: "psycopg.Connection[Any]") -> None:
        """A connection that is lost, or still in a transaction, is closed; the next borrower gets another instead."""
        if driver.pgconn.transaction_status != IDLE:
            entry.invalidate()
        self._do_return_conn(entry)


# How values travel between Python and PostgreSQL where the driver's general way costs more than the statement.


class IntegersDumper(ListDumper):
    """Lists of nothing but integers as one text, whose type the statement tells by a cast; others as ever."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:
        return self.cls if _all_integers(obj) else super().get_key(obj, format)

    def upgrade(self, obj: list[Any], format: PyFormat) -> BaseListDumper:
        return self if _all_integers(obj) else super().upgrade(obj, format)

    def dump(self, obj: list[Any]) -> Any:
        if self.sub_dumper is None and _all_integers(obj):
            return b"{%s}" % ",".join(map(str, obj)).encode()
        return super().dump(obj)


def _all_integers(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


def register_adapters(connection: "psycopg.Connection[Any]") -> None:
    """Lists of integers go without being looked at one by one; ids come as the text that they are shown as."""
    connection.adapters.register_dumper(list, IntegersDumper)
    connection.adapters.register_loader("uuid", TextLoader)


T = TypeVar("T")

#: Serialization failure, deadlock, lock timeout: the transaction did not happen and may be tried again at once.
CONFLICTS = frozenset({"40001", "40P01", "55P03"})
#: Too many connections, and the server stopping or starting (connection errors are class 08).
OUTAGES = frozenset({"53300", "57P01", "57P02", "57P03", "25P03"})


class DatabaseSettings(BaseModel):
    """Where the pool keeps its state.

    url: `embedded`, or a PostgreSQL URL (`postgresql://user@host/database`).
    listen_url: a direct URL for LISTEN when `url` goes through a transaction pooler.
    pool: connections a process may hold for its work; `reserve` more are kept for heartbeats and upkeep.
    outage_seconds: how long work keeps trying to reconnect before it gives up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: SecretStr = SecretStr("embedded")
    listen_url: SecretStr | None = None
    pool: int = Field(default=8, ge=1, le=500)
    reserve: int = Field(default=2, ge=1, le=50)
    statement_timeout: float = Field(default=10.0, gt=0, le=3600)
    lock_timeout: float = Field(default=1.0, gt=0, le=600)
    idle_in_transaction_timeout: float = Field(default=5.0, gt=0, le=3600)
    outage_seconds: float = Field(default=30.0, ge=0, le=3600)


class Database:
    """One process's way to one database: a pool for work and a small one kept free for heartbeats and upkeep."""

    def __init__(self, url: str, settings: DatabaseSettings, *, role: str, chance: random.Random) -> None:
        self.url = url
        self.listen_url = settings.listen_url.get_secret_value() if settings.listen_url else url
        self._settings = settings
        self._chance = chance
        self.engine = _engine(url, settings, role=role, size=settings.pool)
        self.reserve = _engine(url, settings, role=f"{role}-reserve", size=settings.reserve)

    def run(
        self, work: Callable[[Connection], T], *, urgent: bool = False, undone: Callable[[], None] | None = None
    ) -> T:
        """Run `work` in one READ COMMITTED transaction and return what it returned, once committed.

        Conflicts are repeated at most 5 times with full jitter; lost connections until `outage_seconds` have passed,
        then NotReady. Any other error is raised at once and nothing of the transaction stays. `urgent` work uses
        the reserved connections. `undone` is called for each try that came to nothing, to forget what was remembered
        of it.
        """
        engine = self.reserve if urgent else self.engine

        def once() -> T:
            try:
                with engine.begin() as connection:
                    return work(connection)
            except Exception:
                if undone is not None:
                    undone()
                raise

        return self._tried(once)

    def run_alone(self, work: Callable[["psycopg.Connection[Any]"], T]) -> T:
        """Run `work`, which makes one statement (`schema.single`): it commits by itself, in one round trip.

        Repeated and refused like `run`. The statement has been committed when it answers, whatever `work` raises then;
        whether it was when the connection is lost, nobody knows, so that it has to be safe to repeat.
        """

        def once() -> T:
            pool = self.engine.pool
            assert isinstance(pool, LendingPool)
            try:
                entry = pool.lend()
            except psycopg.Error as error:
                raise _as_dbapi_error(error, lost=True) from error
            driver = entry.dbapi_connection
            assert isinstance(driver, psycopg.Connection)
            try:
                return work(driver)
            except psycopg.Error as error:
                raise _as_dbapi_error(error, lost=driver.broken) from error
            finally:
                pool.take_back(entry, driver)

        return self._tried(once)

    def _tried(self, once: Callable[[], T]) -> T:
        try:
            return once()
        except (DBAPIError, PoolTimeout) as error:
            if not is_conflict(error) and not is_outage(error):
                raise
            return self._tried_again(once, error)

    def _tried_again(self, once: Callable[[], T], failed: Exception) -> T:
        """What is left to do when the first try `failed`, which counts."""
        failures = [failed]

        def again() -> T:
            if failures:
                raise failures.pop()
            return once()

        conflicts = Retrying(
            sleep=clock.sleep,
            retry=retry_if_exception(is_conflict),
            stop=stop_after_attempt(5),
            wait=_FullJitter(self._chance, base=0.01, cap=0.5),
            reraise=True,
        )
        outages = Retrying(
            sleep=clock.sleep,
            retry=retry_if_exception(is_outage),
            stop=stop_after_delay(self._settings.outage_seconds),
            wait=_FullJitter(self._chance, base=0.1, cap=2.0),
            reraise=True,
        )
        try:
            result: T = outages(conflicts, again)
            return result
        except (DBAPIError, PoolTimeout) as error:
            if is_outage(error):
                raise NotReady("the database cannot be reached") from error
            raise

    def listen(self) -> psycopg.Connection[Any]:
        """A connection of its own outside the pools, in autocommit, for LISTEN and session locks."""
        settings = self._settings.model_copy(update={"idle_in_transaction_timeout": 0.0})
        arguments = connect_arguments(settings, role="leasehold-listen")
        return psycopg.connect(libpq_url(self.listen_url), autocommit=True, **arguments)

    def close(self) -> None:
        """Give every pooled connection back. The database may be used again afterwards."""
        self.engine.dispose()
        self.reserve.dispose()


def _as_dbapi_error(error: psycopg.Error, *, lost: bool) -> DBAPIError:
    """The driver's error as SQLAlchemy raises it."""
    told = DBAPIError.instance(None, None, error, psycopg.Error, hide_parameters=True, connection_invalidated=lost)
    assert isinstance(told, DBAPIError)
    return told


def libpq_url(url: str) -> str:
    """The URL as libpq understands it, without SQLAlchemy's driver name."""
    parsed = make_url(url).set(drivername="postgresql")
    return parsed.render_as_string(hide_password=False)


def connect_arguments(settings: DatabaseSettings, *, role: str) -> dict[str, Any]:
    """libpq parameters: the schema, the three timeouts, keepalives that notice a dead peer within seconds, and plans.

    Every statement of ours has an index for its way. Without these settings a plan made while the tables were empty,
    or before their first ANALYZE, reads them whole when they have grown, for a minute and more.
    """
    options = {
        "search_path": "leasehold,public",
        "timezone": "UTC",
        "jit": "off",
        "default_transaction_isolation": r"read\ committed",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "statement_timeout": int(settings.statement_timeout * 1000),
        "lock_timeout": int(settings.lock_timeout * 1000),
        "idle_in_transaction_session_timeout": int(settings.idle_in_transaction_timeout * 1000),
    }
    return {
        "application_name": role[:63],
        "client_encoding": "utf8",
        "options": " ".join(f"-c {name}={value}" for name, value in options.items()),
        "connect_timeout": 5,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction lost against another one and may simply be repeated."""
    return isinstance(error, DBAPIError) and _code(error) in CONFLICTS


def is_outage(error: BaseException) -> bool:
    """Whether the server, or the way to it, was not there."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    code = _code(error)
    return (
        error.connection_invalidated
        or (code is None and _lost_connection(error))
        or (bool(code) and _is_outage_code(code or ""))
    )


def _is_outage_code(code: str) -> bool:
    return code.startswith("08") or code in OUTAGES


def _lost_connection(error: DBAPIError) -> bool:
    return isinstance(error.orig, psycopg.OperationalError)


def _code(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _engine(url: str, settings: DatabaseSettings, *, role: str, size: int) -> Engine:
    engine = create_engine(
        make_url(url).set(drivername="postgresql+psycopg"),
        poolclass=LendingPool,
        pool_size=size,
        max_overflow=0,
        pool_timeout=10,
        pool_use_lifo=True,
        isolation_level="READ COMMITTED",
        hide_parameters=True,
        connect_args=connect_arguments(settings, role=role),
    )
    event.listen(engine, "connect", lambda connection, _: register_adapters(connection))
    return engine


class _FullJitter(wait_base):
    """A random wait between 0 and min(cap, base x 2^attempt) seconds."""

    def __init__(self, chance: random.Random, *, base: float, cap: float) -> None:
        self._chance, self._base, self._cap = chance, base, cap

    def __call__(self, retry_state: Any) -> float:
        return self._chance.uniform(0.0, min(self._cap, self._base * 2.0 ** min(retry_state.attempt_number, 30)))


# One statement that is a transaction of its own, through libpq and nothing above it.
#
# What the layers above spend on a statement is worth it for most, and more than the whole of a short one.


UNKNOWN_STATEMENT = b"26000"
TUPLES = pq.ExecStatus.TUPLES_OK


def single_row(driver: "psycopg.Connection[Any]", statement: bytes, *values: bytes) -> list[bytes | None]:
    """The one row that the statement, with parameters $1, $2 and so on, answers with; it has been committed then.

    All is text in UTF-8, so the connection must be one of `schema.engine`; it is outside a transaction. Raises
    psycopg.Error.
    """
    result = driver.pgconn.exec_prepared(_statement_name(statement), values)
    if result.status != TUPLES:
        result = _unprepared(driver, result, statement, values)
    return [result.get_value(0, column) for column in range(result.nfields)]


@cache
def _statement_name(statement: bytes) -> bytes:
    """What the statement is prepared as. Whoever has prepared something by this name has prepared the same."""
    return b"leasehold_" + sha256(statement).hexdigest()[:16].encode()


def _unprepared(
    driver: "psycopg.Connection[Any]", failed: pq.abc.PGresult, statement: bytes, values: Sequence[bytes]
) -> pq.abc.PGresult:
    """The result without what was prepared, if only that was missing.

    Not prepared yet, or not any more: the driver forgets all when a transaction is rolled back, and behind a pooler
    each statement may meet another session. What is prepared now is for the next time, and may be there already.
    """
    if _sqlstate(failed) != UNKNOWN_STATEMENT:
        raise _result_error(driver, failed)
    result = driver.pgconn.exec_params(statement, values)
    if result.status != TUPLES:
        raise _result_error(driver, result)
    driver.pgconn.prepare(_statement_name(statement), statement)
    return result


def _sqlstate(result: pq.abc.PGresult) -> bytes | None:
    return result.error_field(pq.DiagnosticField.SQLSTATE)


def _result_error(driver: "psycopg.Connection[Any]", result: pq.abc.PGresult) -> psycopg.Error:
    if _sqlstate(result) is None:
        return psycopg.OperationalError(driver.pgconn.get_error_message())
    return errors.error_from_result(result)
