"""SQL fragments that several statements use: newest-version lookups, JSON array parameters, submissions.

Newest-version lookups: while a transaction holds an old snapshot, vacuum can remove neither dead versions of a row nor
their index entries. A lookup by `key = value` then reads all versions of the row, the oldest first; for a bot that
calls twice a second these are hundreds within minutes. An index holds the versions roughly in the order in which they
were made. A backward scan of the range of one key therefore finds the visible version first, and ends there.

Submissions: every submit gets a public id. Usually this is the id of the job that it made. A submit that joined an
unfinished job by its deduplication key has an id of its own in `job_followers`, which stands for that job everywhere.
If a caller cancels one of several submissions of a job, only that submission is withdrawn; the job goes on for the
others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from schema.predicates import PAUSED_UNTIL
from schema.sql import NOT_OVER
from schema.timing import KILL_ALLOWANCE


def newest_version(table: str, key: str, value: str, *, columns: str = "*", where: str = "true", lock: str = "") -> str:
    """A query of `columns` of the one row whose `key` is `value`; `key` must be unique among rows that match `where`.

    It gives the same row as `key = value`. With `=` the planner would drop the ORDER BY and scan forwards.
    """
    return (
        f"(SELECT {columns} FROM {table} WHERE {where} AND {key} >= {value} AND {key} <= {value}"
        f" ORDER BY {key} DESC LIMIT 1 {lock})"
    )


def stored_seconds(value: str) -> str:
    """An interval of the seconds that a row has stored. Infinity, NaN and more than 1e9 count as 1e9; null stays null.

    With such a value `make_interval` raises an error, by which the statement would fail for all rows.
    """
    return f"make_interval(secs => CASE WHEN {value} IS NOT NULL THEN greatest(-1e9, least({value}, 1e9)) END)"


def kill_seconds(bot: str) -> str:
    """A query of the seconds that a bot gets to kill a job, beyond the period of its calls.

    bot: SQL expression for the bot's id.
    """
    return newest_version("bots", "id", bot, columns=f"kill_grace + {KILL_ALLOWANCE}")


def newest_quota(row: str, *, columns: str, lock: str = "") -> str:
    """A query of `columns` of the quota of the instance of `row` in the cohort of `row`, if there is one."""
    return newest_version(
        "quotas", "instance", f"{row}.instance", columns=columns, where=f"cohort = {row}.cohort", lock=lock
    )


def newest_leases(bot: str, held: str, *, columns: str, but: str = "") -> str:
    """A query of `columns` of the live leases of a bot, the latest first.

    bot, held: SQL expressions for the bot's id and for the number of its live leases. The scan stops after that many
        rows and so does not read entries of leases that have ended.
    but: SQL expression for an array of job ids whose leases are left out.
    """
    others = f" AND job_id <> ALL ({but})" if but else ""
    return (
        f"(SELECT {columns} FROM leases WHERE bot_id = {bot} AND {NOT_OVER}{others}"
        f" ORDER BY granted_at DESC LIMIT greatest({held}, 0))"
    )


# Many JSON documents as one parameter: as elements of an array, the driver would escape each of them again.


#: JSON has no such character outside of strings, and inside them it is always escaped.
SEPARATOR = "\x1e"


def json_documents(documents: Iterable[Mapping[str, Any] | Sequence[Any]]) -> str:
    """The value of the parameter that `json_array` reads; there must be at least one document."""
    return SEPARATOR.encode().join(map(to_json, documents)).decode()


def json_array(name: str) -> str:
    """The SQL expression that turns parameter `name` into a jsonb array."""
    return f"CAST(string_to_array(:{name}, chr({ord(SEPARATOR)})) AS jsonb[])"


def most_lost(job: str, otherwise: int) -> str:
    """The SQL expression of how often the bot of the job with this id may be lost, `otherwise` if it does not say.

    Of a payload that nobody has checked, what is no number says nothing.
    """
    return f"""coalesce((
        SELECT CASE WHEN jsonb_typeof(payload->'max_lost') = 'number'
            THEN CAST(least(100, greatest(1, CAST(payload->>'max_lost' AS numeric))) AS integer) END
        FROM job_payloads WHERE job_id = {job}), {otherwise})"""


# Submissions


#: The submissions with the public ids `:ids`: id, job_id, withdrawn_at (null = not withdrawn), and whether it joined.
SUBMISSIONS = """
    SELECT public_id AS id, id AS job_id, abandoned_at AS withdrawn_at, false AS joined
    FROM jobs WHERE public_id = ANY (CAST(:ids AS uuid[]))
    UNION ALL
    SELECT public_id, job_id, cancelled_at, true
    FROM job_followers WHERE public_id = ANY (CAST(:ids AS uuid[]))"""

#: The metadata of jobs, and of submissions that have joined them: job_id, instance, key, value.
DESCRIBED = """
    (SELECT job_id, instance, key, value FROM job_metadata
     UNION ALL SELECT job_id, instance, key, value FROM submission_metadata)"""

#: When the rest of job `j` itself is over. A job that is set aside because of a pause does not rest.
_UNTIL = f"nullif(j.schedule_after, {PAUSED_UNTIL})"
#: Why job `j` is in its state or rests, and until when it rests: a queued job rests with its queue.
JOB_REASON = f"""
    CASE WHEN j.state = 'queued' THEN (
            SELECT CASE WHEN schedule_after > greatest({_UNTIL}, now()) THEN reason
                ELSE coalesce(j.reason, reason) END
            FROM queues WHERE id = j.queue)
        ELSE j.reason END"""
JOB_RESTS_UNTIL = f"""
    CASE WHEN j.state = 'queued'
        THEN greatest({_UNTIL}, (SELECT schedule_after FROM queues WHERE id = j.queue))
        ELSE {_UNTIL} END"""

#: State, reason, end and job of submission `s` of job `j`, as its caller sees them.
SUBMISSION_STATE = "CASE WHEN s.withdrawn_at IS NULL THEN j.state ELSE 'cancelled' END"
SUBMISSION_REASON = (
    f"CASE WHEN s.withdrawn_at IS NULL THEN {JOB_REASON} ELSE 'cancelled; the job goes on for others who share it' END"
)
SUBMISSION_FINISHED_AT = "coalesce(s.withdrawn_at, j.finished_at)"
SUBMISSION_JOINED = "CASE WHEN s.joined THEN j.public_id END"

#: The withdrawn submissions of job `j`, as an object: public id → who withdrew it; null without any.
WITHDRAWN_SUBMISSIONS = """
    (SELECT jsonb_object_agg(w.id, (
        SELECT e.actor FROM stored_events e
        WHERE e.job_id = j.id AND e.move = 'withdraw' AND e.details->>'submission' = CAST(w.id AS text)
        ORDER BY e.id DESC LIMIT 1))
    FROM (SELECT f.public_id AS id FROM job_followers f WHERE f.job_id = j.id AND f.cancelled_at IS NOT NULL
        UNION ALL SELECT j.public_id WHERE j.abandoned_at IS NOT NULL) w)"""
#: The number of its other submissions.
WANTED_SUBMISSIONS = """
    (SELECT count(*) FROM job_followers f WHERE f.job_id = j.id AND f.cancelled_at IS NULL)
        + CASE WHEN j.abandoned_at IS NULL THEN 1 ELSE 0 END"""

#: The result of job `j` from its last event; null if the job has not ended, or ended without a report of a bot.
JOB_RESULT = """
    (SELECT e.details - 'verdict' FROM job_events e
     WHERE e.job_id = j.id AND e.to_state = j.state AND e.move IN ('finish', 'give_up', 'confirm_cancel')
     ORDER BY e.id DESC LIMIT 1)"""
