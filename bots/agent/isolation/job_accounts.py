"""The accounts under which commands run: one for each running attempt, a named one, or that of the agent.

A dynamic account is a user id of a range that no account of this machine has; its group has the same number. Each
running attempt has one to itself, so commands can neither read each other's files nor signal each other. The attempt
has the odd number after it too, under which nothing runs but what kills its processes; see privileges.py. All agents of
a machine take the ids in turn, so an id, whose former attempt may have left files, comes again as late as possible.

    /run/leasehold/accounts/<user id>   exists, and is locked with flock by an agent, while an attempt has the user id
    /run/leasehold/accounts/next        the user id to try next; locked with flock while one is taken or given back
    /dev/shm/leasehold-trash            directories that attempts left in /dev/shm, until they are removed

All agents of the machine wait for that last lock. While it is held, an agent only finds out which id is free, by a look
at the processes and accounts of the machine.
"""

import contextlib
import ctypes
import errno
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog
from leasehold.errors import BadInput, LeaseholdError

from bots.agent import guardian
from bots.agent.isolation import privileges
from bots.agent.isolation.privileges import Privileges
from bots.agent.removal import Trash
from bots.agent.workspace import lockable, locked
from schema import clock

#: Values of `job_user` that are no names of accounts.
DYNAMIC, AGENT = "dynamic", "agent"
#: User ids for dynamic accounts, first and last. Distributions leave this range to programs that allocate on demand.
#: The first is even, the last is odd, so that each even one has the one after it as its killer.
FIRST, LAST = 61184, 65519
#: Processes and threads of one dynamic account, unless configured.
PROCESSES = 4096
_RESERVED = Path("/run/leasehold/accounts")
#: Of a program that allocates user ids of the same range and marks them here.
_RESERVED_ELSEWHERE = Path("/run/systemd/dynamic-uid")
#: Where the kernel shows shared memory and message queues of POSIX as files. Only the first can hold directories.
_POSIX = (Path("/dev/shm"), Path("/dev/mqueue"))
#: On the same file system as the first, closed to all accounts but the agent's.
_TRASH = _POSIX[0] / "leasehold-trash"
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
#: Seconds for which an agent waits for others that take or give back user ids, which takes them milliseconds.
_TURN = 10.0
#: Seconds between two looks whether it is this agent's turn, or whether the processes of an account are gone.
_LOOK_AGAIN = 0.01
#: Seconds within which a program that kills everything under one account must end, however busy the machine is.
_KILLING = 10.0
#: Seconds within which the processes of dead agents must die.
_DYING = 5.0
#: Seconds for which an agent that ends waits until its attempts have given their user ids back.
_CLOSING = 1.0


@dataclass(frozen=True)
class JobAccount:
    """The account of one attempt. name: for USER in its environment. killer: see Privileges."""

    user: int
    group: int
    name: str
    killer: int | None = None

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
        #: Notified when an attempt has given its user id back.
        self._lock = threading.Condition()
        #: Descriptors of the reservations of both ids, by the even one.
        self._held: dict[int, list[int]] = {}
        self._trash = Trash(_TRASH)
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
        return JobAccount(user, user, f"leasehold-{user}", _killer_of(user))

    def give_back(self, account: JobAccount | None, *, silent: bool) -> None:
        """Take an account back after the attempt. `silent`: no process of it is left; otherwise it is used no more.

        This takes as long as the removal of all files that the attempt left where shared memory is. Never raises.
        """
        if account is None or self.kind != DYNAMIC or not silent:
            return
        try:
            if not remove_shared_memory(account.user, self._trash):
                raise OSError(errno.EBUSY, "files of the job in /dev/shm cannot be removed")
            with self._lock, _turn():
                # None if the agent has ended meanwhile.
                if (descriptors := self._held.pop(account.user, None)) is not None:
                    _free(account.user, descriptors)
                self._lock.notify_all()
        except OSError as error:
            _log.warning(
                "a user id stays reserved until a later agent starts", user=account.user, reason=error.strerror
            )

    def clear(self) -> None:
        """Kill what runs under user ids whose agent died and left them reserved. Raises LeaseholdError.

        An id stays reserved until a later agent starts if something of it is left after 5 s.
        """
        if self.kind != DYNAMIC:
            return
        held: dict[int, list[int]] = {}
        try:
            try:
                with _turn():
                    for user in {int(name) & ~1 for name in os.listdir(_RESERVED) if name.isdigit()}:
                        if (descriptors := _reservations(user)) is not None:
                            held[user] = descriptors
                unknown = {user for user in held if not _is_known(user) and not _is_known(_killer_of(user))}
                left = _clear_accounts(unknown)
                left |= {user for user in unknown - left if not remove_shared_memory(user, self._trash)}
                with _turn():
                    for user in held.keys() - left:
                        _free(user, held.pop(user))
            finally:
                _close(held)
        except OSError as error:
            raise LeaseholdError(f"what earlier agents left in {_RESERVED} cannot be cleared: {error}") from None
        # Before any attempt runs, so that none can make a directory of that name its own.
        if _POSIX[0].is_dir():
            self._trash.resume()

    def close(self) -> None:
        """Let other agents have the user ids of this one; those of attempts that have not ended stay marked."""
        with self._lock:
            self._lock.wait_for(lambda: not self._held, _CLOSING)
            _close(self._held)
        self._trash.close(_CLOSING)

    def _reserve(self, turn: IO[str]) -> int:
        busy = _users_with_processes()
        text = turn.read()
        first = int(text) if text.isdigit() else FIRST
        size = LAST - FIRST + 1
        for user in (FIRST + ((first & ~1) - FIRST + n) % size for n in range(0, size, 2)):
            both = {user, _killer_of(user)}
            # What exists and is not locked is left of an agent that died; the next agent that starts clears it.
            if both & busy or any((_RESERVED / str(each)).exists() or _is_known(each) for each in both):
                continue
            descriptors = _reservations(user)
            if descriptors is None:
                continue
            self._held[user] = descriptors
            turn.seek(0)
            turn.write(f"{user + 2:5}")
            return user
        raise LeaseholdError(f"every user id from {FIRST} to {LAST} is in use")


