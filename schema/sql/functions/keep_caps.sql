-- Fail with `serialization_failure` if a counter exceeds a cap.
--
-- The caller has just charged these counters and so holds their row locks.
CREATE OR REPLACE FUNCTION keep_caps(wanted_names text[], wanted_caps numeric[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM unnest(wanted_names, wanted_caps) AS w (name, cap)
        JOIN counters c ON c.name = w.name AND c.used > w.cap;
    IF FOUND THEN
        RAISE EXCEPTION 'a cap was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
