"""Tasks on a real pool: a gateway, an assigner and a bot with warm children, which are killed in every way."""

import itertools
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from leasehold.client import Client
from leasehold.errors import BadInput, LeaseholdError, TaskFailed
from leasehold.tasks import TaskJob

from bots.agent import task_launcher, warm_children
from bots.agent.agent import Agent
from bots.agent.capacity import MOST_QUEUED
from bots.agent.leases import AgentLeases
from bots.agent.warm_children import TaskRun
from bots.agent.workspace import marked_processes
from bots.protocol import Work
from schema import clock
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.agents import NEEDS_PROC, serving, settings
from tests.support.agents import Pool as AgentPool
from tests.support.apps import task_app
from tests.support.assigners import assigning
from tests.support.http import Answer, ReceivedRequest, problem
from tests.support.patience import MINUTE, eventually
from tests.support.servers import Served

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


@pytest.fixture
def capacity() -> int:
    """How many `def` tasks the bot of `works` runs at once."""
    return 2


@pytest.fixture
def works(
    served: Served,
    database: Database,
    timing: Timing,
    chance: random.Random,
    capacity: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Works]:
    chosen = settings(tmp_path, capacity=capacity, app="tests.support.apps.task_app:pool", kill_grace=0.5)
    agent = Agent(chosen, served.url, served.token("bot", bot="*"), chance=Random(1))
    thread = threading.Thread(target=agent.run)
    client = Client(served.url, served.token("operator"), chance=random.Random(chance.random()))
    # What `cached_property` would make of the environment of a program.
    monkeypatch.setitem(vars(task_app.pool), "client", client)
    with client, assigning(database, timing, chance, wakeups=True):
        thread.start()
        try:
            yield Works(client, tmp_path / "work", tmp_path)
        finally:
            agent.leave()
            thread.join(MINUTE)
    assert not thread.is_alive(), "the agent still runs"
    assert not marked_processes(tmp_path / "work" / "bot-1"), "something is left running"


def test_calls_run_in_processes_that_stay_and_their_output_is_that_of_the_job(works: Works) -> None:
    first = task_app.surroundings.defer()
    assert works.show(first)["state"] == "succeeded"
    assert works.output(first) == "printed\nlogged\nby a process\nby the descriptor\nTrue True 1\n"
    before = works.children
    jobs = task_app.add.batch([(1, 2), {"right": 4, "left": 3}, (5,)])
    assert [works.output(job) for job in jobs] == ["1 + 2\n", "3 + 4\n", "5 + 0\n"]
    assert works.children == before
    failed = task_app.fail.defer("no luck")
    assert {"state": "failed", "exit_code": 1, "reason": "exit code 1"}.items() <= works.show(failed).items()
    lines = works.output(failed).splitlines()
    assert [lines[0], lines[-1]] == ["Traceback (most recent call last):", "ValueError: no luck"]
    assert "tests/support/apps/task_app.py" in lines[1], "the traceback begins in the function of the task"


@pytest.mark.parametrize(("capacity", "timing"), [(4, Timing())])
def test_tasks_that_are_deferred_one_by_one_start_at_once_beside_idle_processes(works: Works, capacity: int) -> None:
    """One round at the times of production; `LEASEHOLD_TEST_STARTS=50` makes more, and tells the longest delay."""
    delays = []
    for _ in range(ROUNDS):
        short = task_app.add.batch([(number,) for number in range(60)])
        list(works.client.wait([job.id for job in short], timeout=MINUTE))
        deferred = [(clock.wall(), task_app.nap.defer(2.0)) for _ in range(capacity)]
        delays += [job.result(MINUTE) - at for at, job in deferred]
    print(f"longest delay from defer to start: {max(delays):.3f} s")
    # One that waits for another to end would take 2 s.
    assert max(delays) < 1.5, delays


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
            assert works.show(job)["reason"] == "exit code 1"
        assert task_app.add.defer(1, 2).result(MINUTE) == 3
        assert task_app.count_characters.defer("abc").result(MINUTE) == 3


@pytest.mark.parametrize("task", [task_app.fail_badly, task_app.fail_badly_beside_others], ids=["def", "async"])
def test_a_call_whose_process_cannot_tell_of_its_end_has_failed_and_holds_up_no_other_call(
    works: Works, task: Any
) -> None:
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


