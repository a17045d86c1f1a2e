"""Connections, transactions, and the two budgets for repeating them: one for conflicts, one for outages.

Callers pass a function of a connection. It is called again in a new transaction if the first try was not committed. It
must therefore be safe to repeat, which fenced moves are.

`run_alone` is for statements each of which is a transaction by itself: `single_row` executes one in one round trip.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import psycopg
import structlog
from leasehold.errors import NotReady
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay
from tenacity.wait import wait_base

from schema import clock
from schema.postgres import pooler
from schema.postgres.connection import Connection
from schema.postgres.connection_pool import ConnectionPool, register_adapters
from schema.postgres.failures import READ_ONLY, cannot_notify, describe_outage, is_conflict, is_outage
from schema.postgres.pooler import Problem
from schema.postgres.session import BEGIN, Message, Session
from schema.postgres.statements import Statement
from schema.postgres.urls import libpq_url
from schema.postgres.waits import PATIENCE, WatchedConnection
from schema.sql import SCHEMA

T = TypeVar("T")

#: Seconds for which a connection outside the pools waits for an answer.
LISTEN_PATIENCE = 10.0
#: Seconds for which a process sends no wake-ups after the server had no room for them. Work is found by polls then.
SILENCE = 5.0
#: Which part of the queue of notifications is in use. Asking also empties it of what every listener has read: by the
#: server itself this is done only when somebody notifies or reads, and both fail while it is full.
QUEUE_USAGE = Statement("SELECT pg_notification_queue_usage()")
_SILENTLY = Message(b"SELECT set_config('leasehold.wake', 'off', true)")

log = structlog.get_logger()


class DatabaseSettings(BaseModel):
    """The database of a pool, and limits of each process on it. Time-outs are in seconds.

    url: `embedded`, or a URL as libpq takes it (`postgresql://user@host/database`), also with several hosts.
    listen_url: a direct URL for LISTEN when `url` goes through a transaction pooler.
    read_url: URL of a standby, from which gateways read what may be a little old. read_max_lag: seconds that it may be
        behind.
    pooler: `transaction` if `url` goes through a pooler that may give each transaction another session.
    pool: connections that a process may hold for its work.
    reserve: connections that are kept for heartbeats and upkeep, in addition to `pool`.
    outage_seconds: how long a transaction tries to reconnect before it fails.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: SecretStr = SecretStr("embedded")
    listen_url: SecretStr | None = None
    read_url: SecretStr | None = None
    read_max_lag: float = Field(default=10.0, ge=1, le=3600)
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


@dataclass(frozen=True)
class OtherSessions:
    """How the sessions of a database differ from the usual ones: for a pool that has a clock of its own.

    settings: of each session, beside or in place of the usual ones. opened: called with each new session of the pools.
    lent: called with a session before each use of it, outside of a transaction.
    """

    settings: Mapping[str, str]
    opened: Callable[[Session], None]
    lent: Callable[[Session], None]


