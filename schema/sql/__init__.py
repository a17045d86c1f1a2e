"""SQL functions and views: one file each, named after what it defines.

`checks/` has the functions that constraints of tables call, which are loaded before the tables. `functions/` has all
other functions, each with its triggers, and `views/` the views; both are loaded after the tables.

Every file may be loaded again: it replaces what it defines. This package imports nothing of ours. Read first:
functions/submit.sql and checks/job_is_sound.sql.
"""

from importlib.resources import files

from sqlalchemy import Connection

#: Bodies of functions may name functions and tables that do not exist yet.
_UNCHECKED = "SET LOCAL check_function_bodies = off"
_CHECKED = "SET LOCAL check_function_bodies = on"


def names(folder: str) -> list[str]:
    """Names of everything that a folder defines, sorted."""
    return sorted(file.name.removesuffix(".sql") for file in files(__name__).joinpath(folder).iterdir())


def load(connection: Connection, *paths: str) -> None:
    """Execute files, each given as `folder/name`."""
    for path in paths:
        _execute(connection, files(__name__).joinpath(f"{path}.sql").read_text(encoding="utf-8"))


def load_all(connection: Connection, folder: str) -> None:
    """Execute every file of a folder, in any order of what they use of each other."""
    _execute(connection, _UNCHECKED)
    load(connection, *(f"{folder}/{name}" for name in names(folder)))
    _execute(connection, _CHECKED)


def _execute(connection: Connection, statements: str) -> None:
    # Without parameters the driver looks for no placeholders, which colons and percent signs would be taken for.
    connection.exec_driver_sql(statements, execution_options={"no_parameters": True})
