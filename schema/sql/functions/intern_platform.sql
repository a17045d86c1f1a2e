-- Return the id of a set of required properties. Makes its row, and those of the kinds of bots that offer them
-- and are open to it, if there is none.
--
-- `of_preferred`: the set of what is required and preferred together, if the jobs prefer something.
--
-- The digest covers the canonical text of jsonb, so every spelling of a set gives the same row. The transaction may be a
-- caller's and stay open, so it locks nothing that others need. A kind of bots that appears meanwhile cannot be seen here,
-- nor this set there: upkeep links the two once both are committed, and then notes it in `linked`.
CREATE OR REPLACE FUNCTION intern_platform(wanted jsonb, of_preferred integer DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    found integer;
    wanted_digest bytea := sha256(convert_to(wanted::text || coalesce('/' || of_preferred, ''), 'UTF8'));
BEGIN
    SELECT id INTO found FROM platforms WHERE digest = wanted_digest;
    IF found IS NULL THEN
        BEGIN
            INSERT INTO platforms (digest, properties, preferred) VALUES (wanted_digest, wanted, of_preferred)
                ON CONFLICT (digest) DO NOTHING RETURNING id INTO found;
        EXCEPTION WHEN foreign_key_violation THEN
            RAISE EXCEPTION 'the requirement set of what is preferred was deleted meanwhile; submit again'
                USING ERRCODE = 'serialization_failure';
        END;
        IF found IS NULL THEN
            SELECT id INTO found FROM platforms WHERE digest = wanted_digest;
        ELSE
            INSERT INTO kind_platforms (platform, kind)
                SELECT found, k.id FROM kinds k
                WHERE is_open_to(k.properties, k.exclusive, wanted)
                    OR is_open_to(k.properties, k.exclusive, (SELECT properties FROM platforms WHERE id = of_preferred));
        END IF;
    END IF;
    RETURN found;
END $$;
