"""Tasks on a bot with a gateway whose answers the test decides: sessions that end, limits, leases in advance."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import BadInput

from bots.agent import agent, task_launcher, warm_children
from bots.agent.agent import Agent
from bots.agent.capacity import MOST_QUEUED
from bots.agent.warm_children import TaskRun
from bots.agent.workspace import marked_processes
from schema import clock
from tests.support.agents import NEEDS_PROC, Pool, serving, settings
from tests.support.http import Answer, ReceivedRequest, problem
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC
APP = "tests.support.apps.task_app:pool"
Key = tuple[str, int]


class TaskPool(Pool):
    """The gateway of a bot of the tasks of `task_app`."""

    def __init__(self, **times: float) -> None:
        super().__init__(**{"sync_in": 0.1, **times})
        self.numbers = itertools.count()

    def call(self, task: str, *args: Any, env: dict[str, str] | None = None, **more: Any) -> Key:
        payload = {
            "command": ["leasehold-task", APP, task and f"tests.support.apps.task_app.{task}"],
            "stdin": json.dumps({"args": args, "kwargs": {}}),
            "env": env or {},
        }
        return self.grant(job=f"job-{next(self.numbers)}", payload=payload, **more)

    def adds(self, count: int) -> list[Key]:
        return [self.call("add", number) for number in range(count)]

    def verdicts(self, *keys: Key) -> list[str]:
        return [self.until(lambda key=key: self.outcomes.get(key))["verdict"] for key in keys]

    def value(self, key: Key) -> Any:
        assert self.verdicts(key) == ["succeeded"], self.outcomes[key]
        return json.loads(self.outcomes[key]["result"])["ok"]

    def warm_up(self) -> None:
        """Let the bot see that tasks are short. If it gave calls back while its processes start it would forget."""
        with pytest.MonkeyPatch.context() as patient:
            patient.setattr(task_launcher, "GIVE_BACK_AFTER", MINUTE)
            assert set(self.verdicts(*self.adds(100))) == {"succeeded"}


@pytest.fixture(scope="module")
def used_bot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskPool]:
    pool = TaskPool()
    with serving(pool, tmp_path_factory.mktemp("bot"), app=APP, kill_grace=0.5):
        yield pool


@pytest.fixture
def warm(used_bot: TaskPool) -> Iterator[TaskPool]:
    """A bot of one unit that has seen that its tasks are short; other tests have used it before."""
    used_bot.warm_up()
    yield used_bot
    for key in list(used_bot.leases):
        used_bot.cancel(key)
    used_bot.until(lambda: not used_bot.leases)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that wait go back only after a minute."""
    monkeypatch.setattr(task_launcher, "GIVE_BACK_AFTER", MINUTE)


@pytest.mark.parametrize(
    ("limit", "grow"), [({"max_calls": 5}, 0), ({"max_memory_mib": 150}, 160), ({"max_age": 0.05}, 0)]
)
def test_a_process_that_has_reached_a_limit_is_replaced(tmp_path: Path, limit: dict[str, float], grow: int) -> None:
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP, capacity=1, **limit):
        for task in ("keep", "keep_beside_others"):
            first = pool.value(pool.call(task, grow))
            # One process is replaced at a time, so that it may take some calls more.
            eventually(lambda task=task, first=first: pool.value(pool.call(task, 0)) != first, every=0.05)
            eventually(lambda first=first: not Path(f"/proc/{first}").exists())


def test_a_task_that_goes_on_keeps_no_other_process_from_being_replaced(tmp_path: Path) -> None:
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP, capacity=2, max_calls=2):
        pool.call("rest", str(tmp_path / "resting"))
        eventually((tmp_path / "resting").exists)
        for task in ("keep_beside_others", "keep"):
            first = pool.value(pool.call(task, 0))
            eventually(lambda task=task, first=first: pool.value(pool.call(task, 0)) != first, every=0.05)


