"""SQL functions and views: one file for each, with the same name as the function or view.

`checks/` has the functions that constraints of tables call; they are loaded before the tables. `functions/` has all
other functions, each with its triggers, and then `views/` has the views, with theirs; both are loaded after the tables.

Every file may be loaded again and then replaces its function or view. This package imports `leasehold.wire` only. Read
first: functions/submit_many.sql and functions/settle.sql.

What tables share with statements is here or in `schema.states`. The tables are SQLAlchemy's: few processes need
them, and its import takes a quarter of the start of one.
"""

from importlib.resources import files
from typing import TYPE_CHECKING

from leasehold.wire import AUTOMATIC

if TYPE_CHECKING:
    from sqlalchemy import Connection

SCHEMA = "leasehold"
#: A live lease.
LIVE = "state IN ('pending', 'active', 'cancelling')"
#: A live lease, as the index `leases_live_of_bot` states it, and no other index.
NOT_OVER = "state NOT IN ('completed', 'cancelled')"
#: What begins keys that a client has made for its own repeats, which are kept for a short time only.
OF_CLIENTS = f"starts_with(key, '{AUTOMATIC}')"

#: The functions that callers call in sessions of their own. Each fixes the search path, and forbids compilation and
#: reads of whole tables. No other function does: a setting costs a single submit about as much as writing a row.
OF_CALLERS = ("submit", "submit_graph")
#: The columns of a job that its submit sets. `{JOB_COLUMNS}` in a file stands for this list. Every function that
#: inserts jobs makes rows with columns of these names, and inserts them by it.
JOB_COLUMNS = (
    "id, public_id, queue, cohort, instance, platform, label, priority, units, state, locality_hint, timeout_seconds,"
    " queue_deadline, max_attempts, retry_failed, dedup_key, constrained, rank, preferred, schedule_after, queued_at"
)
#: Without the check, a function may name functions and tables that do not exist yet.
_UNCHECKED = "SET LOCAL check_function_bodies = off"
_CHECKED = "SET LOCAL check_function_bodies = on"


def names(folder: str) -> list[str]:
    """Names of all functions or views in a folder, sorted."""
    return sorted(file.name.removesuffix(".sql") for file in files(__name__).joinpath(folder).iterdir())


def load(connection: "Connection", *paths: str) -> None:
    """Execute files, each given as `folder/name`. Functions may be loaded before those that they call."""
    _execute(connection, _UNCHECKED)
    for path in paths:
        written = files(__name__).joinpath(f"{path}.sql").read_text(encoding="utf-8")
        _execute(connection, written.replace("{JOB_COLUMNS}", JOB_COLUMNS))
    _execute(connection, _CHECKED)


def load_all(connection: "Connection", folder: str) -> None:
    """Execute every file of a folder by name."""
    load(connection, *(f"{folder}/{name}" for name in names(folder)))


def _execute(connection: "Connection", statements: str) -> None:
    # With `no_parameters` the driver does not take colons and percent signs for placeholders.
    connection.exec_driver_sql(statements, execution_options={"no_parameters": True})
