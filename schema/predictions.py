"""How long jobs of a class are expected to run: what is known of those that ran last, and what was made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

#: Finished jobs that are looked at, the newest.
MAX_LOOKED = 5000

EXPECTED = text("""
SELECT name, seconds FROM job_classes WHERE name = ANY (CAST(:names AS text[])) AND seconds IS NOT NULL
""")
# Without a class nobody looks at jobs.
RAN = text("""
SELECT g.name, array_agg(extract(epoch FROM j.finished_at - j.started_at)::float8) AS seconds
FROM (SELECT id, terms->>'job_class' AS name FROM constraint_sets WHERE terms ? 'job_class') g
JOIN (SELECT constraint_set, state, started_at, finished_at FROM jobs
      WHERE finished_at IS NOT NULL AND EXISTS (SELECT FROM constraint_sets WHERE terms ? 'job_class')
      ORDER BY finished_at DESC LIMIT :most) j ON j.constraint_set = g.id
WHERE j.state = 'succeeded' AND j.started_at IS NOT NULL AND j.finished_at >= j.started_at
GROUP BY g.name
""")
KEEP = text("""
UPDATE job_classes c SET seconds = w.seconds, seconds_high = w.high
FROM unnest(CAST(:names AS text[]), CAST(:seconds AS float8[]), CAST(:highs AS float8[])) AS w (name, seconds, high)
WHERE c.name = w.name AND (c.seconds, c.seconds_high) IS DISTINCT FROM (w.seconds, w.high)
""")

# Of the newest finished jobs, those that have a class.
ACCURACY = text("""
SELECT g.terms->>'job_class' AS name, count(*) AS jobs, count(t.seconds) AS estimated,
    round((percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM j.finished_at - j.started_at) / t.seconds)
        FILTER (WHERE t.seconds IS NOT NULL AND j.started_at IS NOT NULL))::numeric, 3)::float8 AS ratio,
    count(t.deadline) AS dated, count(*) FILTER (WHERE j.finished_at > t.deadline) AS late
FROM (SELECT id, constraint_set, started_at, finished_at FROM jobs WHERE finished_at IS NOT NULL
      ORDER BY finished_at DESC LIMIT :most) j
JOIN constraint_sets g ON g.id = j.constraint_set AND g.terms ? 'job_class' JOIN job_constraints t ON t.job_id = j.id
GROUP BY 1 ORDER BY 1
""")


@dataclass(frozen=True)
class Accuracy:
    """The jobs of a class that ended last, those of them that had an estimate, the median of how long they ran by it,
    those that had a deadline, and those that missed it."""

    name: str
    jobs: int
    estimated: int
    ratio: float | None
    dated: int
    late: int


@dataclass(frozen=True)
class Prediction:
    """How long a job of a class runs: `seconds` at most in one of two cases, `high` in nine of ten."""

    seconds: float
    high: float


def expected(connection: Connection, names: Sequence[str]) -> dict[str, float]:
    """Seconds for which one of two jobs of each of these classes runs at most, where it is known."""
    if not names:
        return {}
    return {row.name: row.seconds for row in connection.execute(EXPECTED, {"names": list(names)})}


def ran(connection: Connection) -> dict[str, list[float]]:
    """How many seconds each of the jobs of a class ran, of those that succeeded last."""
    return {row.name: list(row.seconds) for row in connection.execute(RAN, {"most": MAX_LOOKED})}


def accuracy(connection: Connection) -> list[Accuracy]:
    """How well jobs of each class were estimated, of the newest finished jobs."""
    return [Accuracy(**row) for row in connection.execute(ACCURACY, {"most": MAX_LOOKED}).mappings()]


def keep(connection: Connection, found: Mapping[str, Prediction]) -> None:
    """Remember what was predicted for these classes; what is as before is not written."""
    connection.execute(
        KEEP,
        {
            "names": list(found),
            "seconds": [each.seconds for each in found.values()],
            "highs": [each.high for each in found.values()],
        },
    )
