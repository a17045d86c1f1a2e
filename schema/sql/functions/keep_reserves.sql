-- Fail with `serialization_failure` if jobs that this transaction has started took what is kept for another class.
--
-- `started` holds the classes of these jobs, null for jobs without one. The transaction has charged them, so it holds
-- the row of the pool's jobs, which every other start needs. An end that is not visible yet leaves at least as much
-- room. Jobs within the reserve of their own class are never refused, also if the limit has come to lie below all
-- reserves together.
CREATE OR REPLACE FUNCTION keep_reserves(started text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM counters p CROSS JOIN (
            SELECT sum(greatest(r.jobs - coalesce(c.used, 0), 0)) AS jobs
            FROM class_reserves r LEFT JOIN counters c ON c.name = 'class:' || r.name || ':jobs') kept
        WHERE p.name = 'pool:jobs' AND p.used + kept.jobs > p.most
    ) AND EXISTS (
        SELECT FROM unnest(started) AS s (class)
        LEFT JOIN class_reserves r ON r.name = s.class
        LEFT JOIN counters c ON c.name = 'class:' || s.class || ':jobs'
        WHERE r.jobs IS NULL OR c.used > r.jobs
    ) THEN
        RAISE EXCEPTION 'what is kept for a class was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
