-- Return whether a request says anything that `own_constraints` returns. Most jobs with constraints have no row there.
CREATE OR REPLACE FUNCTION has_own_constraints(request jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN request ?| '{estimated_cost,estimated_seconds,deadline_seconds,own}'::text[];
