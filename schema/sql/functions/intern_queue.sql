-- Return the id of a queue. Makes its row if there is none. Without constraints `of_constraint_set` is null. Without
-- preferred properties `of_preferred` and `of_required` are.
--
-- The look-up compares an array, for which there is one index only, `queues_by_key`. By its columns a queue could be found
-- in five indexes. The planner takes them for equally good while the table is small or its statistics are old, and most
-- of them hold all queues that are alike in one thing.
--
-- Upkeep marks a queue without ready jobs by `idle_since`, and deletes it later if no job has it
-- (`schema/moves/retention.py`). A transaction that finds the queue unmarked needs no lock on its row, because upkeep
-- waits for the end of each that may have read the table before it was marked. One that finds it marked holds the row
-- until its end, together with others that do, and takes the mark away unless somebody else is doing so. At a stricter
-- isolation level the look-up may see an older state, so that it holds the row in any case.
CREATE OR REPLACE FUNCTION intern_queue(of_cohort integer, of_instance integer, of_platform integer, of_units integer,
    of_constraint_set integer, of_preferred integer DEFAULT NULL, of_required integer DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    queue_id integer;
    marked boolean;
BEGIN
    LOOP
        SELECT q.id, q.idle_since IS NOT NULL INTO queue_id, marked FROM queues q
        WHERE ARRAY[q.constraint_set, q.platform, q.instance, q.units, q.cohort, q.preferred, q.required]
            = ARRAY[of_constraint_set, of_platform, of_instance, of_units, of_cohort, of_preferred, of_required];
        IF queue_id IS NOT NULL THEN
            IF NOT marked AND current_setting('transaction_isolation') = 'read committed' THEN
                RETURN queue_id;
            END IF;
            PERFORM FROM queues q WHERE q.id = queue_id FOR KEY SHARE;
            IF FOUND THEN
                UPDATE queues SET idle_since = NULL WHERE id = (
                    SELECT q.id FROM queues q WHERE q.id = queue_id AND q.idle_since IS NOT NULL
                    FOR NO KEY UPDATE SKIP LOCKED);
                RETURN queue_id;
            END IF;
        END IF;
        BEGIN
            INSERT INTO queues AS q (cohort, instance, platform, units, constraint_set, preferred, required)
            VALUES (of_cohort, of_instance, of_platform, of_units, of_constraint_set, of_preferred, of_required)
            ON CONFLICT (instance, cohort, platform, units, constraint_set, preferred, required) DO NOTHING
            RETURNING q.id INTO queue_id;
        EXCEPTION WHEN foreign_key_violation THEN
            RAISE EXCEPTION 'the requirement set or the constraint set was deleted meanwhile; submit again'
                USING ERRCODE = 'serialization_failure';
        END;
        IF queue_id IS NOT NULL THEN
            RETURN queue_id;
        END IF;
    END LOOP;
END $$;
