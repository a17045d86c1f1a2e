-- Keep in `submit_checks` which of the tables of limits on submits have rows, so that a submit looks at one table only.
--
-- Those who set limits take turns, so that each sees what the one before it has left.
CREATE OR REPLACE FUNCTION note_submit_check() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    has_rows boolean;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('leasehold.submit_checks'));
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I)', TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO has_rows;
    IF has_rows THEN
        INSERT INTO submit_checks (source) VALUES (TG_TABLE_NAME) ON CONFLICT (source) DO NOTHING;
    ELSE
        DELETE FROM submit_checks WHERE source = TG_TABLE_NAME;
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER queue_limits_note_submit_check AFTER INSERT OR DELETE OR TRUNCATE ON queue_limits
    FOR EACH STATEMENT EXECUTE FUNCTION note_submit_check();
CREATE OR REPLACE TRIGGER ceilings_note_submit_check AFTER INSERT OR DELETE OR TRUNCATE ON ceilings
    FOR EACH STATEMENT EXECUTE FUNCTION note_submit_check();
CREATE OR REPLACE TRIGGER submit_rules_note_submit_check AFTER INSERT OR DELETE OR TRUNCATE ON submit_rules
    FOR EACH STATEMENT EXECUTE FUNCTION note_submit_check();
