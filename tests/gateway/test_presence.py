"""The row of a gateway process: what it says of itself, and what happens when the database is gone."""

import random
from typing import Any

import pytest

from bots.gateway.metrics import GatewayMetrics
from bots.gateway.presence import GatewayPresence, gateway_name
from schema.postgres.engine import Database, DatabaseSettings
from schema.tenancy.processes import Configuration
from tests.support.pool import Pool

CONFIGURATION = Configuration("/etc/leasehold.toml", {"gateway": {"port": 7411}})


def presence(database: Database, metrics: GatewayMetrics, now: list[float]) -> GatewayPresence:
    return GatewayPresence(
        database, metrics, url="http://127.0.0.1:7411", configuration=CONFIGURATION, now=lambda: now[0]
    )


def row(pool: Pool) -> Any:
    return pool.row("SELECT * FROM gateways")


def test_a_gateway_tells_its_settings_once_and_its_figures_with_each_sign_of_life(pool: Pool) -> None:
    metrics, now = GatewayMetrics(), [1000.0]
    metrics.watch(queue=lambda: 7, connected=lambda: 1)
    tells = presence(pool.database, metrics, now)
    metrics.requests.labels("/v1/jobs", "2xx").inc(9)
    metrics.requests.labels("/v1/sync", "5xx").inc(3)
    tells.run_once()
    first = row(pool)
    assert first.figures == {
        "queue": 7, "wakeups_connected": 1, "requests": 12, "failed": 3, "connections_refused": 0
    }  # fmt: skip
    assert (first.url, first.config_file, first.settings) == (
        "http://127.0.0.1:7411", "/etc/leasehold.toml", {"gateway": {"port": 7411}}
    )  # fmt: skip
    now[0] += 301
    metrics.requests.labels("/v1/jobs", "2xx").inc(2)
    metrics.connections_refused.labels("all").inc(5)
    tells.run_once()
    tells.run_once()
    later = row(pool)
    assert later.figures == first.figures | {"requests": 0, "failed": 0, "connections_refused": 5}
    assert (later.started_at, later.settings_at) == (first.started_at, first.settings_at)
    tells.end()
    assert row(pool).stopped_at is not None
    presence(pool.database, metrics, now).run_once()
    assert (row(pool).stopped_at, row(pool).settings_at) == (None, first.settings_at)
    assert row(pool).started_at > first.started_at


def test_a_gateway_without_a_database_ends_as_before() -> None:
    gone = Database("postgresql://nobody@127.0.0.1:1/none", DatabaseSettings(), role="test", chance=random.Random(0))
    try:
        presence(gone, GatewayMetrics(), [0.0]).end()
    finally:
        gone.close()


@pytest.mark.parametrize(
    ("url", "place"), [("https://[::1]:7411", "7411"), ("http+unix:///run/leasehold.sock", "/run/leasehold.sock")]
)
def test_a_gateway_is_named_after_its_host_and_port(url: str, place: str) -> None:
    assert gateway_name(url).partition(":")[2] == place
