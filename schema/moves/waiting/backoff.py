"""Let queues rest and wake them, make jobs ready whose backoff after a failure is over, and end the waits of jobs for a
preferred bot.

The state of the jobs stays `queued`, so these moves write no event.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from schema.fleet.candidates import ROOMY_FOR_ALL, able_bots
from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_version, stored_seconds
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, DUE, REQUIREMENTS, UNITS, serves

# The rest gets longer with each look in vain, up to exactly the cap. Until then some jitter spreads the queues, which
# keeps many of them from coming back at once. A locked row means that another transaction puts the queue to rest or
# wakes it.
REST = Statement("""
WITH found AS MATERIALIZED (
    SELECT id FROM queues
    WHERE id = ANY (CAST(:ids AS integer[])) AND (schedule_after IS NULL OR schedule_after <= now())
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE queues q SET looks = q.looks + 1, reason = :reason,
    schedule_after = now() + make_interval(secs =>
        least(:cap, :base * 2.0 ^ least(q.looks, 30) * (1 + 0.1 * random())))
FROM found f WHERE q.id = f.id
RETURNING q.id
""")

# A locked row means that another transaction puts the queue to rest, which cannot be seen yet, or wakes it.
_WAKE = """
UPDATE queues q SET looks = 0, schedule_after = NULL, reason = NULL
WHERE q.id = ANY (ARRAY(SELECT id FROM found)) RETURNING q.id"""
WAKE = Statement(f"""
WITH found AS MATERIALIZED (
    SELECT id FROM queues WHERE id = ANY (CAST(:ids AS integer[])) AND looks > 0
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
{_WAKE}
""")
WAKE_ALL = Statement(f"""
WITH found AS MATERIALIZED (
    SELECT id FROM queues WHERE schedule_after > now() ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
{_WAKE}
""")
WAKE_FOR_BOTS = Statement(f"""
WITH roomy AS MATERIALIZED (
    SELECT c.kind, c.cohort, c.instance, c.pool, r.room AS capacity
    FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:rooms AS integer[])) AS r (bot_id, room)
    CROSS JOIN LATERAL {newest_version("bots", "id", "r.bot_id")} c
), resting AS MATERIALIZED (
    SELECT q.id, q.cohort, q.instance, q.platform, q.units, i.pool FROM queues q
    CROSS JOIN LATERAL (SELECT pool FROM instances WHERE id = q.instance OFFSET 0) i
    WHERE q.schedule_after > now()
), found AS MATERIALIZED (
    SELECT id FROM queues WHERE id = ANY (ARRAY(
        SELECT w.id FROM resting w WHERE EXISTS (
            SELECT FROM roomy b
            WHERE b.cohort = w.cohort AND {UNITS.of(bot="b", want="w")} AND {serves("b", "w")}
                AND {REQUIREMENTS.of(bot="b", want="w")} OFFSET 0)))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
{_WAKE}
""")
WAKE_SERVED = Statement(f"""
WITH resting AS MATERIALIZED (
    SELECT q.id, q.cohort, q.instance, q.platform, q.units, i.pool FROM queues q
    CROSS JOIN LATERAL (SELECT pool FROM instances WHERE id = q.instance OFFSET 0) i
    WHERE q.id = ANY (CAST(:ids AS integer[])) AND q.schedule_after > now()
), found AS MATERIALIZED (
    SELECT id FROM queues WHERE id = ANY (ARRAY(
        SELECT w.id FROM resting w WHERE EXISTS ({able_bots("b.id", "w", which=ROOMY_FOR_ALL, limit="1")} OFFSET 0)))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
{_WAKE}
""")

PROMOTE = Statement(f"""
WITH retries AS MATERIALIZED (
    SELECT id FROM jobs WHERE {AT_REST} AND {DUE} ORDER BY schedule_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs j SET schedule_after = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM retries))
RETURNING j.constrained
""")

# A job of a graph that is still blocked begins to wait when it is queued, of which nothing tells this table. It is
# looked at again when its wait could be over at the earliest, but not too often. A job may just have been moved to a
# queue that this statement does not see yet: its wait stays. Queues are made in the order in which submits make them.
STOP_PREFERRING = Statement(f"""
WITH due AS MATERIALIZED (
    SELECT w.job_id, w.seconds, j.queue, j.state, j.finished_at, j.queued_at
    FROM preference_waits w JOIN jobs j ON j.id = w.job_id
    WHERE w.until <= now() ORDER BY w.until LIMIT :limit FOR NO KEY UPDATE OF w, j SKIP LOCKED
), found AS MATERIALIZED (
    SELECT job_id AS id, queue, state, finished_at IS NULL AS is_unfinished, seconds,
        queued_at + {stored_seconds("seconds")} AS until
    FROM due
), later AS (
    UPDATE preference_waits w SET until = CASE WHEN f.state = 'blocked'
        THEN now() + {stored_seconds("greatest(f.seconds, :patience)")} ELSE f.until END
    FROM found f WHERE w.job_id = f.id AND f.is_unfinished AND (f.state = 'blocked' OR f.until > now())
    RETURNING w.job_id
), over AS MATERIALIZED (
    SELECT f.id, f.is_unfinished, f.queue FROM found f JOIN queues q ON q.id = f.queue
    WHERE f.id NOT IN (SELECT job_id FROM later)
), known_queues AS MATERIALIZED (
    SELECT k.id, k.required,
        intern_queue(k.cohort, k.instance, k.required, k.units, k.constraint_set, k.preferred) AS new_id
    FROM (
        SELECT q.* FROM queues q
        WHERE q.required IS NOT NULL AND q.id = ANY (ARRAY(SELECT queue FROM over WHERE is_unfinished))
        ORDER BY q.cohort, q.instance, q.required, q.units, q.constraint_set, q.preferred OFFSET 0) k
), ended AS (
    DELETE FROM preference_waits w USING over o WHERE w.job_id = o.id
)
UPDATE jobs j SET queue = k.new_id, platform = k.required
FROM over o JOIN known_queues k ON k.id = o.queue WHERE j.id = o.id AND o.is_unfinished
RETURNING j.constrained
""")
#: Seconds after which a job that is still blocked is looked at again, at least.
BLOCKED_PATIENCE = 10.0


def rest_queues(connection: Connection, queues: Collection[int], *, reason: str, base: float, cap: float) -> list[int]:
    """Let queues rest of which no bot could take a job, for base x 2^(looks so far) seconds, at most `cap`.

    Returns the ids of those that rest now and did not before. New jobs of a resting queue wait with it. If `cap` equals
    `base`, every rest takes exactly so long. With `base` 0 a queue does not rest, and keeps the assigners busy if no
    bot can run its jobs.
    """
    if not queues:
        return []
    values = {"ids": list(queues), "reason": reason, "base": base, "cap": cap}
    return [row.id for row in connection.execute(REST, values)]


def wake_queues(connection: Connection, queues: Collection[int]) -> int:
    """Wake queues of which a bot has taken a job: the next look in vain counts as the first. Returns how many queues
    had been looked into in vain."""
    return len(connection.execute(WAKE, {"ids": list(queues)}).all()) if queues else 0


def wake_all_queues(connection: Connection) -> None:
    """Wake all queues that rest."""
    connection.execute(WAKE_ALL)


def wake_queues_for_bots(connection: Connection, free_units: Mapping[int, int]) -> None:
    """Wake the resting queues that have a job for one of these bots, with the next statement or with COMMIT.

    A queue whose rest is over is left to the assigners, so that its jobs do not become new ones, which bots may fetch.
    free_units: the free units of each bot that has arrived or has more room, by its id.
    Costs one look at an index if no queue rests.
    """
    where = {"bot_ids": list(free_units), "rooms": list(free_units.values())}
    connection.execute_later(WAKE_FOR_BOTS, where)


def wake_served(connection: Connection, queues: Collection[int]) -> int:
    """Wake those of these queues that rest although some bot has room for one of their jobs; returns how many.

    A bot that came, or had more room, could not see that a queue rests whose rest was not committed yet.
    """
    return len(connection.execute(WAKE_SERVED, {"ids": list(queues)}).all())


@dataclass(frozen=True)
class Promoted:
    """The number of jobs whose backoff or wait is over, and of constrained jobs among them."""

    jobs: int
    constrained: int


def promote(connection: Connection, limit: int) -> Promoted:
    """Make up to `limit` jobs ready whose backoff is over."""
    rows = connection.execute(PROMOTE, {"limit": limit}).all()
    return Promoted(len(rows), sum(row.constrained for row in rows))


def stop_preferring(connection: Connection, limit: int) -> Promoted:
    """Let up to `limit` jobs go to any bot that offers what they require, because they have waited for a preferred one
    for as long as they should."""
    rows = connection.execute(STOP_PREFERRING, {"limit": limit, "patience": BLOCKED_PATIENCE}).all()
    return Promoted(len(rows), sum(row.constrained for row in rows))
