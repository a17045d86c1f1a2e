"""The row of one gateway process: its signs of life, its settings, and what it says of its own work.

Operators see it, and alerts go by it. Nothing else does, and a gateway whose row cannot be written serves as before.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

import psycopg
from leasehold.errors import NotReady

from bots.gateway.metrics import GatewayMetrics
from schema.clock import Monotonic
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.tenancy import processes
from schema.tenancy.processes import Configuration, Kind

#: Seconds between two signs of life.
INTERVAL = 5.0
#: Seconds over which each counter is told: those of the alerts that go by it.
COUNTED = {"requests": 300.0, "failed": 300.0, "connections_refused": 600.0}


class GatewayPresence:
    """Writes the row of this process. `run_once` is for a loop, which begins once the gateway listens at `url`."""

    def __init__(
        self,
        database: Database,
        metrics: GatewayMetrics,
        *,
        url: str,
        configuration: Configuration,
        now: Monotonic,
    ) -> None:
        """Begin to count."""
        self._database, self._metrics, self._url, self._configuration = database, metrics, url, configuration
        self._now, self._starts, self._written = now, True, False
        self._counted: deque[tuple[float, Mapping[str, float]]] = deque([(now(), metrics.totals())])
        self.name = gateway_name(url)

    def configured(self, configuration: Configuration) -> None:
        """Set what the process says of its configuration, which is written with the next sign of life."""
        self._configuration, self._written = configuration, False

    def run_once(self) -> float:
        """Write a sign of life, with the settings if they are new. Returns the seconds until the next call."""
        figures, configuration, is_new = self._figures(), self._configuration, not self._written

        def work(connection: Connection) -> None:
            processes.record_gateway_alive(connection, self.name, url=self._url, figures=figures, starts=self._starts)
            if is_new:
                processes.record_configuration(connection, Kind.GATEWAY, self.name, configuration)

        self._database.run(work, urgent=True)
        self._starts, self._written = False, configuration is self._configuration
        return INTERVAL

    def end(self) -> None:
        """Record that the process stops. Without a database it does not: then its signs of life just end."""
        with contextlib.suppress(NotReady, psycopg.Error):
            self._database.run(
                lambda connection: processes.record_gateway_stopped(connection, self.name), urgent=True, repeat=False
            )

    def _figures(self) -> dict[str, float]:
        """Return the gauges as they are, and of each counter its growth within the last `COUNTED` seconds."""
        now, totals = self._now(), self._metrics.totals()
        self._counted.append((now, totals))
        while self._counted[1][0] <= now - max(COUNTED.values()):
            self._counted.popleft()
        return self._metrics.levels() | {
            name: totals[name] - next(each[name] for at, each in self._counted if at >= now - seconds)
            for name, seconds in COUNTED.items()
        }


def gateway_name(url: str) -> str:
    """Return the name of the process that listens at `url` on this machine: the host's name and the port or path."""
    found = urlsplit(url)
    place = found.path if found.scheme == "http+unix" else str(found.port)
    return f"{socket.gethostname()}:{place}"
