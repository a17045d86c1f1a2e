-- Give a job that has points its priority and, unless it has one, the timeout of its service level.
--
-- A trigger, so that only jobs that have points pay for the second update of their row.
CREATE OR REPLACE FUNCTION apply_points() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE jobs j SET priority = coalesce(NEW.price, j.priority), rank = coalesce(NEW.price, j.rank),
        timeout_seconds = coalesce(j.timeout_seconds,
        (SELECT l.timeout_seconds FROM service_levels l WHERE l.name = NEW.priority_inputs->>'level'))
    WHERE j.id = NEW.job_id;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER job_constraints_apply_points AFTER INSERT ON job_constraints FOR EACH ROW
    WHEN (NEW.price IS NOT NULL OR NEW.priority_inputs ? 'level') EXECUTE FUNCTION apply_points();
