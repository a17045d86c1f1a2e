"""Many rows with one statement per kind of object. They violate no invariant."""

import json
from collections.abc import Mapping, Sequence

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# Instances i-0, i-1, … have a queue for each requirement set, which consists of one kind. Every bot of the kind offers
# it.
QUEUES = Statement("""
INSERT INTO instances (name) SELECT 'i-' || n FROM generate_series(0, :instances - 1) n ON CONFLICT DO NOTHING
""")
PLATFORM = Statement("SELECT intern_platform(jsonb_build_object('kind', jsonb_build_array(CAST(:kind AS text))))")

JOBS = Statement("""
WITH filled AS MATERIALIZED (
    SELECT i.id AS instance, p.id AS platform, intern_queue(0, i.id, p.id, :units, NULL) AS queue,
        row_number() OVER (ORDER BY i.id, p.id) - 1 AS nth, count(*) OVER () AS all
    FROM instances i CROSS JOIN platforms p
    WHERE i.name = ANY (CAST(:instances AS text[]))
        AND p.properties IN (SELECT jsonb_build_object('kind', jsonb_build_array(kind))
                             FROM unnest(CAST(:kinds AS text[])) AS kind)
), born AS (
    INSERT INTO jobs (queue, instance, platform, priority, rank, units, state, fence, result_fence, attempts, queued_at,
                      started_at, finished_at)
    SELECT q.queue, q.instance, q.platform, p.priority, p.priority, :units, :state,
        CASE WHEN :final THEN 1 ELSE 0 END, CASE WHEN :final THEN 1 END, CASE WHEN :final THEN 1 ELSE 0 END,
        now() - make_interval(secs => (:jobs - n) * 0.01),
        CASE WHEN :final THEN now() END, CASE WHEN :final THEN now() END
    FROM generate_series(0, :jobs - 1) n JOIN filled q ON q.nth = n % q.all
    CROSS JOIN LATERAL (SELECT coalesce(CAST(:priority AS integer), n % 21 - 10) AS priority) p
    RETURNING id, state, instance
), paid AS (
    INSERT INTO job_payloads (job_id, payload) SELECT id, '{"command": ["true"]}' FROM born
), held AS (
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, instance, state, units, assigner, strategy, ended_at)
    SELECT id, 1, id % 100 + 1, 1, instance, 'completed', 1, 'filling', 'filling', now() FROM born WHERE :final
)
INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
SELECT b.id, e.move, e.from_state, coalesce(e.to_state, b.state), e.fence, 'filling'
FROM born b JOIN (VALUES (1, 'submit', NULL, 'queued', 0), (2, 'finish', 'queued', NULL, 1))
    AS e (nth, move, from_state, to_state, fence) ON e.nth = 1 OR :final
ORDER BY e.nth, b.id
""")

REST = Statement("""
UPDATE queues q SET looks = 1, reason = 'filling', schedule_after = now() + make_interval(secs => :backoff)
FROM platforms p WHERE p.id = q.platform AND q.units = :units AND p.properties->'kind'->>0 = ANY (:kinds)
""")

BOTS = Statement("""
WITH named AS MATERIALIZED (
    SELECT kind, count, intern_kind(jsonb_build_object('kind', jsonb_build_array(kind))) AS id
    FROM jsonb_to_recordset(CAST(:kinds AS jsonb)) AS k (kind text, count integer)
)
INSERT INTO bots (name, epoch, session, sync_seq, status, capacity, kind, opened_at, expires_at)
SELECT k.kind || '-' || n, 1, '\\x00', 1, 'ok', :capacity, k.id, now(), now() + interval '1 hour'
FROM named k CROSS JOIN LATERAL generate_series(1, k.count) n
""")

# All bots of the kind except `free` of them get a job that takes their whole capacity.
BUSY = Statement("""
WITH full_bots AS (
    SELECT b.id, b.epoch, b.capacity, o.platform, row_number() OVER (ORDER BY md5(b.name)) AS nth FROM bots b
    JOIN kind_platforms o ON o.kind = b.kind
    JOIN platforms p ON p.id = o.platform
    WHERE p.properties = jsonb_build_object('kind', jsonb_build_array(CAST(:kind AS text)))
), chosen AS MATERIALIZED (
    SELECT b.*, nextval('jobs_id_seq') AS job_id, i.id AS instance,
        intern_queue(0, i.id, b.platform, b.capacity, NULL) AS queue
    FROM full_bots b CROSS JOIN (SELECT min(id) AS id FROM instances) i WHERE nth > :free
), born AS (
    INSERT INTO jobs (id, queue, instance, platform, units, state, fence, attempts, started_at)
    SELECT job_id, queue, instance, platform, capacity, 'running', 1, 1, now() FROM chosen
), noted AS (
    INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
    SELECT job_id, 'submit', NULL, 'running', 1, 'filling' FROM chosen
), held AS (
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, instance, state, units, assigner, strategy, acknowledged_at)
    SELECT job_id, 1, id, epoch, instance, 'active', capacity, 'filling', 'filling', now() FROM chosen
)
UPDATE bots b SET in_use = b.capacity, held = 1 FROM chosen c WHERE b.id = c.id
""")


def fill_queues(connection: Connection, *, instances: int, kinds: Sequence[str]) -> None:
    """Make instances i-0, i-1, … and a requirement set for every kind."""
    connection.execute(QUEUES, {"instances": instances})
    for kind in kinds:
        connection.execute(PLATFORM, {"kind": kind})


def fill_jobs(
    connection: Connection,
    jobs: int,
    *,
    instances: int,
    kinds: Sequence[str],
    first: int = 0,
    state: str = "queued",
    backoff: float | None = None,
    priority: int | None = None,
    units: int = 1,
) -> None:
    """Make `jobs` jobs, spread over the queues and over 21 priorities. `backoff`: seconds for which their queues rest,
    those of the same number of units that were filled before included."""
    connection.execute(
        JOBS,
        {
            "jobs": jobs,
            "instances": [f"i-{n}" for n in range(first, first + instances)],
            "kinds": list(kinds),
            "state": state,
            "final": state == "succeeded",
            "priority": priority,
            "units": units,
        },
    )
    if backoff is not None:
        connection.execute(REST, {"kinds": list(kinds), "units": units, "backoff": backoff})


def fill_bots(connection: Connection, kinds: Mapping[str, int], *, capacity: int = 1) -> None:
    """Make free, healthy bots; `kinds` maps a kind to their number. Their requirement sets must exist."""
    found = [{"kind": kind, "count": count} for kind, count in kinds.items()]
    connection.execute(BOTS, {"kinds": json.dumps(found), "capacity": capacity})


def occupy(connection: Connection, kind: str, *, leaving: int) -> None:
    """Fill all bots of the kind except `leaving` of them."""
    connection.execute(BUSY, {"kind": kind, "free": leaving})
