"""Evidence for `explain`: the state of each gate of one job, read without locks.

The gates are the same SQL expressions that pick and grant jobs. Every query is bounded, so the cost does not grow with
the queue or the fleet. One module because each answer needs the reads of all gates of a job.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from schema import graphs
from schema.accounting.quotas import EFFECTIVE_MAX, HEADROOM, Cooldown
from schema.fleet import candidates, kinds
from schema.postgres.connection import Connection
from schema.postgres.fragments import JOB_REASON, newest_leases
from schema.postgres.statements import Statement
from schema.predicates import (
    ASSIGNERS,
    BACKOFF,
    COHORT,
    DEPENDENCIES,
    DRAIN,
    HEALTHY,
    PAUSE,
    PAUSED_UNTIL,
    PROBATION,
    QUEUE_DEADLINE,
    QUOTA,
    READY_PLAIN,
    REQUIREMENTS,
    SERVES,
    STATE,
    UNITS,
    assigner_is_placing,
    can_take,
    has_ready_jobs,
    offered,
    ready_in,
    room_for,
)
from schema.validation import Properties

#: The most bots read, both of the cohort and of those that match the requirements; and the most comparisons of single
#: clauses of the requirements with bots.
MAX_BOTS_COUNTED, COMPARISONS = 1000, 4000
#: The most jobs ahead that are counted, and the most queues of the instance in which they are counted.
AHEAD, MAX_QUEUES_READ = 10_000, 1000
#: With at most this many matching bots, each clause of the requirements is checked on its own.
FEW = 3
#: The most clauses checked, names of bots returned, and newest leases of the job returned.
CLAUSES, NAMES, LEASES = 64, 5, 50

Row = dict[str, Any]

JOBS = Statement(f"""
WITH job AS MATERIALIZED (
    SELECT j.*, i.name AS instance_name, i.pool, i.drain_deadline, {DRAIN.of(instance="i")} AS undrained,
        coalesce(c.name, 'default') AS cohort_name, c.labels AS cohort_labels, p.properties, k.looks,
        k.required, w.until AS prefer_until,
        greatest(nullif(j.schedule_after, {PAUSED_UNTIL}), k.schedule_after) AS rests_until,
        (SELECT reason FROM pauses WHERE kind = 'instance' AND name = i.name) AS drain_reason
    FROM jobs j JOIN instances i ON i.id = j.instance
    JOIN queues k ON k.id = j.queue JOIN platforms p ON p.id = j.platform
    LEFT JOIN preference_waits w ON w.job_id = j.id
    LEFT JOIN cohorts c ON c.id = j.cohort
    WHERE j.id = ANY(CAST(:ids AS bigint[]))
)
SELECT j.id AS row_id, j.state, j.label, j.priority, j.rank, j.units, j.queued_at, j.looks AS considered,
    {JOB_REASON} AS reason,
    j.attempts, j.max_attempts, j.cohort, j.cohort_name, j.cohort_labels, j.instance, j.instance_name, j.pool,
    j.queue, j.platform, j.properties, j.required IS NOT NULL AS insists,
    extract(epoch FROM j.prefer_until - clock_timestamp()) AS prefer_left,
    extract(epoch FROM j.rests_until - clock_timestamp()) AS rest,
    greatest(0, extract(epoch FROM j.queued_at - clock_timestamp())) AS starts_in,
    extract(epoch FROM least(j.queue_deadline,
        CASE WHEN j.fence = 0 THEN j.queued_at + make_interval(secs => l.max_queue_age) END)
        - clock_timestamp()) AS patience,
    extract(epoch FROM j.drain_deadline - clock_timestamp()) AS drain_left,
    q.min_quota, q.max_quota, q.usage, ({EFFECTIVE_MAX}) AS effective_max, h.headroom,
    (SELECT count(*) FROM evictions e WHERE e.cohort = j.cohort AND e.instance = j.instance
        AND e.at > statement_timestamp() - make_interval(secs => :cooldown)) AS evicted_lately,
    CAST(:literal AS boolean) AS literal_cooldown,
    g.public_id AS graph, g.name AS graph_name, n.node_no, n.pending_deps, n.missing,
    {DEPENDENCIES.of(job="j")} AS "open_{DEPENDENCIES.name}",
    {STATE.of(job="j")} AS "open_{STATE.name}",
    z.kind IS NULL AS "open_{PAUSE.name}", z.kind AS paused, z.name AS paused_name, z.reason AS pause_reason,
    z.actor AS paused_by, z.at AS paused_at, j.drain_reason,
    coalesce(j.rests_until <= now(), true) AS "open_{BACKOFF.name}",
    j.undrained AS "open_{DRAIN.name}",
    {QUOTA.of(job="j", headroom="h.headroom")} AS "open_{QUOTA.name}",
    {QUEUE_DEADLINE.of(job="j")} AS "open_{QUEUE_DEADLINE.name}"
