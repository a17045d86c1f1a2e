-- Return the id of a queue. Makes its row if there is none; without constraints, `of_constraint_set` is null.
--
-- Upkeep marks a queue without ready jobs by `idle_since`, and deletes it when all transactions that were under way
-- then have ended and no job has the queue. This transaction therefore gets its number before it looks the queue up:
-- if it finds the queue unmarked, upkeep waits for its end. At a stricter isolation level the look-up may see an older
-- state, so it locks the row.
CREATE OR REPLACE FUNCTION intern_queue(of_cohort integer, of_instance integer, of_platform integer, of_units integer,
    of_constraint_set integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    found integer;
    this_transaction xid8 := pg_current_xact_id();
BEGIN
    IF of_constraint_set IS NULL THEN
        SELECT q.id INTO found FROM queues q
        WHERE q.cohort = of_cohort AND q.instance = of_instance AND q.platform = of_platform AND q.units = of_units
            AND q.constraint_set IS NULL AND q.idle_since IS NULL;
    ELSE
        SELECT q.id INTO found FROM queues q
        WHERE q.cohort = of_cohort AND q.instance = of_instance AND q.platform = of_platform AND q.units = of_units
            AND q.constraint_set = of_constraint_set AND q.idle_since IS NULL;
    END IF;
    IF found IS NOT NULL THEN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            PERFORM FROM queues q WHERE q.id = found FOR KEY SHARE;
        END IF;
        RETURN found;
    END IF;
    BEGIN
        INSERT INTO queues AS q (cohort, instance, platform, units, constraint_set)
        VALUES (of_cohort, of_instance, of_platform, of_units, of_constraint_set)
        ON CONFLICT (instance, cohort, platform, units, constraint_set) DO UPDATE SET idle_since = NULL
        RETURNING q.id INTO found;
    EXCEPTION WHEN foreign_key_violation THEN
        RAISE EXCEPTION 'the requirement set or the constraint set was deleted meanwhile; submit again'
            USING ERRCODE = 'serialization_failure';
    END;
    RETURN found;
END $$;
