-- Return the system identifier of the server, which `initdb` and pg_upgrade make anew, and which each copy of a cluster
-- has too. Null if this role may not read it: any role may, but the administrators of a server can forbid it.
CREATE OR REPLACE FUNCTION server_identifier() RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT system_identifier FROM pg_control_system());
EXCEPTION WHEN insufficient_privilege THEN
    RETURN NULL;
END $$;
