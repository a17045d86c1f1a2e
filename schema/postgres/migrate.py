"""Upgrade of a database to the schema version that this program needs, and the check of that version.

The steps are Alembic revisions inside the package; no other file is read. All pending steps run in one transaction
under one advisory lock. So several programs may upgrade at once, and a step that fails leaves nothing behind.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from leasehold.errors import NotReady
from sqlalchemy import Connection, text

from schema.postgres import waits
from schema.postgres.engine import Database
from schema.tables.columns import SCHEMA

if TYPE_CHECKING:
    from alembic.config import Config

# A long step must not be cancelled by the time-outs of normal work.
_NO_TIMEOUTS = text("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0")
_MIGRATION_LOCK = text("SELECT pg_advisory_xact_lock(hashtext('leasehold.migrate'))")
_SERVER = text("SELECT CAST(current_setting('server_version_num') AS integer), current_setting('server_version')")
#: The oldest server: its unique keys can treat nulls as equal.
OLDEST = 15
# Asked first, because CREATE SCHEMA needs a right on the database even if the schema is there.
_HAS_SCHEMA = text(f"SELECT to_regnamespace('{SCHEMA}') IS NOT NULL")
_CREATE_SCHEMA = text(f"CREATE SCHEMA {SCHEMA}")
_HAS_VERSIONS = text(f"SELECT to_regclass('{SCHEMA}.alembic_version') IS NOT NULL")
_CURRENT = text(f"SELECT version_num FROM {SCHEMA}.alembic_version")


@dataclass(frozen=True)
class Version:
    """The schema version of a database (`current`, None = none yet) and the one that this program needs."""

    current: str | None
    needed: str

    @property
    def ready(self) -> bool:
        """True if this program may work on the database."""
        return self.current == self.needed


def status(database: Database, *, urgent: bool = False) -> Version:
    """The version of the database and the one needed. Raises NotReady if the database cannot be reached.

    urgent: use a reserved connection, so that the read does not wait for other work.
    """
    return database.run(read, urgent=urgent)


def read(connection: Connection) -> Version:
    """The version of the database and the one needed."""
    return Version(current=_current(connection), needed=_needed())


def require(database: Database) -> None:
    """Raise NotReady unless the database has the schema version that this program needs."""
    must_be_ready(status(database))


def must_be_ready(version: Version) -> None:
    """Raise NotReady, with the command that helps, unless this is the schema version that this program needs."""
    if version.ready:
        return
    _refuse_unknown(version)
    raise NotReady(f"schema {version.current or 'none'}, need {version.needed}; run: leasehold db upgrade")


def upgrade(database: Database) -> Version:
    """Run every step that the database lacks, after any other upgrade has ended.

    Does nothing on a database that is up to date. Raises NotReady if the database cannot be reached, is newer than this
    program, or is of a server that is too old. An error of a step is raised unchanged, and all steps of this call are
    rolled back.
    """
    return database.run(_upgrade, urgent=True)


def _upgrade(connection: Connection) -> Version:
    number, name = connection.execute(_SERVER).one()
    if number < OLDEST * 10_000:
        raise NotReady(f"the server is PostgreSQL {name}, need {OLDEST} or newer; upgrade the server first")
    connection.execute(_NO_TIMEOUTS)
    waits.allow(connection, waits.LONGEST)
    connection.execute(_MIGRATION_LOCK)
    version = read(connection)
    _refuse_unknown(version)
    if not version.ready:
        if not connection.execute(_HAS_SCHEMA).scalar_one():
            connection.execute(_CREATE_SCHEMA)
        _run_steps(connection)
    return Version(current=_current(connection), needed=version.needed)


def _refuse_unknown(version: Version) -> None:
    if version.current is not None and version.current not in _known():
        raise NotReady(
            f"schema {version.current} was made by a newer leasehold, need {version.needed}; install the newer program"
        )


def _current(connection: Connection) -> str | None:
    if not connection.execute(_HAS_VERSIONS).scalar_one():
        return None
    return connection.execute(_CURRENT).scalar_one_or_none()


def _run_steps(connection: Connection) -> None:
    from alembic import command

    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


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