FROM job j
LEFT JOIN quotas q ON q.cohort = j.cohort AND q.instance = j.instance
CROSS JOIN LATERAL (SELECT {HEADROOM} AS headroom) h
CROSS JOIN LATERAL ceiling_of(j.instance, j.label) l
LEFT JOIN graph_nodes n ON n.job_id = j.id
LEFT JOIN graphs g ON g.id = n.graph
LEFT JOIN LATERAL pause_of(j.id, j.label, j.instance) z ON true
""")

_WANT = """
w AS MATERIALIZED (
    SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance, CAST(:pool AS text) AS pool,
        CAST(:platform AS integer) AS platform, CAST(:units AS integer) AS units
)"""
# A caller without `everything` sees only the bots that serve its instance. These come first for every caller, so that
# the bound never hides them behind others.
_SERVES = SERVES.of(bot="b", want="w")
_PRESENT = f"""
present AS MATERIALIZED (
    SELECT near.* FROM w CROSS JOIN LATERAL (
        {candidates.serving_bots("*", "w", which="status <> 'gone'", limit=":look + 1")}
        UNION ALL
        (SELECT b.* FROM bots b
         WHERE b.status <> 'gone' AND b.cohort = w.cohort AND CAST(:everything AS boolean) AND ({_SERVES}) IS NOT TRUE
         ORDER BY {candidates.BOTS_ORDER} LIMIT :look + 1)
    ) near LIMIT :look + 1
)"""

COHORT_BOTS = Statement(f"""
WITH {_WANT}, {_PRESENT}
SELECT count(*) AS present, count(*) FILTER (WHERE {HEALTHY.of(bot="b")}) AS healthy, count(*) > :look AS more,
    count(*) FILTER (WHERE b.draining OR b.closing) AS leaving
