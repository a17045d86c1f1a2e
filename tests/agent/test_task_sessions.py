"""Tasks on a bot with a gateway whose answers the test decides: sessions that end, limits, leases in advance."""

import itertools
import json
import os
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
from tests.support.agents import NEEDS_PROC, serving, settings
from tests.support.agents import Pool as AgentPool
from tests.support.http import Answer, ReceivedRequest, problem
from tests.support.patience import MINUTE, eventually

pytestmark = NEEDS_PROC


def grant(
    pool: AgentPool, task: str, *args: Any, job: str, env: dict[str, str] | None = None, **more: Any
) -> tuple[str, int]:
    command = ["leasehold-task", "tests.support.apps.task_app:pool", f"tests.support.apps.task_app.{task}"]
    payload = {"command": command, "stdin": json.dumps({"args": args, "kwargs": {}}), "env": env or {}}
    return pool.grant(job=job, payload=payload, **more)


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


def test_a_task_that_goes_on_keeps_no_other_process_from_being_replaced(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)
    numbers = itertools.count()

    def process(task: str) -> int:
        key = grant(pool, task, 0, job=f"job-{next(numbers)}")
        return int(json.loads(pool.until(lambda: pool.outcomes.get(key))["result"])["ok"])

    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool", capacity=2, max_calls=2):
        grant(pool, "rest", str(tmp_path / "resting"), job="long")
        eventually((tmp_path / "resting").exists)
        for task in ("keep_beside_others", "keep"):
            first = process(task)
            eventually(lambda task=task, first=first: process(task) != first, every=0.05)


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


@pytest.mark.parametrize("limit", ["max_calls", "max_memory_mib", "max_age"])
def test_limits_of_processes_that_a_bot_without_an_app_does_not_have_are_refused(tmp_path: Path, limit: str) -> None:
    with pytest.raises(BadInput, match=f"^{limit}: means nothing without an app"):
        Agent(settings(tmp_path, **{limit: 1}), "http://127.0.0.1:1", "t").run()


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


@pytest.mark.parametrize("known", [True, False])
def test_a_call_of_a_task_that_is_not_there_goes_back_if_the_gateway_keeps_it_from_this_bot(
    tmp_path: Path, known: bool
) -> None:
    pool = AgentPool(sync_in=0.1)
    pool.tasks = known
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        (told,) = verdicts(pool, [grant(pool, "no_such_task", job="unknown")])
        assert told == ("released" if known else "failed")
        names = pool.opened[0].tasks
        assert names is not None
        assert "tests.support.apps.task_app.add" in names


def test_a_bot_does_not_tell_an_older_gateway_of_calls_whose_task_is_not_there(tmp_path: Path) -> None:
    pool = AgentPool(sync_in=0.1)

    def older(request: ReceivedRequest) -> Answer | None:
        if "unknown_task" not in json.dumps(request.body):
            return None
        return problem(400, "leases.0.outcome.unknown_task: is not a field", field="leases.0.outcome.unknown_task")

    pool.instead = older
    with serving(pool, tmp_path, app="tests.support.apps.task_app:pool"):
        assert verdicts(pool, [grant(pool, "no_such_task", job="first")]) == ["released"]
        assert verdicts(pool, [grant(pool, "no_such_task", job="second")]) == ["failed"]
        assert verdicts(pool, [grant(pool, "add", 1, job="third")]) == ["succeeded"]
    assert len(pool.opened) == 1


def test_a_call_that_nothing_would_keep_from_this_bot_fails_here_instead_of_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = AgentPool(sync_in=0.1)
    command = ["leasehold-task", "tests.support.apps.task_app:pool", ""]
    with serving(pool, tmp_path / "told", app="tests.support.apps.task_app:pool"):
        # No bot can tell tasks of such names.
        nameless = pool.grant(job="nameless", payload={"command": command, "stdin": '{"args": [], "kwargs": {}}'})
        long = grant(pool, "x" * 200, job="long")
        assert verdicts(pool, [nameless, long]) == ["failed"] * 2
    # A bot with too many tasks to tell them.
    monkeypatch.setattr(agent, "MAX_TASKS", 1)
    with serving(pool, tmp_path / "not_told", app="tests.support.apps.task_app:pool"):
        assert verdicts(pool, [grant(pool, "no_such_task", job="unknown")]) == ["failed"]
    assert [opened.tasks is None for opened in pool.opened] == [False, True]


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


@pytest.mark.usefixtures("patient")
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
