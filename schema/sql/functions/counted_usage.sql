-- Return what of a report counts: each amount up to the ceiling of its unit. Units without a ceiling count in full.
CREATE OR REPLACE FUNCTION counted_usage(reported jsonb, ceilings jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(r.unit,
        CASE WHEN r.amount::numeric > (ceilings->r.unit)::numeric THEN ceilings->r.unit ELSE r.amount END), '{}')
    FROM jsonb_each(reported) AS r (unit, amount)
$$;
