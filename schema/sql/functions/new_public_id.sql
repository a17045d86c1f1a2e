-- Return the public id of a job that is submitted alone (RFC 9562, version 7).
--
-- The last 60 bits are those of a digest: random bytes would be read from the kernel.
CREATE OR REPLACE FUNCTION new_public_id(job_id bigint) RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT (public_id_prefix() || '0008' || right(md5(random()::text || random() || job_id), 15))::uuid
$$;
