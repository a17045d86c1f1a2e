"""Loops run at once, rest as long as they are asked to, wake up, survive errors and stop."""

import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from leasehold.errors import NotReady
from prometheus_client import REGISTRY
from psycopg.errors import LockNotAvailable, TooManyConnections
from structlog.testing import capture_logs

from assigner import loops as loops_module
from assigner.loops import ERROR_DELAY_MIN, SHORT, Again, Loop, More
from schema.postgres.engine import Database
from schema.postgres.notify import WAKE, Signal, SignalGroup, Wakeups
from tests.support.patience import MINUTE, eventually, wait_instead

LONG = 3600.0


class Work:
    """A `run_once` whose runs a test sees and whose delays it decides."""

    def __init__(self, *delays: float, then: float = LONG) -> None:
        self.delays = list(delays)
        self.then = then
        self.runs: queue.Queue[float] = queue.Queue()

    def __call__(self) -> float:
        delay = self.delays.pop(0) if self.delays else self.then
        self.runs.put(delay)
        return delay

    def expect(self, count: int) -> list[float]:
        return [self.runs.get(timeout=MINUTE) for _ in range(count)]

    def expect_none(self) -> None:
        with pytest.raises(queue.Empty):
            self.runs.get(timeout=0.05)


@pytest.fixture
def loops(chance: random.Random) -> Iterator[Callable[..., Loop]]:
    """Makes loops and stops them in the end."""
    made: list[Loop] = []

    def make(run_once: Callable[[], float], **options) -> Loop:
        loop = Loop(f"test-{len(made)}", run_once, chance=chance, **options)
        made.append(loop)
        return loop

    yield make
    assert all(loop.stop(MINUTE) for loop in made)
    assert not any(loop.running for loop in made)


def value(name: str, loop: Loop) -> float:
    return REGISTRY.get_sample_value(name, {"loop": loop.name}) or 0.0


def test_a_loop_runs_at_once_and_again_after_the_delay_it_returned(loops: Callable[..., Loop]) -> None:
    work = Work(0.0, 0.001, 0.05)
    loops(work).start()
    assert work.expect(4) == [0.0, 0.001, 0.05, LONG]
    work.expect_none()


def test_a_wake_up_or_a_signal_ends_a_long_rest(loops: Callable[..., Loop]) -> None:
    work, signal = Work(), Signal()
    loop = loops(work, signal=signal)
    loop.start()
    for wake_up in (loop.wake, signal.set, loop.wake):
        work.expect(1)
        wake_up()
    work.expect(1)


def test_a_wake_up_during_a_run_causes_one_more_run(loops: Callable[..., Loop]) -> None:
    entered, go_on, runs = threading.Event(), threading.Event(), []

    def run_once() -> float:
        runs.append(None)
        entered.set()
        assert go_on.wait(MINUTE)
        second.set() if len(runs) == 2 else None
        return LONG

    second = threading.Event()
    loop = loops(run_once)
    loop.start()
    assert entered.wait(MINUTE)
    loop.wake()
    loop.wake()
    go_on.set()
    assert second.wait(MINUTE)
    assert len(runs) == 2


def test_start_and_stop_are_idempotent_and_a_stopped_loop_may_start_again(loops: Callable[..., Loop]) -> None:
    work = Work()
    loop = loops(work)
    assert loop.stop(MINUTE)
    for _ in range(2):
        loop.start()
        loop.start()
        work.expect(1)
        work.expect_none()
        assert loop.stop(MINUTE)
        assert loop.stop(MINUTE)
        assert not loop.running


def test_stop_waits_for_the_run_that_is_under_way(loops: Callable[..., Loop]) -> None:
    entered, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def run_once() -> float:
        entered.set()
        assert go_on.wait(MINUTE)
        finished.set()
        return 0.0

    loop = loops(run_once)
    loop.start()
    assert entered.wait(MINUTE)
    assert not loop.stop(0.01)
    assert loop.running
    go_on.set()
    assert loop.stop(MINUTE)
    assert finished.is_set()


