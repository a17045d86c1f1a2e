-- Return the first fence of the server's timeline: (timeline - 1) x 2^32 + 1.
--
-- A standby that is promoted begins a new timeline. If the last commits of the old server were lost, the fences of jobs
-- have gone back, and the same numbers would be granted a second time. Fences with the timeline in their upper bits
-- never repeat. The timeline is read from the name of the current WAL segment, which any role may read; the control
-- file shows a new timeline only after the next checkpoint. For two million timelines fences are below 2^53, and so
-- exact as JSON numbers. The function is in PL/pgSQL, which plans the expression once in a session.
--
-- In another cluster timelines begin at 1 again. So each grant adds `fences_from` of `server_identity`, which `leasehold
-- db restored` sets. A grant reads it itself: read in here, it would cost a statement of one grant 3 % of its time.
CREATE OR REPLACE FUNCTION first_fence() RETURNS bigint LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
    RETURN ((('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint - 1) << 32) + 1;
END $$;
