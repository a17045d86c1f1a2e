"""The bots of each cohort at a glance: how many, how loaded, how reliable, and how evenly the work lies on them."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

SWARM = text("""
SELECT cohort, total, idle, busy, offline, on_probation, total_in_flight, avg_success_rate, avg_load, concentration,
    even_concentration
FROM swarm_stats ORDER BY cohort_id
""")


@dataclass(frozen=True)
class Swarm:
    """One cohort's bots; units are in flight. Averages are over the bots that are present, None without any.

    avg_success_rate: 0 to 1; None also while successes are not counted.
    avg_load: 0 to 1.
    concentration: the Herfindahl index of the units in use by bot: one over the number of bots if they are even, 1 if
        one bot has all; None if none are. `even_concentration` is what it would be if every bot were loaded alike.
    """

    cohort: str
    total: int
    idle: int
    busy: int
    offline: int
    on_probation: int
    total_in_flight: int
    avg_success_rate: float | None
    avg_load: float | None
    concentration: float | None
    even_concentration: float | None


def swarms(connection: Connection) -> list[Swarm]:
    """Every cohort, those without bots too. Reads every bot once, and no job."""
    return [Swarm(**row) for row in connection.execute(SWARM).mappings()]
