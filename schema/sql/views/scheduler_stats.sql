-- Constrained jobs, ready and running, in one row.
CREATE OR REPLACE VIEW scheduler_stats AS
SELECT coalesce(q.jobs, 0)::bigint AS queued, coalesce(c.used, 0)::bigint AS active, c.most::bigint AS max_concurrent,
    (SELECT coalesce(jsonb_object_agg(split_part(name, ':', 2), used::bigint), '{}')
     FROM counters WHERE name LIKE 'graph:%' AND used > 0) AS per_graph_running,
    coalesce(q.graphs, '{}') AS per_graph_queued
FROM (SELECT) one
LEFT JOIN counters c ON c.name = 'pool:jobs'
LEFT JOIN LATERAL (
    SELECT sum(w.jobs) AS jobs, jsonb_object_agg(w.graph, w.jobs) FILTER (WHERE w.graph IS NOT NULL) AS graphs
    FROM (SELECT g.terms->>'graph' AS graph, sum(j.jobs)::bigint AS jobs
          FROM queues k JOIN constraint_sets g ON g.id = k.constraint_set
          CROSS JOIN LATERAL (
              SELECT count(*) AS jobs FROM jobs WHERE constrained AND queue = k.id
                  AND state = 'queued' AND schedule_after IS NULL AND units >= 1) j
          WHERE j.jobs > 0 GROUP BY 1) w) q ON true;
