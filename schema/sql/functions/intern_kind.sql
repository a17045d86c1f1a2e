-- Return the id of a kind of bots: a set of properties that bots offer, and the names of those that they offer
-- exclusively, which are sorted. Makes its row, and those of the requirement sets that such bots are open to, if there
-- is none.
--
-- Upkeep adds the rows for a requirement set that is not committed yet, when both are (`schema/fleet/kinds.py`). The
-- caller holds the advisory lock of sessions that open, against which upkeep does so.
CREATE OR REPLACE FUNCTION intern_kind(offered jsonb, exclusive_keys text[] DEFAULT '{}') RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    kind_id integer;
    offered_digest bytea := sha256(convert_to(
        offered::text || CASE WHEN exclusive_keys = '{}' THEN '' ELSE exclusive_keys::text END, 'UTF8'));
BEGIN
    SELECT id INTO kind_id FROM kinds WHERE digest = offered_digest;
    IF kind_id IS NULL THEN
        INSERT INTO kinds (digest, properties, exclusive) VALUES (offered_digest, offered, exclusive_keys)
            ON CONFLICT (digest) DO NOTHING RETURNING id INTO kind_id;
        IF kind_id IS NULL THEN
            SELECT id INTO kind_id FROM kinds WHERE digest = offered_digest;
        ELSE
            INSERT INTO kind_platforms (platform, kind)
                SELECT p.id, kind_id FROM platforms p
                LEFT JOIN platforms f ON f.id = p.preferred
                WHERE is_open_to(offered, exclusive_keys, p.properties)
                    OR is_open_to(offered, exclusive_keys, f.properties);
        END IF;
    END IF;
    RETURN kind_id;
END $$;
