-- Submit a graph of jobs, also for callers that enqueue inside their own transaction. `submit_normal_graph` does the
-- work.
--
-- A graph has the same fields as in a file or over HTTP. It is checked in full by `normal_graph`, whoever the actor is.
-- The settings are those of `submit`, for the same reasons.
CREATE OR REPLACE FUNCTION submit_graph(request jsonb, actor text DEFAULT 'sql')
RETURNS TABLE (graph_id bigint, public_id uuid, created boolean, same boolean, replaced bigint)
LANGUAGE sql SET search_path FROM CURRENT SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off AS $$
    SELECT g.* FROM submit_normal_graph(normal_graph(request), named_actor(actor)) g
$$;
