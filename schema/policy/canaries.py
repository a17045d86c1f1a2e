"""Trials of a version of the policy on some cohorts or instances: their rows, and what is counted of the jobs there.

A trial is a part of the version in force: its settings have a `canary`, with the version that is tried and the names
that it has reached. So processes follow a step as they follow any change, and taking a trial back is one change too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic_core import to_json

from schema.policy.trials import TRIAL, Kind, Limits
from schema.postgres.connection import Connection
from schema.postgres.statements import Row, Statement
from schema.predicates import READY, assigner_is_placing
from schema.states import FETCHED

Outcome = Literal["activated", "returned", "stopped", "replaced"]
#: The most jobs of each sort that a look reads: ended ones, the newest first; running ones; and waiting ones.
MOST = 20_000
#: Into so many parts waits are divided to find any quantile of them.
QUANTILES = 200
#: Quantiles of waits. It is counted how often successive waits cross them.
CROSSED = (0.5, 0.95)
#: Seconds that a lease may be from before its job was queued: both have the time at which their transactions began.
APART = 10

_COLUMNS = """id, policy, base, kind, names, steps, step, every, guards, least, author, reason, before, tried, undo,
    untried, measured, begun_at, step_at, ended_at, outcome, why"""
_RUNNING = Statement(f"SELECT {_COLUMNS} FROM policy_canaries WHERE ended_at IS NULL FOR NO KEY UPDATE")
_LAST = Statement(f"SELECT {_COLUMNS} FROM policy_canaries ORDER BY id DESC LIMIT 1")
# One process looks at a time. If it dies, another one does so after :pause seconds. If the clock was set back, times of
# the future count as now: a look would come too late, and a step that has not begun would count nothing.
_CLAIM = Statement(f"""
UPDATE policy_canaries SET looked_at = clock_timestamp(), step_at = least(step_at, clock_timestamp())
WHERE id IN (
    SELECT id FROM policy_canaries
    WHERE ended_at IS NULL
        AND (looked_at BETWEEN clock_timestamp() - make_interval(secs => :pause) AND clock_timestamp()) IS NOT TRUE
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING {_COLUMNS}, extract(epoch FROM clock_timestamp() - step_at)::double precision AS lasted,
    (SELECT CAST(p.content -> 'settings' -> '{TRIAL}' ->> 'id' AS integer)
     FROM policy_in_force f JOIN policies p ON p.id = f.id) IS NOT DISTINCT FROM policy_canaries.id AS is_in_force
""")
_INSERT = Statement("""
INSERT INTO policy_canaries (policy, base, kind, names, steps, every, guards, least, author, reason, before, tried,
    undo, untried)
VALUES (:policy, :base, :kind, CAST(:names AS jsonb), CAST(:steps AS jsonb), :every, CAST(:guards AS jsonb), :least,
    :author, :reason, CAST(:before AS jsonb), CAST(:tried AS jsonb), CAST(:undo AS jsonb), CAST(:untried AS jsonb))
RETURNING id
""")
_MEASURED = Statement("""
UPDATE policy_canaries SET measured = CAST(:measured AS jsonb) WHERE id = :id AND step = :step AND ended_at IS NULL
""")
_STEP = Statement("""
UPDATE policy_canaries SET step = :step, step_at = clock_timestamp(), measured = NULL
WHERE id = :id AND ended_at IS NULL
""")
_END = Statement("""
UPDATE policy_canaries SET ended_at = clock_timestamp(), outcome = :outcome, why = :why WHERE ended_at IS NULL
""")
_IDS = {
    "cohort": Statement("SELECT id, name FROM cohorts WHERE name = ANY (CAST(:names AS text[]))"),
    "instance": Statement("SELECT id, name FROM instances WHERE name = ANY (CAST(:names AS text[]))"),
}
# What a version says in these sections. It may lack any of them. Null: the version is not kept.
_SECTIONS = """(
    SELECT coalesce((
        SELECT jsonb_object_agg(key, value) FROM jsonb_each(p.content -> 'settings')
        WHERE key = ANY (CAST(:sections AS text[]))), '{{}}')
    FROM policies p WHERE p.id = {id})"""
# If one of two versions is not kept, they count as unlike. A process tells its version only once it has told what its
# entries try of it. A process of an earlier release does not tell what they try.
_UNDECIDED = Statement(f"""
SELECT w.name FROM unnest(CAST(:names AS text[])) WITH ORDINALITY AS w (name, nth)
WHERE ({_SECTIONS.format(id=":policy")} = {_SECTIONS.format(id=":base")}) IS NOT TRUE
AND NOT EXISTS (
    SELECT FROM assigners a JOIN policy_in_force f ON f.id = a.policy
    CROSS JOIN LATERAL jsonb_array_elements(a.serves) e
    WHERE {assigner_is_placing("a")} AND coalesce(CAST(e -> 'tries' AS boolean), true)
        AND (coalesce(e -> 'cohorts', 'null') = 'null' OR e -> 'cohorts' ? w.name))
ORDER BY w.nth
""")
_IS_TRIED = "CASE :kind WHEN 'cohort' THEN cohort ELSE instance END = ANY (CAST(:ids AS integer[]))"
_PARTS = f"ARRAY(SELECT g / CAST({QUANTILES} AS double precision) FROM generate_series(0, {QUANTILES}) g)"
_ABOVE = [f"{{0}} > waits[{round(part * QUANTILES) + 1}]" for part in CROSSED]
_COUNTED = ", ".join(
    f"count(*) FILTER (WHERE ({above.format('wait')}) <> ({above.format('last')})) AS crossed_{nth}"
    for nth, above in enumerate(_ABOVE)
)
_NAMES = ", ".join(f"coalesce(crossed_{nth}, 0) AS crossed_{nth}" for nth in range(len(CROSSED)))
_WAITING = f"""
    (SELECT j.* FROM (
        SELECT id, constraint_set IS NOT NULL AS constrained FROM queues WHERE {{which}} ({_IS_TRIED})) q
     CROSS JOIN LATERAL (
        SELECT cohort, instance, queued_at, extract(epoch FROM clock_timestamp() - queued_at)::double precision AS wait
        FROM jobs
        WHERE queue = q.id AND constrained = q.constrained AND {READY} AND queued_at <= clock_timestamp() AND fence = 0
        LIMIT :most) j
     LIMIT :most)"""
# Of jobs that started in the last :seconds, the first start counts since they were queued, which a job is anew that has
# asked for it. Jobs that were queued in this time and wait for their first start count with their wait until now. Those
# that were queued earlier (`waited`) do so only under a policy that starts nothing: however rare, they pile up, and of
# a few seconds they would be most. If not all ended jobs are read, all is counted since the first of them has ended.
# Waits of one cohort and instance follow each other in the order in which their jobs were queued.
_FIGURES = Statement(f"""
WITH ended AS MATERIALIZED (
    SELECT id, cohort, instance, queued_at, state, finished_at FROM jobs
    WHERE finished_at >= statement_timestamp() - make_interval(secs => :seconds) ORDER BY finished_at DESC LIMIT :most
), began AS MATERIALIZED (
    SELECT CASE WHEN count(*) < :most THEN statement_timestamp() - make_interval(secs => :seconds)
        ELSE min(finished_at) END AS at FROM ended
), running AS MATERIALIZED (
    SELECT job_id FROM leases WHERE state IN ('pending', 'active', 'cancelling') LIMIT :most
), started AS MATERIALIZED (
    SELECT j.cohort, j.instance, j.queued_at, s.strategy,
        greatest(0, extract(epoch FROM s.granted_at - j.queued_at))::double precision AS wait
    FROM (SELECT id, cohort, instance, queued_at FROM ended
        UNION SELECT id, cohort, instance, queued_at FROM jobs WHERE id IN (SELECT job_id FROM running)) j
    CROSS JOIN LATERAL (
        SELECT granted_at, strategy FROM leases
        WHERE job_id = j.id AND granted_at >= j.queued_at - interval '{APART} s' ORDER BY job_id, fence LIMIT 1) s
    WHERE s.granted_at >= (SELECT at FROM began)
), waiting AS MATERIALIZED ({_WAITING.format(which="")} UNION ALL {_WAITING.format(which="NOT")}
), figures AS MATERIALIZED (
    SELECT {_IS_TRIED} AS is_tried, f.* FROM (
        SELECT cohort, instance, queued_at, wait, NULL AS waited, 1 AS started,
            (strategy = '{FETCHED}')::integer AS fetched, 0 AS evicted, 0 AS ended, 0 AS failed FROM started
        UNION ALL SELECT cohort, instance, queued_at, CASE WHEN wait <= :seconds THEN wait END, wait, 0, 0, 0, 0, 0
            FROM waiting
        UNION ALL SELECT cohort, instance, NULL, NULL, NULL, 0, 0, 1, 0, 0 FROM evictions
            WHERE at >= (SELECT at FROM began)
        UNION ALL SELECT cohort, instance, NULL, NULL, NULL, 0, 0, 0, 1, (state IN ('failed', 'dead'))::integer
            FROM ended) f
), arms AS MATERIALIZED (
    SELECT is_tried, coalesce(sum(started), 0) AS starts, coalesce(sum(fetched), 0) AS fetched,
        count(wait) AS sample, percentile_disc({_PARTS}) WITHIN GROUP (ORDER BY wait) AS waits,
        count(waited) AS waiting, percentile_disc({_PARTS}) WITHIN GROUP (ORDER BY waited) AS all_waiting,
        sum(evicted) AS evicted, sum(ended) AS ended, sum(failed) AS failed
    FROM figures GROUP BY is_tried
), crossed AS (
    SELECT is_tried, {_COUNTED}
    FROM (
        SELECT is_tried, wait, lag(wait) OVER (PARTITION BY is_tried, cohort, instance ORDER BY queued_at) AS last
        FROM figures WHERE wait IS NOT NULL) w JOIN arms USING (is_tried)
    GROUP BY is_tried
)
SELECT arms.*, {_NAMES} FROM arms LEFT JOIN crossed USING (is_tried)
""")


@dataclass(frozen=True)
class Counted:
    """What was counted of some jobs in a span of time.

    waits: quantiles of the waits in seconds, of jobs that started and of those that were queued in this time and still
    wait, `sample` in all; none without any. all_waiting: the same of all `waiting` jobs, however long they have waited.
    fetched: starts that bots fetched themselves, by which no weights count. ended, failed: jobs. crossed: for each of
    CROSSED, how often of two successive waits only one was above that quantile; None = not counted.
    """

    sample: int = 0
    waits: Sequence[float] = ()
    waiting: int = 0
    all_waiting: Sequence[float] = ()
    starts: int = 0
    fetched: int = 0
    evicted: int = 0
    ended: int = 0
    failed: int = 0
    crossed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Canary:
    """A trial. base: the version that was in force before it. steps: how many of the names each step reaches; step: the
    present one, from 0. every: seconds that a step takes at least. least: waits below which nothing is judged."""

    id: int
    policy: int
    base: int
    kind: Kind
    names: Sequence[str]
    steps: Sequence[int]
    step: int
    every: float
    guards: Sequence[str]
    least: int
    author: str
    reason: str
    before: Sequence[Mapping[str, Any]]
    tried: Limits
    undo: Limits
    untried: Sequence[str]
    measured: Mapping[str, Any] | None
    begun_at: datetime
    step_at: datetime
    ended_at: datetime | None
    outcome: Outcome | None
    why: str | None

    @property
    def reached(self) -> Sequence[str]:
        """The names where the version decides now."""
        return self.names[: self.steps[self.step]]

    @property
    def is_last(self) -> bool:
        """Whether there is no further step."""
        return self.step + 1 >= len(self.steps)


@dataclass(frozen=True)
class Looked:
    """A trial at which this process looks now. lasted: seconds since its step began. is_in_force: the version in force
    still has it."""

    canary: Canary
    lasted: float
    is_in_force: bool


def running(connection: Connection) -> Canary | None:
    """Return the trial that is running, with its row locked; None if there is none. The caller holds the policy."""
    row = connection.execute(_RUNNING).one_or_none()
    return None if row is None else Canary(**row._asdict())


def last(connection: Connection) -> Canary | None:
    """Return the newest trial, running or not; None if there never was one."""
    row = connection.execute(_LAST).one_or_none()
    return None if row is None else Canary(**row._asdict())


def claim(connection: Connection, *, pause: float) -> Looked | None:
    """Take the next look at the trial, unless somebody has looked within `pause` seconds, or there is none."""
    row = connection.execute(_CLAIM, {"pause": pause}).one_or_none()
    if row is None:
        return None
    found = row._asdict()
    lasted, is_in_force = found.pop("lasted"), found.pop("is_in_force")
    return Looked(Canary(**found), lasted, is_in_force)


def insert(connection: Connection, **terms: Any) -> int:
    """Store a trial that begins now; return its number."""
    written = {name: _json(value) if isinstance(value, Sequence | Mapping) and not isinstance(value, str) else value
               for name, value in terms.items()}  # fmt: skip
    made: int = connection.execute(_INSERT, written).scalar_one()
    return made


def note_measured(connection: Connection, canary: Canary, measured: Mapping[str, Any]) -> None:
    """Store what the last look found, unless the trial has moved on."""
    connection.execute(_MEASURED, {"id": canary.id, "step": canary.step, "measured": _json(measured)})


def note_step(connection: Connection, canary: Canary, step: int) -> None:
    """Store that a step begins. The caller holds the policy."""
    connection.execute(_STEP, {"id": canary.id, "step": step})


def end(connection: Connection, outcome: Outcome, why: str) -> None:
    """Store that the trial has ended, if one is running. The caller holds the policy."""
    connection.execute(_END, {"outcome": outcome, "why": why})


def ids(connection: Connection, kind: Kind, names: Sequence[str]) -> dict[str, int]:
    """Return the ids of the cohorts or instances with these names, by name; those that do not exist are missing."""
    return {row.name: row.id for row in connection.execute(_IDS[kind], {"names": list(names)})}


def undecided(connection: Connection, canary: Canary, cohorts: Sequence[str], *, sections: Sequence[str]) -> list[str]:
    """Return those of these cohorts, by name, in which no assigner at work decides by the version that is tried.

    None, if it has the same settings in these sections as the version before the trial, which may be none at all.
    """
    values = {"names": list(cohorts), "policy": canary.policy, "base": canary.base, "sections": list(sections)}
    return list(connection.execute(_UNDECIDED, values).scalars())


def count(connection: Connection, kind: Kind, ids: Sequence[int], *, seconds: float) -> tuple[Counted, Counted]:
    """Count what happened in the last `seconds` in these cohorts or instances, and in all others; of each sort up to
    MOST jobs."""
    values = {"kind": kind, "ids": list(ids), "seconds": seconds, "most": MOST}
    found = {bool(row.is_tried): _counted(row) for row in connection.execute(_FIGURES, values)}
    return found.get(True, Counted()), found.get(False, Counted())


def _counted(row: Row) -> Counted:
    return Counted(
        sample=row.sample,
        waits=row.waits or (),
        waiting=row.waiting,
        all_waiting=row.all_waiting or (),
        starts=int(row.starts),
        fetched=int(row.fetched),
        evicted=int(row.evicted),
        ended=int(row.ended),
        failed=int(row.failed),
        crossed=(row.crossed_0, row.crossed_1),
    )


def _json(value: object) -> str:
    return to_json(value).decode()
