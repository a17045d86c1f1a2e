"""How often the work of bots succeeds: the policy by which it is counted, and what strategies read of it.

Of each bot and label the latest attempts count, as many as `memory` says: once there are that many, every further one
takes its share from the older ones, so that an attempt's weight halves with each 0.7 x memory attempts after it. The
rate is (successes + 2) / (attempts + 2), as if two attempts had succeeded before: a bot that nobody knows has rate 1.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, text

from schema import audit

#: Successes, of as many attempts, that every bot is credited with beforehand: a Beta prior.
PRIOR = 2
#: The rate of a bot that has finished nothing with the label.
UNKNOWN = 1.0
YEAR = 31_536_000.0


def rate(counts: str) -> str:
    """The expression of the success rate of a row with `successes` and `failures`."""
    return f"(({counts}.successes + {PRIOR}) / ({counts}.successes + {counts}.failures + {PRIOR}))"


# A bot has few labels; one step along the index for each bot and each of many labels would be many steps.
RATES = text(f"""
SELECT s.bot_id, s.label, {rate("s")} AS rate FROM unnest(CAST(:bot_ids AS bigint[])) AS b (id)
CROSS JOIN LATERAL (SELECT * FROM bot_success WHERE bot_id = b.id OFFSET 0) s
WHERE s.label = ANY (CAST(:labels AS text[]))
""")
LABELS = text("SELECT id, label FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))")

_PUT = text("""
INSERT INTO success_policy AS p (memory, probation_failures, probation_seconds)
VALUES (:memory, :probation_failures, :probation_seconds)
ON CONFLICT (one) DO UPDATE SET memory = EXCLUDED.memory, probation_failures = EXCLUDED.probation_failures,
    probation_seconds = EXCLUDED.probation_seconds
WHERE (p.memory, p.probation_failures, p.probation_seconds)
    <> (EXCLUDED.memory, EXCLUDED.probation_failures, EXCLUDED.probation_seconds)
RETURNING one
""")
_REMOVE = text("DELETE FROM success_policy RETURNING one")


class SuccessSettings(BaseModel):
    """Whether and how the successes of bots are counted.

    statistics: count every finished attempt for its bot and the job's label. Unset leaves it as it was set last, which
        is off in the beginning.
    memory: attempts after which an older one has lost most of its weight, at least 1. Doubling it makes rates steadier
        and twice as slow to notice that a bot has gone bad.
    probation_failures: a bot is put on probation once so many jobs that it failed have passed elsewhere and it has had
        no success since; 0 = never. Doubling it spares sound bots and leaves broken ones twice as many jobs.
    probation_seconds: for how long, unless a success ends it. Doubling it halves the jobs that a broken bot gets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    statistics: bool | None = None
    memory: float = Field(default=100.0, ge=1, le=1e6)
    probation_failures: int = Field(default=3, ge=0, le=1000)
    probation_seconds: float = Field(default=600.0, ge=0, le=YEAR)


def declare(connection: Connection, wanted: SuccessSettings, *, actor: str) -> None:
    """Count as the configuration says, for every process; without `statistics` leave it as it is."""
    if wanted.statistics is None:
        return
    values = wanted.model_dump()
    changed = connection.execute(_PUT if wanted.statistics else _REMOVE, values).one_or_none()
    if changed is not None:
        audit.write(
            connection, "success.set", actor=actor, subject="success", details={**values, "reason": "configuration"}
        )


def labels(connection: Connection, job_ids: Sequence[int]) -> dict[int, str]:
    """The labels of these jobs, by which their bots' successes are told apart."""
    return {row.id: row.label for row in connection.execute(LABELS, {"ids": list(job_ids)})}


def rates(connection: Connection, bot_ids: Sequence[int], of: Sequence[str]) -> dict[tuple[int, str], float]:
    """(bot, label) -> success rate, 0 to 1, where anything is known of the bot's work with the label; else `UNKNOWN`
    holds."""
    rows = connection.execute(RATES, {"bot_ids": list(bot_ids), "labels": list(of)})
    return {(row.bot_id, row.label): row.rate for row in rows}
