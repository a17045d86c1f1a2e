"""JSON that commands leave: the result of a job, and the checkpoint from which its next attempt goes on.

Both are stored as the text that the command wrote, up to `validation.MAX_RESULT_BYTES` and `MAX_CHECKPOINT_BYTES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text


@dataclass(frozen=True)
class Result:
    """The result of the attempt that has ended a job."""

    job_id: int
    fence: int
    text: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of an attempt, which a bot sent in a session; `number` counts those of the attempt."""

    bot_id: int
    bot_epoch: int
    job: str
    fence: int
    number: int
    text: str


# Rows are looked up one by one (OFFSET 0): a plan from a time with few leases would read all live ones.
#
# Only the attempt that ended the job has a result: the fence must be the one of the job's last lease.
STORE_RESULTS = text("""
INSERT INTO job_results (job_id, fence, result)
SELECT j.id, t.fence, CAST(t.result AS json)
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:results AS text[]))
    AS t (job_id, fence, result)
CROSS JOIN LATERAL (SELECT id, finished_at FROM jobs WHERE id = t.job_id OFFSET 0) j
WHERE j.finished_at IS NOT NULL AND t.fence = (SELECT max(l.fence) FROM leases l WHERE l.job_id = t.job_id)
""")

# Only the bot that holds the live lease may write. No checkpoint replaces one of a later attempt, or a later one of its
# own attempt: a call that was given up and repeated may arrive after the next one.
STORE_CHECKPOINTS = text("""
INSERT INTO job_checkpoints AS c (job_id, fence, number, checkpoint)
SELECT j.id, l.fence, t.number, CAST(t.checkpoint AS json)
FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:jobs AS uuid[]), CAST(:fences AS bigint[]),
            CAST(:numbers AS bigint[]), CAST(:checkpoints AS text[]))
    AS t (bot_id, bot_epoch, job, fence, number, checkpoint)
CROSS JOIN LATERAL (SELECT id FROM jobs WHERE public_id = t.job OFFSET 0) j
CROSS JOIN LATERAL (
    SELECT fence, bot_id, bot_epoch, ended_at FROM leases WHERE job_id = j.id AND fence = t.fence OFFSET 0) l
WHERE l.bot_id = t.bot_id AND l.bot_epoch = t.bot_epoch AND l.ended_at IS NULL
ORDER BY j.id
ON CONFLICT (job_id) DO UPDATE SET fence = EXCLUDED.fence, number = EXCLUDED.number, checkpoint = EXCLUDED.checkpoint
    WHERE (EXCLUDED.fence, EXCLUDED.number) >= (c.fence, c.number)
""")


def store(connection: Connection, results: Sequence[Result]) -> int:
    """Store the results of attempts that this transaction has ended; returns how many. Those of jobs that run again
    are left out. The caller has locked the jobs."""
    if not results:
        return 0
    return connection.execute(
        STORE_RESULTS,
        {
            "job_ids": [each.job_id for each in results],
            "fences": [each.fence for each in results],
            "results": [each.text for each in results],
        },
    ).rowcount


def store_checkpoints(connection: Connection, checkpoints: Sequence[Checkpoint]) -> int:
    """Store the latest checkpoints of live leases, one for each lease; returns how many. The caller has locked the
    bots, so that none of their leases ends meanwhile."""
    if not checkpoints:
        return 0
    return connection.execute(
        STORE_CHECKPOINTS,
        {
            "bot_ids": [each.bot_id for each in checkpoints],
            "epochs": [each.bot_epoch for each in checkpoints],
            "jobs": [each.job for each in checkpoints],
            "fences": [each.fence for each in checkpoints],
            "numbers": [each.number for each in checkpoints],
            "checkpoints": [each.text for each in checkpoints],
        },
    ).rowcount
