"""Connections, transactions, and the two budgets for repeating them: one for conflicts, one for outages.

Callers pass a function of a connection. It is called again in a new transaction if the first try was not committed. It
must therefore be safe to repeat, which fenced moves are.

Short statements take a faster path. `run_alone` borrows a driver connection from the pool, without SQLAlchemy's
proxies, and `single_row` executes one prepared statement through libpq. For such statements the layers above cost more
than the statement itself.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any, Literal, Self, TypeVar

import psycopg
import structlog
from leasehold.errors import NotReady
from psycopg import errors, pq
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay
from tenacity.wait import wait_base

from schema import clock
from schema.postgres import pooler
from schema.postgres.connection_pool import LendingPool, register_adapters
from schema.postgres.failures import READ_ONLY, cannot_notify, describe_outage, is_conflict, is_outage
from schema.postgres.kept_statements import SessionConnection
from schema.postgres.pooler import Problem, TransactionConnection
from schema.postgres.urls import libpq_url
from schema.postgres.waits import PATIENCE, WatchedConnection
from schema.postgres.work_connection import WorkConnection
from schema.tables.columns import SCHEMA

T = TypeVar("T")

#: Seconds for which a connection outside the pools waits for an answer.
LISTEN_PATIENCE = 10.0
#: Seconds for which a process sends no wake-ups after the server had no room for them. Work is found by polls then.
SILENCE = 5.0
#: Which part of the queue of notifications is in use. Asking also empties it of what every listener has read: by the
#: server itself this is done only when somebody notifies or reads, and both fail while it is full.
QUEUE_USAGE = text("SELECT pg_notification_queue_usage()")
_SILENTLY = text("SET LOCAL leasehold.wake = off")

log = structlog.get_logger()


class DatabaseSettings(BaseModel):
    """The database of a pool, and limits of each process on it. Time-outs are in seconds.

    url: `embedded`, or a URL as libpq takes it (`postgresql://user@host/database`), also with several hosts.
    listen_url: a direct URL for LISTEN when `url` goes through a transaction pooler.
    pooler: `transaction` if `url` goes through a pooler that may give each transaction another session.
    pool: connections that a process may hold for its work.
    reserve: connections that are kept for heartbeats and upkeep, in addition to `pool`.
    outage_seconds: how long a transaction tries to reconnect before it fails.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: SecretStr = SecretStr("embedded")
    listen_url: SecretStr | None = None
    pooler: Literal["none", "transaction"] = "none"
    pool: int = Field(default=8, ge=1, le=500)
    reserve: int = Field(default=2, ge=1, le=50)
    statement_timeout: float = Field(default=10.0, gt=0, le=3600)
    lock_timeout: float = Field(default=1.0, gt=0, le=600)
    idle_in_transaction_timeout: float = Field(default=5.0, gt=0, le=3600)
    outage_seconds: float = Field(default=30.0, ge=0, le=3600)

    @model_validator(mode="after")
    def _pooler_has_a_way_around(self) -> Self:
        if self.pooler == "transaction" and self.listen_url is None:
            raise ValueError('pooler = "transaction" needs listen_url, a URL of the server itself, for notifications')
        return self


