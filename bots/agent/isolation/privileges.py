"""What the process of a command gives up before the command begins: its account, capabilities and further processes.

The guardian's supervisors use this module, so it imports the standard library only. Run as a program it confines
itself in the same way and then becomes another command; the agent tries an account by this before it takes work.

    python -I -S privileges.py PRIVILEGES_AS_JSON DIRECTORY COMMAND…
"""

import ctypes
import errno
import json
import os
import resource
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
#: Exit code of the program where the directory cannot be entered or the command cannot be run.
UNABLE = 126

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Privileges:
    """What the process of a command keeps. Without an account, it keeps that of the agent.

    account: user and group id. alone: no other process runs under this user id, so all of its processes can be killed
    at once. processes: the most processes and threads of this user id. cgroup: the directory of the attempt's cgroup.
    wrapped: the command is a sandbox program, which must outlive a SIGTERM to what it runs.
    """

    account: tuple[int, int] | None = None
    alone: bool = False
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
        if self.account is None:
            return
        user, group = self.account
        for capability in range(_CAPABILITIES):
            if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_HEADER, 0), (ctypes.c_uint32 * _CAPABILITY_WORDS)()
        _checked(_libc.capset(header, none))
        # No program with a set-user-id bit or with file capabilities gives anything back.
        _checked(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _leave_keyring()
        if self.processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.processes, self.processes))
        os.umask(0o077)

    def kill_all(self) -> None:
        """Kill every process of an account that runs nothing else. One signal reaches also what forks without end."""
        if self.account is None or not self.alone:
            return
        killer = os.fork()
        if killer == 0:
            try:
                user, group = self.account
                os.setgroups([])
                os.setresgid(group, group, group)
                os.setresuid(user, user, user)
                # Only now: as root the same call would kill every process of the machine.
                if user != 0 and os.getresuid() == (user, user, user):
                    os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(killer, 0)


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
    """Entry point of the program: become the command, or say in one line why that cannot be."""
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


if __name__ == "__main__":
    main()