FROM present b
""")

# In a cohort with more bots than are looked at, those of the kinds that offer what the job requires are looked at too.
_OFFERING = f"""
offering AS MATERIALIZED (
    SELECT b.* FROM w JOIN kind_platforms o ON o.platform = w.platform CROSS JOIN LATERAL (
        SELECT * FROM bots WHERE status <> 'gone' AND cohort = w.cohort AND kind = o.kind
        ORDER BY {candidates.BOTS_ORDER} LIMIT :look + 1) b
    WHERE (SELECT count(*) FROM present) > :look LIMIT :look + 1
)"""

# The bots that match the job's requirements, and how many of them pass one gate after the other.
MATCHING = Statement(f"""
WITH {_WANT}, {_PRESENT}, {_OFFERING}, near AS MATERIALIZED (
    SELECT id FROM offering
    UNION
    SELECT b.id FROM present b CROSS JOIN w WHERE {REQUIREMENTS.of(bot="b", want="w")}
), matching AS MATERIALIZED (
    SELECT b.name, b.status, b.draining, b.closing, b.sync_seq, b.capacity, {room_for("b", "w")} AS room,
        CASE WHEN b.kept_for = w.instance THEN b.kept_units ELSE 0 END AS kept,
        CASE WHEN b.kept_for <> w.instance THEN b.kept_units ELSE 0 END AS kept_for_others,
        CASE WHEN t.able THEN 0 ELSE (
            SELECT coalesce(sum(l.units), 0) FROM {newest_leases("b.id", "b.held", columns="units, cohort")} l
            WHERE l.cohort <> b.cohort) END AS of_other_cohorts,
        extract(epoch FROM b.kept_until - clock_timestamp()) AS kept_seconds,
        {SERVES.of(bot="b", want="w")} AS serving, {HEALTHY.of(bot="b")} AS healthy,
        {PROBATION.of(bot="b")} AS trusted, {UNITS.of(bot="b", want="w")} AS large, t.able
    FROM near CROSS JOIN w CROSS JOIN LATERAL (SELECT * FROM bots c WHERE c.id = near.id OFFSET 0) b
    CROSS JOIN LATERAL (SELECT {can_take("b", "w")} AS able OFFSET 0) t
    WHERE {REQUIREMENTS.of(bot="b", want="w")} AND {COHORT.of(bot="b", want="w")} AND b.status <> 'gone'
        AND (CAST(:everything AS boolean) OR {_SERVES})
)
SELECT count(*) AS matching,
    (SELECT count(*) FROM offering) > :look AS more,
    count(*) FILTER (WHERE serving) AS serving,
    count(*) FILTER (WHERE serving AND healthy) AS healthy,
    count(*) FILTER (WHERE serving AND (draining OR closing OR status = 'draining')) AS leaving,
    count(*) FILTER (WHERE serving AND status = 'unhealthy') AS unhealthy,
    count(*) FILTER (WHERE serving AND sync_seq = 0) AS new,
    max(capacity) FILTER (WHERE serving AND healthy) AS largest,
    count(*) FILTER (WHERE serving AND healthy AND large) AS large,
    count(*) FILTER (WHERE serving AND healthy AND large AND trusted) AS trusted,
    greatest(0, max(room) FILTER (WHERE serving AND healthy AND large AND trusted)) AS roomiest,
    count(*) FILTER (WHERE able) AS able,
    sum(kept) FILTER (WHERE serving) AS kept, sum(kept_for_others) FILTER (WHERE serving) AS kept_for_others,
    sum(of_other_cohorts) FILTER (WHERE serving AND healthy AND large AND trusted)::integer AS of_other_cohorts,
    max(kept_seconds) FILTER (WHERE serving AND kept > 0) AS kept_seconds,
    (array_agg(name ORDER BY able DESC, serving AND healthy AND large DESC, room DESC, name))[1:{NAMES}] AS names
FROM matching
""")

# Whether some bot passes one gate after the other, for each of several jobs: a condition stops at the first one.
PASSING = Statement(f"""
SELECT p.* FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:pools AS text[]),
    CAST(:platforms AS integer[]), CAST(:sizes AS integer[])) WITH ORDINALITY
    AS wants (cohort, instance, pool, platform, units, nth)
CROSS JOIN LATERAL (
    WITH w AS MATERIALIZED (SELECT wants.*), {_PRESENT}, {_OFFERING}, matching AS MATERIALIZED (
        SELECT b.* FROM (SELECT * FROM present UNION ALL SELECT * FROM offering) b CROSS JOIN w
        WHERE {REQUIREMENTS.of(bot="b", want="w")} AND (CAST(:everything AS boolean) OR {_SERVES})
    ), serving AS MATERIALIZED (
        SELECT b.* FROM matching b CROSS JOIN w WHERE {_SERVES}
    ), large AS MATERIALIZED (
        SELECT b.* FROM serving b CROSS JOIN w WHERE {HEALTHY.of(bot="b")} AND {UNITS.of(bot="b", want="w")}
    )
    SELECT (SELECT count(*) FROM present) AS present,
        (SELECT count(*) FROM present b WHERE {HEALTHY.of(bot="b")}) AS present_healthy,
        (SELECT count(*) > :look FROM offering) AS more,
        EXISTS (SELECT FROM matching) AS matching,
        EXISTS (SELECT FROM serving) AS serving,
        EXISTS (SELECT FROM serving b WHERE {HEALTHY.of(bot="b")}) AS healthy,
        EXISTS (SELECT FROM serving WHERE draining OR closing OR status = 'draining') AS leaving,
        EXISTS (SELECT FROM large) AS large,
        EXISTS (SELECT FROM large b WHERE {PROBATION.of(bot="b")}) AS trusted,
        EXISTS (SELECT FROM large b CROSS JOIN w WHERE {can_take("b", "w")}) AS able
) p ORDER BY wants.nth
""")

# For each clause of the requirements, the bots of the cohort that match it, and those that match all other clauses.
CLAUSE_BOTS = Statement(f"""
WITH {_WANT}, {_PRESENT}
SELECT c.nth, count(*) FILTER (WHERE offers(k.properties, c.alone)) AS alone,
    count(*) FILTER (WHERE offers(k.properties, c.others)) AS others
