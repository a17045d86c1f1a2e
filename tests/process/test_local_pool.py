"""Child processes: restarted, stopped in order, and never left behind."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from leasehold.errors import BadInput, Conflict, LeaseholdError

from assigner.cli.main import sections
from assigner.process.children import MAX_LOG_BYTES, Child, Children, Role
from assigner.process.local_pool import LocalBot, LocalPool, check_app, hold_data_directory, reserved_port, write_file
from schema import clock
from tests.support.patience import eventually

FOLLOWER = (
    "from assigner.process import children; children.ORPHAN_GRACE = children.HURRY = 0.5; "
    "children.follow_parent(); import sys, time; "
    "print('up', flush=True); "
)


def lives(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child(name: str, code: str, *, role: Role = Role.BOT) -> Child:
    return Child(name=name, role=role, command=(sys.executable, "-c", code))


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def children(tmp_path: Path, messages: list[str]) -> Iterator[Children]:
    made = Children(tmp_path, os.environ, report=messages.append, chance=random.Random(1))
    yield made
    made.kill()


def said(tmp_path: Path, name: str) -> str:
    return (tmp_path / f"{name}.log").read_text()


def test_a_child_that_dies_is_started_again(children: Children, messages: list[str], tmp_path: Path) -> None:
    children.start(child("one", FOLLOWER + "time.sleep(60)"))
    first = children.processes()["one"]
    eventually(lambda: "up" in said(tmp_path, "one"))
    assert os.getsid(first) != os.getsid(0), "it is out of reach of the terminal"
    os.kill(first, signal.SIGKILL)

    def reborn() -> bool:
        children.run_once()
        return children.processes().get("one", first) != first

    eventually(reborn)
    assert messages[0].startswith("one was killed by SIGKILL: up; starting it again in ")
    assert messages[1] == "one runs again"


@pytest.mark.parametrize("can_be_kept", [True, False])
def test_the_log_of_a_child_that_runs_is_bounded_and_kept_if_possible(
    children: Children, tmp_path: Path, can_be_kept: bool
) -> None:
    kept = tmp_path / "one.log.1"
    if not can_be_kept:
        kept.mkdir()
    go_on = tmp_path / "go on"
    code = f"""from pathlib import Path
print("x" * {MAX_LOG_BYTES}, flush=True)
while not Path({str(go_on)!r}).exists():
    time.sleep(0.05)
