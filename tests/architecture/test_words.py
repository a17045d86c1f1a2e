"""What the documents say of the code: layers, invariants, files and functions that they name."""

import re
import tomllib
from pathlib import Path

from schema.diagnostics.invariants import INVARIANTS

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("schema", "assigner", "bots")
#: A file, and perhaps a function or class of it, as documents name them.
REFERENCE = r"`((?:schema|assigner|bots|tests|ops)/[\w/.-]+\.(?:py|sql|toml|yml|md))(?:: ([\w.]+))?`"
PAGE, GLOSSARY = ROOT / "ops/docs/architecture.md", ROOT / "ops/docs/glossary.md"


def test_the_figure_of_layers_is_that_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {each["containers"][0]: each["layers"] for each in contracts if each["type"] == "layers"}
    shown: dict[str, list[str]] = {}
    (figure,) = re.findall(r"^```text\n(assigner   .*?)^```", PAGE.read_text(), re.M | re.S)
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
