"""Fairness: instances have shares of the pool, limits of their own, and what their jobs have used is what bots say."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

# An instance that nobody has asked for anything yet is like one that returns: it is not owed the past.
ACCOUNTS = """
CREATE TABLE accounts (
    instance integer NOT NULL,
    credit_weight double precision NOT NULL DEFAULT 1,
    unit text NOT NULL DEFAULT 'cost',
    demand_at timestamptz NOT NULL DEFAULT '-infinity',
    lift double precision NOT NULL DEFAULT 0,
    lifted_at timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT accounts_pkey PRIMARY KEY (instance),
    CONSTRAINT accounts_credit_weight_range CHECK (credit_weight >= 0 AND credit_weight <= 1e6),
    CONSTRAINT accounts_unit_form CHECK (unit ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
    CONSTRAINT accounts_lift_range CHECK (lift >= 0 AND lift < 'infinity')
);
"""

# What all instances have used is found without reading the counters of locks; usage that counts no more goes by age.
INDEXES = """
CREATE INDEX counters_of_instances ON counters (name) WHERE name LIKE 'instance:%';
CREATE INDEX usage_rolled ON usage (bucket) WHERE rolled;
"""

# In the order of their names, as everybody does. Whoever finds that a limit has been reached since it looked begins
# anew, like everybody who has lost a race. A budget may be such that a job
# starts while anything of it is left: the last one may overshoot.
CHARGE = """
CREATE FUNCTION charge(wanted_names text[], wanted_amounts numeric[], may_overshoot boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    sum_names text[];
    sum_amounts numeric[];
    last_amounts numeric[];
    changed integer;
BEGIN
    SELECT array_agg(w.name), array_agg(w.amount), array_agg(w.latest) INTO sum_names, sum_amounts, last_amounts FROM (
        SELECT u.name, sum(u.amount) AS amount, (array_agg(u.amount ORDER BY u.nth DESC))[1] AS latest
        FROM unnest(wanted_names, wanted_amounts) WITH ORDINALITY AS u (name, amount, nth)
        GROUP BY u.name ORDER BY u.name COLLATE "C") w;
    INSERT INTO counters (name, most)
        SELECT w.name, CASE WHEN w.name LIKE 'lock:%' THEN 1 END FROM unnest(sum_names) AS w (name)
        WHERE NOT EXISTS (SELECT FROM counters c WHERE c.name = w.name)
        ORDER BY w.name COLLATE "C" ON CONFLICT (name) DO NOTHING;
    PERFORM FROM counters c WHERE c.name = ANY (sum_names) ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE;
    UPDATE counters c SET used = c.used + w.amount
        FROM unnest(sum_names, sum_amounts, last_amounts) AS w (name, amount, latest)
        WHERE c.name = w.name AND (c.most IS NULL OR c.used + w.amount <= c.most OR w.amount <= 0
            OR may_overshoot AND w.name LIKE '%\\:cost' AND c.used + w.amount - w.latest < c.most);
    GET DIAGNOSTICS changed = ROW_COUNT;
    IF changed < cardinality(sum_names) THEN
        RAISE EXCEPTION 'a limit was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
"""

# What an attempt has cost is what its bot says it used of the unit in which its instance counts. What is said of
# other units is kept for reports and belongs to no counter.
SETTLE = """
CREATE FUNCTION settle(spent jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    sum_names text[];
    sum_taken numeric[];
    sum_used numeric[];
    sum_jobs integer[];
    told_names text[];
    told_amounts numeric[];
    told_jobs integer[];
BEGIN
    WITH gone AS (
        DELETE FROM charges c
        USING jsonb_to_recordset(spent) AS t (job_id bigint, fence bigint, final boolean, seconds numeric, usage jsonb)
        WHERE c.job_id = t.job_id AND c.fence = t.fence
        RETURNING c.job_id, c.names, c.amounts, t.final, t.seconds, t.usage
    ), known AS MATERIALIZED (
        SELECT g.*, i.name AS instance, round(coalesce((g.usage->>coalesce(a.unit, 'cost'))::numeric,
            CASE WHEN a.unit = 'seconds' THEN g.seconds END), 6) AS cost
        FROM gone g JOIN jobs j ON j.id = g.job_id JOIN instances i ON i.id = j.instance
        LEFT JOIN accounts a ON a.instance = j.instance
    ), each AS (
        SELECT t.name, t.amount, k.final,
            CASE WHEN t.name LIKE '%\\:cost' THEN coalesce(k.cost, CASE WHEN k.final THEN t.amount ELSE 0 END)
                ELSE 0 END AS used
        FROM known k CROSS JOIN LATERAL unnest(k.names, k.amounts) AS t (name, amount)
    ), summed AS (
        SELECT array_agg(s.name) AS names, array_agg(s.taken) AS taken, array_agg(s.used) AS used,
            array_agg(s.jobs) AS jobs
        FROM (SELECT name, sum(amount) AS taken, sum(used) AS used, count(*) FILTER (WHERE final)::integer AS jobs
              FROM each GROUP BY name ORDER BY name COLLATE "C") s
    ), told AS (
        SELECT array_agg(s.name) AS names, array_agg(s.amount) AS amounts, array_agg(s.jobs) AS jobs
        FROM (SELECT 'reported:' || k.instance || ':' || u.key AS name, sum(round(u.value::numeric, 6)) AS amount,
                count(*) FILTER (WHERE k.final)::integer AS jobs
              FROM known k CROSS JOIN LATERAL jsonb_each_text(k.usage) AS u (key, value) GROUP BY 1) s
    )
    SELECT s.names, s.taken, s.used, s.jobs, t.names, t.amounts, t.jobs
        INTO sum_names, sum_taken, sum_used, sum_jobs, told_names, told_amounts, told_jobs
        FROM summed s CROSS JOIN told t;
    IF sum_names IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM counters c WHERE c.name = ANY (sum_names) ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE;
    UPDATE counters c SET used = c.used - w.taken + w.used
        FROM unnest(sum_names, sum_taken, sum_used) AS w (name, taken, used) WHERE c.name = w.name;
    INSERT INTO usage AS u (name, bucket, amount, jobs)
        SELECT w.name, date_trunc('minute', clock_timestamp()), w.used, w.jobs FROM (
            SELECT * FROM unnest(sum_names, sum_used, sum_jobs) AS s (name, used, jobs) WHERE s.name LIKE '%\\:cost'
            UNION ALL SELECT * FROM unnest(told_names, told_amounts, told_jobs)) AS w (name, used, jobs)
        ORDER BY w.name COLLATE "C"
        ON CONFLICT (name, bucket) DO UPDATE SET amount = u.amount + excluded.amount, jobs = u.jobs + excluded.jobs;
END $$;
"""


def upgrade() -> None:
    for part in (ACCOUNTS, INDEXES, CHARGE, SETTLE):
        op.execute(part)


def downgrade() -> None:
    raise NotImplementedError("jobs that wait at a gate would be lost; restore a backup instead")
