"""What the door asks of the pool: how its jobs stand. It writes nothing itself.

Only jobs that the door has submitted are seen here, by two marks that nobody else can set: the actor, whose name begins
like that of no token, and the reserved property. Who names another job's id is told that there is no such operation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from leasehold.states import FINAL, JobState

from bots.farm.identity import ACTOR
from schema.moves.submit import Submitted
from schema.postgres.connection import Connection
from schema.postgres.fragments import JOB_REASON, SUBMISSIONS, WITHDRAWN_SUBMISSIONS
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from schema.tenancy.tokens import Principal
from schema.validation import FARM

_OWN = f"w.submitted_by LIKE '{ACTOR}%' AND p.properties -> '{FARM}' IS NOT NULL"

FIND = Statement(f"""
SELECT s.id, j.public_id AS job, i.name AS instance
FROM ({SUBMISSIONS}) s JOIN jobs j ON j.id = s.job_id JOIN instances i ON i.id = j.instance
JOIN platforms p ON p.id = j.platform JOIN job_payloads w ON w.job_id = j.id
WHERE {_OWN} AND (CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))
""")
# Jobs by their own public ids.
NEWS = Statement(f"""
SELECT j.public_id AS id, j.state, j.queued_at, {WITHDRAWN_SUBMISSIONS} AS withdrawn, last.bot
FROM jobs j LEFT JOIN LATERAL (
    SELECT b.name AS bot FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.job_id = j.id ORDER BY l.fence DESC LIMIT 1) last ON true
WHERE j.public_id = ANY (CAST(:ids AS uuid[]))
""")
# A dead job has no result that counts, but its last attempt, of the fence before, may have left why it was not run.
END = Statement(f"""
SELECT j.state, {JOB_REASON} AS reason, w.payload, CAST(r.result AS text) AS result, n.bot
FROM jobs j JOIN platforms p ON p.id = j.platform JOIN job_payloads w ON w.job_id = j.id
LEFT JOIN job_results r ON r.job_id = j.id AND r.fence = coalesce(j.result_fence, j.fence - 1)
LEFT JOIN LATERAL (
    SELECT b.name AS bot FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.job_id = j.id AND l.fence = j.result_fence) n ON true
WHERE {_OWN} AND j.public_id = CAST(:id AS uuid)
""")


#: Stores the job of a caller in one transaction. The last argument adds what only the door may say to its normal form.
#: The program that starts the door hands this in: what callers may do is known there.
Submit = Callable[[JobRequest, Principal, Callable[[dict[str, Any]], dict[str, Any]]], Submitted]

#: Tells what keeps the job with this id waiting, or did until it was given up; None if nothing does.
Why = Callable[[Connection, str], str | None]


@dataclass(frozen=True)
class Found:
    """A submission of the door: its id, the own id of its job, and the instance."""

    id: str
    job: str
    instance: str


@dataclass(frozen=True)
class News:
    """How a job stands. withdrawn: ids of its cancelled submissions. bot: that has it, or had it last."""

    state: JobState
    queued_at: datetime
    withdrawn: frozenset[str]
    bot: str | None

    @property
    def is_final(self) -> bool:
        """True once the job never changes again."""
        return self.state in FINAL


@dataclass(frozen=True)
class Ended:
    """A job that is over: what its newest attempt left, and the bot that ran it."""

    state: JobState
    reason: str | None
    payload: Mapping[str, Any]
    result: str | None
    bot: str | None


def find(connection: Connection, submission: str, *, instances: Sequence[str] | None) -> Found | None:
    """Return the submission with this id, a UUID; None unless the door made it and the caller may see it."""
    row = connection.execute(FIND, {"ids": [submission], "instances": instances}).one_or_none()
    return None if row is None else Found(str(row.id), str(row.job), row.instance)


def read_news(connection: Connection, jobs: Sequence[str]) -> Mapping[str, News | None]:
    """Return how jobs stand, by their own ids; None for one that is not kept any more."""
    rows = connection.execute(NEWS, {"ids": list(jobs)})
    return dict.fromkeys(jobs) | {
        str(row.id): News(JobState(row.state), row.queued_at, frozenset(map(str, row.withdrawn)), row.bot)
        for row in rows
    }


def read_end(connection: Connection, job: str) -> Ended | None:
    """Return what became of a job of the door, by its own id; None if there is none, or it is not over."""
    row = connection.execute(END, {"id": job}).one_or_none()
    if row is None or row.state not in FINAL:
        return None
    return Ended(JobState(row.state), row.reason, row.payload, row.result, row.bot)
