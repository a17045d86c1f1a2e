-- Return the id of the instance with that name. Makes its row if there is none.
CREATE OR REPLACE FUNCTION intern_instance(wanted text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE found integer;
BEGIN
    SELECT id INTO found FROM instances WHERE name = wanted;
    IF found IS NULL THEN
        INSERT INTO instances (name) VALUES (wanted) ON CONFLICT (name) DO NOTHING;
        SELECT id INTO found FROM instances WHERE name = wanted;
    END IF;
    RETURN found;
END $$;
