"""What forecasts are made from, and what became of them: places in the order, times of leases, past forecasts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from schema.postgres.connection import Connection
from schema.postgres.fragments import stored_seconds
from schema.postgres.statements import Row, Statement
from schema.predicates import (
    HEALTHY,
    IN_CONSTRAINED_FRONT,
    IN_FRONT,
    PAUSED_UNTIL,
    SERVES,
    offered,
    ready_in,
    ready_queues,
)

#: The most jobs ahead that are counted.
MOST_AHEAD = 10_000
#: The newest jobs from which it is told how many come, and seconds after which one counts a third of a new one. A pool
#: that is younger than LEAST_PAST is taken for one of that age.
ARRIVED, MEMORY, LEAST_PAST = 5000, 300.0, 60.0
#: The most bots whose units are counted.
MOST_BOTS = 2000
#: The most queues in which waiting jobs are looked for.
MOST_QUEUES = 1000
#: The newest ended jobs from which times of leases are taken, and seconds for which a time is used without new ones.
NEWEST, USED_FOR = 2000, 7 * 86400.0
#: Seconds over which it is counted how fast jobs end, and the last jobs of an instance whose waits are told.
RATE_OF, LAST = 300.0, 10
#: The most past forecasts that one is made from; the newest jobs among which a pass looks for waiting ones; and the
#: forecasts whose jobs have not started, above which no further ones are stored.
MOST_PAST, LOOKED_AT, MOST_OPEN = 400, 2000, 2000
#: Seconds for which stored forecasts are kept, and of which the coverage is told.
KEPT, TOLD = 3 * 86400.0, 86400.0
#: The longest promise that is judged, in seconds: those that are longer are forgotten before all of a day are known.
LONGEST = KEPT - TOLD
#: Jobs of a queue that are counted for the list of what waits.
COUNTED = 1000
#: Judged jobs from which on the coverage of an instance says something, and earlier forecasts from which on there ought
#: to be a time.
SOME = 200

STILL_WAITS = Statement("SELECT EXISTS (SELECT FROM jobs WHERE id = :id AND state = 'queued')")
PLACE = Statement("""
SELECT j.id, j.queue, j.cohort, j.instance, j.platform, j.units, j.rank, j.queued_at, i.pool, q.max_quota,
    coalesce(q.usage, 0) AS usage, coalesce(g.terms->>'job_class', '') AS class,
    extract(epoch FROM t.deadline - now())::double precision AS deadline, coalesce(t.seconds, c.seconds) AS runs,
    extract(epoch FROM now() - j.queued_at)::double precision AS age
FROM jobs j JOIN instances i ON i.id = j.instance JOIN queues k ON k.id = j.queue
LEFT JOIN constraint_sets g ON g.id = k.constraint_set
LEFT JOIN job_constraints t ON t.job_id = j.id
LEFT JOIN job_classes c ON c.name = g.terms->>'job_class'
LEFT JOIN quotas q ON q.cohort = j.cohort AND q.instance = j.instance
WHERE j.id = :id
""")
_AHEAD = """
(SELECT queue FROM jobs WHERE cohort = :cohort AND {front}
    AND (rank, queued_at, id) < (:rank, CAST(:queued_at AS timestamptz), :id)
 ORDER BY cohort, rank, queued_at, id LIMIT :most + 1)"""
_RIVALS = f"""k.platform = :platform OR EXISTS (
    SELECT FROM kind_platforms a
    WHERE a.platform = :platform AND EXISTS ({offered(platform="k.platform", kind="a.kind")} OFFSET 0))"""
# All jobs ahead, as instance 0, and by instance those in queues that share a kind of bots with the job's. Instances
# that start nothing are left out.
AHEAD = Statement(f"""
WITH counted AS MATERIALIZED (
    SELECT queue, count(*) AS jobs FROM ({_AHEAD.format(front=IN_FRONT)}
        UNION ALL {_AHEAD.format(front=IN_CONSTRAINED_FRONT)}) front GROUP BY queue
)
SELECT 0 AS instance, coalesce(sum(jobs), 0)::integer AS jobs, NULL AS most FROM counted
UNION ALL
SELECT k.instance, sum(c.jobs)::integer, min(q.max_quota)
FROM counted c JOIN queues k ON k.id = c.queue JOIN instances i ON i.id = k.instance AND NOT i.draining
LEFT JOIN quotas q ON q.cohort = k.cohort AND q.instance = k.instance
WHERE {_RIVALS}
GROUP BY k.instance ORDER BY 1
""")
# The jobs a second of better rank that have come lately, of the same rivals: newer ones count more. Ids tell roughly
# which jobs are the newest, so that no index is needed. One that has ended without a start took nothing from others.
LATER = Statement(f"""
WITH newest AS MATERIALIZED (
    SELECT cohort, instance, platform, rank,
        state NOT IN ('blocked', 'parked', 'deferred') AND (finished_at IS NULL OR fence > 0) AS works,
        extract(epoch FROM now() - queued_at)::double precision AS age
    FROM jobs ORDER BY id DESC LIMIT :arrived
), come AS MATERIALIZED (
    SELECT instance, platform, sum(exp(-age / :memory)) AS weight FROM newest
    WHERE works AND cohort = :cohort AND rank < :rank AND age BETWEEN 0 AND 10 * :memory GROUP BY 1, 2
)
SELECT k.instance, min(q.max_quota) AS most, sum(k.weight)
    / (:memory * (1 - exp(-least(600, greatest(:least_past, (SELECT max(age) FROM newest)) / :memory)))) AS jobs
