"""The client's calls of operators against a real gateway, and the types that it gives for their answers."""

import random
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from leasehold.calls import operators as calls
from leasehold.client import Client
from leasehold.errors import BadInput, Forbidden, NotFound

from assigner.api.operators import health, policy
from schema import audit
from schema.diagnostics.checks import Verdict
from schema.tenancy import processes
from tests.support.pool import Pool
from tests.support.servers import Served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, served.token("operator"), chance=random.Random(1)) as made:
        yield made


def test_a_program_of_an_operator_reads_health_and_policy(
    pool: Pool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = client.operators
    assert [alert["name"] for alert in found.alerts()] == ["LeaseholdUpkeepStands"]
    assert {check["name"]: check["verdict"] for check in found.doctor()}["schema"] == "ok"
    checked = found.invariants(seconds=60)
    assert (checked["finished"], [each["rows"] for each in checked["invariants"] if each["rows"]]) == (True, [])
    assert (found.gateways(), found.settings(), found.decisions()) == ([], [], [])
    with pytest.raises(NotFound, match="none has been sampled yet"):
        found.scores(weights={"locality": 1.0})
    with pytest.raises(BadInput, match="locality"):
        found.scores(weights={"locality": 1e9})
    for number in range(5):
        pool.database.run(lambda c, n=number: audit.write(c, "limit.set", actor="op", subject=f"s{n}"))
    monkeypatch.setattr(calls, "PAGE", 2)
    assert [row["subject"] for row in found.audit()][:5] == ["s4", "s3", "s2", "s1", "s0"]


def test_all_gateways_are_listed_though_a_page_has_few(
    pool: Pool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("g1", "g2", "g3"):
        pool.database.run(lambda c, n=name: processes.record_gateway_alive(c, n, url="http://x", figures={}))
    monkeypatch.setattr("leasehold.wire.MAX_LIST", 2)
    assert [each["name"] for each in client.operators.gateways()] == ["g1", "g2", "g3"]


def test_a_submitter_is_refused(served: Served) -> None:
    token = served.token("submitter", instance="ours")
    with Client(served.url, token, chance=random.Random(1)) as client, pytest.raises(Forbidden):
        client.operators.alerts()


@pytest.mark.parametrize(
    ("told", "model"),
    [
        (calls.Alert, health.Alert),
        (calls.Check, health.Check),
        (calls.Invariant, health.Invariant),
        (calls.Invariants, health.InvariantList),
        (calls.Gateway, health.Gateway),
        (calls.AuditRow, health.AuditRow),
        (calls.SettingsInForce, policy.SettingsInForce),
        (calls.Decision, policy.Decision),
        (calls.Terms, policy.Terms),
        (calls.Scored, policy.Scored),
        (calls.Scores, policy.Scores),
    ],
)
def test_the_types_of_the_client_are_those_of_the_gateway(told: Any, model: Any) -> None:
    assert told.__annotations__.keys() == model.model_fields.keys()
    assert set(get_args(calls.Check.__annotations__["verdict"])) == {verdict.value for verdict in Verdict}
