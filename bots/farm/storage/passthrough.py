"""Calls for blobs and cached results, passed on to the storage: nothing of them is read or kept but the instance.

Clients name an instance of the pool, which the storage does not have. The door replaces it by that of the storage.

Results are stored by the door alone, after an action has run: a client that could store one would decide what all
others get for that action.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import NoReturn

import grpc
import grpc.aio
import structlog
from google.longrunning.operations_proto_pb2 import GetOperationRequest
from google.protobuf.message import DecodeError
from grpc import StatusCode

from bots.farm.storage.upstream import ACTION_CACHE, BYTESTREAM, CAS

#: Methods whose request and answer are one message each.
SINGLE = (
    *(f"{CAS}{name}" for name in ("FindMissingBlobs", "BatchUpdateBlobs", "BatchReadBlobs")),
    f"{ACTION_CACHE}GetActionResult",
    f"{BYTESTREAM}QueryWriteStatus",
)
#: Methods that answer with many messages, and the one that takes many.
ANSWERED_IN_PIECES = (f"{CAS}GetTree", f"{BYTESTREAM}Read")
TAKEN_IN_PIECES = f"{BYTESTREAM}Write"
#: The method that no client may call.
REFUSED = f"{ACTION_CACHE}UpdateActionResult"
WHY_REFUSED = "results of actions are stored by the farm itself, after it has run them"


#: Field 1 with an empty text, and as it begins.
_NO_NAME = b"\x0a\x00"
#: Where in a resource's name the instance ends.
_RESOURCE = re.compile(r"(^|/)(uploads|blobs|compressed-blobs)/")

#: Puts the storage's instance into a request.
Rename = Callable[[bytes], bytes]
#: Ends a call whose caller may not use blobs and results.
Admit = Callable[[grpc.aio.ServicerContext], Awaitable[None]]
#: How many calls may wait, for each one that may be passed on; more are asked to try again.
WAITING = 3
#: Seconds without a piece after which a client's stream has no place any more. A client that is there and neither reads
#: nor writes, such as one that is stopped in a debugger, would keep its place from all others.
STALLED = 60.0
_log = structlog.get_logger(__name__)


class Places:
    """How many calls are passed on at once, since each may need the memory of one of the largest messages.

    admit: asked before a call gets a place.
    """

    def __init__(self, admit: Admit, most: int) -> None:
        self._admit, self._free = admit, asyncio.Semaphore(most)
        self._room = most * (WAITING + 1)

    @asynccontextmanager
    async def place(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Give a place as soon as one is free. Ends the call if its caller may not have one, or too many wait."""
        await self._admit(context)
        if self._room == 0:
            await context.abort(StatusCode.UNAVAILABLE, "too many calls for blobs and results wait: try again")
        self._room -= 1
        try:
            async with self._free:
                yield
        finally:
            self._room += 1


def handlers(channel: grpc.aio.Channel, admit: Admit, *, instance: str, most: int) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of these methods by their names.

    channel: to the storage. instance: of the storage. most: calls of single messages at once, and of streams.
    """
    single, streams = Places(admit, most), Places(admit, most)
    found = {}
    for name in (*SINGLE, *ANSWERED_IN_PIECES):
        rename = partial(of_stream if name.startswith(BYTESTREAM) else of_message, instance=instance)
        if name in SINGLE:
            found[name] = grpc.unary_unary_rpc_method_handler(_single(channel, name, single, rename))
        else:
            found[name] = grpc.unary_stream_rpc_method_handler(_answered_in_pieces(channel, name, streams, rename))
    found[TAKEN_IN_PIECES] = grpc.stream_unary_rpc_method_handler(_taken_in_pieces(channel, streams, instance))
    found[REFUSED] = grpc.unary_unary_rpc_method_handler(_refusing(admit))
    return found


def of_message(request: bytes, *, instance: str) -> bytes:
    """Return a request with this instance. Its name is field 1 of all these messages, whose last value counts."""
    return request + (GetOperationRequest(name=instance).SerializeToString() or _NO_NAME)


def of_stream(request: bytes, *, instance: str) -> bytes:
    """Return a request of ByteStream with this instance in the resource's name, which is field 1 too."""
    try:
        name = GetOperationRequest.FromString(request).name
    except DecodeError:
        return request
    found = _RESOURCE.search(name)
    if found is None:
        return request
    below = name[found.start() :].removeprefix("/")
    renamed = GetOperationRequest(name=f"{instance}/{below}" if instance else below)
    return request + bytes(renamed.SerializeToString())