class Database:
    """The connections of one process to one database: a pool for work, and a small one for heartbeats and upkeep."""

    def __init__(self, url: str, settings: DatabaseSettings, *, role: str, chance: random.Random) -> None:
        self.url = url
        self.listen_url = settings.listen_url.get_secret_value() if settings.listen_url else url
        self.is_pooled = settings.pooler == "transaction"
        self._settings = settings
        self._chance = chance
        self._silent_until = 0.0
        self.engine = _engine(url, settings, role=role, size=settings.pool)
        self.reserve = _engine(url, settings, role=f"{role}-reserve", size=settings.reserve)

    def run(
        self,
        work: Callable[[Connection], T],
        *,
        urgent: bool = False,
        undone: Callable[[], None] | None = None,
        repeat: bool = True,
        kept_plans: bool = False,
    ) -> T:
        """Run `work` in one READ COMMITTED transaction, commit, and return its result.

        urgent: use the reserved connections.
        kept_plans: the server uses the plans that each connection keeps, which suit any values. For work that is
            mostly on few rows, because its statements take longer to plan than to execute, and for work whose plans
            depend on no values.
        repeat: false = raise a lost conflict and an outage at once, for callers that have a deadline of their own.
        undone: called after each try that failed, so that the caller can discard what the try has put into memory.
        A transaction that loses a conflict is tried at most 5 times, with full jitter. After a lost connection it is
        repeated until `outage_seconds` have passed, then this raises NotReady. If the server has no room for its
        notifications, it is repeated at last without them. Any other error is raised at once, and the transaction is
        rolled back.
        """
        engine = self.reserve if urgent else self.engine

        def once() -> T:
            try:
                with engine.begin() as connection:
                    if kept_plans and not self.is_pooled:  # through a pooler no statement is prepared, and no plan kept
                        assert isinstance(connection, WorkConnection)
                        connection.begin_with_kept_plans()
                    if self._is_silent:
                        connection.execute(_SILENTLY)
                    return work(connection)
            except Exception:
                if undone is not None:
                    undone()
                raise

        return self._tried(once, engine) if repeat else self._with_room(once, engine)

    def run_alone(self, work: Callable[["psycopg.Connection[Any]"], T]) -> T:
        """Run `work`, which executes statements with `single_row`; each commits in the same round trip.

        Repeats and raises like `run`. Once a statement has answered it is committed, even if `work` then raises. If the
        connection is lost nobody knows whether it was committed, so all of them must be safe to repeat.
        """

        def once() -> T:
            pool = self.engine.pool
            assert isinstance(pool, LendingPool)
            try:
                entry = pool.lend()
            except psycopg.Error as error:
                raise _as_dbapi_error(error, lost=False) from error
            driver = entry.dbapi_connection
            assert isinstance(driver, psycopg.Connection)
            try:
                if self._is_silent:
                    with _silently(driver):
                        return work(driver)
                return work(driver)
            except psycopg.Error as error:
                read_only = error.sqlstate == READ_ONLY
                if read_only:
                    pool.discard_all()
                raise _as_dbapi_error(error, lost=driver.broken or read_only) from error
            finally:
                pool.take_back(entry, driver)

        return self._tried(once, self.engine)

    @property
    def _is_silent(self) -> bool:
        return clock.monotonic() < self._silent_until

    def _with_room(self, once: Callable[[], T], engine: Engine) -> T:
        """Run `once`, which uses `engine`; if its notifications have no room, make some and repeat, then repeat without
        notifications."""
        try:
            return once()
        except DBAPIError as error:
            if not cannot_notify(error):
                raise
        with engine.begin() as connection:
            connection.execute(QUEUE_USAGE)
        try:
            return once()
        except DBAPIError as error:
            if not cannot_notify(error):
                raise
        self._silent_until = clock.monotonic() + SILENCE
        log.warning("the server has no room for notifications, so work waits for polls", seconds=SILENCE)
        return once()

    def _tried(self, once: Callable[[], T], engine: Engine) -> T:
        try:
            return self._with_room(once, engine)
        except (DBAPIError, PoolTimeout) as error:
            if not is_conflict(error) and not is_outage(error):
                raise
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                self._begin_anew()
            return self._tried_again(once, engine, error)

    def _tried_again(self, once: Callable[[], T], engine: Engine, failed: Exception) -> T:
        """Repeat `once` within both budgets. The first try, which `failed`, counts as one."""
        failures = [failed]

        def again() -> T:
            if failures:
                raise failures.pop()
            return self._with_room(once, engine)

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
                raise NotReady(describe_outage(error)) from error
            raise

    def _begin_anew(self) -> None:
        """Replace every connection before its next use: what has cut one off may have cut off all."""
        for each in (self.engine, self.reserve):
            assert isinstance(each.pool, LendingPool)
            each.pool.discard_all()

    def listen(self) -> psycopg.Connection[Any]:
        """A new connection outside the pools, in autocommit mode, for LISTEN and session locks."""
        settings = self._settings.model_copy(update={"idle_in_transaction_timeout": 0.0})
        return _connect_alone(self.listen_url, settings, role="leasehold-listen")

    def find_pooler_problem(self) -> Problem | None:
        """A pooler on the way to the server that makes it unsafe, if there is one. Raises NotReady as `run` does."""
        wanted = session_settings(self._settings)
        seen = self.run(lambda connection: pooler.look(connection, list(wanted)), urgent=True)
        if self.is_pooled:
            try:
                if pooler.is_shared(self.listen):
                    return pooler.LISTEN_SHARED
            except psycopg.OperationalError as error:
                if pooler.is_refusal(error):
                    return pooler.LISTEN_SHARED
                # If the server is away, the listener connects by itself later.
        elif not seen.is_direct and pooler.is_shared(self._connect):
            return pooler.SHARED
        return pooler.find_lost(seen, wanted)

    def _connect(self) -> psycopg.Connection[Any]:
        made = _connect_alone(self.url, self._settings, role="leasehold-check")
        made.prepare_threshold = None
        return made

    def close(self) -> None:
        """Close every pooled connection. The object may be used again afterwards."""
        self.engine.dispose()
        self.reserve.dispose()


