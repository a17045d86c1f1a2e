"""Picks: which jobs may be placed now.

A pick takes only from queues that do not rest and are open, because their instance is not drained and its quota leaves
enough for one of their jobs, and for which a free bot is there. It looks at the front of the line first; only where
much of that cannot be placed it looks into each queue, so that any number of jobs that nobody can run costs nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, TextClause, text

from schema.accounting.quotas import EVICTION_COOLDOWN, HEADROOM, Guard
from schema.fleet import candidates
from schema.fleet.candidates import MAX_BOTS_READ
from schema.picking import head_cursor
from schema.picking.head_cursor import HeadCursor
from schema.picking.queues import AWAKE, PLAIN, open_queues, ready_ranks
from schema.predicates import COHORT, HEALTHY, READY, STILL_READY, ready_queues, serves

#: Heads read for each job that is wanted, so that assigners working side by side find jobs the others did not lock:
#: first few, and only where those did not do, because others hold them, many.
WIDTHS = (2, 6, 16)

#: Where many queues are open, each is read for its even share of the heads, times `SPARE`, and for so many at least.
#: What comes after the last head of a queue that has more is left for the next pick, so that the order is kept.
LEAST_HEADS, SPARE = 8, 4


class Order(Enum):
    """In which order queued jobs are taken."""

    PRIORITY = "rank, queued_at, id"
    AGE = "queued_at, id"


class ReadyJob(NamedTuple):
    """A queued job, locked by the transaction that picked it. `tried`: its queue has been looked into in vain."""

    id: int
    public_id: str
    queue: int
    cohort: int
    instance: int
    platform: int
    priority: int
    units: int
    locality_hint: str | None
    tried: bool


#: Columns of a job that is picked, before `tried`.
COLUMNS = "id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint"

#: Of a job `p` that was picked from the CTE `{queues}`; nearly always no queue has been looked into in vain.
TRIED = "p.queue = ANY (ARRAY(SELECT queue FROM {queues} WHERE looks > 0)) AS tried"

_WANTED = """wanted AS MATERIALIZED (
    {open}
        AND (CAST(:instances AS integer[]) IS NULL OR w.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR w.cohort = ANY (CAST(:cohorts AS integer[])))
)"""

# Each look ends with the first hit; where bots are alike, the first one decides it, at bots that have been read before.
# Lateral subqueries with OFFSET 0 keep the planner from joining, and so reading, whole tables when its statistics are
# old or missing.
_SERVED = f"""
    EXISTS (
        SELECT FROM (SELECT * FROM roomy LIMIT 2) b
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = b.id OFFSET 0) bp
        WHERE {COHORT.of(bot="b", want="w")} AND {serves("b", "w")} OFFSET 0)
    OR EXISTS (
        SELECT FROM ({candidates.offering_bots("w", start=":start", limit=":look")}) near
        CROSS JOIN LATERAL (
            SELECT FROM bots b
            WHERE b.id = near.bot_id AND b.free AND {serves("b", "w")} OFFSET 0) b
        OFFSET 0)
    OR EXISTS (
        SELECT FROM ({candidates.free_bots("w", start=":start", limit=":look")}) near
        CROSS JOIN LATERAL (
            SELECT FROM bot_platforms bp WHERE bp.platform = w.platform AND bp.bot_id = near.bot_id OFFSET 0) bp
        OFFSET 0)"""

# No more jobs are picked, and locked, than there are free units for.
ROOM = """roomy AS MATERIALIZED (
    SELECT id, cohort, instance, pool, capacity - in_use - reserved AS units FROM bots
    WHERE free AND (CAST(:cohorts AS integer[]) IS NULL OR cohort = ANY (CAST(:cohorts AS integer[]))) LIMIT :batch
), room AS MATERIALIZED (
    SELECT least(:batch, coalesce(sum(units), 0)) AS jobs FROM roomy
)"""

SERVED = f"""served AS MATERIALIZED (
    SELECT w.*, row_number() OVER () AS nth FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND ({_SERVED})
)"""

# The heads are looked up as one array and looked at again in words that fit no index of ready jobs, which leaves the
# planner nothing but their primary keys.
_PICKED = f"""picked AS MATERIALIZED (
    SELECT {COLUMNS} FROM jobs
    WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND {STILL_READY}
    ORDER BY {{order}} LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)"""

# What a quota leaves is not much exceeded by what is picked for it, so that a batch is not full of jobs that lose.
_FROM_HEAD_CURSOR = f"""
WITH {ROOM}, {head_cursor.head_jobs(cohorts="{cohorts}", limit="(SELECT jobs FROM room) * :reach")},
waiting AS MATERIALIZED (SELECT DISTINCT queue FROM front),
{{wanted}}, {SERVED}, fit AS MATERIALIZED (
    SELECT f.id, s.headroom / s.units AS most,
        CASE WHEN s.headroom IS NOT NULL
            THEN row_number() OVER (PARTITION BY s.nth ORDER BY f.rank, f.queued_at, f.id) END AS nth
    FROM front f JOIN served s USING (queue)
), heads AS MATERIALIZED (
    SELECT id FROM fit WHERE coalesce(nth <= most * :reach, true)
), {_PICKED.format(order=Order.PRIORITY.value)}
SELECT r.heads, r.jobs, CASE WHEN row_number() OVER () = 1 THEN ({head_cursor.SCANNED}) END AS walked, p.*,
    {TRIED.format(queues="served")} FROM (
    SELECT (SELECT count(*) FROM heads) AS heads, (SELECT jobs FROM room) AS jobs) r
