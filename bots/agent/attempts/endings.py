"""How a command ended, or why it could not be started, in the words of its outcome."""

import errno
import os
import signal
from dataclasses import dataclass
from typing import Literal, NamedTuple

from leasehold import wire

from bots.agent.isolation.cgroups import exceeded_memory
from bots.agent.isolation.job_accounts import JobAccount
from bots.agent.isolation.privileges import Privileges
from bots.protocol import MAX_REASON, Outcome

SUPERVISOR_KILLED = "the process that supervised the command was killed"
Verdict = Literal["succeeded", "failed", "error", "stopped", "released"]


@dataclass(frozen=True)
class Unable:
    """Why a command could not be started. `number`: the errno, if there is one."""

    number: int | None
    text: str


class Ending(NamedTuple):
    """What was seen of the end of a command: its exit code, and its run time in seconds."""

    exit_code: int | None = None
    seconds: float | None = None


def describe_exit(code: int, privileges: Privileges) -> str:
    """Describe an exit code other than 0 of a process that had these privileges."""
    limit = None if privileges.cgroup is None else exceeded_memory(privileges.cgroup)
    if limit is not None:
        return f"killed by the kernel: it used all of its {limit:,} MiB of memory (job_memory_mib)"
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


#: The exit codes with which a shell tells that a command was not found or could not be executed, by errno.
EXIT_CODES = {
    errno.ENOENT: 127, errno.ENOTDIR: 127, errno.EACCES: 126, errno.EPERM: 126, errno.ENOEXEC: 126,
}  # fmt: skip


def inability(unable: Unable, program: str, account: JobAccount | None = None) -> str:
    """Say in one sentence why the command could not be started, with the command as the caller wrote it.

    account: under which it was to run, where that is not the agent's.
    """
    shown = wire.escaped(program)
    match unable.number:
        case errno.ENOENT | errno.ENOTDIR:
            return f"command not found: '{shown}' (or the interpreter it names)"
        case errno.EACCES | errno.EPERM if account is not None:
            return f"command not found, not executable or out of reach for the job's account {account.name}: '{shown}'"
        case errno.EACCES | errno.EPERM:
            return f"command is not executable: '{shown}'"
        case None:
            return f"command '{shown}' cannot be started: {wire.escaped(unable.text)}"
        case number:
            return f"command '{shown}' cannot be started: {os.strerror(number)}"


def invalid(error: ValueError) -> Outcome:
    """Return the outcome of an attempt whose payload no bot could run."""
    return Outcome(verdict="failed", reason=f"invalid payload: {wire.escaped(str(error), 400)}")


def complaining(outcome: Outcome, complaint: str) -> Outcome:
    """Add to the reason of an outcome that something which the command left is not kept."""
    reason = complaint if outcome.reason is None else f"{outcome.reason}; {complaint}"
    return outcome.model_copy(update={"reason": wire.printable(reason, MAX_REASON)})
