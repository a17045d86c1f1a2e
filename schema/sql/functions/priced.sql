-- Return the priority that the points of a job give, null if it has none. Raises LH003 for an unknown name.
--
-- An explicit priority stands as it is. A service level goes before a class; only a class is raised by a project and
-- by its user's priority. More points are more urgent: the priority is 100 less the points, and later by the penalty
-- with which a submit rule met the job.
CREATE OR REPLACE FUNCTION priced(priority_inputs jsonb) RETURNS integer LANGUAGE plpgsql STABLE AS $$
DECLARE
    points integer;
BEGIN
    IF priority_inputs ? 'fixed' THEN
        RETURN NULL;
    ELSIF priority_inputs->>'level' IS NOT NULL THEN
        SELECT l.points INTO points FROM service_levels l WHERE l.name = priority_inputs->>'level';
    ELSIF priority_inputs->>'class' IS NOT NULL THEN
        SELECT c.points + CASE WHEN (priority_inputs->>'project')::boolean THEN s.project_points ELSE 0 END
                + s.user_points * coalesce((priority_inputs->>'user_priority')::integer, 0)
            INTO points FROM job_classes c CROSS JOIN scheduling s WHERE c.name = priority_inputs->>'class';
    ELSE
        RETURN NULL;
    END IF;
    IF points IS NULL THEN
        RAISE EXCEPTION 'there is no %', CASE WHEN priority_inputs->>'level' IS NOT NULL
            THEN format('service level ''%s''', priority_inputs->>'level')
            ELSE format('job class ''%s''', priority_inputs->>'class') END
            USING ERRCODE = 'LH003',
                COLUMN = CASE WHEN priority_inputs->>'level' IS NOT NULL THEN 'service_level' ELSE 'job_class' END,
                DETAIL = coalesce(priority_inputs->>'level', priority_inputs->>'class');
    END IF;
    RETURN greatest(-1000, least(1000, 100 - points + coalesce((priority_inputs->>'penalty')::integer, 0)));
END $$;
