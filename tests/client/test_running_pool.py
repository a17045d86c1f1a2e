"""The library on a whole pool with bots, which `leasehold.testing` starts as another program's tests would."""

import subprocess
import sys
from pathlib import Path

import leasehold
import pytest
from leasehold.errors import LeaseholdError
from leasehold.graphs import GraphState
from leasehold.pool import Pool
from leasehold.states import JobState
from leasehold.testing import running

pytest_plugins = ["leasehold.testing"]
#: Seconds within which a job ends on a busy machine.
ENDS = 120.0


@pytest.fixture(scope="session")
def forked(leasehold: Path) -> pytest.MonkeyPatch:
    """Fork the processes of the next pool, whose imports take most of their work."""
    patch = pytest.MonkeyPatch()
    patch.setattr(running, "_program", lambda: leasehold)
    return patch


@pytest.fixture(scope="session")
def leasehold_pool(forked: pytest.MonkeyPatch, leasehold_pool: Pool) -> Pool:
    """The library's own fixture, as another program's tests have it."""
    forked.undo()
    return leasehold_pool


def test_jobs_run_and_their_results_are_read(leasehold_pool: Pool) -> None:
    good = leasehold_pool.submit(["python3", "-c", "print(6 * 7)"])
    bad = leasehold_pool.submit(["sh", "-c", "echo no >&2; exit 3"])
    assert {result.id for result in leasehold_pool.as_completed([good, bad], timeout=ENDS)} == {good.id, bad.id}
    first, second = leasehold_pool.wait([good, bad], ENDS)
    assert (first.check().text, first.exit_code) == ("42\n", 0)
    assert (second.state, second.exit_code, second.output) == (JobState.FAILED, 3, b"no\n")
    with pytest.raises(leasehold.NotSucceeded):
        second.check()
    assert b"".join(leasehold_pool.logs(good, follow=True)) == b"42\n"


def test_a_graph_runs_in_its_order(leasehold_pool: Pool) -> None:
    graph = leasehold_pool.graph("build")
    build = graph.add(["false"])
    tell = graph.add(["echo", "told"], after=[build], on_failure="run")
    taken = graph.submit()
    seen: list[GraphState] = []
    state = taken.wait(ENDS, on_progress=seen.append)
    assert (seen[-1], len(seen)) == (state, len(set(seen))), "each state is told once"
    assert repr(taken) == f"SubmittedGraph(name='build', id='{taken.id}', nodes=2)"
    assert (state.state, state.succeeded, state.failed, state.all_succeeded) == ("finished", 1, 1, False)
    assert taken.results()[tell].text == "told\n"
    assert str(state.first_failed) == f"node 0, job {taken.jobs[build].id}, is failed: exit code 1"


def test_the_fixture_is_there_only_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(leasehold_pool): assert leasehold_pool.client.bots()\n")
    quiet = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(tmp_path)]
    done = subprocess.run(quiet, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "fixture 'leasehold_pool' not found" in done.stdout


def test_a_program_that_has_imported_the_library_before_its_plugins_is_not_warned(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import leasehold.testing\n\npytest_plugins = ['leasehold.testing']\n")
    (tmp_path / "test_it.py").write_text("def test_it(leasehold_inline): assert leasehold_inline\n")
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:xdist", "-W", "error", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_program_that_does_not_start_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from leasehold import testing  # pytest loads it as a plugin first

    (config := tmp_path / "bad.toml").write_text("[gateway]\nprot = 1\n")
    with pytest.raises(LeaseholdError, match=r"^`leasehold up` ended with 2: error: .*prot"):
        testing.running_pool(config=config).__enter__()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LeaseholdError, match=r"is not installed: pip install 'leasehold\[embedded\]'$"):
        testing.running_pool().__enter__()
