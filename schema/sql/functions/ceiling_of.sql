-- Return the ceilings of a job by its instance and its label: of each, the tightest of all that cover the job.
--
-- Null means that there is none. This is the one place that says which ceilings cover a job. In this form PostgreSQL
-- makes it part of the calling statement, which costs a tenth of a call for each of many jobs.
CREATE OR REPLACE FUNCTION ceiling_of(of_instance integer, of_label text)
RETURNS TABLE (default_timeout double precision, max_timeout double precision, max_queue_age double precision)
LANGUAGE sql STABLE AS $$
    SELECT min(c.default_timeout), min(c.max_timeout), min(c.max_queue_age)
    FROM ceilings c
    WHERE (c.instance IS NULL OR c.instance = of_instance) AND (c.label IS NULL OR c.label = of_label)
$$;
