"""One assigner process: reload, metrics, and how it ends."""

import signal
import socket
from pathlib import Path

import httpx
import pytest

from schema.timing import Timing
from tests.patience import MINUTE, eventually
from tests.processes import Processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_an_assigner_process_ends_when_asked_to(
    tmp_path: Path, database_url: str, timing: Timing, number: signal.Signals, status: int
) -> None:
    with Processes(tmp_path, database_url, timing) as processes:
        assigner = processes.assigner()
        assigner.signal(number)
        assert assigner.popen.wait(MINUTE) == status
        assert "assigners stopped" in assigner.said()


def test_a_changed_configuration_is_taken_and_a_wrong_one_refused(
    tmp_path: Path, database_url: str, timing: Timing
) -> None:
    port = free_port()
    with Processes(tmp_path, database_url, timing) as processes:
        assigner = processes.start("assigner-1", "assign", "--metrics-port", str(port))
        eventually(lambda: "assigners run" in assigner.said())
        before = processes.config.read_text()

        processes.config.write_text(before + "[[assigners]]\nbatch = 7\nthreads = 3\n")
        eventually(lambda: "configuration reloaded" in assigner.said())
        assert "some changes need a restart" in assigner.said()

        processes.config.write_text(before + "[[assigners]]\nbatch = 0\n")
        assigner.signal(signal.SIGHUP)
        eventually(lambda: "configuration refused" in assigner.said())
        assert "assigners[0].batch: must be greater than or equal to 1" in assigner.said()
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        assert "leasehold_config_reload_failures_total 1.0" in metrics
        assert assigner.alive
        assert assigner.end() == 0


def test_a_port_that_is_taken_is_bad_input(tmp_path: Path, database_url: str, timing: Timing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Processes(tmp_path, database_url, timing) as processes:
        port = taken.getsockname()[1]
        assigner = processes.start("assigner-1", "assign", "--metrics-port", str(port))
        assert assigner.popen.wait(MINUTE) == 2
        assert assigner.said() == f"error: --metrics-port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        gateway = processes.start("gateway", "gateway", environment={"LEASEHOLD_GATEWAY_PORT": str(port)})
        assert gateway.popen.wait(MINUTE) == 2
        assert "error: gateway.port: cannot listen on 127.0.0.1" in gateway.said()
