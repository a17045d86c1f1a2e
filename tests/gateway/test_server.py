"""Where a gateway listens, which settings it refuses, what its process says of itself in the database, how it ends."""

import random
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput
from leasehold.wire import LEAST_BODY
from pydantic import ValidationError

from assigner.config.loading import ConfigModel, load
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.presence import GatewayPresence, gateway_name
from bots.gateway.server import GatewaySettings
from schema.postgres.engine import Database, DatabaseSettings
from schema.tenancy.processes import Configuration
from schema.timing import Timing
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.servers import Processes, serving


def test_settings_that_are_unsafe_or_wrong_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"host": "0.0.0.0"}, "insecure"),
        ({"host": "example.org"}, "insecure"),
        ({"tls_cert": "a.pem"}, "both or neither"),
        ({"port": 65536}, "port"),
        ({"surprise": 1}, "surprise"),
        ({"max_wait": float("inf")}, "max_wait"),
    ]
    for settings, word in wrong:
        with pytest.raises(ValidationError, match=word):
            GatewaySettings(**settings)
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        assert GatewaySettings(host=host).host == host
    assert GatewaySettings(host="0.0.0.0", insecure=True).insecure


def test_a_unix_socket_is_its_owners_and_replaces_a_dead_one(database: Database, timing: Timing, scratch: Path) -> None:
    path = scratch / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(database, timing, settings=GatewaySettings(unix_socket=path)) as served:
        assert served.url == f"http+unix://{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway") as http:
            assert http.get("/healthz").status_code == 200
    assert not path.exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_gateway_process_ends_when_asked_to_and_says_so(
    scratch: Path, pool: Pool, database_url: str, timing: Timing, number: signal.Signals, status: int
) -> None:
    with Processes(scratch, database_url, timing) as processes:
        gateway = processes.gateway()
        eventually(lambda: pool.rows("SELECT 1 FROM gateways"))
        gateway.signal(number)
        assert gateway.popen.wait(MINUTE) == status
        assert 'event="gateway stopped"' in gateway.said()
    (row,) = pool.rows("SELECT url, stopped_at FROM gateways")
    assert row.url == processes.url
    assert row.stopped_at is not None


def test_a_gateway_without_schema_ends(scratch: Path, empty_url: str, database_url: str, timing: Timing) -> None:
    with Processes(scratch, database_url, timing) as processes:
        gateway = processes.start("gateway", "gateway", environment={"LEASEHOLD_DATABASE_URL": empty_url})
        assert gateway.popen.wait(MINUTE) == 3
        assert "leasehold db upgrade" in gateway.said()
        assert not (scratch / "gateway.url").exists()


class Sections(ConfigModel):
    gateway: GatewaySettings = GatewaySettings()


def test_a_largest_body_below_what_clients_and_bots_send_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "leasehold.toml"
    path.write_text(f"[gateway]\nmax_body = {LEAST_BODY - 1}\n")
    with pytest.raises(BadInput) as refused:
        load(path, Sections, {})
    assert str(refused.value) == (
        f"{path}:2: gateway.max_body: must be at least 16777216: clients and bots rely on that"
    )
    assert GatewaySettings(max_body=LEAST_BODY).max_body == LEAST_BODY


# The row of a process


CONFIGURATION = Configuration("/etc/leasehold.toml", {"gateway": {"port": 7411}})


def presence(database: Database, metrics: GatewayMetrics, now: list[float]) -> GatewayPresence:
    return GatewayPresence(
        database, metrics, url="http://127.0.0.1:7411", configuration=CONFIGURATION, now=lambda: now[0]
    )


def test_a_gateway_tells_its_settings_once_and_its_figures_with_each_sign_of_life(pool: Pool) -> None:
    metrics, now = GatewayMetrics(), [1000.0]
    metrics.watch(queue=lambda: 7, connected=lambda: 1)
    tells = presence(pool.database, metrics, now)
    metrics.requests.labels("/v1/jobs", "2xx").inc(9)
    metrics.requests.labels("/v1/sync", "5xx").inc(3)
    tells.run_once()
    first = pool.row("SELECT * FROM gateways")
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
    later = pool.row("SELECT * FROM gateways")
    assert later.figures == first.figures | {"requests": 0, "failed": 0, "connections_refused": 5}
    assert (later.started_at, later.settings_at) == (first.started_at, first.settings_at)
    tells.end()
    assert pool.row("SELECT * FROM gateways").stopped_at is not None
    presence(pool.database, metrics, now).run_once()
    assert (pool.row("SELECT * FROM gateways").stopped_at, pool.row("SELECT * FROM gateways").settings_at) == (
        None,
        first.settings_at,
    )
    assert pool.row("SELECT * FROM gateways").started_at > first.started_at


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
