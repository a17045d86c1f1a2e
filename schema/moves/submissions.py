"""Submissions: from the ids that callers know to jobs, and the lock that comes before every act on jobs."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.fragments import SUBMISSIONS
from schema.postgres.statements import Statement


@dataclass(frozen=True)
class Submission:
    """What a public id stands for. Who withdrew a submission has nothing to say about its job any more."""

    job_id: int
    withdrawn: bool


FIND_SUBMISSIONS = Statement(f"""
SELECT s.id, s.job_id, s.withdrawn_at IS NOT NULL AS withdrawn
FROM ({SUBMISSIONS}) s JOIN jobs j ON j.id = s.job_id
WHERE CAST(:instances AS text[]) IS NULL
    OR j.instance IN (SELECT id FROM instances WHERE name = ANY (CAST(:instances AS text[])))
""")
LOCK_JOBS = Statement("SELECT id FROM jobs WHERE id = ANY (CAST(:ids AS bigint[])) ORDER BY id FOR NO KEY UPDATE")


def find_submissions(
    connection: Connection, public_ids: Sequence[str], *, instances: Sequence[str] | None
) -> dict[str, Submission]:
    """The submissions with these ids, which must be UUIDs. Only jobs of `instances` are seen, None means all."""
    where = {"ids": list(public_ids), "instances": None if instances is None else list(instances)}
    return {str(row.id): Submission(row.job_id, row.withdrawn) for row in connection.execute(FIND_SUBMISSIONS, where)}


def wanted_job_ids(found: Iterable[Submission]) -> list[int]:
    """The jobs of those submissions that were not withdrawn, each once."""
    return sorted({submission.job_id for submission in found if not submission.withdrawn})


def lock_jobs(connection: Connection, ids: Collection[int]) -> None:
    """Lock jobs in the one order of all moves, so that the next statement shows what they became while we waited.

    Each move locks its own jobs in order, but two moves one after the other do not keep the order. Who moves jobs by
    more than one move locks all of them first.
    """
    connection.execute_later(LOCK_JOBS, {"ids": list(ids)})