def test_no_process_of_a_lost_session_lives_into_the_next_one_which_has_its_own(tmp_path: Path) -> None:
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP, capacity=2):
        lost = pool.call("hold", str(tmp_path / "held"))
        pool.until((tmp_path / "held").exists)
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
        assert pool.verdicts(pool.call("add", 1)) == ["succeeded"]
    assert (pool.opened[1].properties, pool.opened[1].exclusive) == ({"app": "tests"}, ["app"])
    assert lost not in pool.outcomes


def test_settings_that_an_app_does_not_go_with_or_that_mean_nothing_without_one_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        *(
            ({limit: 1}, f"^{limit}: means nothing without an app")
            for limit in ("max_calls", "max_memory_mib", "max_age")
        ),
        ({"app": APP, "job_user": "dynamic"}, "^job_user: .* for an app"),
        ({"app": APP, "sandbox": "bubblewrap"}, "^sandbox: .* for an app"),
    ]
    for given, said in wrong:
        with pytest.raises(BadInput, match=said):
            Agent(settings(tmp_path, **given), "http://127.0.0.1:1", "t").run()


def test_an_idle_bot_whose_call_is_held_longer_than_its_session_lives_goes_on_with_both(tmp_path: Path) -> None:
    pool = TaskPool(ttl=2)
    with serving(pool, tmp_path, app=APP):
        key = pool.call("add", 1)
        pool.until(lambda: key in pool.outcomes and pool.syncs[-1].wait)
        began, calls = clock.monotonic(), len(pool.syncs)
        # One for each kind of tasks, and neither is being replaced.
        before = eventually(lambda: len(found := marked_processes(tmp_path / "work" / "bot-1")) == 2 and found)
        pool.until(lambda: clock.monotonic() - began > 1.5 * pool.ttl)
        assert len(pool.syncs) == calls
        assert marked_processes(tmp_path / "work" / "bot-1") == before
        assert pool.verdicts(pool.call("nap", 1.2 * pool.ttl)) == ["succeeded"]
    assert len(pool.opened) == 1


# Leases in advance


def test_a_bot_of_short_tasks_takes_some_in_advance_and_an_idle_one_does_not(tmp_path: Path) -> None:
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP, capacity=2):

        def announced() -> bool:
            """A bot that is told of ever more tasks announces more than it runs at once."""
            pool.adds(10 - len(pool.leases))
            return any((sync.capacity or 0) > 2 for sync in pool.syncs)

        pool.until(announced)
        pool.until(lambda: not pool.leases and pool.syncs[-1].wait)
        assert pool.syncs[-1].capacity == 2
        assert {outcome["verdict"] for outcome in pool.outcomes.values()} == {"succeeded"}
        # Tasks that take more units than are free do not run at once.
        both = [pool.value(key) for key in [pool.call("nap", 0.3, units=2) for _ in range(2)]]
        assert abs(both[0] - both[1]) >= 0.29


@pytest.mark.usefixtures("patient")
def test_a_cancelled_lease_that_waits_never_starts_and_a_drain_gives_the_others_back(tmp_path: Path) -> None:
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP, drain_seconds=0.5) as bot:
        files = [tmp_path / name for name in ("held", "cancelled", "given_back")]
        held, cancelled, given_back = (pool.call("hold", str(file)) for file in files)
        pool.until(files[0].exists)
        pool.cancel(cancelled)
        outcome = pool.until(lambda: pool.outcomes.get(cancelled))
        assert (outcome["verdict"], outcome.get("seconds")) == ("stopped", None)
        bot.agent.drain()
        assert bot.end() == 0
    assert (pool.outcomes[held]["verdict"], bytes(pool.output[held])) == ("released", b"asked to end True\n")
    assert pool.outcomes[given_back]["reason"] == "the bot takes no new work"
    assert [file.exists() for file in files] == [True, False, False]


# Calls that wait in the processes that will run them


def test_calls_that_wait_in_a_process_behind_a_longer_one_go_back_to_the_pool(warm: TaskPool, tmp_path: Path) -> None:
    with warm.changed:
        holding = warm.call("hold", str(tmp_path / "held"))
        waiting = warm.adds(4)
    assert warm.verdicts(*waiting) == ["released"] * 4
    assert {warm.outcomes[key]["reason"] for key in waiting} == {"other tasks of the bot take longer than expected"}
    assert not any("active" in warm.reported(key) for key in waiting), "a lease that waits is not acknowledged"
    assert holding not in warm.outcomes


