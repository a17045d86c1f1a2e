"""Databases on the server of the tests: clones of a migrated one, dropped many at a time."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
from sqlalchemy import make_url

from schema import embedded
from schema.engine import Database, DatabaseSettings, plain

#: Where files are kept in memory. A database is some 300 files, which a disk takes ten times longer to make.
MEMORY = Path("/dev/shm")
#: Bytes that must be free there: for the databases that wait to be dropped, and the log of changes.
ROOM = 4 * 1024**3
#: Every drop waits for a checkpoint, and those that follow at once have little left to write.
DROPPED_TOGETHER = 16


@contextmanager
def serving_in_memory() -> Iterator[str]:
    """A server of our own, with its data in memory where there is room; gives its URL."""
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM
    data = Path(tempfile.mkdtemp(prefix="leasehold-tests-", dir=MEMORY if roomy else None))
    if os.geteuid() == 0:
        data.chmod(0o711)  # for the account that runs the server
    try:
        with embedded.serve(data, durable=False) as server:
            yield server.url
    finally:
        shutil.rmtree(data)


class Databases:
    """Makes databases named `leasehold_test_…` and drops them. A context manager: leaving it drops what is left."""

    def __init__(self, server_url: str) -> None:
        self._server = make_url(server_url)
        self._over: list[str] = []

    def __enter__(self) -> "Databases":
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def make(self, *, template: str | None = None) -> str:
        """A new database, empty or a clone of the one with that URL, to which nobody may be connected; its URL."""
        name = f"leasehold_test_{uuid4().hex}"
        source = f'TEMPLATE "{make_url(template).database}"' if template else "TEMPLATE template0 ENCODING 'UTF8'"
        with self._connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}" {source}')
        return self._server.set(database=name).render_as_string(hide_password=False)

    def give_back(self, url: str) -> None:
        """Nobody needs it any more. It is dropped soon, whoever is still connected."""
        self._over.append(make_url(url).database or "")
        if len(self._over) >= DROPPED_TOGETHER:
            self._drop()

    def _drop(self) -> None:
        with self._connect() as connection:
            while self._over:
                connection.execute(f'DROP DATABASE "{self._over.pop()}" WITH (FORCE)')

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(plain(self._server.render_as_string(hide_password=False)), autocommit=True)


def opened(url: str) -> Database:
    """The database as a test uses it."""
    return Database(url, DatabaseSettings(), role="test", chance=random.Random(0))
