-- Record that this transaction changes what assigners remember of a bot (`schema/fleet/members.py`). They do not
-- remember what is in use of it.
CREATE OR REPLACE FUNCTION mark_bot_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO bot_changes (bot_id, transaction)
        VALUES (NEW.id, CAST(CAST(pg_current_xact_id() AS text) AS bigint))
        ON CONFLICT (bot_id) DO UPDATE SET transaction = EXCLUDED.transaction;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER bots_mark_insert AFTER INSERT ON bots FOR EACH ROW
    WHEN (NEW.status <> 'gone')
    EXECUTE FUNCTION mark_bot_change();

CREATE OR REPLACE TRIGGER bots_mark_update AFTER UPDATE OF
    kind, cohort, instance, pool, status, draining, closing, sync_seq ON bots FOR EACH ROW
    WHEN ((OLD.kind, OLD.cohort, OLD.instance, OLD.pool, OLD.status, OLD.draining, OLD.closing, OLD.sync_seq > 0)
        IS DISTINCT FROM (NEW.kind, NEW.cohort, NEW.instance, NEW.pool, NEW.status, NEW.draining, NEW.closing,
            NEW.sync_seq > 0))
    EXECUTE FUNCTION mark_bot_change();
