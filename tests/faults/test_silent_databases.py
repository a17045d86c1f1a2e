"""Databases that say nothing: processes that shall stop end in time, and a pool that lost its connections goes on."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from assigner.cli.up import END_WITHIN
from ops.chaos.proxy import Link, Proxy
from schema.timing import Timing
from tests.support.lossy_proxy import LossyProxy
from tests.support.patience import MINUTE, eventually
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


@pytest.mark.long
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


# All connections of a pool are lost at once.


LOSSES_VARIABLE = "LEASEHOLD_TEST_LOSSES"
#: With this statement timeout, seconds, a wait for the server ends after twice as long.
PATIENCE = 1.0


def test_a_pool_goes_on_after_its_connections_were_lost(database_url: str, timing: Timing, scratch: Path) -> None:
    """`LEASEHOLD_TEST_LOSSES=10` loses them ten times."""
    proxy = LossyProxy(database_url)
    config = f"[database]\nstatement_timeout = {PATIENCE}\n"
    with Processes(scratch, proxy.url, timing, config=config) as processes:
        processes.gateway()
        processes.assigner()
        processes.bot()
        headers = {"Authorization": f"Bearer {processes.operator_token}"}
        with httpx.Client(base_url=processes.url, headers=headers, timeout=MINUTE, trust_env=False) as http:

            def submitted(key: str) -> str:
                answer = http.post("/v1/jobs", json={"jobs": [{"command": ["true"], "key": key}]})
                assert answer.status_code == 200
                return str(answer.json()["jobs"][0]["id"])

            for number in range(int(os.environ.get(LOSSES_VARIABLE) or 1)):
                begun = time.monotonic()
                proxy.lose()
                job = eventually(lambda number=number: submitted(f"job-{number}"))  # type: ignore[misc]
                eventually(lambda job=job: http.get(f"/v1/jobs/{job}").json()["state"] == "succeeded")  # type: ignore[misc]
                eventually(lambda: http.get("/readyz").status_code == 200)
                print(f"all of it is back after {time.monotonic() - begun:.1f} s")
    proxy.close()
