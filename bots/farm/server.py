"""The door's server: one process that answers build clients until it is asked to stop."""

import asyncio
import errno
import signal
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
import uvloop
from google.longrunning.operations_proto_pb2 import CancelOperationRequest, GetOperationRequest
from google.protobuf.empty_pb2 import Empty
from leasehold.errors import BadInput, LeaseholdError

from bots.farm.execution import operations
from bots.farm.execution.builds import Builds
from bots.farm.execution.endings import Endings
from bots.farm.execution.jobs import Jobs, Submit, Why
from bots.farm.execution.streams import Execution
from bots.farm.execution.watches import Watches
from bots.farm.identity import DoorCaller, Identity
from bots.farm.metrics import DoorMetrics
from bots.farm.refusals import answering, end, streaming
from bots.farm.settings import FarmSettings, timing_of_workers
from bots.farm.storage import capabilities, passthrough
from bots.farm.storage.upstream import API, CAPABILITIES, CHANNEL_OPTIONS, Upstream, open_channel, parsed, said
from bots.farm.workers import bot_sessions
from bots.farm.workers.bot_sessions import BotSessions
from bots.gateway.identity.bearers import SignedTokens, TokenCache
from bots.gateway.long_poll import LongPolls
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.workers import worker_pools
from bots.sync.settle import SyncService
from schema.postgres.engine import Database
from schema.postgres.notify import Wakeups
from schema.timing import Timing