FROM unnest(CAST(:alone AS jsonb[]), CAST(:others AS jsonb[])) WITH ORDINALITY AS c (alone, others, nth)
LEFT JOIN (SELECT properties FROM present b JOIN kinds ON kinds.id = b.kind) k ON true
GROUP BY c.nth ORDER BY c.nth
""")

# Bots of the cohort that offer what the job requires, and are kept for jobs that also ask for other properties: their
# number and these properties.
EXCLUSIVE_BOTS = Statement(f"""
WITH {_WANT}, {_PRESENT}, kept AS MATERIALIZED (
    SELECT k.exclusive FROM present b JOIN kinds k ON k.id = b.kind
    JOIN (SELECT properties FROM platforms WHERE id = :platform) p
        ON offers(k.properties, p.properties)
            AND NOT EXISTS ({offered(platform="CAST(:platform AS integer)", kind="k.id")} OFFSET 0)
)
SELECT (SELECT count(*) FROM kept) AS bots, ARRAY(
    SELECT DISTINCT name FROM kept, unnest(exclusive) AS name
    WHERE NOT (SELECT properties FROM platforms WHERE id = :platform) ? name ORDER BY 1 LIMIT {NAMES}) AS names
""")

_BEFORE = "(rank, queued_at, id) < (:rank, CAST(:queued_at AS timestamptz), :id)"

AHEAD_IN_QUEUE = Statement(f"""
SELECT count(*) FROM (
    SELECT FROM queues k CROSS JOIN LATERAL (
        SELECT FROM jobs WHERE {ready_in("k")} AND {_BEFORE} ORDER BY queue, rank, queued_at, id LIMIT :limit) j
    WHERE k.id = :queue) ahead
""")

# In each queue of the instance in the cohort that has no constraints, but the job's own.
AHEAD_IN_OTHERS = Statement(f"""
WITH others AS MATERIALIZED (
    SELECT id FROM queues
    WHERE cohort = :cohort AND instance = :instance AND constraint_set IS NULL AND id <> :queue
        AND {has_ready_jobs("queues")} ORDER BY id LIMIT :queues + 1
)
SELECT count(*) AS jobs, (SELECT count(*) FROM others) > :queues AS more FROM (
    SELECT FROM others q CROSS JOIN LATERAL (
        SELECT FROM jobs WHERE queue = q.id AND {READY_PLAIN} AND {_BEFORE}
        ORDER BY queue, rank, queued_at, id LIMIT :limit) ahead
    LIMIT :limit) counted
""")

POOL = Statement(f"""
WITH w AS MATERIALIZED (
    SELECT CAST(:cohort_name AS text) AS cohort_name,
        ARRAY(SELECT name FROM instances WHERE id = :instance UNION
              SELECT name FROM instances WHERE pool = CAST(:pool AS text)) AS peers
)
SELECT count(*) AS known, count(*) FILTER (WHERE {ASSIGNERS.of(assigner="a", want="w")}) AS working,
    count(*) FILTER (WHERE {assigner_is_placing("a")}) AS at_work,
    count(*) FILTER (WHERE a.draining AND a.stopped_at IS NULL) AS draining,
    extract(epoch FROM clock_timestamp() - (SELECT max(at) FROM ticks WHERE name LIKE 'reaper%')) AS silence
