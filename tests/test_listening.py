from pathlib import Path

import pytest

from assigner.config import ConfigModel, load
from bots.gateway import GatewaySettings
from schema.engine import Database
from schema.errors import BadInput
from schema.limits import LEAST_BODY
from schema.timing import Timing
from tests.serving import serving


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
        held = [database.engine.connect() for _ in range(database.engine.pool.size())]  # type: ignore[attr-defined]
        try:
            assert http.get("/readyz").status_code == 200
        finally:
            for connection in held:
                connection.close()
