"""From the ids that callers know to jobs, and the lock that comes before every act of theirs."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.submissions import NAMED


@dataclass(frozen=True)
class Submission:
    """What a public id stands for. Who withdrew a submission has nothing to say about its job any more."""

    job_id: int
    withdrawn: bool


FIND = text(f"""
SELECT s.id, s.job_id, s.withdrawn_at IS NOT NULL AS withdrawn
FROM ({NAMED}) s JOIN jobs j ON j.id = s.job_id
WHERE CAST(:instances AS text[]) IS NULL
    OR j.instance IN (SELECT id FROM instances WHERE name = ANY (CAST(:instances AS text[])))
""")
LOCK = text("SELECT id FROM jobs WHERE id = ANY (CAST(:ids AS bigint[])) ORDER BY id FOR NO KEY UPDATE")


def find(
    connection: Connection, public_ids: Sequence[str], *, instances: Sequence[str] | None
) -> dict[str, Submission]:
    """The submissions with these ids, which must be UUIDs. Only jobs of `instances` are seen, None means all."""
    where = {"ids": list(public_ids), "instances": None if instances is None else list(instances)}
    return {str(row.id): Submission(row.job_id, row.withdrawn) for row in connection.execute(FIND, where)}


def wanted(found: Iterable[Submission]) -> list[int]:
    """The jobs of those submissions that were not withdrawn, each once."""
    return sorted({submission.job_id for submission in found if not submission.withdrawn})


def lock(connection: Connection, ids: Collection[int]) -> None:
    """Lock jobs in the one order of all moves, so that the next statement shows what they became while we waited."""
    connection.execute(LOCK, {"ids": sorted(ids)})