FROM (SELECT * FROM assigners ORDER BY name LIMIT :look) a CROSS JOIN w
""")

LEASES_OF = Statement("""
SELECT l.fence, l.state, l.assigner, l.strategy, l.policy, l.stop_reason, l.granted_at, l.acknowledged_at, l.ended_at,
    b.name AS bot
FROM leases l LEFT JOIN bots b ON b.id = l.bot_id
WHERE l.job_id = :job_id ORDER BY l.fence DESC LIMIT :limit
""")


@dataclass(frozen=True)
class Clause:
    """One required property and value. `alone`: bots that have it; `others`: bots that have all other clauses."""

    name: str
    value: str
    alone: int
    others: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class JobsAhead:
    """The number of jobs ahead of a job. `more`: the true number may be larger."""

    jobs: int
    more: bool


@dataclass(frozen=True)
class JobEvidence:
    """A job with its instance and its quota."""

    row_id: int
    state: str
    label: str
    priority: int
    rank: float
    units: int
    queued_at: datetime
    #: Why it is in its state, or rests.
    reason: str | None
    #: Looks that found no bot for it since its last attempt.
    considered: int
    attempts: int
    max_attempts: int
    cohort: int
    cohort_name: str
    cohort_labels: Sequence[str] | None
    instance: int
    instance_name: str
    pool: str | None
    queue: int
    platform: int
    #: What it requires of a bot.
    properties: Properties
    #: Whether the job still waits for a bot that it prefers, and for how many more seconds.
    insists: bool
    prefer_left: Decimal | None
    #: Seconds until the earliest start that was asked for, 0 if that is past; until its rest is over, until it has
    #: waited too long, and until the drain of its instance stops jobs.
    starts_in: Decimal
    rest: Decimal | None
    patience: Decimal | None
    drain_left: Decimal | None
    #: What of it is paused (label or task), its name, why, by whom and since when; None if nothing is. And why its
    #: instance is drained.
    paused: str | None
    paused_name: str | None
    pause_reason: str | None
    paused_by: str | None
    paused_at: datetime | None
    drain_reason: str | None
    #: Jobs of the instance that were lately evicted, which lower its maximum: always, or while others wait.
    evicted_lately: int
    literal_cooldown: bool
    #: The quota of its instance, and its place in a graph; None without one.
    quota: "QuotaEvidence | None"
    node: "NodeEvidence | None"
    #: The names of its own gates that are open.
    open_gates: frozenset[str]


@dataclass(frozen=True)
class QuotaEvidence:
    """The quota of an instance, in units. effective_max: its maximum less what evictions take off it; None = none."""

    usage: int
    min_quota: int
    max_quota: int | None
    effective_max: int | None
    headroom: int | None


@dataclass(frozen=True)
class NodeEvidence:
    """A node of a graph, and how many nodes it waits for."""

    graph: UUID
    graph_name: str
    node_no: int
    pending_deps: int
    #: Numbers of nodes that it waits for and that do not exist.
    missing: Sequence[int]
    #: If it is blocked: nodes that it waits for, and the number of a node that makes it wait for ever.
    unmet: Sequence[dict[str, Any]] = ()
    hopeless: int | None = None


@dataclass(frozen=True)
class CohortEvidence:
    """Bots of the job's cohort. more: there are more than were counted. leaving: draining or closing."""

    present: int
    healthy: int
    more: bool
    leaving: int = 0


