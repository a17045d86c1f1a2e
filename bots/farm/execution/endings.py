"""The ends of actions: what a job has left becomes the client's answer, and the cached result of its action.

A client tells the door of its job. The door watches the job until it is over, also if the client leaves, and reads how
the job stands once for all who wait. It stores nothing: after a restart the door learns of a job when the client waits
for it again.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import structlog
from leasehold.errors import BadInput

from bots.farm.execution import actions, outcome
from bots.farm.execution.jobs import Ended, Jobs, News, Why, read_news
from bots.farm.execution.outcome import Left
from bots.farm.metrics import DoorMetrics
from bots.farm.protos import remote_execution_pb2
from bots.farm.refusals import Stopping
from bots.farm.settings import FarmSettings
from bots.farm.storage import trees
from bots.farm.storage.upstream import Digest, Missing, Upstream, parsed, said
from bots.gateway.long_poll import LongPolls, PollTopic
from bots.gateway.workers import WorkerPool
from schema.requests import JobRequest

#: Seconds between two looks at a job whose wake-up may be lost, beside those of the topic.
LOOK_AGAIN = 600.0

_log = structlog.get_logger(__name__)


class Gone(Exception):
    """The job is not kept any more."""


class Watched:
    """A job that the door watches: how it stands, for all who wait. Only the event loop may use it.

    end: the task that watches it until it is over; its result is the ExecuteResponse.
    """

    end: asyncio.Task[Any]

    def __init__(self, news: News | None = None) -> None:
        self.news = news
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self, news: News | None) -> None:
        """Wake all who wait, because the job stands so. None: because its watch has ended."""
        self.news = news or self.news
        for each in self._waiting:
            _wake(each)

    async def after(self, seen: News | None, seconds: float) -> News:
        """Wait until the job stands otherwise than `seen`, for at most this many seconds; return how it stands then.

        Raises what has ended the watch before the job was over: Gone, Stopping, and errors of the database.
        """
        while self.news is seen and not self.end.done():
            await self._wait(seconds)
            if seen is not None:
                break
        if self.end.done() and (self.news is None or not self.news.is_final):
            if self.end.cancelled():
                raise Stopping
            self.end.result()
        assert self.news is not None, "a watch that has ended well has told of the end"
        return self.news

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        self._waiting.add(waiting)
        late = loop.call_later(seconds, _wake, waiting)
        try:
            await waiting
        finally:
            late.cancel()
            self._waiting.discard(waiting)


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


class Endings:
    """Watches jobs until they are over. Each job has one watch for all who wait. Only the event loop may use it."""

    def __init__(
        self,
        upstream: Upstream,
        workers: WorkerPool,
        jobs: Jobs,
        polls: LongPolls,
        settings: FarmSettings,
        *,
        metrics: DoorMetrics,
        address: str,
        why: Why,
    ) -> None:
        """Make watches of one door. address: by which bots reach it."""
        self._metrics = metrics
        self._upstream, self._workers, self._jobs = upstream, workers, jobs
        self._polls, self._why = polls, why
        self._settings, self._address = settings, address
        self._watched: dict[str, Watched] = {}

    @property
    def _topic(self) -> PollTopic:
        """Where news of jobs arrive."""
        return self._polls.topic("done", read_news, run=partial(self._workers.run, kept_plans=True))

    async def news(self, job: str) -> News:
        """Return how a job stands. Raises Gone."""
        found = await self._jobs.news(job)
        if found is None:
            raise Gone
        return found

    async def response(self, job: str, watched: Watched | None = None) -> Any:
        """Return the ExecuteResponse of a job, once it is over. Raises Gone, and Stopping when the door stops.

        watched: as the caller watches it; a watch that has failed is begun anew.
        """
        end = None if watched is None else watched.end
        if end is None or (end.done() and (end.cancelled() or end.exception() is not None)):
            end = self.watch(job).end
        return await asyncio.shield(end)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Miss no news of jobs from now on. Gives the moment, for `watch_new`."""
        topic = self._topic
        async with topic.watch(None):
            yield topic.moment

    def watch_new(self, job: str, since: int) -> Watched:
        """Watch a job that was submitted after this moment: how it stands need not be read first."""
        return self.watch(job, News.of_new(job), since=since)

    def watch(self, job: str, news: News | None = None, *, since: int | None = None) -> Watched:
        """Watch a job until it is over, and keep its result.

        news: how the job stands, since that moment of `listening`, if that is known.
        """
        watched = self._watched.get(job)
        if watched is None:
            watched = self._watched[job] = Watched(news)
            watched.end = asyncio.create_task(self._until_over(job, watched, since))
            watched.end.add_done_callback(lambda done: self._forget(job, done))
        return watched

    async def close(self) -> None:
        """Watch nothing any more."""
        ends = [each.end for each in self._watched.values()]
        for each in ends:
            each.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    def _forget(self, job: str, done: "asyncio.Task[Any]") -> None:
        self._watched.pop(job).tell(None)
        if not done.cancelled() and (error := done.exception()) and not isinstance(error, (Gone, Stopping)):
            _log.warning("the end of an action was not seen", job=job, kind=type(error).__name__)

    async def _until_over(self, job: str, watched: Watched, since: int | None) -> Any:
        topic, was_looked_at = self._topic, False

        def differs(news: News) -> bool:
            nonlocal was_looked_at
            was_looked_at = (
                was_looked_at or watched.news is None or seen_by_clients(news) != seen_by_clients(watched.news)
            )
            return was_looked_at

        async with topic.watch(None, since=since) as watch:
            watch.add(job, differs)
            ended, news = None, watched.news or await self.news(job)
            was_over = news.is_final
            while ended is None and not news.is_final:
                if news is not watched.news:
                    watched.tell(news)
                was_looked_at = False
                await watch.wait(LOOK_AGAIN)
                if topic.stopping:
                    raise Stopping
                if not was_looked_at:
                    # A wake-up nearly always tells of the end: to ask first whether it does would delay the client.
                    ended = await self._jobs.end(job)
                if ended is None:
                    news = await self.news(job)
        ended = ended or await self._jobs.end(job)
        if ended is None:
            raise Gone
        watched.tell(replace(news, state=ended.state, withdrawn=ended.withdrawn, bot=ended.bot or news.bot))
        response = await self._answer(job, ended)
        if not was_over:
            self._metrics.ended(response.status.code)
        return response

    async def _answer(self, job: str, ended: Ended) -> Any:
        told = outcome.left(ended.result)
        if told.stored is not None:
            told = await self._fetched(told, told.stored)
        if told.result is not None and ended.bot is not None:
            told.result.execution_metadata.worker = ended.bot
        if outcome.is_cached(ended.state, told, cacheable=True) and not ended.is_replaced:
            await self._keep(job, ended, told.result)
        reason, missing = ended.reason, tuple[Digest, ...]()
        if outcome.has_waited_too_long(ended.state, reason):
            why = await self._workers.run(lambda connection: self._why(connection, job))
            reason = reason if why is None else f"{reason}; it did not run because {why}"
        elif outcome.is_suspect(ended.state, reason, told):
            missing = tuple(await self._missing(job, ended))
        return outcome.response(ended.state, reason, told, job=job, missing=missing, cancelled_by=ended.cancelled_by)

    async def told(self, jobs: Sequence[str]) -> Mapping[str, Any]:
        """Return the ExecuteResponses of those of these jobs that are over, as bots left them, and keep nothing."""
        found = {}
        for job, ended in zip(jobs, await asyncio.gather(*map(self._jobs.end, jobs)), strict=True):
            if ended is not None:
                told = outcome.left(ended.result)
                if told.stored is not None:
                    told = await self._fetched(told, told.stored)
                by = ended.cancelled_by
                found[job] = outcome.response(ended.state, ended.reason, told, job=job, cancelled_by=by)
        return found

    async def _missing(self, job: str, ended: Ended) -> Sequence[Digest]:
        """Return what the storage does not have of the action, its command and its inputs. Nothing if it does not tell.

        A changed action or command, which clients do not know, is not looked for: the door writes it again.
        """
        try:
            wanted = await self.derived(ended, anew=True)
            return () if wanted is None else await trees.looked(self._upstream, trees.missing_inputs(wanted.root))
        except Missing as error:
            return error.digests
        except (BadInput, grpc.aio.AioRpcError) as error:
            _log.warning("the inputs of an action were not looked at", job=job, reason=said(error)[:300])
            return ()

    async def _fetched(self, told: Left, digest: Digest) -> Left:
        try:
            data = await self._upstream.read(digest)
            return replace(told, result=parsed(remote_execution_pb2.ActionResult, data, "result"))
        except (Missing, BadInput) as error:
            return Left(message=str(error))

    async def _keep(self, job: str, ended: Ended, result: Any) -> None:
        """Store the result of the action that the job has really run. What cannot be stored runs again next time."""
        try:
            found = await self._expected(ended)
            if found is None or not actions.runs(ended.payload, found[1]):
                _tell_why_not(job, ended, found)
            elif found[0].cacheable:
                if absent := await trees.looked(self._upstream, trees.missing_outputs(result)):
                    raise Missing(*absent[:3])
                await self._upstream.store(found[0].digest, result)
        except (Missing, BadInput, grpc.aio.AioRpcError) as error:
            _log.warning("the result of an action is not kept", job=job, reason=said(error)[:300])

    async def derived(self, ended: Ended, *, anew: bool = False) -> actions.Runnable | None:
        """Return the action that a job names, as it is in the storage; None if the job runs something else.

        anew: what the door remembers of it does not count. Raises Missing, BadInput, grpc.aio.AioRpcError.
        """
        found = await self._expected(ended, anew=anew)
        return None if found is None or not actions.runs(ended.payload, found[1]) else found[0]

    async def _expected(self, ended: Ended, *, anew: bool = False) -> tuple[actions.Runnable, JobRequest] | None:
        """Return the action that a job names, and the job that this door makes of it; None if it names none."""
        digest = actions.digest_of(ended.payload)
        if digest is None:
            return None
        wanted = await read_action(self._upstream, digest, anew=anew)
        return wanted, actions.request(wanted, self._settings, address=self._address)


