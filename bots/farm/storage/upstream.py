"""The door's own calls to the server that keeps blobs and cached results: read, write, look up, store."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from leasehold.errors import BadInput

from bots.farm.protos import remote_execution_pb2

API = "build.bazel.remote.execution.v2"
CAS, ACTION_CACHE, CAPABILITIES = (
    f"/{API}.{name}/" for name in ("ContentAddressableStorage", "ActionCache", "Capabilities")
)
BYTESTREAM = "/google.bytestream.ByteStream/"
#: Largest message in bytes. Batches of clients are at most 4 MiB, and pieces of streams smaller.
MOST_MESSAGE = 16 * 1024 * 1024
#: Largest action, command or result that the door reads, bytes.
MOST_READ = 3 * 1024 * 1024
#: Bytes of actions and commands that are remembered: a build asks for the same ones again. Most are small, so what
#: Python takes for one beside its bytes counts too.
REMEMBERED, BESIDE = 32 * 1024 * 1024, 512
#: Seconds within which the storage must answer a call of the door. It waits so long for storage that is away.
ANSWER_WITHIN = 20.0

#: Keepalives: a peer that is gone without a word is noticed after 35 s, and clients may ping as often as they like.
#: Connections are tried again every two seconds at most, however long a server was away: gRPC's two minutes are longer
#: than builds wait.
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MOST_MESSAGE),
    ("grpc.max_send_message_length", MOST_MESSAGE),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

M = TypeVar("M", bound=Message)
_DIGEST = re.compile(r"[0-9a-f]{64}/[0-9]{1,18}")


class Digest(NamedTuple):
    """The SHA-256 and the size in bytes of a blob, which name it."""

    hash: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the digest of these bytes."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def read(cls, given: "remote_execution_pb2.Digest", field: str) -> Self:
        """Return the digest of a message. Raises BadInput, naming `field`, unless it is one of SHA-256."""
        try:
            return cls.parse(f"{given.hash}/{given.size_bytes}")
        except ValueError:
            raise BadInput(field, "is not a digest of SHA-256") from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the digest of SHA-256 that a text such as `HASH/SIZE` names. Raises ValueError."""
        if not _DIGEST.fullmatch(text):
            raise ValueError("is not a digest of SHA-256")
        name, _, size = text.partition("/")
        return cls(name, int(size))

    @property
    def message(self) -> "remote_execution_pb2.Digest":
        """The digest as a message."""
        return remote_execution_pb2.Digest(hash=self.hash, size_bytes=self.size)

    def __str__(self) -> str:
        return f"{self.hash}/{self.size}"


class Missing(Exception):
    """The storage does not have these blobs, which the client is asked to upload."""

    def __init__(self, *digests: Digest) -> None:
        super().__init__(f"the storage does not have {', '.join(map(str, digests))}")
        self.digests = digests


def said(error: Exception) -> str:
    """Return what an error says; of a call, its status and details, in one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {' '.join(str(error.details()).split())}"
    return str(error)


def parsed(kind: type[M], data: bytes, field: str) -> M:
    """Return the message that these bytes are. Raises BadInput, naming `field`."""
    try:
        found: M = kind.FromString(data)
    except DecodeError:
        raise BadInput(field, f"is no {kind.DESCRIPTOR.name}") from None
    return found


def read_blobs(answer: "remote_execution_pb2.BatchReadBlobsResponse") -> dict[Digest, bytes]:
    """Return the blobs of an answer by their digests. Bytes that do not have the digest count as missing."""
    found = {Digest(each.digest.hash, each.digest.size_bytes): each for each in answer.responses}
    return {
        digest: each.data
        for digest, each in found.items()
        if each.status.code == 0 and (digest.size == 0 or Digest.of(each.data) == digest)
    }


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Return a channel to a server. address: `grpc://HOST:PORT`, or `unix:PATH`. credentials: of `grpcs://HOST:PORT`."""
    options = list(CHANNEL_OPTIONS)
    if credentials is not None:
        return grpc.aio.secure_channel(address.removeprefix("grpcs://"), credentials, options=options)
    return grpc.aio.insecure_channel(address.removeprefix("grpc://"), options=options)


