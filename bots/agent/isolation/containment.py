"""What keeps the commands of one agent apart from it and from each other: accounts, limits and a sandbox.

Everything is tried when the agent starts. What is configured and does not work here is refused then, in one line, and
never left out silently.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leasehold.errors import BadInput, LeaseholdError

from bots.agent.isolation import job_accounts
from bots.agent.isolation.cgroups import Cgroups, Limits
from bots.agent.isolation.job_accounts import JobAccount, JobAccounts
from bots.agent.isolation.privileges import Privileges
from bots.agent.workspace import Workspace
from schema.validation import FARM, RUN_ACTION

# The sandbox: bubblewrap


#: The program of the package bubblewrap.
PROGRAM = "bwrap"
#: Directories that are empty in every sandbox: other commands leave files in them, and services their sockets.
EMPTY = (Path("/tmp"), Path("/var/tmp"), Path("/run"))
_RESOLVER = Path("/etc/resolv.conf")


@dataclass(frozen=True)
class Sandbox:
    """Puts commands into a sandbox of their own.

    The command sees the files of the machine read-only and its own directory writable. It sees neither other processes
    nor shared memory, and has a session of its own. The sandbox ends with the process that started it, and every
    process in it ends with the sandbox.

    program: the path of bubblewrap. network: the command may use the machine's network; otherwise it has none.
    hidden: directories that are empty for the command, in addition to EMPTY.
    """

    program: str
    network: bool
    hidden: tuple[Path, ...]

    def wrap(self, command: Sequence[str], directory: Path) -> list[str]:
        """Return the command line that runs `command` in a sandbox, with `directory` as its own.

        The supervisor adds the environment in a file, because every account can read a command line.
        """
        words = [self.program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for place in dict.fromkeys([*EMPTY, *self.hidden]):
            if place.is_dir():
                words += ["--tmpfs", str(place)]
        resolver = _RESOLVER.resolve()
        if self.network and resolver.is_file() and any(resolver.is_relative_to(place) for place in EMPTY):
            words += ["--ro-bind", str(resolver), str(resolver)]
        words += ["--bind", str(directory), str(directory), "--chdir", str(directory)]
        words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"]
        return [*words, *([] if self.network else ["--unshare-net"]), "--", *command]


def find_sandbox(*, network: bool, hidden: Sequence[Path]) -> Sandbox:
    """Return the sandbox of this machine. Raises BadInput if bubblewrap is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise BadInput("sandbox", f"'{PROGRAM}' is not on the PATH of the agent; install the package bubblewrap")
    return Sandbox(os.path.abspath(program), network, tuple(place.absolute() for place in hidden))


# Sites of attempts


#: A command that every machine has, for trials.
_NOTHING = ("/bin/sh", "-c", ":")


@dataclass(frozen=True)
class Site:
    """Where one attempt runs: its directory, and how its command is confined. account: None = that of the agent."""

    directory: Path
    account: JobAccount | None
    privileges: Privileges

    @property
    def owner(self) -> int | None:
        """The user id that files of the command have, where it is not that of the agent."""
        return None if self.account is None else self.account.user

    @property
    def environment(self) -> dict[str, str]:
        """What the command is told of its account."""
        return {} if self.account is None else {"USER": self.account.name, "LOGNAME": self.account.name}


