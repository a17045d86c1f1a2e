"""An HTTP server on bounded connections: what the gateway and the console have in common.

It is uvicorn's, with connections that keep to the limits of a ConnectionTable, also while a client shakes hands for
TLS.
"""

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from bots.gateway.connection import HttpConnection
from bots.gateway.connection_limits import ConnectionTable
from bots.gateway.listening import BACKLOG

#: Seconds within which a client must complete the TLS handshake.
HANDSHAKE_SECONDS = 10
#: The most connections that a `TlsAcceptor` accepts before other work goes on.
_ACCEPTED_AT_ONCE = 100
#: Seconds without accepting after a lack of files or memory.
_ACCEPT_AGAIN_SECONDS = 1
#: Counted from the beginning of a close, also while a client reads a long answer. The table cuts off earlier who does
#: not read.
_TLS_CLOSE_SECONDS = 3600


class HttpServer(uvicorn.Server):
    """Serves on bounded connections until `stop`; in the main thread also until SIGTERM or SIGINT.

    on_listening: is called for each socket once connections to it are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        table: ConnectionTable,
        *,
        on_listening: Callable[[socket.socket], None],
    ) -> None:
        super().__init__(config)
        self.servers: list[Any] = []  # uvicorn closes them at the end
        #: The first signal that asked it to stop.
        self.stopped_by: signal.Signals | None = None
        self._connections, self._on_listening = table, on_listening

    def stop(self) -> None:
        """Ask the server to stop; any thread may call this."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Instead of uvicorn's, which makes other connections and does not count those in their handshake.
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        tls = self.config.ssl
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            made: asyncio.AbstractServer | TlsAcceptor
            if tls is None:
                made = await loop.create_server(self._connection, sock=listener, backlog=BACKLOG)
            else:
                make = partial(self._connection, admitted=True)
                made = TlsAcceptor(listener, tls, table=self._connections, make=make)
            self.servers.append(made)
            self._on_listening(listener)
        self.started = True

    def _connection(self, *, admitted: bool = False) -> HttpConnection:
        return HttpConnection(
            self.config, self.server_state, self.lifespan.state, table=self._connections, admitted=admitted
        )

    async def on_tick(self, counter: int) -> bool:
        self._connections.sweep()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Unlike uvicorn's, it does not raise the signal again once the server has stopped.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class TlsAcceptor:
    """Accepts connections with TLS. Each has its place in the table from its first packet on.

    With asyncio's own acceptor it would have none before it can speak. A client that comes while there is no place is
    cut off without an answer, which would need a handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        *,
        table: ConnectionTable,
        make: Callable[[], HttpConnection],
    ) -> None:
        """Begin to accept. make: makes a connection that is in the table."""
        self._listener, self._context, self._table, self._make = listener, context, table, make
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and end the handshakes that are under way."""
        if self._listener.fileno() != -1:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Return when all handshakes have ended."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _resume(self) -> None:
        if self._listener.fileno() != -1:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no more files or memory
                self._table.refused("files")
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_AGAIN_SECONDS, self._resume)
                return
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        try:
            peer = accepted.getpeername()
        except OSError:  # it has gone already
            accepted.close()
            return
        address = str(peer[0]) if isinstance(peer, tuple) else None  # a Unix socket has none
        if self._table.admit(address) is not None:
            accepted.close()
            return
        accepted.setblocking(False)
        handshake = self._loop.create_task(self._shake_hands(accepted, address))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, address: str | None) -> None:
        connection = self._make()
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=_TLS_CLOSE_SECONDS,
            )
        except OSError:  # also an SSLError, and a client that took too long or hung up
            self._table.refused("handshake")
        finally:
            if not connection.was_made:
                self._table.dismiss(address)


def allow_many_files() -> int:
    """Raise the soft limit of open files to the hard one, because each connection is a file; return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files
