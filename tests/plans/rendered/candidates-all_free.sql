-- schema/fleet/candidates.py: ALL_FREE
SELECT b.id, b.name, b.priority, b.capacity - b.in_use - b.kept_units AS room, b.capacity FROM bots b WHERE b.free AND b.cohort = ANY (CAST(:cohorts AS integer[]))
