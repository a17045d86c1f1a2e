"""The gateway's HTTP server: its settings, its start and stop."""

import contextlib
import socket
import ssl
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from leasehold.errors import BadInput

from bots.gateway.connection_limits import MOST_BY_DEFAULT, RESERVED_FILES, ConnectionLimits, ConnectionTable
from bots.gateway.http_server import HttpServer, allow_many_files
from bots.gateway.listening import bind, url_of
from bots.gateway.settings import GatewaySettings
from schema.gc_tuning import infrequent_gc

#: Seconds within which calls under way must end at shutdown. Long polls are answered at once.
SHUTDOWN_SECONDS = 10
#: Thresholds of the garbage collector: new objects between two collections, and how rarely older objects are included.
#: 10,000 held calls are 700,000 objects that stay, and a collection of them all stops the gateway for half a second.
#: Calls leave no garbage in cycles. In an idle pool as many objects are freed as are made, in waves of some thousands:
#: with a first number above that nothing is collected, with 2,000 it took a quarter of the gateway's time.
GARBAGE = (10_000, 5, 40)


class Server(HttpServer):
    """The server of a gateway's application, which reports its address and answers long polls at its end."""

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
            limits = connection_limits(settings, files=allow_many_files())
        config = uvicorn.Config(
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
        table = ConnectionTable(limits, app.state.metrics)
        super().__init__(config, table, on_listening=self._listens)
        self._app, self._settings, self._on_ready = app, settings, on_ready

    def serve_until_stopped(self) -> None:
        """Serve until `stop` is called; in the main thread also until SIGTERM or SIGINT.

        Raises BadInput if the address or the TLS files cannot be used.
        """
        try:
            self.config.load()
        except (OSError, ssl.SSLError) as error:
            raise BadInput("gateway.tls_cert", f"cannot be used: {error.strerror or error}") from None
        with contextlib.closing(bind(self._settings)) as listener, infrequent_gc(*GARBAGE):
            self.run(sockets=[listener])
        if self._settings.unix_socket is not None:
            self._settings.unix_socket.unlink(missing_ok=True)

    def _listens(self, listener: socket.socket) -> None:
        self._on_ready(url_of(self._settings, listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.polls.end()
        await super().shutdown(sockets=sockets)


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
