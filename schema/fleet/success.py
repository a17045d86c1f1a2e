"""How often the work of bots succeeds: the policy by which it is counted, and what strategies read of it.

Of each bot and label the latest attempts count, as many as `memory` says: once there are that many, every further one
takes its share from the older ones, so that an attempt's weight halves with each 0.7 x memory attempts after it. The
rate is (successes + 2) / (attempts + 2), as if two attempts had succeeded before: a bot that nobody knows has rate 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.validation import YEAR

#: Successes, of as many attempts, that every bot is credited with beforehand: a Beta prior.
PRIOR = 2
#: The rate of a bot that has finished nothing with the label.
UNKNOWN = 1.0


def success_rate(counts: str) -> str:
    """The expression of the success rate of a row with `successes` and `failures`."""
    return f"(({counts}.successes + {PRIOR}) / ({counts}.successes + {counts}.failures + {PRIOR}))"


# A bot has few labels; one step along the index for each bot and each of many labels would be many steps.
SUCCESS_RATES = Statement(f"""
SELECT s.bot_id, s.label, {success_rate("s")} AS rate FROM unnest(CAST(:bot_ids AS bigint[])) AS b (id)
CROSS JOIN LATERAL (SELECT * FROM bot_success WHERE bot_id = b.id OFFSET 0) s
WHERE s.label = ANY (CAST(:labels AS text[]))
""")
JOB_LABELS = Statement("SELECT id, label FROM jobs WHERE id = ANY (CAST(:ids AS bigint[]))")

_PUT = Statement("""
INSERT INTO success_policy AS p (memory, probation_failures, probation_seconds)
VALUES (:memory, :probation_failures, :probation_seconds)
ON CONFLICT (one) DO UPDATE SET memory = EXCLUDED.memory, probation_failures = EXCLUDED.probation_failures,
    probation_seconds = EXCLUDED.probation_seconds
WHERE (p.memory, p.probation_failures, p.probation_seconds)
    <> (EXCLUDED.memory, EXCLUDED.probation_failures, EXCLUDED.probation_seconds)
RETURNING one
""")
_REMOVE = Statement("DELETE FROM success_policy RETURNING one")


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


def job_labels(connection: Connection, job_ids: Sequence[int]) -> dict[int, str]:
    """The labels of these jobs, by which their bots' successes are told apart."""
    return {row.id: row.label for row in connection.execute(JOB_LABELS, {"ids": list(job_ids)})}


def success_rates(connection: Connection, bot_ids: Sequence[int], of: Sequence[str]) -> dict[tuple[int, str], float]:
    """(bot, label) -> success rate, 0 to 1, where anything is known of the bot's work with the label; else `UNKNOWN`
    holds."""
    rows = connection.execute(SUCCESS_RATES, {"bot_ids": list(bot_ids), "labels": list(of)})
    return {(row.bot_id, row.label): row.rate for row in rows}


# What the end of a job on one bot means for another: a charge given back, or probation, which is one lease at a time
# until it succeeds, or for a while.
#
# It is decided where attempts end (`schema/fleet/credit.py`). A transaction that finishes a job may not lock the
# other bot there; this is done here.


#: Charges that one review gives back.
REVIEW_LIMIT = 500

# A charge may have lost some of its weight meanwhile. Bots that somebody else is at work on are left for the next time,
# and so are charges that somebody else gives back. A charge whose job is gone is dropped: its label is not known, and
# it would keep those behind it from being given back.
RETURN_CHARGES = Statement("""
WITH due AS MATERIALIZED (
    SELECT x.job_id, x.bot_id FROM blames x JOIN bots b ON b.id = x.bot_id
    WHERE x.returned_at IS NOT NULL AND x.bot_id IS NOT NULL
    ORDER BY x.bot_id LIMIT :limit FOR NO KEY UPDATE OF b, x SKIP LOCKED
), given AS MATERIALIZED (
    SELECT d.bot_id, j.label FROM due d
    CROSS JOIN LATERAL (SELECT label FROM jobs WHERE id = d.job_id OFFSET 0) j
), back AS (
    UPDATE bot_success s SET failures = greatest(0, s.failures - g.charges), returned = s.returned + g.charges
    FROM (SELECT bot_id, label, count(*) AS charges FROM given GROUP BY bot_id, label) g
    WHERE s.bot_id = g.bot_id AND s.label = g.label
)
UPDATE blames SET bot_id = NULL WHERE job_id = ANY (ARRAY(SELECT job_id FROM due))
""")
_SUSPECTS = """SELECT bot_id FROM blames WHERE upheld_at IS NOT NULL AND bot_id IS NOT NULL
    GROUP BY bot_id HAVING count(*) >= (SELECT probation_failures FROM success_policy WHERE probation_failures > 0)"""
