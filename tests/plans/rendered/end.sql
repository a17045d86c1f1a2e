WITH told AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:job_ids AS bigint[]), CAST(:fences AS bigint[]), CAST(:bot_ids AS bigint[]),
                         CAST(:epochs AS bigint[]), CAST(:verdicts AS text[]), CAST(:actors AS text[]),
                         CAST(string_to_array(:details, chr(30)) AS jsonb[]), CAST(:results AS text[]))
        AS t (job_id, fence, bot_id, bot_epoch, verdict, actor, details, result)
), attempts AS MATERIALIZED (
    SELECT j.id, j.fence, j.state, j.attempts, j.max_attempts, j.kills, j.retry_failed,
        t.bot_id, t.bot_epoch, t.verdict, t.actor, t.details, t.result,
        CASE WHEN t.verdict = 'released' AND t.details ? 'again' THEN (
            SELECT count(*) FROM leases l WHERE l.job_id = j.id AND l.report ? 'again') END AS agains,
        CASE WHEN t.verdict = 'lost' THEN coalesce((
        SELECT CASE WHEN jsonb_typeof(payload->'max_lost') = 'number'
            THEN CAST(least(100, greatest(1, CAST(payload->>'max_lost' AS numeric))) AS integer) END
        FROM job_payloads WHERE job_id = j.id), 3) END AS max_lost
    FROM jobs j JOIN told t ON t.job_id = j.id AND t.fence = j.fence
    WHERE j.state IN ('leased', 'running', 'cancelling')
    ORDER BY j.id FOR NO KEY UPDATE OF j
), ended AS (
    UPDATE leases l SET ended_at = clock_timestamp(), due_at = NULL,
        state = CASE WHEN a.verdict IN ('succeeded', 'failed') THEN 'completed' ELSE 'cancelled' END,
        ended_event = nextval('stored_events_id_seq'), ended_by = a.actor, ended_from = a.state,
        ended_to = CASE
            WHEN a.verdict = 'succeeded' THEN 'succeeded'
            WHEN a.verdict = 'failed' AND a.retry_failed AND a.attempts < a.max_attempts AND a.state <> 'cancelling'
                AND coalesce(a.details->>'final', '') <> 'true' THEN 'queued'
            WHEN a.verdict = 'failed' THEN 'failed'
            WHEN a.state = 'cancelling' THEN 'cancelled'
            WHEN l.stop_reason IN ('timeout', 'ceiling') THEN 'dead'
            WHEN a.agains >= 1000 THEN 'dead'
            WHEN a.verdict IN ('stopped', 'released') OR a.verdict = 'lost' AND NOT (coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL) THEN 'queued'
            WHEN a.verdict = 'lost' AND coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL AND a.kills + 1 >= a.max_lost THEN 'dead'
            WHEN a.attempts >= a.max_attempts THEN 'dead'
            ELSE 'queued' END, verdict = a.verdict, report = nullif(a.details, '{}')
    FROM attempts a
    WHERE l.job_id = a.id AND l.fence = a.fence AND l.bot_id = a.bot_id AND l.bot_epoch = a.bot_epoch AND l.ended_at IS NULL
    RETURNING a.id, a.fence, a.bot_id, a.verdict, a.details, a.result, a.kills, a.max_lost, a.agains, l.cohort,
        l.instance, l.units, l.stop_reason, l.granted_at, l.ended_to AS to_state, a.verdict IN ('stopped', 'released') OR a.verdict = 'lost' AND NOT (coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL) AS uncharged,
        a.verdict = 'lost' AND coalesce(l.acknowledged_at, l.delivered_at) IS NOT NULL AS killed,
        a.verdict IN ('stopped', 'released') AND l.stop_reason = 'preempt' AND l.ended_to = 'queued' AS evicted
), moved AS (
    UPDATE jobs j SET
        state = e.to_state,
        fence = CASE WHEN e.to_state IN ('succeeded', 'failed') THEN j.fence ELSE j.fence + 1 END,
        result_fence = CASE WHEN e.to_state IN ('succeeded', 'failed') THEN j.fence END,
        attempts = CASE WHEN e.uncharged AND e.to_state = 'queued' THEN j.attempts - 1 ELSE j.attempts END,
        evictions = j.evictions + CASE WHEN e.evicted THEN 1 ELSE 0 END,
        cohort = CASE WHEN e.to_state = 'queued' THEN cohort_of(j.label) ELSE j.cohort END,
        queue = CASE WHEN e.to_state = 'queued' THEN queue_in_cohort(j.queue, cohort_of(j.label)) ELSE j.queue END,
        kills = CASE WHEN e.killed THEN least(j.kills + 1, e.max_lost) ELSE j.kills END,
        finished_at = CASE WHEN e.to_state <> 'queued' THEN clock_timestamp() END,
        started_at = CASE WHEN e.to_state IN ('succeeded', 'failed') THEN coalesce(j.started_at, e.granted_at)
            WHEN e.to_state <> 'queued' THEN j.started_at END,
        queued_at = CASE WHEN e.to_state = 'queued' AND e.agains IS NOT NULL THEN now() + make_interval(secs => CAST(e.details->>'again' AS double precision)) ELSE j.queued_at END,
        schedule_after = CASE WHEN e.to_state = 'queued' AND e.verdict IN ('failed', 'error')
            THEN now() + make_interval(secs => coalesce(CAST(e.details->>'retry_in' AS double precision),
                least(:retry_cap, :retry_base * 2.0 ^ (j.attempts - 1))))
            WHEN e.to_state = 'queued' AND e.agains IS NOT NULL THEN now() + make_interval(secs => CAST(e.details->>'again' AS double precision))
            WHEN e.to_state = 'queued' AND e.killed THEN (
                SELECT b.until FROM unnest(CAST(:held_bots AS bigint[]), CAST(:held_until AS timestamptz[]))
                    AS b (bot_id, until)
                WHERE b.bot_id = e.bot_id AND b.until > now()) END,
        queue_deadline = CASE WHEN NOT (e.killed OR e.verdict = 'failed' OR e.agains IS NOT NULL)
            THEN j.queue_deadline END,
        reason = CASE WHEN e.to_state = 'succeeded' THEN NULL
            WHEN e.to_state = 'dead' AND e.stop_reason = 'timeout' THEN 'ran longer than its timeout'
            WHEN e.to_state = 'dead' AND e.stop_reason = 'ceiling' THEN 'ran longer than the ceiling of its timeout'
            WHEN e.to_state = 'dead' AND e.killed AND e.kills + 1 >= e.max_lost THEN 'its bot was lost '
                || CASE e.max_lost WHEN 1 THEN 'once' WHEN 2 THEN 'twice' WHEN 3 THEN 'three times'
                    ELSE e.max_lost || ' times' END
            WHEN e.to_state = 'dead' AND e.agains >= 1000 THEN 'asked 1000 times to be run again'
            WHEN e.to_state = 'dead' THEN 'every attempt ended without a result'
            ELSE e.details->>'reason' END
    FROM ended e WHERE j.id = e.id
    RETURNING j.id, j.public_id, j.instance, j.state, j.locality_hint, e.units, j.fence, e.verdict, e.bot_id,
        e.evicted, e.fence AS ended_fence, e.cohort, j.constrained AS gated
), logged AS (
    INSERT INTO evictions (cohort, instance, job_id, fence, bot_id, preemptor, preemptor_instance, rule, details)
    SELECT e.cohort, e.instance, m.id, m.ended_fence, m.bot_id, p.id, p.instance, asked.details->>'rule', asked.details
    FROM moved m JOIN ended e ON e.id = m.id
    CROSS JOIN LATERAL (
        SELECT details FROM stored_events
        WHERE job_id = m.id AND move = 'preempted' AND fence = m.ended_fence ORDER BY id DESC LIMIT 1) asked
    JOIN jobs p ON p.public_id = CAST(asked.details->'preemptor'->>'job' AS uuid)
    WHERE m.evicted
), stored AS (
    INSERT INTO job_results (job_id, fence, result)
    SELECT id, fence, CAST(result AS json) FROM ended WHERE to_state <> 'queued' AND result IS NOT NULL
), freed AS (
    UPDATE bots b SET in_use = b.in_use - s.units, held = b.held - s.leases
    FROM (SELECT bot_id, sum(units) AS units, count(*) AS leases FROM ended GROUP BY bot_id) s
    WHERE b.id = s.bot_id
), room AS MATERIALIZED (
    SELECT CASE WHEN bool_or(q.min_quota > 0) THEN 0 ELSE min((CASE WHEN q.max_quota IS NOT NULL THEN greatest(q.min_quota, q.max_quota - (
        SELECT CASE WHEN e.evicted > 0 AND (CAST(:literal AS boolean) OR is_contended(q.cohort, q.instance, :cooldown))
        THEN e.evicted ELSE 0 END FROM (
            SELECT count(*) AS evicted FROM evictions e WHERE e.cohort = q.cohort AND e.instance = q.instance
                AND e.at > now() - make_interval(secs => :cooldown) OFFSET 0) e)) END) - q.usage - s.stopped) END AS units
    FROM (SELECT cohort, instance, count(*) FILTER (WHERE stop_reason = 'preempt') AS stopped
          FROM ended GROUP BY cohort, instance) s
    CROSS JOIN LATERAL (SELECT * FROM quotas WHERE cohort = s.cohort AND instance >= s.instance AND instance <= s.instance ORDER BY instance DESC LIMIT 1 ) q
), woken AS (
    SELECT wake('done', string_agg(public_id::text, ',')) FROM moved WHERE state <> 'queued' HAVING count(*) > 0
)
SELECT id, public_id::text AS public_id, bot_id, instance, verdict, state, fence, units, locality_hint, ended_fence,
    cohort, gated, (SELECT units FROM room) AS room, (SELECT count(*) FROM woken), (SELECT true FROM graphs WHERE finished_at IS NULL ORDER BY id DESC LIMIT 1) AS graphs,
    (SELECT EXISTS (SELECT FROM success_policy)) AS credited
FROM moved ORDER BY id
