-- Return the public id of the nth request of a bulk submit.
--
-- `moment` is the first 12 digits of a `public_id_prefix`. A counter behind it (RFC 9562, 6.2, method 1) lets each id
-- enter its index right behind the one before. The last 60 bits are those of a digest of a random seed: random bits for
-- each would be read from the kernel one by one.
CREATE OR REPLACE FUNCTION bulk_public_id(moment text, seed text, n bigint) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT (moment || to_hex(28672 + (n & 4095)) || '8' || right(md5(seed || n), 15))::uuid
$$;