def held_up(pool: TaskPool, done: Path) -> tuple[Key, list[Key]]:
    """Let the bot run a call that stays until there is the file `done`, and give it four that wait behind it."""
    with pool.changed:
        holding = pool.call("hold_until", str(done))
        return holding, pool.adds(4)


@pytest.mark.usefixtures("patient")
def test_a_bot_leaves_waiting_leases_out_of_reports_and_asks_to_fill_its_room(warm: TaskPool, tmp_path: Path) -> None:
    before = len(warm.syncs)
    holding, waiting = held_up(warm, tmp_path / "done")
    warm.until(lambda: any(sync.unlisted == 4 for sync in warm.syncs[before:]))
    (tmp_path / "done").touch()
    assert warm.verdicts(holding, *waiting) == ["succeeded"] * 5
    assert not any("pending" in warm.reported(key) for key in waiting)
    before = len(warm.syncs)
    warm.verdicts(*warm.adds(1))
    assert any(sync.ahead for sync in warm.syncs[before:])
    assert not any(sync.ahead and (sync.capacity or 0) <= 1 for sync in warm.syncs), "without leases in advance"


def test_a_call_of_an_absent_task_goes_back_but_not_if_no_bot_can_tell_its_name(tmp_path: Path) -> None:
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP):
        assert pool.verdicts(pool.call("no_such_task"), pool.call(""), pool.call("x" * 200), pool.call("add", 1)) == [
            "released", "failed", "failed", "succeeded"
        ]  # fmt: skip
    (opened,) = pool.opened
    assert "tests.support.apps.task_app.add" in (opened.tasks or ())


def test_a_bot_with_too_many_tasks_lets_calls_of_others_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MAX_TASKS", 1)
    pool = TaskPool()
    with serving(pool, tmp_path, app=APP):
        assert pool.verdicts(pool.call("no_such_task")) == ["failed"]
    assert pool.opened[0].tasks is None


@pytest.mark.usefixtures("patient")
def test_a_bot_of_tasks_of_30_ms_calls_no_more_often_than_its_tasks_end(warm: TaskPool) -> None:
    before = len(warm.syncs)
    assert warm.verdicts(*(warm.call("nap", 0.03) for _ in range(40))) == ["succeeded"] * 40
    # One for the end of each, one for the beginning, and a few while the bot learns how long they take.
    assert len(warm.syncs) - before <= 2 * 40 + 10


@pytest.mark.usefixtures("patient")
def test_a_bot_forgets_a_lease_that_it_has_left_out_when_its_gateway_says_so(warm: TaskPool, tmp_path: Path) -> None:
    with warm.changed:
        holding = warm.call("hold_until", str(tmp_path / "done"))
        revoked, kept = (warm.call("hold", str(tmp_path / name), 0.0) for name in ("revoked", "kept"))
    warm.until(lambda: warm.syncs[-1].unlisted == 2)
    warm.revoke(revoked)
    warm.until(lambda: warm.syncs[-1].unlisted == 1)
    (tmp_path / "done").touch()
    assert warm.verdicts(holding, kept) == ["succeeded"] * 2
    assert ((tmp_path / "kept").exists(), (tmp_path / "revoked").exists()) == (True, False)


@pytest.mark.usefixtures("patient")
def test_a_process_that_ends_takes_no_call_with_it_that_waits_there(warm: TaskPool, tmp_path: Path) -> None:
    for code, verdict in ((3, "failed"), (0, "error")):
        with warm.changed:
            before = warm.adds(3)
            crashed = warm.call("end_process", code, str(tmp_path / verdict))
            after = warm.adds(6)
        assert warm.verdicts(*before, crashed, *after) == ["succeeded"] * 3 + [verdict] + ["succeeded"] * 6


