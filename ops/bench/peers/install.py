"""Install a virtual environment for each peer, with the versions in the .txt file of its name.

    python ops/bench/peers/install.py [--into .bench] [buildgrid] [pgqueuer] [procrastinate]

An environment that already has these versions is left alone. Needs a Python package index, and nothing of Leasehold.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PEERS = sorted(file.stem for file in HERE.glob("*.txt"))
#: One retry only: a missing package index should be reported soon.
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20")


class Failed(Exception):
    """A peer cannot be installed; the message says why in one line."""


def install(peer: str, into: Path) -> None:
    """Create the peer's environment, again if its versions or this Python have changed."""
    pins = HERE / f"{peer}.txt"
    place = into / peer
    stamp, wanted = place / ".installed", f"{sys.version}\n{pins.read_text()}"
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{peer}: is there")
        return
    print(f"{peer}: installing into {place}", flush=True)
    _run(peer, sys.executable, "-m", "venv", "--clear", str(place))
    _run(peer, str(place / "bin" / "python"), *PIP, "--requirement", str(pins))
    stamp.write_text(wanted)


def _run(peer: str, *command: str) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Failed(f"{peer}: {command[0]} cannot be run: {error.strerror}") from error
    if ran.returncode:
        said = (ran.stderr + ran.stdout).strip().splitlines() or ["it said nothing"]
        told = [line for line in said if line.startswith("ERROR:")] or said
        raise Failed(
            f"{peer}: {' '.join(command[1:4])} failed; it needs a Python package index that has the versions in "
            f"{HERE / peer}.txt: {told[0].removeprefix('ERROR: ')}"
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
