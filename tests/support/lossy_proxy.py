"""A TCP proxy before a database server that loses connections without a word, as a firewall or a load balancer may."""

import socket
import threading
from contextlib import suppress

import psycopg

from schema.postgres.engine import libpq_url


class LossyProxy:
    """Forwards TCP connections to a server's socket. After `lose`, those that there are carry nothing any more.

    url: that of the same database through the proxy.
    """

    def __init__(self, url: str) -> None:
        with psycopg.connect(libpq_url(url)) as connection:
            host, port = connection.info.host, connection.info.port
            user, name = connection.info.user, connection.info.dbname
        self._target = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://{user}@127.0.0.1:{self._listener.getsockname()[1]}/{name}?sslmode=disable"
        self._lost = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self) -> None:
        """Let no byte pass on the connections that there are now."""
        self._lost.set()
        self._lost = threading.Event()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
                far.connect(self._target)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink, self._lost), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if lost.is_set():
                    continue
                sink.sendall(data)
        if not lost.is_set():
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
