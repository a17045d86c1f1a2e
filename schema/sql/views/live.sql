-- Leases that have not ended.
CREATE OR REPLACE VIEW live AS SELECT * FROM leases WHERE state IN ('pending', 'active', 'cancelling');
