-- Load of the bots of each cohort, in units; null where nothing is known.
--
-- Bots that are gone count as offline and nowhere else. `concentration` is the Herfindahl index of the units in use: 1
-- over the number of bots if they are loaded alike, 1 if one bot has them all. `even_concentration` is its value if
-- every bot were loaded in proportion to its capacity. `avg_latency_ms` is the mean run time of the attempts with a
-- result that are counted for these bots.
CREATE OR REPLACE VIEW swarm_stats AS
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
    count(*) FILTER (WHERE b.probation_until IS NOT NULL AND b.status <> 'gone') AS on_probation,
    CASE WHEN EXISTS (SELECT FROM success_policy)
        THEN 1000 * sum(s.seconds) FILTER (WHERE b.status <> 'gone')
            / nullif(sum(s.finished) FILTER (WHERE b.status <> 'gone'), 0) END AS avg_latency_ms
FROM cohorts c
LEFT JOIN bots b ON b.cohort = c.id
LEFT JOIN (
    SELECT bot_id, (sum(successes) + 2) / (sum(successes + failures) + 2) AS rate, sum(seconds) AS seconds,
        sum(finished) AS finished
    FROM bot_success GROUP BY bot_id) s ON s.bot_id = b.id
GROUP BY c.id, c.name;