def test_an_error_is_logged_with_the_retry_delay_and_the_loop_goes_on(loops: Callable[..., Loop]) -> None:
    work, failed = Work(), []

    away = NotReady("the database cannot be reached")
    away.__cause__ = TooManyConnections("FATAL: too many connections\nHINT: wait")

    def run_once() -> float:
        if len(failed) < 3:
            failed.append(None)
            raise (
                away,
                RuntimeError("a bug"),
                LockNotAvailable("canceling statement due to lock timeout"),
            )[len(failed) - 1]
        return work()

    with capture_logs() as logs:
        loop = loops(run_once, on_error_delay=0.01)
        loop.start()
        work.expect(1)
    assert [entry["in_a_row"] for entry in logs] == [1, 2, 3]
    told = "the database cannot be reached: FATAL: too many connections"
    assert [entry["error"] for entry in logs] == [told, "RuntimeError", "LockNotAvailable"]
    assert [entry["exc_info"] for entry in logs] == [False, True, True]
    for entry, whole in zip(logs, (0.01, 0.02, 0.04), strict=True):
        assert whole / 2 - 0.001 <= entry["retry_in"] <= whole
    assert value("leasehold_loop_errors_total", loop) >= 3


@pytest.mark.parametrize(
    ("usual", "longest"), [(0.01, 2.01), (1.0, 3.0), (20.0, 22.0), (29.0, 30.0), (3600.0, 30.0)], ids=str
)
def test_errors_in_a_row_delay_a_loop_by_at_most_two_seconds_more_than_usual_and_by_30_s_at_most(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch, usual: float, longest: float
) -> None:
    away, waits = [True], []

    def run_once() -> float:
        if away[0]:
            raise NotReady("the database cannot be reached")
        return usual

    waited: list[float] = []
    wait_instead(monkeypatch, "wait", lambda _event, seconds: waited.append(seconds))
    loop = Loop("test", run_once, chance=chance, on_error_delay=usual)

    def run() -> None:
        waited.clear()
        loop._once()
        waits.append(sum(waited))

    with capture_logs():
        for _ in range(40):
            run()
        assert waits[0] <= usual
        assert all(longest / 2 <= wait <= longest for wait in waits[12:])
        assert max(waits) <= longest
        away[0] = False
        run()
        away[0] = True
        run()
    assert waits[40:41] == [0.0]
    assert 0.0 < waits[41] <= usual, "it starts anew after a success"


