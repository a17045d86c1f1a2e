"""Set jobs aside whose label or task is paused, and make them ready again.

Such a job is refused when it would be given to a bot, whoever has picked it. It also rests until its pause is over, so
that a pick does not read it again and again. Its state stays `queued`, so these moves write no event.
"""

from collections.abc import Collection

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.predicates import ANY_PAUSE, IS_SET_ASIDE, PAUSED_UNTIL, READY, STILL_READY

# The rows of pauses are locked, so that who ends one waits, and then finds what is set aside here. A pause that is just
# being ended is passed over; then the grant refuses the job once more.
_KEPT = """kept AS MATERIALIZED (
    SELECT kind, name, instance FROM pauses WHERE kind IN ('label', 'task')
    ORDER BY kind, name, instance FOR KEY SHARE SKIP LOCKED
)"""
_PAUSED_BY_KEPT = """
    CROSS JOIN LATERAL (SELECT pause_of(j.id, j.label, j.instance) AS pause OFFSET 0) p
    JOIN kept k ON k.kind = (p.pause).kind AND k.name = (p.pause).name AND k.instance = (p.pause).instance"""
SET_ASIDE = Statement(f"""
WITH {_KEPT}, found AS MATERIALIZED (
    SELECT j.id FROM (SELECT id, label, instance FROM jobs
        WHERE id = ANY (CAST(:ids AS bigint[])) AND {STILL_READY}) j{_PAUSED_BY_KEPT}
)
UPDATE jobs SET schedule_after = {PAUSED_UNTIL} WHERE id = ANY (ARRAY(SELECT id FROM found)) AND {STILL_READY}
RETURNING id
""")
# A task is known by the payload alone, so with paused tasks every ready job is looked at.
SET_ASIDE_READY = Statement(f"""
WITH {_KEPT}, ready AS MATERIALIZED (
    SELECT j.id FROM (SELECT id, label, instance FROM jobs WHERE {READY} AND (
        label = ANY (ARRAY(SELECT name FROM pauses WHERE kind = 'label'))
        OR EXISTS (SELECT FROM pauses WHERE kind = 'task'))) j{_PAUSED_BY_KEPT}
    LIMIT :limit
), found AS MATERIALIZED (
    SELECT id FROM jobs WHERE id = ANY (ARRAY(SELECT id FROM ready)) AND {STILL_READY}
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET schedule_after = {PAUSED_UNTIL} WHERE id = ANY (ARRAY(SELECT id FROM found))
""")
MAKE_READY = Statement(f"""
WITH found AS MATERIALIZED (
    SELECT id FROM jobs WHERE {IS_SET_ASIDE} AND (pause_of(id, label, instance)).kind IS NULL
    ORDER BY id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET schedule_after = NULL WHERE id = ANY (ARRAY(SELECT id FROM found))
""")
_ANY = Statement(f"SELECT {ANY_PAUSE}")


#: The most jobs that are set aside at once because those in front are paused.
IN_FRONT = 2000


def any_pause(connection: Connection) -> bool:
    """Return whether a label or a task is paused."""
    found: bool = connection.execute(_ANY).scalar_one()
    return found


def set_aside(connection: Connection, job_ids: Collection[int]) -> set[int]:
    """Set those of these jobs aside that are paused; returns their ids. The caller has locked the jobs.

    If all of them are paused, many more may be in front of the others, and are set aside too.
    """
    found = {*connection.execute(SET_ASIDE, {"ids": list(job_ids)}).scalars()}
    if found and len(found) == len(job_ids):
        connection.execute(SET_ASIDE_READY, {"limit": IN_FRONT})
    return found


def set_aside_ready(connection: Connection, *, limit: int) -> int:
    """Set up to `limit` ready jobs aside that are paused; returns how many. Costs nothing while nothing is paused."""
    if not any_pause(connection):
        return 0
    return connection.execute(SET_ASIDE_READY, {"limit": limit}).rowcount


def make_ready(connection: Connection, *, limit: int) -> int:
    """Make up to `limit` jobs ready whose pause is over; returns how many."""
    return connection.execute(MAKE_READY, {"limit": limit}).rowcount