@contextlib.contextmanager
def _turn() -> Iterator[IO[str]]:
    """Keep all other agents of this machine from taking and giving back user ids, inside the block.

    Raises OSError if another agent, which may have been stopped, does not let this one have its turn within 10 s.
    """
    _RESERVED.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(_RESERVED / "next", "r+", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o600)) as turn:
        give_up = clock.monotonic() + _TURN
        while not locked(turn.fileno()):
            if clock.monotonic() > give_up:
                raise OSError(errno.ETIMEDOUT, f"another agent keeps '{turn.name}' locked")
            clock.sleep(_LOOK_AGAIN)
        yield turn


def _reservations(user: int) -> list[int] | None:
    """Reserve an even user id and its killer; return what holds them, or None if a living agent has one of them."""
    held = []
    for each in (user, _killer_of(user)):
        held.append(lockable(_RESERVED / str(each)))
        if not locked(held[-1]):
            _close({user: held})
            return None
    return held


def _free(user: int, descriptors: list[int]) -> None:
    """Let other attempts have an even user id and its killer. Called in this agent's turn."""
    for each in (user, _killer_of(user)):
        (_RESERVED / str(each)).unlink(missing_ok=True)
    _close({user: descriptors})


def _close(held: dict[int, list[int]]) -> None:
    while held:
        _, descriptors = held.popitem()
        for descriptor in descriptors:
            os.close(descriptor)


def _killer_of(user: int) -> int:
    return user + 1


def start_killer(users: Iterable[int]) -> subprocess.Popen[str]:
    """Start a program that kills every process of these user ids of the range. Wait for it with `wait_for_killer`.

    One signal for each reaches also what forks without end. The program is ready when this returns, still as root, so
    that nothing under those ids can keep it from its work.
    """
    words = [sys.executable, "-I", "-S", privileges.__file__, privileges.KILL]
    for user in users:
        assert FIRST <= user <= LAST
        words += [str(user), str(_killer_of(user))]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", text=True)


def wait_for_killer(killer: subprocess.Popen[str], *, seconds: float = _KILLING) -> str | None:
    """Wait for the end of a killer; return None, or why something may be left."""
    try:
        _, said = killer.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        killer.kill()
        return "the program that kills does not end"
    lines = said.strip().splitlines()
    return None if killer.returncode == 0 else (lines[-1] if lines else f"exit code {killer.returncode}")


def _clear_accounts(users: set[int]) -> set[int]:
    """Kill everything under these even ids and their killers; return those under which something is left after 5 s."""
    give_up = clock.monotonic() + _DYING
    left = users
    while left:
        if reason := wait_for_killer(start_killer(left)):
            _log.warning("processes of an earlier agent are killed one by one", reason=reason)
        # A killer belongs to root there, as whatever has changed its identity. It ends by itself.
        found = processes_of(users)
        # As root, so that none of them can keep this process from it.
        guardian.kill(list(found), signal.SIGKILL)
        left = set(found.values())
        if clock.monotonic() > give_up:
            break
        if left:
            clock.sleep(_LOOK_AGAIN)
    for user in left:
        _log.error("processes of an earlier agent cannot be killed", user=user)
    return left


