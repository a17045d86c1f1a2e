"""Where a gateway listens, which settings it refuses, and how its process ends."""

import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput
from leasehold.wire import LEAST_BODY
from pydantic import ValidationError

from assigner.config.loading import ConfigModel, load
from bots.gateway.server import GatewaySettings
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.servers import Processes, serving


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"host": "0.0.0.0"}, "insecure"),
        ({"host": "example.org"}, "insecure"),
        ({"tls_cert": "a.pem"}, "both or neither"),
        ({"port": 65536}, "port"),
        ({"surprise": 1}, "surprise"),
        ({"max_wait": float("inf")}, "max_wait"),
    ],
)
def test_settings_that_are_unsafe_or_wrong_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        GatewaySettings(**settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert GatewaySettings(host=host).host == host
    assert GatewaySettings(host="0.0.0.0", insecure=True).insecure


def test_a_unix_socket_is_for_its_owner_only_and_replaces_a_dead_one(
    database: Database, timing: Timing, scratch: Path
) -> None:
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
    (row,) = pool.rows("SELECT url, stopped_at FROM gateways")
    assert row.url == processes.url
    assert row.stopped_at is not None


def test_a_gateway_whose_database_has_no_schema_ends_at_once(
    scratch: Path, empty_url: str, database_url: str, timing: Timing
) -> None:
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


def test_a_gateway_whose_connections_are_all_busy_is_ready(database: Database, timing: Timing) -> None:
    with serving(database, timing) as served, served.client() as http:
        with ExitStack() as held:
            for _ in range(database.work.size):
                held.enter_context(database.connect())
            assert http.get("/readyz").status_code == 200
