"""Settings in force and sampled decisions: what processes write of them, and what operators read and try."""

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from assigner.config.loading import Reloader
from assigner.placement.decision_sample import DecisionSample, Seen, stored
from assigner.placement.registry import StrategySettings
from assigner.process.assign import AssignerProcess
from assigner.settings import PoolSettings
from schema.tenancy import drains, processes
from schema.tenancy.processes import KEPT_DECISIONS, Configuration, Kind
from tests.support.patience import eventually
from tests.support.pool import Pool
from tests.support.servers import assigner_process

JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
CANDIDATES = [
    {"bot": "warm", "priority": 0, "free_units": 1, "capacity": 8, "hit": True, "rate": None},
    {"bot": "roomy", "priority": 0, "free_units": 4, "capacity": 8, "hit": False, "rate": None},
]


def decided(pool: Pool, assigner: str = "host", *, policy: dict[str, Any] | None = None, number: int = 1) -> None:
    """Let a process have sampled a decision for the bot `warm`."""
    seen = Seen.model_validate({"units": 1, "label": "", "locality_hint": "a", "of": 2, "candidates": CANDIDATES})
    sample = stored(DecisionSample(JOB, "warm", StrategySettings(), seen))
    for _ in range(number):
        pool.database.run(
            lambda c: processes.record_decision(c, assigner, **{**sample, **({"policy": policy} if policy else {})})
        )


def test_an_assigner_tells_its_settings_their_file_and_when_they_changed(
    pool: Pool, operator: httpx.Client, tmp_path: Path
) -> None:
    file = tmp_path / "leasehold.toml"
    file.write_text('[[assigners]]\nstrategy = { weights = { locality = 7.5 } }\n[[webhooks]]\nname = "w"\n'
                    'url = "https://example.org/"\nsecret = "0123456789abcdef0123456789abcdef"\n')  # fmt: skip
    with assigner_process(pool, file):

        def told() -> Any:
            (found,) = operator.get("/v1/settings").json()["settings"]
            return found

        first = eventually(told)
        assert (first["kind"], first["processes"], first["file"]) == ("assigner", ["host"], str(file))
        assert first["settings"]["assigners"][0]["strategy"]["weights"]["locality"] == 7.5
        assert "0123456789abcdef" not in operator.get("/v1/settings").text
        file.write_text("[[assigners]]\nstrategy = { weights = { locality = 8.5 } }\n")
        second = eventually(lambda: (now := told())["changed_at"] > first["changed_at"] and now)
        assert second["settings"]["assigners"][0]["strategy"]["weights"]["locality"] == 8.5
        file.write_text("[[assigners]]\nthreads = 'many'\n")
        refused = eventually(lambda: (now := told())["error"] and now)
        assert "assigners[0].threads" in refused["error"]
        assert {**refused, "error": None} == second
        alerts = operator.get("/v1/alerts").json()["alerts"]
        assert [each["subject"] for each in alerts if each["name"] == "LeaseholdConfigurationIsRefused"] == ["host"]
    assert operator.get("/v1/settings").json() == {"settings": []}


def test_processes_that_agree_are_one_row_and_a_restart_changes_nothing(pool: Pool, operator: httpx.Client) -> None:
    def tell(name: str, weight: float) -> None:
        configuration = Configuration("/etc/leasehold.toml", {"weight": weight})
        pool.database.run(lambda c: drains.record_assigner_alive(c, name, starts=True))
        pool.database.run(lambda c: processes.record_configuration(c, Kind.ASSIGNER, name, configuration))

    for name, weight in (("a1", 1.0), ("a2", 1.0), ("a3", 2.0)):
        tell(name, weight)
    found = operator.get("/v1/settings").json()["settings"]
    assert sorted((each["processes"], each["settings"]) for each in found) == [
        (["a1", "a2"], {"weight": 1.0}), (["a3"], {"weight": 2.0})
    ]  # fmt: skip
    tell("a3", 2.0)
    assert operator.get("/v1/settings").json()["settings"] == found


