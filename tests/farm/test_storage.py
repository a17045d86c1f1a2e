"""Clients that stand still, and storage that answers rubbish. The storage is one of the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from bots.farm.storage import passthrough
from bots.farm.storage.upstream import BYTESTREAM, CAS, Digest, Upstream

PIECE, PIECES = b"x" * 2**20, 64
SERVICE = BYTESTREAM.strip("/")


async def answer(_: bytes, __: Any) -> AsyncIterator[bytes]:
    for _ in range(PIECES):
        yield PIECE


async def take(pieces: AsyncIterator[bytes], _: Any) -> bytes:
    return b"%d" % len([piece async for piece in pieces])


async def served(handlers: dict[str, grpc.RpcMethodHandler], service: str = SERVICE) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def beside(stalls: Callable[[grpc.aio.Channel], Awaitable[grpc.aio.Call]]) -> tuple[list[int], grpc.StatusCode]:
    """Let a client stall in the only place; return the bytes that another one reads and writes, and how the first ends.

    Both have connections of their own.
    """

    async def admit(_: Any) -> None: ...

    storage, address = await served({
        "Read": grpc.unary_stream_rpc_method_handler(answer),
        "Write": grpc.stream_unary_rpc_method_handler(take),
    })  # fmt: skip
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address) as behind:
        passed = passthrough.handlers(behind, admit, instance="", most=1)
        door, front = await served({name.rpartition("/")[2]: each for name, each in passed.items() if SERVICE in name})
        async with grpc.aio.insecure_channel(front, own) as first, grpc.aio.insecure_channel(front, own) as second:
            call = await stalls(first)
            read = [len(piece) async for piece in second.unary_stream(f"{BYTESTREAM}Read")(b"", timeout=20)]
            written = await second.stream_unary(f"{BYTESTREAM}Write")(iter([b"a", b"b"]), timeout=20)
            with suppress(grpc.aio.AioRpcError):
                while isinstance(call, grpc.aio.UnaryStreamCall) and await call.read() is not grpc.aio.EOF:
                    pass
            code = await call.code()
        await door.stop(None)
    await storage.stop(None)
    return [sum(read), int(written)], code


async def reading(channel: grpc.aio.Channel) -> grpc.aio.Call:
    call = channel.unary_stream(f"{BYTESTREAM}Read")(b"")
    await call.read()
    return call


async def writing(channel: grpc.aio.Channel) -> grpc.aio.Call:
    call = channel.stream_unary(f"{BYTESTREAM}Write")()
    await call.write(b"a")
    return call


@pytest.mark.parametrize("stalls", [reading, writing])
def test_a_stream_that_stands_still_is_ended_and_its_place_is_free(
    stalls: Callable[[grpc.aio.Channel], Awaitable[grpc.aio.Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough, "STALLED", 2.0)  # longer than a busy machine lets the other client wait
    with capture_logs() as logs:
        found, code = asyncio.run(beside(stalls))
    assert found == [PIECES * len(PIECE), 2]
    assert [log["log_level"] for log in logs] == ["warning"]
    assert code is grpc.StatusCode.UNAVAILABLE


def test_storage_that_answers_rubbish_counts_as_away() -> None:
    async def rubbish(*_: Any) -> bytes:
        return b"\xff\xff"

    async def asked() -> grpc.aio.AioRpcError:
        single = grpc.unary_unary_rpc_method_handler(rubbish)
        storage, address = await served({"FindMissingBlobs": single}, CAS.strip("/"))
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Upstream(channel).missing([Digest("0" * 64, 1)])
        await storage.stop(None)
        return refused.value

    error = asyncio.run(asked())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "what it answers to FindMissingBlobs is no FindMissingBlobsResponse"
