-- Return whether a request says anything that `own_constraints` returns, which reads the same keys. A job of any other
-- request has no row of `job_constraints`.
CREATE OR REPLACE FUNCTION has_own_constraints(request jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN request ?| '{estimated_cost,estimated_seconds,deadline_seconds,own}'::text[];
