"""Submissions: what a public id stands for.

Every submit gets a public id. Most are their job's own; one that joined an unfinished job by its deduplication key has
its own id in `job_followers` and stands for that job everywhere. Who cancels a submission of a job that others want as
well has withdrawn it: it is cancelled for good, and the job goes on for the others.
"""

#: The submissions with the public ids `:ids`: id, job_id, withdrawn_at (unset = it was not), and whether it joined.
NAMED = """
    SELECT public_id AS id, id AS job_id, abandoned_at AS withdrawn_at, false AS joined
    FROM jobs WHERE public_id = ANY (CAST(:ids AS uuid[]))
    UNION ALL
    SELECT public_id, job_id, cancelled_at, true
    FROM job_followers WHERE public_id = ANY (CAST(:ids AS uuid[]))"""

#: What submission `s` of job `j` is told of it.
STATE = "CASE WHEN s.withdrawn_at IS NULL THEN j.state ELSE 'cancelled' END"
REASON = "CASE WHEN s.withdrawn_at IS NULL THEN j.reason ELSE 'cancelled; the job goes on for others who share it' END"
FINISHED_AT = "coalesce(s.withdrawn_at, j.finished_at)"
JOINED = "CASE WHEN s.joined THEN j.public_id END"

#: Public ids of the submissions of job `j` that were withdrawn, and how many were not.
WITHDRAWN = """
    ARRAY(SELECT f.public_id FROM job_followers f WHERE f.job_id = j.id AND f.cancelled_at IS NOT NULL
        UNION ALL SELECT j.public_id WHERE j.abandoned_at IS NOT NULL)"""
WANTED = """
    (SELECT count(*) FROM job_followers f WHERE f.job_id = j.id AND f.cancelled_at IS NULL)
        + CASE WHEN j.abandoned_at IS NULL THEN 1 ELSE 0 END"""

#: The result of job `j`, null if it is not final or has ended without a bot's word: what its last event tells.
RESULT = """
    (SELECT e.details - 'verdict' FROM job_events e
     WHERE e.job_id = j.id AND e.to_state = j.state AND e.move IN ('finish', 'give_up', 'confirm_cancel')
     ORDER BY e.id DESC LIMIT 1)"""
