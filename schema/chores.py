"""What an assigner sees to beside its picks: one look, which nearly always finds nothing."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from schema.gates import AT_REST, DUE, GATED, IN_LINE, READY, RESTING

_OF_QUOTA = "EXISTS (SELECT FROM jobs WHERE cohort = q.cohort AND instance = q.instance AND {jobs} OFFSET 0)"
#: Quotas `q` of instances that have less than their minimum although jobs of theirs wait: for a place alone, or at
#: gates.
BELOW = f"""
    SELECT FROM quotas q WHERE q.usage < q.min_quota
        AND ({_OF_QUOTA.format(jobs=READY)} OR {_OF_QUOTA.format(jobs=RESTING)})"""
OWED = f"SELECT FROM quotas q WHERE q.usage < q.min_quota AND {_OF_QUOTA.format(jobs=GATED)}"
LOOK = text(f"""
SELECT EXISTS (SELECT FROM jobs WHERE {AT_REST} AND considered = 0 AND {DUE})
        OR EXISTS (SELECT FROM jobs WHERE {AT_REST} AND considered > 0 AND {DUE}) AS rested,
    EXISTS ({BELOW}) AS below, EXISTS ({OWED}) AS owed, g.gated,
    CASE WHEN g.gated THEN EXISTS (SELECT FROM jobs WHERE {IN_LINE}) ELSE true END AS ordinary
FROM (SELECT EXISTS (SELECT FROM jobs WHERE {GATED}) AS gated OFFSET 0) g
""")


@dataclass(frozen=True)
class Chores:
    """`rested`: the wait of some job is over. `below`: some instance has less than its minimum, and jobs that wait for
    a place alone; `owed`: and such as ask for more. `gated`: there is a job that asks for more than a place;
    `ordinary`: if so, whether there is also one that does not."""

    rested: bool
    below: bool
    owed: bool
    gated: bool
    ordinary: bool


def look(connection: Connection) -> Chores:
    """Whether there is anything to see to."""
    row = connection.execute(LOOK).one()
    return Chores(row.rested, row.below, row.owed, row.gated, row.ordinary)
