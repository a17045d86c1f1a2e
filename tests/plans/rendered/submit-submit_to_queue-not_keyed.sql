-- schema/moves/submit.py: SUBMIT_TO_QUEUE, keyed=false
WITH new AS MATERIALIZED (
    SELECT nextval('jobs_id_seq') AS id, q.id AS queue, q.instance, q.platform, q.units
    FROM queues q JOIN instances i ON i.id = q.instance AND NOT i.managed
    WHERE q.id = $1::integer AND q.idle_since IS NULL AND NOT EXISTS (SELECT FROM submit_checks)
), job AS (
    INSERT INTO jobs (id, public_id, queue, instance, platform, units, priority, rank, locality_hint,
                      timeout_seconds, max_attempts, retry_failed)
    SELECT n.id, new_public_id(n.id), n.queue, n.instance, n.platform, n.units,
        coalesce($4::integer, 0), coalesce($4::integer, 0), $5, $6::double precision, coalesce($7::integer, 5),
        coalesce($8::boolean, false)
    FROM new n
    RETURNING id, public_id
), payload AS (
    INSERT INTO job_payloads (job_id, payload, submitted_by) SELECT j.id, $2::jsonb, $3 FROM job j
)
SELECT id, public_id, CASE WHEN is_awaited('jobs') THEN wake('jobs') END FROM job