LEFT JOIN picked p ON true
"""

# By age, each rank of a queue is looked into.
_PICK = f"""
WITH RECURSIVE {ready_queues("waiting")}, {{wanted}}, {ROOM}, {SERVED}, lanes AS MATERIALIZED (
    SELECT s.*, row_number() OVER () AS lane FROM {{lanes}}
), share AS MATERIALIZED (
    SELECT least(jobs * :reach,
                 greatest({LEAST_HEADS}, {SPARE} * jobs * :reach / greatest((SELECT count(*) FROM lanes), 1))) AS heads
    FROM room
), first_heads AS MATERIALIZED (
    SELECT s.lane, h.* FROM lanes s CROSS JOIN LATERAL (
        SELECT id, rank, queued_at FROM jobs
        WHERE queue = s.queue {{same_lane}} AND {READY}
        ORDER BY {{order}} LIMIT least(s.headroom / s.units * :reach, (SELECT heads FROM share))) h
), cut AS MATERIALIZED (
    SELECT {{order}} FROM (
        SELECT DISTINCT ON (h.lane) h.* FROM first_heads h
        JOIN (SELECT lane, count(*) AS heads FROM first_heads GROUP BY lane) f ON f.lane = h.lane
        WHERE f.heads >= (SELECT heads FROM share) AND f.heads < (SELECT jobs FROM room) * :reach
        ORDER BY h.lane, {{backwards}}) last
    ORDER BY {{order}} LIMIT 1
), heads AS MATERIALIZED (
    SELECT id FROM first_heads
    WHERE coalesce(({{order}}) <= (SELECT {{order}} FROM cut), true)
    ORDER BY {{order}} LIMIT (SELECT jobs FROM room) * :reach
), {_PICKED}
SELECT r.heads, r.jobs, r.cut, p.*, {TRIED.format(queues="served")} FROM (
    SELECT (SELECT count(*) FROM heads) AS heads, (SELECT jobs FROM room) AS jobs, EXISTS (SELECT FROM cut) AS cut) r
LEFT JOIN picked p ON true
"""

_LANES = {
    Order.PRIORITY: {"lanes": "served s", "same_lane": ""},
    Order.AGE: {
        "lanes": f"(SELECT served.*, z.rank FROM served CROSS JOIN LATERAL ({ready_ranks('served.queue')}) z) s",
        "same_lane": "AND rank = s.rank",
    },
}


def queues_in_scope(guard: Guard, *, which: str = f"{PLAIN} AND {AWAKE}") -> str:
    """The CTE `wanted`: those queues of the CTE `waiting` that are open and in the scope; `which` is a condition on the
    row `k` of `queues`."""
    return _WANTED.format(open=open_queues("waiting", HEADROOM[guard], which=which))


PICK: dict[tuple[Order, Guard], TextClause] = {
    (order, guard): text(
        _PICK.format(
            wanted=queues_in_scope(guard),
            order=order.value,
            backwards=", ".join(f"h.{column} DESC" for column in order.value.split(", ")),
            **_LANES[order],
        )
    )
    for order in Order
    for guard in Guard
}
FROM_HEAD_CURSOR = text(
    _FROM_HEAD_CURSOR.format(
        wanted=queues_in_scope(Guard.MAX),
        cohorts="CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[]))",
    )
)

INSTANCES = text("""
SELECT id FROM instances WHERE name = ANY (CAST(:names AS text[]))
    OR pool IN (SELECT pool FROM instances WHERE name = ANY (CAST(:names AS text[])))
