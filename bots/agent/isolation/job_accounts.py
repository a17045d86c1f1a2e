"""The accounts under which commands run: one for each running attempt, a named one, or that of the agent.

A dynamic account is a user id of a range that no account of this machine has; its group has the same number. Each
running attempt has one to itself, so commands can neither read each other's files nor signal each other. All agents of
a machine take the ids in turn, so an id, whose former attempt may have left files, comes again as late as possible.

    /run/leasehold/accounts/<user id>   exists, and is locked with flock by an agent, while an attempt has the user id
    /run/leasehold/accounts/next        the user id to try next; locked with flock while one is taken or given back
"""

import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog
from leasehold.errors import BadInput, LeaseholdError

from bots.agent.isolation import privileges
from bots.agent.isolation.privileges import Privileges

#: Values of `job_user` that are no names of accounts.
DYNAMIC, AGENT = "dynamic", "agent"
#: User ids for dynamic accounts, first and last. Distributions leave this range to programs that allocate on demand.
FIRST, LAST = 61184, 65519
#: Processes and threads of one dynamic account, unless configured.
PROCESSES = 4096
_RESERVED = Path("/run/leasehold/accounts")
#: Of a program that allocates user ids of the same range and marks them here.
_RESERVED_ELSEWHERE = Path("/run/systemd/dynamic-uid")
#: Where the kernel shows shared memory and message queues of POSIX as files.
_POSIX = (Path("/dev/shm"), Path("/dev/mqueue"))
_REMOVE = 0  # IPC_RMID
_libc = ctypes.CDLL(None, use_errno=True)
#: How to remove an object of System V, and the column of its owner in /proc/sysvipc, by kind.
_SYSTEM_V: Mapping[str, Callable[[int], object]] = {
    "shm": lambda number: _libc.shmctl(number, _REMOVE, None),
    "sem": lambda number: _libc.semctl(number, 0, _REMOVE),
    "msg": lambda number: _libc.msgctl(number, _REMOVE, None),
}
_OWNER = {"shm": 7, "sem": 4, "msg": 7}
_log = structlog.get_logger("leasehold.agent")
#: Seconds within which a trial must end.
_TRIAL = 60.0


@dataclass(frozen=True)
class JobAccount:
    """The account of one attempt. name: for USER in its environment; None = as the agent's environment says."""

    user: int
    group: int
    name: str

    @property
    def ids(self) -> tuple[int, int]:
        """User and group id."""
        return self.user, self.group