class Database:
    """The connections of one process to one database: a pool for work, and a small one for heartbeats and upkeep."""

    #: A transaction that waited for a lock in vain is repeated, as after other conflicts.
    _repeats_waits = True

    def __init__(
        self,
        url: str,
        settings: DatabaseSettings,
        *,
        role: str,
        chance: random.Random,
        other: OtherSessions | None = None,
    ) -> None:
        self.url, self._other = url, other
        self.listen_url = settings.listen_url.get_secret_value() if settings.listen_url else url
        self.is_pooled = settings.pooler == "transaction"
        self._settings = settings
        self._chance = chance
        self._silent_until = 0.0
        self.work = self._pool(role, settings.pool)
        self.reserve = self._pool(f"{role}-reserve", settings.reserve)

    def waiting_once(self) -> "Database":
        """Return these connections, for transactions that are not repeated if they waited for a lock in vain."""
        found = copy(self)
        found._repeats_waits = False
        return found

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
        pool = self.reserve if urgent else self.work

        def once() -> T:
            try:
                with self.begin(pool, kept_plans=kept_plans) as connection:
                    return work(connection)
            except Exception:
                if undone is not None:
                    undone()
                raise

        return self._tried(once, pool) if repeat else self._with_room(once, pool)

    def run_alone(self, work: Callable[[Session], T]) -> T:
        """Run `work`, which executes statements with `single_row`; each commits in the same round trip.

        Repeats and raises like `run`. Once a statement has answered it is committed, even if `work` then raises. If the
        connection is lost nobody knows whether it was committed, so all of them must be safe to repeat.
        """

        def once() -> T:
            with self._lent(self.work) as session:
                session.forget_if_outdated()
                settings = session.settings
                if self._is_silent:
                    session.settings = (*settings, _SILENTLY)
                try:
                    return work(session)
                finally:
                    session.settings = settings

        return self._tried(once, self.work)

    @contextmanager
    def connect(self, pool: ConnectionPool | None = None, *, kept_plans: bool = False) -> Iterator[Connection]:
        """Lend a connection, one of those for work unless another pool is given. What was not committed is undone."""
        with self._lent(pool or self.work) as session:
            connection = Connection(session, kept_plans=kept_plans, silent=self._is_silent)
            try:
                yield connection
            finally:
                connection.rollback()

    @contextmanager
    def begin(self, pool: ConnectionPool | None = None, *, kept_plans: bool = False) -> Iterator[Connection]:
        """Lend a connection for one transaction, which is committed at the end of the block unless that raises."""
        with self.connect(pool, kept_plans=kept_plans) as connection:
            yield connection
            connection.commit()

    @contextmanager
    def _lent(self, pool: ConnectionPool) -> Iterator[Session]:
        with pool.lend() as session:
            try:
                if self._other is not None:
                    self._other.lent(session)
                yield session
            except psycopg.Error as error:
                # What has cut one off may have cut off all. Where no writes are taken, another server may take them.
                if session.closed or error.sqlstate == READ_ONLY:
                    self.work.discard_all()
                    self.reserve.discard_all()
                raise

    def repeat(self, once: Callable[[], T]) -> T:
        """Call `once`, which is one transaction on a connection of its own, and repeat it as `run` does."""
        return self._tried(once, self.reserve)

    @property
    def _is_silent(self) -> bool:
        return clock.monotonic() < self._silent_until

    def _with_room(self, once: Callable[[], T], pool: ConnectionPool) -> T:
        """Run `once`, which uses `pool`; if its notifications have no room, make some and repeat, then repeat without
        notifications."""
        try:
            return once()
        except psycopg.Error as error:
            if not cannot_notify(error):
                raise
        with self.begin(pool) as connection:
            connection.execute(QUEUE_USAGE)
        try:
            return once()
        except psycopg.Error as error:
            if not cannot_notify(error):
                raise
        self._silent_until = clock.monotonic() + SILENCE
        log.warning("the server has no room for notifications, so work waits for polls", seconds=SILENCE)
        return once()

    def _tried(self, once: Callable[[], T], pool: ConnectionPool) -> T:
        try:
            return self._with_room(once, pool)
        except psycopg.Error as error:
            if not self._is_repeated(error) and not is_outage(error):
                raise
            return self._tried_again(once, pool, error)

    def _is_repeated(self, error: BaseException) -> bool:
        return is_conflict(error) and (self._repeats_waits or not isinstance(error, psycopg.errors.LockNotAvailable))

    def _tried_again(self, once: Callable[[], T], pool: ConnectionPool, failed: Exception) -> T:
        """Repeat `once` within both budgets. The first try, which `failed`, counts as one."""
        failures = [failed]

        def again() -> T:
            if failures:
                raise failures.pop()
            return self._with_room(once, pool)

        conflicts = Retrying(
            sleep=clock.sleep,
            retry=retry_if_exception(self._is_repeated),
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
        except psycopg.Error as error:
            if is_outage(error):
                raise NotReady(describe_outage(error)) from error
            raise

    def listen(self) -> psycopg.Connection[Any]:
        """A new connection outside the pools, in autocommit mode, for LISTEN and session locks."""
        settings = self._settings.model_copy(update={"idle_in_transaction_timeout": 0.0})
        return _connect_alone(self.listen_url, settings, role="leasehold-listen")

    def find_pooler_problem(self) -> Problem | None:
        """A pooler on the way to the server that makes it unsafe, if there is one. Raises NotReady as `run` does."""
        wanted = self._wanted()
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

    def connect_for_steps(self) -> psycopg.Connection[Any]:
        """A new connection outside the pools, for a transaction that may take long."""
        made = psycopg.Connection[Any].connect(libpq_url(self.url), **self._arguments("leasehold-upgrade"))
        made.prepare_threshold = None
        return made

    def settings_for_steps(self) -> list[str]:
        """The statements with which that transaction has to begin."""
        return pooler.local_settings(self._wanted()) if self.is_pooled else []

    def _wanted(self) -> dict[str, str]:
        """Return the settings of a session, or those of a transaction whose session is a pooler's."""
        wanted = session_settings(self._settings)
        if self.is_pooled:
            del wanted["idle_session_timeout"]  # which counts between transactions
        return wanted

    def _arguments(self, role: str) -> dict[str, Any]:
        """As of `connect_arguments`; through a pooler each transaction begins with the settings of the session."""
        changed = {} if self._other is None else self._other.settings
        arguments = connect_arguments(self._settings, role=role, changed=changed)
        return arguments | {"options": ""} if self.is_pooled else arguments

    def close(self) -> None:
        """Close every pooled connection. The object may be used again afterwards."""
        self.work.close()
        self.reserve.close()

    def _pool(self, role: str, size: int) -> ConnectionPool:
        arguments, wanted = self._arguments(role), self._wanted()

        def connect() -> Session:
            """Connect by the URL as it is: libpq reads it."""
            try:
                made = Session.connect(libpq_url(self.url), autocommit=True, **arguments)
            except psycopg.OperationalError as error:
                if pooler.is_refusal(error):
                    raise NotReady(f"{pooler.REFUSED.found}; {pooler.REFUSED.remedy}") from None
                raise
            if self.is_pooled:
                made.is_own = False
                made.begins = (BEGIN, *(Message(each.encode()) for each in pooler.local_settings(wanted)))
                made.settings = (pooler.settings_alone(wanted),)
            else:
                made.began = clock.monotonic()
            register_adapters(made)
            made.watch(self._settings.statement_timeout * PATIENCE)
            if self._other is not None:
                self._other.opened(made)
            return made

        return ConnectionPool(connect, size=size)


def _connect_alone(url: str, settings: DatabaseSettings, *, role: str) -> WatchedConnection:
    """A new connection outside the pools, in autocommit mode, which waits for each answer for a limited time."""
    made = WatchedConnection.connect(libpq_url(url), autocommit=True, **connect_arguments(settings, role=role))
    made.watch(LISTEN_PATIENCE)
    return made


#: The tables of the caller, if they have a session in common, are looked at last: also temporary ones, which are looked
#: at first unless the path names them. Functions that callers call keep the path with which they were made.
SEARCH_PATH = f"{SCHEMA},pg_temp"


def session_settings(settings: DatabaseSettings) -> dict[str, str]:
    """The server's settings that every transaction needs: the schema, forms of values, plans, and time-outs in
    milliseconds.

    A role or a database may have others. Times are read in ISO alone, and text that is written by the usual rules would
    be read by others.

    Statements are written for scans of indexes, so sequential and bitmap scans are off; the few that read a whole table
    say so. Otherwise a plan made while the tables were empty, or before their first ANALYZE, would read grown tables
    whole, for a minute or more.
    """
    return {
        "search_path": SEARCH_PATH,
        "timezone": "UTC",
        "datestyle": "ISO, MDY",
        "standard_conforming_strings": "on",
        "array_nulls": "on",
        "quote_all_identifiers": "off",
        "jit": "off",
        "default_transaction_isolation": "read committed",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "statement_timeout": f"{settings.statement_timeout * 1000:.0f}",
        "lock_timeout": f"{settings.lock_timeout * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{settings.idle_in_transaction_timeout * 1000:.0f}",
        "idle_session_timeout": "0",
    }


def connect_arguments(
    settings: DatabaseSettings, *, role: str, changed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """libpq parameters: the settings of the session, some of them `changed`, and keepalives that notice a dead peer in
    seconds."""
    wanted = session_settings(settings) | dict(changed or {})
    options = {name: value.replace(" ", r"\ ") for name, value in wanted.items()}
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


class _FullJitter(wait_base):
    """A random wait between 0 and min(cap, base x 2^attempt) seconds."""

    def __init__(self, chance: random.Random, *, base: float, cap: float) -> None:
        self._chance, self._base, self._cap = chance, base, cap

    def __call__(self, retry_state: Any) -> float:
        return self._chance.uniform(0.0, min(self._cap, self._base * 2.0 ** min(retry_state.attempt_number, 30)))


def single_row(session: Session, statement: bytes, *values: bytes | None) -> list[bytes | None]:
    """Execute and commit a statement with parameters $1, $2 and so on, and return its only row.

    Values are text in UTF-8. The session must be outside a transaction. Raises psycopg.Error.
    """
    result = session.send([*session.settings, Message(statement, values)])[-1]
    assert result.ntuples == 1
    return [result.get_value(0, column) for column in range(result.nfields)]