_log = structlog.get_logger(__name__)
T = TypeVar("T")
EXECUTION, OPERATIONS = f"/{API}.Execution/", "/google.longrunning.Operations/"
#: Seconds within which calls under way must end when the door stops. Streams are told at once to wait elsewhere.
STOP_WITHIN = 5.0
#: Seconds between two looks whether the storage of this door still runs.
LOOK_EVERY = 0.5
#: Seconds between two looks whether the storage answers, and what it means if it does not.
LOOK_AT_STORAGE, AWAY = 5.0, (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
#: Calls that may wait until the door begins with them.
MOST_PENDING = 100_000
#: Clients send batches of at most `capabilities.MOST_BATCH`, so larger messages only take memory.
SERVER_OPTIONS = (
    *(each for each in CHANNEL_OPTIONS if each[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", 2 * capabilities.MOST_BATCH),
    ("grpc.so_reuseport", 0),
    # When a door starts again, all clients call at once. gRPC would end much of what exceeds 1,000 calls, and all that
    # is not begun after 30 s, with CANCELLED, at which clients give up.
    ("grpc.server.max_pending_requests", MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", 300),
)
#: Pieces of database work that may wait, and seconds for which a verified token is remembered.
QUEUE, REMEMBER_TOKENS = 100_000, 5.0


class Door:
    """The door of one pool. It holds no state that a restart would miss: caches, and the calls that wait.

    wakeups: that bring news of jobs and bots. submit, why: see `Submit` and `Why`. sync_service: settles the calls of
    workers. signed: verifies tokens of other issuers; None = there are none.
    """

    def __init__(
        self,
        database: Database,
        settings: FarmSettings,
        *,
        timing: Timing,
        wakeups: Wakeups,
        submit: Submit,
        why: Why,
        sync_service: SyncService,
        signed: SignedTokens | None = None,
    ) -> None:
        self._database, self._settings, self._timing = database, settings, timing
        self._wakeups, self._submit, self._why = wakeups, submit, why
        self._sync_service, self._signed = sync_service, signed
        self.metrics = DoorMetrics()

    async def serve(self, on_ready: Callable[[str], None], *, until: Awaitable[T]) -> T:
        """Serve until something has happened, and return it.

        on_ready: told the address once the door answers. Raises BadInput if it cannot listen there.
        """
        settings = self._settings
        if settings.cas is None:
            raise BadInput("farm.cas", "is not set: name the server that keeps blobs, such as grpc://127.0.0.1:8981")
        channel = open_channel(settings.cas, credentials_of_storage(settings))
        server = grpc.aio.server(options=SERVER_OPTIONS)
        address = listen(server, settings)
        polls, endings, watches, builds, sessions, handlers = self._parts(channel, settings.bots_reach or address)
        server.add_generic_rpc_handlers(_by_service(handlers))
        await builds.try_to_write()  # so that it knows the builds that began at other doors, or before its restart
        await server.start()
        on_ready(settings.bots_reach if settings.is_everywhere and settings.bots_reach else address)
        loops = [asyncio.create_task(each.run()) for each in (watches, builds) if each is not None]
        storage = Upstream(channel, instance=settings.cas_instance)
        loops.append(asyncio.create_task(_tell_of_storage(storage, settings.cas)))
        happened = await until
        for each in loops:
            each.cancel()
        polls.end()
        await server.stop(STOP_WITHIN)
        await endings.close()
        with suppress(Exception):
            await builds.write()
        sessions.close()
        await polls.close()
        await channel.close()
        return happened

    def _parts(
        self, channel: grpc.aio.Channel, address: str
    ) -> tuple[LongPolls, Endings, Watches | None, Builds, BotSessions, dict[str, grpc.RpcMethodHandler]]:
        pools, timing, metrics = worker_pools(self._database, queue=QUEUE), self._timing, GatewayMetrics()
        workers, bots = pools.callers, pools.bots
        upstream = Upstream(channel, instance=self._settings.cas_instance)
        identity = Identity(TokenCache(seconds=REMEMBER_TOKENS, signed=self._signed), workers, self._settings)
        polls = LongPolls(wakeups=self._wakeups, poll=timing.poll, metrics=metrics)
        abandoned = self._settings.abandoned_seconds
        jobs = Jobs(self._database, workers, self._submit, watched_seconds=abandoned)
        endings = Endings(
            upstream, workers, jobs, polls, self._settings, metrics=self.metrics, address=address, why=self._why
        )
        watches = None if abandoned is None else Watches(workers, seconds=abandoned, sync=timing.sync)
        builds = Builds(workers, earlier_first=self._settings.earlier_build_first)
        execution = Execution(
            upstream,
            endings,
            workers,
            jobs,
            identity,
            self._settings,
            watches=watches,
            metrics=self.metrics,
            builds=builds,
            address=address,
            sync=timing.sync,
        )

        async def admit(context: grpc.aio.ServicerContext) -> None:
            try:
                await identity.admit(context)
            except Exception as error:
                await end(error, context)

        sessions = BotSessions(
            identity,
            upstream,
            self._database,
            bots,
            self._sync_service,
            polls,
            metrics,
            timing=timing_of_workers(timing),
        )
        self.metrics.watch(lambda: sessions.held)
        listed = partial(operations.answer, identity=identity, workers=workers, endings=endings)
        own = _own_handlers(execution, identity, upstream, listed) | bot_sessions.handlers(sessions, answering)
        passed = passthrough.handlers(
            channel, admit, instance=self._settings.cas_instance, most=self._settings.blob_calls
        )
        return polls, endings, watches, builds, sessions, passed | own


def listen(server: grpc.aio.Server, settings: FarmSettings) -> str:
    """Let a server listen where the settings say, and return its address.

    Raises BadInput if it cannot listen there, or a file for TLS cannot be used.
    """
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    secure = _credentials(settings)
    try:
        if secure is None:
            return f"grpc://{host}:{server.add_insecure_port(f'{host}:{settings.port}')}"
        return f"grpcs://{host}:{server.add_secure_port(f'{host}:{settings.port}', secure)}"
    except RuntimeError:
        field, why = _why_not(settings)
        raise BadInput(f"farm.{field}", f"cannot listen on {host}:{settings.port}{why}") from None


def _why_not(settings: FarmSettings) -> tuple[str, str]:
    """Which setting keeps the door from listening, and why: gRPC only logs the reason."""
    try:
        kind, *_, place = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as tried:
            tried.bind(place)
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        return "port" if is_taken else "host", f": {error.strerror}"
    return "port", ""


def _credentials(settings: FarmSettings) -> grpc.ServerCredentials | None:
    """Read the files for TLS; None without."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    authorities, cert, key = _files_for_tls(settings, "tls_client_ca", "tls_cert", "tls_key")
    return grpc.ssl_server_credentials([(key, cert)], authorities, require_client_auth=authorities is not None)


def credentials_of_storage(settings: FarmSettings) -> grpc.ChannelCredentials | None:
    """Read the files for TLS to the storage; None without. Raises BadInput if one cannot be used."""
    if not (settings.cas or "").startswith("grpcs:"):
        return None
    authorities, cert, key = _files_for_tls(settings, "cas_ca", "cas_cert", "cas_key")
    return grpc.ssl_channel_credentials(authorities, key, cert)


def _files_for_tls(settings: FarmSettings, ca: str, cert: str, key: str) -> list[Any]:
    """Read PEM files by the names of their settings; None for one that is not set. Raises BadInput, naming the setting.

    gRPC takes what is no certificate, and then refuses every connection: so they are tried here.
    """
    paths = {each: getattr(settings, each) for each in (ca, cert, key)}
    found = {name: None if path is None else _read(name, path) for name, path in paths.items()}
    for name in (ca, cert):
        if found[name] is not None:
            _try(
                name,
                "holds no certificate in PEM form",
                partial(ssl.SSLContext.load_verify_locations, cafile=paths[name]),
            )
    if found[cert] is not None:
        wrong = f"holds no key in PEM form that belongs to the certificate of farm.{cert}"
        _try(key, wrong, partial(ssl.SSLContext.load_cert_chain, certfile=paths[cert], keyfile=paths[key]))
    return [*found.values()]


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"farm.{name}", f"cannot be used: {error.strerror}") from None


def _try(name: str, wrong: str, load: Callable[[ssl.SSLContext], None]) -> None:
    try:
        load(ssl.create_default_context())
    except (OSError, ssl.SSLError):
        raise BadInput(f"farm.{name}", wrong) from None


def _by_service(handlers: Mapping[str, grpc.RpcMethodHandler]) -> list[grpc.GenericRpcHandler]:
    """The handlers of all methods, given by names such as `/SERVICE/METHOD`; others are not implemented."""
    found: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for name, handler in handlers.items():
        _, service, method = name.split("/")
        found.setdefault(service, {})[method] = handler
    return [grpc.method_handlers_generic_handler(service, methods) for service, methods in found.items()]


def _own_handlers(
    execution: Execution,
    identity: Identity,
    upstream: Upstream,
    listed: Callable[[bytes, DoorCaller], Awaitable[bytes]],
) -> dict[str, grpc.RpcMethodHandler]:
    """The methods that the door answers itself. listed: answers ListOperations."""

    async def list_all(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await listed(request, await identity.caller(context))

    async def get(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        asked = parsed(GetOperationRequest, request, "request")
        return await execution.get(asked.name, await identity.caller(context))

    async def cancel(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        asked = parsed(CancelOperationRequest, request, "request")
        await execution.cancel(asked.name, await identity.caller(context))
        return bytes(Empty().SerializeToString())

    async def tell(_: bytes, __: grpc.aio.ServicerContext) -> Any:
        # Bazel 2 asks this without the token that it sends with all other calls.
        return (await capabilities.answer(upstream)).SerializeToString()

    single, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    return {
        f"{EXECUTION}Execute": stream(streaming(execution.execute)),
        f"{EXECUTION}WaitExecution": stream(streaming(execution.wait)),
        f"{OPERATIONS}GetOperation": single(answering(get)),
        f"{OPERATIONS}ListOperations": single(answering(list_all)),
        f"{OPERATIONS}CancelOperation": single(answering(cancel)),
        f"{CAPABILITIES}GetCapabilities": single(answering(tell)),
    }


def run(
    door: Door, on_ready: Callable[[str], None], *, beside: "subprocess.Popen[bytes] | None" = None
) -> signal.Signals:
    """Serve in the main thread until SIGTERM or SIGINT, and return which.

    beside: a process of storage without which the door cannot serve. Raises LeaseholdError when it has ended, and
    BadInput as `Door.serve` does.
    """

    async def serve() -> signal.Signals:
        loop, stopped = asyncio.get_running_loop(), asyncio.Queue[signal.Signals | None]()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.put_nowait, number)
        watching, until = loop.create_task(_until_ended(beside, stopped)), loop.create_task(stopped.get())
        try:
            found = await door.serve(on_ready, until=until)
        finally:
            watching.cancel()
            until.cancel()
        if found is None:
            raise LeaseholdError("the storage has ended, see its messages; start the door again")
        return found

    # It takes a quarter less processor time for an action than the loop of asyncio.
    return uvloop.run(serve())


async def _tell_of_storage(upstream: Upstream, address: str) -> None:
    """Log that the storage does not answer, and that it does again, until this is cancelled."""
    is_away = False
    while True:
        await asyncio.sleep(LOOK_AT_STORAGE)
        try:
            await upstream.look()
        except grpc.aio.AioRpcError as error:
            if not is_away and error.code() in AWAY:
                _log.warning("the storage does not answer, so calls wait for it", cas=address, reason=said(error))
                is_away = True
        else:
            if is_away:
                _log.info("the storage answers again", cas=address)
            is_away = False


async def _until_ended(process: "subprocess.Popen[bytes] | None", told: "asyncio.Queue[signal.Signals | None]") -> None:
    while process is not None and process.poll() is None:
        await asyncio.sleep(LOOK_EVERY)
    if process is not None:
        told.put_nowait(None)