@pytest.mark.usefixtures("patient")
def test_a_stopped_call_stops_no_other(warm: TaskPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that has to be killed is replaced only after the grace.
    for module in (task_launcher, warm_children):
        monkeypatch.setattr(module, "OVERDUE", MINUTE)
    for task in ("hold", "hold_on"):
        with warm.changed:
            stopped, waiting = warm.call(task, str(tmp_path / task)), warm.adds(4)
        warm.until((tmp_path / task).exists)
        warm.cancel(waiting[1])
        assert warm.verdicts(waiting[1]) == ["stopped"]
        warm.cancel(stopped)
        assert warm.verdicts(stopped, *waiting) == ["stopped", "succeeded", "stopped", "succeeded", "succeeded"]
        assert warm.outcomes[waiting[1]].get("seconds") is None, "it never began"


def test_a_call_that_waits_in_a_process_finds_nothing_of_those_before_it(warm: TaskPool) -> None:
    with warm.changed:
        calls = [("add", 1, 2), ("litter", ""), ("fail", "no luck"), ("litter", "late"), ("surroundings",)]
        keys = [warm.call(task, *args) for _ in range(4) for task, *args in calls]
    assert warm.verdicts(*keys) == ["succeeded", "succeeded", "failed", "succeeded", "succeeded"] * 4
    for place in range(0, 20, 5):
        assert bytes(warm.output[keys[place]]) == b"1 + 2\n"
        assert warm.value(keys[place + 1]) == warm.value(keys[place + 3]) == ["tmp"]
        printed = bytes(warm.output[keys[place + 4]])
        assert printed == b"printed\nlogged\nby a process\nby the descriptor\nTrue True 1\n"


def test_every_call_has_the_variables_of_its_own_attempt_and_payload_and_no_others(warm: TaskPool) -> None:
    own: list[dict[str, str]] = [{}, {"SHOP": "a"}, {"SHOP": "b", "TILL": "1"}, {"TILL": "2"}, {"SHOP": "b"}, {}]
    with warm.changed:
        keys = []
        for _ in range(4):
            keys += [warm.call("variables", "SHOP", "TILL", env=env) for env in own]
            # Its process gives back what waits there behind it.
            warm.call("litter", "")
    for (job, fence), env in zip(keys, own * 4, strict=True):
        assert warm.value((job, fence)) == [env.get("SHOP"), env.get("TILL"), job, str(fence), job]


def test_a_process_keeps_few_pipes_though_many_calls_print_and_a_thread_writes_after_their_end(warm: TaskPool) -> None:
    at_first = warm.value(warm.call("open_files"))
    for turn in range(10):
        with warm.changed:
            late, keys = warm.call("write_later", f"late {turn}\n", 0.02), warm.adds(30)
        assert warm.verdicts(late, *keys) == ["succeeded"] * 31
        assert all(f"{number} + 0\n".encode() in bytes(warm.output[key]) for number, key in enumerate(keys))
    assert warm.value(warm.call("open_files")) <= at_first + MOST_QUEUED + 1


def test_a_call_without_room_in_its_process_costs_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    hand_over = TaskRun.hand_over

    def is_pipe(number: str) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{number}").startswith("pipe:")
        except FileNotFoundError:  # another thread has closed it
            return False

    def count(run: TaskRun, *where: Any) -> bool:
        if sent := hand_over(run, *where):
            return sent
        refused.append(sum(is_pipe(number) for number in os.listdir("/proc/self/fd")))
        return False

    monkeypatch.setattr(TaskRun, "hand_over", count)
    pool, go_on = TaskPool(), tmp_path / "go on"
    with serving(pool, tmp_path, capacity=16, app=APP):
        first = pool.call("hold_up_all", str(go_on))
        with pool.changed:
            keys = [pool.call("count_characters", "x" * 50_000) for _ in range(15)]
        eventually(lambda: len(refused) > 50)
        go_on.touch()
        assert pool.verdicts(first, *keys) == ["succeeded"] * 16
    assert max(refused) <= refused[0] + len(keys), "a pipe for each call that was handed over"
