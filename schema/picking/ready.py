"""Picks of assigners: lock the jobs that may be placed now.

A pick takes jobs only from queues that do not rest, whose instance is not drained, whose quota leaves enough units, and
for which some bot has room. So any number of jobs that no bot can run costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.fleet.candidates import FREE_KINDS, IS_FREE_KIND, able_bots
from schema.picking.head_cursor import HeadCursor
from schema.picking.pick import COLUMNS, Asker, Order, Pick, ReadyJob, pick_jobs
from schema.picking.queues import AWAKE, PLAIN, open_queues
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import (
    COHORT,
    HEALTHY,
    REQUIREMENTS,
    STILL_READY,
    ready_queues,
    room_for,
    serves,
)

_WANTED = """wanted AS MATERIALIZED (
    {open}
        AND (CAST(:instances AS integer[]) IS NULL OR w.instance = ANY (CAST(:instances AS integer[])))
        AND (CAST(:cohorts AS integer[]) IS NULL OR w.cohort = ANY (CAST(:cohorts AS integer[])))
)"""

#: No more jobs are picked, and locked, than there are free units for. In a cohort that has fewer of them than a batch,
#: only one assigner of the same instances picks at a time, whatever other cohorts it serves. Of two, one would pass
#: over the jobs that the other has locked, and could give the last units to less urgent ones.
ROOM = f"""{FREE_KINDS}, roomy AS MATERIALIZED (
    SELECT b.* FROM cohorts c CROSS JOIN LATERAL (
        SELECT id, kind, cohort, instance, pool, capacity, in_use, kept_units, kept_for FROM bots
        WHERE free AND cohort = c.id LIMIT :batch) b
    WHERE CAST(:cohorts AS integer[]) IS NULL OR c.id = ANY (CAST(:cohorts AS integer[]))
), rooms AS MATERIALIZED (
    SELECT cohort, units FROM (
        SELECT cohort, sum(capacity - in_use) AS units FROM roomy GROUP BY cohort) r
    WHERE CASE WHEN units >= :batch THEN true
        ELSE pg_try_advisory_xact_lock(hashtext('leasehold.room' || CAST(:served AS text)), cohort) END
), room AS MATERIALIZED (
    SELECT CAST(least(:batch, coalesce(sum(units), 0)) AS integer) AS jobs FROM rooms
)"""
#: This assigner may pick jobs of the cohort of queue `w`.
_IN_ROOMS = "w.cohort = ANY (ARRAY(SELECT cohort FROM rooms))"
_ANY_ROOM = f"free AND {room_for('', 'w')} > 0"
# Each look ends with the first hit. If bots are alike, the first look finds one among bots that have been read before.
_SERVED_AT_FIRST_LOOK = f"""
    EXISTS (
        SELECT FROM (SELECT * FROM roomy LIMIT 2) b
        WHERE {COHORT.of(bot="b", want="w")} AND {room_for("b", "w")} > 0 AND {serves("b", "w")}
            AND {REQUIREMENTS.of(bot="b", want="w")} OFFSET 0)"""
#: Some bot has room for a job of queue `w`. It reads what `ROOM` says.
SERVED = f"""{_IN_ROOMS} AND ({_SERVED_AT_FIRST_LOOK}
    OR EXISTS ({able_bots("b.id", "w", which=_ANY_ROOM, limit="1", among=IS_FREE_KIND)} OFFSET 0))"""

#: The queues of `wanted` for which some bot has room.
OFFERED = f"""offered AS MATERIALIZED (
    SELECT w.* FROM wanted w WHERE (SELECT jobs FROM room) > 0 AND ({SERVED})
)"""


def queues_in_scope(which: str = f"{PLAIN} AND {AWAKE}", *, more: str = "") -> str:
    """Return the CTE `wanted`: the queues of the CTE `waiting` that are open and in the scope. `which` is a condition
    on the row `k` of `queues`; more: further columns, as in `open_queues`."""
    return _WANTED.format(open=open_queues("waiting", which=which, more=more))


_ASSIGNER = Asker(
    room=ROOM,
    offered=f"{queues_in_scope()}, {OFFERED}",
    cohorts="(CAST(:cohorts AS integer[]) IS NULL OR {cohort} = ANY (CAST(:cohorts AS integer[])))",
    instances="(CAST(:instances AS integer[]) IS NULL OR {instance} = ANY (CAST(:instances AS integer[])))",
)
PICK = {order: Statement(str(Pick(_ASSIGNER, "queues", order))) for order in Order}
PICK_FROM_FRONT = Statement(str(Pick(_ASSIGNER, "front")))

ONE = Statement(f"""
SELECT {COLUMNS}, false AS tried, preferred, NULL::integer AS headroom, queued_at FROM jobs
WHERE id = :id AND {STILL_READY}
""")
INSTANCES = Statement("""
SELECT id FROM instances WHERE name = ANY (CAST(:names AS text[]))
    OR pool IN (SELECT pool FROM instances WHERE name = ANY (CAST(:names AS text[])))
