"""The final text of every composed statement on a hot path, one file each, so that a change of SQL shows as SQL.

`LEASEHOLD_RENDER=1` rewrites the files before they are compared.
"""

import ast
import os
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from schema.postgres.statements import Statement

HOUSE = Path(__file__).parent.parent.parent
RENDERED = Path(__file__).parent / "rendered"
ASKED = "run this file with LEASEHOLD_RENDER=1 and read the difference"
#: Modules whose statements run for every job, bot or cycle.
HOT = sorted(
    file
    for pattern in (
        "picking/*.py",
        "fleet/*.py",
        "accounting/counters.py",
        "accounting/quotas.py",
        *(f"moves/{move}.py" for move in ("submit", "grant", "acknowledge", "end", "preempt", "backoff", "sessions")),
    )
    for file in (HOUSE / "schema").glob(pattern)
)


def named(file: Path) -> str:
    return file.relative_to(HOUSE).as_posix()


def assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names that a module itself assigns, and what to."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def variants(module: str, name: str, value: object, source: ast.expr) -> Iterator[tuple[dict[str, Any], Statement]]:
    """The statements of one name: one, or one for each key of a dict, by the parts of the key."""
    if isinstance(value, Statement):
        yield {}, value
    elif isinstance(value, dict) and any(isinstance(each, Statement) for each in value.values()):
        assert isinstance(source, ast.DictComp), f"{module}: {name}: write it as a comprehension, which names its keys"
        parts = source.key.elts if isinstance(source.key, ast.Tuple) else [source.key]
        names = [ast.unparse(part) for part in parts]
        for key, statement in value.items():
            yield dict(zip(names, key if isinstance(key, tuple) else (key,), strict=True)), statement


def word(value: object) -> str:
    return (value.name if isinstance(value, Enum) else str(value)).lower()


def statements() -> dict[str, str]:
    """What each file should hold: every statement of the hot modules that is not one literal of its source."""
    found: dict[str, str] = {}
    for file in HOT:
        source = file.read_text()
        module = import_module(named(file).removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        for name, expression in assignments(ast.parse(source)):
            for variant, statement in variants(named(file), name, getattr(module, name), expression):
                if statement.text in source:
                    continue
                switches = {key: value for key, value in variant.items() if isinstance(value, bool)}
                words = [
                    (key if value else f"not_{key}") if key in switches else word(value)
                    for key, value in variant.items()
                ]
                target = "-".join([file.stem, name.strip("_").lower(), *words]) + ".sql"
                assert target not in found, f"{named(file)}: {name}: another statement is rendered as {target}"
                title = ", ".join([name, *(f"{key}={word(value)}" for key, value in variant.items())])
                lines = [line.rstrip() for line in statement.text.strip("\n").splitlines()]
                found[target] = "\n".join([f"-- {named(file)}: {title}", *lines]).rstrip() + "\n"
    return found


STATEMENTS = statements()


@pytest.fixture(autouse=True, scope="module")
def rewritten_if_asked() -> None:
    if os.environ.get("LEASEHOLD_RENDER") == "1":
        RENDERED.mkdir(exist_ok=True)
        for file in RENDERED.glob("*.sql"):
            file.unlink()
        for name, rendered in STATEMENTS.items():
            (RENDERED / name).write_text(rendered)


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_is_the_one_in_its_file(name: str) -> None:
    file = RENDERED / name
    assert file.exists(), f"{named(file)} is missing: {ASKED}"
    assert file.read_text() == STATEMENTS[name], f"{named(file)} differs: {ASKED}"


def test_every_file_belongs_to_a_statement() -> None:
    left = sorted(file.name for file in RENDERED.iterdir() if file.name not in STATEMENTS)
    assert left == [], f"nothing renders these files of {named(RENDERED)} any more: {ASKED}"


def composing(node: ast.AST) -> bool:
    """True for `text(...)` of anything but a literal."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "text"
        and not isinstance(node.args[0], ast.Constant)
    )


@pytest.mark.parametrize("file", HOT, ids=named)
def test_no_statement_is_composed_while_it_is_needed(file: Path) -> None:
    """A function may compose one only for names of its module, which are rendered."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    composers = {function.name for function in functions if any(map(composing, ast.walk(function)))}
    late = {
        f"{function.name} calls {node.func.id}"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in composers
    }
    first = {
        node.func.id
        for _, value in assignments(tree)
        for node in ast.walk(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert (sorted(late), sorted(composers - first)) == ([], []), f"{named(file)}: assign the statement to a name"