def test_a_process_writes_its_sampled_decisions_and_keeps_the_newest(pool: Pool, operator: httpx.Client) -> None:
    decided(pool, "other")
    decided(pool, number=KEPT_DECISIONS + 3)
    shown = operator.get("/v1/decisions?limit=200").json()["decisions"]
    assert [each["assigner"] for each in shown] == ["host"] * KEPT_DECISIONS + ["other"]
    page = operator.get("/v1/decisions?limit=5").json()["decisions"]
    following = operator.get(f"/v1/decisions?limit=200&before={page[-1]['id']}").json()["decisions"]
    assert page + following == shown
    pool.change("UPDATE decision_samples SET at = now() - interval '25 hours'")
    pool.upkeep().run_once()
    assert operator.get("/v1/decisions").json() == {"decisions": []}


def test_a_running_process_samples_what_it_decides(pool: Pool, operator: httpx.Client) -> None:
    settings = PoolSettings.model_validate({"assigners": [{"threads": 1, "interval": 0.1}], "timing": pool.timing})
    reloader = Reloader(None, PoolSettings, {}, current=settings)
    process = AssignerProcess(pool.database, reloader, name="host", chance=random.Random(1))
    pool.bot("bot-1")
    (public_id,) = pool.submit()
    process.start()
    try:
        (shown,) = eventually(lambda: operator.get("/v1/decisions").json()["decisions"])
    finally:
        process.stop()
    assert (shown["job"], shown["bot"], shown["strategy"], shown["candidates"]) == (public_id, "bot-1", "capacity", 1)
    scores = operator.post("/v1/scores", json={}).json()
    assert (scores["chosen"], scores["by_weights"]) == ("bot-1", True)
    details = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert {**details["score"], "success": 0.0} == scores["candidates"][0]["in_force"]


def test_scores_are_computed_again_with_the_weights_that_are_tried(pool: Pool, operator: httpx.Client) -> None:
    decided(pool)
    before = pool.rows("SELECT * FROM decision_samples")
    found = operator.post("/v1/scores", json={"weights": {"locality": 1.0}}).json()
    assert (found["decision"]["bot"], found["chosen"]) == ("warm", "roomy")
    assert (found["in_force"]["locality"], found["tried"]["locality"]) == (5.0, 1.0)
    assert [(each["bot"], each["in_force"]["total"], each["tried"]["total"]) for each in found["candidates"]] == [
        ("roomy", 4.0, 4.0), ("warm", 6.0, 2.0)
    ]  # fmt: skip
    normalised = operator.post("/v1/scores", json={"capacity_term": "normalised"}).json()
    assert normalised["candidates"][0]["tried"] == {
        "total": 5.125, "priority": 0.0, "capacity": 0.125, "locality": 5.0, "success": 0.0
    }  # fmt: skip
    assert pool.rows("SELECT * FROM decision_samples") == before


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"decision": 999}, 404, "decision: none has the id 999"),
        ({"weights": {"locality": 1e7}}, 422, "locality"),
        ({"weights": {"localty": 1}}, 422, "localty"),
        ({"load_power": -1}, 422, "load_power"),
        ({"decision": 0}, 422, "decision"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    pool: Pool, operator: httpx.Client, body: dict[str, Any], status: int, told: str
) -> None:
    decided(pool)
    answer = operator.post("/v1/scores", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert told in answer.text


def test_without_a_sample_and_for_a_strategy_that_is_not_there_the_answer_says_so(
    pool: Pool, operator: httpx.Client
) -> None:
    assert "none has been sampled yet" in operator.post("/v1/scores", json={}).json()["detail"]
    decided(pool, policy={**StrategySettings().model_dump(mode="json"), "kind": "of-a-package"})
    answer = operator.post("/v1/scores", json={})
    assert (answer.status_code, "this gateway cannot make it again" in answer.json()["detail"]) == (400, True)