""")


@dataclass(frozen=True)
class Scope:
    """Which queues an assigner looks into: of these instances and cohorts, None for all, up to a quota's limit.

    `cooldown`: seconds for which an eviction lowers an instance's maximum.
    """

    instances: Sequence[int] | None = None
    cohorts: Sequence[int] | None = None
    guard: Guard = Guard.MAX
    cooldown: float = EVICTION_COOLDOWN

    def values(self) -> dict[str, Any]:
        """What the queries ask for."""
        return {
            "instances": None if self.instances is None else list(self.instances),
            "cohorts": None if self.cohorts is None else list(self.cohorts),
            "cooldown": self.cooldown,
        }


def pick(
    connection: Connection,
    scope: Scope,
    *,
    order: Order,
    batch: int,
    chance: random.Random,
    cursor: HeadCursor | None = None,
) -> list[ReadyJob]:
    """Lock jobs for which a free bot is there, in `order`: up to `batch`, and no more than there are free units.

    Of a queue under a quota come no more jobs than fit into what its instance may still have; of several queues of one
    instance, together, there may be too many.
    Rows that others hold are skipped. `line`: what the caller remembers of the front, for picks by priority; without
    it each queue is looked into.
    """
    values = {**scope.values(), "start": chance.random(), "look": MAX_BOTS_READ, "batch": batch}
    if cursor is not None and order is Order.PRIORITY and scope.guard is Guard.MAX and cursor.is_worthwhile():
        first = _from_head_cursor(connection, values, cursor)
        if first is not None:
            return first
        cursor.disable_for_a_while()
    for reach in WIDTHS:
        rows = connection.execute(PICK[order, scope.guard], {**values, "reach": reach}).all()
        found = [ready_job(row) for row in rows if row.id is not None]
        short = rows[0].cut and 2 * len(found) < rows[0].jobs
        if not (short or is_contended(wanted=rows[0].jobs, heads=rows[0].heads, found=len(found), reach=reach)):
            break
    return found


def _from_head_cursor(connection: Connection, values: dict[str, Any], cursor: HeadCursor) -> list[ReadyJob] | None:
    """Pick from the front alone; None if that does not do, because most of what it holds cannot be placed."""
    for reach in cursor.widths(WIDTHS):
        scan = cursor.begin()
        rows = connection.execute(FROM_HEAD_CURSOR, {**values, **scan.values(), "reach": reach}).all()
        seen = rows[0]
        walked = cursor.learn(scan, seen.walked, limit=seen.jobs * reach)
        found = [ready_job(row) for row in rows if row.id is not None]
        if len(found) == seen.jobs or walked < seen.jobs * reach:
            cursor.remember_width(WIDTHS, reach)
            return found
        if 2 * seen.heads < walked:
            return None
    return found


def is_contended(*, wanted: int, heads: int, found: int, reach: int) -> bool:
    """Whether too few of the heads that were read were free, while there may be more behind them."""
    return found < wanted and heads >= wanted * reach


def ready_job(row: Row[Any]) -> ReadyJob:
    """The job of a row whose last columns are `COLUMNS` and `TRIED`."""
    # By their places: this is done for each job, and looking for names takes a third of it.
    return ReadyJob._make(row[-len(ReadyJob._fields) :])


def instance_ids(connection: Connection, names: Sequence[str]) -> list[int]:
    """The ids of those instances that exist, and of the others in their pools, which are scheduled together."""
    return [row.id for row in connection.execute(INSTANCES, {"names": list(names)})]


# Queues that hold ready jobs which nobody can run: they are to rest.


# No healthy bot could serve them, were it ever so idle.
UNSERVED_QUEUES = text(f"""
WITH RECURSIVE {ready_queues("waiting")}, {queues_in_scope(Guard.MAX)}
SELECT w.queue FROM wanted w
WHERE NOT EXISTS (
    SELECT FROM (SELECT bot_id FROM bot_platforms WHERE platform = w.platform AND cohort = w.cohort OFFSET 0) bp
    CROSS JOIN LATERAL (
        SELECT FROM bots b
        WHERE b.id = bp.bot_id AND {serves("b", "w")}
            AND {HEALTHY.of(bot="b")} AND b.capacity > 0 OFFSET 0) b
    OFFSET 0)
LIMIT :limit
""")


def unserved_queues(connection: Connection, scope: Scope, *, limit: int) -> list[int]:
    """The ids of queues that hold ready jobs which no healthy bot satisfies, whether free or full."""
    return list(connection.execute(UNSERVED_QUEUES, {**scope.values(), "limit": limit}).scalars())
