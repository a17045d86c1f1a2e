"""running -> (asked to stop) -> queued: preemption, and what keeps the units that it frees for the instance in need."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from schema.moves.waiting.backoff import wake_queues_for_bots
from schema.picking.preemption import IN_TIME, KEPT_BY_OTHERS
from schema.postgres.connection import Connection
from schema.postgres.fragments import kill_seconds, newest_leases
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.predicates import DRAIN, HEALTHY, STILL_ACTIVE

# The bot and the jobs of the victims are locked after the job of the preemptor, out of order, hence SKIP LOCKED.
LOCK_PREEMPTOR = Statement("""
SELECT id FROM jobs WHERE id = :preemptor AND state = 'queued' FOR NO KEY UPDATE SKIP LOCKED
""")
LOCK_BOT = Statement(f"""
SELECT id FROM bots
WHERE id = :bot_id AND {HEALTHY.of(bot="")} AND NOT {KEPT_BY_OTHERS} FOR NO KEY UPDATE SKIP LOCKED
""")
LOCK_VICTIMS = Statement("""
SELECT id FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) AND state = 'running'
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
""")
# This lock comes before any lock on a quota. The repair of counters waits for it, and so for all who write leases.
WRITES_LEASES = Statement("LOCK TABLE leases IN ROW EXCLUSIVE MODE")
# The quotas are locked before they are read again, so that of two evictions at once each sees what the other takes.
_LOCK_QUOTAS = """
WITH involved AS MATERIALIZED (
    SELECT cohort, instance FROM quotas WHERE (cohort, instance) IN (
        SELECT cohort, instance FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) OR id = :preemptor)
), locked AS MATERIALIZED (
    SELECT q.cohort FROM quotas q JOIN involved i ON i.cohort = q.cohort AND i.instance = q.instance
    ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q {locked}
)
SELECT (SELECT count(*) FROM locked) = (SELECT count(*) FROM involved)
"""
LOCK_QUOTAS = {again: Statement(_LOCK_QUOTAS.format(locked="SKIP LOCKED" if again else "")) for again in (False, True)}
# Everything that the plan rested on is checked again on the locked rows.

#: The bot has room for the job once the victims, and all others that are asked to stop, are gone.
_BOT_HAS_ROOM = f"""(SELECT b.capacity - b.in_use - b.kept_units + (SELECT sum(units) FROM victims) + coalesce((
             SELECT sum(l.units) FROM {newest_leases("b.id", "b.held", columns="units, state")} l
             WHERE l.state = 'cancelling'), 0) >= :units
         FROM bots b WHERE b.id = :bot_id)"""
#: No instance of the victims falls below its minimum.
_VICTIMS_KEEP_MINIMUM = """NOT EXISTS (
        SELECT FROM asked a JOIN quotas q ON q.cohort = a.cohort AND q.instance = a.instance
        LEFT JOIN stopping s ON s.cohort = a.cohort AND s.instance = a.instance
        WHERE q.usage - coalesce(s.units, 0) - a.units < q.min_quota)"""
#: The job still waits, in time, and its instance needs it to reach its minimum, beside the units that bots keep for the
#: instance. Only who has locked its quota keeps units for it. Units that the plan has not seen and that this
#: transaction has not kept may be for the same job.
_PREEMPTOR_NEEDS_IT = f"""EXISTS (
        SELECT FROM jobs p JOIN quotas q ON q.cohort = p.cohort AND q.instance = p.instance
        JOIN instances i ON i.id = p.instance AND {DRAIN.of(instance="i")} CROSS JOIN kept k
        WHERE p.id = :preemptor AND p.state = 'queued' AND k.unseen = 0
            AND {IN_TIME.format(deadline="p.queue_deadline", grace=kill_seconds(":bot_id"))}
            AND q.usage + p.units + k.units <= q.min_quota)"""
STILL_VALID = Statement(f"""
WITH victims AS MATERIALIZED (
    SELECT l.job_id, l.cohort, l.instance, l.units FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]))
        AS t (job_id, fence)
    JOIN leases l ON l.job_id = t.job_id AND l.fence = t.fence
    WHERE {STILL_ACTIVE} AND l.bot_id = :bot_id
), asked AS MATERIALIZED (
    SELECT v.cohort, v.instance, sum(v.units) AS units FROM victims v GROUP BY v.cohort, v.instance
), stopping AS MATERIALIZED (
    SELECT a.cohort, a.instance, sum(l.units) AS units FROM asked a CROSS JOIN LATERAL (
        SELECT units FROM leases WHERE state = 'cancelling' AND cohort = a.cohort AND instance = a.instance OFFSET 0) l
    GROUP BY a.cohort, a.instance
), kept AS MATERIALIZED (
    SELECT coalesce(sum(b.kept_units), 0) AS units,
        count(*) FILTER (WHERE s.bot_id IS NULL
            AND b.kept_until <> now() + make_interval(secs => :patience + b.kill_grace)) AS unseen
    FROM bots b
    LEFT JOIN unnest(CAST(:seen_bots AS bigint[]), CAST(:seen_untils AS timestamptz[])) AS s (bot_id, until)
        ON s.bot_id = b.id AND s.until = b.kept_until
    WHERE b.kept_units > 0 AND b.cohort = :cohort AND b.kept_for = :instance
)
SELECT (SELECT count(*) FROM victims) = cardinality(CAST(:job_ids AS bigint[]))
    AND {_BOT_HAS_ROOM}
    AND {_VICTIMS_KEEP_MINIMUM}
    AND {_PREEMPTOR_NEEDS_IT}
