-- Return the constraints of a request that its job does not share with others: its row of `job_constraints`.
-- `has_own_constraints` names the keys that are read here.
CREATE OR REPLACE FUNCTION own_constraints(request jsonb, OUT estimate numeric, OUT seconds double precision,
    OUT deadline timestamptz, OUT priority_inputs jsonb)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    estimate := coalesce((request->>'estimated_cost')::numeric, 1);
    seconds := (request->>'estimated_seconds')::double precision;
    deadline := now() + make_interval(secs => (request->>'deadline_seconds')::double precision);
    priority_inputs := request->'own';
END $$;