class Containment:
    """Gives each attempt a site and clears it away. Thread-safe.

    processes: the most processes of a dynamic account; a limit for any other kind of account needs a cgroup.
    Raises BadInput if what is asked for cannot be done on this machine.
    """

    def __init__(
        self, accounts: JobAccounts, *, limits: Limits, cgroup: Path | None = None, wrapper: Sandbox | None = None
    ) -> None:
        self.accounts, self._sandbox = accounts, wrapper
        self._processes: int | None = None
        if accounts.alone:
            self._processes = limits.processes or job_accounts.PROCESSES
            limits = Limits(memory_mib=limits.memory_mib, cpu_milli=limits.cpu_milli)
        self._cgroups = Cgroups(cgroup, limits) if limits.settings else None

    @classmethod
    def none(cls) -> "Containment":
        """Return the containment of commands that run as their agent does."""
        return cls(JobAccounts(job_accounts.AGENT), limits=Limits())

    def open(self, workplace: Workspace) -> Site:
        """Make the site of an attempt. Raises OSError or LeaseholdError."""
        account = self.accounts.take()
        try:
            directory = workplace.make(None if account is None else account.ids)
            try:
                made = None if self._cgroups is None else self._cgroups.make(_prefix(workplace) + directory.name)
            except OSError:
                workplace.discard(directory)
                raise
        except OSError:
            self.accounts.give_back(account, silent=True)
            raise
        privileges = Privileges(
            account=None if account is None else account.ids,
            killer=None if account is None else account.killer,
            processes=self._processes,
            cgroup=None if made is None else str(made),
            wrapped=self._sandbox is not None,
        )
        return Site(directory, account, privileges)

    def close(self, site: Site, *, silent: bool) -> bool:
        """Clear away everything but the directory. `silent`: no process is left. Returns True if nothing remains."""
        gone = True
        if self._cgroups is not None and site.privileges.cgroup is not None:
            gone = self._cgroups.remove(Path(site.privileges.cgroup))
        self.accounts.give_back(site.account, silent=silent)
        return gone

    def command(self, command: Sequence[str], site: Site) -> list[str]:
        """Return the command line to run: the command itself, or a sandbox with it."""
        return list(command) if self._sandbox is None else self._sandbox.wrap(command, site.directory)

    def check(self, workplace: Workspace, *, runs_actions: bool = False, path: str = os.defpath) -> None:
        """Run a command that does nothing, as every attempt will. Raises BadInput if that fails.

        runs_actions: the bot is for actions of a farm door, so the program that runs them is tried too. path: the PATH
        of commands.
        """
        site = self.open(workplace)
        try:
            closed = job_accounts.closed_to(site.privileges, workplace.root)
            if closed is not None:
                raise BadInput(
                    "work_dir",
                    f"the account of jobs cannot enter '{closed}'; choose another work_dir, or run: chmod o+x {closed}",
                )
            if site.account is not None and (reason := job_accounts.trial(site.privileges, site.directory, _NOTHING)):
                raise BadInput("job_user", f"commands cannot run under an account of their own: {reason}; use 'agent'")
            if (
                self.accounts.alone
                and site.account is not None
                and (reason := job_accounts.killing_trial(site.account))
            ):
                raise BadInput(
                    "job_user", f"what runs under an account of its own cannot be killed: {reason}; use 'agent'"
                )
            if self._sandbox is not None:
                wrapped = self.command(_NOTHING, site)
                if reason := job_accounts.trial(site.privileges, site.directory, wrapped):
                    raise BadInput("sandbox", f"bubblewrap does not work here: {reason}")
            if runs_actions:
                tried = self.command([RUN_ACTION, "--help"], site)
                if reason := job_accounts.trial(site.privileges, site.directory, tried, path=path):
                    whom = "" if site.account is None else ", or let jobs run as the agent: job_user = 'agent'"
                    raise BadInput(
                        "properties",
                        f"a bot that offers {FARM} runs '{RUN_ACTION}', and its jobs cannot: {reason}; "
                        f"install Leasehold on the bot's PATH, where the account of jobs can read it{whom}",
                    )
        finally:
            workplace.discard(site.directory)
            self.close(site, silent=True)

    def reach(self) -> str:
        """Say in one line what commands can reach of what belongs to the agent's account."""
        return job_accounts.reach(self.accounts.kind, boxed=self._sandbox is not None)

    def clear(self, workplace: Workspace) -> None:
        """Kill what attempts of agents that ended without clearing up left behind. Raises LeaseholdError."""
        self.accounts.clear()
        if self._cgroups is not None:
            self._cgroups.clear(_prefix(workplace))

    def close_all(self) -> None:
        """Give up the accounts, when the agent ends."""
        self.accounts.close()


def _prefix(workplace: Workspace) -> str:
    """Return how the cgroups of an agent begin: another one of its name has another directory."""
    place = hashlib.sha256(os.fsencode(workplace.root)).hexdigest()[:16]
    return f"{workplace.name}-{place}-"


def build(
    job_user: str | None, *, limits: Limits, cgroup: Path | None, boxed: bool, network: bool, hidden: Sequence[Path],
) -> Containment:  # fmt: skip
    """Make the containment that the settings of an agent describe. Raises BadInput if it cannot be had here."""
    wrapper = find_sandbox(network=network, hidden=hidden) if boxed else None
    if boxed and os.geteuid() == 0 and job_accounts.kind_of(job_user) == job_accounts.AGENT:
        # The kernel's settings in /proc/sys are writable for root, and one of them names a program that it starts.
        raise BadInput("sandbox", "a command that runs as root can leave it; use job_user 'dynamic' or an account")
    return Containment(JobAccounts(job_user), limits=limits, cgroup=cgroup, wrapper=wrapper)


def unable_to_contain(error: LeaseholdError | OSError) -> str:
    """Say why an attempt has no site."""
    return f"the work directory cannot be made: {error.strerror if isinstance(error, OSError) else error}"
