"""running -> (asked to stop) -> queued: preemption, and the reservation that keeps what it frees for its job."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

from schema.accounting.counters import Settlement, settle
from schema.picking.preemption import IN_TIME
from schema.postgres.fragments import newest_leases
from schema.postgres.notify import wake
from schema.predicates import DRAIN, HEALTHY
from schema.timing import KILL_GRACE

# The caller holds the preemptor's job. The bot and the victims' jobs come after it, out of order, hence SKIP LOCKED.
LOCK_BOT = text("""
SELECT id FROM bots
WHERE id = :bot_id AND status = 'ok' AND NOT draining AND NOT closing FOR NO KEY UPDATE SKIP LOCKED
""")
LOCK_VICTIMS = text("""
SELECT id FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) AND state = 'running'
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
""")
# Whoever writes leases has said so before it locks a quota: those who repair counters wait for it before they do.
WRITES_LEASES = text("LOCK TABLE leases IN ROW EXCLUSIVE MODE")
# Locked before they are read again, so that two evictions at once see what the other one takes.
_LOCK_QUOTAS = """
WITH involved AS MATERIALIZED (
    SELECT cohort, instance FROM quotas
    WHERE cohort = :cohort AND instance IN (
        SELECT instance FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) OR id = :preemptor)
), locked AS MATERIALIZED (
    SELECT q.cohort FROM quotas q JOIN involved i ON i.cohort = q.cohort AND i.instance = q.instance
    ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q {locked}
)
SELECT (SELECT count(*) FROM locked) = (SELECT count(*) FROM involved)
"""
LOCK_QUOTAS = {again: text(_LOCK_QUOTAS.format(locked="SKIP LOCKED" if again else "")) for again in (False, True)}
# Everything that the plan rested on, once more on the locked rows.
STILL_VALID = text(f"""
WITH victims AS MATERIALIZED (
    SELECT l.job_id, l.instance, l.units FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]))
        AS t (job_id, fence)
    JOIN leases l ON l.job_id = t.job_id AND l.fence = t.fence
    WHERE l.state = 'active' AND l.bot_id = :bot_id AND l.cohort = :cohort
), stopping AS MATERIALIZED (
    SELECT l.instance, sum(l.units) AS units FROM leases l
    WHERE l.state = 'cancelling' AND l.cohort = :cohort AND l.instance IN (SELECT instance FROM victims)
    GROUP BY l.instance
), asked AS (
    SELECT v.instance, sum(v.units) AS units FROM victims v GROUP BY v.instance
)
SELECT (SELECT count(*) FROM victims) = cardinality(CAST(:job_ids AS bigint[]))
    AND (SELECT b.capacity - b.in_use - b.reserved + (SELECT sum(units) FROM victims) + coalesce((
             SELECT sum(l.units) FROM {newest_leases("b.id", "b.held", columns="units, state")} l
             WHERE l.state = 'cancelling'), 0) >= :units
         FROM bots b WHERE b.id = :bot_id)
    AND NOT EXISTS (
        SELECT FROM asked a JOIN quotas q ON q.cohort = :cohort AND q.instance = a.instance
        LEFT JOIN stopping s ON s.instance = a.instance
        WHERE q.usage - coalesce(s.units, 0) - a.units < q.min_quota)
    AND EXISTS (
        SELECT FROM jobs p JOIN quotas q ON q.cohort = p.cohort AND q.instance = p.instance
        JOIN instances i ON i.id = p.instance AND {DRAIN.of(instance="i")}
        WHERE p.id = :preemptor AND p.state = 'queued' AND {IN_TIME.format(job="p.")} AND q.usage + p.units + coalesce((
            SELECT sum(v.units) FROM reservations v JOIN jobs j ON j.id = v.job_id
            WHERE j.cohort = p.cohort AND j.instance = p.instance AND j.state = 'queued'), 0) <= q.min_quota)
    AND NOT EXISTS (SELECT FROM reservations v WHERE v.job_id = :preemptor)
