-- Return the name of the urgency level of an effective priority; a lower priority is more urgent.
CREATE OR REPLACE FUNCTION level_of(effective double precision) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN effective <= critical THEN 'critical' WHEN effective <= high THEN 'high'
        WHEN effective <= normal THEN 'normal' ELSE 'low' END FROM scheduling
$$;
