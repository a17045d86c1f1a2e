-- Return the requests if all of them are flat, so that their fields have been checked when they are stored. Refuse them
-- if one has no command at its top, or is in the form in which requests are stored, which nothing checks.
CREATE OR REPLACE FUNCTION only_flat(requests jsonb) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    refused text;
BEGIN
    IF jsonb_typeof(requests) <> 'array' THEN
        RAISE EXCEPTION 'jobs: input should be a valid list' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT format('jobs.%s%s', r.ordinality - 1, CASE
            WHEN jsonb_typeof(r.value) <> 'object' THEN ': input should be an object'
            WHEN r.value ? 'payload' THEN '.payload: there is no such field'
            ELSE '.command: field required' END)
        INTO refused FROM jsonb_array_elements(requests) WITH ORDINALITY r
        WHERE jsonb_typeof(r.value) <> 'object' OR r.value ? 'payload' OR NOT r.value ? 'command' LIMIT 1;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION '%', refused USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN requests;
END $$;
