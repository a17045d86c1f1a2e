"""The statement that picks jobs: from the front of a cohort or from its queues, for an assigner or for a bot.

These four picks are one text with different parts. An `Asker` says how many jobs are wanted and from which queues they
may be taken. A pick from the front looks into no queue. It is tried first, because nearly always most of the front can
be placed. It gives nothing while an instance is below its minimum, because the jobs of that instance come first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Literal, NamedTuple

from schema.accounting.quotas import BEING_FREED
from schema.picking import head_cursor
from schema.picking.head_cursor import HeadCursor
from schema.picking.queues import HAS_AWAKE_JOBS, ready_ranks
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import DRAIN, READY_PLAIN, STILL_READY, ready_queues

#: Heads read for each job that is wanted, so that an assigner finds jobs that others have not locked. The next width is
#: tried only if others have locked too many of the heads.
WIDTHS = (2, 6, 16)

#: The heads to be read are divided evenly among the open queues. From each queue `SPARE` times its share is read, and
#: at least `LEAST_HEADS`. If a queue holds more jobs, jobs that come after its last head in the order wait for the next
#: pick.
LEAST_HEADS, SPARE = 8, 4


class Order(Enum):
    """The order in which queued jobs are taken."""

    PRIORITY = "rank, queued_at, id"
    AGE = "queued_at, id"


class ReadyJob(NamedTuple):
    """A queued job, locked by the transaction that picked it."""

    id: int
    public_id: str
    queue: int
    cohort: int
    instance: int
    platform: int
    priority: int
    units: int
    locality_hint: str | None
    #: An earlier look into its queue found no bot.
    tried: bool
    #: The requirement set of bots that it prefers; equal to `platform` if it takes no others yet.
    preferred: int | None = None
    #: Units that the quota of its instance leaves; None for any number.
    headroom: int | None = None
    #: When it was queued, if it is a plain job.
    queued_at: datetime | None = None
    #: The instance of a plain job reaches its minimum without it.
    beyond: bool = True


#: Columns of a job that is picked, up to `tried`.
COLUMNS = "id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint"


@dataclass(frozen=True)
class Asker:
    """Who asks for jobs, in SQL.

    room: common table expressions, of which `room` has one row with `jobs`, the number of jobs that are wanted.
    offered: such expressions, of which `offered` has those queues of `waiting` from which jobs may be taken, with their
        `queue`, `cohort`, `instance`, `units`, `looks`, and the `headroom` of the instance's quota.
    cohorts, instances: conditions on `{cohort}` and `{instance}`, the ids of those whose jobs may be taken.
    """

    room: str
    offered: str
    cohorts: str
    instances: str


# Units that instances lack of their minimum, less those that are being freed for them. The first comparison, which is
# cheap, comes before a look for jobs of each instance.
_MISSING = f"""
    SELECT q.cohort, q.instance, q.min_quota - q.usage - coalesce(k.units, 0) AS units FROM quotas q
    LEFT JOIN ({BEING_FREED}) k ON k.cohort = q.cohort AND k.instance = q.instance
    WHERE CAST(:minimums_first AS boolean) AND q.usage < q.min_quota
        AND q.min_quota - q.usage > coalesce(k.units, 0)"""
# An instance without offered queues keeps nothing from the others. The front does not tell which instances have jobs
# behind it.
_MISSING_OF_OFFERED = f"{_MISSING} AND (q.cohort, q.instance) IN (SELECT cohort, instance FROM offered)"
_MISSING_SOMEWHERE = f"""{_MISSING} AND {{scope}} AND {HAS_AWAKE_JOBS}
        AND EXISTS (SELECT FROM instances i WHERE i.id = q.instance AND {DRAIN.of(instance="i")} OFFSET 0)"""

# The pick from the front looks up the queues of the front's jobs. Not many more jobs are picked than a quota allows, so
# that the batch is not full of jobs that the grant refuses.
_FROM_FRONT = """missing AS MATERIALIZED ({missing}
), {front}, waiting AS MATERIALIZED (SELECT DISTINCT queue FROM front), {offered}, fit AS MATERIALIZED (
    SELECT f.id, f.rank, f.queued_at, o.headroom / o.units AS most,
        CASE WHEN o.headroom IS NOT NULL
            THEN row_number() OVER (PARTITION BY o.queue ORDER BY f.rank, f.queued_at, f.id) END AS nth
    FROM front f JOIN offered o USING (queue)
), heads AS MATERIALIZED (
    SELECT id, true AS beyond FROM fit WHERE coalesce(nth <= most * :reach, true) AND NOT EXISTS (SELECT FROM missing)
)"""

# The pick from the queues reads the first jobs of each queue and puts them into one order. Its steps:

# A lane is where jobs of one order are read: a queue, or in the order of age each rank of a queue. `needed`: jobs that
# its instance may need to reach its minimum.
_LANES = """
    SELECT o.*, row_number() OVER () AS lane, m.units / o.units + 1 AS needed
    FROM {lanes} LEFT JOIN missing m ON m.cohort = o.cohort AND m.instance = o.instance"""
# `all_heads` are read of all lanes together, and `heads` of one of them.
_SHARE = """
    SELECT jobs * :reach AS all_heads,
        greatest({least}, {spare} * jobs * :reach / greatest((SELECT count(*) FROM lanes), 1)) AS heads
    FROM room"""
# The first jobs of each lane: its share, all that its instance may need, and not many more than its quota allows.
# `is_cut_short`: no more were read because of the share.
_FIRST_HEADS = """
    SELECT l.lane, s.heads < s.all_heads AS is_cut_short, s.heads, l.cohort, l.instance, l.units, h.*
    FROM lanes l CROSS JOIN LATERAL (
        SELECT all_heads, least(all_heads, greatest(heads, l.needed * :reach)) AS heads FROM share) s
    CROSS JOIN LATERAL (
        SELECT id, rank, queued_at FROM jobs WHERE queue = l.queue{same_lane} AND {ready}
        ORDER BY {order} LIMIT least(l.headroom / l.units * :reach, s.heads)) h"""
# A job is `beyond` the minimum of its instance if the jobs before it fill the minimum. Nearly always no instance lacks
# anything, and nothing has to be summed.
_RANKED = """
    SELECT *, true AS beyond FROM first_heads WHERE NOT EXISTS (SELECT FROM missing)
    UNION ALL
    SELECT h.*, coalesce(
        sum(h.units) OVER (PARTITION BY h.cohort, h.instance ORDER BY {order}) - h.units >= m.units, true)
    FROM first_heads h LEFT JOIN missing m ON m.cohort = h.cohort AND m.instance = h.instance
    WHERE EXISTS (SELECT FROM missing)"""
# The place in the order up to which all jobs are known: the last head of a lane that was cut short, of these the first.
_CUT = """
    SELECT {full_order} FROM (
        SELECT DISTINCT ON (h.lane) h.* FROM ranked h
        JOIN (SELECT lane, count(*) AS heads FROM first_heads GROUP BY lane) f ON f.lane = h.lane
        WHERE h.is_cut_short AND f.heads >= h.heads
        ORDER BY h.lane, {backwards}) last
    ORDER BY {full_order} LIMIT 1"""
_HEADS = """
    SELECT id, beyond FROM ranked
    WHERE coalesce(({full_order}) <= (SELECT {full_order} FROM cut), true)
    ORDER BY {full_order} LIMIT (SELECT jobs FROM room) * :reach"""
_FROM_QUEUES = f"""{{waiting}}, {{offered}}, missing AS MATERIALIZED ({{missing}}
), lanes AS MATERIALIZED ({_LANES}
), share AS MATERIALIZED ({_SHARE}
), first_heads AS MATERIALIZED ({_FIRST_HEADS}
), ranked AS MATERIALIZED ({_RANKED}
), cut AS MATERIALIZED ({_CUT}
), heads AS MATERIALIZED ({_HEADS}
)"""

# The heads are looked up as one array. The condition on their state is written so that it matches no index of ready
# jobs, which leaves the planner only the primary key. Nearly always all heads are beyond a minimum.
_PICK = """
WITH RECURSIVE {room}, {heads}, picked AS MATERIALIZED (
    SELECT {columns}, preferred, queued_at FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM heads)) AND {still_ready}
    ORDER BY id <> ALL (ARRAY(SELECT id FROM heads WHERE NOT beyond)), {order}
    LIMIT (SELECT jobs FROM room) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT r.*, {told}, CASE WHEN row_number() OVER () = 1 THEN ({headrooms}) END AS headrooms,
    {picked}, p.queue = ANY (ARRAY(SELECT queue FROM offered WHERE looks > 0)) AS tried,
    p.preferred, CAST(NULL AS integer) AS headroom,
    p.queued_at, p.id <> ALL (ARRAY(SELECT id FROM heads WHERE NOT beyond)) AS beyond
