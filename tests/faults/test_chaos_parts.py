"""The parts of fault runs: proxies, the search for survivors, the report and the version before this one."""

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from click.testing import CliRunner

from ops.chaos import execution, versions
from ops.chaos.checker import Kind, Violation
from ops.chaos.faults import FAULTS
from ops.chaos.faults import fault as fault_module
from ops.chaos.faults.fault import NothingToHit
from ops.chaos.members import BotParts
from ops.chaos.pool import ChaosPool
from ops.chaos.proxy import Proxy
from ops.chaos.report import Injection, Report, table
from ops.chaos.run import main
from ops.chaos.versions import NoVersionBefore
from ops.chaos.watch import Survivors
from schema.postgres.engine import libpq_url
from tests.support.patience import eventually
from tests.support.pool import Pool

README = Path(__file__).parent.parent.parent / "ops" / "chaos" / "README.md"


# Proxies


class Ends:
    """A link between a client and a listener of the test, with one connection."""

    def __init__(self, proxy: Proxy) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.link = proxy.link("link", lambda: [self.listener.getsockname()[1]])
        self.client = self.connect()
        self.target, _ = self.listener.accept()
        self.target.settimeout(60)
        # Once both have been heard, the proxy knows the connection as a pair.
        for end, other in ((self.client, self.target), (self.target, self.client)):
            end.sendall(b"hello")
            assert other.recv(5) == b"hello"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.link.port), timeout=60)

    def close(self) -> None:
        for each in (self.client, self.target, self.listener):
            each.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    proxy = Proxy(random.Random(0))
    made = Ends(proxy)
    yield made
    made.close()
    proxy.close()


def is_silent(end: socket.socket) -> bool:
    end.settimeout(0.1)
    try:
        return not end.recv(1) and False
    except TimeoutError:
        return True
    finally:
        end.settimeout(60)


def test_what_is_sent_through_a_held_link_arrives_when_it_is_healed(ends: Ends) -> None:
    ends.link.hold(from_target=False)
    ends.client.sendall(b"request")
    ends.target.sendall(b"answer")
    assert ends.client.recv(6) == b"answer"
    assert is_silent(ends.target)
    ends.link.heal()
    assert ends.target.recv(7) == b"request"


def test_a_connection_that_is_made_during_a_partition_works_after_it(ends: Ends) -> None:
    ends.link.hold()
    late = ends.connect()
    late.sendall(b"late")
    ends.link.heal()
    target, _ = ends.listener.accept()
    assert target.recv(4) == b"late"
    late.close()
    target.close()


def test_a_cut_resets_connections_and_refuses_new_ones(ends: Ends) -> None:
    ends.link.cut()
    for end in (ends.client, ends.target):
        with pytest.raises(ConnectionError):
            end.recv(1)
    # The reset may come before the call that connects returns.
    with pytest.raises(ConnectionError), ends.connect() as late:
        late.recv(1)


@pytest.mark.parametrize("towards", [True, False])
def test_a_half_open_connection_is_gone_for_one_side_only(ends: Ends, towards: bool) -> None:
    gone, silent = (ends.client, ends.target) if towards else (ends.target, ends.client)
    ends.link.strand(target=towards)
    with pytest.raises(ConnectionError):
        gone.recv(1)
    silent.sendall(b"into the void")
    assert is_silent(silent)
    ends.link.heal()
    with pytest.raises(ConnectionError):
        silent.recv(1)


# Survivors


