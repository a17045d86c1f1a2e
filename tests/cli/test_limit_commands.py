"""Rates and advice as operators set them: commands, routes, and the configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from leasehold.errors import BadInput

from assigner.admission.ordering import OrderingSettings
from assigner.config import loading
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from schema.accounting import rates
from tests.support.pool import Pool
from tests.support.servers import Served

Answer = Callable[..., tuple[int, str]]

WRONG = [
    ("rate set Claude --per-second 1", "resource: 'Claude' is not a name"),
    ("rate set claude/ --per-second 1", "resource: '' is not a name"),
    ("rate set claude --per-second 0", "--per-second: must be greater than 0"),
    ("rate set claude --per-second nan", "--per-second: must be a finite number"),
    ("rate set claude --per-second 1 --burst 0", "--burst: must be greater than or equal to 1"),
    ("rate rm claude", "rate: 'claude' has none"),
    ("backpressure set", "give exactly one of: --stop, --delay"),
    ("backpressure set --stop --delay 1", "give exactly one of: --stop, --delay"),
    ("backpressure set Claude --stop", "resource_class: 'Claude' is not a name"),
    ("backpressure set --delay 4000", "--delay: must be less than or equal to 3600"),
    ("backpressure rm", "backpressure: nothing is advised for all jobs"),
]

CHECKERS = """
class Limits:
    def is_rate_limited(self, resource_class, model):
        return True

class Wrong:
    def is_rate_limited(self):
        return True