FROM come k JOIN instances i ON i.id = k.instance AND NOT i.draining
LEFT JOIN quotas q ON q.cohort = :cohort AND q.instance = k.instance
WHERE {_RIVALS}
GROUP BY k.instance ORDER BY 1
""")
ROOM = Statement(f"""
SELECT coalesce(sum(capacity), 0)::integer AS units, coalesce(sum(capacity - in_use), 0)::integer AS free
FROM (
    SELECT b.capacity, b.in_use
    FROM (SELECT CAST(:instance AS integer) AS instance, CAST(:pool AS text) AS pool) w
    CROSS JOIN kind_platforms o
    CROSS JOIN LATERAL (
        SELECT capacity, in_use FROM bots c WHERE c.status <> 'gone' AND c.cohort = :cohort AND c.kind = o.kind
            AND {HEALTHY.of(bot="c")} AND {SERVES.of(bot="c", want="w")} AND c.capacity >= :units LIMIT :most) b
    WHERE o.platform = :platform LIMIT :most) able
""")
TIMES = Statement("SELECT instance, leases, seconds, work, per_second, waited FROM lease_times WHERE cohort = :cohort")
# If none of the newest jobs is of an instance, it has ended none since the first of them, and its rate is 0. What its
# jobs took stays as it was measured.
MEASURE_TIMES = Statement("""
WITH newest AS MATERIALIZED (
    SELECT id, queued_at, finished_at FROM jobs WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT :newest
), known AS (
    SELECT least(:rate_of, greatest(:least_past, extract(epoch FROM now() - min(finished_at))))::double precision
        AS seconds FROM newest
), measured AS (
    SELECT cohort, instance, count(*)::integer AS leases, avg(seconds) AS seconds, avg(seconds * units) AS work,
        count(*) FILTER (WHERE age <= :rate_of) / (SELECT seconds FROM known) AS per_second,
        greatest(avg(waited) FILTER (WHERE nth <= :last), 0) AS waited
    FROM (
        SELECT l.*, extract(epoch FROM now() - n.finished_at) AS age,
            extract(epoch FROM l.began - n.queued_at)::double precision AS waited,
            row_number() OVER (PARTITION BY l.cohort, l.instance ORDER BY n.finished_at DESC, n.id DESC) AS nth
        FROM newest n CROSS JOIN LATERAL (
            SELECT cohort, instance, units, extract(epoch FROM ended_at - granted_at)::double precision AS seconds,
                min(granted_at) OVER () AS began
            FROM leases WHERE job_id = n.id AND verdict IN ('succeeded', 'failed', 'error') OFFSET 0) l
    ) each_lease
    GROUP BY cohort, instance
), forgotten AS (
    DELETE FROM lease_times WHERE at < now() - make_interval(secs => :used_for)
), ended_nothing AS (
    UPDATE lease_times t SET per_second = 0
    WHERE per_second > 0 AND at >= now() - make_interval(secs => :used_for)
        AND NOT EXISTS (SELECT FROM measured m WHERE m.cohort = t.cohort AND m.instance = t.instance)
)
INSERT INTO lease_times (cohort, instance, leases, seconds, work, per_second, waited)
SELECT cohort, instance, leases, greatest(seconds, 0), greatest(work, 0), per_second, waited FROM measured
ORDER BY cohort, instance
ON CONFLICT (cohort, instance) DO UPDATE
SET leases = excluded.leases, seconds = excluded.seconds, work = excluded.work, per_second = excluded.per_second,
    waited = excluded.waited, at = excluded.at
