-- Return what its class or its service level gives a job: its priority, null if points do not decide it; the timeout of
-- the level; the time in which nine of ten jobs of the class end; when the job has starved. Raises LH003 for an unknown
-- name.
--
-- An explicit priority stands as it is. A service level goes before a class; only a class is raised by a project and
-- by its user's priority. More points are more urgent: the priority is 100 less the points, and later by the penalty
-- with which a submit rule met the job.
--
-- Whoever removes a name locks its table and looks for jobs that have it. Volatile, so that the query sees what was
-- removed while it waited for the table. It reads whole columns: with expressions of the input its plan would be made
-- anew for each call, which costs more than all the rest.
CREATE OR REPLACE FUNCTION points_of(priority_inputs jsonb, OUT price integer, OUT level_timeout double precision,
    OUT usual_seconds double precision, OUT starves_at timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    of_level text := priority_inputs->>'level';
    of_class text := priority_inputs->>'class';
    patience double precision;
    points integer;
    class_points integer;
    of_project integer;
    of_user integer;
BEGIN
    IF of_level IS NULL AND of_class IS NULL THEN
        RETURN;
    END IF;
    SELECT l.points, l.timeout_seconds, c.points, c.seconds_high, s.project_points, s.user_points, s.starvation_seconds
        INTO points, level_timeout, class_points, usual_seconds, of_project, of_user, patience
        FROM scheduling s
        LEFT JOIN job_classes c ON c.name = of_class
        LEFT JOIN service_levels l ON l.name = of_level;
    IF priority_inputs ? 'fixed' THEN
        RETURN;
    END IF;
    IF of_level IS NULL THEN
        points := class_points + CASE WHEN (priority_inputs->>'project')::boolean THEN of_project ELSE 0 END
            + of_user * coalesce((priority_inputs->>'user_priority')::integer, 0);
    END IF;
    IF points IS NULL THEN
        RAISE EXCEPTION 'there is no %', CASE WHEN of_level IS NOT NULL THEN format('service level ''%s''', of_level)
            ELSE format('job class ''%s''', of_class) END
            USING ERRCODE = 'LH003', COLUMN = CASE WHEN of_level IS NOT NULL THEN 'service_level' ELSE 'job_class' END,
                DETAIL = coalesce(of_level, of_class);
    END IF;
    price := greatest(-1000, least(1000, 100 - points + coalesce((priority_inputs->>'penalty')::integer, 0)));
    starves_at := now() + make_interval(secs => patience);
END $$;
