-- schema/moves/preempt.py: LOCK_QUOTAS, again=false
WITH involved AS MATERIALIZED (
    SELECT cohort, instance FROM quotas WHERE (cohort, instance) IN (
        SELECT cohort, instance FROM jobs WHERE id = ANY (CAST(:job_ids AS bigint[])) OR id = :preemptor)
), locked AS MATERIALIZED (
    SELECT q.cohort FROM quotas q JOIN involved i ON i.cohort = q.cohort AND i.instance = q.instance
    ORDER BY q.cohort, q.instance FOR NO KEY UPDATE OF q
)
SELECT (SELECT count(*) FROM locked) = (SELECT count(*) FROM involved)