class Pressure:
    def can_start(self):
        return False, 0.0
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package that offers checkers."""
    module = f"checkers_{uuid4().hex}"
    found = tmp_path / f"{module}-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(
        f"[leasehold.rate_limit_checkers]\nours = {module}:Limits\nwrong = {module}:Wrong\n"
        f"[leasehold.backpressure_checkers]\nours = {module}:Pressure\n"
    )
    (tmp_path / f"{module}.py").write_text(CHECKERS)
    monkeypatch.syspath_prepend(tmp_path)


def loaded(tmp_path: Path, text: str) -> PoolSettings:
    path = tmp_path / "leasehold.toml"
    path.write_text(text)
    return loading.load(path, PoolSettings, {})


def test_rates_are_set_listed_and_removed(operate: Answer) -> None:
    assert operate("rate", "set", "claude_cli/opus", "--per-second", "0.5", "--burst", "3") == (
        0, "claude_cli/opus starts 0.5 jobs per second, 3 at once\n"
    )  # fmt: skip
    code, said = operate("rate", "list", "--json")
    assert (code, json.loads(said)) == (
        0, [{"resource": "claude_cli/opus", "per_second": 0.5, "burst": 3, "tokens": 3.0}]
    )  # fmt: skip
    assert "claude_cli/opus" in operate("rate", "list")[1]
    assert json.loads(operate("rate", "rm", "claude_cli/opus", "--json")[1])["removed"] is True
    assert operate("rate", "list", "--json") == (0, "[]\n")


def test_advice_is_set_listed_and_taken_back(operate: Answer) -> None:
    assert operate("backpressure", "set", "--stop", "--for", "60") == (0, "assigners start no jobs of any class\n")
    assert operate("backpressure", "set", "codex", "--delay", "2")[1] == "assigners wait 2 s after a start of codex\n"
    found = json.loads(operate("backpressure", "list", "--json")[1])
    assert [(each["resource_class"], each["allowed"], each["delay"]) for each in found] == [
        (None, False, 0), ("codex", True, 2)
    ]  # fmt: skip
    assert "codex" in operate("backpressure", "list")[1]
    assert operate("backpressure", "rm") == (0, "nothing is advised for all jobs\n")


@pytest.mark.parametrize(("command", "reason"), WRONG)
def test_what_is_wrong_is_refused_in_one_line(operate: Answer, command: str, reason: str) -> None:
    code, said = operate(*command.split())
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: {reason}")


def test_operators_set_rates_and_advice_over_http_and_others_may_not(served: Served, operator: httpx.Client) -> None:
    with served.client(served.token("submitter")) as http:
        assert http.get("/v1/rates").status_code == 403
        assert http.put("/v1/rates/claude", json={"per_second": 1}).status_code == 403
        assert http.put("/v1/backpressure", json={}).status_code == 403
    assert operator.put("/v1/rates/claude/opus", json={"per_second": 2, "burst": 5}).json() == {"name": "claude/opus"}
    assert operator.put("/v1/rates/claude", json={"per_second": 0}).status_code == 422
    assert operator.put("/v1/rates/Claude", json={"per_second": 1}).status_code == 400
    assert operator.get("/v1/rates").json()["rates"] == [
        {"resource": "claude/opus", "per_second": 2.0, "burst": 5, "tokens": 5.0}
    ]
    assert operator.delete("/v1/rates/claude/opus").status_code == 200
    assert operator.delete("/v1/rates/claude/opus").status_code == 404
    assert operator.put("/v1/backpressure", json={"seconds": 60}).json() == {"name": ""}
    assert operator.put("/v1/backpressure", json={"resource_class": "a", "allowed": True}).status_code == 400
    (found,) = operator.get("/v1/backpressure").json()["backpressure"]
    assert (found["resource_class"], found["allowed"]) == (None, False)
    assert operator.delete("/v1/backpressure").status_code == 200
    assert operator.delete("/v1/backpressure", params={"resource_class": "a"}).status_code == 404


def test_a_job_with_a_resource_class_is_submitted_over_http(served: Served, pool: Pool) -> None:
    with served.client(served.token("submitter")) as http:
        job = {"command": ["true"], "resource_class": "claude_cli", "model": "opus"}
        assert http.post("/v1/jobs", json={"jobs": [job]}).status_code == 200
        answer = http.post("/v1/jobs", json={"jobs": [{"command": ["true"], "model": "opus"}]})
    assert answer.status_code == 400
    assert "needs a resource_class" in answer.text
    assert pool.row("SELECT terms FROM constraint_sets").terms == {"resource_class": "claude_cli", "model": "opus"}


def test_the_configuration_names_rates_and_unset_takes_one_away(pool: Pool, tmp_path: Path) -> None:
    declare(pool.database, loaded(tmp_path, '[[rates]]\nresource = "a/b"\nper_second = 2.0\nburst = 4\n'))
    declare(pool.database, loaded(tmp_path, '[[rates]]\nresource = "a/b"\nper_second = 2.0\nburst = 4\n'))
    (found,) = pool.database.run(rates.rates)
    assert (found.resource, found.per_second, found.burst) == ("a/b", 2, 4)
    declare(pool.database, loaded(tmp_path, ""))
    assert len(pool.database.run(rates.rates)) == 1, "what is not named stays"
    declare(pool.database, loaded(tmp_path, '[[rates]]\nresource = "a/b"\n'))
    assert pool.database.run(rates.rates) == []
    assert [row.actor for row in pool.rows("SELECT actor FROM audit")] == ["config", "config"]


def test_the_configuration_says_how_graphs_share(tmp_path: Path) -> None:
    found = loaded(tmp_path, '[ordering]\nkind = "graph"\nmax_concurrent = 8\n').ordering
    assert found == OrderingSettings(kind="graph", max_concurrent=8, overage_penalty=20.0, max_per_graph=2.0)
    with pytest.raises(BadInput, match=r"ordering\.kind: 'graphs' is not an order: there are 'graph', 'rank', 'score'"):
        loaded(tmp_path, '[ordering]\nkind = "graphs"\n')
    with pytest.raises(BadInput, match="rates: 'a' is declared twice"):
        loaded(tmp_path, '[[rates]]\nresource = "a"\n[[rates]]\nresource = "a"\n')


def test_checkers_are_entry_points_and_what_is_none_is_refused(package: None, tmp_path: Path) -> None:
    found = loaded(tmp_path, '[checkers]\nrate_limit = "ours"\nbackpressure = "ours"\n').checkers
    assert found.limits.is_rate_limited("a", None) is True
    assert found.pressure.can_start() == (False, 0.0)
    assert loaded(tmp_path, "").checkers.pressure.can_start() == (True, 0.0)
    with pytest.raises(BadInput, match=r"'our' is not a checker: there are 'none', 'ours', 'wrong'; did you mean"):
        loaded(tmp_path, '[checkers]\nrate_limit = "our"\n')
    with pytest.raises(BadInput, match=r"has no is_rate_limited\(resource_class, model\)"):
        loaded(tmp_path, '[checkers]\nrate_limit = "wrong"\n')
