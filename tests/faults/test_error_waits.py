"""Whoever waits for a database or a gateway looks again at most two seconds later than usual, however long it was."""

import asyncio
import json
import random
import threading
from collections.abc import Mapping
from typing import Any

import anyio
import psycopg
import pytest
from leasehold.errors import NotReady
from leasehold.transport import Answer, Transport
from structlog.testing import capture_logs

from bots.agent.gateway_calls import GatewayCaller
from bots.gateway.held_calls import HeldSessions, KnownState
from bots.gateway.long_poll import LongPolls
from bots.gateway.metrics import GatewayMetrics
from schema import clock
from schema.postgres.notify import RECONNECT_LAST, Wakeups
from tests.support.patience import MINUTE

AWAY = 20


class Away:
    """Work that fails `AWAY` times and then succeeds; `back` is set after one more success."""

    def __init__(self) -> None:
        self.calls = 0
        self.back = anyio.Event()

    async def run_unbounded(self, *_: Any) -> set[tuple[int, int]]:
        self.calls += 1
        if self.calls <= AWAY:
            raise NotReady("the database cannot be reached")
        self.back.set()
        return set()

    async def run(self, *_: Any) -> Mapping[str, Any]:
        await self.run_unbounded()
        return {}


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep of the event loop, none of which takes any time."""
    found: list[float] = []
    really = asyncio.sleep

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        await really(0)

    monkeypatch.setattr("bots.gateway.held_calls.asyncio.sleep", sleep)
    return found


def test_a_gateway_renews_the_sessions_of_held_calls_in_each_round_whatever_failed_before(sleeps: list[float]) -> None:
    away = Away()

    async def hold() -> None:
        held = HeldSessions(None, away, ttl=30.0, metrics=GatewayMetrics())  # type: ignore[arg-type]
        with held.renewing(KnownState(1, 1, False)), anyio.fail_after(MINUTE):
            await away.back.wait()
        held.close()

    with capture_logs() as logs:
        anyio.run(hold)
    assert len(logs) == AWAY
    assert set(sleeps) == {5.0}


def test_long_polls_look_for_news_at_each_interval_whatever_failed_before() -> None:
    away = Away()

    async def wait() -> None:
        polls = LongPolls(wakeups=None, poll=0.001, metrics=GatewayMetrics())
        topic = polls.topic("bots", lambda *_: {}, run=away.run)
        async with topic.watch(None) as watch:
            watch.add("1", bool)
            with anyio.fail_after(MINUTE):
                await away.back.wait()
        await polls.close()

    with capture_logs() as logs:
        anyio.run(wait)
    assert len(logs) == AWAY


def test_an_agent_pauses_at_most_two_seconds_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, pauses = [0], []

    class Gateway:
        def call(self, *_: Any, **__: Any) -> Mapping[str, Any]:
            failed[0] += 1
            if failed[0] <= AWAY:
                raise NotReady("the database is read-only")
            return {"done": True}

    def until(event: threading.Event, _check: Any, limit: float | None) -> None:
        if limit is None:
            assert event.wait(MINUTE)
        else:
            pauses.append(limit - clock.monotonic())

    caller = GatewayCaller(Gateway(), threading.Event(), random.Random(1))  # type: ignore[arg-type]
    monkeypatch.setattr(caller, "_until", until)
    with capture_logs():
        assert caller.call("/v1/sync", {}, check=lambda: None) == {"done": True}
    assert len(pauses) == AWAY
    assert max(pauses) <= 2.0


@pytest.mark.parametrize("detail", ["the database is read-only", "the database has no disk space left"])
def test_a_client_asks_again_within_two_seconds_while_patient(detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    client = Transport(
        "http://127.0.0.1:1", "t", chance=random.Random(1), timeout=1.0, patience=MINUTE, sleep=pauses.append
    )

    def answer(*_: Any, **__: Any) -> Answer:
        if len(pauses) < AWAY:
            return Answer(503, "Service Unavailable", json.dumps({"detail": detail}).encode())
        return Answer(200, "OK", b'{"done": true}')

    monkeypatch.setattr(client._connections, "request", answer)
    assert client.call("GET", "/v1/status") == {"done": True}
    assert len(pauses) == AWAY
    assert max(pauses) <= 2.0
    client.close()


def test_a_listener_connects_again_within_two_seconds() -> None:
    wakeups = Wakeups(None, chance=random.Random(1))  # type: ignore[arg-type]
    with capture_logs():
        waits = [wakeups._backoff(psycopg.OperationalError()) for _ in range(AWAY)]
    assert max(waits) <= RECONNECT_LAST == 2.0
