-- Return the constraints of a request that its job does not share with others: its row of `job_constraints`.
-- `has_own_constraints` names the keys that are read here; the other arguments are what `points_of` has found.
--
-- Upkeep looks at the waiting job again at `watch_at`: it has starved long enough, or its deadline is near.
CREATE OR REPLACE FUNCTION own_constraints(request jsonb, of_price integer, usual_seconds double precision,
    starves_at timestamptz)
RETURNS TABLE (estimate numeric, seconds double precision, deadline timestamptz, priority_inputs jsonb, price integer,
    watch_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT coalesce((request->>'estimated_cost')::numeric, 1), g.seconds, g.deadline, request->'own', of_price,
        least(g.deadline - make_interval(secs => coalesce(g.seconds, usual_seconds, 0) / 0.8), starves_at)
    FROM (
        SELECT (request->>'estimated_seconds')::double precision AS seconds,
            now() + make_interval(secs => (request->>'deadline_seconds')::double precision) AS deadline) g
$$;