def _connect_alone(url: str, settings: DatabaseSettings, *, role: str) -> WatchedConnection:
    """A new connection outside the pools, in autocommit mode, which waits for each answer for a limited time."""
    made = WatchedConnection.connect(libpq_url(url), autocommit=True, **connect_arguments(settings, role=role))
    made.watch(LISTEN_PATIENCE)
    return made


@contextmanager
def _silently(driver: "psycopg.Connection[Any]") -> Iterator[None]:
    """Let statements that are executed alone on this connection send no wake-ups."""
    if isinstance(driver, TransactionConnection):
        settings, driver.settings = driver.settings, driver.settings + pooler.SILENTLY
        try:
            yield
        finally:
            driver.settings = settings
    else:
        assert isinstance(driver, SessionConnection)
        with driver.waiting():
            driver.pgconn.exec_(b"SET leasehold.wake = off")
        try:
            yield
        finally:
            with driver.waiting():
                driver.pgconn.exec_(b"RESET leasehold.wake")


def _as_dbapi_error(error: psycopg.Error, *, lost: bool) -> DBAPIError:
    """The driver's error as SQLAlchemy raises it."""
    told = DBAPIError.instance(None, None, error, psycopg.Error, hide_parameters=True, connection_invalidated=lost)
    assert isinstance(told, DBAPIError)
    return told


#: The tables of the caller, if they have a session in common, are looked at last: also temporary ones, which are looked
#: at first unless the path names them. Functions that callers call keep the path with which they were made.
SEARCH_PATH = f"{SCHEMA},pg_temp"


def session_settings(settings: DatabaseSettings) -> dict[str, str]:
    """The server's settings that every transaction needs: the schema, three time-outs in milliseconds, and plans.

    Every statement of Leasehold has an index that serves it, so sequential and bitmap scans are off. Otherwise a plan
    made while the tables were empty, or before their first ANALYZE, would read grown tables whole, for a minute or
    more.
    """
    return {
        "search_path": SEARCH_PATH,
        "timezone": "UTC",
        "jit": "off",
        "default_transaction_isolation": "read committed",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "statement_timeout": f"{settings.statement_timeout * 1000:.0f}",
        "lock_timeout": f"{settings.lock_timeout * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{settings.idle_in_transaction_timeout * 1000:.0f}",
    }


def connect_arguments(settings: DatabaseSettings, *, role: str) -> dict[str, Any]:
    """libpq parameters: the settings of the session, and keepalives that notice a dead peer in seconds."""
    options = {name: value.replace(" ", r"\ ") for name, value in session_settings(settings).items()}
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


