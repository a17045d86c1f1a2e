-- Return the id of the queue of jobs that need a bot which has imported a task, and are like those of `other` otherwise.
CREATE OR REPLACE FUNCTION queue_with_task(other integer, task text) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT intern_queue(q.cohort, q.instance, platform_with_task(q.platform, task), q.units, q.constraint_set,
            platform_with_task(q.preferred, task), platform_with_task(q.required, task))
        FROM queues q WHERE q.id = other);
END $$;
