"""A command of the console script on a terminal of its own, interrupted by Ctrl-C."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.http import Gateway
from tests.support.patience import MINUTE, eventually

ROOT = Path(__file__).parent.parent.parent


def on_a_terminal(stands: Gateway, *arguments: str, until: Callable[[], object] | None = None) -> tuple[int, str]:
    """Run a command against the gateway. Returns its exit code and its text.

    until: when Ctrl-C is pressed; None = never, it ends by itself.
    """
    ours, theirs = pty.openpty()
    popen = subprocess.Popen(
        [sys.executable, "-m", "assigner.cli.main", *arguments],
        env={**os.environ, "LEASEHOLD_URL": stands.url, "LEASEHOLD_TOKEN": "lh_submitter_x", "TERM": "xterm",
             "PYTHONPATH": str(ROOT)},
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    if until is not None:
        eventually(until, 5 * MINUTE)
        popen.send_signal(signal.SIGINT)
    text = b""
    while True:
        try:
            text += os.read(ours, 65536)
        except OSError:  # the other end has been closed
            break
    os.close(ours)
    return popen.wait(MINUTE), text.decode()
