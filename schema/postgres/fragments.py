"""Lookups that begin with the newest version of a row.

While somebody holds a snapshot open, no dead version of a row can be removed, nor its entries in indexes. A lookup by
`key = value` reads all versions of a row, the oldest ones first; of a bot that calls twice a second these are hundreds
within minutes. Versions lie in an index roughly in the order in which they were made, so that a walk backwards through
the range of this one key meets the one to be seen at once, and ends there.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def newest_version(table: str, key: str, value: str, *, columns: str = "*", where: str = "true", lock: str = "") -> str:
    """A query of those columns of the one row whose `key`, which is unique where `where` holds, is `value`. It gives
    what `=` would; a range keeps the planner from taking the order for granted, and so from walking forwards."""
    return (
        f"(SELECT {columns} FROM {table} WHERE {where} AND {key} >= {value} AND {key} <= {value}"
        f" ORDER BY {key} DESC LIMIT 1 {lock})"
    )


def newest_quota(row: str, *, columns: str, lock: str = "") -> str:
    """A query of those columns of the quota that the instance of `row` has in its cohort, if it has one."""
    return newest_version(
        "quotas", "instance", f"{row}.instance", columns=columns, where=f"cohort = {row}.cohort", lock=lock
    )


#: A live lease, in words that match no index but the one of the latest leases of a bot.
NOT_OVER = "state NOT IN ('completed', 'cancelled')"


def newest_leases(bot: str, held: str, *, columns: str, but: str = "") -> str:
    """A query of the live leases of a bot, of which there are `held`, the latest first; of those that are not of the
    jobs `but`, an array. It ends with the last of them and does not look through those that have ended before."""
    others = f" AND job_id <> ALL ({but})" if but else ""
    return (
        f"(SELECT {columns} FROM leases WHERE bot_id = {bot} AND {NOT_OVER}{others}"
        f" ORDER BY granted_at DESC LIMIT greatest({held}, 0))"
    )


# Many JSON documents as one parameter: a driver would quote each of them anew as an element of an array.


#: JSON has no such character outside of strings, and inside them it is always escaped.
SEPARATOR = "\x1e"


def json_documents(documents: Iterable[Mapping[str, Any]]) -> str:
    """The value of the parameter of `array`; at least one document."""
    return SEPARATOR.join(map(json.dumps, documents))


def json_array(name: str) -> str:
    """The SQL expression that makes a jsonb array of parameter `name`."""
    return f"CAST(string_to_array(:{name}, chr({ord(SEPARATOR)})) AS jsonb[])"


# Submissions: what a public id stands for.
#
# Every submit gets a public id. Most are their job's own; one that joined an unfinished job by its deduplication key
# has its own id in `job_followers` and stands for that job everywhere. Who cancels a submission of a job that others
# want as well has withdrawn it: it is cancelled for good, and the job goes on for the others.


#: The submissions with the public ids `:ids`: id, job_id, withdrawn_at (unset = it was not), and whether it joined.
SUBMISSIONS = """
    SELECT public_id AS id, id AS job_id, abandoned_at AS withdrawn_at, false AS joined
    FROM jobs WHERE public_id = ANY (CAST(:ids AS uuid[]))
    UNION ALL
    SELECT public_id, job_id, cancelled_at, true
    FROM job_followers WHERE public_id = ANY (CAST(:ids AS uuid[]))"""

#: What submission `s` of job `j` is told of it.
SUBMISSION_STATE = "CASE WHEN s.withdrawn_at IS NULL THEN j.state ELSE 'cancelled' END"
SUBMISSION_REASON = (
    "CASE WHEN s.withdrawn_at IS NULL THEN j.reason ELSE 'cancelled; the job goes on for others who share it' END"
)
SUBMISSION_FINISHED_AT = "coalesce(s.withdrawn_at, j.finished_at)"
SUBMISSION_JOINED = "CASE WHEN s.joined THEN j.public_id END"

#: Public ids of the submissions of job `j` that were withdrawn, and how many were not.
WITHDRAWN_SUBMISSIONS = """
    ARRAY(SELECT f.public_id FROM job_followers f WHERE f.job_id = j.id AND f.cancelled_at IS NOT NULL
        UNION ALL SELECT j.public_id WHERE j.abandoned_at IS NOT NULL)"""
WANTED_SUBMISSIONS = """
    (SELECT count(*) FROM job_followers f WHERE f.job_id = j.id AND f.cancelled_at IS NULL)
        + CASE WHEN j.abandoned_at IS NULL THEN 1 ELSE 0 END"""

#: The result of job `j`, null if it is not final or has ended without a bot's word: what its last event tells.
JOB_RESULT = """
    (SELECT e.details - 'verdict' FROM job_events e
     WHERE e.job_id = j.id AND e.to_state = j.state AND e.move IN ('finish', 'give_up', 'confirm_cancel')
     ORDER BY e.id DESC LIMIT 1)"""
