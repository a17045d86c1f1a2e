"""Rules on what code may do, read from the syntax trees: who asks for the time, who writes which tables.

The direction of imports is checked by import-linter, whose contracts are in `pyproject.toml`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.architecture.syntax import parsed, statements

HOUSE = Path(__file__).parent.parent.parent
ROOMS = ("schema", "assigner", "bots")
CLOCK = "schema/clock.py"
#: Sources of chance that are handed on as an argument, not the module's global one.
CHANCE = ("Random", "SystemRandom")
#: `live` is a view through which leases could be written.
GUARDED = {"jobs", "leases", "live"}

_TARGET = rf"(ONLY\s+)?(\"?leasehold\"?\.)?\"?({'|'.join(GUARDED)})\b"
_VERB = r"\b(INSERT\s+INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO|TRUNCATE(\s+TABLE)?|COPY)"
WRITES = re.compile(rf"{_VERB}\s+{_TARGET}", re.IGNORECASE)
WRITES_UNKNOWN = re.compile(rf"{_VERB}\s+(\"?leasehold\"?\.)?\"?$", re.IGNORECASE)

FILES = sorted(file for room in ROOMS for file in (HOUSE / room).rglob("*.py"))


def named(file: Path) -> str:
    return file.relative_to(HOUSE).as_posix()


def module(file: Path) -> str:
    """The name by which others import it; the client library is a distribution of its own."""
    return named(file).removeprefix("bots/sdk/")[:-3].replace("/", ".").removesuffix(".__init__")


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imported(tree: ast.AST) -> Iterator[tuple[int, str, list[ast.alias]]]:
    """Line, module and imported names; plain `import` has no names, a relative import a leading dot."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or ""), node.names


def real_time_and_chance(tree: ast.AST, name: str) -> list[str]:
    found: list[tuple[int, str]] = []
    for line, module, names in imported(tree):
        if module == "time":
            found.append((line, "time"))
        if module == "random":
            found += [(line, f"random.{alias.name}") for alias in names if alias.name not in CHANCE]
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            wall = owner in ("datetime", "date") and node.attr in ("now", "utcnow", "today")
            if wall or (owner == "random" and isinstance(node.value, ast.Name) and node.attr not in CHANCE):
                found.append((node.lineno, f"{owner}.{node.attr}"))
    return [f"{name}:{line}: uses {what}" for line, what in found]


def writers(tree: ast.AST, name: str) -> list[str]:
    lines = {*sql_writes(tree), *core_writes(tree)}
    return [f"{name}:{line}: writes jobs or leases outside schema/moves" for line in sorted(lines)]


def sql_writes(tree: ast.AST) -> Iterator[int]:
    prose = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if WRITES.search(node.value):
                yield node.lineno
        elif isinstance(node, ast.JoinedStr):
            parts = zip(node.values, node.values[1:], strict=False)
            if any(
                isinstance(part, ast.Constant) and WRITES_UNKNOWN.search(str(part.value))
                for part, filled in parts
                if isinstance(filled, ast.FormattedValue)
            ):
                yield node.lineno


def core_writes(tree: ast.AST) -> Iterator[int]:
    """Lines of `insert(jobs)`, `tables.leases.update()` and the like, under whatever name the table was imported."""
    guarded, modules = set[str](), set[str]()
    for _, module, names in imported(tree):
        for alias in names:
            if module.startswith("schema.tables.") and alias.name in GUARDED:
                guarded.add(alias.asname or alias.name)
            if module == "schema.tables":
                modules.add(alias.asname or alias.name)

    def is_guarded(node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in guarded
        holder = node.value if isinstance(node, ast.Attribute) else None
        through = (isinstance(holder, ast.Name) and holder.id in modules) or (
            isinstance(holder, ast.Attribute) and ast.unparse(holder).startswith("schema.tables.")
        )
        return through and isinstance(node, ast.Attribute) and node.attr in GUARDED

    for node in nodes(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if re.search("insert|update|delete", called):
                receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                if any(map(is_guarded, [*node.args[:1], *receiver])):
                    yield node.lineno


def test_no_two_files_import_each_other() -> None:
    modules = {module(file): file for file in FILES}
    assert "leasehold.pool" in modules
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        wanted = set[str]()
        for _, source, names in imported(parsed(file)):
            inner = {f"{source}.{alias.name}" for alias in names} & modules.keys()
            wanted |= inner or ({source} & modules.keys())
        graph[name] = wanted - {name}
    list(TopologicalSorter(graph).static_order())


def test_only_the_clock_asks_for_the_time_and_chance_is_an_argument() -> None:
    # The client library is installed without `schema`.
    files = [file for file in FILES if named(file) != CLOCK and not named(file).startswith("bots/sdk/")]
    assert [wrong for file in files for wrong in real_time_and_chance(parsed(file), named(file))] == []


def test_only_the_moves_write_jobs_and_leases() -> None:
    files = [file for file in FILES if not named(file).startswith(("schema/moves/", "schema/migrations/"))]
    assert [wrong for file in files for wrong in writers(parsed(file), named(file))] == []


def test_real_time_and_global_chance_are_found() -> None:
    for source in (
        *("import time", "from time import monotonic", "from random import shuffle"),
        *("from datetime import datetime\ndatetime.now()", "import datetime\ndatetime.datetime.utcnow()"),
        *("import random\nrandom.choice([1])", "import random\nrandom.seed(1)"),
    ):
        assert real_time_and_chance(ast.parse(source), "bots/agent/agent.py"), source


def test_a_hidden_writer_is_found() -> None:
    for source in (
        "X = text('UPDATE jobs SET state = 1')",
        "X = 'WITH a AS (delete\\n from leasehold.leases RETURNING 1) SELECT 1'",
        *("X = f'INSERT INTO leases {columns}'", "X = f'UPDATE {table} SET state = 1'"),
        "X = 'UPDATE live SET state = 1'",
        "from schema.tables.jobs import jobs\nupdate(jobs)",
        "from schema.tables.fleet import leases as held\nheld.delete()",
        "from schema.tables import fleet\npg_insert(fleet.leases).values()",
        "import schema.tables.jobs\nschema.tables.jobs.jobs.update()",
    ):
        assert writers(ast.parse(source), "assigner/cycle/assigner.py"), source


def test_what_is_allowed_is_left_alone() -> None:
    for source in (
        "import random\nfrom random import Random\ndef choose(chance: random.Random): return chance.choice([1])",
        "X = 'SELECT 1 FROM jobs FOR UPDATE OF jobs'; Y = 'UPDATE bots SET in_use = 1'",
        "'''We never UPDATE jobs here.'''",
        "jobs = {}\njobs.update(a=1)",
        "from schema.tables.jobs import jobs\nselect(jobs)",
    ):
        tree = ast.parse(source)
        found = writers(tree, "assigner/cycle/assigner.py") + real_time_and_chance(tree, "assigner/cycle/assigner.py")
        assert not found, source
