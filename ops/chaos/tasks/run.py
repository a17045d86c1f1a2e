"""The command of kill runs: `python -m ops.chaos.tasks.run --tasks 5000 --seed 1`. ops/chaos/README.md explains it."""

import random
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ops.chaos import execution
from ops.chaos.execution import Attempt
from ops.chaos.tasks import checker
from ops.chaos.tasks.checker import Begun, Call, Effect, Kind, Violation
from ops.chaos.tasks.killers import KINDS, Killers
from ops.chaos.tasks.pool import BOTS, TaskPool, task_pool
from schema import clock
from schema.diagnostics import invariants

#: Effects of a task, the seconds of work before each, and the most cents of one.
EFFECTS, PAUSE, CENTS = (1, 4), (0.0, 0.2), 100_000
#: One of so many tasks is an `async def`.
BESIDE = 2
#: One of so many tasks works for longer before each effect, so that most stops hit one.
LONG, LONG_PAUSE = 10, 1.0
#: Seconds within which all calls must have ended: at least, and for each of them.
DONE_WITHIN, DONE_WITHIN_EACH = 300.0, 0.5
#: Seconds within which no process of the bots may be left after they have left.
GONE_WITHIN = 10.0
#: Violations that are shown.
SHOWN = 20


@dataclass
class Report:
    """What a run has found: numbers by name, in the order in which they are told, and the violations."""

    seed: int
    counts: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    def found(self, kind: Kind) -> int:
        return sum(each.kind is kind for each in self.violations)

    def line(self) -> str:
        """Return the one line that tells of the run."""
        told = [f"{number} {name}" for name, number in self.counts.items()]
        told += [f"{self.found(kind)} {kind}" for kind in Kind]
        return f"{', '.join(told)}; {self.seconds:.0f} s; seed {self.seed}"


def drawn(chance: random.Random, tasks: int) -> list[Call]:
    """Draw what the tasks have to do."""
    calls = []
    for _ in range(tasks):
        cents = tuple(chance.randint(1, CENTS) for _ in range(chance.randint(*EFFECTS)))
        pause = LONG_PAUSE if chance.randrange(LONG) == 0 else chance.uniform(*PAUSE)
        calls.append(Call(cents, round(pause, 3), beside=chance.randrange(BESIDE) == 0))
    return calls


def run(pool: TaskPool, calls: Sequence[Call], *, killers: int, seed: int) -> Report:
    """Let the pool run these calls under kills, and check everything."""
    report = Report(seed)
    began = clock.monotonic()
    pool.submit(calls)
    killing = Killers(pool, clients=killers, seed=seed)
    killing.start()
    try:
        report.violations += wait_for_end(pool)
    finally:
        killing.leave_off()
    report.seconds = clock.monotonic() - began
    check(pool, report)
    report.counts |= {f"{kind} hits": killing.counts[kind] for kind in KINDS}
    return report


def wait_for_end(pool: TaskPool) -> list[Violation]:
    """Wait until every call has ended."""
    limit = DONE_WITHIN + DONE_WITHIN_EACH * len(pool.calls)
    deadline = clock.monotonic() + limit
    while left := pool.unfinished():
        if clock.monotonic() > deadline:
            return [Violation(Kind.STUCK, f"{left} calls have not ended after {limit:.0f} s")]
        clock.sleep(0.2)
    return []


def check(pool: TaskPool, report: Report) -> None:
    """End the bots, and compare all records."""
    pool.leave()
    report.violations += _survivors(pool)
    effects, begun = _written(pool)
    states = _states(pool)
    given_up = {job for job, (state, reason) in states.items() if checker.is_given_up(state, reason)}
    results = pool.results() if not report.found(Kind.STUCK) else {}
    ran = execution.attempts(execution.read(pool.execution_log))
    beside = checker.overlaps(ran)
    report.violations += [
        *checker.of_effects(pool.calls, effects, begun, given_up),
        *checker.of_results(pool.calls, results, states),
        *checker.of_overlaps(beside, pool.stops),
        *_invariants(pool),
    ]
    report.counts = {
        "tasks": len(pool.calls),
        "effects": len(effects),
        "attempts": sum(map(len, ran.values())),
        "given up": len(given_up),
        "overlaps by stops": len(beside) - report.found(Kind.OVERLAP),
        "refused by the fence": _superseded(ran),
    }


def _superseded(ran: Mapping[str, Sequence[Attempt]]) -> int:
    return sum(attempt.last.what == "superseded" for tries in ran.values() for attempt in tries)


def _survivors(pool: TaskPool) -> list[Violation]:
    deadline = clock.monotonic() + GONE_WITHIN
    while (left := execution.processes(pool.run)) and clock.monotonic() < deadline:
        clock.sleep(0.1)
    return [Violation(Kind.SURVIVOR, f"process {each.pid} of {each.bot or 'a bot'} is left") for each in left]


def _written(pool: TaskPool) -> tuple[list[Effect], list[Begun]]:
    with pool.effects() as connection:
        effects = connection.execute("SELECT id, job::text, fence, step, cents FROM effects").fetchall()
        begun = connection.execute("SELECT id, job::text, fence FROM attempts").fetchall()
    return [Effect(*row) for row in effects], [Begun(*row) for row in begun]


def _states(pool: TaskPool) -> dict[str, tuple[str, str]]:
    with pool.server.connect() as connection:
        rows: list[Any] = connection.execute(
            "SELECT public_id::text, state::text, coalesce(reason, '') FROM leasehold.jobs"
        ).fetchall()
    return {job: (state, reason) for job, state, reason in rows}


def _invariants(pool: TaskPool) -> list[Violation]:
    if pool.invariants.error is not None:
        raise pool.invariants.error
    database = pool.database()
    try:
        found = [f"{each.id} {each.title}: {each.rows}" for each in invariants.verify(database) if each.rows]
    finally:
        database.close()
    return [Violation(Kind.INVARIANT, what) for what in [*found, *map(str, pool.invariants.violations)]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tasks", type=click.IntRange(1, 1_000_000), default=5000, show_default=True, help="Calls of tasks.")
@click.option("--killers", type=click.IntRange(0, 100), default=10, show_default=True, help="Killing clients.")
@click.option("--bots", type=click.IntRange(1, 100), default=BOTS, show_default=True, help="Bots.")
@click.option("--seed", type=int, help="Seed of all chance [default: drawn].")
@click.option("--without-fence", is_flag=True, help="Let tasks write without a check of the fence: it must be found.")
def main(tasks: int, killers: int, bots: int, seed: int | None, without_fence: bool) -> None:
    """Kill processes at random while tasks write effects, and check that each effect has happened once.

    Exits with 1 on any violation.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with task_pool(bots=bots, fenced=not without_fence) as pool:
        report = run(pool, drawn(random.Random(seed), tasks), killers=killers, seed=seed)
        pool.keep = bool(report.violations)
    for violation in report.violations[:SHOWN]:
        click.echo(violation)
    if report.violations:
        click.echo(f"logs: {pool.directory}", err=True)
    click.echo(report.line())
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
