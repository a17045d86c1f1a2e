"""A real gateway on a real port, in a thread of the test's process, with real tokens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy import text

from assigner import backlog, intake
from bots import gateway
from bots.fetch import FetchSettings
from bots.leases import Desk
from schema import clock, tokens
from schema.engine import Database
from schema.timing import Timing
from schema.wakeups import Wakeups
from tests.patience import MINUTE


@dataclass(frozen=True)
class Served:
    """A running gateway."""

    url: str
    app: Any
    server: gateway.Server
    database: Database

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False, verify=False)

    def token(self, kind: str, **scope: Any) -> str:
        return self.database.run(lambda connection: tokens.create(connection, kind, **scope))

    def waits(self, topic: str) -> float:
        """How many calls are held until there is news of `topic`."""
        return float(self.app.state.metrics.waits.labels(topic)._value.get())


class Bot:
    """The wire side of a bot, without an agent."""

    def __init__(self, served: Served, name: str = "b1", **scope: Any) -> None:
        self.http = served.client(served.token("bot", bot="*"))
        answer = self.http.post("/v1/sessions", json={"bot": name, "capacity": 2, **scope})
        assert answer.status_code == 200, answer.text
        session = answer.json()
        self.identity = {"bot": name, "epoch": session["epoch"], "secret": session["secret"]}
        self.seq = 0

    def sync(self, **report: Any) -> httpx.Response:
        self.seq += 1
        return self.http.post("/v1/sync", json={**self.identity, "seq": self.seq, **report})


def counts(database: Database) -> dict[str, int]:
    """How many rows each table of jobs and bots has."""
    names = (
        "jobs",
        "job_payloads",
        "job_outputs",
        "submit_keys",
        "bots",
        "bot_answers",
        "leases",
        "job_events",
        "graphs",
    )
    rows = database.run(
        lambda c: {name: c.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}
    )
    return rows


@contextmanager
def serving(
    database: Database, timing: Timing, *, wakeups: bool = True, settings: gateway.GatewaySettings | None = None
) -> Iterator[Served]:
    """Serve until the block ends."""
    source = Wakeups(database, enabled=wakeups)
    source.start()
    chosen = settings or gateway.GatewaySettings(port=0)
    desk = Desk(database, timing=timing, fetch=FetchSettings(), now=clock.monotonic)
    routers = [*intake.ROUTERS, backlog.router]
    app = gateway.build(database, desk, chosen, timing=timing, wakeups=source, routers=routers)
    ready = threading.Event()
    found: list[str] = []

    def on_ready(url: str) -> None:
        found.append(url)
        ready.set()

    server = gateway.Server(app, chosen, on_ready=on_ready)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert ready.wait(MINUTE), "the gateway did not come up"
    try:
        yield Served(found[0], app, server, database)
    finally:
        server.stop()
        thread.join(MINUTE)
        source.stop()
    assert not thread.is_alive(), "the gateway did not stop"
