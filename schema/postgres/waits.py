"""A bound on each wait for the server: a connection on which no answer comes is cut, and its user begins anew.

The server ends a statement that takes too long, and TCP finds a peer that is gone. Neither helps if what is lost is
behind a proxy: then the connection lives, and nothing ever arrives. So each connection notes since when it has been
waiting. One thread of the process shuts the socket of a connection that has waited for longer than its patience:
whoever waits is told that the connection is lost, in whatever layer of the driver.
"""

import os
import socket
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import structlog

from schema import clock

R = TypeVar("R")

#: Seconds between two looks at the connections of the process.
LOOK = 0.5
#: Seconds that a statement without a limit on the server may take: a day.
LONGEST = 86_400.0
#: The patience of a connection, as a multiple of the time after which the server ends a statement.
PATIENCE = 2.0

log = structlog.get_logger(__name__)


class WatchedConnection(psycopg.Connection[Any]):
    """A connection that is cut after waiting for the server for longer than `patience` seconds at a time.

    waits_since: the monotonic time at which the present wait began, None between waits. usual: the patience that the
    connection has at the beginning of each transaction.
    """

    patience = usual = float("inf")
    waits_since: float | None = None

    def wait(self, gen: Generator[Any, Any, R], interval: float = 0.1, timeout: float | None = None) -> R:
        """Wait as the driver does."""
        self.waits_since = clock.monotonic()
        try:
            return super().wait(gen, interval, timeout)
        finally:
            self.waits_since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark what is done within as a wait for the server."""
        self.waits_since = clock.monotonic()
        try:
            yield
        finally:
            self.waits_since = None

    def allow(self, seconds: float) -> None:
        """Let statements, for which the server has another limit, take up to so many seconds."""
        self.patience = max(self.patience, seconds * PATIENCE)

    def watch(self, patience: float) -> None:
        """Begin to watch the connection."""
        self.patience = self.usual = patience
        _watch.add(self)


class _Watch:
    """The thread that looks at the connections of this process. It runs as long as the process once there was one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections = weakref.WeakSet[WatchedConnection]()
        self._thread: threading.Thread | None = None

    def add(self, connection: WatchedConnection) -> None:
        with self._lock:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="waits", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        never = threading.Event()
        while True:
            clock.wait(never, LOOK)
            with self._lock:
                connections = list(self._connections)
            now = clock.monotonic()
            for each in connections:
                since = each.waits_since
                if since is not None and now - since > each.patience:
                    _cut(each, since)


def _cut(connection: WatchedConnection, since: float) -> None:
    """Shut the socket of a connection that has been waiting since then."""
    try:
        copy = os.dup(connection.pgconn.socket)
    except (OSError, psycopg.Error):
        return  # it is closed already
    try:
        shut = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # it is closed, and its number belongs to something else by now
        return
    with shut:
        if connection.waits_since != since:
            return
        connection.waits_since = None
        log.warning("the server did not answer, so its connection is cut", after=round(connection.patience, 3))
        try:
            shut.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side has closed it meanwhile


_watch = _Watch()


def _begin_anew() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_anew)
