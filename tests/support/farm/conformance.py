"""A server of the Remote Execution API under test: a door on a pool of the suite's own, or one that a variable names.

LEASEHOLD_CONFORMANCE=grpc://HOST:PORT names another server, with workers that run `/bin/sh` and see /bin and /usr.
LEASEHOLD_CONFORMANCE_INSTANCE is its instance, and LEASEHOLD_CONFORMANCE_PLATFORM, as NAME=VALUE,…, what its workers
want actions to ask for.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from shutil import which
from subprocess import run
from typing import Any
from uuid import uuid4

import grpc
import pytest
from google.longrunning.operations_proto_pb2 import GetOperationRequest, Operation
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from bots.farm.client import Client, response_of
from bots.farm.protos import remote_execution_pb2 as api
from bots.farm.storage.programs import RUNNER, program
from bots.farm.storage.upstream import BYTESTREAM, CAS, Digest
from tests.support.farm.doors import Farm, executes, finish
from tests.support.patience import MINUTE

WITHIN = 20.0
_TEXT, _NUMBER, _BOOL, _BYTES = (
    getattr(FieldDescriptorProto, f"TYPE_{name}") for name in ("STRING", "INT64", "BOOL", "BYTES")
)


def _bytestream() -> dict[str, Any]:
    """The messages of ByteStream, which nothing else here has."""
    file = FileDescriptorProto(name="bytestream.proto", package="google.bytestream", syntax="proto3")
    wanted = {
        "ReadRequest": (("resource_name", 1, _TEXT), ("read_offset", 2, _NUMBER), ("read_limit", 3, _NUMBER)),
        "ReadResponse": (("data", 10, _BYTES),),
        "WriteRequest": (
            ("resource_name", 1, _TEXT), ("write_offset", 2, _NUMBER), ("finish_write", 3, _BOOL), ("data", 10, _BYTES),
        ),
        "WriteResponse": (("committed_size", 1, _NUMBER),),
    }  # fmt: skip
    for message, fields in wanted.items():
        made = file.message_type.add(name=message)
        for name, number, kind in fields:
            made.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
    pool = DescriptorPool()
    pool.Add(file)  # type: ignore[attr-defined]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"google.bytestream.{name}")) for name in wanted}


STREAM = _bytestream()


def makes_sandboxes() -> bool:
    """Whether this machine lets bubblewrap make a sandbox: some containers do not."""
    bwrap = which("bwrap")
    return (
        bwrap is not None and run([bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"], check=False).returncode == 0
    )


def runs_actions() -> bool:
    """Whether actions can run here as bots run them."""
    return program(RUNNER) is not None and makes_sandboxes()


class Runner:
    """A bot that runs the actions of a door as its agent would, one after another, until it is stopped."""

    def __init__(self, farm: Farm) -> None:
        # With room for one: a call that reports the end of one action says of others that the bot does not run them.
        self._farm, self._bot, self._over = farm, farm.bot(capacity=1), threading.Event()
        #: Held while an action runs, and by tests that want actions to wait.
        self.turn = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(MINUTE)

    def _serve(self) -> None:
        query = "SELECT payload FROM job_payloads JOIN jobs j ON j.id = job_id WHERE j.public_id = CAST(:job AS uuid)"
        with tempfile.TemporaryDirectory(prefix="leasehold-farm-") as scratch, pytest.MonkeyPatch.context() as patch:
            while not self._over.wait(0.02):
                with self.turn:
                    if not self._farm.pool.rows("SELECT FROM jobs WHERE state IN ('queued', 'leased')"):
                        continue
                    for given in self._farm.given(self._bot):
                        (place := Path(scratch) / uuid4().hex).mkdir()
                        (row,) = self._farm.pool.rows(query, job=given["job"])
                        code, result = executes(place, row.payload["command"], patch)
                        verdict = "failed" if code else "succeeded"
                        finish(self._bot, given, verdict=verdict, exit_code=code, result=result)


class Server:
    """The calls of the suite. runner: of a door of our own; None = another server, which has workers."""

    def __init__(self, address: str, *, instance: str = "", runner: Runner | None = None, runs: bool = True) -> None:
        self.client, self.instance, self._runner, self._runs = (
            Client(address, instance=instance),
            instance,
            runner,
            runs,
        )
        self._platform = [
            each.partition("=")[::2] for each in os.environ.get("LEASEHOLD_CONFORMANCE_PLATFORM", "").split(",") if each
        ]

    @property
    def is_ours(self) -> bool:
        """True for a door of our own, whose actions buildbox-run runs."""
        return self._runner is not None

    def waits(self) -> Any:
        """No action starts in this block, or it takes a while, so that it can be watched."""
        return nullcontext() if self._runner is None else self._runner.turn

    def upload(self, *blobs: bytes) -> list[Digest]:
        return self.client.upload(blobs)

    def call(self, method: str, request: Any, answer: Any) -> Any:
        return self.client.call(method, request, answer, within=WITHIN)

    def stream(self, method: str, requests: Sequence[Any], answer: Any) -> list[Any]:
        """All messages of a call with any number of messages on both sides."""
        made = self.client.channel.stream_stream(
            method, request_serializer=lambda each: each.SerializeToString(), response_deserializer=answer.FromString
        )
        return list(made(iter(requests), timeout=WITHIN))

    # Blobs

    def resource(self, *parts: object) -> str:
        return "/".join(map(str, [*([self.instance] if self.instance else []), *parts]))

    def read(self, name: str, **more: int) -> bytes:
        asked = STREAM["ReadRequest"](resource_name=name, **more)
        return b"".join(each.data for each in self.stream(f"{BYTESTREAM}Read", [asked], STREAM["ReadResponse"]))

    def write(self, name: str, *pieces: bytes) -> int:
        """Write pieces and return the committed size."""
        asked, offset = [], 0
        for nth, piece in enumerate(pieces):
            more = {"resource_name": name} if nth == 0 else {}
            asked.append(
                STREAM["WriteRequest"](write_offset=offset, data=piece, finish_write=nth == len(pieces) - 1, **more)
            )
            offset += len(piece)
        (found,) = self.stream(f"{BYTESTREAM}Write", asked, STREAM["WriteResponse"])
        return int(found.committed_size)

    def tree(self, root: Digest) -> list[Any]:
        asked = api.GetTreeRequest(instance_name=self.instance, root_digest=root.message)
        found = self.stream(f"{CAS}GetTree", [asked], api.GetTreeResponse)
        return [directory for each in found for directory in each.directories]

    # Actions

    def action(self, script: str, *, root: bytes = b"", blobs: Sequence[bytes] = (), **fields: Any) -> Digest:
        """Upload an action that no other case has, and return its digest. fields: of Command, and some of Action."""
        own = {name: fields.pop(name) for name in ("timeout", "do_not_cache") if name in fields}
        command = api.Command(arguments=["/bin/sh", "-c", script], **fields)
        command.environment_variables.add(name="PATH", value="/usr/bin:/bin")
        for name, value in self._platform:
            command.platform.properties.add(name=name, value=value)
        data = command.SerializeToString()
        made = api.Action(
            command_digest=Digest.of(data).message, input_root_digest=Digest.of(root).message, salt=uuid4().bytes, **own
        )
        return self.upload(made.SerializeToString(), data, root, *blobs)[0]

    def begin(self, action: Digest, **fields: Any) -> Any:
        """Begin an action and return its stream of operations. fields: of ExecuteRequest."""
        if not self._runs:
            pytest.skip("no buildbox-run, or no sandbox by bubblewrap")
        return self._operations(
            "Execute", api.ExecuteRequest(instance_name=self.instance, action_digest=action.message, **fields)
        )

    def wait(self, name: str) -> Any:
        return self._operations("WaitExecution", api.WaitExecutionRequest(name=name))

    def operation(self, name: str) -> Any:
        return self.call("/google.longrunning.Operations/GetOperation", GetOperationRequest(name=name), Operation)

    def run(self, action: Digest, **fields: Any) -> Any:
        """Run an action to its end and return the ExecuteResponse."""
        (*_, last) = self.begin(action, **fields)
        assert last.done
        return response_of(last)

    def done(self, script: str, **fields: Any) -> Any:
        """Run a new action and return its ActionResult."""
        found = self.run(self.action(script, **fields))
        assert found.status.code == 0, found.status.message
        return found.result

    def output(self, result: Any, stream: str = "stdout") -> bytes:
        """What an action has written to a stream."""
        digest = getattr(result, f"{stream}_digest")
        raw: bytes = getattr(result, f"{stream}_raw")
        return raw or (self.client.download(Digest(digest.hash, digest.size_bytes)) if digest.size_bytes else b"")

    def contents(self, result: Any) -> dict[str, bytes]:
        """The output files by their paths."""
        return {
            each.path: self.client.download(Digest(each.digest.hash, each.digest.size_bytes))
            for each in result.output_files
        }

    @cached_property
    def rich(self) -> Any:
        """The result of an action with inputs, a working directory, an environment and outputs of all kinds."""
        node = api.FileNode
        source, program_ = b"a source", b"#!/bin/sh\necho ran\n"
        below = api.Directory(
            files=[
                node(name="a.txt", digest=Digest.of(source).message),
                node(name="tool", digest=Digest.of(program_).message, is_executable=True),
            ],
            symlinks=[api.SymlinkNode(name="link", target="a.txt")],
        ).SerializeToString()
        top = api.Directory(
            directories=[
                api.DirectoryNode(name="src", digest=Digest.of(below).message),
                api.DirectoryNode(name="work", digest=Digest.of(b"").message),
            ]
        ).SerializeToString()
        script = """set -e
            cat ../src/link > copy.txt; ../src/tool > ran.txt; readlink ../src/link > target.txt
            env | sort > env.txt; pwd > pwd.txt; ls -d new/deep > parents.txt; echo x > undeclared.txt
            echo '#!/bin/sh' > script; chmod +x script
            mkdir -p tree/below; echo deep > tree/below/file; echo said; echo cried >&2"""
        names = ("copy", "ran", "target", "env", "pwd", "parents")
        declared = [*(f"{name}.txt" for name in names), "absent", "script", "tree", "new/deep/file"]
        fields: Mapping[str, Any] = {"working_directory": "work", "output_paths": sorted(declared)}
        variable = api.Command.EnvironmentVariable(name="FLAVOUR", value="sour = sweet")
        return self.done(script, root=top, blobs=[below, source, program_], environment_variables=[variable], **fields)

    def _operations(self, method: str, request: Any) -> Any:
        made = self.client.channel.unary_stream(
            f"/build.bazel.remote.execution.v2.Execution/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=Operation.FromString,
        )
        return made(request, timeout=3 * WITHIN)


@contextmanager
def refused(*codes: grpc.StatusCode) -> Iterator[list[Any]]:
    """The block's call ends with one of these codes; gives the details of the error."""
    details: list[Any] = []
    with pytest.raises(grpc.RpcError) as raised:
        yield details
    assert raised.value.code() in codes, (raised.value.code(), raised.value.details())
    for each in raised.value.trailing_metadata() or ():
        if each.key == "grpc-status-details-bin":
            details += status_pb2.Status.FromString(each.value).details


def missing_blobs(details: Sequence[Any]) -> list[str]:
    """The subjects of the violations of type MISSING."""
    found = []
    for detail in details:
        failure = error_details_pb2.PreconditionFailure()
        if detail.Unpack(failure):
            found += [each.subject for each in failure.violations if each.type == "MISSING"]
    return found