@dataclass(frozen=True)
class BotsEvidence:
    """Bots that match the job's requirements, and how many of them pass one gate after the other."""

    matching: int
    #: There may be more of all of these than were counted.
    more: bool
    serving: int
    healthy: int
    #: Of those that serve its instance: draining or closing.
    leaving: int
    #: Healthy ones that have enough units.
    large: int
    #: Of these, those that may be given a further lease.
    trusted: int
    #: Those that could take the job now.
    able: int
    #: Of those that serve its instance: unhealthy, and without a first sync.
    unhealthy: int = 0
    new: int = 0
    #: The most units that a healthy one has, and the most that one has free which may be given a further lease.
    largest: int | None = None
    roomiest: int = 0
    #: Units that they keep for its instance, for how many seconds more at most, and units kept for other instances.
    kept: int | None = None
    kept_seconds: Decimal | None = None
    kept_for_others: int | None = None
    #: Units held by jobs that started while their bot was in another cohort.
    of_other_cohorts: int | None = None
    #: Names of some of them.
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class ExclusiveEvidence:
    """Bots that would match, but are kept for jobs that ask for other properties too: their number, and these."""

    bots: int = 0
    names: Sequence[str] = ()


@dataclass(frozen=True)
class AssignersEvidence:
    """Assigner processes: all that are known, those at work, those at work for the job, and draining ones. silence:
    seconds since upkeep was last heard of."""

    known: int
    working: int
    at_work: int
    draining: int
    silence: Decimal | None


@dataclass(frozen=True)
class Evidence:
    """What is known of a waiting job. `clauses` and `exclusive` are empty unless few bots match the requirements."""

    job: JobEvidence
    cohort: CohortEvidence
    bots: BotsEvidence
    clauses: Sequence[Clause]
    exclusive: ExclusiveEvidence
    pool: AssignersEvidence
    in_queue: JobsAhead
    in_instance: JobsAhead


#: The gates on the job itself, which the query of the job judges.
_OWN_GATES = tuple(gate.name for gate in (DEPENDENCIES, STATE, PAUSE, BACKOFF, DRAIN, QUOTA, QUEUE_DEADLINE))


def job(connection: Connection, job_id: int, *, cooldown: Cooldown) -> JobEvidence:
    """Read the job with its instance, its quota, and which of its own gates are open."""
    [found] = jobs(connection, [job_id], cooldown=cooldown)
    return found


def jobs(connection: Connection, job_ids: Sequence[int], *, cooldown: Cooldown) -> list[JobEvidence]:
    """Read the same of each of these jobs, in no order."""
    rows = connection.execute(JOBS, {"ids": [*job_ids], **cooldown.values()}).mappings()
    return [_job(connection, row) for row in graphs.with_roots(connection, list(rows))]


def _job(connection: Connection, row: Row) -> JobEvidence:
    opened = {name: row.pop(f"open_{name}") for name in _OWN_GATES}
    open_gates = frozenset(name for name, is_open in opened.items() if is_open)
    quota = {each.name: row.pop(each.name) for each in fields(QuotaEvidence)}
    node = {name: row.pop(name) for name in ("graph", "graph_name", "node_no", "pending_deps", "missing")}
    if DEPENDENCIES.name not in open_gates:
        node |= graphs.unmet_dependencies(connection, row["row_id"], limit=NAMES)
    row["properties"] = kinds.usable(row["properties"])
    return JobEvidence(
        **row,
        quota=QuotaEvidence(**quota) if quota["usage"] is not None else None,
        node=NodeEvidence(**node) if node["node_no"] is not None else None,
        open_gates=open_gates,
    )


def gather(connection: Connection, job: JobEvidence, *, everything: bool) -> Evidence:
    """Read all evidence on a waiting job. Without `everything`, only bots that serve its instance are counted."""
    want: Row = {
        "cohort": job.cohort,
        "instance": job.instance,
        "pool": job.pool,
        "platform": job.platform,
        "units": job.units,
        "everything": everything,
    }
    looked = want | {"look": MAX_BOTS_COUNTED}
    bots = BotsEvidence(**_row(connection, MATCHING, looked))
    has_few = bots.matching <= FEW
    return Evidence(
        job,
        CohortEvidence(**_row(connection, COHORT_BOTS, looked)),
        bots,
        _clauses(connection, job.properties, want) if has_few else [],
        ExclusiveEvidence(**_row(connection, EXCLUSIVE_BOTS, looked)) if has_few else ExclusiveEvidence(),
        _assigners(connection, job),
        *_ahead(connection, job),
    )


