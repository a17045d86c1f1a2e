-- Return the id of the instance with that name. Makes its row if there is none.
--
-- Raises LH007, with the name as its detail, where only operators make instances. `default` is always made.
CREATE OR REPLACE FUNCTION intern_instance(wanted text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE found integer;
BEGIN
    SELECT id INTO found FROM instances WHERE name = wanted;
    IF found IS NULL THEN
        IF wanted <> 'default' AND EXISTS (SELECT FROM tenancy_policy WHERE create_instances = 'never') THEN
            RAISE EXCEPTION 'there is no instance ''%'', and only operators make one', wanted
                USING ERRCODE = 'LH007', DETAIL = wanted;
        END IF;
        INSERT INTO instances (name) VALUES (wanted) ON CONFLICT (name) DO NOTHING;
        SELECT id INTO found FROM instances WHERE name = wanted;
    END IF;
    RETURN found;
END $$;
