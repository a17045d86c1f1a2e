-- Delete the results of the nodes of a graph that is deleted, whoever deletes it. They were kept for as long as the graph.
CREATE OR REPLACE FUNCTION forget_results() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM job_results WHERE job_id = ANY (ARRAY(SELECT job_id FROM deleted_nodes));
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER graph_nodes_forget_results AFTER DELETE ON graph_nodes
    REFERENCING OLD TABLE AS deleted_nodes FOR EACH STATEMENT EXECUTE FUNCTION forget_results();
