"""What an assigner sees to beside its picks: one look, which nearly always finds nothing."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.gates import DUE, RESTING

LOOK = text(f"""
SELECT EXISTS (SELECT FROM jobs WHERE {RESTING} AND considered = 0 AND {DUE})
        OR EXISTS (SELECT FROM jobs WHERE {RESTING} AND considered > 0 AND {DUE}) AS rested,
    EXISTS (SELECT FROM quotas q WHERE q.usage < q.min_quota) AS below
""")


@dataclass(frozen=True)
class Chores:
    """`rested`: the wait of some job is over. `below`: some instance has less than its minimum, with or without jobs
    that wait."""

    rested: bool
    below: bool


def look(connection: Connection) -> Chores:
    """Whether there is anything to see to."""
    row = connection.execute(LOOK).one()
    return Chores(row.rested, row.below)