""")
# The preemptor rests until its reservation is over: nobody else places it meanwhile.
PREEMPT = text(f"""
WITH asked AS (
    UPDATE leases l SET state = 'cancelling', stop_reason = 'preempt',
        due_at = now() + make_interval(secs => :sync + {KILL_GRACE})
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[])) AS t (job_id, fence)
    WHERE l.job_id = t.job_id AND l.fence = t.fence AND l.state = 'active'
    RETURNING l.job_id, l.fence
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT job_id, 'preempted', 'running', 'running', fence, :actor,
        CAST(:receipt AS jsonb) || jsonb_build_object('rule', CAST(:rule AS text)) FROM asked
    UNION ALL
    SELECT id, 'preempt', 'queued', 'queued', fence, :actor, CAST(:receipt AS jsonb) FROM jobs WHERE id = :preemptor
), rests AS (
    UPDATE jobs j SET schedule_after = clock_timestamp() + make_interval(secs => :patience),
        reason = 'a bot is being freed for it'
    WHERE j.id = :preemptor RETURNING j.id, j.units, j.schedule_after
), reserved AS (
    INSERT INTO reservations (job_id, bot_id, units, until)
    SELECT id, :bot_id, units, schedule_after FROM rests
)
UPDATE bots b SET reserved = b.reserved + r.units FROM rests r WHERE b.id = :bot_id
""")

# A job with gates for which nothing is counted any more goes through them again.
LOCK_RESERVED_JOBS = text("""
SELECT j.id FROM reservations v JOIN jobs j ON j.id = v.job_id
WHERE v.bot_id = :bot_id AND j.state = 'queued' AND j.units <= :room AND (
    NOT j.constrained OR EXISTS (SELECT FROM charges c WHERE c.job_id = j.id AND c.fence = j.fence + 1))
ORDER BY j.priority, j.queued_at, j.id FOR NO KEY UPDATE OF j SKIP LOCKED
""")

RESERVED_QUOTAS = text(f"""
WITH involved AS MATERIALIZED (
    SELECT l.cohort, l.instance FROM bots b
    CROSS JOIN LATERAL {newest_leases("b.id", "b.held", columns="cohort, instance")} l
    WHERE b.id = ANY (CAST(:bot_ids AS bigint[]))
    UNION
    SELECT j.cohort, j.instance FROM reservations v JOIN jobs j ON j.id = v.job_id
    WHERE v.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND j.state = 'queued'
)
SELECT q.cohort FROM quotas q JOIN involved i ON i.cohort = q.cohort AND i.instance = q.instance
ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q
""")

OVER = text(f"""
SELECT b.id FROM bots b WHERE b.id = ANY (ARRAY(
    SELECT v.bot_id FROM reservations v LEFT JOIN jobs j ON j.id = v.job_id
    CROSS JOIN LATERAL (
        SELECT {HEALTHY.of(bot="h")} AS healthy FROM bots h WHERE h.id = v.bot_id OFFSET 0) h
    WHERE v.until < clock_timestamp() OR j.state IS DISTINCT FROM 'queued' OR NOT h.healthy LIMIT :limit))
ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED
""")
# Jobs that rest for their reservation alone are ready again at once. One that somebody else has locked may be about to
# get a lease elsewhere, which what was counted for it belongs to then: its reservation is left for the next time.
DROP = text(f"""
WITH lost AS MATERIALIZED (
    SELECT id FROM bots
    WHERE id = ANY (CAST(:bot_ids AS bigint[])) AND (:all OR NOT ({HEALTHY.of(bot="")}))
), over AS MATERIALIZED (
    SELECT v.job_id FROM reservations v WHERE v.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND (
        v.bot_id IN (SELECT id FROM lost)
        OR v.until < clock_timestamp()
        OR NOT EXISTS (SELECT FROM jobs j WHERE j.id = v.job_id AND j.state = 'queued'))
), held AS MATERIALIZED (
    SELECT id, state, fence FROM jobs WHERE id = ANY (ARRAY(SELECT job_id FROM over))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM reservations v USING over o
    WHERE v.job_id = o.job_id AND v.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND (
        v.job_id IN (SELECT id FROM held) OR NOT EXISTS (SELECT FROM jobs j WHERE j.id = v.job_id))
    RETURNING v.job_id, v.bot_id, v.units, v.until
), less AS (
    UPDATE bots b SET reserved = b.reserved - s.units
    FROM (SELECT bot_id, sum(units) AS units FROM gone GROUP BY bot_id) s WHERE b.id = s.bot_id
), waiting AS MATERIALIZED (
    SELECT h.id, h.state, h.fence FROM held h JOIN gone g ON g.job_id = h.id WHERE h.state IN ('queued', 'parked')
), ready AS (
    UPDATE jobs j SET schedule_after = NULL, reason = CASE j.state WHEN 'parked' THEN j.reason END
    FROM gone g WHERE g.job_id = j.id AND j.schedule_after = g.until
        AND j.id = ANY (ARRAY(SELECT id FROM waiting))
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT w.id, 'unreserve', 'queued', 'queued', w.fence, :actor, jsonb_build_object('reason',
        CASE WHEN l.id IS NULL THEN 'the reservation is over' ELSE 'the bot takes no work any more' END)
    FROM waiting w JOIN gone g ON g.job_id = w.id LEFT JOIN lost l ON l.id = g.bot_id
    WHERE w.state = 'queued'
)
SELECT g.job_id, c.fence FROM gone g LEFT JOIN held h ON h.id = g.job_id
LEFT JOIN charges c ON c.job_id = g.job_id AND c.fence = h.fence + 1
""")


def preempt(
    connection: Connection,
    *,
    preemptor: int,
    units: int,
    cohort: int,
    bot_id: int,
    victims: Sequence[tuple[int, int]],
    rule: str,
    receipt: Mapping[str, Any],
    sync: float,
    reservation: float,
    actor: str,
    again: bool = False,
) -> bool:
    """Ask the bot to stop the victims, given as (job id, fence), and reserve what they free for the preemptor.

    `receipt` is kept with both jobs and, where a victim is evicted, in the log of evictions, for which it has to name
    the preemptor's public id as `preemptor.job`.

    The caller holds the preemptor's row. False if anything that the plan rested on has changed, which leaves all as it
    was. `sync` is the bots' sync period and `reservation` how long to keep the room after they must have stopped,
    both in seconds. `again` says that this transaction has granted leases or preempted before and so may hold quotas
    already: then one that somebody else holds counts as a change, because waiting out of order could deadlock.
    """
    job_ids, fences = zip(*sorted(victims), strict=True)
    plan = {"job_ids": list(job_ids), "fences": list(fences), "bot_id": bot_id, "preemptor": preemptor}
    if connection.execute(LOCK_BOT, {"bot_id": bot_id}).one_or_none() is None:
        return False
    if len(connection.execute(LOCK_VICTIMS, {"job_ids": plan["job_ids"]}).all()) < len(job_ids):
        return False
    connection.execute(WRITES_LEASES)
    quotas = {"cohort": cohort, "job_ids": plan["job_ids"], "preemptor": preemptor}
    if not connection.execute(LOCK_QUOTAS[again], quotas).scalar_one():
        return False
    if not connection.execute(STILL_VALID, {**plan, "cohort": cohort, "units": units, "sync": sync}).scalar_one():
        return False
    connection.execute(
        PREEMPT,
        {
            **plan,
            "rule": rule,
            "receipt": json.dumps(receipt),
            "sync": sync,
            "patience": sync + KILL_GRACE + reservation,
            "actor": actor,
        },
    )
    wake(connection, "bots", [str(bot_id)])
    return True


def lock_reserved_jobs(connection: Connection, bot_id: int, *, free_units: int) -> list[int]:
    """Lock the jobs for which room on this bot is reserved and that fit into `room` units; returns their ids. The
    caller holds the bot's row."""
    return [row.id for row in connection.execute(LOCK_RESERVED_JOBS, {"bot_id": bot_id, "room": free_units})]


