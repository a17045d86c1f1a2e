"""Tasks on a real pool: a gateway, an assigner and a bot with warm children, which are killed in every way."""

import asyncio
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from leasehold.client import Client
from leasehold.errors import LeaseholdError, TaskFailed
from leasehold.runtime.task_child import is_of_library
from leasehold.tasks.task import TaskJob

from bots.agent.agent import Agent
from bots.agent.leases import AgentLeases
from bots.agent.workspace import marked_processes
from bots.protocol import Work
from schema import clock
from schema.timing import Timing
from tests.support.agents import NEEDS_PROC, settings
from tests.support.apps import task_app
from tests.support.assigners import assigning
from tests.support.patience import MINUTE, eventually
from tests.support.servers import Databases, Served, opened, serving

pytestmark = NEEDS_PROC
ROUNDS_VARIABLE = "LEASEHOLD_TEST_STARTS"
ROUNDS = int(os.environ.get(ROUNDS_VARIABLE, "1"))


@dataclass
class Works:
    """A pool with one bot that serves the tasks of `task_app`."""

    client: Client
    work: Path
    directory: Path

    def show(self, job: TaskJob[Any]) -> dict[str, Any]:
        """How the job ended."""
        assert job.wait(MINUTE)
        found: dict[str, Any] = self.client.show(job.id)
        return {"state": found["state"], **(found["result"] or {})}

    def output(self, job: TaskJob[Any]) -> str:
        assert job.wait(MINUTE)
        return b"".join(piece.data for piece in self.client.written(job.id)).decode()

    def file(self, name: str) -> str:
        return str(self.directory / name)

    def pid(self, name: str) -> int:
        """The process that has written its id into a file."""
        return int(eventually(lambda: Path(self.file(name)).exists() and Path(self.file(name)).read_text()))

    @property
    def children(self) -> set[int]:
        return marked_processes(self.work / "bot-1")


@contextmanager
def working(
    served: Served, timing: Timing, chance: random.Random, directory: Path, *, capacity: int = 2
) -> Iterator[Works]:
    """Run an assigner and a bot that runs as many `def` tasks at once, inside the block."""
    chosen = settings(directory, capacity=capacity, app="tests.support.apps.task_app:pool", kill_grace=0.5)
    agent = Agent(chosen, served.url, served.token("bot", bot="*"), chance=Random(1))
    thread = threading.Thread(target=agent.run)
    client = Client(served.url, served.token("operator"), chance=random.Random(chance.random()))
    with client, assigning(served.database, timing, chance, wakeups=True):
        thread.start()
        try:
            yield Works(client, directory / "work", directory)
        finally:
            agent.leave()
            thread.join(MINUTE)
    assert not thread.is_alive(), "the agent still runs"
    assert not marked_processes(directory / "work" / "bot-1"), "something is left running"


@pytest.fixture(scope="module")
def used(databases: Databases, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Works]:
    url = databases.make(template=template)
    database, timing = opened(url), Timing(sync=0.5, ttl=30, reap=0.2, ack=15, poll=0.1)
    with serving(database, timing) as served:
        with working(served, timing, random.Random(1), tmp_path_factory.mktemp("bot")) as works:
            yield works
    database.close()
    findings = databases.findings(url)
    databases.give_back(url)
    assert not findings


