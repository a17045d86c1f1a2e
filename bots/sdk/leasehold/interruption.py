"""Breaking off the requests of another thread, which `AsyncPool` does for a call that is cancelled."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from http.client import HTTPConnection
from typing import Self


class Interruption:
    """Lets another thread break off what this one does: the requests and the pauses inside `with interruption:`.

    Whether a request that is broken off was executed is unknown.
    """

    def __init__(self) -> None:
        self._lock, self._wanted = threading.Lock(), threading.Event()
        self._connection: HTTPConnection | None = None
        self._before: Token[Interruption | None] | None = None

    def __enter__(self) -> Self:
        self._before = _INTERRUPTION.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _INTERRUPTION.reset(self._before)

    def interrupt(self) -> None:
        """Break off the request that is under way; later ones raise Interrupted."""
        with self._lock:
            self._wanted.set()
            if self._connection is not None and self._connection.sock is not None:
                shut_down(self._connection.sock)

    def check(self) -> None:
        """Raise Interrupted if another thread has asked for it."""
        if self._wanted.is_set():
            raise Interrupted

    def rest(self, seconds: float) -> None:
        """Sleep. Raises Interrupted."""
        if self._wanted.wait(seconds):
            raise Interrupted

    @contextmanager
    def of(self, connection: HTTPConnection) -> Iterator[None]:
        """Let `interrupt` end the use of this connection. Raises Interrupted."""
        with self._lock:
            self.check()
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


class Interrupted(Exception):
    """Another thread has broken off the call."""


_INTERRUPTION: ContextVar[Interruption | None] = ContextVar("leasehold_interruption", default=None)


def interruption_of_thread() -> Interruption | None:
    """Return what can break off the calls of the current thread."""
    return _INTERRUPTION.get()


def shut_down(connected: socket.socket) -> None:
    """Wake the thread that reads from a socket; the socket is at its end then."""
    with suppress(OSError):  # it has ended already
        # A TLS socket's own method would let another thread, which reads from it, fail with a ValueError.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
