"""Checkpoints: JSON that a command leaves while it runs, and from which the next attempt of its job goes on.

They are stored as the text that the command wrote, up to `validation.MAX_CHECKPOINT_BYTES`. Results of jobs are stored
by the statement that ends their attempts.

Beside them is the progress of a job: how far its command says that it is, a share and a text. It is told at most once a
second for a job, and with its end; a job that tells none has no row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


# Progress


@dataclass(frozen=True)
class Told:
    """The progress of an attempt, which a bot sent in a session; `number` counts those of the attempt."""

    bot_id: int
    bot_epoch: int
    job: str
    fence: int
    number: int
    share: float
    text: str


# Only the bot that holds the live lease may write. Nothing replaces what a later attempt has told, or what its own
# attempt has told later: a call that was given up may arrive after the next one.
STORE_PROGRESS = Statement("""
INSERT INTO job_progress AS p (job_id, fence, number, share, text)
SELECT j.id, l.fence, t.number, t.share, t.text
FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:jobs AS uuid[]), CAST(:fences AS bigint[]),
            CAST(:numbers AS bigint[]), CAST(:shares AS double precision[]), CAST(:texts AS text[]))
    AS t (bot_id, bot_epoch, job, fence, number, share, text)
CROSS JOIN LATERAL (SELECT id FROM jobs WHERE public_id = t.job OFFSET 0) j
CROSS JOIN LATERAL (
    SELECT fence, bot_id, bot_epoch, ended_at FROM leases WHERE job_id = j.id AND fence = t.fence OFFSET 0) l
WHERE l.bot_id = t.bot_id AND l.bot_epoch = t.bot_epoch AND l.ended_at IS NULL
ORDER BY j.id
ON CONFLICT (job_id) DO UPDATE SET fence = EXCLUDED.fence, number = EXCLUDED.number, share = EXCLUDED.share,
    text = EXCLUDED.text, at = EXCLUDED.at
    WHERE (EXCLUDED.fence, EXCLUDED.number) >= (p.fence, p.number)
""")
#: The join of job `j` with its progress `p`: what the attempt has told that runs, or that has ended the job. What any
#: other attempt has told does not count. The fence of a job grows at its end too, unless it succeeded or failed.
PROGRESS_OF_JOB = """p.job_id = j.id AND (p.fence = j.fence OR (j.finished_at IS NOT NULL
    AND EXISTS (SELECT FROM leases l WHERE l.job_id = j.id AND l.fence = p.fence AND l.ended_to = j.state)))"""
READ_PROGRESS = Statement(f"""
SELECT CAST(j.public_id AS text) AS job, p.share, p.text, p.at
FROM jobs j JOIN job_progress p ON {PROGRESS_OF_JOB}
WHERE j.public_id = ANY (CAST(:jobs AS uuid[]))
""")


def store_progress(connection: Connection, told: Sequence[Told]) -> None:
    """Store the progress of live leases, one for each lease. The caller has locked the bots, so that none of their
    leases ends meanwhile."""
    if not told:
        return
    connection.execute(
        STORE_PROGRESS,
        {
            "bot_ids": [each.bot_id for each in told],
            "epochs": [each.bot_epoch for each in told],
            "jobs": [each.job for each in told],
            "fences": [each.fence for each in told],
            "numbers": [each.number for each in told],
            "shares": [each.share for each in told],
            "texts": [each.text for each in told],
        },
    )


def read_progress(connection: Connection, jobs: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Return what the newest attempts of these jobs have told, by the public ids of the jobs, where they have."""
    rows = connection.execute(READ_PROGRESS, {"jobs": list(jobs)}).mappings()
    return {row["job"]: {"share": row["share"], "text": row["text"], "at": row["at"]} for row in rows}
