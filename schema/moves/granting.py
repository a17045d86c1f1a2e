"""queued -> leased: grant."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text


@dataclass(frozen=True)
class Placement:
    """A wish: this job on that bot. `decision` is stored with the event, so that it can be explained later."""

    job_id: int
    bot_id: int
    decision: Mapping[str, Any]


@dataclass(frozen=True)
class Granted:
    """A lease that came to be."""

    job_id: int
    public_id: str
    bot_id: int
    fence: int
    units: int


# Bots are locked after jobs, out of order, hence SKIP LOCKED; a bot takes placements in the order they are given
# for as long as they fit into the room that the locked row shows. That row also decides what the bot may have: since
# it was chosen, a new session may have given it other properties, or another instance.
GRANT = text("""
WITH wanted AS MATERIALIZED (
    SELECT w.job_id, w.bot_id, w.decision, w.nth, j.units, j.instance, p.properties
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:bot_ids AS bigint[]), CAST(:decisions AS jsonb[]))
        WITH ORDINALITY AS w (job_id, bot_id, decision, nth)
    JOIN jobs j ON j.id = w.job_id AND j.state = 'queued'
    JOIN platforms p ON p.id = j.platform
), room AS MATERIALIZED (
    SELECT b.id, b.epoch, b.instance, b.properties, b.capacity - b.in_use AS units
    FROM bots b WHERE b.id = ANY (CAST(:bot_ids AS bigint[])) AND b.free
    ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED
), filled AS MATERIALIZED (
    SELECT w.job_id, w.bot_id, w.decision, r.epoch, r.units AS room,
        sum(w.units) OVER (PARTITION BY w.bot_id ORDER BY w.nth) AS upto
    FROM wanted w JOIN room r ON r.id = w.bot_id
        AND (r.instance IS NULL OR r.instance = w.instance) AND r.properties @> w.properties
), moved AS (
    UPDATE jobs j SET state = 'leased', fence = j.fence + 1, attempts = j.attempts + 1,
        schedule_after = NULL, considered = 0, reason = NULL
    FROM filled f
    WHERE j.id = f.job_id AND f.upto <= f.room AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.instance, j.fence, j.units, f.bot_id, f.epoch, f.decision
), taken AS (
    UPDATE bots b SET in_use = b.in_use + s.units
    FROM (SELECT bot_id, sum(units) AS units FROM moved GROUP BY bot_id) s
    WHERE b.id = s.bot_id
), leased AS (
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, instance, units, assigner, strategy, due_at)
    SELECT id, fence, bot_id, epoch, instance, units, :assigner, :strategy,
        now() + make_interval(secs => :ack)
    FROM moved
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'grant', 'queued', 'leased', fence, :assigner, decision FROM moved
), told AS (
    SELECT wake('bots', string_agg(DISTINCT bot_id::text, ',')) FROM moved WHERE :tell HAVING count(*) > 0
)
SELECT id, public_id, bot_id, fence, units, (SELECT count(*) FROM told) FROM moved
""")


def grant(
    connection: Connection,
    placements: Sequence[Placement],
    *,
    assigner: str,
    strategy: str,
    ack: float,
    tell: bool = True,
) -> list[Granted]:
    """Give each job to its bot, where the bot is still there, free, allowed to have it and not locked by somebody else.

    The caller holds the jobs' rows locked. Placements that do not come back lost a race and their jobs are
    untouched. `ack` is the number of seconds the bot has to acknowledge. `tell` wakes the bots' long polls, for
    callers that do not answer the bot themselves.
    """
    if not placements:
        return []
    rows = connection.execute(
        GRANT,
        {
            "job_ids": [placement.job_id for placement in placements],
            "bot_ids": [placement.bot_id for placement in placements],
            "decisions": [json.dumps(placement.decision) for placement in placements],
            "assigner": assigner,
            "strategy": strategy,
            "ack": ack,
            "tell": tell,
        },
    )
    return [Granted(row.id, str(row.public_id), row.bot_id, row.fence, row.units) for row in rows]
