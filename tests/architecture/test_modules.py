"""The shape of the packages: names, sizes, folders, docstrings, and lists that are kept by hand."""

import ast
import re
from importlib import import_module
from pathlib import Path

from tests.support.architecture.syntax import parsed, statements

HOUSE = Path(__file__).parent.parent.parent
ROOMS = ("schema", "assigner", "bots")
#: Without revisions, and without generated messages.
MODULES = sorted(
    file
    for room in ROOMS
    for file in (HOUSE / room).rglob("*.py")
    if "versions" not in file.relative_to(HOUSE).parts and not file.name.endswith("_pb2.py")
)
PACKAGES = sorted({file.parent for file in MODULES} - {HOUSE / room for room in ROOMS})
TESTS = sorted((HOUSE / "tests").rglob("*.py"))

#: A folder with more modules needs a sub-package.
MOST_MODULES = 16
#: A shorter module belongs to its importer, unless it is one of `SHORT`.
LEAST_LINES = 40
#: A longer module says in its docstring why it is one module: a sentence that begins with "One module because".
LONG = 500
MOST_LINES = 800
MOST_FUNCTION_LINES = 60
MOST_TEST_LINES = 800

#: Short modules that stand alone, each with the reason.
SHORT = {
    "bots/sdk/leasehold/states.py": "words that the database, the gateway and its clients share",
    "bots/sdk/leasehold/runtime/call_messages.py": "what the agent and its warm children do alike",
    "bots/sdk/leasehold/testing/fixtures.py": "what needs pytest, apart from what does not",
    "schema/gc_tuning.py": "settings of the interpreter that long-lived processes of both sides use",
    "schema/migrations/env.py": "Alembic runs this file by its name",
    "assigner/config/plugins.py": "the one place that loads entry points",
    "assigner/operator_resources/registry.py": "the list of all resources, above the modules that declare them",
}


def named(file: Path) -> str:
    return file.relative_to(HOUSE).as_posix()


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def docstring(file: Path) -> str:
    return ast.get_docstring(parsed(file)) or ""


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    said = ast.get_docstring(function, clean=False) or ""
    return (function.end_lineno or function.lineno) - function.lineno + 1 - len(said.splitlines())


def test_a_folder_holds_about_fifteen_modules() -> None:
    folders = {folder: len(list(folder.glob("*.py"))) for folder in {file.parent for file in [*MODULES, *TESTS]}}
    assert {named(folder): count for folder, count in folders.items() if count > MOST_MODULES} == {}


def test_a_package_says_what_it_is_for_what_it_imports_and_what_to_read_first() -> None:
    for package in PACKAGES:
        said = " ".join(docstring(package / "__init__.py").split())
        assert "import" in said, f"{named(package)}/__init__.py: say what the package may import"
        assert "Read first:" in said, f"{named(package)}/__init__.py: name the modules to read first"


def test_no_module_is_too_short_to_stand_alone() -> None:
    short = {named(file): lines(file) for file in MODULES if lines(file) < LEAST_LINES and file.name != "__init__.py"}
    assert {name: length for name, length in short.items() if name not in SHORT} == {}
    assert SHORT.keys() <= {named(file) for file in MODULES}, "a module of SHORT is gone"


def test_a_long_module_says_why_it_is_one() -> None:
    assert {named(file): lines(file) for file in MODULES if lines(file) > MOST_LINES} == {}
    long = [file for file in MODULES if lines(file) > LONG]
    assert [named(file) for file in long if "One module because" not in docstring(file)] == []


def test_no_test_module_is_too_long() -> None:
    assert {named(file): lines(file) for file in TESTS if lines(file) > MOST_TEST_LINES} == {}


def test_functions_are_short_enough_to_read_at_once() -> None:
    long = {
        f"{named(file)}: {node.name}": length(node)
        for file in MODULES
        for node in statements(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > MOST_FUNCTION_LINES
    }
    assert long == {}


def test_every_module_has_a_docstring_whose_first_line_is_short() -> None:
    wrong = {}
    for file in MODULES:
        first = docstring(file).split("\n\n")[0].split()
        if not first or len(first) > 40:
            wrong[named(file)] = len(first)
    assert wrong == {}


def test_no_test_module_imports_another() -> None:
    wrong = [
        f"{named(file)}: {match}"
        for file in TESTS
        for match in re.findall(r"^\s*(?:from|import) (tests\.(?!support)[\w.]+)", file.read_text(), re.M)
        if file.name != "conftest.py"
    ]
    assert wrong == []


def test_every_table_module_is_part_of_the_metadata() -> None:
    tables = import_module("schema.tables")
    missing = [file.stem for file in (HOUSE / "schema" / "tables").glob("*.py") if not hasattr(tables, file.stem)]
    assert [stem for stem in missing if stem != "__init__"] == [], "import these in schema/tables/__init__.py"


def test_the_index_of_moves_names_functions_that_are_there() -> None:
    index = docstring(HOUSE / "schema" / "moves" / "__init__.py")
    named_there = re.findall(r"\b([a-z]+)\.([a-z_]+)\b(?!\.)(?<!\.py)", index.partition("It imports")[0])
    files = {file.stem: file.relative_to(HOUSE) for file in (HOUSE / "schema" / "moves").rglob("*.py")}
    moves = {stem: import_module(".".join(file.with_suffix("").parts)) for stem, file in files.items()}
    missing = [f"{module}.{name}" for module, name in named_there if not hasattr(moves.get(module), name)]
    assert named_there != []
    assert missing == []
