"""Whether a database is fit for the pool: every check, made one after the other.

Each runs in a short transaction of its own that may only read. One that cannot be made says so and why; only a database
that cannot be reached at all ends the whole.
"""

from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from schema.diagnostics import checks as checks_diagnostics
from schema.diagnostics.checks import Check, Verdict, shown
from schema.errors import NotReady
from schema.postgres import migrate
from schema.postgres.engine import Database

_BOUNDED = text("""
SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '5s'; SET LOCAL lock_timeout = '200ms'
""")
_REFUSED = "42501"


def examine(database: Database) -> list[Check]:
    """Make every check. Raises NotReady if the database cannot be reached."""
    version = _made("schema", partial(_schema, database))
    held = _checked(database, "snapshots", checks_diagnostics.check_snapshots)
    checks = [
        version,
        _made("wake-ups", partial(checks_diagnostics.wakeups, database)),
        _checked(database, "clocks", checks_diagnostics.clocks),
        held,
    ]
    if version.verdict is Verdict.BAD and version.figures["current"] is None:
        missing = "there are no tables of ours"
        checks += [
            Check(name, Verdict.UNKNOWN, missing, version.remedy) for name in ("indexes", "autovacuum", "dead rows")
        ]
    else:
        is_current = version.verdict is Verdict.OK
        checks += [
            _checked(database, "indexes", partial(checks_diagnostics.check_indexes, is_current=is_current)),
            _checked(database, "autovacuum", checks_diagnostics.autovacuum),
            _checked(database, "dead rows", partial(checks_diagnostics.dead_rows, oldest=held)),
        ]
    checks += [
        _checked(database, "durability", checks_diagnostics.durability),
        _checked(database, "connections", checks_diagnostics.connections),
        _checked(database, "memory", checks_diagnostics.memory),
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


def _checked(database: Database, name: str, check: Callable[[Connection], Check]) -> Check:
    def bounded(connection: Connection) -> Check:
        connection.execute(_BOUNDED)
        return check(connection)

    return _made(name, lambda: database.run(bounded))


def _made(name: str, check: Callable[[], Check]) -> Check:
    """What the check says, or why it could not be made."""
    try:
        return check()
    except DBAPIError as error:
        reason = str(error.orig).strip().splitlines()
        refused = getattr(error.orig, "sqlstate", None) == _REFUSED
        remedy = "run this as the role that owns the tables, or grant it what it lacks" if refused else "try again"
        return Check(name, Verdict.UNKNOWN, f"could not be looked at: {shown(reason[0] if reason else '')}", remedy)
