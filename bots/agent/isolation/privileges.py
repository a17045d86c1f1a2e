"""What the process of a command gives up before the command begins: its account, capabilities and further processes.

The guardian's supervisors use this module, so it imports the standard library only. Run as a program it confines
itself in the same way and then becomes another command; the agent tries an account by this before it takes work. Or it
kills everything under some accounts.

    python -I -S privileges.py PRIVILEGES_AS_JSON DIRECTORY COMMAND…
    python -I -S privileges.py kill USER KILLER [USER KILLER]…

Killing everything under an account takes one signal of a process that the kernel lets signal nothing else. A process
under the account itself would do, but what is to be killed could stop it first. The kernel lets a process signal
another if its real or effective user id is the real or saved one of the other. So the killer has the account as its
effective user id only, and as real and saved one an id under which nothing else runs, another one for each account.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

_SET_DUMPABLE, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 4, 24, 38
#: More than the kernel has capabilities; the first number that it does not know ends the loop.
_CAPABILITIES = 64
#: Version 3 of the kernel's structures for capabilities: two words each of effective, permitted and inheritable ones.
_CAPABILITY_HEADER, _CAPABILITY_WORDS = 0x20080522, 6
#: The number of keyctl(2), which the C library does not offer, by machine.
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "loongarch64": 219, "ppc64le": 271, "s390x": 280}
_JOIN_SESSION_KEYRING = 1
#: Exit code of the program where the directory cannot be entered, the command cannot be run, or nothing be killed.
UNABLE = 126
#: Argument of the program by which it kills.
KILL = "kill"
#: Seconds that are given to a process that kills what runs under one account. It takes less than a millisecond.
_KILLING = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Privileges:
    """What the process of a command keeps. Without an account, it keeps that of the agent.

    account: user and group id. killer: the other user id by which all processes of this account are killed at once;
    None if others run under the account. processes: the most processes and threads of this user id. cgroup: the
    directory of the attempt's cgroup. wrapped: the command is a sandbox program, which must outlive a SIGTERM to what
    it runs.
    """

    account: tuple[int, int] | None = None
    killer: int | None = None
    processes: int | None = None
    cgroup: str | None = None
    wrapped: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the privileges for a message to a supervisor."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, object]) -> "Privileges":
        """Read what `to_json` made."""
        account = found.pop("account")
        return cls(account=None if account is None else tuple(account), **found)  # type: ignore[arg-type]

    def drop(self) -> None:
        """Give up everything else, for good. Raises OSError."""
        if self.cgroup is not None:
            Path(self.cgroup, "cgroup.procs").write_text("0")
        # A dump of memory is a copy of the job's data, which may lie where others read it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.account is None:
            return
        user, group = self.account
        for capability in range(_CAPABILITIES):
            if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        _give_up_capabilities()
        # No program with a set-user-id bit or with file capabilities gives anything back.
        _checked(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _leave_keyring()
        if self.processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.processes, self.processes))
        os.umask(0o077)

    def kill_all(self) -> None:
        """Kill every process of an account that runs nothing else. One signal reaches also what forks without end."""
        if self.account is not None and self.killer is not None:
            kill_account(self.account[0], self.killer)


def kill_account(user: int, killer: int) -> str | None:
    """Kill every process under a user id, with the other one as in the head of this module.

    Returns None, or why that was not done within 2 s. Called by processes of one thread, because it forks.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = os.fork()
    except OSError as error:
        # What is to be killed may have taken all processes that there are.
        os.close(reader)
        os.close(writer)
        return error.strerror
    if process == 0:
        reason = "it ended early"
        try:
            become_killer(user, killer)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            reason = ""
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            os.write(writer, reason.encode() or b"done")
            os._exit(0)
    os.close(writer)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    said = os.read(reader, 1000) if poll.poll(_KILLING * 1000) else b"it takes too long"
    os.close(reader)
    with contextlib.suppress(OSError):
        # What has not ended is a child still, so its process id belongs to no other process.
        if os.waitpid(process, os.WNOHANG) == (0, 0):
            os.kill(process, signal.SIGKILL)
    return None if said == b"done" else said.decode() or "it was killed"


def become_killer(user: int, killer: int) -> None:
    """Become a process that may signal those under these two user ids only, and that none of `user` may signal.

    Raises OSError, for example where one of the ids is not mapped into the container that this is.
    """
    if 0 in (user, killer) or user == killer:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    os.setgroups([])
    os.setresgid(killer, killer, killer)
    os.setresuid(killer, user, killer)
    # As root, or with its capabilities, a signal to everything would reach every process of the machine.
    _give_up_capabilities()
    if os.getresuid() != (killer, user, killer):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _give_up_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_HEADER, 0), (ctypes.c_uint32 * _CAPABILITY_WORDS)()
    _checked(_libc.capset(header, none))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _leave_keyring() -> None:
    """Leave the keys of the agent's session, which a process keeps through every change of its account."""
    call = _KEYCTL.get(os.uname().machine)
    refused = call is not None and _libc.syscall(call, _JOIN_SESSION_KEYRING, None) < 0
    # A kernel without keys, or a container that may not use them, has none to protect.
    if refused and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        _checked(-1)


def hide_memory() -> None:
    """Keep processes of the same account from reading this one's memory and environment, or from tracing it.

    The files in /proc/PID then belong to root, and no core is dumped. A program that this process starts is not hidden.
    """
    _checked(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def main() -> None:
    """Entry point of the program: kill, or become the command; say in one line why that cannot be."""
    if sys.argv[1] == KILL:
        sys.exit(_kill_accounts([int(word) for word in sys.argv[2:]]))
    privileges, directory, *command = sys.argv[1:]
    try:
        Privileges.from_json(json.loads(privileges)).drop()
    except OSError as error:
        print(f"the account cannot be taken on: {error.strerror}", file=sys.stderr)
        sys.exit(UNABLE)
    try:
        os.chdir(directory)
        Path("tmp", ".trial").touch()
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{error.filename or command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(UNABLE)


def _kill_accounts(users: list[int]) -> int:
    """Kill everything under several accounts, each named with its killer; return the exit code."""
    code = 0
    for user, killer in zip(users[::2], users[1::2], strict=True):
        if reason := kill_account(user, killer):
            print(f"user id {user} cannot be cleared as {killer}: {reason}", file=sys.stderr)
            code = UNABLE
    return code


if __name__ == "__main__":
    main()
