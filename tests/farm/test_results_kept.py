"""What the door keeps and lists of actions that are over, and storage that comes back after a long time."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import grpc.aio
import pytest
from google.longrunning.operations_proto_pb2 import (
    GetOperationRequest,
    ListOperationsRequest,
    ListOperationsResponse,
    Operation,
)

from bots.farm.client import Client, Work
from bots.farm.protos import remote_execution_pb2
from bots.farm.server import OPERATIONS
from bots.farm.storage import capabilities
from bots.farm.storage.upstream import API, CAPABILITIES, open_channel
from schema import clock
from tests.support.farm.doors import Farm, finish, left

#: Bytes that clients of gRPC take by default.
DEFAULT = 4 * 1024 * 1024


def work(**more: Any) -> Work:
    """An action that no other test has run."""
    return Work(**{"arguments": ["/bin/true"], "salt": uuid4().bytes, **more})


def test_an_old_operation_does_not_bring_its_result_back(farm: Farm) -> None:
    """A user replaces a bad result by running its action anew; who still looks at the first run changes nothing."""
    bot, names = farm.bot(), list[str]()
    with farm.client() as client:
        digest = client.upload(work().blobs())[0]
        for text in (b"bad", b"good"):
            stream = client.execute(digest, skip_cache=True)
            names.append(next(stream).name)
            finish(bot, *farm.given(bot), exit_code=0, result=left(stdout_raw=text))
            list(stream)
        seen = client.call(OPERATIONS + "GetOperation", GetOperationRequest(name=names[0]), Operation)
        assert seen.done
        assert client.cached(digest).stdout_raw == b"good"


def listed(client: Client, **fields: Any) -> Any:
    return client.call(OPERATIONS + "ListOperations", ListOperationsRequest(**fields), ListOperationsResponse)


def test_a_page_of_operations_fits_into_the_answer_that_clients_take(farm: Farm) -> None:
    """Operations that are over come with their results, and the next page goes on where a page was full."""
    bot, count = farm.bot(capacity=100), 100
    with farm.client() as client:
        streams = [client.execute(client.upload(work().blobs())[0]) for _ in range(count)]
        names = {next(stream).name for stream in streams}
        given = list[dict[str, Any]]()
        while len(given) < count:
            given += farm.given(bot)
        finish(bot, *given, exit_code=0, result=left(stdout_raw=b"x" * 45_000))
        for stream in streams:
            list(stream)
        seen, pages, token = list[str](), 0, ""
        while pages == 0 or token:
            page = listed(client, page_token=token)
            assert 0 < page.ByteSize() < DEFAULT
            seen += [each.name for each in page.operations]
            pages, token = pages + 1, page.next_page_token
    assert (set(seen), len(seen), pages) == (names, count, 2)


def test_only_a_whole_word_names_the_list_of_operations(farm: Farm) -> None:
    """An instance whose name ends like it is another instance."""
    with farm.client() as client:
        for name in ("", "operations", "default", "default/operations", "default/operations/"):
            listed(client, name=name)
        with pytest.raises(grpc.RpcError) as refused:
            listed(client, name="defaultoperations")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_what_the_storage_announces_beyond_the_doors_protocol_is_left_out() -> None:
    """A client that was told of a call which the door does not pass on would make it."""
    later = remote_execution_pb2.CacheCapabilities.FromString(b"\x48\x01\x50\x01")
    told = capabilities.described(later).cache_capabilities
    assert told == remote_execution_pb2.CacheCapabilities.FromString(told.SerializeToString())
    assert b"\x48\x01\x50\x01" not in told.SerializeToString()


def test_actions_are_named_by_the_function_that_the_door_announces(farm: Farm) -> None:
    """Digests of another function look alike, and the client would upload its blobs again and again."""
    with farm.client() as client:
        digest = client.upload(work().blobs())[0]
        asked = remote_execution_pb2.ExecuteRequest(
            action_digest=digest.message, digest_function=remote_execution_pb2.DigestFunction.BLAKE3
        )
        execute = client.channel.unary_stream(f"/{API}.Execution/Execute")
        with pytest.raises(grpc.RpcError) as refused:
            next(execute(asked.SerializeToString()))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "digest_function" in refused.value.details()


@pytest.mark.long
def test_storage_that_was_away_for_long_is_found_again_at_once(tmp_path: Path) -> None:
    """Connections are tried again every two seconds, however often they have failed before."""

    async def answer(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return b""

    async def seconds_until_found(path: Path) -> float:
        address, method = f"unix:{path}", CAPABILITIES + "GetCapabilities"
        channel = open_channel(address)
        call = channel.unary_unary(method)
        away_until = clock.monotonic() + 30.0
        while clock.monotonic() < away_until:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"")
            await asyncio.sleep(0.1)
        server = grpc.aio.server()
        handlers = {"GetCapabilities": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{API}.Capabilities", handlers)])
        server.add_insecure_port(address)
        await server.start()
        began = clock.monotonic()
        await call(b"", wait_for_ready=True, timeout=60.0)
        found = clock.monotonic() - began
        await channel.close()
        await server.stop(0)
        return found

    assert asyncio.run(seconds_until_found(tmp_path / "socket")) < 5.0
