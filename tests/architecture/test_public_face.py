"""What a stranger meets first: workflows, templates, packages and documents say what the repository does and holds."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from schema.diagnostics.invariants import INVARIANTS
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


# What the documents say of the code: layers, invariants, files and functions that they name.

#: A file, and perhaps a function or class of it, as documents name them.
REFERENCE = r"`((?:schema|assigner|bots|tests|ops)/[\w/.-]+\.(?:py|sql|toml|yml|md))(?:: ([\w.]+))?`"
PAGE, GLOSSARY = ROOT / "ops/docs/architecture.md", ROOT / "ops/docs/glossary.md"


def test_the_figure_of_layers_is_that_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {each["containers"][0]: each["layers"] for each in contracts if each["type"] == "layers"}
    layers = {package: rows for package, rows in layers.items() if "." not in package}
    shown: dict[str, list[str]] = {}
    (figure,) = re.findall(r"^```text\n(assigner +\d.*?)^```", PAGE.read_text(), re.M | re.S)
    for package, number, names in re.findall(r"^(\w*) +(\d+)  (.+)$", figure, re.M):
        rows = shown.setdefault(package, []) if package else shown[[*shown][-1]]
        rows.append(f"{number}: {names.replace(', ', ' | ')}")
    expected = {
        package: [f"{len(rows) - at}: {row}" for at, row in enumerate(rows)] for package, rows in layers.items()
    }
    assert shown == expected, f"{PAGE.name}: the figure is not that of the contracts in pyproject.toml"


def test_what_a_document_names_in_the_code_is_there() -> None:
    wrong = []
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGE.parent.glob("*.md")):
        for path, name in re.findall(REFERENCE, document.read_text()):
            last = name.rpartition(".")[2]
            if not (ROOT / path).is_file():
                wrong.append(f"{document.name}: {path} is not there")
            elif last and not re.search(rf"(def|class) {last}\b", (ROOT / path).read_text()):
                wrong.append(f"{document.name}: {path} has no {name}")
    assert not wrong, "\n".join(wrong)


def test_the_page_of_operators_says_what_each_invariant_demands() -> None:
    rows = re.findall(r"^\| (S\d+(?:, S\d+)*) \|", (PAGE.parent / "operations.md").read_text(), re.M)
    said = [name for row in rows for name in row.split(", ")]
    assert sorted(said) == sorted(each.id for each in INVARIANTS), "operations.md: the table of `db verify`"


def test_each_page_says_first_for_whom_it_is() -> None:
    for page in PAGE.parent.glob("*.md"):
        _title, first = page.read_text().split("\n\n")[:2]
        assert first.startswith("For "), f"{page.name}: the first paragraph does not say for whom the page is"
