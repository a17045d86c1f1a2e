"""leased -> running: acknowledge."""

from collections.abc import Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.fragments import kill_seconds
from schema.postgres.statements import Statement
from schema.predicates import STILL_PENDING


@dataclass(frozen=True)
class Start:
    """A bot's report that it runs a lease."""

    job_id: int
    fence: int
    bot_id: int
    bot_epoch: int
    actor: str


# The server's own execution deadline is the job's timeout and some grace, because the bot enforces it first.
ACKNOWLEDGE = Statement(f"""
WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:bot_ids AS bigint[]),
                         CAST(:epochs AS bigint[]), CAST(:actors AS text[]))
        AS t (job_id, fence, bot_id, bot_epoch, actor)
), held AS MATERIALIZED (
    SELECT j.id, j.timeout_seconds FROM jobs j JOIN told t ON t.job_id = j.id AND t.fence = j.fence
    WHERE j.state = 'leased' ORDER BY j.id FOR NO KEY UPDATE OF j
), active AS (
    UPDATE leases l SET state = 'active', acknowledged_at = clock_timestamp(), acknowledged_by = t.actor,
        acknowledged_event = nextval('stored_events_id_seq'),
        due_at = CASE WHEN h.timeout_seconds IS NOT NULL
            THEN now() + make_interval(secs => h.timeout_seconds + :sync + {kill_seconds("l.bot_id")}) END
    FROM told t JOIN held h ON h.id = t.job_id
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.bot_id = t.bot_id AND l.bot_epoch = t.bot_epoch
        AND {STILL_PENDING}
    RETURNING l.job_id
)
UPDATE jobs j SET state = 'running', started_at = clock_timestamp(), queue_deadline = NULL
FROM active a WHERE j.id = a.job_id AND j.state = 'leased'
RETURNING j.id
""")

DELIVER = Statement(f"""
UPDATE leases l SET delivered_at = clock_timestamp()
FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
WHERE l.job_id = t.job_id AND l.fence = t.fence AND {STILL_PENDING}
""")


def acknowledge(connection: Connection, starts: Sequence[Start], *, sync: float) -> list[int]:
    """Record that bots run these leases; returns the ids of the jobs that moved. The caller has locked the bots.

    `sync` is the bots' sync period in seconds, the time a bot's own report of a timeout may take to arrive.
    """
    if not starts:
        return []
    rows = connection.execute(
        ACKNOWLEDGE,
        {
            "job_ids": [start.job_id for start in starts],
            "fences": [start.fence for start in starts],
            "bot_ids": [start.bot_id for start in starts],
            "epochs": [start.bot_epoch for start in starts],
            "actors": [start.actor for start in starts],
            "sync": sync,
        },
    )
    return [row.id for row in rows]


def deliver(connection: Connection, leases: Sequence[tuple[int, int]]) -> None:
    """Record that the bots are being told of these leases, given as (job id, fence), with all that they need to start.

    The leases are locked without their jobs, but in the order of the jobs, as by those who lock jobs to stop them.
    """
    if leases:
        job_ids, fences = zip(*sorted(leases), strict=True)
        connection.execute_later(DELIVER, {"job_ids": list(job_ids), "fences": list(fences)})
