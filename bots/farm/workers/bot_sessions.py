"""CreateBotSession and UpdateBotSession: a worker's session is a bot's session, and each of its calls is a sync.

No door remembers a session: its name has all that is needed, so a worker goes on at any door. A call without news is
held. Workers such as buildbox-worker end at every error but UNAVAILABLE, so that is what they get for whatever passes.
"""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import structlog
from leasehold.errors import BadInput, Conflict, LeaseholdError, NotFound, NotReady
from pydantic import ValidationError

from bots.farm.identity import Identity
from bots.farm.protos import remote_execution_pb2, remote_workers_pb2
from bots.farm.refusals import Stopping
from bots.farm.storage import trees
from bots.farm.storage.upstream import Digest, Missing, Upstream, parsed
from bots.farm.workers import leases
from bots.farm.workers.leases import SessionName
from bots.farm.workers.payloads import Payloads
from bots.gateway.held_calls import HeldSessions, KnownState, NewestCalls
from bots.gateway.long_poll import LongPoll, LongPolls
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.workers import Batcher, SessionOpener, WorkerPool
from bots.protocol import Sync
from bots.sync.call import Call, Due, HeldCall, NewCall
from bots.sync.settle import SyncService
from schema import clock
from schema.moves.sessions import RENEWED_BELOW
from schema.postgres.engine import Database
from schema.timing import Timing

#: The part of its deadline for which a call without news is held, and the most seconds.
SHARE, MOST_HELD = 0.8, 50.0
#: Sessions that may wait to be opened.
OPENINGS = 10_000

_log = structlog.get_logger(__name__)


class NewerCall(NotReady):
    """Another call of the same session came after this one; its worker does not wait for this one any more."""

    def __init__(self) -> None:
        super().__init__("a newer call of this session has come")