def test_large_arguments_and_values_come_through(works: Works) -> None:
    for size in (10_000, 60_000):
        assert task_app.echo.defer("x" * size).result(MINUTE) == "x" * size
    assert task_app.count_characters.defer("ä" * 30_000).result(MINUTE) == 30_000


def test_a_process_that_ends_takes_its_own_call_with_it_and_is_replaced(works: Works) -> None:
    held = task_app.hold.defer(works.file("held"))
    pid = works.pid("held")
    crashed = task_app.end_process.defer(3, works.file("crashed"))
    assert {"state": "failed", "reason": "exit code 3"}.items() <= works.show(crashed).items()
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
    assert [works.show(job)["state"] for job in jobs] == ["succeeded", "succeeded"]
    assert [works.output(job) for job in jobs] == [
        "left is here\nleft has met right\n",
        "right is here\nright has met left\n",
    ]


def test_a_task_that_blocks_the_loop_is_named_and_its_neighbours_run_again_without_a_charge(
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


def test_a_task_that_does_not_heed_its_cancellation_ends_its_process_and_its_neighbours_run_again_without_a_charge(
    works: Works,
) -> None:
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


@pytest.mark.parametrize(
    ("limit", "grow"), [({"max_calls": 5}, 0), ({"max_memory_mib": 150}, 160), ({"max_age": 0.05}, 0)]
)
def test_a_process_is_replaced_between_calls_when_it_has_reached_a_limit(
    tmp_path: Path, limit: dict[str, float], grow: int
) -> None:
    pool = AgentPool(sync_in=0.1)
    numbers = itertools.count()

    def process(task: str, *args: Any) -> int:
        key = grant(pool, task, *args, job=f"job-{next(numbers)}")
        outcome = pool.until(lambda: pool.outcomes.get(key))
        assert outcome["verdict"] == "succeeded", outcome
        return int(json.loads(outcome["result"])["ok"])

    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", capacity=1, **limit):
        for task in ("keep", "keep_beside_others"):
            first = process(task, grow)
            # One process is replaced at a time, so that it may take some calls more.
            eventually(lambda task=task, first=first: process(task, 0) != first, every=0.05)
            eventually(lambda first=first: not Path(f"/proc/{first}").exists())


def test_the_caller_gets_the_value_of_a_task_or_its_error(works: Works) -> None:
    both = [works.file("left"), works.file("right")]
    beside = [task_app.meet.defer(*both), task_app.meet.defer(*reversed(both))]
    assert task_app.add.defer(1, 2).result(MINUTE) == 3
    assert beside[0].result(MINUTE) == beside[1].result(MINUTE), "one process runs both"
    with pytest.raises(TaskFailed) as failed:
        task_app.fail.defer("no luck").result(MINUTE)
    assert (failed.value.kind, failed.value.message) == ("ValueError", "no luck")
    assert "tests/support/apps/task_app.py" in failed.value.traceback
    with pytest.raises(TaskFailed, match="failed: exit code 3"):
        task_app.end_process.defer(3, works.file("crashed")).result(MINUTE)


def test_a_checkpoint_outlives_the_process_that_made_it(works: Works) -> None:
    job = task_app.advance.using(retries=1).defer(works.file("held"))
    os.kill(works.pid("held"), signal.SIGKILL)
    assert job.result(MINUTE) == [2, {"row": 41}]


def test_only_calls_of_the_apps_tasks_reach_its_bot(works: Works) -> None:
    (other,) = works.client.submit([{"command": ["true"], "properties": {"app": "tests"}, "max_attempts": 1}])
    (unknown,) = works.client.submit(
        [
            {
                "command": ["leasehold-task", "tests.support.apps.task_app:pool", "gone"],
                "stdin": json.dumps({"args": [], "kwargs": {}}),
                "properties": {"app": "tests"},
            }
        ]
    )
    list(works.client.wait([other.id, unknown.id], timeout=MINUTE))
    refused = works.client.show(other.id)
    assert refused["state"] == "dead"
    assert "this bot runs nothing but tasks of the app 'tests'" in json.dumps(refused)
    assert works.client.show(unknown.id)["state"] == "failed"
    text = b"".join(piece.data for piece in works.client.written(unknown.id)).decode()
    assert text.endswith("UnknownTask: 'gone' is not one of the tasks that this bot has imported\n")


def test_an_app_that_cannot_be_imported_ends_the_bot_with_one_line(tmp_path: Path) -> None:
    for app, reason in (
        ("tests.support.no_such_app:pool", "ModuleNotFoundError: No module named 'tests.support.no_such_app'"),
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
    with suppress(FileNotFoundError):
        assert not list((tmp_path / "work" / "bot-1").iterdir())


# Sessions that end, with a gateway whose answers the test decides


def grant(
    pool: AgentPool, task: str, *args: Any, job: str, env: dict[str, str] | None = None, **more: Any
) -> tuple[str, int]:
    command = ["leasehold-task", "tests.support.apps.task_app:pool", f"tests.support.apps.task_app.{task}"]
    payload = {"command": command, "stdin": json.dumps({"args": args, "kwargs": {}}), "env": env or {}}
    return pool.grant(job=job, payload=payload, **more)


def test_no_process_of_a_lost_session_lives_into_the_next_one_which_has_its_own(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", capacity=2):
        held = tmp_path / "held"
        lost = grant(pool, "hold", str(held), job="lost")
        pool.until(held.exists)
        first = marked_processes(tmp_path / "work" / "bot-1")
        alive_at_opening: list[set[int]] = []

        def instead(asked: ReceivedRequest) -> Answer | None:
            if asked.path == "/v1/sync" and asked.body["epoch"] == 1:
                pool.leases.pop(lost, None)
                return problem(409, "this session is over", code="session_over")
            if asked.path == "/v1/sessions":
                alive_at_opening.append(first & marked_processes(tmp_path / "work" / "bot-1"))
            return None

        pool.change(instead=instead)
        pool.until(lambda: len(pool.opened) == 2 and pool.syncs[-1].epoch == 2)
        assert alive_at_opening == [set()]
        key = grant(pool, "add", 1, job="next")
        assert pool.until(lambda: pool.outcomes.get(key))["verdict"] == "succeeded"
    assert pool.opened[1].properties == {"app": "tests"}
    assert pool.opened[1].exclusive == ["app"]
    assert lost not in pool.outcomes


def test_a_drain_asks_tasks_to_end_and_gives_them_back(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", drain_seconds=0) as bot:
        held = tmp_path / "held"
        key = grant(pool, "hold", str(held), job="held")
        pool.until(held.exists)
        bot.agent.drain()
        assert bot.end() == 0
    assert pool.outcomes[key]["verdict"] == "released"
    assert bytes(pool.output[key]) == b"asked to end True\n"


def test_an_app_whose_tasks_share_processes_has_one_account_and_no_sandbox(tmp_path: Path) -> None:
    for setting, value in (("job_user", "dynamic"), ("sandbox", "bubblewrap")):
        chosen = settings(tmp_path, app="tests.support.apps.task_app:pool", **{setting: value})
        with pytest.raises(BadInput, match=f"^{setting}: .* for an app"):
            Agent(chosen, "http://127.0.0.1:1", "t").run()


def test_an_idle_bot_whose_call_is_held_for_longer_than_its_session_lives_keeps_its_processes(tmp_path: Path) -> None:
    pool = AgentPool(ttl=2, sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        key = grant(pool, "add", 1, job="first")
        pool.until(lambda: key in pool.outcomes and pool.syncs[-1].wait)
        began, calls = clock.monotonic(), len(pool.syncs)
        # One for each kind of tasks, and neither is being replaced.
        before = eventually(lambda: len(found := marked_processes(tmp_path / "work" / "bot-1")) == 2 and found)
        pool.until(lambda: clock.monotonic() - began > 1.5 * pool.ttl)
        assert len(pool.syncs) == calls
        assert marked_processes(tmp_path / "work" / "bot-1") == before
        key = grant(pool, "add", 2, job="second")
        assert pool.until(lambda: pool.outcomes.get(key))["verdict"] == "succeeded"


# Leases in advance


def test_a_bot_of_short_tasks_takes_some_in_advance_and_an_idle_one_does_not(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", capacity=2):
        numbers = iter(range(10_000))

        def announced() -> bool:
            """A bot that is told of ever more tasks announces more than it runs at once."""
            while len(pool.leases) < 10:
                grant(pool, "add", 1, job=f"job-{next(numbers)}")
            return any((sync.capacity or 0) > 2 for sync in pool.syncs)

        pool.until(announced)
        pool.until(lambda: not pool.leases and pool.syncs[-1].wait)
        assert pool.syncs[-1].capacity == 2
        assert {outcome["verdict"] for outcome in pool.outcomes.values()} == {"succeeded"}


def test_leases_that_wait_behind_longer_tasks_go_back_to_the_pool(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        held = tmp_path / "held"
        holding = grant(pool, "hold", str(held), job="held")
        pool.until(held.exists)
        waiting = [grant(pool, "add", 1, job=f"waiting-{number}") for number in range(3)]
        for key in waiting:
            outcome = pool.until(lambda key=key: pool.outcomes.get(key))
            assert (outcome["verdict"], outcome["reason"]) == (
                "released",
                "other tasks of the bot take longer than expected",
            )
            assert "active" not in pool.reported(key), "a lease that waits is not acknowledged"
        assert holding not in pool.outcomes


def test_a_cancelled_lease_that_waits_never_starts_and_a_drain_gives_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_launcher, "GIVE_BACK_AFTER", MINUTE)
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", drain_seconds=0.5) as bot:
        files = [tmp_path / name for name in ("held", "cancelled", "given_back")]
        held, cancelled, given_back = (grant(pool, "hold", str(file), job=file.name) for file in files)
        pool.until(files[0].exists)
        pool.cancel(cancelled)
        outcome = pool.until(lambda: pool.outcomes.get(cancelled))
        assert (outcome["verdict"], outcome.get("seconds")) == ("stopped", None)
        bot.agent.drain()
        assert bot.end() == 0
    assert pool.outcomes[held]["verdict"] == "released"
    assert pool.outcomes[given_back]["reason"] == "the bot takes no new work"
    assert [file.exists() for file in files] == [True, False, False]


def test_tasks_that_take_more_units_than_are_free_do_not_run_at_once(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", capacity=2):
        first, second = tmp_path / "first", tmp_path / "second"
        for file in (first, second):
            grant(pool, "hold", str(file), 0.3, job=file.name, units=2)
        pool.until(lambda: len(pool.outcomes) == 2)
    assert abs(first.stat().st_mtime - second.stat().st_mtime) >= 0.29


# Calls that wait in the processes that will run them


def warm_up(pool: AgentPool) -> None:
    """Let the bot see that tasks are short."""
    keys = [grant(pool, "add", number, job=f"warm-{number}") for number in range(100)]
    pool.until(lambda: all(key in pool.outcomes for key in keys))


def verdicts(pool: AgentPool, keys: list[tuple[str, int]]) -> list[str]:
    return [pool.until(lambda key=key: pool.outcomes.get(key))["verdict"] for key in keys]


def test_calls_that_wait_in_a_process_behind_a_longer_one_go_back_to_the_pool(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        with pool.changed:
            holding = grant(pool, "hold", str(tmp_path / "held"), job="held")
            waiting = [grant(pool, "add", 1, job=f"waiting-{number}") for number in range(4)]
        assert verdicts(pool, waiting) == ["released"] * 4
        assert not any("active" in pool.reported(key) for key in waiting), "a lease that waits is not acknowledged"
        assert holding not in pool.outcomes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that wait go back only after a minute."""
    monkeypatch.setattr(task_launcher, "GIVE_BACK_AFTER", MINUTE)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("known", [True, False])
def test_leases_that_wait_are_left_out_of_reports_if_the_gateway_knows_how(tmp_path: Path, known: bool) -> None:
    pool, done = AgentPool(sync_in=0.1), tmp_path / "done"
    pool.unlisted = known
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        before = len(pool.syncs)
        with pool.changed:
            holding = grant(pool, "hold_until", str(done), job="holding")
            waiting = [grant(pool, "add", 1, job=f"waiting-{number}") for number in range(4)]
        pool.until(lambda: "active" in pool.reported(holding))
        if known:
            pool.until(lambda: any(sync.unlisted == 4 for sync in pool.syncs[before:]))
        done.touch()
        assert verdicts(pool, [holding, *waiting]) == ["succeeded"] * 5
    assert any(sync.unlisted for sync in pool.syncs) == known
    assert any("pending" in pool.reported(key) for key in waiting) != known


@pytest.mark.parametrize("known", [True, False])
def test_a_bot_of_short_tasks_asks_a_gateway_that_knows_how_to_fill_its_room(tmp_path: Path, known: bool) -> None:
    pool = AgentPool(sync_in=0.1)
    pool.ahead = known
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        before = len(pool.syncs)
        assert verdicts(pool, [grant(pool, "add", 1, job="next")]) == ["succeeded"]
    assert any(sync.ahead for sync in pool.syncs[before:]) == known
    assert not any(sync.ahead and (sync.capacity or 0) <= 1 for sync in pool.syncs), "without leases in advance"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("field", ["unlisted", "ahead"])
def test_a_bot_says_less_to_a_gateway_that_is_older_than_the_one_that_opened_its_session(
    tmp_path: Path, field: str
) -> None:
    pool, refused, done = AgentPool(sync_in=0.1), list[int](), tmp_path / "done"

    def older(asked: ReceivedRequest) -> Answer | None:
        if not asked.body.get(field):
            return None
        refused.append(asked.body["seq"])
        return problem(400, f"{field}: is not a field", field=field)

    pool.instead = older
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        with pool.changed:
            holding = grant(pool, "hold_until", str(done), job="holding")
            waiting = [grant(pool, "add", 1, job=f"waiting-{number}") for number in range(4)]
        pool.until(lambda: refused)
        if field == "ahead":
            pool.until(lambda: pool.syncs[-1].unlisted == 4)
        done.touch()
        assert verdicts(pool, [holding, *waiting]) == ["succeeded"] * 5
    assert len(pool.opened) == len(refused) == 1
    assert not any(getattr(sync, field) for sync in pool.syncs)


@pytest.mark.usefixtures("patient")
def test_a_bot_of_tasks_of_30_ms_calls_no_more_often_than_its_tasks_end(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        before = len(pool.syncs)
        keys = [grant(pool, "nap", 0.03, job=f"rests-{number}") for number in range(40)]
        assert verdicts(pool, keys) == ["succeeded"] * 40
        # One for the end of each, one for the beginning, and a few while the bot learns how long they take.
        assert len(pool.syncs) - before <= 2 * len(keys) + 10


def test_short_tasks_run_once_each_while_some_of_those_that_wait_are_cancelled(
    works: Works, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.usefixtures("patient")
def test_a_bot_forgets_a_lease_that_it_has_left_out_when_its_gateway_says_so(tmp_path: Path) -> None:
    pool, done = AgentPool(sync_in=0.1), tmp_path / "done"
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        with pool.changed:
            holding = grant(pool, "hold_until", str(done), job="holding")
            revoked, kept = (grant(pool, "hold", str(tmp_path / name), 0.0, job=name) for name in ("revoked", "kept"))
        pool.until(lambda: pool.syncs[-1].unlisted == 2)
        pool.revoke(revoked)
        pool.until(lambda: pool.syncs[-1].unlisted == 1)
        done.touch()
        assert verdicts(pool, [holding, kept]) == ["succeeded"] * 2
    assert (tmp_path / "kept").exists()
    assert not (tmp_path / "revoked").exists()


def test_a_process_that_ends_takes_no_call_with_it_that_waits_there(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        for number, (code, verdict) in enumerate([(3, "failed"), (0, "error")]):
            with pool.changed:
                before = [grant(pool, "add", 1, job=f"before-{number}-{place}") for place in range(3)]
                crashed = grant(pool, "end_process", code, str(tmp_path / str(number)), job=f"crashed-{number}")
                after = [grant(pool, "add", 1, job=f"after-{number}-{place}") for place in range(6)]
            assert verdicts(pool, [*before, crashed, *after]) == ["succeeded"] * 3 + [verdict] + ["succeeded"] * 6


def test_a_stopped_call_is_the_only_one_of_its_process_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (task_launcher, warm_children):
        monkeypatch.setattr(module, "OVERDUE", MINUTE)
    # A process that has to be killed is replaced only after the grace.
    monkeypatch.setattr(task_launcher, "GIVE_BACK_AFTER", MINUTE)
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", kill_grace=0.5):
        warm_up(pool)
        for task in ("hold", "hold_on"):
            held = tmp_path / task
            with pool.changed:
                stopped = grant(pool, task, str(held), job=task)
                waiting = [grant(pool, "add", 1, job=f"{task}-{number}") for number in range(4)]
            pool.until(held.exists)
            pool.cancel(waiting[1])
            assert verdicts(pool, waiting[1:2]) == ["stopped"]
            pool.cancel(stopped)
            assert verdicts(pool, [stopped, *waiting]) == ["stopped", "succeeded", "stopped", "succeeded", "succeeded"]
            assert pool.outcomes[waiting[1]].get("seconds") is None, "it never began"


def test_a_call_that_waits_in_a_process_finds_nothing_of_those_before_it(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        with pool.changed:
            calls = [("add", 1, 2), ("litter", ""), ("fail", "no luck"), ("litter", "late"), ("surroundings",)]
            keys = [
                grant(pool, task, *args, job=f"{turn}-{place}")
                for turn in range(4)
                for place, (task, *args) in enumerate(calls)
            ]
        assert verdicts(pool, keys) == ["succeeded", "succeeded", "failed", "succeeded", "succeeded"] * 4
        for place in range(0, 20, 5):
            assert bytes(pool.output[keys[place]]) == b"1 + 2\n"
            assert json.loads(pool.outcomes[keys[place + 1]]["result"]) == {"ok": ["tmp"]}
            assert json.loads(pool.outcomes[keys[place + 3]]["result"]) == {"ok": ["tmp"]}
            printed = bytes(pool.output[keys[place + 4]])
            assert printed == b"printed\nlogged\nby a process\nby the descriptor\nTrue True 1\n"


def test_every_call_has_the_variables_of_its_own_attempt_and_payload_and_no_others(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    own: list[dict[str, str]] = [{}, {"SHOP": "a"}, {"SHOP": "b", "TILL": "1"}, {"TILL": "2"}, {"SHOP": "b"}, {}]
    with serving(pool, tmp_path, capacity=1, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        with pool.changed:
            keys = []
            for turn in range(4):
                for place, env in enumerate(own):
                    keys.append(grant(pool, "variables", "SHOP", "TILL", job=f"{turn}-{place}", env=env))
                # Its process gives back what waits there behind it.
                grant(pool, "litter", "", job=f"litter-{turn}")
        assert verdicts(pool, keys) == ["succeeded"] * 24
        for place, (job, fence) in enumerate(keys):
            env = own[place % len(own)]
            found = json.loads(pool.outcomes[job, fence]["result"])["ok"]
            assert found == [env.get("SHOP"), env.get("TILL"), job, str(fence), job]


def test_a_process_keeps_few_pipes_though_many_calls_print_and_a_thread_writes_after_their_end(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)

    def open_files(job: str) -> int:
        key = grant(pool, "open_files", job=job)
        found: int = json.loads(pool.until(lambda: pool.outcomes.get(key))["result"])["ok"]
        return found

    with serving(pool, tmp_path, capacity=1, app="tests.support.apps.task_app:pool"):
        warm_up(pool)
        at_first = open_files("first")
        for turn in range(20):
            with pool.changed:
                late = grant(pool, "write_later", f"late {turn}\n", 0.02, job=f"late-{turn}")
                keys = [grant(pool, "add", number, job=f"{turn}-{number}") for number in range(30)]
            assert verdicts(pool, [late, *keys]) == ["succeeded"] * 31
            assert all(f"{number} + 0\n".encode() in bytes(pool.output[key]) for number, key in enumerate(keys))
        assert open_files("last") <= at_first + MOST_QUEUED + 1


def test_a_call_that_its_process_has_no_room_for_costs_the_agent_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    hand_over = TaskRun.hand_over

    def count(run: TaskRun, *where: Any) -> bool:
        if sent := hand_over(run, *where):
            return sent
        places = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        refused.append(sum(os.readlink(place).startswith("pipe:") for place in places if os.path.lexists(place)))
        return False

    monkeypatch.setattr(TaskRun, "hand_over", count)
    pool, go_on = AgentPool(sync_in=0.1), tmp_path / "go on"
    with serving(pool, tmp_path, capacity=16, app="tests.support.apps.task_app:pool"):
        held_up = grant(pool, "hold_up_all", str(go_on), job="held-up")
        with pool.changed:
            keys = [grant(pool, "count_characters", "x" * 50_000, job=f"large-{number}") for number in range(15)]
        eventually(lambda: len(refused) > 50)
        go_on.touch()
        assert verdicts(pool, [held_up, *keys]) == ["succeeded"] * 16
    assert max(refused) <= refused[0] + len(keys), "a pipe for each call that was handed over"
