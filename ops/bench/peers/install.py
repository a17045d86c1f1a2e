"""Install a virtual environment for each peer, with the versions in the .txt file of its name.

    [PYTHON313=/path/to/python3.13] python ops/bench/peers/install.py [--into .bench] [peer …]

An environment that already has these versions is left alone. Needs a Python package index, and nothing of Leasehold.

A peer whose newest version needs a newer Python has a second file, `<peer>.python3.13.txt`. It counts where that Python
is found: PYTHON313 names it, or `python3.13` is on the path. Otherwise the older version is installed, and why is said.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PEERS = sorted(file.stem for file in HERE.glob("*.txt") if "." not in file.stem)
#: The newer Python, as its version and as the end of the names of the files of versions that need it.
NEWER, VARIABLE = "3.13", "PYTHON313"
#: One retry only: a missing package index should be reported soon.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")
WHICH = "import sys; print(sys.executable); print('%d.%d' % sys.version_info[:2]); print(sys.version)"


class Failed(Exception):
    """A peer cannot be installed; the message says why in one line."""


@dataclass(frozen=True)
class Choice:
    """The Python and the file of versions for a peer. `why`: why this version and no other, if there are two."""

    python: str
    build: str
    pins: Path
    why: str = ""


def choose(peer: str) -> Choice:
    """Choose the version of a peer. Raises Failed if PYTHON313 names something else than that Python."""
    usual = Choice(sys.executable, sys.version, HERE / f"{peer}.txt")
    newer = HERE / f"{peer}.python{NEWER}.txt"
    if not newer.is_file():
        return usual
    if given := os.environ.get(VARIABLE):
        if (found := _python(given)) is None:
            raise Failed(f"{VARIABLE}={given} is not a Python {NEWER} that can be run")
        return Choice(*found, newer, f"with {found[0]}, which {VARIABLE} names")
    if shutil.which(f"python{NEWER}") and (found := _python(f"python{NEWER}")):
        return Choice(*found, newer, f"with {found[0]}")
    return Choice(
        usual.python,
        usual.build,
        usual.pins,
        f"no Python {NEWER} was found, which {_release(peer, newer)} needs;"
        f" {VARIABLE}=/path/to/python{NEWER} names one",
    )


def _python(program: str) -> tuple[str, str] | None:
    """Return path and build of this Python if it is of the newer version and can be run."""
    # pyenv puts a program on the path that runs a version only if this variable or a file names it.
    environ = {**os.environ, "PYENV_VERSION": NEWER}
    try:
        ran = subprocess.run((program, "-c", WHICH), capture_output=True, text=True, check=False, env=environ)
    except OSError:
        return None
    path, version, build = [*ran.stdout.split("\n", 2), "", ""][:3]
    return (path, build) if version == NEWER else None


def _release(peer: str, pins: Path) -> str:
    found = re.search(rf"^{peer}==(\S+)$", pins.read_text(), re.M)
    if found is None:
        raise Failed(f"{pins} has no line {peer}==VERSION")
    return found[1]


def install(peer: str, into: Path) -> None:
    """Create the peer's environment, again if its versions or its Python have changed."""
    choice, place = choose(peer), into / peer
    stamp, wanted = place / ".installed", f"{choice.build}\n{choice.pins.read_text()}"
    named = f"{peer} {_release(peer, choice.pins)}" + (f" ({choice.why})" if choice.why else "")
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{named}: is there")
        return
    print(f"{named}: installing into {place}", flush=True)
    _run(choice, choice.python, "-m", "venv", "--clear", str(place))
    _run(choice, str(place / "bin" / "python"), *PIP, "--requirement", str(choice.pins))
    stamp.write_text(wanted)


def _run(choice: Choice, *command: str) -> None:
    peer = choice.pins.name.split(".")[0]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Failed(f"{peer}: {command[0]} cannot be run: {error.strerror}") from error
    if ran.returncode:
        said = (ran.stderr + ran.stdout).strip().splitlines() or ["it said nothing"]
        told = [line for line in said if line.startswith("ERROR:")] or said
        raise Failed(
            f"{peer}: {' '.join(command[1:4])} failed; it needs a Python package index that has the versions in "
            f"{choice.pins}: {told[0].removeprefix('ERROR: ')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="install.py", description="Virtual environments for the peers.")
    parser.add_argument("names", nargs="*", metavar="peer", help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--into", type=Path, default=Path(".bench"), help="directory (default: .bench)")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(PEERS)):
        parser.error(f"peer: {unknown[0]} is not one of {', '.join(PEERS)}")
    try:
        for peer in given.names or PEERS:
            install(peer, given.into)
    except Failed as reason:
        sys.exit(f"error: {reason}")


if __name__ == "__main__":
    main()
