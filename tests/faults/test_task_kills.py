"""Tasks whose effects happen once although their processes are killed and stopped, and the checker of that."""

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from leasehold.errors import TaskFailed

from ops.chaos import execution
from ops.chaos.execution import Attempt, Line
from ops.chaos.faults.kills import send
from ops.chaos.members import ROOT, Member
from ops.chaos.tasks import checker, once
from ops.chaos.tasks.checker import Begun, Call, Effect, Kind, Stop, Violation
from ops.chaos.tasks.killers import KINDS, Killers, everything
from ops.chaos.tasks.pool import TaskPool, task_pool
from ops.chaos.tasks.run import drawn, run, wait_for_end
from schema import clock
from tests.support.agents import NEEDS_PROC
from tests.support.patience import eventually

#: `python -m ops.chaos.tasks.run --seed …` takes longer looks.
SEED = 7


def lines_of(pool: TaskPool, *words: str) -> list[Line]:
    return [line for line in execution.read(pool.execution_log) if line.what in words]


def stop_past_its_session(pool: TaskPool, call: Call) -> None:
    """Stop the bot of a call until it has run elsewhere; then let its task go on before anybody can kill it."""
    pool.submit([call])
    # Between two steps: a process that is stopped inside a transaction loses its connection first.
    with pool.effects() as connection:
        eventually(lambda: connection.execute("SELECT FROM effects").fetchone() is not None)
    first = lines_of(pool, "start")[0]
    (bot,) = [bot for bot in pool.bots if bot.name == first.bot]
    parts = bot.parts()
    stopped, began = everything(bot, parts), clock.monotonic()
    send(stopped, signal.SIGSTOP)
    try:
        assert wait_for_end(pool) == []
        send(parts.commands, signal.SIGCONT)
        eventually(lambda: [line for line in lines_of(pool, "end", "superseded") if line.fence == first.fence])
    finally:
        send(stopped, signal.SIGCONT)
    pool.stops.append(Stop(bot.name, began, clock.monotonic()))


@NEEDS_PROC
@pytest.mark.long
@pytest.mark.usefixtures("forked_members")
def test_every_effect_of_tasks_whose_processes_are_stopped_and_killed_happens_once() -> None:
    with task_pool(bots=3) as pool:
        stop_past_its_session(pool, Call((5, 6), pause=3.0))
        report = run(pool, drawn(random.Random(SEED), 25), killers=4, seed=SEED)
    print(report.line())
    assert report.violations == []
    assert report.counts["tasks"] == 26
    assert report.counts["refused by the fence"] >= 1


def test_the_tasks_of_the_run_write_their_effects_as_the_documents_recommend() -> None:
    page = (ROOT / "ops" / "docs" / "tasks.md").read_text()
    assert f"<!-- file: once.py -->\n```python\n{Path(once.__file__).read_text()}```\n" in page


# The checker


CALLS = {"job": Call((5, 6), pause=0.0)}
SOUND = [Effect(2, "job", 1, 1, 5), Effect(4, "job", 3, 2, 6)]
BEGUN = [Begun(1, "job", 1), Begun(3, "job", 3)]


def kinds(found: Sequence[Violation]) -> list[Kind]:
    return [violation.kind for violation in found]


@pytest.mark.parametrize(
    ("effects", "found"),
    [
        (SOUND, []),
        (SOUND[:1], [Kind.LOST]),
        ([*SOUND, Effect(5, "job", 3, 2, 6)], [Kind.DOUBLED]),
        ([SOUND[0], Effect(4, "job", 3, 2, 60)], [Kind.WRONG]),
        ([*SOUND, Effect(5, "job", 3, 3, 1)], [Kind.WRONG]),
        ([SOUND[0], Effect(4, "job", 1, 2, 6)], [Kind.LATE]),
    ],
    ids=["sound", "lost", "doubled", "wrong", "unasked", "late"],
)
def test_effects_are_compared_with_the_calls(effects: list[Effect], found: list[Kind]) -> None:
    assert kinds(list(checker.of_effects(CALLS, effects, BEGUN, set()))) == found


def test_a_call_that_was_given_up_may_miss_effects_and_may_not_double_them() -> None:
    assert list(checker.of_effects(CALLS, [], [], {"job"})) == []
    doubled = [Effect(2, "job", 1, 1, 5), Effect(3, "job", 1, 1, 5)]
    assert kinds(list(checker.of_effects(CALLS, doubled, BEGUN[:1], {"job"}))) == [Kind.DOUBLED]


@pytest.mark.parametrize(
    ("value", "state", "found"),
    [
        (11, ("succeeded", ""), []),
        (12, ("succeeded", ""), [Kind.WRONG]),
        (TaskFailed("job", task="pay", state="failed", message="no"), ("failed", "exit code 1"), [Kind.WRONG]),
        (None, ("dead", "its bot was lost three times"), []),
        (None, ("dead", "anything else"), [Kind.WRONG]),
    ],
)
def test_results_are_compared_with_the_calls(value: object, state: tuple[str, str], found: list[Kind]) -> None:
    assert kinds(list(checker.of_results(CALLS, {"job": value}, {"job": state}))) == found


def test_only_the_stop_of_its_whole_bot_explains_an_attempt_beside_a_later_one() -> None:
    def line(place: int, fence: int, at: float) -> Line:
        return Line(place, "beat", "job", fence, 1, f"bot-{fence}", 1, at)

    older = Attempt("job", 1, line(0, 1, 10.0), line(2, 1, 20.0), 1, ended=False)
    newer = Attempt("job", 3, line(1, 3, 15.0), line(3, 3, 21.0), 1, ended=True)
    found = checker.overlaps({"job": [older, newer]})
    assert found == [(older, newer)]
    assert list(checker.of_overlaps(found, [Stop("bot-1", 9.0, 19.0)])) == []
    for stop in (Stop("bot-3", 9.0, 19.0), Stop("bot-1", 9.0, 10.0), Stop("bot-1", 20.5, 30.0)):
        assert kinds(list(checker.of_overlaps(found, [stop]))) == [Kind.OVERLAP]


def test_a_process_that_is_not_there_is_not_hit() -> None:
    bot = Member("bot", None, [], {}, None)  # type: ignore[arg-type]
    pool = TaskPool(None, None, [bot], None, None, None)  # type: ignore[arg-type]
    killing = Killers(pool, clients=0, seed=SEED)
    assert not any(killing.hit(kind, bot, random.Random(SEED)) for kind in KINDS)
