"""A real gateway on a real port, in a thread of the test's process, with real tokens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from assigner import intake
from bots import gateway
from bots.fetch import FetchSettings
from bots.leases import Desk
from schema import clock, tokens
from schema.engine import Database
from schema.timing import Timing
from schema.wakeups import Wakeups


@dataclass(frozen=True)
class Served:
    """A running gateway."""

    url: str
    app: Any
    server: gateway.Server
    database: Database

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, verify=False)

    def token(self, kind: str, **scope: Any) -> str:
        return self.database.run(lambda connection: tokens.create(connection, kind, **scope))


@contextmanager
def serving(
    database: Database, timing: Timing, *, wakeups: bool = True, settings: gateway.GatewaySettings | None = None
) -> Iterator[Served]:
    """Serve until the block ends."""
    source = Wakeups(database, enabled=wakeups)
    source.start()
    chosen = settings or gateway.GatewaySettings(port=0)
    desk = Desk(database, timing=timing, fetch=FetchSettings(), now=clock.monotonic)
    app = gateway.build(database, desk, chosen, timing=timing, wakeups=source, routers=[intake.router])
    ready = threading.Event()
    found: list[str] = []

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = gateway.Server(app, chosen, on_ready=on_ready)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert ready.wait(20), "the gateway did not come up"
    try:
        yield Served(found[0], app, server, database)
    finally:
        server.stop()
        thread.join(20)
        source.stop()
    assert not thread.is_alive(), "the gateway did not stop"
