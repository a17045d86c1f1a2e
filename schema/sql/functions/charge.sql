-- Add amounts to counters. Fails with `serialization_failure` if a limit is exceeded.
--
-- Counters are locked in the order of their names, as in every function. A caller that fails has read the counter below
-- its limit, has then lost a race, and starts again. With `may_overshoot` the last charge may exceed a cost limit that
-- was not yet reached. Slots are a second limit on running jobs. `charged_at` tells which instances have started jobs
-- lately.
--
-- Callers mostly give counters that exist, each once and in the order of their names. Such rows are changed by their
-- places, which takes two thirds of the time. Otherwise amounts are summed and missing counters created, and the lock of
-- a counter is then not waited for, because whoever holds it may wait for one that was created here.
CREATE OR REPLACE FUNCTION charge(wanted_names text[], wanted_amounts numeric[], may_overshoot boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    sum_names text[] := wanted_names;
    sum_amounts numeric[] := wanted_amounts;
    last_amounts numeric[] := wanted_amounts;
    locked_names text[];
    places tid[];
    changed integer;
BEGIN
    SELECT array_agg(l.name), array_agg(l.place) INTO locked_names, places FROM (
        SELECT c.name, c.ctid AS place FROM counters c WHERE c.name = ANY (sum_names)
        ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE) l;
    IF locked_names IS DISTINCT FROM sum_names THEN
        SELECT array_agg(w.name), array_agg(w.amount), array_agg(w.latest)
            INTO sum_names, sum_amounts, last_amounts FROM (
            SELECT u.name, sum(u.amount) AS amount, (array_agg(u.amount ORDER BY u.nth DESC))[1] AS latest
            FROM unnest(wanted_names, wanted_amounts) WITH ORDINALITY AS u (name, amount, nth)
            GROUP BY u.name ORDER BY u.name COLLATE "C") w;
        INSERT INTO counters (name, most)
            SELECT w.name, CASE WHEN w.name LIKE 'lock:%' THEN 1 END FROM unnest(sum_names) AS w (name)
            WHERE NOT EXISTS (SELECT FROM counters c WHERE c.name = w.name)
            ORDER BY w.name COLLATE "C" ON CONFLICT (name) DO NOTHING;
        SELECT array_agg(l.name), array_agg(l.place) INTO locked_names, places FROM (
            SELECT c.name, c.ctid AS place FROM counters c WHERE c.name = ANY (sum_names)
            ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED) l;
        IF locked_names IS DISTINCT FROM sum_names THEN
            RAISE EXCEPTION 'another transaction has just created a counter' USING ERRCODE = 'serialization_failure';
        END IF;
    END IF;
    UPDATE counters c SET used = c.used + w.amount, charged_at = now()
        FROM unnest(places, sum_names, sum_amounts, last_amounts) AS w (place, name, amount, latest)
        WHERE c.ctid = w.place
            AND (c.slots IS NULL OR c.used + w.amount <= c.slots)
            AND (c.most IS NULL OR c.used + w.amount <= c.most OR w.amount <= 0
            OR may_overshoot AND w.name LIKE '%:cost' AND c.used + w.amount - w.latest < c.most);
    GET DIAGNOSTICS changed = ROW_COUNT;
    IF changed < cardinality(sum_names) THEN
        RAISE EXCEPTION 'a limit was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
