"""Success: how often the work of each bot succeeded, by label, whose fault a failure was, and probation."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Its one row says that successes are counted, and how; without it nothing is.
POLICY = """
CREATE TABLE success_policy (
    one boolean NOT NULL DEFAULT true,
    memory double precision NOT NULL,
    probation_failures integer NOT NULL,
    probation_seconds double precision NOT NULL,
    PRIMARY KEY (one),
    CONSTRAINT success_policy_one_row CHECK (one),
    CONSTRAINT success_policy_memory_range CHECK (memory >= 1 AND memory <= 1000000),
    CONSTRAINT success_policy_failures_positive CHECK (probation_failures >= 0),
    CONSTRAINT success_policy_probation_finite CHECK (probation_seconds >= 0 AND probation_seconds <= 31536000)
);
"""

# One row for each bot and label it worked on lately, changed with each attempt that it finishes.
COUNTS = """
CREATE TABLE bot_success (
    bot_id bigint NOT NULL,
    label text NOT NULL,
    successes double precision NOT NULL DEFAULT 0,
    failures double precision NOT NULL DEFAULT 0,
    returned double precision NOT NULL DEFAULT 0,
    finished double precision NOT NULL DEFAULT 0,
    seconds double precision NOT NULL DEFAULT 0,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (bot_id, label),
    CONSTRAINT bot_success_counts_positive CHECK (successes >= 0 AND failures >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
"""

# Which bot a job that is to be tried again was charged to; none once the job itself is to blame.
BLAMES = """
CREATE TABLE blames (
    job_id bigint NOT NULL PRIMARY KEY,
    bot_id bigint,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    upheld_at timestamptz,
    returned_at timestamptz
);
CREATE INDEX blames_returned ON blames (bot_id) WHERE returned_at IS NOT NULL AND bot_id IS NOT NULL;
CREATE INDEX blames_upheld ON blames (bot_id) WHERE upheld_at IS NOT NULL;
"""

# A bot on probation is free only while it holds nothing.
PROBATION = """
ALTER TABLE bots
    DROP COLUMN free,
    ADD COLUMN probation_until timestamptz,
    ADD COLUMN free boolean GENERATED ALWAYS AS
        (status = 'ok' AND NOT draining AND NOT closing AND in_use + reserved < capacity
         AND (probation_until IS NULL OR in_use = 0)) STORED;
CREATE INDEX bots_free ON bots (cohort, instance, pool, sample_key) WHERE free;
CREATE INDEX bots_probation ON bots (id) WHERE probation_until IS NOT NULL;
"""


# The bots of each cohort at a glance, in units; what nobody can say is null. Gone bots are offline and count nowhere
# else. Concentration is the Herfindahl index of the units in use: 1 over the number of bots if they are even, 1 if one
# bot has them all; `even_concentration` is what it would be if every bot were loaded alike.
SWARM = """
CREATE VIEW swarm_stats AS
SELECT c.id AS cohort_id, c.name AS cohort, count(b.id) AS total,
    count(*) FILTER (WHERE b.status <> 'gone' AND b.in_use = 0) AS idle,
    count(*) FILTER (WHERE b.status <> 'gone' AND b.in_use > 0) AS busy,
    count(*) FILTER (WHERE b.status = 'gone') AS offline,
    coalesce(sum(b.in_use) FILTER (WHERE b.status <> 'gone'), 0)::bigint AS total_in_flight,
    CASE WHEN EXISTS (SELECT FROM success_policy)
        THEN avg(coalesce(s.rate, 1.0)) FILTER (WHERE b.status <> 'gone') END AS avg_success_rate,
    avg(b.in_use::float / b.capacity) FILTER (WHERE b.status <> 'gone' AND b.capacity > 0) AS avg_load,
    sum(b.in_use::float ^ 2) / nullif(sum(b.in_use), 0)::float ^ 2 AS concentration,
    sum(b.capacity::float ^ 2) FILTER (WHERE b.status <> 'gone')
        / nullif(sum(b.capacity) FILTER (WHERE b.status <> 'gone'), 0)::float ^ 2 AS even_concentration,
    count(*) FILTER (WHERE b.probation_until IS NOT NULL AND b.status <> 'gone') AS on_probation
FROM cohorts c
LEFT JOIN bots b ON b.cohort = c.id
LEFT JOIN (
    SELECT bot_id, (sum(successes) + 2) / (sum(successes + failures) + 2) AS rate
    FROM bot_success GROUP BY bot_id) s ON s.bot_id = b.id
GROUP BY c.id, c.name;
"""


def upgrade() -> None:
    for part in (POLICY, COUNTS, BLAMES, PROBATION, SWARM):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("restore a backup instead")