""")
PREEMPT = Statement(f"""
WITH asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = 'preempt',
        due_at = now() + make_interval(secs => :sync + {kill_seconds("l.bot_id")})
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND {STILL_ACTIVE}
    RETURNING l.job_id, l.fence
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT job_id, 'preempted', 'running', 'running', fence, :actor,
        CAST(:receipt AS jsonb) || jsonb_build_object('rule', CAST(:rule AS text)) FROM asked
    UNION ALL
    SELECT id, 'preempt', 'queued', 'queued', fence, :actor, CAST(:receipt AS jsonb) FROM jobs WHERE id = :preemptor
)
UPDATE bots SET kept_for = :instance, kept_units = kept_units + :units,
    kept_until = now() + make_interval(secs => :patience + kill_grace)
WHERE id = :bot_id
""")

#: The condition of a bot whose kept units are for everybody again.
UNUSED = f"kept_units > 0 AND (kept_until < clock_timestamp() OR NOT ({HEALTHY.of(bot='')}))"
# Room of bots that take no work, or whose time is over, is for everybody. Somebody who holds the row is at work there.
# Bots are found in the order of the index of those that keep units.
RELEASE = Statement(f"""
WITH over AS MATERIALIZED (
    SELECT id, kept_units FROM bots WHERE {UNUSED} ORDER BY kept_for LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE bots b SET kept_units = 0 FROM over o WHERE b.id = o.id
RETURNING b.id, b.name, (SELECT name FROM instances WHERE id = b.kept_for) AS instance, o.kept_units,
    b.capacity - b.in_use AS room
""")


@dataclass(frozen=True)
class ReleasedUnits:
    """Kept units of a bot that the instance has not used. Jobs were evicted for them in vain."""

    bot: str
    instance: str
    units: int


def preempt(
    connection: Connection,
    *,
    preemptor: int,
    units: int,
    cohort: int,
    instance: int,
    seen: Mapping[int, datetime],
    bot_id: int,
    victims: Sequence[tuple[int, int]],
    rule: str,
    receipt: Mapping[str, Any],
    sync: float,
    patience: float,
    actor: str,
    again: bool = False,
) -> bool:
    """Ask the bot to stop the victims, given as (job id, fence), and keep `units` of the bot for the preemptor's
    instance.

    Returns false if anything that the plan rested on has changed; then nothing is written.

    seen: the time until which each bot kept units for the instance when the plan was made. receipt: stored with both
    jobs and in the log of evictions; it names the preemptor's public id as `preemptor.job`. sync: the bots' sync
    period, seconds. patience: seconds for which the units are kept, beside the grace of the bot. again: this
    transaction may hold locks on quotas. Then a quota that others have locked counts as a change, because to wait for
    it out of order could deadlock.
    """
    job_ids, fences = zip(*sorted(victims), strict=True)
    plan = {
        "job_ids": list(job_ids),
        "fences": list(fences),
        "bot_id": bot_id,
        "preemptor": preemptor,
        "instance": instance,
        "units": units,
    }
    bot = {"bot_id": bot_id, "instance": instance, "patience": patience}
    if connection.execute(LOCK_PREEMPTOR, plan).one_or_none() is None:
        return False
    if connection.execute(LOCK_BOT, bot).one_or_none() is None:
        return False
    if len(connection.execute(LOCK_VICTIMS, {"job_ids": plan["job_ids"]}).all()) < len(job_ids):
        return False
    connection.execute(WRITES_LEASES)
    quotas = {"job_ids": plan["job_ids"], "preemptor": preemptor}
    if not connection.execute(LOCK_QUOTAS[again], quotas).scalar_one():
        return False
    still = {
        **plan,
        "cohort": cohort,
        "sync": sync,
        "patience": patience,
        "seen_bots": list(seen),
        "seen_untils": list(seen.values()),
    }
    if not connection.execute(STILL_VALID, still).scalar_one():
        return False
    connection.execute(
        PREEMPT,
        {
            **plan,
            "rule": rule,
            "receipt": json.dumps(receipt),
            "sync": sync,
            "patience": patience,
            "actor": actor,
        },
    )
    wake(connection, "bots", [str(bot_id)])
    return True


def release_kept_units(connection: Connection, limit: int) -> list[ReleasedUnits]:
    """Stop keeping units for an instance on up to `limit` bots: where it has not used them in time, or where the bot
    takes no work."""
    released = connection.execute(RELEASE, {"limit": limit}).all()
    if released:
        wake_queues_for_bots(connection, {row.id: row.room for row in released})
        wake(connection, "jobs")
    return [ReleasedUnits(row.name, row.instance, row.kept_units) for row in released]
