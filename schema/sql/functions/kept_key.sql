-- Return the job that has ended and still keeps this deduplication key, because its `unique_for` is not over yet.
--
-- Only success keeps a key: who submits again after a failure or a cancel wants the work done. The job may have been
-- deleted meanwhile; retention deletes the row of the key together with a job that has not succeeded.
CREATE OR REPLACE FUNCTION kept_key(of_instance integer, of_key text)
RETURNS TABLE (job bigint, public_id uuid) LANGUAGE sql STABLE AS $$
    SELECT u.job_id, u.public_id
    FROM unique_keys u LEFT JOIN jobs j ON j.id = u.job_id
    WHERE u.instance = of_instance AND u.dedup_key = of_key AND u.until > now()
        AND coalesce(j.state = 'succeeded', true)
$$;
