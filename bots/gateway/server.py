"""The gateway's HTTP server: its sockets, its start and stop."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from leasehold.errors import BadInput
from uvicorn.config import STARTUP_FAILURE

from bots.gateway.connection import HttpConnection, TlsListener
from bots.gateway.connection_limits import MOST_BY_DEFAULT, RESERVED_FILES, ConnectionLimits, ConnectionTable
from bots.gateway.settings import GatewaySettings
from schema.gc_tuning import infrequent_gc

#: Connections that may wait until they are accepted.
BACKLOG = 4096
#: Seconds within which calls under way must end at shutdown. Long polls are answered at once.
SHUTDOWN_SECONDS = 10
#: TCP keep-alive: seconds of silence before the first probe, seconds between probes, number of probes. While a call is
#: held, a bot whose machine is gone sends nothing, and the gateway must not keep its session alive. There are several
#: probes because some get lost: peers that connected in the same second are probed at the same moment, and a kernel
#: drops packets beyond its queue, which holds 1,000 on a loopback device.
PROBE_AFTER, PROBE_EVERY, PROBES = 10, 3, 8
#: Thresholds of the garbage collector: new objects between two collections, and how rarely older objects are included.
#: Held calls are a million objects that stay. With Python's defaults each full collection stops the gateway for 0.2 s.
GARBAGE = (2_000, 10, 5)


class Server(uvicorn.Server):
    """A uvicorn server that reports its address, answers long polls at its end, and stops without a signal."""

    def __init__(
        self,
        app: FastAPI,
        settings: GatewaySettings,
        *,
        on_ready: Callable[[str], None],
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Make a server. `limits`: those of connections, with their numbers; None = by the settings."""
        if limits is None:
            limits = connection_limits(settings, files=_allow_many_files())
        self._connections = ConnectionTable(limits, app.state.metrics)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here asks for the address of a client behind a proxy
                lifespan="on",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                ws="none",
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        self.servers: list[Any] = []  # uvicorn closes them at the end
        self._app, self._settings, self._on_ready = app, settings, on_ready

    def serve_until_stopped(self) -> None:
        """Serve until `stop` is called; in the main thread also until SIGTERM or SIGINT.

        Raises BadInput if the address or the TLS files cannot be used.
        """
        try:
            self.config.load()
        except (OSError, ssl.SSLError) as error:
            raise BadInput("gateway.tls_cert", f"cannot be used: {error.strerror or error}") from None
        with contextlib.closing(_bind(self._settings)) as listener, infrequent_gc(*GARBAGE):
            self.run(sockets=[listener])
        if self._settings.unix_socket is not None:
            self._settings.unix_socket.unlink(missing_ok=True)

    def stop(self) -> None:
        """Ask the server to stop; any thread may call this."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Instead of uvicorn's, which makes other connections and does not count those in their handshake.
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        tls = self.config.ssl
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            made: asyncio.AbstractServer | TlsListener
            if tls is None:
                made = await loop.create_server(self._connection, sock=listener, backlog=BACKLOG)
            else:
                admitted = partial(self._connection, admitted=True)
                made = TlsListener(listener, tls, table=self._connections, make=admitted)
            self.servers.append(made)
            self._on_ready(_url(self._settings, listener))
        self.started = True

    def _connection(self, *, admitted: bool = False) -> HttpConnection:
        return HttpConnection(
            self.config, self.server_state, self.lifespan.state, table=self._connections, admitted=admitted
        )

    async def on_tick(self, counter: int) -> bool:
        self._connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.polls.end()
        await super().shutdown(sockets=sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _bind(settings: GatewaySettings) -> socket.socket:
    if settings.unix_socket is not None:
        return _bind_path(settings.unix_socket)
    host = settings.host
    try:
        found = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
        # Connections inherit this. Without it the second write of each answer waits 40 ms for a delayed ACK. asyncio
        # sets it only on sockets that were made with an explicit protocol number.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", PROBE_AFTER), ("TCP_KEEPINTVL", PROBE_EVERY), ("TCP_KEEPCNT", PROBES)):
            if hasattr(socket, option):  # not every system has all of them
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return listener
    except OSError as error:
        raise BadInput("gateway.port", f"cannot listen on {host}:{settings.port}: {error.strerror}") from None


def _bind_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadInput("gateway.unix_socket", f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def _answers(path: Path) -> bool:
    """Return True if a process listens on the socket; a file left by a killed process has no listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _url(settings: GatewaySettings, listener: socket.socket) -> str:
    if settings.unix_socket is not None:
        return f"http+unix://{settings.unix_socket.absolute()}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    if ip_address(host).is_unspecified:
        host = socket.gethostname() if scheme == "https" else {"0.0.0.0": "127.0.0.1", "::": "::1"}[host]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def connection_limits(settings: GatewaySettings, *, files: int) -> ConnectionLimits:
    """Return the limits for these settings in a process that may open so many files.

    Raises BadInput if more connections are set than it may have.
    """
    room = max(1, files - RESERVED_FILES)
    most = settings.max_connections or min(room, MOST_BY_DEFAULT)
    if most > room:
        raise BadInput(
            "gateway.max_connections",
            f"{most} of them need {most + RESERVED_FILES} open files, but this process may have {files} (ulimit -n)",
        )
    return ConnectionLimits(connections=most, per_address=settings.max_connections_per_address or max(1, most // 2))


def _allow_many_files() -> int:
    """Raise the soft limit of open files to the hard one, because each connection is a file; return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files
