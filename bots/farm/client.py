"""A small client of the Remote Execution API, for the demo, for tests, and for results that bots store themselves."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
from google.longrunning.operations_proto_pb2 import CancelOperationRequest, Operation
from google.protobuf.empty_pb2 import Empty
from leasehold.errors import LeaseholdError

from bots.farm.protos import remote_execution_pb2
from bots.farm.storage import trees
from bots.farm.storage.upstream import ACTION_CACHE, API, CAS, CHANNEL_OPTIONS, Digest, read_blobs
from schema import clock

#: Bytes of blobs in one call.
BATCH = 3 * 1024 * 1024
#: Seconds that a call for blobs may take; it waits so long for a door that is away.
ANSWER_WITHIN = 60.0
#: Seconds before a call is made again that a door did not answer because it, or its storage, went away.
AGAIN = 0.2


class Keys(NamedTuple):
    """By what a client knows a door, and is known to it.

    token: a token of the pool. ca: PEM file of the authorities of the door's certificate, None = those that gRPC knows.
    cert, key: PEM files of a certificate of the client.
    """

    token: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel. Raises OSError if a file cannot be read."""
        ca, cert, key = (None if each is None else each.read_bytes() for each in self[1:])
        return grpc.ssl_channel_credentials(ca, key, cert)


NO_KEYS = Keys()


