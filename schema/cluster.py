"""One PostgreSQL cluster of our own: made, started, asked and stopped by whoever holds its start lock.

The server inherits an exclusive kernel lock on `server.lock`, and so do all its children: the lock is free only when
every one of them is gone. A process id is never trusted for that; it may be reused, or belong to a zombie.
"""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Self, assert_never

import psycopg
from sqlalchemy import URL

from schema import clock, locks
from schema.binaries import Account, account_for, major, programs_for
from schema.errors import NotReady

NAME = "leasehold"
PORT = "5432"  # only part of the socket's name
#: Bytes a unix socket's path may have on every system we know.
MAX_SOCKET_BYTES = 103
#: Seconds without any sign of life until a start counts as failed. Crash recovery gives signs.
PATIENCE = 60.0
MAX_LOG_BYTES = 16 * 1024 * 1024
_POLL = 0.02
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")
_SOCKET = f".s.PGSQL.{PORT}"

_SETTINGS = {
    "listen_addresses": "",
    "port": PORT,
    "unix_socket_permissions": "0700",
    "shared_buffers": "128MB",
    "max_connections": "200",
    # Whole pages, written after each checkpoint, are half of the log; they shrink to a third.
    "wal_compression": "on",
    "logging_collector": "off",
    "log_lock_waits": "on",
    # Sooner than our lock_timeout, so that a deadlock is told as one.
    "deadlock_timeout": "200ms",
    "log_line_prefix": "%m [%p] %a ",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "cluster_name": NAME,
}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class Answer(Enum):
    """What a connection attempt says of the server."""

    READY = "ready"
    EMPTY = "empty"  # ready, but without our database
    STARTING = "starting"  # or recovering, or shutting down
    NOBODY = "nobody"


