"""Orphans: processes of a command whose supervisor was killed. The agent finds and kills them itself.

A supervisor finds every process of its command, because all of them stay below it in the process tree. If it is killed,
the kernel hands them to its guardian; if that is killed too, to the agent, which adopts orphans like the other two. So
a process cannot get away by leaving its session or by clearing its environment.

An agent that shares its process with others must not adopt, because it could not tell orphans from children of others.
It still finds what is below its guardian, has the command's session or process group, or carries the mark.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import structlog

from bots.agent import guardian
from bots.agent.isolation import job_accounts
from bots.agent.workspace import marked_processes
from schema import clock

_log = structlog.get_logger("leasehold.agent")
#: Seconds between two looks at the processes while they are being killed.
_LOOK_AGAIN = 0.01


@dataclass(frozen=True)
class _Relations:
    """Parent, process group and session of a process that is no zombie."""

    parent: int
    group: int
    session: int


@dataclass(frozen=True)
class Watched:
    """What is known of a command whose supervisor was lost.

    directory: its work directory, which its processes carry as a mark. supervisor, command: process ids, if they were
    ever told. guardian: the present guardian. account: its dynamic user id; None if it shares its account.
    """

    directory: Path
    supervisor: int | None
    command: int | None
    guardian: int | None
    account: int | None


class Orphans:
    """Kills what lost supervisors leave behind.

    adopt: this process belongs to the agent alone, so every child of it that is no guardian or supervisor is an orphan.
    Children that it has already are none.
    """

    def __init__(self, *, adopt: bool) -> None:
        self._adopt = adopt
        #: Held while a guardian or killer is started, because before its exec it looks like an orphan.
        self.starting = threading.Lock()
        #: Process ids of killers that have not ended, which are no orphans either.
        self._killers: set[int] = set()
        self._before: Container[int] = ()
        if adopt:
            self._before = set(guardian.process_tree().get(os.getpid(), ()))
            guardian.adopt_orphans()

    def sweep(self, watched: Watched, seconds: float) -> list[int]:
        """Kill the processes of a command until none is left; return those left after `seconds`."""
        give_up = clock.monotonic() + seconds
        quiet = 0
        while True:
            if watched.account is not None:
                # First, because what forks without end leaves hardly any time for a look.
                self._kill_account(watched.account)
            with self.starting:
                found = self._find(watched)
                # As root where the command has an account of its own, so that it cannot keep this process from it.
                guardian.kill(found, signal.SIGKILL)
            self.reap()
            # One look may miss a process that was forked meanwhile by one that ended meanwhile.
            quiet = 0 if found else quiet + 1
            if quiet == 2 or clock.monotonic() > give_up:
                return found
            if found:
                clock.sleep(_LOOK_AGAIN)

    def reap(self) -> None:
        """Collect adopted processes that ended."""
        while self._adopt:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _kill_account(self, user: int) -> None:
        """Kill everything under a dynamic user id at once. Waits without the lock, so that nothing else stands."""
        try:
            with self.starting:
                killer = job_accounts.start_killer([user])
                self._killers.add(killer.pid)
            reason = job_accounts.wait_for_killer(killer)
            with self.starting:
                self._killers.discard(killer.pid)
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            _log.warning("processes of an account are killed one by one", user=user, reason=reason)

    def _find(self, watched: Watched) -> list[int]:
        relations = _living()
        # Their other children are guardians, and supervisors of other commands.
        parents = {os.getpid()} if self._adopt else set()
        if watched.guardian in relations and relations[watched.guardian].parent == os.getpid():
            parents.add(watched.guardian)
        roots = marked_processes(watched.directory)
        if watched.account is not None:
            roots |= job_accounts.processes_of({watched.account}).keys()
        for process, its in relations.items():
            if watched.command is not None and watched.command in (its.group, its.session):
                roots.add(process)
            elif process == watched.supervisor:
                # A process that is about to end has no command line any more, but still has its children.
                if _watches(process) or not _command_line(process):
                    roots.add(process)
            elif its.parent in parents and process not in self._before and not _watches(process):
                roots.add(process)
        roots -= self._killers
        children: dict[int, list[int]] = {}
        for process, its in relations.items():
            children.setdefault(its.parent, []).append(process)
        return [*(roots & relations.keys()), *guardian.descendants(list(roots), children)]


def _living() -> dict[int, _Relations]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent, group, session = guardian.facts(int(entry))
                if state not in guardian.ENDED:
                    found[int(entry)] = _Relations(int(parent), int(group), int(session))
    return found


def stopped(process: int) -> bool:
    """Tell whether a process is stopped by a signal."""
    with contextlib.suppress(OSError, ValueError):
        return guardian.facts(process)[0] in ("T", "t")
    return False


def _watches(process: int) -> bool:
    """Tell whether a process is a guardian or supervisor: it runs the guardian's program."""
    return guardian.__file__.encode() in _command_line(process).split(b"\0")


def _command_line(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path("/proc", str(process), "cmdline").read_bytes()
    return b""
