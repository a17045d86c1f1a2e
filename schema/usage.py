"""What instances have used, for people: as their bots reported it, in every unit, for as long as it is kept."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

#: The largest stretch of time that is asked for, hours.
MAX_HOURS = 24 * 3650

_REPORTED = text("""
SELECT split_part(name, ':', 2) AS instance, split_part(name, ':', 3) AS unit,
    sum(amount)::double precision AS amount, sum(jobs) AS jobs
FROM usage
WHERE name LIKE 'reported:%' AND bucket > now() - make_interval(secs => :hours * 3600.0)
GROUP BY 1, 2 ORDER BY 1, 2
""")


@dataclass(frozen=True)
class Reported:
    """What an instance has used of one unit; `jobs` are those that are done and said something of it."""

    instance: str
    unit: str
    amount: float
    jobs: int


def reported(connection: Connection, *, hours: float) -> list[Reported]:
    """What was reported within so many hours, by instance and unit."""
    return [Reported(**row._mapping) for row in connection.execute(_REPORTED, {"hours": hours})]
