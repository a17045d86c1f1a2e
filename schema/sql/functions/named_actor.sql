-- Return the name under which a caller of SQL submits. Refuse what is none, and the names of those who have a token and of
-- schedules: histories tell by them who has changed a job.
CREATE OR REPLACE FUNCTION named_actor(actor text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    size integer := coalesce(octet_length(actor), 0);
BEGIN
    IF size NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'actor: is % bytes long, and a name has 1 to 200', size USING ERRCODE = 'invalid_parameter_value';
    ELSIF actor ~ '^(operator|submitter|bot|schedule):' THEN
        RAISE EXCEPTION 'actor: ''%'' is the name of a token''s holder or of a schedule',
            regexp_replace(left(actor, 60), '[^ -~]', '?', 'g') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN actor;
END $$;
