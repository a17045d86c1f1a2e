"""Upgrade of a database to the schema version that this program needs, and the check of that version.

The steps are Alembic revisions inside the package; no other file is read. All pending steps run in one transaction
under one advisory lock. So several programs may upgrade at once, and a step that fails leaves nothing behind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from leasehold.errors import NotReady

from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.sql import SCHEMA

if TYPE_CHECKING:
    import sqlalchemy
    from alembic.config import Config

# A long step must not be cancelled by the time-outs of normal work. Between two statements this program may stand still
# for seconds on a busy machine; one that is gone must not hold its locks for ever.
_PATIENT = (
    "SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0;"
    " SET LOCAL idle_in_transaction_session_timeout = '5min'"
)
_MIGRATION_LOCK = "SELECT pg_advisory_xact_lock(hashtext('leasehold.migrate'))"
_SERVER = "SELECT CAST(current_setting('server_version_num') AS integer), current_setting('server_version')"
#: The last revision before the baseline, with the same schema, and the baseline.
LAST_BEFORE, BASELINE = "0035", "0036"
#: The oldest server: its unique keys can treat nulls as equal.
OLDEST = 15
# Asked first, because CREATE SCHEMA needs a right on the database even if the schema is there.
_HAS_SCHEMA = f"SELECT to_regnamespace('{SCHEMA}') IS NOT NULL"
_CREATE_SCHEMA = f"CREATE SCHEMA {SCHEMA}"
_HAS_VERSIONS = f"SELECT to_regclass('{SCHEMA}.alembic_version') IS NOT NULL"
_CURRENT = f"SELECT version_num FROM {SCHEMA}.alembic_version"
# What cannot be read is not judged. Without the row nothing tells where the database lives.
_IS_AT_HOME = f"""
SELECT count(*) > 0 FROM {SCHEMA}.server_identity
WHERE table_oid = CAST(tableoid AS bigint)
    AND coalesce(system_identifier = {SCHEMA}.server_identifier(), true)
"""
MOVED = (
    "the database has come to this server by a dump or by pg_upgrade, so that fences may repeat; run: leasehold db"
    " restored"
)


@dataclass(frozen=True)
class Version:
    """The schema version of a database (`current`, None = none yet) and the one that this program needs.

    moved: it was restored from a dump, or its server was upgraded by pg_upgrade, and `leasehold db restored` was not
    run since. Known only of a database of the needed version.
    """

    current: str | None
    needed: str
    moved: bool = False

    @property
    def ready(self) -> bool:
        """True if this program may work on the database."""
        return not self.trouble

    @property
    def trouble(self) -> str:
        """Why this program may not work on the database, with the command that helps; "" if it may."""
        if self.current != self.needed:
            return f"schema {self.current or 'none'}, need {self.needed}; run: leasehold db upgrade"
        return MOVED if self.moved else ""


def status(database: Database, *, urgent: bool = False) -> Version:
    """The version of the database and the one needed. Raises NotReady if the database cannot be reached.

    urgent: use a reserved connection, so that the read does not wait for other work.
    """
    return database.run(read, urgent=urgent)


def read(connection: Connection) -> Version:
    """The version of the database and the one needed."""
    return _version(connection.execute_sql)


def require(database: Database) -> None:
    """Raise NotReady unless the database has the schema version that this program needs, and has not moved."""
    must_be_ready(status(database))


def must_be_ready(version: Version) -> None:
    """Raise NotReady, with the command that helps, unless this program may work on a database of this version."""
    if version.ready:
        return
    _refuse_unknown(version)
    raise NotReady(version.trouble)


def upgrade(database: Database) -> Version:
    """Run every step that the database lacks, after any other upgrade has ended.

    Does nothing on a database that is up to date. Raises NotReady if the database cannot be reached, is newer than this
    program, or is of a server that is too old. An error of a step is raised as psycopg.Error, and all steps of this
    call are rolled back.
    """
    from sqlalchemy.exc import DBAPIError

    def once() -> Version:
        try:
            with begin(database) as connection:
                return _upgrade(connection)
        except DBAPIError as error:
            raise (error.orig or error) from None

    return database.repeat(once)


@contextmanager
def begin(database: Database) -> Iterator["sqlalchemy.Connection"]:
    """A transaction on a connection of SQLAlchemy, which Alembic and the tables' metadata need.

    Its statements have no time-outs, and it may rest for five minutes.
    """
    import sqlalchemy

    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=database.connect_for_steps, poolclass=sqlalchemy.NullPool
    )
    with engine.begin() as connection:
        for setting in (*database.settings_for_steps(), _PATIENT):
            connection.exec_driver_sql(setting)
        yield connection


def _upgrade(connection: "sqlalchemy.Connection") -> Version:
    number, name = connection.exec_driver_sql(_SERVER).one()
    if number < OLDEST * 10_000:
        raise NotReady(f"the server is PostgreSQL {name}, need {OLDEST} or newer; upgrade the server first")
    connection.exec_driver_sql(_MIGRATION_LOCK)
    version = _version(connection.exec_driver_sql)
    _refuse_unknown(version)
    if version.current == LAST_BEFORE:
        _take_baseline(connection)
    elif version.current != version.needed:
        if not connection.exec_driver_sql(_HAS_SCHEMA).scalar_one():
            connection.exec_driver_sql(_CREATE_SCHEMA)
        _run_steps(connection)
    return _version(connection.exec_driver_sql)


def _refuse_unknown(version: Version) -> None:
    if version.current is None or version.current == LAST_BEFORE:
        return
    if version.current < LAST_BEFORE:
        raise NotReady(
            f"schema {version.current} was made before 0.2.0, which upgrades {LAST_BEFORE} only; upgrade it first with "
            "commit cf4afd9f"
        )
    if version.current not in _known():
        raise NotReady(
            f"schema {version.current} was made by a newer leasehold, need {version.needed}; install the newer program"
        )


def _version(execute: Callable[[str], Any]) -> Version:
    has_versions = execute(_HAS_VERSIONS).scalar_one()
    current, needed = execute(_CURRENT).scalar_one_or_none() if has_versions else None, _needed()
    return Version(current, needed, moved=current == needed and not execute(_IS_AT_HOME).scalar_one())


def _run_steps(connection: "sqlalchemy.Connection") -> None:
    from alembic import command

    command.upgrade(_config_on(connection), "head")


def _take_baseline(connection: "sqlalchemy.Connection") -> None:
    """Note that the database has the schema of the baseline, and run the steps after it."""
    from alembic import command

    config = _config_on(connection)
    command.stamp(config, BASELINE, purge=True)
    command.upgrade(config, "head")


def _config_on(connection: "sqlalchemy.Connection") -> "Config":
    config = alembic_config()
    config.attributes["connection"] = connection
    return config


def alembic_config() -> "Config":
    """Alembic's configuration with the directory of the steps."""
    # Every process checks the version when it starts, and Alembic takes 0.2 s to import.
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "schema:migrations")
    return config


@cache
def _known() -> tuple[str, ...]:
    """Every version that this program has a step for, the newest first: the numbers with which their files begin."""
    names = [file.name for file in resources.files("schema.migrations").joinpath("versions").iterdir()]
    return tuple(sorted((name.split("_")[0] for name in names if name.endswith(".py")), reverse=True))


def _needed() -> str:
    return _known()[0]
