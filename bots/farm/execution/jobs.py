"""What the door asks of the pool: its jobs, and how they stand. It writes nothing but what it submits.

Only jobs that the door has submitted are seen here, by two marks that nobody else can set: the actor, whose name begins
like that of no token, and the reserved property. Who names another job's id is told that there is no such operation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, Protocol
from uuid import UUID

from leasehold.errors import Conflict
from leasehold.states import FINAL, JobState

from bots.farm.identity import ACTOR
from bots.gateway.workers import Batcher, WorkerPool
from schema.moves.submit import Submitted
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.fragments import JOB_REASON, SUBMISSIONS, WITHDRAWN_SUBMISSIONS
from schema.postgres.statements import Result, Row, Statement
from schema.requests import DEFAULT_INSTANCE, JobRequest
from schema.tables.jobs import OF_ACTION
from schema.tenancy.tokens import Principal
from schema.validation import FARM

#: The condition on a job, by its platform `p` and its payload `w`.
OWN = f"w.submitted_by LIKE '{ACTOR}%' AND p.properties -> '{FARM}' IS NOT NULL"

FIND = Statement(f"""
SELECT s.id, j.public_id AS job, i.name AS instance
FROM ({SUBMISSIONS}) s JOIN jobs j ON j.id = s.job_id JOIN instances i ON i.id = j.instance
JOIN platforms p ON p.id = j.platform JOIN job_payloads w ON w.job_id = j.id
WHERE {OWN}
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
# A client that skips the look-up in the cache has its action run anew, and the newest success is what counts.
END = Statement(f"""
SELECT j.public_id AS id, j.state, {JOB_REASON} AS reason, w.payload, CAST(r.result AS text) AS result, n.bot,
    {WITHDRAWN_SUBMISSIONS} AS withdrawn,
    EXISTS (SELECT FROM jobs n WHERE n.dedup_key = j.dedup_key AND n.id > j.id AND {OF_ACTION}) AS is_replaced,
    CASE WHEN j.state = 'cancelled' THEN (
        SELECT e.actor FROM stored_events e WHERE e.job_id = j.id AND e.move = 'cancel'
        ORDER BY e.id DESC LIMIT 1) END AS cancelled_by
FROM jobs j JOIN platforms p ON p.id = j.platform JOIN job_payloads w ON w.job_id = j.id
LEFT JOIN job_results r ON r.job_id = j.id AND r.fence = coalesce(j.result_fence, j.fence - 1)
LEFT JOIN LATERAL (
    SELECT b.name AS bot FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.job_id = j.id AND l.fence = j.result_fence) n ON true
WHERE {OWN} AND j.public_id = ANY (CAST(:ids AS uuid[]))
""")


# By the keys of actions: the newest job that has succeeded, of those that are kept.
SUCCEEDED = Statement(f"""
SELECT DISTINCT ON (dedup_key) dedup_key, public_id AS id FROM jobs
WHERE dedup_key = ANY (CAST(:ids AS text[])) AND {OF_ACTION} ORDER BY dedup_key, id DESC
""")


#: A job, its caller, and what adds to its normal form what only the door may say.
Wanted = tuple[JobRequest, Principal, Callable[[dict[str, Any]], dict[str, Any]]]


@dataclass(frozen=True)
class Asked:
    """A job that the door is to submit. unless, refused: see `Jobs.submit`."""

    wanted: Wanted
    unless: str | None
    refused: Exception | None


class Submit(Protocol):
    """Stores jobs. The program that starts the door hands this in: what callers may do is known there."""

    def __call__(self, wanted: Sequence[Wanted], *, watched_seconds: float | None) -> Sequence[Submitted | Exception]:
        """Return for each job its submission, or why it is refused.

        watched_seconds: seconds for which a submission counts while nobody watches it; None = for ever.
        """
        ...


#: Tells what keeps the job with this id waiting, or did until it was given up; None if nothing does.
Why = Callable[[Connection, str], str | None]


@dataclass(frozen=True)
class Found:
    """A submission of the door: its id, the own id of its job, and the instance. created: it has made the job."""

    id: str
    job: str
    instance: str

    @property
    def created(self) -> bool:
        return self.id == self.job


@dataclass(frozen=True)
class RanBefore:
    """Why a job was not submitted: the newest one with the key of its action has succeeded. job: its own id."""

    job: str


@dataclass(frozen=True)
class News:
    """How a job stands. withdrawn: cancelled submissions, and who cancelled each. bot: that has it, or had it last."""

    state: JobState
    queued_at: datetime
    withdrawn: Mapping[str, str | None]
    bot: str | None

    @property
    def is_final(self) -> bool:
        """True once the job never changes again."""
        return self.state in FINAL

    @classmethod
    def of_new(cls, job: str) -> "News":
        """Return how a job stands that has just been submitted. Its id begins with the time, in milliseconds."""
        return cls(JobState.QUEUED, datetime.fromtimestamp((UUID(job).int >> 80) / 1000, UTC), {}, None)


@dataclass(frozen=True)
class Ended:
    """A job that is over: what its newest attempt left, the bot that ran it, and who cancelled it, if anybody.

    withdrawn: as of `News`. is_replaced: a later job has run the same action, and has succeeded.
    """

    state: JobState
    reason: str | None
    payload: Mapping[str, Any]
    result: str | None
    bot: str | None
    withdrawn: Mapping[str, str | None]
    cancelled_by: str | None
    is_replaced: bool


