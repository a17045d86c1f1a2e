-- Return whether bots that offer some properties offer these. Bots without the property `leasehold.task` do not tell which
-- tasks they have imported, and may have any.
CREATE OR REPLACE FUNCTION offers(offered jsonb, asked jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT offered @> CASE WHEN offered ? 'leasehold.task' THEN asked ELSE asked - 'leasehold.task' END
$$;
