-- Return whether a request has one of the keys that `own_constraints` reads. Without one, its job has no row of
-- `job_constraints`, unless it is a node of a graph.
CREATE OR REPLACE FUNCTION has_own_constraints(request jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN request ?| '{estimated_cost,estimated_seconds,deadline_seconds,own}'::text[];
