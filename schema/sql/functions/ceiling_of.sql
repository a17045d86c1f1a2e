-- Return the ceilings of a job by its instance and its label: of each, the tightest of all that cover the job.
--
-- Null means that there is none. This is the one place that says which ceilings cover a job.
CREATE OR REPLACE FUNCTION ceiling_of(of_instance integer, of_label text, OUT default_timeout double precision,
    OUT max_timeout double precision, OUT max_queue_age double precision)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT min(c.default_timeout), min(c.max_timeout), min(c.max_queue_age)
        INTO default_timeout, max_timeout, max_queue_age
        FROM ceilings c
        WHERE (c.instance IS NULL OR c.instance = of_instance) AND (c.label IS NULL OR c.label = of_label);
END $$;
