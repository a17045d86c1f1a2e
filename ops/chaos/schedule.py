"""The schedule: which faults are injected, in which order, and what is measured and checked around them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.chaos import checker, execution, journal
from ops.chaos.checker import Kind, Violation
from ops.chaos.faults.fault import Fault, NothingToHit
from ops.chaos.pool import ChaosPool
from ops.chaos.report import Injection, Report
from schema import clock
from schema.diagnostics import invariants

#: Seconds within which the pool must finish and acknowledge something after a fault is over, on a busy machine too.
RECOVER_WITHIN = 120.0
#: Seconds within which everything must be final after the last fault, in addition to the time of detection.
DONE_WITHIN = 120.0
#: Seconds between a recovery and the next fault.
REST = (0.0, 0.3)
LOOK = 0.02


@dataclass(frozen=True)
class Plan:
    """What to inject. `faults`: the most faults; `seconds`: after which none begins. At least one must be given."""

    kinds: Sequence[type[Fault]]
    faults: int | None = None
    seconds: float | None = None


def run(pool: ChaosPool, plan: Plan, *, seed: int, say: Callable[[str], None]) -> Report:
    """Inject faults into a pool that is up, wait for its end and check everything; return what was found."""
    report = Report(seed=seed, directory=str(pool.directory))
    kinds = []
    for kind in plan.kinds:
        reason = kind.missing(pool)
        if reason is None:
            kinds.append(kind)
        else:
            report.not_injected[kind.name] = reason
    began = clock.monotonic()
    deck: list[type[Fault]] = []
    while kinds and _more(plan, len(report.injections) + sum(report.missed.values()), clock.monotonic() - began):
        if not deck:
            deck = pool.chance.sample(kinds, len(kinds))
        fault = deck.pop()(pool, random.Random(pool.chance.getrandbits(64)))
        try:
            injection = inject(pool, fault)
        except NothingToHit as reason:
            report.missed[fault.name] = report.missed.get(fault.name, 0) + 1
            say(f"{clock.monotonic() - began:7.2f} s  {fault.name} hits nothing: {reason}")
            continue
        report.injections.append(injection)
        say(f"{injection.began - began:7.2f} s  {_told(injection)}")
        if injection.recovery is None:
            what = f"{injection.fault} {injection.target}: nothing finished or submitted within {RECOVER_WITHIN:.0f} s"
            report.violations.append(Violation(Kind.STUCK, what, injection.began))
            break
        clock.sleep(pool.chance.uniform(*REST))
    report.seconds = clock.monotonic() - began
    finish(pool, report)
    return report


def _told(injection: Injection) -> str:
    def shown(seconds: float | None) -> str:
        return "never" if seconds is None else f"after {seconds:.2f} s"

    held = f"for {injection.healed - injection.began:.1f} s; "
    hit = f"{injection.fault} {injection.target}".strip()
    return f"{hit}: {held}finished {shown(injection.finished)}, submitted {shown(injection.submitted)}"


def _more(plan: Plan, faults: int, seconds: float) -> bool:
    assert plan.faults is not None or plan.seconds is not None, "a plan without an end"
    return (plan.faults is None or faults < plan.faults) and (plan.seconds is None or seconds < plan.seconds)


def inject(pool: ChaosPool, fault: Fault) -> Injection:
    """Let one fault happen, and wait until the pool has finished a job and acknowledged a submit after it.

    Raises NothingToHit.
    """
    began = clock.monotonic()
    least, most = fault.holds
    try:
        fault.inject()
        clock.sleep(fault.chance.uniform(least, most))
    finally:
        fault.heal()
    # A fault that is over at once has its effect from its beginning on.
    healed = clock.monotonic() if most else began
    pool.progress.mark()
    deadline = clock.monotonic() + RECOVER_WITHIN
    finished = submitted = None
    while (finished is None or submitted is None) and clock.monotonic() < deadline:
        clock.sleep(LOOK)
        if finished is None and pool.progress.finished_at is not None:
            finished = pool.progress.finished_at - healed
        if submitted is None and pool.answered_at > healed:
            submitted = pool.answered_at - healed
    return Injection(fault.name, fault.target, began, healed, finished, submitted, fault.killed)


def finish(pool: ChaosPool, report: Report) -> None:
    """Stop submitting, wait until every job is final, and check all records; the logs of a violation are kept."""
    limit = DONE_WITHIN + 1.5 * pool.timing.detect
    deadline = clock.monotonic() + limit
    for caller in pool.callers:
        caller.stop()
    for caller in pool.callers:
        if not caller.join(max(0.0, deadline - clock.monotonic())):
            report.violations.append(Violation(Kind.STUCK, f"a submit was not answered within {limit:.0f} s"))
    database = pool.database()
    try:
        while (left := checker.unfinished(checker.stored(database))) and clock.monotonic() < deadline:
            clock.sleep(0.2)
        if left:
            what = f"{len(left)} jobs are not final after {limit:.0f} s, such as {left[0]}"
            report.violations.append(Violation(Kind.STUCK, what, clock.monotonic()))
        left_over = _last_processes(pool)
        submits, log = journal.read(pool.journal.path), execution.read(pool.execution_log)
        rows = checker.stored(database)
        report.violations += checker.check(submits, log, rows)
        for finding in invariants.verify(database):
            if finding.rows:
                what = f"{finding.id} {finding.title}: {finding.rows}, such as {', '.join(finding.sample)}"
                report.violations.append(Violation(Kind.INVARIANT, what, clock.monotonic()))
    finally:
        database.close()
    report.violations += left_over + pool.invariants.violations + pool.survivors.violations
    for watcher in (pool.invariants, pool.survivors, pool.progress):
        if watcher.error is not None:
            raise watcher.error
    pool.keep = bool(report.violations)
    _count(pool, report, rows, log)


def _last_processes(pool: ChaosPool) -> list[Violation]:
    """Find processes of commands that are left although every job is final."""
    deadline = clock.monotonic() + pool.timing.ttl + 10.0
    while (left := execution.processes(pool.run)) and clock.monotonic() < deadline:
        clock.sleep(0.1)
    return [
        Violation(Kind.SURVIVOR, f"process {each.pid} of job {each.job} fence {each.fence} is left at the end")
        for each in left
    ]


def _count(pool: ChaosPool, report: Report, rows: Sequence[checker.JobRow], log: Sequence[execution.Line]) -> None:
    report.counts = {
        "jobs": len(rows),
        "acknowledged": len(pool.journal.jobs),
        **{f"jobs {state}": sum(row.state == state for row in rows) for state in sorted({row.state for row in rows})},
        "attempts": sum(map(len, execution.attempts(log).values())),
        "looks at invariants": pool.invariants.looks,
        "looks missed": pool.invariants.missed,
        "processes killed": sum(each.killed for each in report.injections),
        "starts of processes": sum(member.starts for member in pool.members),
        "unexpected ends of processes": sum(len(member.surprises) for member in pool.members),
    }
