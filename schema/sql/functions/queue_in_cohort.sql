-- Return the id of the queue in `new_cohort` that is otherwise like `other`: `other` itself if that is its cohort. Makes
-- its row if there is none.
CREATE OR REPLACE FUNCTION queue_in_cohort(other integer, new_cohort integer) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT CASE WHEN q.cohort = new_cohort THEN other
            ELSE intern_queue(new_cohort, q.instance, q.platform, q.units, q.constraint_set, q.preferred, q.required) END
        FROM queues q WHERE q.id = other);
END $$;
