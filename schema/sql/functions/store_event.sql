-- Let processes of earlier versions insert into the view `job_events` and delete from it: both change `stored_events`.
-- The trigger of the view is in `views/job_events.sql`.
CREATE OR REPLACE FUNCTION store_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        DELETE FROM stored_events e WHERE e.job_id = OLD.job_id AND e.id = OLD.id;
        RETURN OLD;
    END IF;
    INSERT INTO stored_events (job_id, at, move, from_state, to_state, fence, actor, details)
    VALUES (NEW.job_id, coalesce(NEW.at, clock_timestamp()), NEW.move, NEW.from_state, NEW.to_state, NEW.fence,
        NEW.actor, NEW.details)
    RETURNING id, at INTO NEW.id, NEW.at;
    RETURN NEW;
END $$;
