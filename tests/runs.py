"""Running one command of a lease, and looking for what it may have left behind."""

import base64
from pathlib import Path
from typing import Any

from bots import runner
from bots.runner import Assignment, Place, Run
from tests.patience import MINUTE

#: Leaves the session, drops its environment, closes its files: as far from its parent as a process gets.
RUNAWAY = (
    "import os,sys\n"
    "if os.fork(): os._exit(0)\n"
    "os.setsid()\n"
    "if os.fork(): os._exit(0)\n"
    "os.chdir('/'); os.closerange(0, 64)\n"
    "os.execve('/bin/sleep', ['sleep', sys.argv[1]], {})\n"
)


def start(place: Place, *command: str, timeout: float | None = None, **payload: Any) -> Run:
    assignment = Assignment(
        job="a-job",
        fence=7,
        attempt=2,
        instance="tenant",
        timeout=timeout,
        payload={"command": list(command), **payload},
    )
    run = Run(assignment, place, notify=lambda: None)
    run.start()
    return run


def finish(run: Run, *, within: float = MINUTE) -> runner.Outcome:
    assert run.over.wait(within), "the run is not over"
    assert run.outcome is not None
    return run.outcome


def text_of(run: Run) -> str:
    return b"".join(base64.b64decode(chunk.data) for chunk in run.output.pending().chunks).decode()


def sleeping(seconds: str) -> list[int]:
    """Processes that run `sleep <seconds>`; each test uses a number of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