def _engine(url: str, settings: DatabaseSettings, *, role: str, size: int) -> Engine:
    arguments = connect_arguments(settings, role=role)
    pooled = settings.pooler == "transaction"
    if pooled:
        # No session is ours, so nothing is set or prepared in one; each transaction begins with the settings.
        arguments |= {"options": "", "autocommit": True, "prepare_threshold": None}
    engine = create_engine(
        "postgresql+psycopg://",
        poolclass=LendingPool,
        pool_size=size,
        max_overflow=0,
        pool_timeout=10,
        pool_use_lifo=True,
        isolation_level=None if pooled else "READ COMMITTED",
        hide_parameters=True,
        connect_args=arguments,
    )
    engine._connection_cls = WorkConnection
    wanted = session_settings(settings)

    def connect(_dialect: Any, _record: Any, _given: Any, arguments: dict[str, Any]) -> psycopg.Connection[Any]:
        """Connect by the URL as it is: libpq reads it, not SQLAlchemy."""
        kind = TransactionConnection if pooled else SessionConnection
        try:
            made = kind.connect(libpq_url(url), **arguments)
        except psycopg.OperationalError as error:
            if pooler.is_refusal(error):
                raise NotReady(f"{pooler.REFUSED.found}; {pooler.REFUSED.remedy}") from None
            raise
        if isinstance(made, TransactionConnection):
            made.begin_with, made.settings = pooler.begin_with(wanted), pooler.local_settings(wanted)
        else:
            made.began = clock.monotonic()
        made.watch(settings.statement_timeout * PATIENCE)
        return made

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "connect", lambda connection, _: register_adapters(connection))
    event.listen(engine, "handle_error", _leave_read_only)
    event.listen(engine, "checkin", _lose_patience)
    if pooled:
        event.listen(engine, "begin", _begin_through_pooler)
    return engine


def _begin_through_pooler(connection: Connection) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, TransactionConnection)
    connection.exec_driver_sql(driver.begin_with)


def _lose_patience(driver: Any, _record: Any) -> None:
    """Take back what a transaction was allowed to wait longer than usual."""
    if driver is not None:
        driver.patience = driver.usual


def _leave_read_only(context: ExceptionContext) -> None:
    """Let the pool replace all its connections when the server takes no writes: the next ones may find the primary."""
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


class _FullJitter(wait_base):
    """A random wait between 0 and min(cap, base x 2^attempt) seconds."""

    def __init__(self, chance: random.Random, *, base: float, cap: float) -> None:
        self._chance, self._base, self._cap = chance, base, cap

    def __call__(self, retry_state: Any) -> float:
        return self._chance.uniform(0.0, min(self._cap, self._base * 2.0 ** min(retry_state.attempt_number, 30)))


# One statement that is a transaction of its own, through libpq


UNKNOWN_STATEMENT = b"26000"
TUPLES = pq.ExecStatus.TUPLES_OK


def single_row(driver: "psycopg.Connection[Any]", statement: bytes, *values: bytes | None) -> list[bytes | None]:
    """Execute and commit a statement with parameters $1, $2 and so on, and return its only row.

    Values are text in UTF-8, so the connection must have been made by this module. It must be outside a transaction.
    Raises psycopg.Error.
    """
    if isinstance(driver, TransactionConnection):
        result = driver.execute_alone(statement, values)
    else:
        # The driver takes None for NULL, which its types leave out.
        sent: Sequence[Any] = values
        assert isinstance(driver, SessionConnection)
        driver.waits_since = clock.monotonic()
        try:
            result = driver.pgconn.exec_prepared(_statement_name(statement), sent)
            if result.status != TUPLES:
                result = _unprepared(driver, result, statement, sent)
        finally:
            driver.waits_since = None
    assert result.ntuples == 1
    return [result.get_value(0, column) for column in range(result.nfields)]


@cache
def _statement_name(statement: bytes) -> bytes:
    """The name under which the statement is prepared. Equal names always mean equal statements."""
    return b"leasehold_" + sha256(statement).hexdigest()[:16].encode()


def _unprepared(
    driver: "psycopg.Connection[Any]", failed: pq.abc.PGresult, statement: bytes, values: Sequence[Any]
) -> pq.abc.PGresult:
    """Execute an unprepared statement if the failure was only that it is not prepared, and prepare it for next time.

    A prepared statement can be missing because the driver drops all of them after a rollback. A failure to prepare it
    again is ignored.
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