def seen_by_clients(news: News) -> tuple[int, Mapping[str, str | None], str | None]:
    """Of how a job stands what its clients are told at once: its stage, who gave it up, and the bot that runs it."""
    stage = outcome.STAGES[news.state]
    return stage, news.withdrawn, news.bot if stage == remote_execution_pb2.ExecutionStage.EXECUTING else None


def _tell_why_not(job: str, ended: Ended, expected: tuple[actions.Runnable, JobRequest] | None) -> None:
    """Log why the result of a job is not kept for the action that it names."""
    differing = {} if expected is None else actions.other_settings(ended.payload, expected[1])
    if not differing:
        _log.error("a job does not run the action that it names, so its result is not kept", job=job)
        return
    told = "; ".join(f"{name}: there {theirs}, here {ours}" for name, (theirs, ours) in differing.items())
    _log.warning(
        "a door with other settings has made this job, so this door does not keep its result: "
        "give all doors of the pool the same in [farm]",
        job=job,
        differing=told,
    )


async def cached_result(upstream: Upstream, lookup: Any) -> Any:
    """Return the cached result of an action whose outputs are there; None without. Raises grpc.aio.AioRpcError."""
    found = await upstream.cached(lookup)
    try:
        if found is None or await trees.looked(upstream, trees.missing_outputs(found)):
            return None
    except BadInput:
        return None
    return found


async def read_action(upstream: Upstream, digest: Digest, *, anew: bool = False) -> actions.Runnable:
    """Read an action and its command from the storage. Raises Missing, BadInput, grpc.aio.AioRpcError.

    anew: also if they are remembered.
    """
    action = await upstream.read(digest, anew=anew)
    command = Digest.read(parsed(remote_execution_pb2.Action, action, "action").command_digest, "action.command_digest")
    return actions.runnable(digest, action, await upstream.read(command, anew=anew))
