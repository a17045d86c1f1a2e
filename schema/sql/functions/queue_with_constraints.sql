-- Return the id of the queue that differs from `other` by its constraint set only; null is none.
CREATE OR REPLACE FUNCTION queue_with_constraints(other integer, new_constraint_set integer) RETURNS integer
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT intern_queue(q.cohort, q.instance, q.platform, q.units, new_constraint_set, q.preferred, q.required)
        FROM queues q WHERE q.id = other);
END $$;
