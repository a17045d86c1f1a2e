"""Runs every check of `db doctor`, one after the other.

Most checks run in a short read-only transaction of their own. A check that fails to run has the verdict `unknown` and
the reason. Only a database that cannot be reached ends the whole run.
"""

from collections.abc import Callable
from functools import partial

import psycopg
from leasehold.errors import NotReady

from schema.diagnostics import checks as doctor_checks
from schema.diagnostics import server
from schema.diagnostics.checks import Check, Verdict, printable_name
from schema.diagnostics.stored_values import check_stored_values
from schema.postgres import migrate
from schema.postgres.connection import Connection
from schema.postgres.engine import Database

_BOUNDED = "SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '5s'; SET LOCAL lock_timeout = '200ms'"
_REFUSED = "42501"
#: The checks that read our tables.
OF_TABLES = ("indexes", "autovacuum", "dead rows", "retention", "schedules", "stored values", "callers")


def run_checks(database: Database) -> list[Check]:
    """Run every check. Raises NotReady if the database cannot be reached."""
    version = _run_check("schema", partial(_schema, database))
    held = _run_in_transaction(database, "snapshots", doctor_checks.check_snapshots)
    checks = [
        version,
        _run_check("pooler", partial(doctor_checks.check_pooler, database)),
        _run_check("wake-ups", partial(doctor_checks.check_wakeups, database)),
        _run_in_transaction(database, "clocks", doctor_checks.check_clocks),
        held,
        _run_in_transaction(database, "locks", server.check_locks),
    ]
    if version.verdict is Verdict.BAD and version.figures["current"] is None:
        missing = "there are no tables of ours"
        checks += [Check(name, Verdict.UNKNOWN, missing, version.remedy) for name in OF_TABLES]
    else:
        is_current = version.verdict is Verdict.OK
        checks += [
            _run_in_transaction(database, "indexes", partial(doctor_checks.check_indexes, is_current=is_current)),
            _run_in_transaction(database, "autovacuum", doctor_checks.check_autovacuum),
            _run_in_transaction(database, "dead rows", partial(doctor_checks.check_dead_rows, oldest=held)),
            _run_in_transaction(database, "retention", doctor_checks.check_retention),
            _run_in_transaction(database, "schedules", doctor_checks.check_schedules),
            _run_in_transaction(database, "stored values", check_stored_values),
            _run_in_transaction(database, "callers", server.check_callers),
        ]
    checks += [
        _run_in_transaction(database, "writes", server.check_writes),
        _run_in_transaction(database, "disk", server.check_disk),
        _run_in_transaction(database, "durability", doctor_checks.check_durability),
        _run_in_transaction(database, "connections", doctor_checks.check_connections),
        _run_in_transaction(database, "memory", doctor_checks.check_memory),
        _run_in_transaction(database, "fences", doctor_checks.check_fences),
        _run_in_transaction(database, "notifications", server.check_notifications),
        _run_in_transaction(database, "collation", server.check_collation),
    ]
    return checks


def _schema(database: Database) -> Check:
    version = migrate.status(database)
    figures = {"current": version.current, "needed": version.needed}
    try:
        migrate.must_be_ready(version)
    except NotReady as refusal:
        found, _, remedy = str(refusal).partition("; ")
        return Check("schema", Verdict.BAD, found, remedy.removeprefix("run: "), figures)
    return Check("schema", Verdict.OK, f"version {version.current}, as needed", None, figures)


def _run_in_transaction(database: Database, name: str, check: Callable[[Connection], Check]) -> Check:
    def bounded(connection: Connection) -> Check:
        connection.execute_sql(_BOUNDED)
        return check(connection)

    return _run_check(name, lambda: database.run(bounded))


def _run_check(name: str, check: Callable[[], Check]) -> Check:
    """The result of the check, or `unknown` with the reason why it could not run."""
    try:
        return check()
    except psycopg.Error as error:
        reason = str(error).strip().splitlines()
        refused = error.sqlstate == _REFUSED
        remedy = "run this as the role that owns the tables, or grant it the missing rights" if refused else "try again"
        if isinstance(error, psycopg.errors.LockNotAvailable):
            remedy = "see the check locks, and try again"
        return Check(
            name, Verdict.UNKNOWN, f"could not be checked: {printable_name(reason[0] if reason else '')}", remedy
        )
