-- Refuse every change of the state, fence or result of a job that has ended.
CREATE OR REPLACE FUNCTION refuse_leaving_final() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'job % is % and stays so', OLD.id, OLD.state USING ERRCODE = 'check_violation';
END $$;

CREATE OR REPLACE TRIGGER jobs_final_stays_final BEFORE UPDATE ON jobs FOR EACH ROW
    WHEN (OLD.state IN ('succeeded', 'failed', 'cancelled', 'dead') AND
          (NEW.state, NEW.fence, NEW.result_fence) IS DISTINCT FROM (OLD.state, OLD.fence, OLD.result_fence))
    EXECUTE FUNCTION refuse_leaving_final();
