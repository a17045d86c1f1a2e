-- Add amounts to counters. Fails with `serialization_failure` if a limit is exceeded.
--
-- Counters are locked in the order of their names, as in every function. A caller that fails has read the counter below
-- its limit, has then lost a race, and starts again. With `may_overshoot` the last charge may exceed a cost limit that
-- was not yet reached. Slots are a second limit on running jobs. `charged_at` tells which instances have started jobs
-- lately.
--
-- Callers mostly give counters each once and in the order of their names. Those that exist are changed by the places of
-- their rows, which takes two thirds of the time. Missing ones are made with their amounts. The lock of a counter that
-- somebody else has just made is not waited for, because whoever holds it may wait for one that was made here. Which
-- ones are missing follows from those that were locked: a look for each could compare it with all that there are.
--
-- `wanted_numbers` has, for each name, the slots that the jobs themselves give a lock; null for everything else. They
-- count only where no operator has set the limit. Of a lock that is held the smallest number stays until it is free.
-- Nobody may create a lock while an operator changes a pattern: it could keep the limit from before.
CREATE OR REPLACE FUNCTION charge(wanted_names text[], wanted_amounts numeric[], may_overshoot boolean DEFAULT false,
    wanted_numbers numeric[] DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    sum_names text[] := wanted_names;
    sum_amounts numeric[] := wanted_amounts;
    last_amounts numeric[] := wanted_amounts;
    least_numbers numeric[] := wanted_numbers;
    locked_names text[];
    made_names text[];
    places tid[];
    is_over boolean;
    changed integer;
BEGIN
    SELECT array_agg(l.name), array_agg(l.place) INTO locked_names, places FROM (
        SELECT c.name, c.ctid AS place FROM counters c WHERE c.name = ANY (sum_names)
        ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE) l;
    IF locked_names IS DISTINCT FROM sum_names THEN
        IF sum_names <> ARRAY(SELECT DISTINCT u.name COLLATE "C" FROM unnest(wanted_names) AS u (name) ORDER BY 1) THEN
            SELECT array_agg(w.name), array_agg(w.amount), array_agg(w.latest), array_agg(w.number)
                INTO sum_names, sum_amounts, last_amounts, least_numbers FROM (
                SELECT u.name, sum(u.amount) AS amount, (array_agg(u.amount ORDER BY u.nth DESC))[1] AS latest,
                    min(u.number) AS number
                FROM unnest(wanted_names, wanted_amounts, wanted_numbers) WITH ORDINALITY
                    AS u (name, amount, number, nth)
                GROUP BY u.name ORDER BY u.name COLLATE "C") w;
        END IF;
        IF EXISTS (SELECT FROM unnest(sum_names) AS w (name) WHERE w.name LIKE 'lock:%')
                AND NOT pg_try_advisory_xact_lock_shared(hashtext('leasehold.lock_patterns')) THEN
            RAISE EXCEPTION 'limits of locks are being changed' USING ERRCODE = 'serialization_failure';
        END IF;
        WITH made AS (
            INSERT INTO counters (name, used, most, limited_by, charged_at)
            SELECT w.name, w.amount, CASE WHEN w.name LIKE 'lock:%' THEN coalesce(p.most, w.number, 1) END, p.prefix,
                now()
            FROM unnest(sum_names, sum_amounts, least_numbers) AS w (name, amount, number)
            LEFT JOIN matching_patterns(sum_names) p ON p.name = w.name
            WHERE (w.name IN (SELECT unnest(locked_names))) IS NOT TRUE
            ORDER BY w.name COLLATE "C" ON CONFLICT (name) DO NOTHING
            RETURNING name, used > most AS over
        ) SELECT array_agg(m.name), bool_or(m.over) INTO made_names, is_over FROM made m;
        IF is_over THEN
            RAISE EXCEPTION 'a limit was reached meanwhile' USING ERRCODE = 'serialization_failure';
        END IF;
        SELECT array_agg(w.name), array_agg(w.amount), array_agg(w.latest), array_agg(w.number)
            INTO sum_names, sum_amounts, last_amounts, least_numbers
            FROM unnest(sum_names, sum_amounts, last_amounts, least_numbers) AS w (name, amount, latest, number)
            WHERE (w.name IN (SELECT unnest(made_names))) IS NOT TRUE;
        IF sum_names IS DISTINCT FROM locked_names THEN
            SELECT array_agg(l.name), array_agg(l.place) INTO locked_names, places FROM (
                SELECT c.name, c.ctid AS place FROM counters c WHERE c.name = ANY (sum_names)
                ORDER BY c.name COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED) l;
            IF locked_names IS DISTINCT FROM sum_names THEN
                RAISE EXCEPTION 'another transaction has just made a counter' USING ERRCODE = 'serialization_failure';
            END IF;
        END IF;
    END IF;
    UPDATE counters c SET used = c.used + w.amount, charged_at = now(), most = CASE
            WHEN w.number IS NULL OR c.limited_by IS NOT NULL THEN c.most
            WHEN c.used = 0 THEN w.number ELSE least(c.most, w.number) END
        FROM unnest(places, sum_names, sum_amounts, last_amounts, least_numbers)
            AS w (place, name, amount, latest, number)
        WHERE c.ctid = w.place
            AND (c.slots IS NULL OR c.used + w.amount <= c.slots)
            AND (c.most IS NULL OR w.amount <= 0 OR c.used + w.amount <= CASE
                WHEN w.number IS NULL OR c.limited_by IS NOT NULL THEN c.most
                WHEN c.used = 0 THEN w.number ELSE least(c.most, w.number) END
            OR may_overshoot AND w.name LIKE '%:cost' AND c.used + w.amount - w.latest < c.most);
    GET DIAGNOSTICS changed = ROW_COUNT;
    IF changed < cardinality(sum_names) THEN
        RAISE EXCEPTION 'a limit was reached meanwhile' USING ERRCODE = 'serialization_failure';
    END IF;
END $$;