_PROBATION_IS_OVER = """probation_until IS NOT NULL
    AND (probation_until < now() OR NOT EXISTS (SELECT FROM success_policy))"""
#: Whether anything is left for `review_probation`, by the indexes of such rows. A charge counts only as long as its bot
#: is kept.
ANY_REVIEW = f"""coalesce(
    (SELECT id FROM bots WHERE {_PROBATION_IS_OVER} ORDER BY id LIMIT 1),
    (SELECT x.bot_id FROM blames x CROSS JOIN LATERAL (SELECT FROM bots WHERE id = x.bot_id OFFSET 0) b
     WHERE x.returned_at IS NOT NULL AND x.bot_id IS NOT NULL ORDER BY x.bot_id LIMIT 1),
    ({_SUSPECTS} ORDER BY bot_id LIMIT 1)) IS NOT NULL"""
REVIEW_PROBATION = Statement(f"""
WITH suspects AS MATERIALIZED (
    {_SUSPECTS}
), held AS MATERIALIZED (
    SELECT id, name, id = ANY (ARRAY(SELECT bot_id FROM suspects)) AS suspect FROM bots
    WHERE id = ANY (ARRAY(
        SELECT bot_id FROM suspects
        UNION ALL
        SELECT id FROM bots WHERE {_PROBATION_IS_OVER}))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), told AS (
    UPDATE bots b SET probation_until = CASE WHEN h.suspect
        THEN now() + make_interval(secs => (SELECT probation_seconds FROM success_policy)) END
    FROM held h WHERE b.id = h.id
), settled AS (
    DELETE FROM blames WHERE bot_id = ANY (ARRAY(SELECT id FROM held WHERE suspect)) AND upheld_at IS NOT NULL
)
SELECT name, suspect FROM held ORDER BY name
""")


@dataclass(frozen=True)
class ProbationReview:
    """Names of bots that have been put on probation, and of those whose probation is over."""

    begun: list[str]
    over: list[str]


def review_probation(connection: Connection) -> ProbationReview:
    """Give charges back, put those bots on probation for which it is time, and end it where its time is over, or
    nothing is counted any more."""
    connection.execute(RETURN_CHARGES, {"limit": REVIEW_LIMIT})
    rows = connection.execute(REVIEW_PROBATION).all()
    found = ProbationReview([row.name for row in rows if row.suspect], [row.name for row in rows if not row.suspect])
    if found.over:
        wake(connection, "jobs")
    return found


# The bots of each cohort at a glance: how many, how loaded, how reliable, and how evenly the work lies on them.


SWARM = Statement("""
SELECT cohort, total, idle, busy, offline, on_probation, total_in_flight, avg_success_rate, avg_load, concentration,
    even_concentration, avg_latency_ms
FROM swarm_stats ORDER BY cohort_id
""")


@dataclass(frozen=True)
class Swarm:
    """One cohort's bots; units are in flight. Averages are over the bots that are present, None without any.

    avg_success_rate: 0 to 1; None also while successes are not counted.
    avg_latency_ms: mean run time, in milliseconds, of the attempts with a result that are counted; None without any.
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
    avg_latency_ms: float | None


def swarms(connection: Connection) -> list[Swarm]:
    """Every cohort, those without bots too. Reads every bot once, and no job."""
    return [Swarm(**row) for row in connection.execute(SWARM).mappings()]
