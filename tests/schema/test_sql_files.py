"""The files in `schema/sql/` are the functions, views and triggers of a database, and each may be loaded again."""

import re
from importlib.resources import files
from typing import Any

import pytest

from schema import sql
from schema.postgres import migrate
from schema.postgres.engine import Database
from schema.postgres.statements import Statement

FUNCTIONS = Statement(
    "SELECT proname AS name, pg_get_functiondef(oid) AS definition FROM pg_proc"
    " WHERE pronamespace = 'leasehold'::regnamespace ORDER BY proname, definition"
)
VIEWS = Statement("SELECT viewname AS name, definition FROM pg_views WHERE schemaname = 'leasehold' ORDER BY viewname")
TRIGGERS = Statement(
    "SELECT proname AS name, pg_get_triggerdef(t.oid) AS definition FROM pg_trigger t JOIN pg_proc p ON p.oid = tgfoid"
    " WHERE NOT tgisinternal AND pronamespace = 'leasehold'::regnamespace ORDER BY tgname"
)
CATALOG = (FUNCTIONS, VIEWS, TRIGGERS)
FOLDERS = {"checks": "FUNCTION", "functions": "FUNCTION", "views": "VIEW"}
PATHS = [f"{folder}/{name}" for folder in FOLDERS for name in sql.names(folder)]


def read(database: Database, query: Any) -> list[Any]:
    return list(database.run(lambda connection: connection.execute(query).all()))


@pytest.mark.parametrize("path", PATHS)
def test_a_file_says_what_it_is_for_and_defines_what_it_is_named_after(path: str) -> None:
    folder, name = path.split("/")
    written = files(sql).joinpath(f"{path}.sql").read_text(encoding="utf-8")
    assert written.startswith("-- ")
    defined = re.findall(r"^CREATE OR REPLACE (\w+) (\w+)", written, re.MULTILINE)
    assert len(defined) == written.count("\nCREATE ")
    assert {(kind, of) for kind, of in defined if kind != "TRIGGER"} == {(FOLDERS[folder], name)}
    if folder != "views":
        assert set(re.findall(r"EXECUTE FUNCTION (\w+)", written)) <= {name}


def test_jobs_are_inserted_by_one_list_of_columns() -> None:
    by_list = r"INSERT INTO jobs (AS \w+ )?\({JOB_COLUMNS}\)\s+SELECT {JOB_COLUMNS} FROM "
    inserting = set()
    for name in sql.names("functions"):
        written = files(sql).joinpath(f"functions/{name}.sql").read_text()
        assert len(re.findall(by_list, written)) == written.count("INSERT INTO jobs "), name
        inserting |= {name} if "INSERT INTO jobs " in written else set()
    assert inserting == {"submit_alone", "submit_many", "submit_normal_graph", "submit_or_join"}


def test_every_function_view_and_trigger_of_a_database_has_a_file(database: Database) -> None:
    assert {row.name for row in read(database, FUNCTIONS)} == {*sql.names("checks"), *sql.names("functions")}
    assert [row.name for row in read(database, VIEWS)] == sql.names("views")
    for name, definition in read(database, TRIGGERS):
        instead = re.search(r" INSTEAD OF .* ON \w+\.(\w+) ", definition)
        path = f"views/{instead[1]}.sql" if instead else f"functions/{name}.sql"
        assert f"CREATE OR REPLACE TRIGGER {definition.split()[2]} " in files(sql).joinpath(path).read_text()


def test_every_file_can_be_loaded_again_with_its_body_checked_and_changes_nothing(database: Database) -> None:
    before = [read(database, query) for query in CATALOG]
    with migrate.begin(database) as connection:
        sql.load(connection, *PATHS)
    assert [read(database, query) for query in CATALOG] == before
