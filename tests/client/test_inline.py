"""Tasks in the process of a test: what they tell is what a pool tells, and what needs a pool is refused by name."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import get_type_hints

import leasehold
import pytest
from leasehold.jobs import JobRequest
from leasehold.testing import InlineJobs, inline, inline_jobs, running, running_pool

from tests.support.apps import example_app
from tests.support.apps.example_app import an_order, divide, double, greet

pytest_plugins = ["leasehold.testing"]
pool = example_app.pool
_fences: list[list[int]] = []


@pool.task
def come_again() -> list[list[int]]:
    """Ask twice to be run again, and return the attempt and the fence of each run."""
    here = leasehold.current()
    _fences.append([here.attempt, here.fence])
    if len(_fences) < 3:
        raise leasehold.Again(60)
    return _fences


def test_every_example_tells_the_same_in_this_process_and_on_a_pool(
    tmp_path: Path, leasehold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_program", lambda: leasehold)
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    with inline():
        told = example_app.results(here)
    assert told["classes"][-1] == {date(2026, 1, 2): an_order(), date(2026, 1, 3): b"\0"}
    assert len(told["large"][-1]) == 70_000
    graph = told["graph"]
    assert graph["ends"] == [{"ok": "4.5", "typed": True}, {"ok": {"none": None}}]
    assert (graph["chained"], graph["summed"], graph["failing"]) == ([1.0, 0.5], Decimal(16), "TaskFailed")
    assert told["steps"][-1][3] == "ps", "each step ran once"
    with running_pool(bots=0, app="tests.support.apps.example_app:pool"):
        assert told == example_app.results(there)
        assert see_progress(there / "seen")
        assert asyncio.run(await_progress(there / "awaited"))


def see_progress(file: Path) -> bool:
    """Wait for a task that goes on until its progress was seen, by who waits and by who looks at it."""
    job, seen = example_app.report.defer(str(file)), list[leasehold.Progress]()

    def look(id: str, progress: leasehold.Progress) -> None:
        seen.append(progress)
        shown = pool.job(id).progress
        assert shown is not None
        assert shown.at >= progress.at
        file.touch()

    for result in pool.as_completed(job, timeout=example_app.ENDS, on_progress=look):
        result.check()
    return all(each.share == 0.5 and each.text.startswith("step ") for each in seen) and seen != []


async def await_progress(file: Path) -> bool:
    """Do the same in a coroutine."""
    job, seen = await example_app.report.defer_async(str(file)), list[leasehold.Progress]()

    def look(id: str, progress: leasehold.Progress) -> None:
        seen.append(progress)
        file.touch()

    async with leasehold.AsyncPool.from_env() as others:
        async for result in others.as_completed(job, timeout=example_app.ENDS, on_progress=look):
            result.check()
    return seen != []


def test_coroutines_and_both_kinds_of_pool_run_their_tasks_here(leasehold_inline: InlineJobs) -> None:
    async def program() -> list[object]:
        job = await double.defer_async("x")
        async with leasehold.AsyncPool.from_env() as pool:
            gathered = await pool.gather([job, *await greet.batch_async([("Ada",)])])
        return [*gathered, divide.defer(3).result(), double.defer("y").result()]

    first, greeted, half, second = asyncio.run(program())
    assert (greeted, half, [each["text"] for each in (first, second)]) == ("Hello Ada", 1.5, ["xx", "yy"])
    assert [job.attempts for job in leasehold_inline.jobs.values()] == [1] * 4
    assert greet.defer_in(sqlite3.connect(":memory:"), "Bob").result() == "Hello Bob"


@pool.task
def ask_others(names: list[str]) -> list[str]:
    """Let other tasks answer, and oneself be cancelled."""
    here = leasehold.current()
    asked = pool.gather(greet.batch([(name,) for name in names]))
    assert leasehold.current() is here
    if not names:
        pool.cancel(here.job)
        here.heartbeat()
    return asked


def test_progress_is_checked_and_kept_here_too(leasehold_inline: InlineJobs, tmp_path: Path) -> None:
    (file := tmp_path / "seen").touch()
    job = example_app.report.defer(str(file))
    told = pool.job(job).progress
    assert told is not None
    assert (told.share, told.text) == (1.0, "")
    for share, text, reason in ((2, "", "share: is a number from 0 to 1, not 2"), (0, "x" * 201, "text: has 201 ch")):
        with pytest.raises(leasehold.TaskFailed, match=reason):
            tell.defer(share, text).result()


@pool.task
def tell(share: float, text: str) -> None:
    """Tell a progress."""
    leasehold.current().progress(share, text)


def test_a_task_may_defer_others_and_cancel_itself(leasehold_inline: InlineJobs) -> None:
    assert ask_others.defer(["Ada", "Bob"]).result() == ["Hello Ada", "Hello Bob"]
    assert ask_others.defer([]).state() == "cancelled"


def test_what_waits_for_a_time_runs_when_the_test_says_so_and_its_equals_join_it(leasehold_inline: InlineJobs) -> None:
    later, soon = greet.after(3600).defer("Ada"), greet.after(60).defer("Bob")
    assert (later.state(), greet.after(3600).defer("Ada").created) == ("queued", False)
    past = greet.at(datetime(2020, 1, 1, tzinfo=UTC)).defer("Eve")
    with pytest.raises(leasehold.LeaseholdError, match="waits for its time"):
        soon.result()
    (dropped := greet.after(9).defer("Mallory")).cancel()
    assert leasehold_inline.run_delayed() == 2
    assert [job.result() for job in (later, soon, past)] == ["Hello Ada", "Hello Bob", "Hello Eve"]
    ended = [leasehold_inline.jobs[job.id].finished_at for job in (past, dropped, soon, later)]
    assert ended == sorted(ended)
    long = pool.graph("long")
    first = long.add(divide, 8)
    for _ in range(400):
        first = long.add(divide, 8, after=[first])
    assert long.submit().wait().all_succeeded, "a long chain needs no deep stack"
    chained = leasehold.chain(divide.after(60).s(8), divide.s(2)).defer()
    with pytest.raises(leasehold.LeaseholdError, match="waits for its time"):
        chained.result()
    assert (leasehold_inline.run_delayed(), chained.result()) == (1, 2.0)


def test_every_option_of_a_task_is_known_here() -> None:
    """A field of a request that is new has to be heeded, to be without effect, or to need a pool."""
    needs_a_pool = {
        *("env", "units", "resources", "locality_hint", "batch_key", "service_level", "locks", "resource_class"),
        *("model", "estimated_cost", "preferred_properties", "prefer_seconds", "preferred_hours", "preferred_zone"),
    }
    known = inline_jobs._HEEDED | inline_jobs._WITHOUT_EFFECT | needs_a_pool
    assert known == set(get_type_hints(JobRequest))


NEEDS_A_POOL: list[tuple[Callable[[], object], str]] = [
    (lambda: divide.using(locks=["till"]).defer(1), "locks"),
    (lambda: divide.using(units=2).defer(1), "units"),
    (lambda: divide.using(properties={"gpu": "a100"}).defer(1), "properties, such as 'gpu'"),
    (lambda: pool.submit(["true"]), "a command, which a bot runs; `inline` runs tasks"),
    (lambda: pool.explain(divide.defer(1)), "explain"),
    (lambda: pool.output(divide.defer(1)), "the output of a job"),
    (lambda: list(pool.jobs()), "a list of jobs"),
    (lambda: pool.client.set_quota("default", "shop", maximum=1), "quotas"),
    (lambda: pool.client.status(), "GET /v1/status"),
]


def test_what_needs_a_pool_is_refused_by_name_and_runs_if_that_is_ignored(leasehold_inline: InlineJobs) -> None:
    for call, feature in NEEDS_A_POOL:
        with pytest.raises(leasehold.NotInline) as caught:
            call()
        assert caught.value.feature == feature
        ignorable = feature.partition(",")[0]
        hint = (
            f"; inline(ignore=['{ignorable}']) passes it over" if ignorable in ("locks", "units", "properties") else ""
        )
        assert str(caught.value) == f"needs a pool, which inline() is not: {feature}{hint}"
    with inline(ignore=["locks", "properties"]):
        assert divide.using(locks=["till"], properties={"gpu": "a100"}).defer(1).result() == 0.5


@pytest.mark.usefixtures("no_pool_of_our_own")
def test_it_starts_without_a_pool_and_without_pytest_and_ends_with_its_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEASEHOLD_DATA", str(tmp_path))  # there may be a pool in the place where one is by default
    program = (
        "import sys, time, leasehold.testing as t\nfrom tests.support.apps.example_app import divide\n"
        "b = time.monotonic()\n"
        "with t.inline(): print(divide.defer(4).result(), time.monotonic() - b < 0.5, 'pytest' in sys.modules)\n"
        "try: divide.defer(4)\nexcept Exception as error: print(type(error).__name__)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["2.0 True False", "BadInput"]


def test_equal_calls_are_kept_refused_replaced_and_put_off_as_in_a_pool() -> None:
    with inline() as jobs:
        kept = greet.using(unique_for=60)
        assert kept.defer("a").id == kept.defer("a").id
        with pytest.raises(leasehold.Conflict, match="which is succeeded"):
            greet.using(on_conflict="refuse").defer("a")
        late = greet.using(unique=lambda _: "one", debounce=30, debounce_max=60)
        first, second = late.defer("b"), late.defer("c")
        assert (first.id, second.created, jobs.run_delayed(), first.result()) == (second.id, False, 1, "Hello c")
    with pytest.raises(leasehold.BadInput, match="debounce: means nothing without unique"):
        greet.using(unique=False, debounce=5).defer("a")


def test_what_tasks_keep_elsewhere_is_found_by_a_name_of_its_own() -> None:
    ids = []
    for _ in range(2):
        with inline():
            ids.append(greet.defer("a").id)
    assert len(set(ids)) == 2
    with inline():
        assert come_again.defer().result() == [[1, 1], [1, 2], [1, 3]]


def test_a_list_of_calls_with_a_refused_one_is_not_submitted() -> None:
    with inline() as jobs:
        greet.using(key="k").defer("a")
        before = dict(jobs.jobs)
        with pytest.raises(leasehold.Conflict, match="was used before"):
            jobs.call("POST", "/v1/jobs", body={"jobs": [greet.using(key=key).request(key) for key in ("new", "k")]})
        assert jobs.jobs == before
        assert greet.using(key="new").defer("b").result() == "Hello b"
