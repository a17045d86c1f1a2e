"""An app of examples: each is run in the process of a test and on a pool, and both must tell the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import leasehold

pool = leasehold.Pool.from_env(app="examples")
#: Seconds within which a job ends on a busy machine.
ENDS = 120.0


@pool.task
def divide(left: float, right: float = 2.0) -> float:
    """Divide two numbers."""
    return left / right


@pool.task
async def double(text: str) -> dict[str, Any]:
    """Tell a text twice, and what the attempt knows of itself."""
    here = leasehold.current()
    return {"text": 2 * text, "attempt": here.attempt, "instance": here.instance, "left": here.seconds_left}


@pool.task(retries=2)
def come_through(file: str, failures: int) -> list[Any]:
    """Fail so many times, then tell what earlier attempts have left."""
    tries = Path(file)
    tries.write_text(f"{tries.read_text() if tries.exists() else ''}x")
    before = leasehold.current().last_checkpoint
    leasehold.current().checkpoint({"seen": tries.read_text()})
    if len(tries.read_text()) <= failures:
        raise OSError("not yet")
    return [before, leasehold.current().attempt]


@pool.task(unique=True)
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello {name}"


@pool.task
def give_up() -> None:
    """End as if asked to."""
    raise leasehold.Cancelled


@pool.task
def make(size: int) -> Any:
    """Return what cannot be stored: a large text, or a set."""
    return "x" * size if size else {1}


def ending(job: "leasehold.TaskJob[Any]") -> tuple[Any, ...]:
    """Tell the end of a job."""
    state = job.wait(ENDS)
    shown, result = pool.job(job), pool.result(job)
    told = (state, shown.attempts, result.exit_code, result.reason, shown.label, shown.is_final)
    try:
        return (*told, job.result(ENDS))
    except leasehold.TaskFailed as failed:
        return (*told, failed.kind, failed.message, failed.traceback.splitlines()[-1:])


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """Tell how a call is refused."""
    try:
        call()
    except (leasehold.LeaseholdError, TypeError) as error:
        return type(error).__name__, str(error)
    raise AssertionError("it was not refused")


def results(scratch: Path) -> dict[str, Any]:
    """Run each example and tell what came of it."""
    greeted = greet.batch([("Ada",), ("Ada",), {"name": "Bob"}])
    keyed = [divide.using(key="half", label="sums").defer(1.0) for _ in range(2)]
    ended = {job.id: job for job in greeted}
    first, second = str(scratch / "first"), str(scratch / "second")
    return {
        "value": ending(divide.defer(7, right=2)),
        "coroutine": ending(double.using(timeout=9000.0, instance="shop").defer("ab"))[:6],
        "error": ending(divide.defer(1, 0)),
        "later": ending(come_through.defer(first, 2)),
        "never": ending(come_through.defer(second, 9)),
        "gave up": ending(give_up.defer()),
        "too large": ending(make.defer(70_000)),
        "no JSON": ending(make.defer(0)),
        "joined": [job.created for job in greeted],
        "gathered": pool.gather(greeted, timeout=ENDS),
        "completed": sorted(ended[result.id].result() for result in pool.as_completed(greeted, timeout=ENDS)),
        "repeated": (keyed[0].id == keyed[1].id, [job.created for job in keyed], ending(keyed[0])),
        "key of another": refused(lambda: divide.using(key="half").defer(2.0)),
        "wrong call": refused(lambda: divide.defer(1, 2, 3)),  # type: ignore[call-arg]
        "no argument": refused(lambda: divide.defer({1, 2})),  # type: ignore[arg-type]
        "cancelled late": refused(keyed[0].cancel)[0],
        "no such job": refused(lambda: pool.result("0196f0a0-0000-7000-8000-000000000001"))[0],
        "schedules": [(each.name, each.outcome) for _ in range(2) for each in pool.apply_schedules()][1:],
        "ran": ending(_of(greet, pool.client.schedules.run_now("morning"))),
    }


def _of(task: Any, job: leasehold.Job) -> "leasehold.TaskJob[Any]":
    return leasehold.TaskJob(job.id, job.created, task=task)


pool.periodic("0 6 * * *", name="morning", args=("all",), overlap="skip")(greet.using(unique=False))
