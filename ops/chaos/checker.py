"""The checker: compares what callers were told and what commands did with what the pool has stored.

It is a pure function of three records: the journal of submits, the execution log and the rows of the jobs. It trusts
the pool's rows only where the other two agree with them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from leasehold.states import FINAL

from ops.chaos.execution import Attempt, Line, attempts
from ops.chaos.journal import Submits
from schema.postgres.engine import Database
from schema.postgres.statements import Statement


class Kind(StrEnum):
    """What can be violated."""

    LOST = "lost"  # acknowledged, and absent or without the run that it tells of
    FAILED = "failed"  # a job ended without success, and no fault or caller has caused that
    DOUBLED = "doubled"  # one key made two jobs, or a job ended or succeeded twice
    OVERLAP = "overlap"  # two attempts of one job beside each other
    FENCE = "fence"  # a fence started twice, or an older one after a newer one
    SURVIVOR = "survivor"  # a process that lives although its attempt is over
    INVARIANT = "invariant"  # `leasehold db verify` finds something
    STUCK = "stuck"  # faults are over, and the pool does not get done


@dataclass(frozen=True)
class Violation:
    """One violation. `at`: when it happened, on the monotonic clock, or None if nobody can tell."""

    kind: Kind
    what: str
    at: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + ("" if self.at is None else f" (at {self.at:.2f})")


@dataclass(frozen=True)
class JobRow:
    """What the pool has stored of one job. `ends`: how many of its events led from an open state to a final one."""

    job: str
    key: str | None
    state: str
    fence: int
    result_fence: int | None
    ends: int
    reason: str = ""


#: Why the pool may give a job up: faults do kill the bots of one job three times.
_BOTS_LOST = "its bot was lost three times"

# Every read names the schema: other tools check databases with connections of their own.
_ROWS = Statement("""
SELECT j.public_id::text AS job, k.key, j.state::text AS state, j.fence, j.result_fence,
    coalesce(j.reason, '') AS reason,
    (SELECT count(*) FROM leasehold.job_events e WHERE e.job_id = j.id
        AND e.to_state IN ('succeeded', 'failed', 'cancelled', 'dead')
        AND e.from_state IS DISTINCT FROM e.to_state) AS ends
FROM leasehold.jobs j LEFT JOIN leasehold.submit_keys k ON k.job_id = j.id ORDER BY j.id""")


def stored(database: Database) -> list[JobRow]:
    """Read the rows of all jobs."""
    return [JobRow(**row) for row in database.run(lambda connection: connection.execute(_ROWS).mappings().all())]


def check(submits: Submits, log: Sequence[Line], rows: Sequence[JobRow]) -> list[Violation]:
    """Return every violation that the records prove. They must have been read in this order, with all work done."""
    ran = attempts(log)
    by_job = {row.job: row for row in rows}
    return [
        *_of_submits(submits, rows, by_job),
        *(found for tries in ran.values() for found in of_attempts(tries)),
        *_of_results(submits, by_job, ran),
    ]


def of_attempts(tries: Sequence[Attempt]) -> Iterator[Violation]:
    """Find overlaps, and fences that repeat or go back, among the attempts of one job in the order of their starts."""
    for attempt in tries:
        if attempt.starts > 1:
            yield Violation(Kind.FENCE, f"{_named(attempt)} started {attempt.starts} times", attempt.last.at)
    for place, later in enumerate(tries):
        for earlier in tries[:place]:
            if earlier.fence > later.fence:
                what = f"{_named(later)} started after {_named(earlier)}"
                yield Violation(Kind.FENCE, what, later.first.at)
            if earlier.last.place > later.first.place:
                what = f"{_named(earlier)} still wrote '{earlier.last.what}' after {_named(later)} had started"
                yield Violation(Kind.OVERLAP, what, earlier.last.at)


def unfinished(rows: Iterable[JobRow]) -> list[JobRow]:
    """Return the jobs that are not in a final state."""
    return [row for row in rows if row.state not in FINAL]


def _of_submits(submits: Submits, rows: Sequence[JobRow], by_job: Mapping[str, JobRow]) -> Iterator[Violation]:
    told: dict[str, str] = {}
    for answer in submits.acknowledged:
        if told.setdefault(answer.key, answer.job) != answer.job:
            what = f"key {answer.key} was answered with {told[answer.key]} and with {answer.job}"
            yield Violation(Kind.DOUBLED, what, answer.at)
        elif answer.job not in by_job:
            yield Violation(Kind.LOST, f"job {answer.job} was acknowledged and is absent", answer.at)
    made: dict[str, str] = {}
    for row in rows:
        if row.key is None:
            yield Violation(Kind.DOUBLED, f"job {row.job} has no key, and every submit had one")
        elif row.key not in submits.asked:
            yield Violation(Kind.DOUBLED, f"job {row.job} has the key {row.key}, which nobody has sent")
        elif made.setdefault(row.key, row.job) != row.job:
            what = f"key {row.key} made the jobs {made[row.key]} and {row.job}"
            yield Violation(Kind.DOUBLED, what, submits.asked[row.key])


def _of_results(submits: Submits, rows: Mapping[str, JobRow], ran: Mapping[str, list[Attempt]]) -> Iterator[Violation]:
    for job, row in rows.items():
        if row.ends > 1:
            yield Violation(Kind.DOUBLED, f"job {job} ended {row.ends} times")
        if row.state == "failed" and job not in submits.killed:
            yield Violation(Kind.FAILED, f"job {job} failed, and no fault has killed its command: {row.reason}")
        if row.state == "cancelled" and job not in submits.cancelled:
            yield Violation(Kind.FAILED, f"job {job} was cancelled, and no caller had asked for that: {row.reason}")
        if row.state == "dead" and row.reason != _BOTS_LOST:
            yield Violation(Kind.FAILED, f"job {job} was given up, and not because its bots were lost: {row.reason}")
        if row.state == "succeeded":
            yield from _of_success(row, ran.get(job, []))
    for job, tries in ran.items():
        if job not in rows:
            yield Violation(Kind.LOST, f"job {job} ran and is absent", tries[-1].last.at)


def _of_success(row: JobRow, tries: Sequence[Attempt]) -> Iterator[Violation]:
    if not any(attempt.fence == row.result_fence and attempt.ended for attempt in tries):
        yield Violation(
            Kind.LOST, f"job {row.job} succeeded with fence {row.result_fence}, which never came to its end"
        )
    for attempt in tries:
        if row.result_fence is not None and attempt.fence > row.result_fence:
            what = f"{_named(attempt)} started although fence {row.result_fence} had succeeded"
            yield Violation(Kind.DOUBLED, what, attempt.first.at)


def _named(attempt: Attempt) -> str:
    return f"job {attempt.job} fence {attempt.fence} on {attempt.first.bot}"
