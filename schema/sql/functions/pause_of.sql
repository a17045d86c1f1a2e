-- Return the pause that keeps a job from starting: of its label or of its task, in all instances or in its own; a row of
-- nulls if none does.
--
-- A job of a task is known by its command.
CREATE OR REPLACE FUNCTION pause_of(job bigint, job_label text, job_instance integer) RETURNS pauses
LANGUAGE sql STABLE AS $$
    SELECT p FROM pauses p
    WHERE (p.kind = 'label' AND p.name = job_label OR p.kind = 'task' AND p.name = (
            SELECT o.payload->'command'->>2 FROM job_payloads o
            WHERE o.job_id = job AND o.payload->'command'->>0 = 'leasehold-task'))
        AND (p.instance = '' OR p.instance = (SELECT i.name FROM instances i WHERE i.id = job_instance))
    ORDER BY p.kind, p.instance, p.name LIMIT 1
$$;
