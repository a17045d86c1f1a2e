"""The architecture page and the glossary: every module stands in one, and is called by a word of the other."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("schema", "assigner", "bots")
#: A file, and perhaps a function or class of it, as documents name them.
REFERENCE = r"`((?:schema|assigner|bots|tests|ops)/[\w/.-]+\.(?:py|sql|toml|yml|md))(?:: ([\w.]+))?`"
PAGE, GLOSSARY = ROOT / "ops/docs/architecture.md", ROOT / "ops/docs/glossary.md"
#: Names that every programmer knows.
PLAIN = {
    "client", "clock", "errors", "logs", "main", "metrics", "migrate", "output", "report", "requests", "routes",
    "routing", "settings", "state", "states", "status", "transport",
}  # fmt: skip


def modules() -> set[str]:
    """Every module but package markers and migrations, as a path."""
    found = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path) for path in found if path.stem != "__init__" and path.parent.name != "versions"}


def explained() -> set[str]:
    """The words that the glossary explains: terms, with spaces as underscores and in the plural too, and modules."""
    text = GLOSSARY.read_text().lower()
    rows = re.findall(r"^\| \*\*(.+?)\*\*", text, re.M)
    terms = {term.strip().replace(" ", "_") for row in rows for term in row.split(",")}
    names = {name for cell in re.findall(r"^\| (`.+?) \|", text, re.M) for name in re.findall(r"`(\w+)`", cell)}
    return names | {term + ending for term in terms for ending in ("", "s", "es")}


def unexplained(stems: Iterable[str]) -> list[str]:
    return sorted(set(stems) - explained() - PLAIN)


def test_the_architecture_page_names_every_module_and_no_other() -> None:
    named = set(re.findall(r"^\| `((?:schema|assigner|bots)/\S+\.py)` \|", PAGE.read_text(), re.M))
    named = {path for path in named if "/versions/" not in path}
    missing, gone = sorted(modules() - named), sorted(named - modules())
    assert not missing, f"{PAGE.name} has no line for {missing}"
    assert not gone, f"{PAGE.name} names modules that are not there: {gone}"


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


def test_every_module_is_called_by_a_word_of_the_glossary_or_a_plain_one() -> None:
    missing = unexplained(Path(path).stem for path in modules())
    assert not missing, f"{GLOSSARY.name} does not explain {missing}: add a term or a row of module names"


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


def test_a_word_that_nobody_explains_is_found() -> None:
    assert unexplained(["lease", "sampling", "clock", "gatehouse"]) == ["gatehouse"]