class Upstream:
    """The server that keeps blobs and cached results, by the door's own calls.

    What it answers is checked: bytes that do not have the digest for which they were asked count as missing.
    """

    def __init__(self, channel: grpc.aio.Channel, *, instance: str = "") -> None:
        """Make the calls of one channel. instance: what the server calls the instance of all calls."""
        self.channel, self._instance = channel, instance
        self._known: OrderedDict[Digest, bytes] = OrderedDict()
        self._bytes = 0

    async def read(self, digest: Digest, *, anew: bool = False) -> bytes:
        """Return a blob of at most `MOST_READ` bytes. Raises Missing, BadInput, grpc.aio.AioRpcError.

        anew: the storage is asked, although the blob is remembered. It may have gone from there since.
        """
        if anew:
            self._forget(digest)
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known
        if digest.size > MOST_READ:
            raise BadInput("digest", f"{digest} has more than {MOST_READ} bytes, which is too many for an action")
        asked = remote_execution_pb2.BatchReadBlobsRequest(instance_name=self._instance, digests=[digest.message])
        answer = await self._call(CAS + "BatchReadBlobs", asked, remote_execution_pb2.BatchReadBlobsResponse)
        data: bytes | None = next((one.data for one in answer.responses if one.status.code == 0), None)
        if data is None or Digest.of(data) != digest:
            raise Missing(digest)
        self._remember(digest, data)
        return data

    async def read_all(self, digests: Sequence[Digest]) -> dict[Digest, bytes]:
        """Return those of these blobs that are there, together of at most `MOST_READ` bytes. Raises AioRpcError."""
        wanted = [each.message for each in digests]
        asked = remote_execution_pb2.BatchReadBlobsRequest(instance_name=self._instance, digests=wanted)
        answer = await self._call(CAS + "BatchReadBlobs", asked, remote_execution_pb2.BatchReadBlobsResponse)
        return read_blobs(answer)

    async def write(self, data: bytes) -> Digest:
        """Store a small blob and return its digest. Raises grpc.aio.AioRpcError if it cannot be stored."""
        digest = Digest.of(data)
        one = remote_execution_pb2.BatchUpdateBlobsRequest.Request(digest=digest.message, data=data)
        asked = remote_execution_pb2.BatchUpdateBlobsRequest(instance_name=self._instance, requests=[one])
        answer = await self._call(CAS + "BatchUpdateBlobs", asked, remote_execution_pb2.BatchUpdateBlobsResponse)
        if len(answer.responses) != 1 or answer.responses[0].status.code:
            raise Missing(digest)
        return digest

    async def missing(self, digests: Sequence[Digest]) -> list[Digest]:
        """Return those of these blobs that the storage does not have. Raises grpc.aio.AioRpcError."""
        if not digests:
            return []
        wanted = [each.message for each in dict.fromkeys(digests)]
        asked = remote_execution_pb2.FindMissingBlobsRequest(instance_name=self._instance, blob_digests=wanted)
        answer = await self._call(CAS + "FindMissingBlobs", asked, remote_execution_pb2.FindMissingBlobsResponse)
        return [Digest(each.hash, each.size_bytes) for each in answer.missing_blob_digests]

    async def cached(self, request: "remote_execution_pb2.GetActionResultRequest") -> Any:
        """Return the cached result of an action; None if there is none. Raises grpc.aio.AioRpcError."""
        request.instance_name = self._instance
        try:
            return await self._call(ACTION_CACHE + "GetActionResult", request, remote_execution_pb2.ActionResult)
        except grpc.aio.AioRpcError as error:
            if error.code() is StatusCode.NOT_FOUND:
                return None
            raise

    async def store(self, action: Digest, result: "remote_execution_pb2.ActionResult") -> None:
        """Keep the result of an action for those who ask for it. Raises grpc.aio.AioRpcError."""
        asked = remote_execution_pb2.UpdateActionResultRequest(
            instance_name=self._instance, action_digest=action.message, action_result=result
        )
        await self._call(ACTION_CACHE + "UpdateActionResult", asked, remote_execution_pb2.ActionResult)

    async def capabilities(self) -> Any:
        """Return what the server says that it can do. Raises grpc.aio.AioRpcError."""
        asked = remote_execution_pb2.GetCapabilitiesRequest(instance_name=self._instance)
        return await self._call(CAPABILITIES + "GetCapabilities", asked, remote_execution_pb2.ServerCapabilities)

    async def look(self) -> None:
        """Ask the server for an answer, and wait for none that is away. Raises grpc.aio.AioRpcError."""
        asked = remote_execution_pb2.GetCapabilitiesRequest(instance_name=self._instance)
        call = self.channel.unary_unary(
            CAPABILITIES + "GetCapabilities", request_serializer=type(asked).SerializeToString
        )
        await call(asked, timeout=ANSWER_WITHIN)

    async def _call(self, method: str, request: Message, answer: type[M]) -> M:
        call = self.channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        found: M | None = await call(request, timeout=ANSWER_WITHIN, wait_for_ready=True)
        if found is None:  # by which gRPC tells that the answer is no such message
            said = f"what it answers to {method.rpartition('/')[2]} is no {answer.DESCRIPTOR.name}"
            raise grpc.aio.AioRpcError(StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=said)
        return found

    def _remember(self, digest: Digest, data: bytes) -> None:
        if digest not in self._known:
            self._bytes += len(data) + BESIDE
        self._known[digest] = data
        while self._bytes > REMEMBERED:
            self._forget(next(iter(self._known)))

    def _forget(self, digest: Digest) -> None:
        if (data := self._known.pop(digest, None)) is not None:
            self._bytes -= len(data) + BESIDE