class Jobs:
    """The jobs of one door, for its event loop. What many clients ask at the same time takes one transaction.

    submit, watched_seconds: see `Submit`.
    """

    def __init__(
        self, database: Database, workers: WorkerPool, submit: Submit, *, watched_seconds: float | None = None
    ) -> None:
        self._database = database
        self._store = partial(submit, watched_seconds=watched_seconds)
        self._numbers = count()
        self._submits = Batcher[Asked, Found | RanBefore](self._submitted, workers)
        self._finds = Batcher[str, Found | None](self._found, workers)
        self._news = Batcher[str, News | None](self._told, workers)
        self._ends = Batcher[str, Ended | None](self._ended, workers)

    async def submit(
        self,
        job: JobRequest,
        caller: Principal,
        complete: Callable[[Any], Any],
        *,
        unless: str | None = None,
        refused: Exception | None = None,
    ) -> Found | RanBefore:
        """Submit a job, or join the one that does the same. Raises what refuses it, and Conflict.

        unless: the key of an action. If a job with that key has succeeded, none is submitted. None = always submit.
        refused: raised instead of submitting.
        """
        return await self._submits.answer(Asked((job, caller, complete), unless, refused), bot=self._number())

    async def news(self, job: str) -> News | None:
        """Return how a job stands, by its own id; None if it is not kept any more."""
        return await self._news.answer(job, bot=self._number())

    async def end(self, job: str) -> Ended | None:
        """Return what became of a job, by its own id; None if the door has no such job, or it is not over."""
        return await self._ends.answer(job, bot=self._number())

    async def find(self, submission: str, *, instances: Sequence[str] | None) -> Found | None:
        """Return the submission with this id, a UUID; None unless the door made it and the caller may see it."""
        found = await self._finds.answer(submission, bot=self._number())
        return found if found is not None and (instances is None or found.instance in instances) else None

    def _number(self) -> str:
        """A batch takes at most one call of each name, and these may all be taken together."""
        return str(next(self._numbers))

    def _submitted(self, asked: Sequence[Asked]) -> Sequence[Found | RanBefore | Exception]:
        before = self._succeeded([each.unless for each in asked if each.unless is not None])
        new = [each for each in asked if each.unless not in before]
        stored = iter(self._stored([each.wanted for each in new if each.refused is None]))
        return [
            RanBefore(before[each.unless]) if each.unless in before else each.refused or next(stored) for each in asked
        ]

    def _stored(self, wanted: Sequence[Wanted]) -> Sequence[Found | Exception]:
        if not wanted:
            return []
        taken = self._store(wanted)
        joined = [each.public_id for each in taken if not (isinstance(each, Exception) or each.created)]
        found: Mapping[str, Found | Exception] = {}
        try:
            if joined:
                found = found_in(self._read(FIND, joined))
        except Exception as error:
            # They are stored: if this went further, the batcher would have each of them stored once more.
            found = dict.fromkeys(joined, error)
        instances = [job.instance or caller.instance or DEFAULT_INSTANCE for job, caller, _ in wanted]
        return [_taken(each, instance, found) for each, instance in zip(taken, instances, strict=True)]

    def _found(self, submissions: Sequence[str]) -> Sequence[Found | None]:
        found = found_in(self._read(FIND, submissions))
        return [found.get(each) for each in submissions]

    def _told(self, jobs: Sequence[str]) -> Sequence[News | None]:
        found = news_in(self._read(NEWS, jobs))
        return [found.get(job) for job in jobs]

    def _ended(self, jobs: Sequence[str]) -> Sequence[Ended | None]:
        found = ends_in(self._read(END, jobs))
        return [found.get(job) for job in jobs]

    def _read(self, statement: Statement, ids: Sequence[str]) -> Result[Row]:
        """Execute a statement alone. It is sent with its commit, in one round trip."""
        return self._database.run(
            lambda connection: connection.execute_later(statement, {"ids": list(ids)}), kept_plans=True
        ).result()

    def _succeeded(self, keys: Sequence[str]) -> Mapping[str | None, str]:
        """The own ids of the newest jobs with these keys of actions that have succeeded, of those that are kept."""
        if not keys:
            return {}
        return {row.dedup_key: str(row.id) for row in self._read(SUCCEEDED, keys)}


def _taken(
    submitted: Submitted | Exception, instance: str, joined: Mapping[str, Found | Exception]
) -> Found | Exception:
    """Return what became of a job that the door has submitted. joined: what was found of those that were there."""
    if isinstance(submitted, Exception):
        return submitted
    if submitted.created:
        return Found(submitted.public_id, submitted.public_id, instance)
    return joined.get(submitted.public_id) or _not_ours()


def _not_ours() -> Conflict:
    return Conflict("not_of_the_door", "a job that the door has not submitted has the key of this action")


def found_in(rows: Iterable[Row]) -> Mapping[str, Found]:
    """Return submissions by their ids, as far as the door made them. rows: of `FIND`."""
    return {str(row.id): Found(str(row.id), str(row.job), row.instance) for row in rows}


def read_news(connection: Connection, jobs: Sequence[str]) -> Mapping[str, News | None]:
    """Return how jobs stand, by their own ids; None for one that is not kept any more."""
    return {**dict.fromkeys(jobs), **news_in(connection.execute(NEWS, {"ids": list(jobs)}))}


def news_in(rows: Iterable[Row]) -> Mapping[str, News]:
    """Return how jobs stand, by their own ids. rows: of `NEWS`."""
    return {str(row.id): News(JobState(row.state), row.queued_at, row.withdrawn or {}, row.bot) for row in rows}


def ends_in(rows: Iterable[Row]) -> Mapping[str, Ended]:
    """Return what became of jobs of the door, by their own ids; of those that are over. rows: of `END`."""
    return {
        str(row.id): Ended(
            JobState(row.state),
            row.reason,
            row.payload,
            row.result,
            row.bot,
            row.withdrawn or {},
            row.cancelled_by,
            row.is_replaced,
        )
        for row in rows
        if row.state in FINAL
    }
