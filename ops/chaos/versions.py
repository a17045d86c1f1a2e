"""The version before this one, taken from the repository, to run beside this one.

The file `version-before` names its commit or tag, because copies of a repository may have no tags. Only versions with
the same revisions of the schema can share a database.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: Everything that a process of the pool needs.
PACKAGES = ("schema", "assigner", "bots", "pyproject.toml")
REVISIONS = "schema/migrations/versions"
NAMED_IN = "ops/chaos/version-before"


class NoVersionBefore(Exception):
    """There is no version before this one here; the text says why."""


@dataclass(frozen=True)
class Version:
    """A tree of the product: its name in the repository, and where its packages lie."""

    name: str
    tree: Path


def search_path(tree: Path) -> str:
    """The PYTHONPATH with which a process runs the packages of this tree, and not those that are installed."""
    return os.pathsep.join([str(tree), str(tree / "bots" / "sdk")])


def name_before(root: Path) -> str:
    """Return the tag or the commit of the version before the tree `root`. Raises NoVersionBefore."""
    _git(root, "rev-parse")
    try:
        name = (root / NAMED_IN).read_text().strip()
    except FileNotFoundError:
        raise NoVersionBefore(f"there is no {NAMED_IN}") from None
    changed = _git(root, "diff", "--name-only", name, "--", REVISIONS)
    if changed:
        raise NoVersionBefore(f"{name} has other revisions of the schema; name a later version in {NAMED_IN}")
    return name


def extract(root: Path, name: str, directory: Path) -> Version:
    """Write the packages of a version into a directory, which is made. Raises NoVersionBefore."""
    directory.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(root), "archive", name, *PACKAGES], capture_output=True, check=False)
    if archive.returncode != 0:
        raise NoVersionBefore(f"git cannot read {name}: {archive.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    return Version(name, directory)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoVersionBefore("git is not installed") from None
    if done.returncode != 0:
        raise NoVersionBefore(done.stderr.strip() or f"git {arguments[0]} failed")
    return done.stdout.strip()