""")
# Of a job that has not started and is late already, the time until now counts: it is the least that it can be. Without
# such jobs, those that wait long would be missing.
_PAST = f"""
SELECT predicted, scale, coalesce(waited, extract(epoch FROM now() - at)::double precision) AS waited, class, by_rate,
    by_waits
FROM forecasts
WHERE cohort = :cohort AND {{among}} predicted IS NOT NULL
    AND (waited IS NOT NULL OR at < now() - {stored_seconds("predicted")})
ORDER BY at DESC LIMIT :most
"""
PAST = {
    of_instance: Statement(_PAST.format(among="instance = :instance AND" if of_instance else ""))
    for of_instance in (True, False)
}
# The queues with ready jobs, and of each the last of them in the order.
WAITING = Statement(f"""
WITH RECURSIVE {ready_queues("plain")}, {ready_queues("gated", constrained=True)}
SELECT c.name AS cohort, i.name AS instance, coalesce(g.terms->>'job_class', '') AS job_class, w.jobs, l.id AS last,
    l.rank, l.queued_at
FROM (SELECT queue FROM plain UNION ALL SELECT queue FROM gated) o
JOIN queues k ON k.id = o.queue
JOIN cohorts c ON c.id = k.cohort JOIN instances i ON i.id = k.instance
LEFT JOIN constraint_sets g ON g.id = k.constraint_set
CROSS JOIN LATERAL (SELECT count(*) AS jobs FROM (
    SELECT FROM jobs WHERE {ready_in("k")} LIMIT :most) ready) w
CROSS JOIN LATERAL (
    SELECT id, rank, queued_at FROM jobs WHERE {ready_in("k")}
    ORDER BY queue DESC, rank DESC, queued_at DESC, id DESC LIMIT 1) l
LIMIT :queues
""")
WITHOUT = Statement("""
SELECT j.id FROM (SELECT id, state, schedule_after FROM jobs ORDER BY id DESC LIMIT :looked_at) j
WHERE j.state = 'queued' AND j.schedule_after IS NULL AND NOT EXISTS (SELECT FROM forecasts f WHERE f.job_id = j.id)
    AND (SELECT count(*) FROM (
        SELECT FROM forecasts WHERE waited IS NULL AND predicted IS NOT NULL LIMIT :open) o) < :open
ORDER BY hashint8extended(j.id, :nth), j.id LIMIT :limit
""")
STORE = Statement("""
INSERT INTO forecasts (
    job_id, cohort, instance, class, past, predicted, scale, by_rate, by_waits, seconds, upper, reason)
VALUES (:id, :cohort, :instance, :job_class, :past, :predicted, :scale, :by_rate, :by_waits, :seconds, :upper, :reason)
ON CONFLICT (job_id) DO NOTHING
""")
# A job that an operator has held or paused, or that ended without a start, says nothing about its forecast, unless it
# had waited for longer than was promised when it ended: then that is the least that it would have waited. Otherwise the
# jobs would be missing that somebody cancelled because they came too late.
JUDGE = Statement(f"""
WITH page AS MATERIALIZED (
    SELECT job_id, at, predicted, upper FROM forecasts
    WHERE waited IS NULL AND predicted IS NOT NULL AND job_id > :after
    ORDER BY job_id LIMIT :limit FOR UPDATE SKIP LOCKED
), looked AS MATERIALIZED (
    SELECT p.job_id, coalesce(j.waits, false) AS waits, extract(epoch FROM coalesce(
        (SELECT min(granted_at) FROM leases WHERE job_id = p.job_id AND granted_at >= p.at),
        CASE WHEN extract(epoch FROM j.finished_at - p.at) > coalesce(p.upper, p.predicted) THEN j.finished_at END
    ) - p.at) AS waited
    FROM page p LEFT JOIN LATERAL (
        SELECT finished_at, state = 'queued' AND schedule_after IS DISTINCT FROM {PAUSED_UNTIL} AS waits
        FROM jobs WHERE id = p.job_id OFFSET 0) j ON true
), waited AS (
    UPDATE forecasts f SET waited = l.waited FROM looked l WHERE f.job_id = l.job_id AND l.waited IS NOT NULL
), void AS (
    DELETE FROM forecasts f USING looked l WHERE f.job_id = l.job_id AND l.waited IS NULL AND NOT l.waits
)
SELECT count(*) AS rows, max(job_id) AS last FROM page
""")
FORGET = Statement("""
DELETE FROM forecasts WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM forecasts WHERE at < now() - make_interval(secs => :age)
    ORDER BY at LIMIT :limit FOR UPDATE SKIP LOCKED))
