-- Return the id of a constraint set. Makes its row if there is none.
--
-- The digest covers the canonical text of jsonb, so every spelling of a set gives the same row.
CREATE OR REPLACE FUNCTION intern_constraint_set(wanted jsonb) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    found integer;
    wanted_digest bytea := sha256(convert_to(wanted::text, 'UTF8'));
BEGIN
    SELECT id INTO found FROM constraint_sets WHERE digest = wanted_digest;
    IF found IS NULL THEN
        INSERT INTO constraint_sets (digest, terms) VALUES (wanted_digest, wanted) ON CONFLICT (digest) DO NOTHING;
        SELECT id INTO found FROM constraint_sets WHERE digest = wanted_digest;
    END IF;
    RETURN found;
END $$;
