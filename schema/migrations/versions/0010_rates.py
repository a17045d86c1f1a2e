"""Rates, backpressure and shares of graphs: how fast jobs that ask for more than a place may start."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# One row is one bucket for all assigners; who is advised nothing has no row.
TABLES = """
CREATE TABLE rate_buckets (
    name text NOT NULL,
    rate double precision NOT NULL,
    burst integer NOT NULL,
    tokens double precision NOT NULL,
    refilled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT rate_buckets_pkey PRIMARY KEY (name),
    CONSTRAINT rate_buckets_name_form
        CHECK (name ~ '^rate:[a-z0-9][a-z0-9._-]{0,62}(/[a-z0-9][a-z0-9._-]{0,62})?$'),
    CONSTRAINT rate_buckets_rate_range CHECK (rate > 0 AND rate <= 1e6),
    CONSTRAINT rate_buckets_burst_range CHECK (burst BETWEEN 1 AND 1000000),
    CONSTRAINT rate_buckets_tokens_range CHECK (tokens >= 0 AND tokens <= burst)
);
CREATE TABLE backpressure (
    resource_class text NOT NULL,
    allowed boolean NOT NULL,
    delay double precision NOT NULL DEFAULT 0,
    until timestamptz,
    CONSTRAINT backpressure_pkey PRIMARY KEY (resource_class),
    CONSTRAINT backpressure_class_form CHECK (resource_class ~ '^([a-z0-9][a-z0-9._-]{0,62})?$'),
    CONSTRAINT backpressure_delay_range CHECK (delay >= 0 AND delay <= 3600)
);
CREATE TABLE rate_skips (
    job_id bigint NOT NULL,
    resource text NOT NULL,
    skips integer NOT NULL,
    last_at timestamptz NOT NULL,
    CONSTRAINT rate_skips_pkey PRIMARY KEY (job_id),
    CONSTRAINT rate_skips_positive CHECK (skips >= 1)
);
CREATE INDEX rate_skips_of_resource ON rate_skips (resource);
"""

# A lease says that it was granted when its transaction began, so that is when its token is taken, whenever its turn at
# the bucket comes. Who comes after somebody that began later may not have what has come in since it began itself: with
# that, no span of s seconds holds more than burst + rate x s grants.
DRAW = """
CREATE FUNCTION draw(wanted_names text[], wanted_jobs integer[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    found_names text[];
    changed integer;
BEGIN
    SELECT array_agg(b.name) INTO found_names FROM (
        SELECT r.name FROM rate_buckets r WHERE r.name = ANY (wanted_names)
        ORDER BY r.name COLLATE "C" FOR NO KEY UPDATE) b;
    UPDATE rate_buckets b SET
        tokens = least(b.burst, b.tokens + b.rate * greatest(extract(epoch FROM now() - b.refilled_at), 0)) - w.jobs,
        refilled_at = greatest(b.refilled_at, now())
        FROM unnest(wanted_names, wanted_jobs) AS w (name, jobs)
        WHERE b.name = w.name AND b.name = ANY (found_names)
            AND least(b.burst, b.tokens + b.rate * extract(epoch FROM now() - b.refilled_at)) >= w.jobs;
    GET DIAGNOSTICS changed = ROW_COUNT;
    IF changed < cardinality(found_names) THEN
        RAISE EXCEPTION 'a rate was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
"""

# The rows are locked by whoever has just taken of them.
CAPS = """
CREATE FUNCTION keep_caps(wanted_names text[], wanted_caps numeric[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM unnest(wanted_names, wanted_caps) AS w (name, cap)
        JOIN counters c ON c.name = w.name AND c.used > w.cap;
    IF FOUND THEN
        RAISE EXCEPTION 'a cap was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
"""

# What the scheduler has to do, in one row: jobs that ask for more than a place, ready and running.
STATS = """
CREATE VIEW scheduler_stats AS
SELECT coalesce(q.jobs, 0)::bigint AS queued, coalesce(c.used, 0)::bigint AS active, c.most::bigint AS max_concurrent,
    (SELECT coalesce(jsonb_object_agg(split_part(name, ':', 2), used::bigint), '{}')
     FROM counters WHERE name LIKE 'graph:%' AND used > 0) AS per_graph_running,
    coalesce(q.graphs, '{}') AS per_graph_queued
FROM (SELECT) one
LEFT JOIN counters c ON c.name = 'pool:jobs'
LEFT JOIN LATERAL (
    SELECT sum(w.jobs) AS jobs, jsonb_object_agg(w.graph, w.jobs) FILTER (WHERE w.graph IS NOT NULL) AS graphs
    FROM (SELECT g.terms->>'graph' AS graph, sum(j.jobs)::bigint AS jobs
          FROM (SELECT gating, count(*) AS jobs FROM jobs
                WHERE state = 'queued' AND schedule_after IS NULL AND gating IS NOT NULL GROUP BY gating) j
          JOIN gatings g ON g.id = j.gating GROUP BY 1) w) q ON true;
"""


def upgrade() -> None:
    for part in (TABLES, DRAW, CAPS, STATS):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("rates and advice would be lost; restore a backup instead")