print("last")"""
    children.start(child("one", FOLLOWER + code))
    log = tmp_path / "one.log"
    # The end of the line is written by itself.
    eventually(lambda: log.exists() and log.stat().st_size == MAX_LOG_BYTES + len("up\n\n"))
    children.run_once()
    assert log.stat().st_size == 0
    assert not can_be_kept or kept.stat().st_size > MAX_LOG_BYTES
    go_on.touch()
    eventually(lambda: log.read_text() == "last\n")


def test_a_child_that_keeps_dying_is_started_ever_more_seldom(tmp_path: Path, messages: list[str]) -> None:
    now = [0.0]
    children = Children(tmp_path, os.environ, report=messages.append, chance=random.Random(1), monotonic=lambda: now[0])
    children.start(child("one", "raise SystemExit('no luck')"))
    pauses: list[float] = []
    try:
        while len(pauses) < 9:
            eventually(lambda: not children.processes())
            messages.clear()
            children.run_once()
            assert "one ended with exit status 1: no luck" in messages[0]
            pauses.append(float(messages[0].split()[-2]))
            now[0] += pauses[-1] - 0.2
            messages.clear()
            children.run_once()
            assert messages == []
            now[0] += 0.3
            children.run_once()
            assert messages == ["one runs again"]
    finally:
        children.kill()
    assert 0.5 <= pauses[0] <= 1.0
    assert all(15.0 <= pause <= 30.0 for pause in pauses[6:])


def test_the_last_words_of_a_dead_child_are_raised(tmp_path: Path) -> None:
    children = Children(tmp_path, os.environ, report=print, chance=random.Random(1))
    logged = "timestamp=now level=info event=runs", '{"event": "runs", "level": "info"}'
    said = ["print('error: schema none')", *(f"print({each!r})" for each in logged), "raise SystemExit(3)"]
    children.start(child("one", "; ".join(said)))
    eventually(lambda: not children.processes())
    with pytest.raises(LeaseholdError, match=r"^one ended with exit status 3: schema none$"):
        children.check()
    children.stop()


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    children = Children(tmp_path, os.environ, report=print, chance=random.Random(1))
    children.start(child("one", "import os; os.kill(os.getpid(), 40)"))
    eventually(lambda: not children.processes())
    with pytest.raises(LeaseholdError, match=r"^one was killed by signal 40: it said nothing of it"):
        children.check()
    children.stop()


def test_children_stop_role_after_role(children: Children, tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal, sys, time\n"
        f"def end(*_):\n    time.sleep(0.2); open({str(order)!r}, 'a').write(sys.argv[1] + ' '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)"
    )
    for role in (Role.ASSIGNER, Role.BOT, Role.CONSOLE, Role.GATEWAY):
        command = (sys.executable, "-c", code, role.name)
        children.start(Child(name=role.name, role=role, command=command))
    eventually(lambda: all("up" in said(tmp_path, role.name) for role in Role))
    children.stop()
    assert order.read_text().split() == ["CONSOLE", "BOT", "GATEWAY", "ASSIGNER"]
    assert children.processes() == {}


def test_a_child_that_ignores_the_request_to_stop_is_killed(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assigner.process.children.HURRY", 0.1)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    children.start(child("one", stubborn))
    pid = children.processes()["one"]
    eventually(lambda: "up" in said(tmp_path, "one"))
    children.stop(patience=0.1)
    assert not lives(pid)


def test_children_end_when_their_parent_is_killed_also_one_that_ignores_it(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code = FOLLOWER + "time.sleep(60)"
    parent = (
        "import os, random, sys, time; from pathlib import Path; from assigner.process.children import *\n"
        f"made = Children(Path({str(tmp_path)!r}), os.environ, report=print, chance=random.Random(1))\n"
        f"for name, code in (('a', {code!r}), ('b', {deaf + code!r})): made.start(Child(name=name, role=Role.BOT,"
        " command=(sys.executable, '-c', code)))\n"
        "print(*made.processes().values(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(each) for each in process.stdout.readline().split()]
        eventually(lambda: all("up" in said(tmp_path, name) for name in "ab"))
        process.kill()
    eventually(lambda: not any(lives(pid) for pid in pids))


def test_a_second_pool_in_one_directory_is_refused(tmp_path: Path) -> None:
    with hold_data_directory(tmp_path / "data"):
        with pytest.raises(Conflict, match="a pool already runs in"), hold_data_directory(tmp_path / "data"):
            pass
    with hold_data_directory(tmp_path / "data"):
        pass


def test_a_reserved_port_is_taken_by_nobody_and_a_process_listens_there_again_and_again() -> None:
    with reserved_port(0, "--console") as port:
        with socket.socket() as anybody, pytest.raises(OSError, match="Address already in use"):
            # As for the system where it chooses a port itself, that somebody reuses addresses is no reason here.
            anybody.bind(("127.0.0.1", port))
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as listener:
                with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
                    pass
                with pytest.raises(BadInput, match=f":{port}: Address already in use"), reserved_port(port, "--farm"):
                    pass


def test_a_private_file_is_readable_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "operator.token"
    path.write_text("old")
    path.chmod(0o644)
    write_file(path, "new\n")
    assert path.read_text() == "new\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_an_app_of_many_coroutines_is_as_good_as_a_small_one(tmp_path: Path) -> None:
    names = [f"a_task_with_a_name_as_long_as_programs_give_them_{number}" for number in range(500)]
    tasks = "".join(f"\n@pool.task\nasync def {name}() -> None: ...\n" for name in names)
    (tmp_path / "many_tasks.py").write_text(f"from leasehold import Pool\n\npool = Pool.from_env()\n{tasks}")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    check_app("many_tasks:pool", environ, rest=clock.sleep)
    with pytest.raises(BadInput, match="has no 'pol'; its pool is 'pool'"):
        check_app("many_tasks:pol", environ, rest=clock.sleep)


def test_an_app_that_reads_a_variable_which_tasks_do_not_see_is_told_how_they_come_to_see_it(tmp_path: Path) -> None:
    source = "import os\nfrom leasehold import Pool\n\npool = Pool.from_env()\nurl = os.environ['SHOP_URL']\n"
    source += "\n@pool.task\ndef look() -> str:\n    return url\n"
    (tmp_path / "wants_more.py").write_text(source)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "SHOP_URL": "x", "LEASEHOLD_TOKEN": "y"}
    allowed = sections()().seen_by_tasks(environ)
    assert allowed.keys() == environ.keys() & {"PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH"}
    with pytest.raises(BadInput) as refused:
        check_app("wants_more:pool", allowed, rest=clock.sleep, unseen=environ.keys() - allowed.keys())
    assert str(refused.value).endswith(
        f"KeyError: 'SHOP_URL' ({tmp_path}/wants_more.py, line 5); tasks see the variables of bot.env_allow only: give "
        """it those that they see now and SHOP_URL, such as LEASEHOLD_BOT_ENV_ALLOW='["PATH", "SHOP_URL"]'"""
    )
    bot = {"env_allow": ["PATH", "SHOP_URL"]}
    check_app("wants_more:pool", sections().model_validate({"bot": bot}).seen_by_tasks(environ), rest=clock.sleep)


def test_a_pool_whose_process_ends_at_once_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = tmp_path / "leasehold.toml"
    wrong.write_text("[timing]\nttl = 'soon'\n")
    pool = LocalPool(
        tmp_path / "data", config=wrong, assigners=1, bots=[LocalBot(name="one")], environ=os.environ,
        report=print, chance=random.Random(1),
    )  # fmt: skip
    with pytest.raises(LeaseholdError, match=r"ended with exit status 2: \S+leasehold.toml:2: timing.ttl: must be"):
        pool.start()
    assert pool.processes() == {}
