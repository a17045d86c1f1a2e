-- Add amounts to counters. Fails with `serialization_failure` if a limit is exceeded.
--
-- Counters are locked in the order of their names, as in every function. A caller that fails has read the counter below
-- its limit, has then lost a race, and starts again. With `may_overshoot` the last charge may exceed a cost limit that
-- was not yet reached. `charged_at` tells which instances have started jobs lately.
CREATE OR REPLACE FUNCTION charge(wanted_names text[], wanted_amounts numeric[], may_overshoot boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    sum_names text[];
    sum_amounts numeric[];
    last_amounts numeric[];
    changed integer;
BEGIN
    SELECT array_agg(w.name), array_agg(w.amount), array_agg(w.latest) INTO sum_names, sum_amounts, last_amounts FROM (
        SELECT u.name, sum(u.amount) AS amount, (array_agg(u.amount ORDER BY u.nth DESC))[1] AS latest
        FROM unnest(wanted_names, wanted_amounts) WITH ORDINALITY AS u (name, amount, nth)
        GROUP BY u.name ORDER BY u.name COLLATE "C") w;
    INSERT INTO counters (name, most)
        SELECT w.name, CASE WHEN w.name LIKE 'lock:%' THEN 1 END FROM unnest(sum_names) AS w (name)
        WHERE NOT EXISTS (SELECT FROM counters c WHERE c.name = w.name)
        ORDER BY w.name COLLATE "C" ON CONFLICT (name) DO NOTHING;
    PERFORM FROM counters c WHERE c.name = ANY (sum_names) ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE;
    UPDATE counters c SET used = c.used + w.amount, charged_at = now()
        FROM unnest(sum_names, sum_amounts, last_amounts) AS w (name, amount, latest)
        WHERE c.name = w.name AND (c.most IS NULL OR c.used + w.amount <= c.most OR w.amount <= 0
            OR may_overshoot AND w.name LIKE '%:cost' AND c.used + w.amount - w.latest < c.most);
    GET DIAGNOSTICS changed = ROW_COUNT;
    IF changed < cardinality(sum_names) THEN
        RAISE EXCEPTION 'a limit was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