@pytest.fixture
def works(used: Works, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Works:
    """A bot of two units, which other tests have used before."""
    # What `cached_property` would make of the environment of a program.
    monkeypatch.setitem(vars(task_app.pool), "_client", used.client)
    return replace(used, directory=tmp_path)


def test_calls_run_in_processes_that_stay_and_their_output_is_that_of_the_job(works: Works) -> None:
    first = task_app.surroundings.defer()
    assert works.show(first)["state"] == "succeeded"
    assert works.output(first) == "printed\nlogged\nby a process\nby the descriptor\nTrue True 1\n"
    before = works.children
    jobs = task_app.add.batch([(1, 2), {"right": 4, "left": 3}, (5,)])
    assert [works.output(job) for job in jobs] == ["1 + 2\n", "3 + 4\n", "5 + 0\n"]
    assert works.children == before
    failed = task_app.fail.defer("no luck")
    assert {"state": "failed", "exit_code": 1, "reason": "ValueError: no luck"}.items() <= works.show(failed).items()
    with pytest.raises(TaskFailed) as told:
        failed.result(MINUTE)
    assert (told.value.kind, told.value.message) == ("ValueError", "no luck")
    assert works.output(failed) == told.value.traceback
    lines = told.value.traceback.splitlines()
    assert [lines[0], lines[-1]] == ["Traceback (most recent call last):", "ValueError: no luck"]
    assert "tests/support/apps/task_app.py" in lines[1], "the traceback begins in the function of the task"


@pytest.mark.parametrize("timing", [Timing()])
def test_tasks_that_are_deferred_one_by_one_start_at_once_beside_idle_processes(
    served: Served, timing: Timing, chance: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round at the times of production; `LEASEHOLD_TEST_STARTS=50` makes more, and tells the longest delay."""
    delays = []
    with working(served, timing, chance, tmp_path, capacity=4) as works:
        monkeypatch.setitem(vars(task_app.pool), "_client", works.client)
        for _ in range(ROUNDS):
            short = task_app.add.batch([(number,) for number in range(60)])
            list(works.client.wait([job.id for job in short], timeout=MINUTE))
            deferred = [(clock.wall(), task_app.nap.defer(2.0)) for _ in range(4)]
            delays += [job.result(MINUTE) - at for at, job in deferred]
    print(f"longest delay from defer to start: {max(delays):.3f} s")
    # One that waits for another to end would take 2 s.
    assert max(delays) < 1.5, delays


@pytest.mark.parametrize("timing", [Timing(sync=200, ttl=600)])
def test_a_bot_that_runs_tasks_is_told_at_once_of_more_work_and_of_a_cancellation(
    served: Served, timing: Timing, chance: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(served, timing, chance, tmp_path, capacity=2) as works:
        monkeypatch.setitem(vars(task_app.pool), "_client", works.client)
        holding = []
        for name in ("first", "second"):
            # The bot has room, then none: its call is held in both cases.
            holding.append(task_app.hold.defer(works.file(name)))
            works.pid(name)
            eventually(lambda: served.waits("bots") == 1)
        for job in holding:
            job.cancel()
            assert works.show(job)["state"] == "cancelled"


def test_every_attempt_finds_an_empty_directory_and_no_result_of_another(works: Works) -> None:
    jobs = task_app.litter.batch([("",), ("1",), ("orphan",)] * 4)
    assert [job.result(MINUTE) for job in jobs] == [["tmp"]] * 12
    held = task_app.hold.defer(works.file("held"))
    works.pid("held")
    held.cancel()
    assert works.show(held)["state"] == "cancelled"
    assert works.client.results([held.id])[0]["has_result"] is False


BAD_FAILURES = {
    "no text": ("Wordless", "its text cannot be shown: ValueError"),
    "an exit instead of a text": ("Wordless", "its text cannot be shown: SystemExit"),
    "no name": ("Nameless", "told"),
    "no output": ("ValueError", "told"),
}


@pytest.mark.parametrize("task", [task_app.fail_badly, task_app.fail_badly_beside_others], ids=["def", "async"])
def test_an_error_that_cannot_be_told_of_is_a_failure_and_holds_up_no_other_call(works: Works, task: Any) -> None:
    """As many at once as the bot has units, so that one of them that is held would hold everything."""
    for how, told in BAD_FAILURES.items():
        if how == "no output" and task is task_app.fail_badly_beside_others:
            # What a task beside others does to the streams of their process, it does to theirs.
            continue
        jobs = task.batch([(how,), (how,)])
        for job in jobs:
            with pytest.raises(TaskFailed) as failed:
                job.result(MINUTE)
            assert (failed.value.kind, failed.value.message) == told
            assert "_fail_badly" in failed.value.traceback
            assert works.show(job)["reason"].startswith(told[0])
        assert task_app.add.defer(1, 2).result(MINUTE) == 3
        assert task_app.count_characters.defer("abc").result(MINUTE) == 3


@pytest.mark.parametrize("task", [task_app.fail_badly, task_app.fail_badly_beside_others], ids=["def", "async"])
def test_a_call_whose_process_cannot_tell_of_its_end_failed_and_holds_up_no_other(works: Works, task: Any) -> None:
    job = task.defer("no descriptors")
    assert works.show(job)["state"] in ("failed", "dead")
    assert task_app.add.defer(1, 2).result(MINUTE) == 3
    assert task_app.count_characters.defer("abc").result(MINUTE) == 3


def test_a_process_that_can_open_no_more_files_is_replaced_and_its_calls_run_again(works: Works) -> None:
    """The kernel delivers a call without the descriptor of its output to such a process."""
    beside = task_app.use_up_descriptors.defer(works.file("used up"))
    eventually(Path(works.file("used up")).exists)
    assert task_app.count_characters.defer("abc").result(MINUTE) == 3
    # It was not stopped by anybody: it counts as a call whose process ended.
    assert beside.result(MINUTE) == 2


@pytest.mark.parametrize("task", [task_app.store, task_app.store_beside_others], ids=["def", "async"])
def test_a_result_that_is_no_text_is_an_error_of_the_call_that_stores_it(works: Works, task: Any) -> None:
    with pytest.raises(TaskFailed) as failed:
        task.defer({"a": 1}).result(MINUTE)
    assert failed.value.kind == "AttributeError"


@pytest.mark.parametrize(("then", "reason"), [("stay", "killed by SIGKILL"), ("leave", "exit code 3")])
def test_a_process_that_hangs_up_has_failed_and_is_replaced(works: Works, then: str, reason: str) -> None:
    assert {"state": "failed", "reason": reason}.items() <= works.show(task_app.hang_up.defer(then)).items()
    assert task_app.add.defer(1, 2).result(MINUTE) == 3


@pytest.mark.parametrize("task", [task_app.fork, task_app.fork_beside_others], ids=["def", "async"])
def test_a_process_that_a_task_forks_ends_by_itself_and_the_call_is_its_parents(works: Works, task: Any) -> None:
    codes = {"raise": 1, "exit": 7, "return": 0, "stop": -signal.SIGTERM, "close": 1}
    assert {how: task.defer(how).result(MINUTE) for how in codes} == codes
    assert task_app.add.defer(1, 2).result(MINUTE) == 3


def test_a_call_that_nobody_cancels_and_that_waits_for_what_is_cancelled_has_failed(works: Works) -> None:
    with pytest.raises(TaskFailed) as failed:
        task_app.cancel_itself.defer().result(MINUTE)
    assert failed.value.kind == "CancelledError"
    assert "await other" in failed.value.traceback


def test_processes_of_a_bot_that_leaves_end_as_programs_do(
    served: Served, timing: Timing, chance: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(served, timing, chance, tmp_path) as works:
        monkeypatch.setitem(vars(task_app.pool), "_client", works.client)
        for task in (task_app.write_at_exit, task_app.write_at_exit_beside_others):
            assert task.defer(works.file(task.name)).result(MINUTE) is None
            assert not Path(works.file(task.name)).exists()
    assert {each.name for each in tmp_path.glob("*write_at_exit*")} == {
        task_app.write_at_exit.name, task_app.write_at_exit_beside_others.name
    }  # fmt: skip


def test_standard_output_is_set_up_in_a_warm_process_as_in_any_other(works: Works) -> None:
    assert task_app.reconfigure.defer().result(MINUTE) == "backslashreplace"


def test_large_arguments_and_values_come_through(works: Works) -> None:
    for size in (10_000, 60_000):
        assert task_app.echo.defer("x" * size).result(MINUTE) == "x" * size
    assert task_app.count_characters.defer("ä" * 30_000).result(MINUTE) == 30_000


def test_a_process_that_ends_takes_its_own_call_with_it_and_is_replaced(works: Works) -> None:
    held = task_app.hold.defer(works.file("held"))
    pid = works.pid("held")
    crashed = task_app.end_process.defer(3, works.file("crashed"))
    with pytest.raises(TaskFailed, match="failed: exit code 3"):
        crashed.result(MINUTE)
    vanished = task_app.end_process.defer(0, works.file("vanished"))
    assert works.show(vanished)["state"] == "succeeded", "an exit code of 0 is no value: the call is tried again"
    assert works.client.show(vanished.id)["attempts"] == 2
    assert held.state() == "running"
    os.kill(pid, signal.SIGKILL)
    assert {"state": "failed", "reason": "killed by SIGKILL"}.items() <= works.show(held).items()
    assert works.show(task_app.add.defer(1))["state"] == "succeeded"


def test_a_process_that_says_nonsense_is_killed_and_the_others_go_on(works: Works) -> None:
    held = task_app.hold.defer(works.file("held"))
    works.pid("held")
    for nonsense in ("[" * 30_000, "null"):
        liar = task_app.say_nonsense.defer(nonsense)
        assert {"state": "failed", "reason": "killed by SIGKILL"}.items() <= works.show(liar).items()
    again = task_app.say_nonsense.defer('{"ready": "another", "async": [[]], "def": true}')
    eventually(lambda: again.state() == "running")
    for job in (again, held):
        job.cancel()
        assert works.show(job)["state"] == "cancelled"
    assert works.show(task_app.add.defer(1))["state"] == "succeeded"


def test_a_call_that_runs_too_long_is_asked_to_end_and_then_killed(works: Works) -> None:
    deaf = task_app.hold_on.using(timeout=2).defer(works.file("deaf"))
    assert works.pid("deaf") in works.children
    asked = task_app.hold.using(timeout=0.5).defer(works.file("asked"))
    ended = {"state": "failed", "reason": "timeout after 0.5 s", "exit_code": 143}
    assert ended.items() <= works.show(asked).items()
    assert works.output(asked) == "asked to end True\n"
    killed = {"state": "failed", "reason": "timeout after 2 s", "exit_code": -9}
    assert killed.items() <= works.show(deaf).items()
    assert works.pid("asked") in works.children
    assert works.pid("deaf") not in works.children


def test_a_cancelled_call_ends_by_an_exception_and_its_process_goes_on(works: Works) -> None:
    job = task_app.hold.defer(works.file("held"))
    pid = works.pid("held")
    job.cancel()
    assert works.show(job)["state"] == "cancelled"
    assert works.output(job) == "asked to end True\n"
    resting = task_app.rest.defer(works.file("resting"))
    eventually(Path(works.file("resting")).exists)
    resting.cancel()
    assert works.show(resting)["state"] == "cancelled"
    assert works.output(resting) == "rested True\n"
    assert pid in works.children


def test_asynchronous_calls_run_side_by_side_and_each_prints_into_its_own_output(works: Works) -> None:
    left, right = works.file("left"), works.file("right")
    jobs = task_app.meet.batch([(left, right), (right, left)])
    assert jobs[0].result(MINUTE) == jobs[1].result(MINUTE), "one process runs both"
    met = ["left is here\nleft has met right\n", "right is here\nright has met left\n"]
    assert [works.output(job) for job in jobs] == met


def test_a_task_that_blocks_the_loop_is_named_and_its_neighbours_run_again(
    works: Works, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody stops it but the timeout of a neighbour, which passes while the neighbour can do nothing."""
    left, right = works.file("left"), works.file("right")
    neighbour = task_app.meet.using(timeout=1.5).defer(left, right)
    eventually(Path(left).exists)
    blocker = task_app.hold_up_all.defer(works.file("never"))
    ended = works.show(blocker)
    assert ended["state"] == "failed"
    assert "killed because it blocked other tasks of its process, at" in ended["reason"]
    assert "task_app.py:" in ended["reason"]
    Path(right).touch()
    assert works.show(neighbour)["state"] == "succeeded"
    assert works.client.show(neighbour.id)["attempts"] == 1
    log = "".join(capfd.readouterr())
    assert re.search(
        rf"a task blocks the event loop .* job={blocker.id} .*task=tests.support.apps.task_app.hold_up_all", log
    )


def test_a_task_deaf_to_its_cancellation_ends_its_process_and_its_neighbours_run_again(works: Works) -> None:
    left, right = works.file("left"), works.file("right")
    neighbour = task_app.meet.defer(left, right)
    eventually(Path(left).exists)
    deaf = task_app.rest_on.defer(works.file("deaf"))
    eventually(Path(works.file("deaf")).exists)
    deaf.cancel()
    assert works.show(deaf)["state"] == "cancelled"
    Path(right).touch()
    assert works.show(neighbour)["state"] == "succeeded"
    assert works.client.show(neighbour.id)["attempts"] == 1


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "../python3.11-app"])
def test_code_that_is_installed_beside_the_library_is_not_of_the_library(folder: str) -> None:
    library = Path(os.__file__).parent
    assert is_of_library(asyncio.__file__)
    assert not is_of_library(os.path.normpath(library / folder / "app" / "tasks.py"))


