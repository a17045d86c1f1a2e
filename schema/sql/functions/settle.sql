-- Return what ended leases took of counters, and add what they really used.
--
-- The cost of an attempt is what its command reported in the unit of its instance. A command cannot lower the seconds
-- that its bot has measured. Usage in other units is kept for reports and counts against no limit. Where the instance
-- has ceilings of reports, only what is within them counts, and an event of the job says what was cut.
CREATE OR REPLACE FUNCTION settle(spent jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    sum_names text[];
    sum_taken numeric[];
    sum_used numeric[];
    sum_jobs integer[];
    told_names text[];
    told_amounts numeric[];
    told_jobs integer[];
    cuts jsonb;
BEGIN
    WITH gone AS MATERIALIZED (
        SELECT t.job_id, l.taken, t.final, t.seconds, t.usage
        FROM jsonb_to_recordset(spent) AS t (job_id bigint, fence bigint, final boolean, seconds numeric, usage jsonb)
        CROSS JOIN LATERAL (
            SELECT taken FROM leases WHERE job_id = t.job_id AND fence = t.fence AND taken IS NOT NULL OFFSET 0) l
    ), known AS MATERIALIZED (
        SELECT g.job_id, g.taken, g.final, g.usage AS reported, i.report_ceilings, c.usage, i.name AS instance,
            round(greatest((c.usage->>coalesce(a.unit, 'cost'))::numeric,
                CASE WHEN a.unit = 'seconds' THEN g.seconds END), 6) AS cost
        FROM gone g
        CROSS JOIN LATERAL (SELECT instance FROM jobs WHERE id = g.job_id OFFSET 0) j
        JOIN instances i ON i.id = j.instance
        LEFT JOIN accounts a ON a.instance = j.instance
        CROSS JOIN LATERAL (SELECT CASE WHEN i.report_ceilings IS NULL THEN g.usage
            ELSE counted_usage(g.usage, i.report_ceilings) END AS usage) c
    ), each AS (
        SELECT t.name, t.amount, k.final,
            CASE WHEN t.name LIKE '%:cost' THEN coalesce(k.cost, CASE WHEN k.final THEN t.amount ELSE 0 END)
                ELSE 0 END AS used
        FROM known k CROSS JOIN LATERAL (
            SELECT key AS name, value::numeric AS amount FROM jsonb_each_text(k.taken)) t
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
    SELECT s.names, s.taken, s.used, s.jobs, t.names, t.amounts, t.jobs, (
            SELECT jsonb_agg(jsonb_build_object('job', k.job_id, 'unit', r.unit, 'reported', r.amount,
                'counted', k.usage->r.unit))
            FROM known k CROSS JOIN LATERAL jsonb_each(k.reported) AS r (unit, amount)
            WHERE k.report_ceilings IS NOT NULL AND r.amount <> k.usage->r.unit)
        INTO sum_names, sum_taken, sum_used, sum_jobs, told_names, told_amounts, told_jobs, cuts
        FROM summed s CROSS JOIN told t;
    IF sum_names IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM counters c WHERE c.name = ANY (sum_names) ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE;
    UPDATE counters c SET used = c.used - w.taken + w.used
        FROM unnest(sum_names, sum_taken, sum_used) AS w (name, taken, used) WHERE c.name = w.name;
    INSERT INTO usage AS u (name, bucket, amount, jobs)
        SELECT w.name, date_trunc('minute', clock_timestamp()), w.used, w.jobs FROM (
            SELECT * FROM unnest(sum_names, sum_used, sum_jobs) AS s (name, used, jobs) WHERE s.name LIKE '%:cost'
            UNION ALL SELECT * FROM unnest(told_names, told_amounts, told_jobs)) AS w (name, used, jobs)
        ORDER BY w.name COLLATE "C"
        ON CONFLICT (name, bucket) DO UPDATE SET amount = u.amount + excluded.amount, jobs = u.jobs + excluded.jobs;
    IF cuts IS NOT NULL THEN
        INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
            SELECT j.id, 'cut_report', j.state, j.state, j.fence, 'settle', c - 'job'
            FROM jsonb_array_elements(cuts) c
            CROSS JOIN LATERAL (SELECT id, state, fence FROM jobs WHERE id = (c->>'job')::bigint OFFSET 0) j
            ORDER BY j.id, c->>'unit' COLLATE "C";
    END IF;
END $$;
