"""A queued job that nobody could place waits; the state stays `queued`, so these moves write no event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.picking.queues import backoff_queues
from schema.postgres.fragments import newest_version
from schema.predicates import AT_REST, CONSTRAINED, DUE, READY, RESTING, serves

# Ids go into an update as one array, which leaves the planner nothing but the primary key, whatever it knows.
# The wait grows with each failed consideration and has some jitter, so that a crowd does not come back at once.
POSTPONE = text(f"""
WITH alike AS MATERIALIZED (
    SELECT j.id FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                            CAST(:units AS integer[])) AS g (cohort, instance, platform, units)
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = g.cohort AND instance = g.instance AND platform = g.platform AND units >= g.units
            AND {READY}
        ORDER BY priority, queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
), gated AS MATERIALIZED (
    SELECT j.id FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                            CAST(:units AS integer[])) AS g (cohort, instance, platform, units)
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = g.cohort AND instance = g.instance AND platform = g.platform AND units >= g.units
            AND {CONSTRAINED}
        ORDER BY cohort, instance, platform, constraint_set, rank, queued_at, id LIMIT :limit
        FOR NO KEY UPDATE SKIP LOCKED) j
    LIMIT :limit
)
UPDATE jobs j SET considered = j.considered + 1, reason = :reason,
    schedule_after = now() + make_interval(secs =>
        least(:cap, :base * 2.0 ^ least(j.considered, 30)) * (1 + 0.1 * random()))
WHERE j.id = ANY (ARRAY(SELECT id FROM alike UNION ALL SELECT id FROM gated))
RETURNING j.id
""")

# Retries have a leg of their own: a crowd that nobody could place must not keep them waiting.
PROMOTE = text(f"""
WITH retries AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE {AT_REST} AND considered = 0 AND {DUE}
    ORDER BY schedule_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), rested AS MATERIALIZED (
    SELECT id FROM jobs
    WHERE {AT_REST} AND considered > 0 AND {DUE}
    ORDER BY schedule_after LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), due AS MATERIALIZED (
    SELECT id FROM retries UNION ALL SELECT id FROM rested
)
UPDATE jobs j SET schedule_after = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM due))
RETURNING j.constraint_set IS NOT NULL AS gated
""")

RELEASE = text(f"""
WITH RECURSIVE {backoff_queues("resting")}, waiting AS MATERIALIZED (
    SELECT j.id FROM resting q
    JOIN (SELECT id AS instance, pool FROM instances) i ON i.instance = q.instance
    JOIN (SELECT c.id, c.cohort, c.instance, c.pool, r.room
          FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:rooms AS integer[])) AS r (bot_id, room)
          CROSS JOIN LATERAL {newest_version("bots", "id", "r.bot_id")} c OFFSET 0) b ON b.cohort = q.cohort
    CROSS JOIN LATERAL (
        SELECT FROM bot_platforms bp WHERE bp.platform = q.platform AND bp.bot_id = b.id OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT id FROM jobs
        WHERE cohort = q.cohort AND instance = q.instance AND platform = q.platform
            AND {RESTING} AND considered <> 0 AND units <= b.room
        ORDER BY priority, queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
    ) j
    WHERE {serves("b", "i")}
    LIMIT :limit
)
UPDATE jobs j SET schedule_after = NULL, considered = 0, reason = NULL WHERE j.id = ANY (ARRAY(SELECT id FROM waiting))
RETURNING j.id
""")


@dataclass(frozen=True)
class JobGroup:
    """Ready jobs of one cohort, instance and requirement set that need at least so many units."""

    cohort: int
    instance: int
    platform: int
    units: int


def postpone(
    connection: Connection, groups: Sequence[JobGroup], *, reason: str, base: float, cap: float, limit: int
) -> int:
    """No bot could take a job of these groups: look again after base x 2^(failures so far) seconds, at most `cap`.

    Goes for up to `limit` ready jobs of these groups, because what failed for one fails for all of them, and trying
    them one by one would keep the jobs behind them waiting. With `base` 0 a job is looked at again at once and, if
    nobody can run it, keeps the assigners busy. Returns how many were postponed.
    """
    if not groups:
        return 0
    rows = connection.execute(
        POSTPONE,
        {
            "cohorts": [group.cohort for group in groups],
            "instances": [group.instance for group in groups],
            "platforms": [group.platform for group in groups],
            "units": [group.units for group in groups],
            "reason": reason,
            "base": base,
            "cap": cap,
            "limit": limit,
        },
    )
    return len(rows.all())


@dataclass(frozen=True)
class Promoted:
    """Jobs whose wait is over, and how many of them ask for more than a place."""

    jobs: int
    constrained: int


def promote(connection: Connection, limit: int) -> Promoted:
    """Make up to `limit` retries and `limit` other jobs whose wait is over ready again."""
    rows = connection.execute(PROMOTE, {"limit": limit}).all()
    return Promoted(len(rows), sum(row.gated for row in rows))


def release(connection: Connection, free_units: Mapping[int, int], *, limit: int) -> int:
    """Bots, by their ids, have come or have got more room, so many units: up to `limit` jobs that fit there and waited
    for the likes of them need not wait any longer. Costs one look at an index where none does."""
    where = {"bot_ids": list(free_units), "rooms": list(free_units.values()), "limit": limit}
    return len(connection.execute(RELEASE, where).all())