def lock_quotas(connection: Connection, bot_ids: Sequence[int]) -> None:
    """Lock the quotas of what the bots hold and of the jobs they keep room for, so that those jobs can be granted in
    the transaction that ends the former, whoever else wants these quotas. The caller holds the bots and the jobs of
    their leases, and no quota."""
    connection.execute(WRITES_LEASES)
    connection.execute(RESERVED_QUOTAS, {"bot_ids": list(bot_ids)})


def drop_reservations(connection: Connection, bot_ids: Sequence[int], *, actor: str) -> None:
    """The bots are no longer there, or take no work: what they were kept for goes back into the queue. The caller holds
    their rows."""
    _drop(connection, bot_ids, all_reservations=True, actor=actor)


def expire_reservations(connection: Connection, limit: int, *, actor: str = "upkeep") -> int:
    """Give up reservations that are over, whose job is not queued any more, or whose bot takes no work, on up to
    `limit` bots; returns how many."""
    bot_ids = [row.id for row in connection.execute(OVER, {"limit": limit})]
    if not bot_ids:
        return 0
    dropped = _drop(connection, bot_ids, all_reservations=False, actor=actor)
    wake(connection, "jobs")
    return dropped


def _drop(connection: Connection, bot_ids: Sequence[int], *, all_reservations: bool, actor: str) -> int:
    """Give up reservations, and what was counted for leases that will not be; returns how many."""
    gone = connection.execute(DROP, {"bot_ids": list(bot_ids), "all": all_reservations, "actor": actor}).all()
    unused = [Settlement(row.job_id, row.fence, {}, None, final=False) for row in gone if row.fence is not None]
    settle(connection, unused)
    return len(gone)
