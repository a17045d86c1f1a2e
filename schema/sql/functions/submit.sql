-- Submit jobs, also for callers that enqueue inside their own transaction. `submit_many` does the work.
--
-- This and `submit_graph` are what callers call, so they alone fix settings; what they call inherits them. With the
-- path of the migration no table of the caller's, temporary ones included, is taken for one of ours. The server must
-- not compile the statements: they look expensive to the planner, and compiling takes seconds. It must not read whole
-- tables either: a session keeps its plans, and one that was made while the tables were small would go on to do so while
-- they grow, for a minute or more. It runs with the rights of the tables' owner, so that a role may be allowed to submit
-- and nothing else (`leasehold db grant-submit`).
--
-- A request is flat, as in JSON lines, and checked in full by `normal_requests`. Returns a row per request, `n` counted
-- from 0. `created` is false if the key, or the deduplication key, was known; `same` is false if the key was used by a
-- different request.
CREATE OR REPLACE FUNCTION submit(requests jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (n integer, job_id bigint, public_id uuid, created boolean, same boolean)
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT SET jit = off SET enable_seqscan = off
SET enable_bitmapscan = off AS $$
    SELECT (u.nth - 1)::integer, u.job_id, u.public_id, coalesce(u.created, true), coalesce(u.same, true)
    FROM submit_many(only_flat(requests), named_actor(actor)) a
    CROSS JOIN LATERAL unnest(a.job_ids, a.public_ids, a.created, a.same) WITH ORDINALITY
        AS u (job_id, public_id, created, same, nth)
$$;
REVOKE EXECUTE ON FUNCTION submit FROM PUBLIC;