def gather_briefly(connection: Connection, jobs: Sequence[JobEvidence], *, everything: bool) -> list[Evidence]:
    """Read of each of these waiting jobs only what decides which gates are open, in their order.

    Of the bots that pass a gate one is counted, and clauses, exclusive bots and the jobs ahead are left out.
    """
    found = connection.execute(
        PASSING,
        {
            "cohorts": [job.cohort for job in jobs],
            "instances": [job.instance for job in jobs],
            "pools": [job.pool for job in jobs],
            "platforms": [job.platform for job in jobs],
            "sizes": [job.units for job in jobs],
            "everything": everything,
            "look": MAX_BOTS_COUNTED,
        },
    )
    assigners = {(job.cohort, job.instance): job for job in jobs}
    known = {key: _assigners(connection, job) for key, job in assigners.items()}
    return [
        Evidence(
            job,
            CohortEvidence(row.present, row.present_healthy, row.present > MAX_BOTS_COUNTED),
            BotsEvidence(
                matching=row.matching,
                more=row.more,
                serving=row.serving,
                healthy=row.healthy,
                leaving=row.leaving,
                large=row.large,
                trusted=row.trusted,
                able=row.able,
            ),
            [],
            ExclusiveEvidence(),
            known[job.cohort, job.instance],
            JobsAhead(0, True),
            JobsAhead(0, True),
        )
        for job, row in zip(jobs, found.all(), strict=True)
    ]


def leases(connection: Connection, job_id: int) -> list[Row]:
    """The newest leases of a job, oldest first."""
    rows = connection.execute(LEASES_OF, {"job_id": job_id, "limit": LEASES}).mappings().all()
    return [dict(row) for row in reversed(rows)]


def _row(connection: Connection, query: Statement, where: Mapping[str, Any]) -> Row:
    return dict(connection.execute(query, where).mappings().one())


def _assigners(connection: Connection, job: JobEvidence) -> AssignersEvidence:
    want = {"cohort": job.cohort, "cohort_name": job.cohort_name, "instance": job.instance, "pool": job.pool}
    return AssignersEvidence(**_row(connection, POOL, want | {"look": MAX_BOTS_COUNTED}))


def _clauses(connection: Connection, properties: Properties, want: Row) -> list[Clause]:
    pairs = [(name, value) for name, values in sorted(properties.items()) for value in values][:CLAUSES]
    if not pairs:
        return []
    alone = [{name: [value]} for name, value in pairs]
    rows = connection.execute(
        CLAUSE_BOTS,
        {
            **want,
            "look": max(1, min(MAX_BOTS_COUNTED, COMPARISONS // len(pairs))),
            "alone": [json.dumps(clause) for clause in alone],
            "others": [json.dumps(_without(properties, *pair)) for pair in pairs],
        },
    )
    return [Clause(name, value, row.alone, row.others) for (name, value), row in zip(pairs, rows.all(), strict=True)]


def _without(properties: Properties, name: str, value: str) -> Properties:
    rest = {key: [each for each in values if (key, each) != (name, value)] for key, values in properties.items()}
    return {key: values for key, values in rest.items() if values}


def _ahead(connection: Connection, job: JobEvidence) -> tuple[JobsAhead, JobsAhead]:
    where: Row = {
        "id": job.row_id,
        "queue": job.queue,
        "cohort": job.cohort,
        "instance": job.instance,
        "rank": job.rank,
        "queued_at": job.queued_at,
    }
    own: int = connection.execute(AHEAD_IN_QUEUE, where | {"limit": AHEAD + 1}).scalar_one()
    if own > AHEAD:
        return JobsAhead(AHEAD, True), JobsAhead(AHEAD, True)
    left = AHEAD + 1 - own
    others = connection.execute(AHEAD_IN_OTHERS, where | {"limit": left, "queues": MAX_QUEUES_READ}).one()
    every = own + int(others.jobs)
    return JobsAhead(own, False), JobsAhead(min(every, AHEAD), every > AHEAD or others.more)