FROM (SELECT (SELECT jobs FROM room) AS jobs, (SELECT count(*) FROM heads) AS heads,
    EXISTS (SELECT FROM missing) AS below) r
LEFT JOIN picked p ON true
"""


# What the quotas of the picked jobs' instances leave, once for all rows. To join it to each job would compare each job
# with each queue, and so would an array of the jobs' queues. In this form a queue is found by one look-up.
_HEADROOMS = """
    SELECT jsonb_agg(jsonb_build_array(cohort, instance, headroom)) FROM (
        SELECT DISTINCT cohort, instance, headroom FROM offered
        WHERE headroom IS NOT NULL AND (queue IN (SELECT queue FROM picked)) IS TRUE) q"""


@dataclass(frozen=True)
class Pick:
    """One statement that picks jobs, as a string.

    With `:minimums_first`, first come the jobs that instances below their minimum need to reach it, then the others,
    both in `order`. The parameters are those of the asker and of the source, and `reach`, the number of heads that are
    read for each job that is wanted.
    """

    asker: Asker
    source: Literal["front", "queues"]
    order: Order = Order.PRIORITY

    def __str__(self) -> str:
        front = self.source == "front"
        return _PICK.format(
            room=self.asker.room,
            heads=self._front() if front else self._queues(),
            columns=COLUMNS,
            picked=", ".join(f"p.{column.split()[-1]}" for column in COLUMNS.split(", ")),
            order=self.order.value,
            headrooms=_HEADROOMS,
            still_ready=STILL_READY,
            told=f"CASE WHEN row_number() OVER () = 1 THEN ({head_cursor.WALKED}) END AS walked"
            if front
            else "EXISTS (SELECT FROM cut) AS is_cut",
        )

    def _front(self) -> str:
        cohorts = self.asker.cohorts.format(cohort="c.id")
        scope = (
            f"{self.asker.cohorts.format(cohort='q.cohort')} AND {self.asker.instances.format(instance='q.instance')}"
        )
        return _FROM_FRONT.format(
            missing=_MISSING_SOMEWHERE.format(scope=scope),
            front=head_cursor.head_jobs(cohorts=cohorts, limit="(SELECT jobs FROM room) * :reach"),
            offered=self.asker.offered,
        )

    def _queues(self) -> str:
        by_age = self.order is Order.AGE
        order = self.order.value
        full_order = f"beyond, {order}"
        return _FROM_QUEUES.format(
            waiting=ready_queues("waiting"),
            missing=_MISSING_OF_OFFERED,
            offered=self.asker.offered,
            lanes=f"(SELECT q.*, z.rank FROM offered q CROSS JOIN LATERAL ({ready_ranks('q.queue')}) z) o"
            if by_age
            else "offered o",
            least=LEAST_HEADS,
            spare=SPARE,
            same_lane=" AND rank = l.rank" if by_age else "",
            ready=READY_PLAIN,
            order=order,
            full_order=full_order,
            backwards=", ".join(f"h.{column} DESC" for column in full_order.split(", ")),
        )


def pick_jobs(
    connection: Connection,
    *,
    front: Statement | None,
    queues: Statement,
    values: Mapping[str, Any],
    cursor: HeadCursor | None,
) -> list[ReadyJob]:
    """Lock jobs from the front if there is a statement for it and most of the front may be taken, else from the queues.

    cursor: what the caller remembers of the front; without it each queue is read. Rows that others have locked are
    skipped. If these are too many, more heads are read.
    """
    if front is not None and cursor is not None and cursor.is_worthwhile():
        first = _from_front(connection, front, values, cursor)
        if first is not None:
            return first
        cursor.disable_for_a_while()
    for reach in WIDTHS:
        rows = connection.execute(queues, {**values, "reach": reach}).all()
        seen, found = rows[0], _ready_jobs(rows)
        was_cut_short = seen.is_cut and 2 * len(found) < seen.jobs
        is_contended = len(found) < seen.jobs and seen.heads >= seen.jobs * reach
        if not (was_cut_short or is_contended):
            break
    return found


def _from_front(
    connection: Connection, statement: Statement, values: Mapping[str, Any], cursor: HeadCursor
) -> list[ReadyJob] | None:
    """Pick from the front alone. None if some instance is below its minimum, or if most of the front may not be
    taken."""
    for reach in WIDTHS:
        walk = cursor.begin()
        rows = connection.execute(statement, {**values, **walk.values(), "reach": reach}).all()
        seen, found = rows[0], _ready_jobs(rows)
        walked = cursor.learn(walk, seen.walked, limit=seen.jobs * reach)
        if seen.below:
            return None
        if len(found) == seen.jobs or walked < seen.jobs * reach:
            return found
        if 2 * seen.heads < walked:
            return None
    return found


def _ready_jobs(rows: Sequence[Row]) -> list[ReadyJob]:
    # Columns are taken by position. Names would take a third of the time, once for each job.
    columns = len(ReadyJob._fields)
    found = [ReadyJob._make(row[-columns:]) for row in rows if row[-columns] is not None]
    left = {(cohort, instance): units for cohort, instance, units in rows[0].headrooms or ()}
    if not left:
        return found
    place = ReadyJob._fields.index("headroom")
    return [ReadyJob._make((*job[:place], left.get((job.cohort, job.instance)), *job[place + 1 :])) for job in found]