class Direct:
    """The server as survivors are looked up on it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def connect(self) -> psycopg.Connection[object]:
        return psycopg.connect(libpq_url(self._url), autocommit=True)


def test_a_process_whose_attempt_is_over_is_found_and_one_of_a_running_attempt_is_not(pool: Pool) -> None:
    pool.bot("bot-1", capacity=2)
    job, other = pool.submit(), pool.submit()
    pool.assigner().run_once()
    fence = pool.job(job[0]).fence
    run = f"run-{os.getpid()}"
    own = {"PATH": os.defpath, execution.RUN_VARIABLE: run, "LEASEHOLD_FENCE": str(fence)}
    current, over = (
        subprocess.Popen(["sleep", "600"], env=own | {"LEASEHOLD_JOB": name, "LEASEHOLD_FENCE": str(number)})
        for name, number in ((job[0], fence), (other[0], fence - 1))
    )
    try:
        found = Survivors(Direct(pool.database.url), run, patience=0.0)  # type: ignore[arg-type]
        eventually(lambda: found.look() or found.violations)
        assert [violation.kind for violation in found.violations] == [Kind.SURVIVOR]
        assert f"process {over.pid} of job {other[0]}" in found.violations[0].what
    finally:
        for process in (current, over):
            process.send_signal(signal.SIGKILL)
            process.wait()


# The report


def test_a_violation_is_told_beside_the_fault_that_it_followed() -> None:
    report = Report(seed=7)
    report.injections = [
        Injection("kill-agent", "bot-1", 10.0, 10.0, 0.5, 0.1),
        Injection("kill-agent", "bot-2", 20.0, 20.0, 1.5, 0.1),
        Injection("cut", "callers", 30.0, 32.0, 0.2, 0.3),
    ]
    report.violations = [Violation(Kind.OVERLAP, "two", 21.0), Violation(Kind.LOST, "one")]
    rows = [line.split() for line in table([report]).splitlines()]
    assert [row[0] for row in rows] == ["fault", "cut", "kill-agent", "(unknown)", "all"]
    assert rows[1][1:] == ["1", "0", "0", "0", "0", "0", "0", "0", "0", "0.30", "0.30"]
    assert rows[2][1:] == ["2", "0", "0", "0", "1", "0", "0", "0", "0", "1.00", "1.50"]
    assert rows[3][1:] == ["0", "1", "0", "0", "0", "0", "0", "0", "0", "-", "-"]
    assert rows[4][1:4] == ["3", "1", "0"]


def test_the_reports_of_several_runs_are_merged_into_one_table(tmp_path: Path) -> None:
    for seed, recovery in ((1, 0.5), (2, 1.5)):
        report = Report(seed, injections=[Injection("kill-agent", "bot-1", 10.0, 10.0, recovery, 0.1)])
        report.violations = [Violation(Kind.LOST, "one", 11.0)] * (seed - 1)
        (tmp_path / f"{seed}.json").write_text(json.dumps(report.json()))
    one, two = (str(tmp_path / f"{seed}.json") for seed in (1, 2))
    sound = CliRunner().invoke(main, ["--merge", one, "--merge", one])
    assert (sound.exit_code, sound.output.splitlines()[1].split()[:3]) == (0, ["kill-agent", "2", "0"])
    merged = CliRunner().invoke(main, ["--merge", one, "--merge", two])
    assert merged.exit_code == 1
    assert merged.output.splitlines()[1].split() == ["kill-agent", "2", "1", *"0000000", "1.00", "1.50"]


def test_a_file_that_holds_no_report_is_refused_in_one_line(tmp_path: Path) -> None:
    for text in ("no JSON", "[]", "{}", '{"injections": [{"fault": "cut"}], "violations": []}'):
        (tmp_path / "report").write_text(text)
        refused = CliRunner().invoke(main, ["--merge", str(tmp_path / "report")])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"error: {tmp_path}/report: is no ")
        assert refused.stderr.count("\n") == 1


def test_every_fault_is_explained_by_its_name() -> None:
    explained = README.read_text()
    assert [name for name in FAULTS if f"`{name}`" not in explained] == [], "ops/chaos/README.md"


# Targets


def pool_of_bots(**commands: list[int]) -> ChaosPool:
    bots = [SimpleNamespace(name=name, parts=lambda own=own: BotParts([], [], own)) for name, own in commands.items()]
    return cast(ChaosPool, SimpleNamespace(of=lambda _role: bots))


def test_a_fault_of_a_bot_hits_one_that_runs_a_command_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        fault = FAULTS["kill-agent"](pool_of_bots(one=[], two=[42], three=[]), random.Random(seed))
        bot, _ = fault.a_busy_bot()
        assert (bot.name, fault.target) == ("two", "two")
    monkeypatch.setattr(fault_module, "BUSY_WITHIN", 0.1)
    with pytest.raises(NothingToHit, match="no bot has run a command"):
        FAULTS["stop-guardian"](pool_of_bots(one=[], two=[]), random.Random(1)).inject()


# The version before


def git(tree: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(tree), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose second commit names the first one as the version before."""
    for package in (versions.REVISIONS, "assigner", "bots", "ops/chaos"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "file").write_text("one")
    (tmp_path / "pyproject.toml").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "first")
    (tmp_path / versions.NAMED_IN).write_text("first\n")
    (tmp_path / "bots/file").write_text("two")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "second")
    return tmp_path


def test_the_version_before_is_the_one_that_is_named_if_it_is_there_and_can_share_a_database(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    found = versions.extract(tree, versions.name_before(tree), elsewhere / "before")
    assert found.name == "first"
    assert [(found.tree / package / "file").read_text() for package in (versions.REVISIONS, "bots")] == ["one", "one"]
    (tree / versions.REVISIONS / "file").write_text("two")
    with pytest.raises(NoVersionBefore, match="first has other revisions of the schema"):
        versions.name_before(tree)
    for name in ("unknown", ""):
        (tree / versions.NAMED_IN).write_text(name)
        with pytest.raises(NoVersionBefore):
            versions.name_before(tree)
    with pytest.raises(NoVersionBefore, match="not a git repository"):
        versions.name_before(elsewhere)


def test_this_repository_names_a_version_that_it_has() -> None:
    root = Path(__file__).parent.parent.parent
    name = (root / versions.NAMED_IN).read_text().strip()
    there = subprocess.run(["git", "-C", str(root), "cat-file", "-e", name], capture_output=True, check=False)
    if there.returncode != 0:
        pytest.skip(f"this copy of the repository has no {name}")
    assert versions.name_before(root)
