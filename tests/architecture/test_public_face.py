"""What a stranger meets first: workflows, templates and the packages' own words say what the repository does."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from schema.postgres.migrate import OLDEST

ROOT = Path(__file__).parent.parent.parent
PROJECTS = (ROOT / "pyproject.toml", ROOT / "bots/sdk/pyproject.toml")
WORKFLOW = ROOT / ".github/workflows/checks.yml"
#: The versions of PostgreSQL that the suite runs on.
SERVERS = ["15", "16", "17", "18"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def pythons(project: Path) -> list[str]:
    """The versions that a package names, which are from the first one that it takes on."""
    described = tomllib.loads(project.read_text())["project"]
    named = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in described["classifiers"]]
    versions = [found[1] for found in named if found]
    assert described["requires-python"] == f">={versions[0]}"
    return versions


def test_the_workflow_runs_what_has_to_pass_on_every_version() -> None:
    jobs = read(WORKFLOW)["jobs"]
    commands = {
        step["run"] for job in jobs.values() for step in job["steps"] if step.get("run", "").startswith(("make ", "."))
    }
    said = {line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()}
    assert commands == {line for line in said if line.startswith(("make ", ".ci/"))}
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["postgresql"] == SERVERS
    assert jobs["check"]["strategy"]["matrix"]["python"] == matrix["python"]
    for project in PROJECTS:
        assert set(pythons(project)) <= set(matrix["python"])


def test_pages_name_the_oldest_versions_that_work() -> None:
    server, (python, *_) = str(OLDEST), pythons(PROJECTS[0])
    assert SERVERS[0] == server
    said = {
        "README.md": f"Python {python} or newer",
        "CONTRIBUTING.md": f"`python3` ({python} or newer)",
        "bots/sdk/README.md": f"Python {python} or newer",
        "ops/docs/python.md": f"Python {python} or newer",
        "ops/docs/deployment.md": f"PostgreSQL server ({server} or newer)",
    }
    for page, words in said.items():
        assert words in (ROOT / page).read_text(), f"{page} does not say: {words}"
    assert f"from PostgreSQL {server} on" in (ROOT / "CONTRIBUTING.md").read_text()


def test_forms_and_hooks_can_be_read_and_call_what_is_there() -> None:
    for form in (ROOT / ".github/ISSUE_TEMPLATE").iterdir():
        assert {"name", "description", "body"} <= read(form).keys()
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    programs = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert programs == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert read(ROOT / ".github/dependabot.yml")["version"] == 2
