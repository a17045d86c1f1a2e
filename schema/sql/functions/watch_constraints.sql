-- Set when upkeep must look at a waiting job again: it has starved long enough, or its deadline is near.
CREATE OR REPLACE FUNCTION watch_constraints() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    expected double precision := coalesce(NEW.seconds,
        (SELECT c.seconds_high FROM job_classes c WHERE c.name = NEW.priority_inputs->>'class'), 0);
BEGIN
    NEW.price := priced(NEW.priority_inputs);
    NEW.watch_at := least(NEW.deadline - make_interval(secs => expected / 0.8),
        CASE WHEN NEW.price IS NOT NULL THEN
            now() + make_interval(secs => (SELECT starvation_seconds FROM scheduling)) END);
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER job_constraints_watch_constraints BEFORE INSERT ON job_constraints FOR EACH ROW
    WHEN (NEW.deadline IS NOT NULL OR NEW.priority_inputs ? 'class' OR NEW.priority_inputs ? 'level')
    EXECUTE FUNCTION watch_constraints();
