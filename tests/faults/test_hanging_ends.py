"""A process that is told to stop ends in time, although its threads wait for a database that does not answer."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from assigner.cli.up import END_WITHIN
from ops.chaos.proxy import Link, Proxy
from schema.timing import Timing
from tests.support.patience import MINUTE
from tests.support.servers import Process, Processes

#: Waits for ever in a thread that the interpreter joins at its end.
STUCK = """
import threading
from assigner.loops import exit_within
threading.Thread(target=threading.Event().wait, name="stuck").start()
exit_within(0.2, 3)
"""


@pytest.fixture
def link(database_url: str) -> Iterator[Link]:
    """What lies between the processes of a test and its database."""
    server = make_url(database_url)
    host = str(server.query.get("host", server.host))
    port = int(str(server.query.get("port", server.port or 5432)))
    proxy = Proxy(random.Random(0))
    yield proxy.link("database", lambda: [Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else port])
    proxy.close()


def test_a_process_ends_in_time_and_names_the_threads_that_still_wait() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=MINUTE, check=False)
    assert done.returncode == 3
    assert "still wait" in done.stdout + done.stderr
    assert "stuck" in done.stdout + done.stderr


def test_gateway_and_assigner_end_in_time_while_the_database_does_not_answer(
    database_url: str, link: Link, timing: Timing, scratch: Path
) -> None:
    through = make_url(database_url).set(host="127.0.0.1", port=link.port, query={})
    with Processes(scratch, through.render_as_string(hide_password=False), timing) as processes:
        running: list[Process] = [processes.gateway(), processes.assigner()]
        link.hold()
        begun = time.monotonic()
        for process in running:
            process.signal(signal.SIGTERM)
        for process in running:
            assert process.popen.wait(END_WITHIN + MINUTE) in (0, 1), process.said()
        # Far less than the minutes that a lost packet may keep a connection waiting. A busy machine starts late.
        assert time.monotonic() - begun < 2 * END_WITHIN
