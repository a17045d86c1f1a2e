"""Execute and WaitExecution: a client learns how its action stands until the action is over.

The name of an operation is that of a submission in the database. So a client that has lost its door waits again by the
name, at the same door after a restart or at any other.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import grpc.aio
from google.longrunning.operations_proto_pb2 import Operation
from leasehold.errors import BadInput, Forbidden

from bots.farm.execution import actions
from bots.farm.execution.builds import Builds
from bots.farm.execution.endings import Endings, Gone, Watched, cached_result, read_action
from bots.farm.execution.jobs import Found, Jobs, News, RanBefore
from bots.farm.execution.outcome import STAGES, cancelled
from bots.farm.execution.request_metadata import metadata
from bots.farm.execution.watches import Watches
from bots.farm.identity import DoorCaller, Identity, no_operation, operation_name, submission_of
from bots.farm.metrics import DoorMetrics
from bots.farm.protos import remote_execution_pb2
from bots.farm.settings import FarmSettings
from bots.farm.storage import capabilities
from bots.farm.storage.upstream import Digest, Upstream, parsed
from bots.gateway.workers import WorkerPool
from schema.moves import cancel as cancel_moves
from schema.requests import JobRequest
from schema.validation import PRIORITY_MAX, PRIORITY_MIN


class Execution:
    """The calls of the service Execution, and of Operations for its operations.

    watches: None = what nobody watches goes on. address: of this door, by which bots reach it. sync: the bots' sync
    period, seconds.
    """

    def __init__(
        self,
        upstream: Upstream,
        endings: Endings,
        workers: WorkerPool,
        jobs: Jobs,
        identity: Identity,
        settings: FarmSettings,
        *,
        watches: Watches | None,
        metrics: DoorMetrics,
        builds: Builds,
        address: str,
        sync: float,
    ) -> None:
        self._upstream, self._endings, self._workers, self._jobs = upstream, endings, workers, jobs
        self._watches, self._metrics, self._builds = watches, metrics, builds
        self._identity, self._settings, self._address, self._sync = identity, settings, address, sync
        self._cancelling: set[asyncio.Task[None]] = set()

    async def execute(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answer Execute: from the cache, or by a job that is new or runs already."""
        caller = await self._identity.caller(context)
        asked = parsed(remote_execution_pb2.ExecuteRequest, request, "request")
        instance = self._identity.instance(caller, asked.instance_name)
        digest = Digest.read(asked.action_digest, "action_digest")
        if asked.digest_function not in (remote_execution_pb2.DigestFunction.UNKNOWN, capabilities.SHA256):
            raise BadInput("digest_function", "must be SHA256, the only one that the door announces")
        priority = asked.execution_policy.priority
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise BadInput("execution_policy.priority", f"must be from {PRIORITY_MIN} to {PRIORITY_MAX}")
        lookup = None if asked.skip_cache_lookup else _lookup(asked)
        wanted, found = await self._read(digest, lookup)
        told = metadata(context.invocation_metadata() or ())
        if found is None:
            kept: dict[str, str] = {key: told[key] for key in self._settings.metadata if key in told}
            job = actions.request(
                wanted, self._settings, address=self._address, instance=instance, priority=priority, metadata=kept
            )
            behind = self._builds.behind(instance, told)
            found = await self._submitted(caller, wanted, job, behind=behind, lookup=lookup)
        if not isinstance(found, Found):
            self._metrics.answered("cached", told)
            self._builds.note(instance, told, "cached")
            response = remote_execution_pb2.ExecuteResponse(result=found, cached_result=True)
            made = _operation(operation_name(instance, f"cached-{digest.hash}"), digest, None, response)
            yield bytes(made.SerializeToString())
            return
        answer = "new" if found.created else "joined"
        is_over = self._metrics.answered(answer, told)
        self._builds.note(instance, told, answer)
        async for each in self._followed(found, digest, told):
            yield each
        is_over()

    async def wait(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answer WaitExecution, whichever door has begun the operation."""
        caller = await self._identity.caller(context)
        name = parsed(remote_execution_pb2.WaitExecutionRequest, request, "request").name
        found = await self._found(caller, name)
        async for each in self._followed(found, None, metadata(context.invocation_metadata() or ())):
            yield each

    async def get(self, name: str, caller: DoorCaller) -> bytes:
        """Return an operation as it stands. Raises NotFound."""
        found = await self._found(caller, name)
        try:
            return await self._now(found, None, await self._endings.news(found.job))
        except Gone:
            raise no_operation(name) from None

    async def cancel(self, name: str, caller: DoorCaller) -> None:
        """Cancel a submission; its job ends if nobody else wants it. Raises NotFound.

        A client that hangs up meanwhile, as it may at Ctrl-C, has cancelled all the same.
        """
        cancelling = asyncio.create_task(self._cancelled(name, caller))
        self._cancelling.add(cancelling)
        cancelling.add_done_callback(self._cancelling.discard)
        await asyncio.shield(cancelling)

    async def _cancelled(self, name: str, caller: DoorCaller) -> None:
        found = await self._found(caller, name)
        await self._workers.run(
            lambda connection: cancel_moves.cancel(
                connection, [found.id], instances=caller.instances, sync=self._sync, actor=caller.actor
            )
        )

    async def _read(self, digest: Digest, lookup: Any) -> tuple[actions.Runnable, Any]:
        """Return an action and its cached result, None without. lookup: in the cache; None = it is not looked at.

        An error of the action comes before one of the cache, which counts only if the action is cacheable.
        """
        if lookup is None:
            return await read_action(self._upstream, digest), None
        reading = read_action(self._upstream, digest), cached_result(self._upstream, lookup)
        wanted, result = await asyncio.gather(*reading, return_exceptions=True)
        if isinstance(wanted, BaseException):
            raise wanted
        if not wanted.cacheable:
            return wanted, None
        if isinstance(result, BaseException):
            raise result
        return wanted, result

    async def _submitted(
        self, caller: DoorCaller, wanted: actions.Runnable, job: JobRequest, *, behind: int, lookup: Any
    ) -> Any:
        """Submit the job of an action, or join the one that runs it already, and return the submission.

        Returns the result instead if a job has succeeded whose end no door has seen, as during a restart: it is put
        into the cache first. behind: steps by which the job is less urgent than its client wants. lookup: see `_read`.
        A result is for everybody, as one of the cache is; what would be a job of its own, or joins one, has to keep to
        the caller's ceiling.
        """
        refused = None
        if not caller.may_use_priority(job.priority):
            ceiling = caller.priority_ceiling
            refused = Forbidden(f"execution_policy.priority: this token may not be more urgent than {ceiling}")
        elif wanted.command is not None:
            await self._upstream.write(wanted.command)
        if behind:
            job = job.model_copy(update={"priority": min(job.priority + behind, PRIORITY_MAX)})
        complete = partial(actions.reserved, wanted=wanted)
        unless = actions.key_of(wanted.digest) if wanted.cacheable and lookup is not None else None
        async with self._endings.listening() as since:
            found = await self._jobs.submit(job, caller, complete, unless=unless, refused=refused)
            if isinstance(found, RanBefore):
                with suppress(Gone):
                    await self._endings.response(found.job)
                result = await cached_result(self._upstream, lookup)
                if result is not None:
                    return result
                found = await self._jobs.submit(job, caller, complete, refused=refused)
            if isinstance(found, Found) and found.created:
                self._endings.watch_new(found.job, since)
            return found

    async def _found(self, caller: DoorCaller, name: str) -> Found:
        submission = submission_of(name)
        found = await self._jobs.find(submission, instances=caller.instances)
        if found is None:
            raise no_operation(name)
        return found

    async def _followed(self, found: Found, digest: Digest | None, told: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield what `_watched` does, and let the submission and its build count meanwhile."""
        watching = nullcontext() if self._watches is None else self._watches.watching(found.id)
        with self._metrics.waiting(), self._builds.waiting(found.instance, told), watching:
            async for each in self._watched(found, digest):
                yield each
        if self._watches is not None:
            self._watches.end(found.id)

    async def _watched(self, found: Found, digest: Digest | None) -> AsyncIterator[bytes]:
        """Yield the operation at once, when it has changed, again after a while, and when it is done."""
        watched, again = self._endings.watch(found.job), self._settings.repeat_seconds
        try:
            news = await watched.after(None, again)
            while True:
                told = _shown(news, found)
                yield await self._now(found, digest, news, watched)
                if told is None:
                    return
                is_new = True
                while is_new and _shown(news, found) == told:
                    before, news = news, await watched.after(news, again)
                    is_new = news is not before
        except Gone:
            raise no_operation(operation_name(found.instance, found.id)) from None

    async def _now(self, found: Found, digest: Digest | None, news: News, watched: Watched | None = None) -> bytes:
        is_over = news.is_final and found.id not in news.withdrawn
        response = await self._endings.response(found.job, watched) if is_over else None
        return bytes(operation(found, news, response, digest=digest).SerializeToString())


def _shown(news: News, found: Found) -> int | None:
    """The stage that a client is told; None once its operation is done."""
    return None if news.is_final or found.id in news.withdrawn else STAGES[news.state]


def _lookup(asked: Any) -> Any:
    """The look-up in the cache that goes with a request."""
    return remote_execution_pb2.GetActionResultRequest(
        action_digest=asked.action_digest,
        inline_stdout=asked.inline_stdout,
        inline_stderr=asked.inline_stderr,
        inline_output_files=asked.inline_output_files,
    )


def operation(found: Found, news: News, response: Any, *, digest: Digest | None = None) -> Operation:
    """Return a submission as an operation. response: the ExecuteResponse of its job, None while that is not over."""
    if found.id in news.withdrawn:
        response = remote_execution_pb2.ExecuteResponse(message=f"job {found.job}")
        told = cancelled(news.withdrawn[found.id], rest="; the job goes on for others who share it")
        response.status.code, response.status.message = told
    return _operation(operation_name(found.instance, found.id), digest, news, response)


def _operation(name: str, digest: Digest | None, news: News | None, response: Any) -> Operation:
    """An operation as a message; with a response it is done."""
    told = remote_execution_pb2.ExecuteOperationMetadata()
    if digest is not None:
        told.action_digest.CopyFrom(digest.message)
    if news is not None:
        told.partial_execution_metadata.queued_timestamp.FromDatetime(news.queued_at)
        told.partial_execution_metadata.worker = news.bot or ""
        told.stage = STAGES[news.state]  # type: ignore[assignment]  # the enum's values are numbers
    found = Operation(name=name, done=response is not None)
    if response is not None:
        told.stage = remote_execution_pb2.ExecutionStage.COMPLETED
        found.response.Pack(response)
    found.metadata.Pack(told)
    return found
