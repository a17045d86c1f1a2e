-- Return the first fence of the server's timeline: the timeline less one, times 2^32, plus one.
--
-- A standby that is promoted begins a new timeline. If the last commits of the old server were lost, the fences of jobs
-- have gone back, and the same numbers would be granted a second time. Fences with the timeline in their upper bits
-- never repeat. The name of the current WAL segment begins with the timeline, which any role may read; the control
-- file shows a new timeline only after the next checkpoint. Fences are exact as JSON numbers, below 2^53, for two
-- million timelines. In PL/pgSQL, which plans the expression once in a session.
CREATE OR REPLACE FUNCTION first_fence() RETURNS bigint LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
BEGIN
    RETURN ((('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint - 1) << 32) + 1;
END $$;
