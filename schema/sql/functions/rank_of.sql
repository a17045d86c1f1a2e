-- Return the rank of a constrained job: its priority, explicit or from points. Lower is sooner.
--
-- It does not change while time passes, so that an index can hold it.
CREATE OR REPLACE FUNCTION rank_of(request jsonb) RETURNS double precision LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((request->>'priority')::integer, priced(request->'own'), 0);
END $$;