""")


@dataclass(frozen=True)
class Scope:
    """The instances and cohorts that an assigner serves; None for all.

    cooldown: what evictions do to the maximum of an instance.
    minimums_first: jobs that instances need to reach their minimum come first.
    """

    instances: Sequence[int] | None = None
    cohorts: Sequence[int] | None = None
    cooldown: Cooldown = EVICTION_COOLDOWN
    minimums_first: bool = True

    @property
    def served(self) -> str:
        """A name for its instances, the same for all assigners of these instances."""
        return f" {None if self.instances is None else sorted(self.instances)}"

    def values(self) -> dict[str, Any]:
        """Return the parameters of the queries."""
        return {
            "instances": None if self.instances is None else list(self.instances),
            "cohorts": None if self.cohorts is None else list(self.cohorts),
            **self.cooldown.values(),
            "minimums_first": self.minimums_first,
        }


def pick(
    connection: Connection,
    scope: Scope,
    *,
    order: Order,
    batch: int,
    cursor: HeadCursor | None = None,
) -> list[ReadyJob]:
    """Lock jobs for which some bot has room: up to `batch`, and no more than there are free units.

    Jobs that instances below their minimum need come first, if the scope says so, then the others, both by `order`
    (BuildGrid's two kinds of assigners). From one queue no more jobs are taken than the quota of its instance allows;
    several queues of one instance together may exceed it. cursor: what the caller remembers of the front, for picks by
    priority; without it each queue is read.
    """
    return pick_jobs(
        connection,
        front=PICK_FROM_FRONT if order is Order.PRIORITY else None,
        queues=PICK[order],
        values={**scope.values(), "batch": batch, "served": scope.served},
        cursor=cursor,
    )


def instance_ids(connection: Connection, names: Sequence[str]) -> list[int]:
    """Return the ids of the named instances that exist, and of all instances in their pools."""
    return [row.id for row in connection.execute(INSTANCES, {"names": list(names)})]


# Queues that hold ready jobs which no bot can run. They have to rest.


_COULD_WORK = f"status <> 'gone' AND {HEALTHY.of(bot='')} AND capacity > 0"
# No healthy bot could serve them, even an idle one.
UNSERVED_QUEUES = Statement(f"""
WITH RECURSIVE {ready_queues("waiting")}, {queues_in_scope()}
SELECT w.queue FROM wanted w
WHERE NOT EXISTS ({able_bots("b.id", "w", which=_COULD_WORK, limit="1")} OFFSET 0)
LIMIT :limit
""")


def unserved_queues(connection: Connection, scope: Scope, *, limit: int) -> list[int]:
    """Return the ids of queues that hold ready jobs for which no healthy bot is suitable, free or full."""
    return list(connection.execute(UNSERVED_QUEUES, {**scope.values(), "limit": limit}).scalars())


def one(connection: Connection, job_id: int) -> ReadyJob | None:
    """Read one plain job as a pick would, without a lock; None if it is not ready."""
    row = connection.execute(ONE, {"id": job_id}).one_or_none()
    return None if row is None else ReadyJob(*row)