async def stalled(context: grpc.aio.ServicerContext) -> NoReturn:
    """End a stream that has stood still, and has no place any more."""
    _log.warning("a stream of a client is ended: it has stood still", peer=context.peer(), seconds=STALLED)
    await context.abort(StatusCode.UNAVAILABLE, f"the stream has stood still for {STALLED:.0f} s: try again")
    raise AssertionError("abort raises")


async def passed_on(error: grpc.aio.AioRpcError, context: grpc.aio.ServicerContext) -> NoReturn:
    """End a call with the error of the storage."""
    code, details = error.code(), error.details() or ""
    # Some clients do not try again what has exceeded a deadline, and this one was not theirs.
    if code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED):
        code, details = StatusCode.UNAVAILABLE, f"the storage cannot be reached: {details}"
    await context.abort(code, details, tuple(error.trailing_metadata() or ()))
    raise AssertionError("abort raises")


def _refusing(admit: Admit) -> Callable[..., Awaitable[bytes]]:
    async def handle(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await admit(context)
        await context.abort(StatusCode.PERMISSION_DENIED, WHY_REFUSED)
        raise AssertionError("abort raises")

    return handle


def _single(channel: grpc.aio.Channel, name: str, places: Places, rename: Rename) -> Callable[..., Awaitable[bytes]]:
    call = channel.unary_unary(name)

    async def handle(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            async with places.place(context):
                found: bytes = await call(rename(request), timeout=context.time_remaining())
            return found
        except grpc.aio.AioRpcError as error:
            await passed_on(error, context)

    return handle


def _answered_in_pieces(
    channel: grpc.aio.Channel, name: str, places: Places, rename: Rename
) -> Callable[..., Awaitable[None]]:
    call = channel.unary_stream(name)

    async def handle(request: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            async with places.place(context):
                pieces = call(rename(request), timeout=context.time_remaining())
                try:
                    async for piece in pieces:
                        async with asyncio.timeout(STALLED):
                            await context.write(piece)
                finally:
                    pieces.cancel()
        except TimeoutError:
            await stalled(context)
        except grpc.aio.AioRpcError as error:
            await passed_on(error, context)

    return handle


def _taken_in_pieces(channel: grpc.aio.Channel, places: Places, instance: str) -> Callable[..., Awaitable[bytes]]:
    call = channel.stream_unary(TAKEN_IN_PIECES)

    async def renamed(pieces: AsyncIterator[bytes], stands: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Yield the pieces; end without the last one, and let `stands` be done, once none has come for STALLED."""
        first, coming = True, aiter(pieces)
        while True:
            try:
                async with asyncio.timeout(STALLED):
                    piece = await anext(coming)
            except StopAsyncIteration:
                return
            except TimeoutError:
                stands.set_result(None)
                await asyncio.sleep(STALLED)  # the call is cancelled meanwhile: its storage gets no end
                return
            # The name stands in the first piece, and first in it. Others may repeat it.
            yield of_stream(piece, instance=instance) if first or piece.startswith(_NO_NAME[:1]) else piece
            first = False

    async def handle(pieces: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        stands = asyncio.get_running_loop().create_future()
        try:
            async with places.place(context):
                written = call(renamed(pieces, stands), timeout=context.time_remaining())
                stands.add_done_callback(lambda _: written.cancel())
                found: bytes = await written
            return found
        except asyncio.CancelledError:
            if not stands.done():
                raise
        except grpc.aio.AioRpcError as error:
            await passed_on(error, context)
        await stalled(context)

    return handle