class BotSessions:
    """The sessions of workers at one door. Only the event loop may use it."""

    def __init__(
        self,
        identity: Identity,
        upstream: Upstream,
        database: Database,
        bots: WorkerPool,
        sync_service: SyncService,
        polls: LongPolls,
        metrics: GatewayMetrics,
        *,
        timing: Timing,
    ) -> None:
        self._identity, self._upstream = identity, upstream
        self._opener = SessionOpener(database, bots, queue=OPENINGS, timing=timing, tracer=sync_service.tracer)
        # A worker whose call is held may run actions, and needs time to find another door if this one is killed.
        self._held_sessions = HeldSessions(database, bots, ttl=timing.ttl, metrics=metrics, below=RENEWED_BELOW)
        self._payloads = Payloads(upstream, bots)
        self._batches = Batcher[Call, Due | HeldCall](sync_service.settle, bots)
        self._topic = polls.topic("bots", self._held_sessions.read_facts, run=bots.run)
        self._newest_calls, self._numbers = NewestCalls(), itertools.count()

    @property
    def held(self) -> int:
        """How many calls of workers are here at the moment."""
        return len(self._newest_calls)

    def close(self) -> None:
        """Renew no sessions any more."""
        self._held_sessions.close()

    async def create(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Open a session. Its worker's token must permit what it declares."""
        return await _lasting(self._create(request, context))

    async def update(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Take a worker's report and return the leases that it should have; may hold an answer without news."""
        return await _lasting(self._update(request, context))

    async def _create(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        asked = parsed(remote_workers_pb2.CreateBotSessionRequest, request, "request")
        caller = await self._identity.worker(context)
        wanted = leases.opening(
            asked.bot_session, instance=self._identity.called(asked.parent, "parent") or caller.instance
        )
        caller.check_session(wanted.bot, instance=wanted.instance, properties=wanted.properties)
        opened = await self._opener.open(wanted)
        name = SessionName(asked.parent, opened.bot, opened.epoch, opened.secret)
        told = Due([], seq=0, expires_in=opened.expires_in, sync_in=opened.sync_in)
        data: bytes = leases.answer(asked.bot_session, name, told, {}, now=clock.wall()).SerializeToString()
        return data

    async def _update(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        asked = parsed(remote_workers_pb2.UpdateBotSessionRequest, request, "request")
        caller = await self._identity.worker(context)
        name, said = SessionName.parse(asked.name), asked.bot_session
        caller.check_bot(name.bot)
        left = context.time_remaining()
        large = {each: await self._upstream.write(data) for each, data in leases.large(said).items()}
        absent = {each: await self._absent(action) for each, action in leases.not_run(said).items()}
        sync = Sync(
            bot=name.bot,
            epoch=name.epoch,
            secret=name.secret,
            seq=1,
            status=leases.status(said),  # type: ignore[arg-type]  # one of the words that Sync names
            leases=leases.reports(said, large, absent),
            wait=MOST_HELD if left is None else max(0.0, min(left * SHARE, MOST_HELD)),
        )
        async with self._topic.watch(None) as watch:
            with self._newest_calls.holding(asked.name, next(self._numbers), watch):
                told = await self._told(sync, watch)
                digests = await self._payloads.digests(told.leases)
                if unfit := [each for each in told.leases if (each.job_id, each.fence) not in digests]:
                    refused = leases.refused(told.leases, unfit)
                    told = await self._settled(self._call(sync.model_copy(update={"leases": refused, "wait": 0.0})))
        data: bytes = leases.answer(said, name, told, digests, now=clock.wall()).SerializeToString()
        return data

    async def _absent(self, digest: Digest) -> int:
        """Return how many blobs that an action needs the storage does not have, itself too; 0 if it does not tell."""
        try:
            action = parsed(remote_execution_pb2.Action, await self._upstream.read(digest, anew=True), "action")
            return len(await trees.looked(self._upstream, trees.missing_of_action(action)))
        except Missing as error:
            return len(error.digests)
        except (BadInput, grpc.aio.AioRpcError):
            return 0

    async def _told(self, sync: Sync, watch: LongPoll) -> Due:
        """Settle a call, and hold it if there is no news. Raises NewerCall, Stopping, Conflict, NotFound."""
        answer = await self._answered(self._call(sync))
        if isinstance(answer, Due):
            return answer
        known = KnownState(answer.bot_id, answer.epoch, answer.drain, answer.expires)
        watch.add(str(answer.bot_id), known.news)
        with self._held_sessions.renewing(known):
            await watch.wait(sync.wait)
        if watch.replaced:
            raise NewerCall
        if self._topic.stopping:
            raise Stopping
        return await self._settled(answer)

    async def _settled(self, call: Call) -> Due:
        answer = await self._answered(call)
        assert isinstance(answer, Due), "it does not wait"
        return answer

    async def _answered(self, call: Call) -> Due | HeldCall:
        bot = call.sync.bot if isinstance(call, NewCall) else call.bot
        try:
            return await self._batches.answer(call, bot=bot)
        except Conflict as error:
            if error.code == "session_over":
                raise NotFound(f"name: {error}") from None
            if error.code == "stale_seq":
                raise NewerCall from None
            raise

    @staticmethod
    def _call(sync: Sync) -> NewCall:
        return NewCall(sync, clock.monotonic(), of_worker=True)


async def _lasting(answer: Awaitable[bytes]) -> bytes:
    """Return the answer. Raises LeaseholdError, ValidationError, and NotReady for what may pass."""
    try:
        return await answer
    except (LeaseholdError, ValidationError):
        raise
    except Exception as error:
        _log.warning("a call of a worker failed", kind=type(error).__name__)
        raise NotReady("the door cannot answer now; its log says why") from error


def handlers(sessions: BotSessions, answering: Callable[..., Any]) -> dict[str, Any]:
    """Return the handlers of the service by their names. answering: ends calls with the status of what they raise."""
    service = f"/{remote_workers_pb2.DESCRIPTOR.package}.Bots/"
    single = grpc.unary_unary_rpc_method_handler
    return {
        f"{service}CreateBotSession": single(answering(sessions.create)),
        f"{service}UpdateBotSession": single(answering(sessions.update)),
    }