def test_a_checkpoint_outlives_the_process_that_made_it(works: Works) -> None:
    job = task_app.advance.using(retries=1).defer(works.file("held"))
    os.kill(works.pid("held"), signal.SIGKILL)
    assert job.result(MINUTE) == [2, {"row": 41}]


def test_only_calls_of_the_apps_tasks_reach_its_bot(works: Works) -> None:
    (other,) = works.client.submit([{"command": ["true"], "properties": {"app": "tests"}, "max_attempts": 1}])
    command = ["leasehold-task", "tests.support.apps.task_app:pool", "gone"]
    call = {"command": command, "stdin": '{"args": [], "kwargs": {}}', "properties": {"app": "tests"}}
    (unknown,) = works.client.submit([call])
    list(works.client.wait([other.id], timeout=MINUTE))
    refused = works.client.show(other.id)
    assert refused["state"] == "dead"
    assert "this bot runs nothing but tasks of the app 'tests'" in json.dumps(refused)
    # It waits for a bot that has it, and is not charged.
    eventually(lambda: "no bot has imported the task 'gone'" in json.dumps(works.client.explain(unknown.id)))
    waiting = works.client.show(unknown.id)
    assert (waiting["state"], waiting["attempts"]) == ("queued", 0)
    assert "this bot has not imported the task 'gone'" in json.dumps(waiting)
    works.client.cancel([unknown.id])