def test_a_wake_up_ends_the_wait_after_an_error_but_not_the_first_half_second_of_it(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[object] = []
    signal = Signal()

    def wait(event: threading.Event, seconds: float) -> bool:
        story.append((seconds, event.is_set()))
        return event.is_set()

    @contextmanager
    def idle() -> Iterator[None]:
        story.append("idle")
        yield

    def run_once() -> float:
        signal.set()
        raise NotReady("the database cannot be reached")

    wait_instead(monkeypatch, "wait", wait)
    loop = Loop("test", run_once, chance=chance, signal=signal, idle=idle, on_error_delay=20.0)
    with capture_logs() as logs:
        assert loop._once() == 0.0
    shortest = (ERROR_DELAY_MIN, False)
    assert story == [shortest, "idle", (pytest.approx(logs[0]["retry_in"] - ERROR_DELAY_MIN, abs=0.001), True)]


def test_stop_ends_the_wait_after_an_error(loops: Callable[..., Loop]) -> None:
    failed: queue.Queue[None] = queue.Queue()

    def run_once() -> float:
        failed.put(None)
        raise RuntimeError("on purpose")

    with capture_logs():
        loop = loops(run_once, on_error_delay=20.0)
        loop.start()
        failed.get(timeout=MINUTE)
        assert loop.stop(MINUTE)


def telling(work: Work) -> tuple[queue.Queue[str], dict[str, Any]]:
    """What a loop does, in words, and the arguments that make it tell."""
    story: queue.Queue[str] = queue.Queue()

    def run_once() -> float:
        story.put("look")
        return work()

    @contextmanager
    def idle() -> Iterator[None]:
        story.put("raise")
        yield
        story.put("lower")

    return story, {"run_once": run_once, "idle": idle}


def test_the_idle_flag_is_up_while_it_sleeps_and_it_looks_once_more_after_raising_it(
    loops: Callable[..., Loop],
) -> None:
    story, told_by = telling(Work(LONG, LONG, SHORT, LONG))
    loop = loops(**told_by)
    loop.start()
    assert [story.get(timeout=MINUTE) for _ in range(3)] == ["look", "raise", "look"]
    loop.wake()
    told = [story.get(timeout=MINUTE) for _ in range(2)]
    assert told == ["look", "look"], "busy after the wake-up, then idle again, and marked all the while"
    assert loop.stop(MINUTE)
    assert story.get(timeout=MINUTE) == "lower"


def test_who_is_woken_in_the_pause_after_work_is_busy_and_lowers_the_idle_flag(loops: Callable[..., Loop]) -> None:
    story, told_by = telling(Work(LONG, LONG, SHORT, LONG))
    signal, run_once = Signal(), told_by["run_once"]

    def woken_in_its_pause() -> float:
        delay = run_once()
        if delay == SHORT:
            signal.set()
        return delay

    loop = loops(woken_in_its_pause, signal=signal, idle=told_by["idle"])
    loop.start()
    assert [story.get(timeout=MINUTE) for _ in range(3)] == ["look", "raise", "look"]
    loop.wake()
    told = [story.get(timeout=MINUTE) for _ in range(5)]
    assert told == ["look", "lower", "look", "raise", "look"]


def test_who_comes_again_for_its_turn_does_not_ask_to_be_woken(loops: Callable[..., Loop]) -> None:
    story, told_by = telling(Work(Again(2 * SHORT), LONG))
    loops(**told_by).start()
    assert [story.get(timeout=MINUTE) for _ in range(4)] == ["look", "look", "raise", "look"]


def test_work_committed_between_the_last_look_and_the_flag_is_found(
    loops: Callable[..., Loop], database: Database
) -> None:
    """The sender saw no flag and sent nothing: only the look after the flag can find it."""
    wakeups = Wakeups(database)
    wakeups.start()
    eventually(lambda: wakeups.connected)
    committed, found, sent = threading.Event(), threading.Event(), []

    def run_once() -> float:
        found.set() if committed.is_set() else None
        return LONG

    @contextmanager
    def idle() -> Iterator[None]:
        if not committed.is_set():
            wake_jobs = {"topic": "jobs", "keys": ""}
            sent.append(database.run(lambda connection: connection.execute(WAKE, wake_jobs).scalar_one()))
            committed.set()
        with wakeups.idle("jobs"):
            yield

    try:
        loops(run_once, signal=wakeups.signal("jobs"), idle=idle).start()
        assert found.wait(MINUTE)
        assert sent == [False]
    finally:
        wakeups.stop()


# Loops of a group do the same work, and a wake-up wakes one of them.


class Crew:
    """Loops of one group that take the work of a queue, one piece in each run, and tell who ran."""

    def __init__(self, loops: Callable[..., Loop], count: int) -> None:
        self.work: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ran: queue.Queue[int] = queue.Queue()
        self.took: queue.Queue[str] = queue.Queue()
        self.group = SignalGroup()
        self.signals = [self.group.signal() for _ in range(count)]
        self.failures: list[BaseException] = []
        self.loops = [
            loops(lambda nth=nth: self._run_once(nth), signal=signal, on_error_delay=LONG)
            for nth, signal in enumerate(self.signals)
        ]
        for loop in self.loops:
            loop.start()
        self.all_rest()

    def all_rest(self) -> None:
        eventually(lambda: len(self.group._resting) == len(self.signals))
        while not self.ran.empty():
            self.ran.get()

    def given(self, *pieces: str) -> None:
        """There is this work, and one of them is woken."""
        for piece in pieces:
            self.work.put(piece)
        self.group.wake()

    def taken(self, count: int = 1) -> set[str]:
        return {self.took.get(timeout=MINUTE) for _ in range(count)}

    def _run_once(self, nth: int) -> float:
        self.ran.put(nth)
        if self.failures:
            raise self.failures.pop()
        try:
            self.took.put(self.work.get_nowait())
        except queue.Empty:
            return LONG
        return LONG if self.work.empty() else More(LONG)


def test_a_wake_up_runs_one_loop_of_a_group(loops: Callable[..., Loop]) -> None:
    crew = Crew(loops, 3)
    for _ in range(5):
        crew.given("job")
        assert crew.taken() == {"job"}
        eventually(lambda: len(crew.group._resting) == 3)
        assert crew.ran.qsize() == 1
        crew.all_rest()


def test_a_loop_that_leaves_work_wakes_the_next_one_until_all_is_taken(loops: Callable[..., Loop]) -> None:
    crew = Crew(loops, 3)
    crew.given("a", "b", "c")
    assert crew.taken(3) == {"a", "b", "c"}


@pytest.mark.parametrize("failure", [NotReady("the database cannot be reached"), SystemExit()], ids=["fails", "dies"])
def test_a_loop_that_fails_or_dies_leaves_what_it_was_woken_for_to_the_next_one(
    loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    crew = Crew(loops, 2)
    crew.failures.append(failure)
    with capture_logs():
        crew.given("job")
        assert crew.taken() == {"job"}


def test_loops_of_a_group_that_all_fail_do_not_keep_waking_each_other(
    loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assigner.loops.ERROR_DELAY_MAX", LONG)
    crew = Crew(loops, 2)
    crew.failures += [NotReady("the database cannot be reached") for _ in range(100)]
    with capture_logs() as logs:
        for failures in (2, 3):
            crew.given()
            eventually(lambda: len(logs) == failures)  # noqa: B023
            eventually(lambda: len(crew.group._resting) == 2)
    assert [entry["in_a_row"] for entry in logs] == [1, 1, 2]


def test_a_loop_that_ends_when_it_is_chosen_hands_the_wake_up_on(loops: Callable[..., Loop]) -> None:
    crew = Crew(loops, 2)
    chosen = crew.loops[crew.signals.index(list(crew.group._resting)[-1])]
    # It is asked to stop first, so that it never runs for the wake-up which chooses it.
    chosen._stopping.set()
    crew.given("job")
    assert crew.taken() == {"job"}
    assert chosen.stop(MINUTE)


def test_cycles_and_age_are_metrics(loops: Callable[..., Loop]) -> None:
    work = Work()
    loop = loops(work)
    before = value("leasehold_loop_cycles_total", loop)
    loop.start()
    work.expect(1)
    loop.wake()
    work.expect(1)
    assert 0.0 <= value("leasehold_loop_age_seconds", loop) < MINUTE
    assert loop.stop(MINUTE)
    assert value("leasehold_loop_cycles_total", loop) == before + 2
    assert REGISTRY.get_sample_value("leasehold_loop_age_seconds", {"loop": loop.name}) is None


def test_a_loop_that_stands_still_is_named_with_its_place_until_it_goes_on(
    loops: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops_module, "STANDS", 0.1)
    monkeypatch.setattr(loops_module, "LOOK", 0.02)
    monkeypatch.setattr(loops_module, "_watch", loops_module._Watch())
    held, others = threading.Event(), Work()

    def stand() -> float:
        held.wait()
        return LONG

    with capture_logs() as told:
        loops(others).start()
        standing = loops(stand)
        standing.start()
        eventually(lambda: told)
        assert loops_module.standing() == [standing.name]
        assert value("leasehold_loop_run_seconds", standing) > 0.1
        held.set()
        eventually(lambda: len(told) == 2)
    assert [(each["event"], each["loop"]) for each in told] == [
        ("a loop stands still", standing.name),
        ("a loop goes on", standing.name),
    ]
    assert "threading.py:" in told[0]["at"]
    assert loops_module.standing() == []
