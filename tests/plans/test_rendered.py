"""The final text of the long composed statements on hot paths, so that a change of a part shows as SQL.

`LEASEHOLD_RENDER=1` rewrites the files before they are compared.
"""

import ast
import os
from pathlib import Path

import pytest

from schema.moves.end import END
from schema.moves.grant import GRANT, GRANT_LOCKED
from schema.picking import constrained, constrained_front, for_bot, preemption, ready
from schema.picking.pick import Order

HOUSE = Path(__file__).parent.parent.parent
RENDERED = Path(__file__).parent / "rendered"
STATEMENTS = {
    "aged": constrained.AGED,
    "constrained_front": constrained_front.FRONT,
    "end": END[True],
    "grant": GRANT[False],
    "grant_locked": GRANT_LOCKED[False],
    "heads": constrained.HEADS,
    "occupied_bots": preemption.OCCUPIED_BOTS,
    "pick": ready.PICK[Order.PRIORITY],
    "pick_for_bot": for_bot.PICK,
    "pick_from_front": ready.PICK_FROM_FRONT,
    "queues": constrained.QUEUES,
    "starved_jobs": preemption.STARVED_JOBS,
    "unserved_queues": ready.UNSERVED_QUEUES,
}
#: Modules whose statements run for every job, bot or cycle.
HOT = sorted(
    file for room in ("picking", "fleet", "moves", "accounting") for file in (HOUSE / "schema" / room).glob("*.py")
)


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_is_the_one_in_its_file(name: str) -> None:
    lines = [line.rstrip() for line in STATEMENTS[name].text.strip("\n").splitlines()]
    file, text = RENDERED / f"{name}.sql", "\n".join(lines).rstrip() + "\n"
    if os.environ.get("LEASEHOLD_RENDER") == "1":
        file.write_text(text)
    assert file.read_text() == text, f"{file.name} differs: run this test with LEASEHOLD_RENDER=1, read the difference"


def test_every_file_belongs_to_a_statement() -> None:
    assert {file.stem for file in RENDERED.iterdir()} == STATEMENTS.keys()


def calls(node: ast.AST) -> dict[str, ast.Call]:
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {each.func.id: each for each in found if isinstance(each.func, ast.Name)}


def composes(function: ast.FunctionDef) -> bool:
    made = calls(function).get("Statement")
    return made is not None and not isinstance(made.args[0], ast.Constant)


@pytest.mark.parametrize("file", HOT, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_statement_is_composed_while_it_is_needed(file: Path) -> None:
    """A function may compose one only for names of its module."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    composers = {function.name for function in functions if composes(function)}
    late = {function.name for function in functions if composers & calls(function).keys()}
    assert not late, f"{sorted(late)} compose statements: assign them to names of the module"
