"""The accounts under which commands run: one for each running attempt, a named one, or that of the agent.

A dynamic account is a user id of a range that no account of this machine has; its group has the same number. Each
running attempt has one to itself, so commands can neither read each other's files nor signal each other.

    /run/leasehold/accounts/<user id>   locked with flock while an agent holds the user id
"""

import contextlib
import fcntl
import json
import os
import pwd
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bots.agent import confinement
from bots.agent.confinement import Confinement
from schema.errors import BadInput, LeaseholdError

#: Values of `job_user` that are no names of accounts.
DYNAMIC, AGENT = "dynamic", "agent"
#: User ids for dynamic accounts, first and last. Distributions leave this range to programs that allocate on demand.
FIRST, LAST = 61184, 65519
#: Processes and threads of one dynamic account, unless configured.
PROCESSES = 4096
_RESERVED = Path("/run/leasehold/accounts")
#: Of a program that allocates user ids of the same range and marks them here.
_RESERVED_ELSEWHERE = Path("/run/systemd/dynamic-uid")
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

    def __init__(self, job_user: str | None, *, chance: Random) -> None:
        self.kind = kind_of(job_user)
        self._chance = chance
        self._lock = threading.Lock()
        self._free: deque[int] = deque()
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
        with self._lock:
            user = self._free.popleft() if self._free else self._reserve()
        return JobAccount(user, user, f"leasehold-{user}")

    def give_back(self, account: JobAccount | None, *, silent: bool) -> None:
        """Take an account back after the attempt. `silent`: no process of it is left; otherwise it is used no more."""
        if account is not None and self.kind == DYNAMIC and silent:
            with self._lock:
                self._free.append(account.user)

    def close(self) -> None:
        """Let other agents have the user ids of this one."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self._free.clear()

    def _reserve(self) -> int:
        try:
            _RESERVED.mkdir(mode=0o700, parents=True, exist_ok=True)
            busy = _users_with_processes()
            # From any place on, so that the ids of ended attempts, which may own files, come again late.
            start, size = self._chance.randrange(LAST - FIRST + 1), LAST - FIRST + 1
            for user in (FIRST + (start + n) % size for n in range(size)):
                if user in self._held or user in busy or _is_known(user):
                    continue
                descriptor = os.open(_RESERVED / str(user), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(descriptor)
                    continue
                self._held[user] = descriptor
                return user
        except OSError as error:
            raise LeaseholdError(f"no user id can be reserved in {_RESERVED}: {error.strerror}") from None
        raise LeaseholdError(f"every user id from {FIRST} to {LAST} is in use")


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


def trial(confined: Confinement, directory: Path, command: Sequence[str]) -> str | None:
    """Run a command as an attempt in `directory` would; return None if it exits with 0, otherwise the reason."""
    program = [sys.executable, "-I", "-S", confinement.__file__, json.dumps(confined.to_json()), str(directory)]
    try:
        done = subprocess.run(
            [*program, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={"PATH": os.defpath}, timeout=_TRIAL, check=False, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def closed_to(confined: Confinement, directory: Path) -> Path | None:
    """Return the first directory on the way to `directory` that the account cannot enter; None if it can."""
    for place in [*reversed(directory.parents), directory]:
        if confined.account is not None and not _enters(*confined.account, place):
            return place
    return None


def _enters(user: int, group: int, place: Path) -> bool:
    probe = ["/bin/sh", "-c", 'cd "$0"', str(place)]
    done = subprocess.run(probe, capture_output=True, check=False, cwd="/", user=user, group=group, extra_groups=[])
    return done.returncode == 0
