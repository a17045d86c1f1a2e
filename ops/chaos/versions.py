"""The version before this one, taken from the repository, to run beside this one.

It is the last release. Before the first release the baseline of the schema is edited in place, so that only versions
with the very same schema can share a database: then it is the commit that last changed the schema, the oldest one that
has this schema.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: Everything that a process of the pool needs, and what decides about the database.
PACKAGES = ("schema", "assigner", "bots", "pyproject.toml")
SCHEMA = ("schema/tables", "schema/sql", "schema/migrations")


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
    try:
        return _git(root, "describe", "--tags", "--abbrev=0", "HEAD^")
    except NoVersionBefore as error:
        if "No names found" not in str(error) and "No tags" not in str(error):
            raise
    if _git(root, "status", "--porcelain", "--", *SCHEMA):
        raise NoVersionBefore("the schema has changes that are not committed, which no other version has")
    changed = _git(root, "log", "-1", "--format=%h", "--", *SCHEMA)
    if not changed or changed == _git(root, "log", "-1", "--format=%h"):
        raise NoVersionBefore("the last commit changed the schema, and there is no release yet")
    return changed


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
