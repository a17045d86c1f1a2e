-- Return what an owner has used of an instance's cost within the rolling window, if a submit rule calls that heavy.
--
-- Of several rules, one that refuses goes first, then the one with the greatest penalty. No row: the owner is not heavy.
CREATE OR REPLACE FUNCTION heavy_use(instance_name text, owner text)
RETURNS TABLE (used numeric, most numeric, penalty integer) LANGUAGE sql STABLE AS $$
    SELECT c.used, s.owner_cost, s.owner_penalty
    FROM counters c
    JOIN submit_rules s ON c.used > s.owner_cost
        AND (s.instance IS NULL OR s.instance = (SELECT i.id FROM instances i WHERE i.name = instance_name))
    WHERE c.name = 'owner:' || instance_name || ':' || owner || ':cost'
    ORDER BY s.owner_penalty DESC NULLS FIRST LIMIT 1
$$;
