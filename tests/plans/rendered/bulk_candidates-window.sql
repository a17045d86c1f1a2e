-- schema/fleet/bulk_candidates.py: WINDOW
WITH walks AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:pools AS text[]),
                         CAST(:limits AS integer[]))
        WITH ORDINALITY AS g (cohort, instance, pool, upto, nth)
), apart AS MATERIALIZED (
    SELECT c.cohort FROM (SELECT DISTINCT cohort FROM walks WHERE instance IS NOT NULL) c
    CROSS JOIN LATERAL (
        SELECT FROM bots WHERE free AND cohort = c.cohort AND instance IS NOT NULL
        ORDER BY cohort, instance, pool, sample_key LIMIT 1) own
)
SELECT w.nth, b.* FROM (SELECT * FROM walks WHERE instance IS NULL AND pool IS NULL OFFSET 0) w
CROSS JOIN LATERAL (
    (SELECT * FROM (
        (SELECT id, name, priority, capacity, capacity - in_use - reserved AS room, kind FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND sample_key >= :low AND sample_key < :high AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT w.upto)
        UNION ALL
        (SELECT id, name, priority, capacity, capacity - in_use - reserved AS room, kind FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool IS NULL AND sample_key >= :low AND sample_key < :high AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT w.upto)
    ) ring LIMIT w.upto)) b
UNION ALL
SELECT w.nth, b.* FROM (
    SELECT * FROM walks WHERE instance IS NOT NULL AND cohort = ANY (ARRAY(SELECT cohort FROM apart)) OFFSET 0) w
CROSS JOIN LATERAL (
    (SELECT * FROM (
        (SELECT id, name, priority, capacity, capacity - in_use - reserved AS room, kind FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND sample_key >= :low AND sample_key < :high AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT w.upto)
        UNION ALL
        (SELECT id, name, priority, capacity, capacity - in_use - reserved AS room, kind FROM bots WHERE free AND cohort = w.cohort AND instance = w.instance AND pool IS NULL AND sample_key >= :low AND sample_key < :high AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT w.upto)
    ) ring LIMIT w.upto)) b
UNION ALL
SELECT w.nth, b.* FROM (SELECT * FROM walks WHERE pool IS NOT NULL OFFSET 0) w
CROSS JOIN LATERAL (
    (SELECT * FROM (
        (SELECT id, name, priority, capacity, capacity - in_use - reserved AS room, kind FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND sample_key >= :low AND sample_key < :high AND sample_key >= :start ORDER BY cohort, instance, pool, sample_key LIMIT w.upto)
        UNION ALL
        (SELECT id, name, priority, capacity, capacity - in_use - reserved AS room, kind FROM bots WHERE free AND cohort = w.cohort AND instance IS NULL AND pool = w.pool AND sample_key >= :low AND sample_key < :high AND sample_key < :start ORDER BY cohort, instance, pool, sample_key LIMIT w.upto)
    ) ring LIMIT w.upto)) b
