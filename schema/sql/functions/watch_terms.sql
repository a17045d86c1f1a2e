-- Set when upkeep must look at a waiting job again: it has starved long enough, or its deadline is near.
CREATE OR REPLACE FUNCTION watch_terms() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    expected double precision := coalesce(NEW.seconds,
        (SELECT c.seconds_high FROM job_classes c WHERE c.name = NEW.own->>'class'), 0);
BEGIN
    NEW.price := priced(NEW.own);
    NEW.watch_at := least(NEW.deadline - make_interval(secs => expected / 0.8),
        CASE WHEN NEW.price IS NOT NULL THEN
            now() + make_interval(secs => (SELECT starvation_seconds FROM scheduling)) END);
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER job_terms_watch_terms BEFORE INSERT ON job_terms FOR EACH ROW
    WHEN (NEW.deadline IS NOT NULL OR NEW.own ? 'class' OR NEW.own ? 'level') EXECUTE FUNCTION watch_terms();
