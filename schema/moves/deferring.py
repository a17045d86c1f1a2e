"""queued -> deferred: more jobs wait than may, and deferred -> queued: there is room again."""

from sqlalchemy import Connection, text

from schema.gates import GATED, IN_LINE, STILL_READY

#: Places that are looked at: of cohorts and priorities, and of queues and ranks.
PLACES = 2000
#: Names in one notification, whose payload is bounded.
NAMES = 200


def _lows(name: str, columns: str, sort: str, waiting: str, least: str) -> str:
    """Every value of `columns` and `sort` of which the latter is above `:normal`, one step along the index for each."""
    step = f"SELECT {columns}, {sort} FROM jobs WHERE {waiting} AND ({columns}, {sort}) > ({{after}})"
    step += f" ORDER BY {columns}, {sort} LIMIT 1"
    after = ", ".join(f"z.{column}" for column in columns.split(", "))
    beginning = ", ".join(["-1"] * len(columns.split(", ")))
    return f"""{name} AS (
        SELECT f.*, 1 AS steps FROM ({step.format(after=f"{beginning}, {least}")}) f
        UNION ALL
        SELECT f.*, z.steps + 1 FROM {name} z CROSS JOIN LATERAL (
            {step.format(after=f"{after}, greatest(z.{sort}, :normal)")}) f WHERE z.steps < {PLACES}
    )"""


_ORDINARY, _GATED = "cohort", "cohort, instance, platform, constraint_set"


def _newest(name: str, columns: str, sort: str, waiting: str) -> str:
    """The newest of each of those, from the end of their stretch of the index. What somebody may join stays."""
    same = " AND ".join(f"{column} = z.{column}" for column in [*columns.split(", "), sort])
    back = ", ".join(f"{column} DESC" for column in [*columns.split(", "), sort])
    return f"""SELECT n.id, n.queued_at FROM {name} z CROSS JOIN LATERAL (
        SELECT id, queued_at FROM jobs WHERE {waiting} AND {same} AND dedup_key IS NULL
        ORDER BY {back}, queued_at DESC, id DESC LIMIT :limit) n WHERE z.{sort} > :normal"""


# What somebody else has locked is left for the next time.
DEFER = text(f"""
WITH RECURSIVE {_lows("ordinary", _ORDINARY, "priority", IN_LINE, "-2147483648")},
{_lows("gated", _GATED, "rank", GATED, "'-infinity'")},
newest AS MATERIALIZED (
    SELECT id, queued_at FROM (
        {_newest("ordinary", _ORDINARY, "priority", IN_LINE)} UNION ALL {_newest("gated", _GATED, "rank", GATED)}) low
    ORDER BY queued_at DESC, id DESC LIMIT :limit
), held AS MATERIALIZED (
    SELECT id FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM newest)) AND {STILL_READY}
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'deferred', reason = 'more jobs wait than may'
    FROM held h WHERE j.id = h.id AND j.state = 'queued' RETURNING j.id, j.public_id, j.fence
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor, details)
    SELECT id, 'defer', 'queued', 'deferred', fence, :actor, jsonb_build_object('may_wait', CAST(:most AS integer))
    FROM moved
), told AS (
    SELECT wake('deferred', string_agg(public_id::text, ',')) FROM (
        SELECT public_id, row_number() OVER (ORDER BY id) / {NAMES} AS part FROM moved) parts GROUP BY part
)
SELECT public_id, (SELECT count(*) FROM told) AS woken FROM moved ORDER BY id
""")

# They keep their place in the order. The cohorts may have changed meanwhile.
RETURN = text("""
WITH oldest AS MATERIALIZED (
    SELECT id FROM jobs WHERE state = 'deferred' ORDER BY queued_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'queued', reason = NULL, cohort = cohort_of(j.label)
    FROM oldest o WHERE j.id = o.id AND j.state = 'deferred' RETURNING j.id, j.fence
), noted AS (
    INSERT INTO job_events (job_id, move, from_state, to_state, fence, actor)
    SELECT id, 'return', 'deferred', 'queued', fence, :actor FROM moved
), told AS (
    SELECT wake('jobs') FROM moved HAVING count(*) > 0
)
SELECT count(*), (SELECT count(*) FROM told) FROM moved
""")


def defer(connection: Connection, limit: int, *, normal: int, most: int, actor: str) -> list[str]:
    """Take up to `limit` of the newest jobs of the low level, whose effective priority is above `normal`, off the
    queue, because more than `most` wait; returns their public ids."""
    rows = connection.execute(DEFER, {"limit": limit, "normal": normal, "most": most, "actor": actor})
    return [str(row.public_id) for row in rows]


def return_deferred(connection: Connection, limit: int, *, actor: str) -> int:
    """Put up to `limit` of the oldest deferred jobs back where they were in the queue; returns how many."""
    return int(connection.execute(RETURN, {"limit": limit, "actor": actor}).one()[0])
