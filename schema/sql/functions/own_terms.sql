-- Return the terms of a request that it does not share with other jobs.
CREATE OR REPLACE FUNCTION own_terms(request jsonb, OUT estimate numeric, OUT seconds double precision,
    OUT deadline timestamptz, OUT own jsonb)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    estimate := coalesce((request->>'estimated_cost')::numeric, 1);
    seconds := (request->>'estimated_seconds')::double precision;
    deadline := now() + make_interval(secs => (request->>'deadline_seconds')::double precision);
    own := request->'own';
END $$;