def remove_shared_memory(user: int, trash: Trash) -> bool:
    """Remove the System V shared memory, semaphores and queues, and what lies where the POSIX ones do, that a user id
    left: files, and directories with all that is in them. Return False if some of it stays. Never raises.

    They outlive its processes, take memory, and the next attempt with the id could read them. `trash`: for directories,
    which nobody reaches from then on.
    """
    for kind, remove in _SYSTEM_V.items():
        with contextlib.suppress(OSError):
            for line in Path("/proc/sysvipc", kind).read_text().splitlines()[1:]:
                fields = line.split()
                # The columns of owner and creator: their place differs by kind.
                if str(user) in (fields[_OWNER[kind]], fields[_OWNER[kind] + 2]):
                    remove(int(fields[1]))
    gone = True
    for folder in _POSIX:
        try:
            found = list(os.scandir(folder))
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
            continue
        for entry in found:
            try:
                if entry.stat(follow_symlinks=False).st_uid != user:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    gone = trash.take(Path(entry.path)) and gone
                else:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
    return gone


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
    return set(_users_of_processes().values())


def processes_of(users: set[int]) -> dict[int, int]:
    """Map each process that runs under one of these user ids, and has not ended, to its user id."""
    found = {}
    for process, user in _users_of_processes().items():
        if user in users:
            with contextlib.suppress(OSError, ValueError):
                if guardian.facts(process)[0] not in guardian.ENDED:
                    found[process] = user
    return found


def _users_of_processes() -> dict[int, int]:
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = entry.stat().st_uid
    return found


def kind_of(job_user: str | None) -> str:
    """Return the kind of account that the setting means for this process: `dynamic`, `agent` or a name."""
    return job_user or (DYNAMIC if os.geteuid() == 0 else AGENT)


def reach(job_user: str | None, *, boxed: bool, what: str = "jobs") -> str:
    """Say in one line what commands can reach with this setting. `boxed`: they run in a sandbox. what: who is meant."""
    kind = kind_of(job_user)
    if kind == DYNAMIC:
        said = "each job runs under an account of its own: it reaches neither the agent nor other jobs"
    elif kind != AGENT:
        said = f"{what} run as '{kind}': they do not reach the agent, but each other"
    elif boxed:
        said = (
            f"{what} run as the agent's account, uid {os.geteuid()}, in a sandbox: they can read this account's files"
        )
    else:
        who = "root" if os.geteuid() == 0 else f"the agent's account, uid {os.geteuid()}"
        said = (
            f"{what} run as {who}: they can read its files and tokens, use an embedded database, and kill its processes"
        )
    return said + (", and see the machine's files read-only" if boxed and kind != AGENT else "")


def trial(confined: Privileges, directory: Path, command: Sequence[str], *, path: str = os.defpath) -> str | None:
    """Run a command as an attempt in `directory` would; return None if it exits with 0, otherwise the reason.

    path: where the command looks for programs.
    """
    program = [sys.executable, "-I", "-S", privileges.__file__, json.dumps(confined.to_json()), str(directory)]
    try:
        done = subprocess.run(
            [*program, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={"PATH": path}, timeout=_TRIAL, check=False, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def killing_trial(account: JobAccount) -> str | None:
    """Kill everything under a dynamic account as for an attempt; return why that cannot be done here, or None."""
    assert account.killer is not None
    try:
        return wait_for_killer(start_killer([account.user]), seconds=_TRIAL)
    except OSError as error:
        return str(error)


def closed_to(confined: Privileges, directory: Path) -> Path | None:
    """Return the first directory on the way to `directory` that the account cannot enter; None if it can.

    Raises BadInput if a process under the account does not end.
    """
    for place in [*reversed(directory.parents), directory]:
        if confined.account is not None and not _enters(*confined.account, place):
            return place
    return None


def _enters(user: int, group: int, place: Path) -> bool:
    probe = ["/bin/sh", "-c", 'cd "$0"', str(place)]
    try:
        done = subprocess.run(
            probe, capture_output=True, check=False, cwd="/", user=user, group=group, extra_groups=[], timeout=_TRIAL
        )
    except subprocess.TimeoutExpired:
        raise BadInput("job_user", f"a process under user id {user} does not end; what runs there stops it") from None
    return done.returncode == 0
