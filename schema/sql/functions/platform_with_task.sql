-- Return the id of the requirement set that asks for a bot that has imported a task, beside what `other` asks for; null if
-- that is null. Makes its row if there is none.
CREATE OR REPLACE FUNCTION platform_with_task(other integer, task text) RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT intern_platform(p.properties || jsonb_build_object('leasehold.task', jsonb_build_array(task)),
            CASE WHEN p.preferred IS NOT NULL THEN platform_with_task(p.preferred, task) END)
        FROM platforms p WHERE p.id = other);
END $$;
