-- Return whether bots that offer some properties, and some of these exclusively, may run jobs that ask for these properties.
CREATE OR REPLACE FUNCTION is_open_to(offered jsonb, exclusive text[], asked jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE
AS $$ SELECT offers(offered, asked) AND asked ?& exclusive $$;