@dataclass(frozen=True)
class Cluster:
    """The cluster of a data directory, the account that runs it and the programs it is run with."""

    data: Path
    account: Account
    programs: Path

    @classmethod
    def find(cls, data: Path) -> Self:
        """The cluster of `data`, which need not be made yet. Raises NotReady if it cannot be run from there."""
        account = account_for(data / "pg")
        closed = next((place for place in [*reversed(data.parents), data] if not account.reaches(place)), None)
        if closed is not None:
            raise NotReady(
                f"account {account.name}, which runs PostgreSQL for root, cannot enter {closed}; "
                f"choose another --data or run: chmod o+x {closed}"
            )
        return cls(data=data, account=account, programs=programs_for(account))

    @property
    def directory(self) -> Path:
        """Where PostgreSQL keeps its files."""
        return self.data / "pg"

    @property
    def log(self) -> Path:
        """What the server writes to its standard error."""
        return self.data / "postgres.log"

    @property
    def url(self) -> str:
        """How to connect, as a PostgreSQL URL."""
        return self._url(NAME)

    @property
    def pid(self) -> int:
        """Process id of the server. Raises NotReady if it does not run."""
        try:
            return int((self.directory / "postmaster.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            raise NotReady(f"the embedded server of {self.data} does not run") from None

    def run(self, start: IO[bytes], *, durable: bool) -> "subprocess.Popen[bytes] | None":
        """Bring the server up; returns its process if it was started here and None if it was adopted.

        `start` is the held start lock; what may outlive a killed caller inherits it.
        """
        self._make(start, durable=durable)
        with (self.data / "server.lock").open("ab") as lock:
            if not self._settle(lock):
                return None
            self._clear()
            child = self._launch(lock, durable=durable)
        self._await_start(child)
        return child

    def stop(self) -> None:
        """Stop the server with a checkpoint; in the worst case without one, and it recovers at the next start."""
        with (self.data / "server.lock").open("ab") as lock:
            for mode in ("fast", "immediate"):
                if locks.take(lock):
                    break
                command = [
                    str(self.programs / "pg_ctl"),
                    "stop",
                    "-D",
                    str(self.directory),
                    "-m",
                    mode,
                    "-w",
                    "-t",
                    "60",
                ]
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, **self.account.arguments())
                self._await_free(lock, seconds=5.0)
            if not locks.take(lock):
                raise NotReady(f"the embedded server of {self.data} does not stop; see {self.log}")
        self._forget_socket()

    def _make(self, start: IO[bytes], *, durable: bool) -> None:
        """Make the cluster beside its place and move it there, so that half a cluster never counts."""
        if self.directory.exists():
            made_by, ours = (self.directory / "PG_VERSION").read_text().strip(), major(self.programs, self.account)
            if made_by != ours:
                raise NotReady(f"{self.directory} was made by PostgreSQL {made_by}, the installed one is {ours}")
            return
        for left in self.data.glob("pg.new-*"):
            shutil.rmtree(left)
        half = Path(tempfile.mkdtemp(prefix="pg.new-", dir=self.data))
        self.account.own(half)
        options = ["-U", NAME, "--auth-local=trust", "--auth-host=reject", "--encoding=UTF8", "--locale=C"]
        options += ["--no-instructions", *([] if durable else ["--no-sync"])]
        made = subprocess.run(
            [self.programs / "initdb", "-D", half, *options],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            pass_fds=[start.fileno()], **self.account.arguments(),
        )  # fmt: skip
        if made.returncode != 0:
            shutil.rmtree(half)
            raise NotReady(f"the database cluster cannot be made in {self.data}: {_last_line(made.stderr)}")
        half.rename(self.directory)
        _sync(self.data)

    def _settle(self, lock: IO[bytes]) -> bool:
        """Wait until the server is up (False), or until all of it is gone and the lock is ours (True)."""
        quiet_since = clock.monotonic()
        while clock.monotonic() - quiet_since < PATIENCE:
            match self._up():
                case Answer.READY | Answer.EMPTY:
                    return False
                case Answer.STARTING:
                    quiet_since = clock.monotonic()
                case Answer.NOBODY:
                    if locks.take(lock):
                        return True
                case unknown:
                    assert_never(unknown)
            clock.sleep(_POLL)
        raise NotReady(f"a server of {self.data} is there but does not answer; see {self.log}")

    def _clear(self) -> None:
        """Remove what a killed server left: PostgreSQL would take a reused process id in it for a living server."""
        socket = self._socket()
        for left in (self.directory / "postmaster.pid", socket / _SOCKET, socket / f"{_SOCKET}.lock"):
            left.unlink(missing_ok=True)

    def _launch(self, lock: IO[bytes], *, durable: bool) -> "subprocess.Popen[bytes]":
        settings = _SETTINGS | {"unix_socket_directories": f'"{self._socket()}"'} | ({} if durable else _NOT_DURABLE)
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [self.programs / "postgres", "-D", self.directory, *options],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[lock.fileno()], **self.account.arguments(),
            )  # fmt: skip

    def _await_start(self, child: "subprocess.Popen[bytes]") -> None:
        quiet_since = clock.monotonic()
        while child.poll() is None and clock.monotonic() - quiet_since < PATIENCE:
            match self._up():
                case Answer.READY | Answer.EMPTY:
                    return
                case Answer.STARTING:
                    quiet_since = clock.monotonic()
                case Answer.NOBODY:
                    pass
                case unknown:
                    assert_never(unknown)
            clock.sleep(_POLL)
        said = _last_line(self.log.read_text(errors="replace"))
        raise NotReady(f"PostgreSQL does not start: {said} (see {self.log})")

    def _await_free(self, lock: IO[bytes], *, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while not locks.take(lock) and clock.monotonic() < end:
            clock.sleep(_POLL)

    def _up(self) -> Answer:
        """Ask with a real connection, the only proof that a server is there; make our database if it is missing."""
        answer = _ask(self.url)
        if answer is Answer.EMPTY:
            with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{NAME}"')
        return answer

    def _socket(self) -> Path:
        """The directory of the socket: the cluster's own, or a short private one if that path cannot be used."""
        path = os.fsencode(self.directory / _SOCKET)
        if len(path) <= MAX_SOCKET_BYTES and _PLAIN_PATH.fullmatch(str(self.directory)):
            return self.directory
        note = self.data / "socket"
        if note.exists():
            noted = Path(note.read_text())
            if noted.is_dir() and noted.stat().st_uid == self.account.uid:
                return noted
        short = Path(tempfile.mkdtemp(prefix="leasehold-", dir="/tmp"))
        self.account.own(short)
        note.write_text(str(short))
        return short

    def _forget_socket(self) -> None:
        note = self.data / "socket"
        if note.exists():
            shutil.rmtree(note.read_text(), ignore_errors=True)
            note.unlink()

    def _url(self, database: str) -> str:
        where = {"host": str(self._socket()), "port": PORT}
        return URL.create("postgresql", username=NAME, database=database, query=where).render_as_string()


def _ask(url: str) -> Answer:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return _reading(str(error))
    return Answer.READY


def _reading(refusal: str) -> Answer:
    """What a refused connection says. Only the text tells, and the server's own words are English: its locale is C."""
    if "FATAL:" not in refusal:
        return Answer.NOBODY
    if f'database "{NAME}" does not exist' in refusal:
        return Answer.EMPTY
    return Answer.STARTING if "the database system is" in refusal else Answer.READY  # e.g. too many clients


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
