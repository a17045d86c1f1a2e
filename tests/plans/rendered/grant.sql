WITH wanted AS MATERIALIZED (
    SELECT w.job_id, w.bot_id, w.actor, w.decision, w.taking, w.nth, j.ctid AS place, j.units, j.cohort, j.instance,
        i.pool, j.platform, j.fence AS last_fence, i.name AS instance_name
    FROM unnest(CAST(:job_ids AS bigint[]), CAST(:bot_ids AS bigint[]), CAST(:actors AS text[]),
                CAST(string_to_array(:decisions, chr(30)) AS jsonb[]), CAST(:taking AS integer[]))
        WITH ORDINALITY AS w (job_id, bot_id, actor, decision, taking, nth)
    CROSS JOIN LATERAL (
        SELECT ctid, units, cohort, instance, platform, fence FROM jobs
        WHERE id = w.job_id AND jobs.state = 'queued' AND (NOT EXISTS (SELECT FROM pauses WHERE kind IN ('label', 'task')) OR (pause_of(jobs.id, jobs.label, jobs.instance)).kind IS NULL) OFFSET 0) j
    JOIN instances i ON i.id = j.instance AND NOT i.draining
), room AS MATERIALIZED (
    SELECT b.id, b.epoch, b.cohort, b.instance, b.pool, b.kind,
        coalesce(r.unused, b.capacity - b.in_use) AS free, coalesce(r.kept, b.kept_units) AS kept, b.kept_for,
        b.probation_until IS NULL AS trusted, b.ctid
    FROM unnest(CAST(:rooms AS bigint[]), CAST(:unused AS integer[]), CAST(:kept AS integer[])) AS r (id, unused, kept)
    CROSS JOIN LATERAL (SELECT ctid FROM bots WHERE true AND id >= r.id AND id <= r.id ORDER BY id DESC LIMIT 1 ) seen
    JOIN LATERAL (
        SELECT *, ctid FROM bots WHERE ctid = seen.ctid AND status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 FOR NO KEY UPDATE SKIP LOCKED) b
        ON b.ctid = seen.ctid
    WHERE b.probation_until IS NULL OR coalesce(r.unused, b.capacity - b.in_use) = b.capacity
), filled AS MATERIALIZED (
    SELECT w.*, r.epoch, r.free, r.kept, r.trusted, sum(w.units) OVER upto AS upto, own.units AS own_units,
        sum(own.units) OVER upto AS own_upto
    FROM wanted w JOIN room r ON r.id = w.bot_id AND r.cohort = w.cohort
        AND (r.instance IS NULL AND r.pool IS NULL OR r.instance = w.instance OR r.pool = w.pool) AND EXISTS (SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= (w.platform, r.kind) AND (o.platform, o.kind) <= (w.platform, r.kind) OFFSET 0)
    CROSS JOIN LATERAL (
        SELECT CASE WHEN CAST(:on_kept AS boolean) AND r.kept_for = w.instance AND r.kept <= r.free
            THEN w.units ELSE 0 END) own (units)
    WINDOW upto AS (PARTITION BY w.bot_id ORDER BY w.nth)
), seated AS MATERIALIZED (
    SELECT f.*, greatest(least(f.own_units, f.kept + f.own_units - f.own_upto), 0) AS taken_of_kept FROM filled f
    WHERE f.upto + greatest(f.kept - f.own_upto, 0) <= f.free AND (f.trusted OR f.upto = f.units)
), limited AS MATERIALIZED (
    SELECT d.cohort, d.instance FROM (SELECT DISTINCT cohort, instance FROM seated) d
    CROSS JOIN LATERAL (SELECT usage FROM quotas WHERE cohort = d.cohort AND instance >= d.instance AND instance <= d.instance ORDER BY instance DESC LIMIT 1 ) q ORDER BY d.cohort, d.instance
), allowed AS MATERIALIZED (
    SELECT d.cohort, d.instance, q.min_quota, q.max_quota, q.usage FROM limited d
    LEFT JOIN LATERAL (SELECT min_quota, max_quota, usage FROM quotas WHERE cohort = d.cohort AND instance >= d.instance AND instance <= d.instance ORDER BY instance DESC LIMIT 1 FOR NO KEY UPDATE ) q ON true
), left_over AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.usage IS NULL AS busy, CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - CASE WHEN q.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN q.evicted ELSE 0 END) END - q.usage AS headroom
    FROM (
        SELECT array_agg(cohort) AS cohorts, array_agg(instance) AS instances, array_agg(min_quota) AS minima,
            array_agg(max_quota) AS maxima, array_agg(usage) AS usages
        FROM allowed HAVING count(*) > 0) a
    CROSS JOIN LATERAL ROWS FROM (
        unnest(a.cohorts, a.instances, a.minima, a.maxima, a.usages),
        recent_evictions(a.cohorts, a.instances, :cooldown)
    ) AS q (cohort, instance, min_quota, max_quota, usage, evicted)
), weighed AS MATERIALIZED (
    SELECT cohort, instance, nth, place, bot_id, epoch, actor, decision, taking, units, taken_of_kept,
        last_fence, instance_name, CAST(NULL AS boolean) AS busy, CAST(NULL AS bigint) AS headroom FROM seated
    UNION ALL
    SELECT cohort, instance, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, busy, headroom
    FROM left_over
), within AS MATERIALIZED (
    SELECT w.*, CASE WHEN bool_or(busy) OVER quota IS NULL THEN true WHEN bool_or(busy) OVER quota THEN false
        WHEN max(headroom) OVER quota IS NULL THEN true
        ELSE sum(units) OVER upto <= max(headroom) OVER quota END AS fits
    FROM weighed w
    WINDOW quota AS (PARTITION BY cohort, instance), upto AS (PARTITION BY cohort, instance ORDER BY nth)
), moved AS (
    UPDATE jobs j SET state = 'leased',
        fence = greatest(j.fence + 1, (SELECT fences_from + first_fence() FROM server_identity)),
        attempts = j.attempts + 1, schedule_after = NULL, reason = NULL
    FROM within f
    WHERE j.ctid = f.place AND f.fits AND j.state = 'queued'
    RETURNING j.id, j.public_id, j.cohort, j.instance, j.fence, j.units, f.bot_id, f.epoch, f.actor,
        f.decision, f.taking, f.taken_of_kept, f.nth, j.attempts, j.timeout_seconds, f.last_fence, f.instance_name
), taken AS (
    UPDATE bots b SET in_use = b.in_use + s.units, kept_units = b.kept_units - s.kept, held = b.held + s.leases
    FROM (SELECT r.ctid, sum(m.units) AS units, sum(m.taken_of_kept) AS kept, count(*) AS leases
          FROM moved m JOIN room r ON r.id = m.bot_id GROUP BY r.ctid) s
    WHERE b.ctid = s.ctid
), leased AS (
    INSERT INTO leases (job_id, fence, bot_id, bot_epoch, cohort, instance, units, assigner, strategy, due_at,
                        delivered_at, taken, granted_event, decision, policy)
    SELECT id, fence, bot_id, epoch, cohort, instance, units, actor,
        :strategy, now() + make_interval(secs => :ack), CASE WHEN NOT :tell THEN clock_timestamp() END,
        CAST(:takings AS jsonb) -> taking, nextval('stored_events_id_seq'), decision, CAST(:policy AS integer)
    FROM moved ORDER BY nth
), counted AS (
    UPDATE quotas q SET usage = q.usage + s.units
    FROM (SELECT cohort, instance, sum(units) AS units FROM moved GROUP BY cohort, instance) s
    WHERE q.cohort = s.cohort AND q.instance = s.instance
), told AS (
    SELECT wake('bots', string_agg(DISTINCT bot_id::text, ',')) FROM moved WHERE :tell HAVING count(*) > 0
)
SELECT id, public_id::text, bot_id, fence, units, instance, (SELECT count(*) FROM told) FROM moved
