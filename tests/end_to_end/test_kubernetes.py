"""The manifests for Kubernetes: its schemas take them, and what they run and ask is what the program has."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from assigner.cli import errors
from assigner.cli.main import cli, sections
from assigner.config import loading
from bots.agent.agent import AgentSettings
from tests.support.servers import Served

OPS = Path(__file__).parents[2] / "ops"
FOLDER = OPS / "kubernetes"
#: The oldest and the newest version whose schemas are looked at.
VERSIONS = ("1.31", "1.37")
OF_CALLERS = {"LEASEHOLD_URL", "LEASEHOLD_TOKEN", "LEASEHOLD_INSECURE", "POD_NAME"}


@cache
def documents() -> list[tuple[Path, dict[str, Any]]]:
    """All documents, each with its file."""
    files = sorted(FOLDER.rglob("*.yaml"))
    return [(path, document) for path in files for document in yaml.safe_load_all(path.read_text())]


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for _, each in documents() if each["kind"] == kind}


def pods() -> dict[str, dict[str, Any]]:
    """The templates of pods, by the names of what makes them."""
    return {name: each["spec"]["template"] for name, each in (named("Deployment") | named("Job")).items()}


def container(pod: Mapping[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return dict(only)


def test_every_manifest_is_one_of_its_kind_and_is_listed() -> None:
    listed: set[Path] = set()
    for path, document in documents():
        if path.name == "kustomization.yaml":
            listed |= {path.parent / name for name in document["resources"]}
        elif not document["apiVersion"].startswith("keda.sh/"):
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
    assert listed == {path for path, _ in documents() if path.name != "kustomization.yaml"}


def test_pods_run_commands_with_settings_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(pods()) == {"leasehold-upgrade", "leasehold-gateway", "leasehold-assigner", "leasehold-bot"}
    for name, pod in pods().items():
        assert errors.run(cli, [*container(pod)["args"], "--help"]) == 0, f"{name}: {capsys.readouterr().err}"
        given = {each["name"]: str(each.get("value", "postgresql://db/leasehold")) for each in container(pod)["env"]}
        own = {key: value for key, value in given.items() if key not in OF_CALLERS}
        loading.load(FOLDER / "leasehold.toml", sections(), own)
        mounts = {each["name"] for each in container(pod)["volumeMounts"]}
        assert mounts == {each["name"] for each in pod["spec"]["volumes"]}, name
        assert container(pod)["securityContext"]["readOnlyRootFilesystem"]
        assert not pod["spec"]["automountServiceAccountToken"], "commands of jobs would have the cluster's API"


def test_budgets_and_services_select_the_pods_and_the_pods_get_time_to_end() -> None:
    for name, made in named("Deployment").items():
        labels = made["spec"]["template"]["metadata"]["labels"]
        assert made["spec"]["selector"]["matchLabels"] == labels
        assert named("PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"] == labels
    (service,) = named("Service").values()
    gateway = pods()["leasehold-gateway"]
    assert service["spec"]["selector"] == gateway["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container(gateway)["ports"][0]["name"]
    bot = pods()["leasehold-bot"]
    unit = (OPS / "systemd" / "leasehold-bot@.service").read_text()
    added = container(bot)["securityContext"]["capabilities"]["add"]
    assert f"CapabilityBoundingSet={' '.join(f'CAP_{name}' for name in added)}\n" in unit
    assert bot["spec"]["terminationGracePeriodSeconds"] > AgentSettings().drain_seconds + AgentSettings().kill_grace


def test_a_gateway_answers_the_probes_and_the_scaler(served: Served) -> None:
    gateway = container(pods()["leasehold-gateway"])
    (service,) = named("Service")
    (scaler,) = named("ScaledObject").values()
    (trigger,) = scaler["spec"]["triggers"]
    address = f"http://{service}:{gateway['ports'][0]['containerPort']}"
    with served.client() as http:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert http.get(gateway[probe]["httpGet"]["path"]).status_code == 200
    with served.client(served.token("operator")) as http:
        answer = http.get(trigger["metadata"]["url"].removeprefix(address))
        assert isinstance(answer.json()[trigger["metadata"]["valueLocation"]], int), answer.text
    assert scaler["spec"]["scaleTargetRef"]["name"] in named("Deployment")
    assert trigger["authenticationRef"]["name"] in named("TriggerAuthentication")
