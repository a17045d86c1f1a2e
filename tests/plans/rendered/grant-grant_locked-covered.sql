-- schema/moves/grant.py: GRANT_LOCKED, covered=true
WITH wanted AS MATERIALIZED (
    SELECT w.job_id, w.bot_id, w.actor, w.decision, w.taking, w.nth, j.ctid AS place, j.units, j.cohort, j.instance,
        i.pool, j.platform, j.fence AS last_fence, i.name AS instance_name
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:bot_ids AS bigint[]), CAST(:actors AS text[]), CAST(string_to_array(:decisions, chr(30)) AS jsonb[]),
                CAST(:taking AS integer[]))
        WITH ORDINALITY AS w (job_id, bot_id, actor, decision, taking, nth)
    CROSS JOIN LATERAL (
        SELECT ctid, units, cohort, instance, platform, fence FROM jobs WHERE id = w.job_id AND jobs.state = 'queued' OFFSET 0) j
    JOIN instances i ON i.id = j.instance AND NOT i.draining
), room AS MATERIALIZED (
    SELECT b.id, b.epoch, b.cohort, b.instance, b.pool, b.kind,
        coalesce(r.unused, b.capacity - b.in_use) AS free, coalesce(r.kept, b.kept_units) AS kept, b.kept_for,
        b.probation_until IS NULL AS trusted, b.ctid
    FROM unnest(CAST(:rooms AS bigint[]), CAST(:unused AS integer[]), CAST(:kept AS integer[])) AS r (id, unused, kept)
    CROSS JOIN LATERAL (SELECT *, ctid FROM bots WHERE true AND id >= r.id AND id <= r.id ORDER BY id DESC LIMIT 1 ) b
    WHERE b.probation_until IS NULL OR coalesce(r.unused, b.capacity - b.in_use) = b.capacity
), filled AS MATERIALIZED (
    SELECT w.*, r.epoch, r.free, r.kept, r.trusted, sum(w.units) OVER upto AS upto, own.units AS own_units,
        sum(own.units) OVER upto AS own_upto
    FROM wanted w JOIN room r ON r.id = w.bot_id AND r.cohort = w.cohort
        AND (r.instance IS NULL AND r.pool IS NULL OR r.instance = w.instance OR r.pool = w.pool)
    CROSS JOIN LATERAL (
        SELECT CASE WHEN false AND r.kept_for = w.instance AND r.kept <= r.free
            THEN w.units ELSE 0 END) own (units)
    WINDOW upto AS (PARTITION BY w.bot_id ORDER BY w.nth)
), seated AS MATERIALIZED (
    SELECT f.*, greatest(least(f.own_units, f.kept + f.own_units - f.own_upto), 0) AS taken_of_kept FROM filled f
    WHERE f.upto + greatest(f.kept - f.own_upto, 0) <= f.free AND (f.trusted OR f.upto = f.units)
), within AS MATERIALIZED (
    SELECT *, true AS fits FROM seated
), moved AS (
    UPDATE jobs j SET state = 'leased', fence = greatest(j.fence + 1, (SELECT first_fence())),
        attempts = j.attempts + 1, schedule_after = NULL, reason = NULL
    FROM within f
    WHERE j.ctid = f.place AND f.fits AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.cohort, j.instance, j.fence, j.units, f.bot_id, f.epoch, f.actor,
        f.decision, f.taking, f.taken_of_kept, f.nth, j.attempts, j.timeout_seconds, f.last_fence, f.instance_name
), leased AS (
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, cohort, instance, units, assigner, strategy, due_at,
                        delivered_at, taken, granted_event, decision)
    SELECT id, fence, bot_id, epoch, cohort, instance, units, actor,
        :strategy, now() + make_interval(secs => :ack), CASE WHEN NOT :tell THEN clock_timestamp() END,
        CAST(:takings AS jsonb) -> taking, nextval('stored_events_id_seq'), decision
    FROM moved ORDER BY nth
)
SELECT id, public_id::text, bot_id, fence, units, instance, instance_name, attempts, timeout_seconds,
    (SELECT payload::text FROM job_payloads WHERE job_id = id) AS payload,
    CASE WHEN last_fence > 0 THEN (SELECT checkpoint::text FROM job_checkpoints WHERE job_id = id) END AS checkpoint FROM moved
