"""An app of examples: each is run in the process of a test and on a pool, and both must tell the same."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import leasehold
from pydantic import BaseModel

#: Shared by the test and its bots, whose processes have a directory of their own for temporary files.
KEPT = Path("/tmp") / f"leasehold-kept-{os.getuid()}"


class ReadOnce(leasehold.ResultFiles):
    """Files that are gone once they are read, so that a test leaves none."""

    def keep(self, name: str, document: bytes) -> str:
        self.directory.mkdir(exist_ok=True)
        return super().keep(name, document)

    def fetch(self, reference: Any) -> bytes:
        found = super().fetch(reference)
        (self.directory / reference).unlink()
        return found


pool = leasehold.Pool.from_env(app="examples", large_results=ReadOnce(KEPT))
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


@pool.task(retries=2)
async def go_on(file: str) -> list[Any]:
    """Fail after each of two recorded steps, then tell what they have returned, and how often each ran."""
    log = Path(file)
    here = leasehold.current()

    def price(cents: int) -> Decimal:
        log.write_text(log.read_text() + "p")
        return Decimal(cents) / 100

    async def send(to: str) -> tuple[str, int]:
        log.write_text(log.read_text() + "s")
        return to, here.attempt

    if here.attempt == 1:
        log.write_text("")
    cost = leasehold.step("price", price, 250)
    here.checkpoint({"attempt": here.attempt, "before": here.last_checkpoint})
    if here.attempt == 1:
        for right in (0, 0):  # an error uses up no name
            try:
                leasehold.step("wrong", divide.function, 1, right)
            except ZeroDivisionError:
                failed = right
        leasehold.step("wrong", divide.function, 1, failed)
    sent = await leasehold.step("send", send, to="Ada")
    if here.attempt == 2:
        raise OSError("not yet")
    told = [
        refused(lambda: leasehold.step("price", price, 1)),
        refused(lambda: leasehold.step("", price, 1)),
        refused(lambda: leasehold.step("set", lambda: {1})),
        refused(lambda: leasehold.step("large", lambda: "x" * 70_000)),
    ]
    return [str(cost), type(cost).__name__, sent, log.read_text(), here.last_checkpoint, sorted(here.steps), told]


@pool.task
def come_again(file: str, times: int) -> int:
    """Ask so many times to be run again, then tell the attempt."""
    tries = Path(file)
    tries.write_text(f"{tries.read_text() if tries.exists() else ''}x")
    if len(tries.read_text()) <= times:
        raise leasehold.Again(0.1)
    return leasehold.current().attempt


@pool.task(retries=5, retry={"base": 0.1, "exceptions": ["LookupError"]})
def choose(file: str) -> None:
    """Fail with an error after which it is tried again, and then with another one."""
    tries = Path(file)
    tries.write_text(f"{tries.read_text() if tries.exists() else ''}x")
    raise KeyError("twice") if len(tries.read_text()) < 3 else ValueError("never again")


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


@pool.task
def report(file: str) -> None:
    """Tell of progress until somebody has seen it."""
    here = leasehold.current()
    for step in range(1_000_000):
        here.progress(0.5, f"step {step}")
        if os.path.exists(file):
            break
    here.progress(1.0)


class Size(Enum):
    """How large something is."""

    SMALL = (1, 2)
    LARGE = (3, 4)


class Customer(BaseModel):
    """Somebody who orders."""

    name: str
    since: date


class Place(NamedTuple):
    """Where something is."""

    shelf: UUID
    row: int = 0


@dataclass(frozen=True)
class Order:
    """An order with parts of its own."""

    number: int
    price: Decimal
    size: Size
    customer: Customer
    place: Place
    tags: frozenset[str] = frozenset()
    parts: list["Order"] = field(default_factory=list)


@pool.task
def advance(order: Order, *days: date, at: datetime | None = None, raw: bytes = b"") -> dict[date, Order | bytes]:
    """Return what it is given, by day."""
    assert all(type(day) is date for day in days), days
    assert at is None or at.tzinfo is not None
    return dict.fromkeys(days, order) | ({at.date(): raw} if at else {})


def an_order() -> Order:
    """Make an order that has each kind of value."""
    part = Order(2, Decimal("0.10"), Size.SMALL, Customer(name="Bob", since=date(2020, 2, 29)), Place(UUID(int=7)))
    return Order(1, Decimal("1.20"), Size.LARGE, part.customer, Place(UUID(int=8), 3), frozenset("ab"), [part])


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
    names = ("first", "second", "third", "fourth", "fifth")
    first, second, third, fourth, fifth = (str(scratch / name) for name in names)
    return {
        "value": ending(divide.defer(7, right=2)),
        "coroutine": ending(double.using(timeout=9000.0, instance="shop").defer("ab"))[:6],
        "error": ending(divide.defer(1, 0)),
        "later": ending(come_through.defer(first, 2)),
        "never": ending(come_through.defer(second, 9)),
        "gave up": [ending(give_up.using(retries=tries).defer()) for tries in (0, 1)],
        "steps": ending(go_on.defer(fifth)),
        "again": ending(come_again.defer(third, 3)),
        "by policy": ending(choose.defer(fourth)),
        "large": ending(make.defer(70_000)),
        "classes": ending(advance.defer(an_order(), date(2026, 1, 2), at=datetime(2026, 1, 3, tzinfo=UTC), raw=b"\0")),
        "gathered classes": pool.gather([advance.defer(an_order(), date(2026, 1, 2))], timeout=ENDS),
        "no JSON": ending(make.defer(0)),
        "joined": [job.created for job in greeted],
        "gathered": pool.gather(greeted, timeout=ENDS),
        "completed": sorted(ended[result.id].result() for result in pool.as_completed(greeted, timeout=ENDS)),
        "repeated": (keyed[0].id == keyed[1].id, [job.created for job in keyed], ending(keyed[0])),
        "key of another": refused(lambda: divide.using(key="half").defer(2.0)),
        "wrong call": refused(lambda: divide.defer(1, 2, 3)),  # type: ignore[call-arg]
        "other class": refused(lambda: advance.defer(an_order(), Decimal(1))),  # type: ignore[arg-type]
        "no argument": refused(lambda: divide.defer({1, 2})),  # type: ignore[arg-type]
        "cancelled late": refused(keyed[0].cancel)[0],
        "no such job": refused(lambda: pool.result("0196f0a0-0000-7000-8000-000000000001"))[0],
        "graph": of_graphs(),
        "schedules": [(each.name, each.outcome) for _ in range(2) for each in pool.apply_schedules()][1:],
        "ran": ending(_of(greet, pool.client.schedules.run_now("morning"))),
    }


def of_graphs() -> dict[str, Any]:
    """Let calls take what others have returned, and tell what became of each."""
    add, half = add_all, divide
    graph = pool.graph("sums")
    first = graph.add(add, [], Decimal("1.5"))
    second = graph.add(add, [first.result, first.result])
    seen = graph.add(add, [second.result], named={"more": first.result})
    none = graph.add(half, 1, 0)
    told = graph.add(unannotated, {"none": none.result}, after={none: "run"})
    graph.add(half, graph.add(half, none.result).result)
    graph.add(half, 3, after=[none], on_failure="cancel")
    taken = graph.submit()
    state = taken.wait(ENDS)
    ends = pool.client.results([taken.jobs[node].id for node in (seen, told)])
    chained = leasehold.chain(half.s(8), half.s(2), leasehold.group(half.s(2), half.s(4))).defer()
    summed = leasehold.chord([add.s([Decimal(n)]) for n in (1, 2, 3)], add.s(Decimal(10))).defer()
    failing = leasehold.chain(half.s(8, 0), half.s(2)).defer()
    return {
        "state": {
            **vars(state),
            "id": "",
            "first_failed": state.first_failed and {**vars(state.first_failed), "job": ""},
        },
        "ends": [each["result"] for each in ends],
        "nodes": [(each["node"], each["state"]) for each in pool.client.graphs.nodes(taken.id)],
        "bad": [each["node"] for each in pool.client.graphs.nodes(taken.id, state=["failed", "cancelled"])],
        "chained": chained.result(ENDS),
        "summed": summed.result(ENDS),
        "alone": leasehold.group(half.s(2), half.s(4)).defer().result(ENDS),
        "failing": refused(lambda: failing.result(ENDS))[0],
    }


def _of(task: Any, job: leasehold.Job) -> "leasehold.TaskJob[Any]":
    return leasehold.TaskJob(job.id, job.created, task=task)


pool.periodic("0 6 * * *", name="morning", args=("all",), overlap="skip")(greet.using(unique=False))


@pool.task
def unannotated(value):  # type: ignore[no-untyped-def]
    """Return what it is given, of whatever type."""
    return value


@pool.task
def add_all(parts: list[Decimal], more: Decimal = Decimal(0)) -> Decimal:
    """Add what other calls have returned."""
    return sum(parts, more)
