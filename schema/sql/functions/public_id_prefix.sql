-- Return the first 13 hex digits of a public id: 48 bits of milliseconds and the version, 7 (RFC 9562).
--
-- Ids of one moment then lie together in their index.
CREATE OR REPLACE FUNCTION public_id_prefix() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT lpad(to_hex((date_part('epoch', clock_timestamp()) * 1000)::bigint * 16 + 7), 13, '0')
$$;