class Storage:
    """Calls for blobs, of a door or of the storage itself.

    address: `grpc://HOST:PORT`, `grpcs://HOST:PORT` with TLS, or `unix:PATH`. instance: named by all calls.
    """

    def __init__(self, address: str, keys: Keys = NO_KEYS, *, instance: str = "") -> None:
        self.instance = instance
        options, (scheme, _, host) = list(CHANNEL_OPTIONS), address.partition("://")
        if scheme == "grpcs":
            self.channel = grpc.secure_channel(host, keys.credentials(), options=options)
        else:
            self.channel = grpc.insecure_channel(address.removeprefix("grpc://"), options=options)
        #: Sent with all calls.
        self.headers: tuple[tuple[str, str | bytes], ...] = ()
        if keys.token is not None:
            self.headers += (("authorization", f"Bearer {keys.token}"),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.channel.close()

    def call(self, method: str, request: Any, answer: Any, *, within: float = ANSWER_WITHIN) -> Any:
        """Make one call, which waits for a door that is away but ends with one that goes away. Raises grpc.RpcError."""
        if self.instance and "instance_name" in request.DESCRIPTOR.fields_by_name:
            request.instance_name = self.instance
        made = self.channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        return made(request, timeout=within, wait_for_ready=True, metadata=self.headers)

    def upload(self, blobs: Iterable[bytes]) -> list[Digest]:
        """Store those of these blobs that the storage does not have, and return their digests. Raises grpc.RpcError."""
        named = {Digest.of(data): data for data in blobs}
        for group in trees.groups(self.missing(list(named)), BATCH):
            one = remote_execution_pb2.BatchUpdateBlobsRequest.Request
            asked = remote_execution_pb2.BatchUpdateBlobsRequest(
                requests=[one(digest=each.message, data=named[each]) for each in group]
            )
            answer = self._ask(CAS + "BatchUpdateBlobs", asked, remote_execution_pb2.BatchUpdateBlobsResponse)
            for each in answer.responses:
                if each.status.code:
                    raise LeaseholdError(f"a blob was not stored: {each.status.message}")
        return list(named)

    def download(self, digest: Digest) -> bytes:
        """Return a blob. Raises LeaseholdError if the storage does not have it, grpc.RpcError."""
        found = self.read_all([digest])
        if digest not in found:
            raise LeaseholdError(f"the storage does not have {digest}")
        return found[digest]

    def read_all(self, digests: Sequence[Digest]) -> dict[Digest, bytes]:
        """Return those of these blobs, of a few MB together, that are there. Raises grpc.RpcError."""
        asked = remote_execution_pb2.BatchReadBlobsRequest(digests=[each.message for each in digests])
        return read_blobs(self._ask(CAS + "BatchReadBlobs", asked, remote_execution_pb2.BatchReadBlobsResponse))

    def missing(self, digests: Sequence[Digest]) -> list[Digest]:
        """Return those of these blobs that are not there. Raises grpc.RpcError."""
        asked = remote_execution_pb2.FindMissingBlobsRequest(blob_digests=[each.message for each in digests])
        found = self._ask(CAS + "FindMissingBlobs", asked, remote_execution_pb2.FindMissingBlobsResponse)
        return [Digest(each.hash, each.size_bytes) for each in found.missing_blob_digests]

    def look(self, look: trees.Look) -> list[Digest]:
        """Return what a look has found. Raises BadInput, grpc.RpcError."""
        try:
            wish = next(look)
            while True:
                ask = self.read_all if isinstance(wish, trees.Read) else self.missing
                wish = look.send(ask(wish.digests))
        except StopIteration as ended:
            found: list[Digest] = ended.value
            return found

    def _ask(self, method: str, request: Any, answer: Any) -> Any:
        """Make a call for blobs or results, and again while the door goes away or its storage is away.

        All such calls may be repeated: a blob is the same whenever it is read or written. Raises grpc.RpcError.
        """
        until = clock.monotonic() + ANSWER_WITHIN
        while True:
            try:
                return self.call(method, request, answer, within=max(AGAIN, until - clock.monotonic()))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or clock.monotonic() + AGAIN >= until:
                    raise
            clock.sleep(AGAIN)


class Work(NamedTuple):
    """What an action does: a command with inputs by path, and the paths of its outputs.

    properties: of the bot. timeout: seconds. salt: makes an action another one. legacy: name outputs as old clients do.
    """

    arguments: Sequence[str]
    inputs: Mapping[str, bytes] = {}
    outputs: Sequence[str] = ()
    properties: Mapping[str, str] = {}
    timeout: float | None = None
    do_not_cache: bool = False
    salt: bytes = b""
    legacy: bool = False

    def blobs(self) -> list[bytes]:
        """Return the action, its command and its inputs as blobs; the action is the first."""
        messages = remote_execution_pb2
        command = messages.Command(arguments=self.arguments)
        (command.output_files if self.legacy else command.output_paths).extend(sorted(self.outputs))
        command.environment_variables.add(name="PATH", value="/usr/bin:/bin")
        for name, value in sorted(self.properties.items()):
            command.platform.properties.add(name=name, value=value)
        root, *below = _directories(self.inputs)
        action = messages.Action(do_not_cache=self.do_not_cache, salt=self.salt)
        if self.timeout is not None:
            action.timeout.FromNanoseconds(int(self.timeout * 1e9))
        data = command.SerializeToString(deterministic=True)
        action.command_digest.CopyFrom(Digest.of(data).message)
        action.input_root_digest.CopyFrom(Digest.of(root).message)
        return [action.SerializeToString(deterministic=True), data, root, *below, *self.inputs.values()]


class Client(Storage):
    """Calls for actions."""

    def execute(self, action: Digest, *, priority: int = 0, skip_cache: bool = False) -> Iterator[Any]:
        """Yield operations until the action is over. Raises grpc.RpcError."""
        asked = remote_execution_pb2.ExecuteRequest(
            instance_name=self.instance, action_digest=action.message, skip_cache_lookup=skip_cache
        )
        asked.execution_policy.priority = priority
        yield from self._stream("Execute", asked)

    def wait(self, name: str) -> Iterator[Any]:
        """Yield operations of an action that was begun before. Raises grpc.RpcError."""
        yield from self._stream("WaitExecution", remote_execution_pb2.WaitExecutionRequest(name=name))

    def cancel(self, name: str) -> None:
        """Cancel an operation. Raises grpc.RpcError."""
        self.call("/google.longrunning.Operations/CancelOperation", CancelOperationRequest(name=name), Empty)

    def run(self, work: Work, *, skip_cache: bool = False) -> Any:
        """Upload what an action needs, wait until it is over, and return its ExecuteResponse.

        Waits again by the operation's name when the door is away. Raises grpc.RpcError for every other error.
        """
        digest = self.upload(work.blobs())[0]
        name = None
        while True:
            try:
                stream = self.execute(digest, skip_cache=skip_cache) if name is None else self.wait(name)
                for operation in stream:
                    name = operation.name
                    if operation.done:
                        return response_of(operation)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND and name is not None:
                    name = None
                elif error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                else:
                    clock.sleep(AGAIN)

    def cached(self, action: Digest) -> Any:
        """Return the cached result of an action; None if there is none. Raises grpc.RpcError."""
        asked = remote_execution_pb2.GetActionResultRequest(action_digest=action.message)
        try:
            return self._ask(ACTION_CACHE + "GetActionResult", asked, remote_execution_pb2.ActionResult)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise

    def _stream(self, method: str, request: Any) -> Iterator[Any]:
        made = self.channel.unary_stream(
            f"/{API}.Execution/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=Operation.FromString,
        )
        yield from made(request, wait_for_ready=True, metadata=self.headers)


def response_of(operation: Any) -> Any:
    """Return the ExecuteResponse of an operation that is done."""
    found = remote_execution_pb2.ExecuteResponse()
    operation.response.Unpack(found)
    return found


def _directories(inputs: Mapping[str, bytes]) -> list[bytes]:
    """The directories of inputs as blobs; the first is the root."""
    below: dict[str, dict[str, bytes]] = {}
    root = remote_execution_pb2.Directory()
    for path, data in sorted(inputs.items()):
        first, _, rest = path.partition(os.sep)
        if rest:
            below.setdefault(first, {})[rest] = data
        else:
            root.files.add(name=first, digest=Digest.of(data).message, is_executable=data.startswith(b"#!"))
    found = []
    for name, inner in sorted(below.items()):
        made = _directories(inner)
        root.directories.add(name=name, digest=Digest.of(made[0]).message)
        found += made
    return [root.SerializeToString(deterministic=True), *found]
