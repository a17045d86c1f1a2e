-- State and counts of each graph.
--
-- A node that depends on one that can never run can never run either, whatever its edge says. Reads only the nodes of
-- the graphs that are selected.
CREATE OR REPLACE VIEW graph_stats AS
SELECT g.id AS graph, g.public_id, i.name AS instance, g.name, g.nodes, g.edges, g.missing, g.priority, g.actor,
    g.created_at, g.finished_at, c.blocked, f.blocked_forever, c.queued, c.parked, c.active, c.succeeded, c.failed,
    c.cancelled, c.dead,
    CASE WHEN g.state <> 'active' THEN g.state WHEN c.waiting = 0 THEN 'finished'
        WHEN f.blocked_forever = c.waiting THEN 'stalled' ELSE 'active' END AS state
FROM graphs g JOIN instances i ON i.id = g.instance
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE n.outcome IS NULL) AS waiting,
        count(*) FILTER (WHERE j.state = 'blocked') AS blocked,
        count(*) FILTER (WHERE j.state IN ('queued', 'deferred')) AS queued,
        count(*) FILTER (WHERE j.state = 'parked') AS parked,
        count(*) FILTER (WHERE j.state IN ('leased', 'running', 'cancelling')) AS active,
        count(*) FILTER (WHERE n.outcome = 'succeeded') AS succeeded,
        count(*) FILTER (WHERE n.outcome = 'failed') AS failed,
        count(*) FILTER (WHERE n.outcome = 'cancelled') AS cancelled,
        count(*) FILTER (WHERE n.outcome = 'dead') AS dead
    FROM graph_nodes n
    LEFT JOIN LATERAL (SELECT state FROM jobs WHERE id = n.job_id AND n.outcome IS NULL OFFSET 0) j ON true
    WHERE n.graph = g.id) c
CROSS JOIN LATERAL (
    WITH RECURSIVE stuck AS (
        SELECT s.job_id FROM graph_nodes s WHERE s.graph = g.id AND s.dead_ends > 0 AND s.outcome IS NULL
        UNION
        SELECT e.child FROM stuck s
        CROSS JOIN LATERAL (SELECT child FROM graph_edges WHERE parent = s.job_id OFFSET 0) e
        CROSS JOIN LATERAL (SELECT FROM graph_nodes WHERE job_id = e.child AND outcome IS NULL OFFSET 0) n)
    SELECT count(*) AS blocked_forever FROM stuck) f;