""")
# By instance, and '' for the pool. A promise is judged when its time is over, also if it came true before: if early
# starts counted at once and misses only then, the coverage would be told too high.
JUDGED = Statement("""
SELECT coalesce(i.name, '') AS instance, count(*) FILTER (WHERE judged)::integer AS jobs,
    count(*) FILTER (WHERE judged AND waited <= upper)::integer AS kept,
    count(*) FILTER (WHERE recent AND past >= :some)::integer AS with_past,
    count(*) FILTER (WHERE recent AND past >= :some AND upper IS NOT NULL)::integer AS told,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY upper) FILTER (WHERE recent) AS width,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY abs(waited - seconds)) FILTER (WHERE judged) AS error
FROM (
    SELECT instance, past, seconds, upper, waited, at > now() - make_interval(secs => :seconds) AS recent,
        coalesce(age BETWEEN upper AND upper + :seconds AND upper <= :longest, false) AS judged
    FROM forecasts CROSS JOIN LATERAL (SELECT extract(epoch FROM now() - at)::double precision AS age) a
) f
LEFT JOIN instances i ON i.id = f.instance
GROUP BY GROUPING SETS ((), (i.name)) ORDER BY 1
""")


@dataclass(frozen=True)
class Place:
    """A waiting job: where it stands and what it asks for.

    usage, max_quota: units of its instance. job_class: '' without one. deadline: seconds until it must have ended.
    runs: seconds that it is expected to run; None if nobody knows. age: seconds since it was queued.
    """

    id: int
    queue: int
    cohort: int
    instance: int
    platform: int
    units: int
    rank: float
    queued_at: datetime
    pool: str | None
    max_quota: int | None
    usage: int
    job_class: str
    deadline: float | None
    runs: float | None
    age: float


@dataclass(frozen=True)
class Times:
    """What the newest leases of an instance took: their number, and the mean of their seconds and unit-seconds.

    per_second: how many ended a second lately. waited: seconds for which the last jobs waited; None if nobody knows.
    """

    leases: int
    seconds: float
    work: float
    per_second: float = 0.0
    waited: float | None = None


@dataclass(frozen=True)
class Past:
    """An earlier forecast: what the formula said, its scale, and the seconds that the job has waited since.

    by_rate, by_waits: what the two simple guesses said; None if one said nothing.
    """

    predicted: float
    scale: float
    waited: float
    job_class: str
    by_rate: float | None
    by_waits: float | None


@dataclass(frozen=True)
class Stored:
    """A forecast to be stored. predicted, scale, by_rate, by_waits: None if a gate was closed, or nobody knows. reason:
    why no time is told."""

    id: int
    cohort: int
    instance: int
    job_class: str
    past: int
    predicted: float | None
    scale: float | None
    by_rate: float | None
    by_waits: float | None
    seconds: float | None
    upper: float | None
    reason: str | None


@dataclass(frozen=True)
class Waiting:
    """Ready jobs of a cohort, instance and class ('' without one): how many, and the id of the last in the order.

    Of each queue at most COUNTED jobs are counted.
    """

    cohort: str
    instance: str
    job_class: str
    jobs: int
    last: int


@dataclass(frozen=True)
class Judged:
    """What became of the forecasts of the last day, of an instance, or of the pool with the instance ''.

    jobs: those whose promised time was over within the day. kept: of them, those that started within the promised time.
    with_past: jobs with at least SOME earlier forecasts. told: of them, those that got a time. width: the median of
    promised times. error: the median difference between the told and the real time until the start; seconds, None
    without any.
    """

    instance: str
    jobs: int
    kept: int
    with_past: int
    told: int
    width: float | None
    error: float | None

    @property
    def coverage(self) -> float | None:
        """The part of jobs that started within the promised time."""
        return self.kept / self.jobs if self.jobs else None


def still_waits(connection: Connection, job_id: int) -> bool:
    """Return whether the job is queued."""
    return bool(connection.execute(STILL_WAITS, {"id": job_id}).scalar_one())


def place(connection: Connection, job_id: int) -> Place:
    """Read where a job stands."""
    return Place(*connection.execute(PLACE, {"id": job_id}).one())


def ahead(connection: Connection, of: Place) -> Mapping[int, tuple[int, int | None]] | None:
    """Count the ready jobs ahead that compete for bots with it: by instance, their number and its maximum of units.

    None if more than MOST_AHEAD jobs of the cohort are ahead.
    """
    values = {name: getattr(of, name) for name in ("id", "cohort", "platform", "rank", "queued_at")}
    found = {row.instance: (row.jobs, row.most) for row in connection.execute(AHEAD, values | {"most": MOST_AHEAD})}
    every, _ = found.pop(0)
    return None if every > MOST_AHEAD else found


def later(connection: Connection, of: Place) -> Mapping[int, tuple[float, int | None]]:
    """Return how many jobs a second come that are ahead of it although they come later: by instance, with its maximum.

    They are taken to come as they have come lately. Of the newest jobs ARRIVED are looked at, as far as retention has
    left them.
    """
    values = {name: getattr(of, name) for name in ("cohort", "platform", "rank")}
    rows = connection.execute(LATER, values | {"arrived": ARRIVED, "memory": MEMORY, "least_past": LEAST_PAST})
    return {row.instance: (row.jobs, row.most) for row in rows}


def room(connection: Connection, of: Place) -> tuple[int, int]:
    """Return the units of the healthy bots that could run the job, and those of them that are free.

    At most MOST_BOTS are counted. What a larger fleet does faster is in the errors of past forecasts.
    """
    values = {name: getattr(of, name) for name in ("cohort", "instance", "platform", "units", "pool")}
    row = connection.execute(ROOM, values | {"most": MOST_BOTS}).one()
    return row.units, row.free


def times(connection: Connection, cohort: int) -> Mapping[int, Times]:
    """Return what leases of the cohort lately took, by instance."""
    rows = connection.execute(TIMES, {"cohort": cohort})
    return {row.instance: Times(row.leases, row.seconds, row.work, row.per_second, row.waited) for row in rows}


def past(connection: Connection, of: Place, *, of_instance: bool) -> list[Past]:
    """Return the newest earlier forecasts that have come true or are late, of its instance or of its cohort."""
    values = {"cohort": of.cohort, "instance": of.instance, "most": MOST_PAST}
    if not of_instance:
        del values["instance"]
    return [Past(*row) for row in connection.execute(PAST[of_instance], values)]


def waiting(connection: Connection, *, limit: int) -> list[Waiting]:
    """Return up to `limit` groups of ready jobs, those with the most jobs first, of at most MOST_QUEUES queues."""
    rows = connection.execute(WAITING, {"most": COUNTED, "queues": MOST_QUEUES}).all()
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cohort, row.instance, row.job_class), []).append(row)
    found = [
        Waiting(*group, sum(row.jobs for row in of), max(of, key=lambda row: (row.rank, row.queued_at, row.last)).last)
        for group, of in groups.items()
    ]
    return sorted(found, key=lambda each: (-each.jobs, each.cohort, each.instance, each.job_class))[:limit]


def store(connection: Connection, found: Sequence[Stored]) -> None:
    """Store forecasts of jobs that have none yet."""
    for each in found:
        connection.execute(STORE, asdict(each))


def measure_times(connection: Connection) -> None:
    """Store how long leases of the newest ended jobs took and their jobs had waited, by cohort and instance."""
    values = {"newest": NEWEST, "used_for": USED_FOR, "rate_of": RATE_OF, "last": LAST, "least_past": LEAST_PAST}
    connection.execute(MEASURE_TIMES, values)


def jobs_without(connection: Connection, *, limit: int, nth: int = 0) -> Sequence[int]:
    """Return up to `limit` of the newest jobs that wait and have no stored forecast.

    nth: another number gives others, so that none which cannot be foreseen keeps the rest from it.
    """
    values = {"looked_at": LOOKED_AT, "open": MOST_OPEN, "limit": limit, "nth": nth}
    return list(connection.execute(WITHOUT, values).scalars())


def judge(connection: Connection, *, after: int, limit: int) -> int | None:
    """Note which of up to `limit` forecasts of jobs with an id above `after` have come true or not.

    Returns where the next page begins, None after the last one.
    """
    row = connection.execute(JUDGE, {"after": after, "limit": limit}).one()
    return row.last if row.rows == limit else None


def judged(connection: Connection) -> list[Judged]:
    """Return what became of the forecasts of the last day: of the pool first, then of each instance with any."""
    rows = connection.execute(JUDGED, {"some": SOME, "seconds": TOLD, "longest": LONGEST})
    return [Judged(*row) for row in rows]


def forget(connection: Connection, *, limit: int) -> int:
    """Delete up to `limit` forecasts that are too old to say anything; return how many."""
    return connection.execute(FORGET, {"age": KEPT, "limit": limit}).rowcount
