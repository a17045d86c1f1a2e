"""How many jobs wait, as far as it matters: a look that costs no more when a million do."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.gates import AT_REST, GATED, IN_LINE

LOOK = text("""
SELECT s.max_queue_size, s.normal, EXISTS (SELECT FROM jobs WHERE state = 'deferred') AS deferred,
    (SELECT last_value FROM jobs_id_seq) AS newest
FROM scheduling s
""")
# Each part reads its own index, up to the limit.
COUNT = text("SELECT " + " + ".join(
    f"(SELECT count(*) FROM (SELECT FROM jobs WHERE {waiting} LIMIT :most) w)" for waiting in (IN_LINE, GATED, AT_REST)
))  # fmt: skip


@dataclass(frozen=True)
class Overflow:
    """`most`: how many jobs may wait, None = any number; `normal`: the largest effective priority that is not low;
    `deferred`: some jobs are; `newest`: no job has a larger id."""

    most: int | None
    normal: int
    deferred: bool
    newest: int


def look(connection: Connection) -> Overflow:
    """Whether the number of waiting jobs has a limit, and what is needed to know when to count them."""
    row = connection.execute(LOOK).one()
    return Overflow(row.max_queue_size, row.normal, row.deferred, row.newest)


def waiting(connection: Connection, *, most: int) -> int:
    """How many jobs wait, or at least `most` of each kind."""
    return int(connection.execute(COUNT, {"most": most}).scalar_one())
