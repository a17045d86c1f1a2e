"""Checkpoints: JSON that a command leaves while it runs, and from which the next attempt of its job goes on.

They are stored as the text that the command wrote, up to `validation.MAX_CHECKPOINT_BYTES`. Results of jobs are stored
by the statement that ends their attempts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of an attempt, which a bot sent in a session; `number` counts those of the attempt."""

    bot_id: int
    bot_epoch: int
    job: str
    fence: int
    number: int
    text: str


# Only the bot that holds the live lease may write. No checkpoint replaces one of a later attempt, or a later one of its
# own attempt: a call that was given up and repeated may arrive after the next one.
STORE_CHECKPOINTS = Statement("""
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
