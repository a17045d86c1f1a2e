"""A pool of its own for tests: PostgreSQL, an assigner, a gateway and bots, started by the program `leasehold up`.

The program comes with the distribution `leasehold`, which is not a dependency of this library.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from leasehold.credentials import Credentials
from leasehold.errors import LeaseholdError
from leasehold.pool import Pool

#: Seconds that the pool may take to start, and to stop, on a busy machine.
STARTS_WITHIN, STOPS_WITHIN = 180.0, 60.0
#: Lines of the program's standard error in a message.
LAST_LINES = 5


@contextmanager
def running_pool(*, bots: int = 2, config: Path | None = None, app: str | None = None) -> Iterator[Pool]:
    """Run a pool of its own in a temporary directory, which is removed afterwards, and connect to it as an operator.

    bots: bot processes, each of which runs one job at a time unless the configuration says otherwise. config: a TOML
    file; None = the defaults. app: `MODULE:POOL`, as this process would import it; one more bot runs its tasks, and
    every pool of this process calls the running one meanwhile. Configuration in the environment of this process is not
    passed on. Raises LeaseholdError if the program is not installed or does not start.
    """
    program = _program()
    data = Path(tempfile.mkdtemp(prefix="leasehold-testing-"))
    if os.geteuid() == 0:
        data.chmod(0o711)  # PostgreSQL runs as another account, below this directory
    command = [str(program), "--data", str(data), "--config", str((config or Path(os.devnull)).absolute())]
    command += ["up", "--json", "--port", "0", "--bots", str(bots), "--assigners", "1"]
    command += [] if app is None else ["--app", app]
    try:
        with (data / "up.log").open("w") as log:
            up = subprocess.Popen(
                command,
                cwd=data,
                env=_environment(app),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop the pool
            )
        try:
            url = _await_start(up, data / "up.log")
            with Pool(url, Credentials(token_file=data / "operator.token").token()) as pool:
                with nullcontext() if app is None else pool.client.instead_of_all():
                    yield pool
        finally:
            _stop(up)
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _program() -> Path:
    """Return the program, first of this Python's environment."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which("leasehold", path=places)
    if found is None:
        raise LeaseholdError("the program `leasehold` is not installed: pip install 'leasehold[embedded]'")
    return Path(found)


def _environment(app: str | None) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    # A bot that waits for work asks for it each second, so that no test waits longer for a start or a cancel.
    found = {**kept, "LEASEHOLD_TIMING_SYNC": "1"}
    if app is not None:
        # It runs in another directory, and finds modules where this process does; its own packages are its own affair.
        installed = tuple(set(sysconfig.get_paths().values()))
        searched = [os.path.abspath(place) for place in sys.path if not place.startswith(installed)]
        found["PYTHONPATH"] = os.pathsep.join(searched)
    return found


def _await_start(up: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + STARTS_WITHIN
    assert up.stdout is not None
    while select.select([up.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = up.stdout.readline()
        if not line:
            raise LeaseholdError(f"`leasehold up` ended with {up.wait()}: {_last_words(log)}")
        try:
            return str(json.loads(line)["url"])
        except ValueError:
            continue
    raise LeaseholdError(f"`leasehold up` was not ready within {STARTS_WITHIN:.0f} s: {_last_words(log)}")


def _last_words(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) or "it said nothing"


def _stop(up: "subprocess.Popen[bytes]") -> None:
    up.send_signal(signal.SIGTERM)
    try:
        up.wait(STOPS_WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(up.pid, signal.SIGKILL)
        up.wait()
    if up.stdout is not None:
        up.stdout.close()