def test_an_app_that_cannot_be_imported_ends_the_bot_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tasks see it, so that no refusal that names it says how they come to see it.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for app, reason in (
        (
            "tests.support.no_such_app:pool",
            "there is no module 'tests.support.no_such_app' in the directory where the command was started, PYTHONPATH "
            "or what is installed",
        ),
        ("tests.support.apps.task_app:fail", "'tests.support.apps.task_app:fail' is a 'Task', not a pool"),
        (
            "tests.support.apps.task_app:pools",
            "the module 'tests.support.apps.task_app' has no 'pools'; its pool is 'pool'",
        ),
    ):
        with pytest.raises(LeaseholdError) as refused:
            Agent(settings(tmp_path, app=app), "http://127.0.0.1:1", "t").run()
        assert str(refused.value).startswith(f"the app '{app}' cannot be used: ")
        assert str(refused.value).endswith(reason)
    assert "Traceback" not in capfd.readouterr().err
    with suppress(FileNotFoundError):
        assert not list((tmp_path / "work" / "bot-1").iterdir())


def test_an_app_that_reads_a_variable_of_its_bot_is_told_how_tasks_come_to_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wants_more.py").write_text("import os\n\nos.environ['SHOP_URL']\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SHOP_URL", "postgresql://shop")
    with pytest.raises(LeaseholdError, match=r"KeyError: 'SHOP_URL' .*ENV_ALLOW='\[\"PATH\", \"SHOP_URL\"\]'$"):
        Agent(settings(tmp_path, app="wants_more:pool"), "http://127.0.0.1:1", "t").run()


def test_short_tasks_run_once_while_some_that_wait_are_cancelled(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out, settle = list[int](), AgentLeases.settle

    def noted(self: AgentLeases, leases: Sequence[Work], *, accept: bool, keep_unlisted: bool = False) -> None:
        left_out.append(keep_unlisted and sum(held.unlisted for held in self._held.values()))
        settle(self, leases, accept=accept, keep_unlisted=keep_unlisted)

    monkeypatch.setattr(AgentLeases, "settle", noted)
    file = works.file("numbers")
    jobs = task_app.note.batch([(file, number) for number in range(900)])
    eventually(lambda: any(left_out))
    for start in range(100, 900, 100):
        works.client.cancel([job.id for job in jobs[start : start + 30]])
    ends = {job["id"]: job["state"] for job in works.client.wait([job.id for job in jobs], timeout=MINUTE)}
    ran = [int(line) for line in Path(file).read_text().splitlines()]
    assert len(ran) == len(set(ran)), "twice"
    assert set(ends.values()) <= {"succeeded", "cancelled"}
    assert {number for number, job in enumerate(jobs) if ends[job.id] == "succeeded"} <= set(ran)
