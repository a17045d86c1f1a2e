-- Return the ids of the requirement sets of a job that prefers some properties: of what it requires and prefers together,
-- and of what it requires. Makes their rows if there are none. `preferring` is null if it prefers nothing that it does not
-- require, and `platform` is then its requirement set.
CREATE OR REPLACE FUNCTION intern_preferred(required jsonb, preferred jsonb, OUT preferring integer, OUT platform integer)
LANGUAGE plpgsql AS $$
DECLARE
    least jsonb := normal_properties(required);
    most jsonb := least || normal_properties(coalesce((
        SELECT jsonb_object_agg(p.key, coalesce(least->p.key, '[]') || p.value)
        FROM jsonb_each(normal_properties(nullif(preferred, 'null'))) p), '{}'));
BEGIN
    IF most <> least THEN
        preferring := intern_platform(most);
    END IF;
    platform := intern_platform(least, preferring);
END $$;
