-- Take tokens from rate buckets. Fails with `serialization_failure` if a bucket has too few.
--
-- A lease counts as granted when its transaction began, so tokens are taken at that time. If the bucket was last locked
-- by a transaction that began later, nothing is refilled. So no span of s seconds holds more than burst + rate x s
-- grants.
CREATE OR REPLACE FUNCTION draw(wanted_names text[], wanted_jobs integer[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    found_names text[];
    changed integer;
BEGIN
    SELECT array_agg(b.name) INTO found_names FROM (
        SELECT r.name FROM rate_buckets r WHERE r.name = ANY (wanted_names)
        ORDER BY r.name COLLATE "C" FOR NO KEY UPDATE) b;
    UPDATE rate_buckets b SET
        tokens = least(b.burst, b.tokens + b.rate * greatest(extract(epoch FROM now() - b.refilled_at), 0)) - w.jobs,
        refilled_at = greatest(b.refilled_at, now())
        FROM unnest(wanted_names, wanted_jobs) AS w (name, jobs)
        WHERE b.name = w.name AND b.name = ANY (found_names)
            AND least(b.burst, b.tokens + b.rate * extract(epoch FROM now() - b.refilled_at)) >= w.jobs;
    GET DIAGNOSTICS changed = ROW_COUNT;
    IF changed < cardinality(found_names) THEN
        RAISE EXCEPTION 'a rate was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