class JobAccounts:
    """Gives an account to each attempt. Thread-safe.

    job_user: `dynamic`, `agent`, the name of an account, or None: `dynamic` for an agent that is root, else `agent`.
    Raises BadInput if the account does not exist, is root, or cannot be taken on by this agent.
    """

    def __init__(self, job_user: str | None) -> None:
        self.kind = kind_of(job_user)
        self._lock = threading.Lock()
        #: Open reservations by user id.
        self._held: dict[int, int] = {}
        self._named: JobAccount | None = None
        if self.kind == AGENT:
            return
        if os.geteuid() != 0:
            raise BadInput("job_user", f"'{self.kind}' needs an agent that runs as root; use 'agent'")
        if self.kind != DYNAMIC:
            self._named = _existing(self.kind)

    @property
    def alone(self) -> bool:
        """True if each attempt has an account to itself."""
        return self.kind == DYNAMIC

    @property
    def own(self) -> bool:
        """True if commands do not run under the agent's account."""
        return self.kind != AGENT

    def take(self) -> JobAccount | None:
        """Return an account for one attempt; None = the agent's own. Raises LeaseholdError if none is free."""
        if self.kind != DYNAMIC:
            return self._named
        try:
            with self._lock, _turn() as turn:
                user = self._reserve(turn)
        except OSError as error:
            raise LeaseholdError(f"no user id can be reserved in {_RESERVED}: {error.strerror}") from None
        return JobAccount(user, user, f"leasehold-{user}")

    def give_back(self, account: JobAccount | None, *, silent: bool) -> None:
        """Take an account back after the attempt. `silent`: no process of it is left; otherwise it is used no more."""
        if account is None or self.kind != DYNAMIC or not silent:
            return
        try:
            with self._lock, _turn():
                remove_shared_memory(account.user)
                (_RESERVED / str(account.user)).unlink(missing_ok=True)
                os.close(self._held.pop(account.user))
        except OSError as error:
            _log.warning("a user id stays reserved until the agent ends", user=account.user, reason=error.strerror)

    def clear(self) -> None:
        """Kill what runs under user ids whose agent died and left them reserved. Raises LeaseholdError."""
        if self.kind != DYNAMIC:
            return
        try:
            with _turn():
                for name in [name for name in os.listdir(_RESERVED) if name.isdigit()]:
                    descriptor = _reservation(int(name))
                    if descriptor is not None:
                        if not _is_known(int(name)):
                            kill_account(int(name))
                            remove_shared_memory(int(name))
                        (_RESERVED / name).unlink()
                        os.close(descriptor)
        except OSError as error:
            raise LeaseholdError(f"what earlier agents left in {_RESERVED} cannot be cleared: {error}") from None

    def close(self) -> None:
        """Let other agents have the user ids of this one; those of attempts that have not ended stay marked."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _reserve(self, turn: IO[str]) -> int:
        busy = _users_with_processes()
        text = turn.read()
        first = int(text) if text.isdigit() else FIRST
        size = LAST - FIRST + 1
        for user in (FIRST + (first - FIRST + n) % size for n in range(size)):
            if user in busy or _is_known(user):
                continue
            descriptor = _reservation(user)
            if descriptor is None:
                continue
            self._held[user] = descriptor
            turn.seek(0)
            turn.write(f"{user + 1:5}")
            return user
        raise LeaseholdError(f"every user id from {FIRST} to {LAST} is in use")


@contextlib.contextmanager
def _turn() -> Iterator[IO[str]]:
    """Keep all other agents of this machine from taking and giving back user ids, inside the block."""
    _RESERVED.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(_RESERVED / "next", "r+", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o600)) as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield turn


def _reservation(user: int) -> int | None:
    """Reserve a user id; return the descriptor that holds it, or None if a living agent has it."""
    descriptor = os.open(_RESERVED / str(user), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def kill_account(user: int) -> None:
    """Kill every process of a user id of the range. One signal reaches also what forks without end."""
    assert FIRST <= user <= LAST
    everything = ["/bin/sh", "-c", "kill -KILL -1"]
    subprocess.run(everything, capture_output=True, check=False, cwd="/", user=user, group=user, extra_groups=[])


def remove_shared_memory(user: int) -> None:
    """Remove the System V shared memory, semaphores and queues, and the POSIX ones, that a user id left.

    They outlive its processes, take memory, and the next attempt with the id could read them.
    """
    for kind, remove in _SYSTEM_V.items():
        with contextlib.suppress(OSError):
            for line in Path("/proc/sysvipc", kind).read_text().splitlines()[1:]:
                fields = line.split()
                # The columns of owner and creator: their place differs by kind.
                if str(user) in (fields[_OWNER[kind]], fields[_OWNER[kind] + 2]):
                    remove(int(fields[1]))
    for folder in _POSIX:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        os.unlink(entry.path)


def _existing(name: str) -> JobAccount:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise BadInput("job_user", f"account '{name}' does not exist") from None
    if entry.pw_uid == 0:
        raise BadInput("job_user", f"'{name}' is root; use 'agent' if commands are to run as root")
    return JobAccount(entry.pw_uid, entry.pw_gid, name)


def _is_known(user: int) -> bool:
    with contextlib.suppress(KeyError):
        pwd.getpwuid(user)
        return True
    return (_RESERVED_ELSEWHERE / str(user)).exists()


def _users_with_processes() -> set[int]:
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.add(entry.stat().st_uid)
    return found


def kind_of(job_user: str | None) -> str:
    """Return the kind of account that the setting means for this process: `dynamic`, `agent` or a name."""
    return job_user or (DYNAMIC if os.geteuid() == 0 else AGENT)


def reach(job_user: str | None, *, boxed: bool) -> str:
    """Say in one line what commands can reach with this setting. `boxed`: they run in a sandbox."""
    kind = kind_of(job_user)
    if kind == DYNAMIC:
        said = "each job runs under an account of its own: it reaches neither the agent nor other jobs"
    elif kind != AGENT:
        said = f"jobs run as '{kind}': they do not reach the agent, but each other"
    elif boxed:
        said = f"jobs run as the agent's account, uid {os.geteuid()}, in a sandbox: they can read this account's files"
    else:
        who = "root" if os.geteuid() == 0 else f"the agent's account, uid {os.geteuid()}"
        said = (
            f"jobs run as {who}: they can read its files and tokens, use an embedded database, and kill its processes"
        )
    return said + (", and see the machine's files read-only" if boxed and kind != AGENT else "")


def trial(confined: Privileges, directory: Path, command: Sequence[str]) -> str | None:
    """Run a command as an attempt in `directory` would; return None if it exits with 0, otherwise the reason."""
    program = [sys.executable, "-I", "-S", privileges.__file__, json.dumps(confined.to_json()), str(directory)]
    try:
        done = subprocess.run(
            [*program, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={"PATH": os.defpath}, timeout=_TRIAL, check=False, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def closed_to(confined: Privileges, directory: Path) -> Path | None:
    """Return the first directory on the way to `directory` that the account cannot enter; None if it can."""
    for place in [*reversed(directory.parents), directory]:
        if confined.account is not None and not _enters(*confined.account, place):
            return place
    return None


def _enters(user: int, group: int, place: Path) -> bool:
    probe = ["/bin/sh", "-c", 'cd "$0"', str(place)]
    done = subprocess.run(probe, capture_output=True, check=False, cwd="/", user=user, group=group, extra_groups=[])
    return done.returncode == 0
