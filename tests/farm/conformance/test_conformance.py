"""What a server of the Remote Execution API must do, as plain calls: each case says which rule it checks.

Against another server: LEASEHOLD_CONFORMANCE=grpc://HOST:PORT, see `tests.support.farm.conformance`.
One module because all cases share one door, which costs more than they do.
"""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from google.longrunning.operations_proto_pb2 import (
    CancelOperationRequest,
    ListOperationsRequest,
    ListOperationsResponse,
)
from google.protobuf.empty_pb2 import Empty
from google.rpc import code_pb2
from grpc import StatusCode

from bots.farm.client import response_of
from bots.farm.protos import remote_execution_pb2 as api
from bots.farm.storage.upstream import ACTION_CACHE, CAPABILITIES, CAS, Digest
from tests.support.farm.conformance import Server, missing_blobs, refused

Check = Callable[[Server], None]
CASES: list[Check] = []
EMPTY = Digest.of(b"")
STAGE = api.ExecutionStage


def rule(check: Check) -> Check:
    """Take a check into the table. Its docstring is the rule."""
    CASES.append(check)
    return check


def fresh(size: int = 40) -> bytes:
    """A blob that no server has."""
    return (uuid4().bytes * (size // 16 + 1))[:size]


def absent() -> Digest:
    return Digest.of(fresh())


# Capabilities


def capabilities(server: Server) -> api.ServerCapabilities:
    asked = api.GetCapabilitiesRequest()
    found: api.ServerCapabilities = server.call(f"{CAPABILITIES}GetCapabilities", asked, api.ServerCapabilities)
    return found


@rule
def versions_are_a_range_of_version_2(server: Server) -> None:
    """A server tells the lowest and the highest version of the API that it speaks."""
    low, high = (getattr(capabilities(server), f"{end}_api_version") for end in ("low", "high"))
    assert (low.major, low.minor) <= (high.major, high.minor)
    assert low.major == 2


@rule
def sha256_is_a_digest_function_of_blobs(server: Server) -> None:
    """The capabilities of the cache name the digest functions that it takes."""
    assert api.DigestFunction.SHA256 in capabilities(server).cache_capabilities.digest_functions


@rule
def execution_is_on_with_a_digest_function(server: Server) -> None:
    """The capabilities of execution say that it is enabled, and name a digest function."""
    found = capabilities(server).execution_capabilities
    assert found.exec_enabled
    assert api.DigestFunction.SHA256 in (found.digest_function, *found.digest_functions)


@rule
def priorities_are_ranges(server: Server) -> None:
    """A range of priorities begins with its smallest one."""
    ranges = capabilities(server).execution_capabilities.execution_priority_capabilities.priorities
    assert all(each.min_priority <= each.max_priority for each in ranges)


@rule
def a_batch_of_the_announced_size_is_taken(server: Server) -> None:
    """Batches may have as many bytes as the capabilities say; 0 is no bound but that of the transport."""
    most = capabilities(server).cache_capabilities.max_batch_total_size_bytes or 3_000_000
    (found,) = update(server, (blob := fresh(most), Digest.of(blob)))
    assert found.status.code == 0


# Blobs: FindMissingBlobs, BatchUpdateBlobs, BatchReadBlobs, GetTree


def find(server: Server, *digests: Digest) -> set[Digest]:
    asked = api.FindMissingBlobsRequest(blob_digests=[each.message for each in digests])
    found = server.call(f"{CAS}FindMissingBlobs", asked, api.FindMissingBlobsResponse)
    return {Digest(each.hash, each.size_bytes) for each in found.missing_blob_digests}


def update(server: Server, *blobs: tuple[bytes, Digest]) -> list[api.BatchUpdateBlobsResponse.Response]:
    one = api.BatchUpdateBlobsRequest.Request
    asked = api.BatchUpdateBlobsRequest(requests=[one(data=data, digest=named.message) for data, named in blobs])
    return list(server.call(f"{CAS}BatchUpdateBlobs", asked, api.BatchUpdateBlobsResponse).responses)


def read(server: Server, *digests: Digest) -> dict[Digest, api.BatchReadBlobsResponse.Response]:
    asked = api.BatchReadBlobsRequest(digests=[each.message for each in digests])
    found = server.call(f"{CAS}BatchReadBlobs", asked, api.BatchReadBlobsResponse).responses
    return {Digest(each.digest.hash, each.digest.size_bytes): each for each in found}


@rule
def missing_blobs_are_those_that_are_not_there(server: Server) -> None:
    """FindMissingBlobs answers with the asked digests that the server does not have, and with no others."""
    (there,), gone = server.upload(fresh()), absent()
    assert find(server, there, gone) == {gone}


@rule
def nothing_is_missing_of_nothing(server: Server) -> None:
    """A client may ask about no blob at all."""
    assert find(server) == set()


@rule
def a_digest_may_be_asked_twice(server: Server) -> None:
    """A repeated digest is no error."""
    gone = absent()
    assert find(server, gone, gone) == {gone}


@rule
def the_empty_blob_is_always_there(server: Server) -> None:
    """A server always has the blob of no bytes, whether or not a client has uploaded it."""
    assert find(server, EMPTY) == set()


@rule
def an_uploaded_blob_is_there(server: Server) -> None:
    """Once BatchUpdateBlobs has answered OK for a blob, it is not missing."""
    data = fresh()
    (found,) = update(server, (data, Digest.of(data)))
    assert (found.status.code, find(server, Digest.of(data))) == (0, set())


@rule
def an_upload_may_be_repeated(server: Server) -> None:
    """To upload what is there is no error."""
    data = fresh()
    for _ in range(2):
        assert update(server, (data, Digest.of(data)))[0].status.code == 0


@rule
def each_blob_of_a_batch_has_its_own_status(server: Server) -> None:
    """A blob that does not have its digest is refused as an invalid argument; the others of its batch are stored."""
    good, bad, named = fresh(), fresh(), absent()
    found = {each.digest.hash: each.status.code for each in update(server, (good, Digest.of(good)), (bad, named))}
    assert found == {Digest.of(good).hash: 0, named.hash: code_pb2.INVALID_ARGUMENT}
    assert find(server, Digest.of(good), named) == {named}


@rule
def a_blob_of_another_size_is_refused(server: Server) -> None:
    """The size belongs to the digest: bytes of another length are an invalid argument."""
    data = fresh()
    (found,) = update(server, (data, Digest.of(data)._replace(size=len(data) + 1)))
    assert found.status.code == code_pb2.INVALID_ARGUMENT


@rule
def batches_read_what_was_stored(server: Server) -> None:
    """BatchReadBlobs answers with the bytes of each digest."""
    blobs = [fresh(), fresh(5000)]
    found = read(server, *server.upload(*blobs))
    assert {digest: each.data for digest, each in found.items()} == {Digest.of(each): each for each in blobs}


@rule
def a_blob_that_is_not_there_is_not_found(server: Server) -> None:
    """A missing blob has the status NOT_FOUND in a batch whose other blobs are read."""
    (there,), gone = server.upload(fresh()), absent()
    found = read(server, there, gone)
    assert (found[there].status.code, found[gone].status.code) == (0, code_pb2.NOT_FOUND)


@rule
def blobs_are_not_compressed_unless_asked(server: Server) -> None:
    """A client that names no compressor gets blobs as they are."""
    (there,) = server.upload(fresh(3000))
    assert read(server, there)[there].compressor == api.Compressor.IDENTITY


@rule
def a_tree_has_its_root_and_all_below(server: Server) -> None:
    """GetTree answers with the directory and all directories below it."""
    leaf = api.Directory(files=[api.FileNode(name=uuid4().hex, digest=EMPTY.message)])
    data = leaf.SerializeToString()
    root = api.Directory(directories=[api.DirectoryNode(name="in", digest=Digest.of(data).message)])
    digest, _ = server.upload(root.SerializeToString(), data)
    assert [each.SerializeToString() for each in server.tree(digest)] == [root.SerializeToString(), data]


@rule
def a_tree_without_a_root_is_not_found(server: Server) -> None:
    """GetTree of a directory that is not there is NOT_FOUND."""
    with refused(StatusCode.NOT_FOUND):
        server.tree(absent())


# Blobs: ByteStream


@rule
def a_stream_reads_a_blob(server: Server) -> None:
    """Read of blobs/HASH/SIZE streams all bytes."""
    (digest,) = server.upload(data := fresh(200_000))
    assert server.read(server.resource("blobs", digest)) == data


@rule
def a_read_may_begin_within_and_end_early(server: Server) -> None:
    """A read offset leaves bytes out, and a limit bounds those that follow; a limit of 0 is none."""
    (digest,) = server.upload(data := fresh(1000))
    name = server.resource("blobs", digest)
    assert server.read(name, read_offset=300) == data[300:]
    assert server.read(name, read_offset=300, read_limit=50) == data[300:350]


@rule
def a_read_beyond_the_end_is_out_of_range(server: Server) -> None:
    """An offset behind the last byte is OUT_OF_RANGE."""
    (digest,) = server.upload(fresh())
    with refused(StatusCode.OUT_OF_RANGE):
        server.read(server.resource("blobs", digest), read_offset=digest.size + 1)


@rule
def a_read_of_nothing_is_not_found(server: Server) -> None:
    """Read of a blob that is not there is NOT_FOUND."""
    with refused(StatusCode.NOT_FOUND):
        server.read(server.resource("blobs", absent()))


@rule
def a_written_blob_is_there(server: Server) -> None:
    """Write to uploads/UUID/blobs/HASH/SIZE commits all bytes, in however many pieces they come."""
    pieces = [fresh(3000), fresh(), fresh(9)]
    digest = Digest.of(b"".join(pieces))
    assert server.write(server.resource("uploads", uuid4(), "blobs", digest), *pieces) == digest.size
    assert server.client.download(digest) == b"".join(pieces)


@rule
def more_may_follow_the_size_in_a_name(server: Server) -> None:
    """What follows the size in the name of an upload is ignored."""
    digest = Digest.of(data := fresh())
    assert server.write(server.resource("uploads", uuid4(), "blobs", digest, "file.txt"), data) == digest.size
    assert find(server, digest) == set()


@rule
def a_write_of_what_is_there_is_committed(server: Server) -> None:
    """If the blob is there already, a write answers with its size, maybe before it has read all bytes."""
    (digest,) = server.upload(data := fresh())
    assert server.write(server.resource("uploads", uuid4(), "blobs", digest), data) == digest.size


@rule
def written_bytes_of_another_digest_are_refused(server: Server) -> None:
    """A write whose bytes do not have the digest of its name is an invalid argument, and stores nothing."""
    named = absent()
    with refused(StatusCode.INVALID_ARGUMENT):
        server.write(server.resource("uploads", uuid4(), "blobs", named), fresh())
    assert find(server, named) == {named}


@rule
def a_name_that_is_none_is_refused(server: Server) -> None:
    """A resource name of another form is an invalid argument."""
    for call in (lambda name: server.read(name), lambda name: server.write(name, b"x")):
        with refused(StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND):
            call("nonsense")


# Results of actions


def cached(server: Server, digest: Digest) -> api.ActionResult:
    asked = api.GetActionResultRequest(action_digest=digest.message)
    found: api.ActionResult = server.call(f"{ACTION_CACHE}GetActionResult", asked, api.ActionResult)
    return found


@rule
def an_action_that_never_ran_has_no_result(server: Server) -> None:
    """GetActionResult of an unknown action is NOT_FOUND."""
    with refused(StatusCode.NOT_FOUND):
        cached(server, absent())


@rule
def clients_store_results_if_the_server_says_so(server: Server) -> None:
    """UpdateActionResult works where the capabilities permit updates, and is refused elsewhere."""
    permitted = capabilities(server).cache_capabilities.action_cache_update_capabilities.update_enabled
    digest, told = server.action("true"), api.ActionResult(stdout_raw=b"told")
    asked = api.UpdateActionResultRequest(action_digest=digest.message, action_result=told)
    if permitted:
        server.call(f"{ACTION_CACHE}UpdateActionResult", asked, api.ActionResult)
        assert cached(server, digest).stdout_raw == b"told"
    else:
        with refused(StatusCode.PERMISSION_DENIED, StatusCode.UNIMPLEMENTED):
            server.call(f"{ACTION_CACHE}UpdateActionResult", asked, api.ActionResult)


@rule
def a_success_is_kept_and_answers_the_next_execute(server: Server) -> None:
    """The result of an action that has succeeded is in the cache, and Execute says when it comes from there."""
    action = server.action("echo kept", output_paths=["a"])
    first, second = server.run(action), server.run(action)
    assert (first.cached_result, second.cached_result) == (False, True)
    assert server.output(second.result) == server.output(cached(server, action)) == b"kept\n"


@rule
def a_look_up_may_be_skipped(server: Server) -> None:
    """With skip_cache_lookup the action runs, whatever the cache has."""
    action = server.action("true")
    server.run(action)
    assert not server.run(action, skip_cache_lookup=True).cached_result


@rule
def what_is_not_to_be_kept_is_not(server: Server) -> None:
    """The result of an action with do_not_cache is not stored, and the action runs again."""
    action = server.action("true", do_not_cache=True)
    server.run(action)
    with refused(StatusCode.NOT_FOUND):
        cached(server, action)
    assert not server.run(action).cached_result


@rule
def a_failure_is_no_answer_for_others(server: Server) -> None:
    """A result of an exit code other than 0 is not served from the cache to clients who run the action again."""
    action = server.action("exit 3")
    assert [server.run(action).cached_result for _ in range(2)] == [False, False]


# Execution: what actions see and leave


@rule
def inputs_are_staged_with_their_modes(server: Server) -> None:
    """Files of the input root are where its directories say, those that are executable can be run."""
    assert server.contents(server.rich)["ran.txt"] == b"ran\n"


@rule
def links_among_the_inputs_lead_where_they_say(server: Server) -> None:
    """A symlink of the input root has its target, and is followed."""
    found = server.contents(server.rich)
    assert (found["target.txt"], found["copy.txt"]) == (b"a.txt\n", b"a source")


@rule
def commands_run_in_their_working_directory(server: Server) -> None:
    """The command runs in its working directory, below the input root."""
    assert server.contents(server.rich)["pwd.txt"].rstrip().endswith(b"/work")


@rule
def outputs_are_relative_to_the_working_directory(server: Server) -> None:
    """Paths of outputs are told relative to the working directory, as they were declared."""
    assert {"copy.txt", "script"} <= {each.path for each in server.rich.output_files}


@rule
def variables_have_the_values_of_the_command(server: Server) -> None:
    """The environment has the variables of the command, and their values as they are."""
    assert b"FLAVOUR=sour = sweet\n" in server.contents(server.rich)["env.txt"]


@rule
def directories_above_outputs_are_made(server: Server) -> None:
    """Directories that lead to a declared output exist before the command runs."""
    assert server.contents(server.rich)["parents.txt"] == b"new/deep\n"


@rule
def only_declared_outputs_are_told(server: Server) -> None:
    """A file that is no declared output is not in the result."""
    assert "undeclared.txt" not in {each.path for each in server.rich.output_files}


@rule
def an_output_that_is_not_made_is_no_error(server: Server) -> None:
    """A declared output that the command does not make is left out of the result."""
    assert server.rich.exit_code == 0
    assert not {"absent", "new/deep/file"} & {each.path for each in server.rich.output_files}


@rule
def outputs_are_blobs(server: Server) -> None:
    """All outputs can be read when the result is told."""
    digests = [Digest(each.digest.hash, each.digest.size_bytes) for each in server.rich.output_files]
    assert find(server, *digests) == set()


@rule
def outputs_that_are_executable_are_told_so(server: Server) -> None:
    """The result says which output files are executable."""
    modes = {each.path: each.is_executable for each in server.rich.output_files}
    assert (modes["script"], modes["copy.txt"]) == (True, False)


@rule
def output_links_are_told_as_links(server: Server) -> None:
    """An output that is a symlink is told with its target."""
    if server.is_ours:
        pytest.skip("buildbox-run 1.4.25 refuses an output that is a link")
    found = server.done("ln -s copy.txt soft", output_paths=["soft"])
    links = [*found.output_symlinks, *found.output_file_symlinks]
    assert {(each.path, each.target) for each in links} == {("soft", "copy.txt")}


@rule
def an_output_directory_is_a_tree(server: Server) -> None:
    """A directory is told by a Tree, with its root and all directories below, whose files can be read."""
    (told,) = server.rich.output_directories
    data = server.client.download(Digest(told.tree_digest.hash, told.tree_digest.size_bytes))
    tree = api.Tree.FromString(data)
    (child,) = tree.children
    assert (told.path, [each.name for each in tree.root.directories]) == ("tree", ["below"])
    (file,) = child.files
    assert server.client.download(Digest(file.digest.hash, file.digest.size_bytes)) == b"deep\n"


@rule
def what_is_said_is_kept_apart(server: Server) -> None:
    """Standard output and standard error are told, each for itself."""
    assert (server.output(server.rich), server.output(server.rich, "stderr")) == (b"said\n", b"cried\n")


@rule
def outputs_of_old_clients_are_told(server: Server) -> None:
    """Clients before 2.1 name output files and directories apart."""
    found = server.done("mkdir d; echo 1 > d/f; echo 2 > f", output_files=["f"], output_directories=["d"])
    assert ([each.path for each in found.output_files], [each.path for each in found.output_directories]) == (
        ["f"],
        ["d"],
    )


@rule
def an_exit_code_is_a_result(server: Server) -> None:
    """A command that fails is an action that has ended: the status is OK, and the result has the exit code."""
    found = server.run(server.action("echo why >&2; exit 42"))
    assert (found.status.code, found.result.exit_code, server.output(found.result, "stderr")) == (0, 42, b"why\n")


@rule
def an_action_that_takes_too_long_has_exceeded_its_deadline(server: Server) -> None:
    """An action that runs longer than its time-out ends with the status DEADLINE_EXCEEDED."""
    found = server.run(server.action("exec sleep 30", timeout={"seconds": 1}))
    assert found.status.code == code_pb2.DEADLINE_EXCEEDED


@rule
def the_worker_and_its_times_are_told(server: Server) -> None:
    """The result names its worker, and when execution began and ended."""
    told = server.rich.execution_metadata
    began, ended = (getattr(told, f"execution_{end}_timestamp").ToNanoseconds() for end in ("start", "completed"))
    assert told.worker
    assert 0 < began <= ended


# Execution: what is refused


@rule
def a_digest_that_is_none_is_refused(server: Server) -> None:
    """A request that cannot be meant is an invalid argument."""
    with refused(StatusCode.INVALID_ARGUMENT):
        list(server.begin(Digest("no digest", 3)))


@rule
def a_missing_action_is_named(server: Server) -> None:
    """An action that the storage does not have is a failed precondition that names it: MISSING, blobs/HASH/SIZE."""
    gone = absent()
    with refused(StatusCode.FAILED_PRECONDITION) as details:
        list(server.begin(gone))
    assert missing_blobs(details) == [f"blobs/{gone}"]


@rule
def a_missing_command_is_named(server: Server) -> None:
    """The same holds for the command of the action."""
    gone = absent()
    action = api.Action(command_digest=gone.message, input_root_digest=EMPTY.message, salt=fresh())
    with refused(StatusCode.FAILED_PRECONDITION) as details:
        list(server.begin(server.upload(action.SerializeToString())[0]))
    assert missing_blobs(details) == [f"blobs/{gone}"]


@rule
def a_missing_input_is_named(server: Server) -> None:
    """The same holds for inputs, in the error of the call or in the status of the response."""
    gone = absent()
    root = api.Directory(files=[api.FileNode(name="a", digest=gone.message)]).SerializeToString()
    status = server.run(server.action("true", root=root)).status
    assert (status.code, missing_blobs(status.details)) == (code_pb2.FAILED_PRECONDITION, [f"blobs/{gone}"])


@rule
def a_priority_out_of_range_is_refused(server: Server) -> None:
    """A priority outside of all announced ranges is an invalid argument."""
    ranges = capabilities(server).execution_capabilities.execution_priority_capabilities.priorities
    if not ranges:
        pytest.skip("the server announces no priorities")
    highest = max(each.max_priority for each in ranges)
    with refused(StatusCode.INVALID_ARGUMENT):
        list(server.begin(server.action("true"), execution_policy={"priority": highest + 1}))


# Operations


def parent(server: Server) -> str:
    """What the names of a server's operations begin with."""
    return str(next(server.begin(server.action("true"))).name.rpartition("/")[0])


@rule
def operations_tell_their_action_and_stage(server: Server) -> None:
    """Each message of a stream is the operation with a name, and ExecuteOperationMetadata with action and stage."""
    action = server.action("true")
    operations = list(server.begin(action))
    metadata = [api.ExecuteOperationMetadata.FromString(each.metadata.value) for each in operations]
    assert {each.name for each in operations} == {operations[0].name} != {""}
    assert {each.metadata.type_url.rpartition(".")[2] for each in operations} == {"ExecuteOperationMetadata"}
    assert {each.action_digest.hash for each in metadata} == {action.hash}
    assert metadata[-1].stage == STAGE.COMPLETED
    assert STAGE.UNKNOWN not in {each.stage for each in metadata}


@rule
def only_the_last_message_is_done(server: Server) -> None:
    """An operation is done with its last message, which has an ExecuteResponse and no error."""
    *before, last = server.begin(server.action("exit 1"))
    assert not any(each.done for each in before)
    assert (last.done, last.WhichOneof("result")) == (True, "response")
    assert last.response.type_url.endswith("build.bazel.remote.execution.v2.ExecuteResponse")


@rule
def a_client_waits_again_by_the_name(server: Server) -> None:
    """A client that has lost its stream goes on with WaitExecution, and gets the same operation to its end."""
    with server.waits():
        stream = server.begin(server.action("sleep 0.1; echo at last"))
        name = next(stream).name
        stream.cancel()
        waiting = server.wait(name)
        assert next(waiting).name == name
    (*_, last) = waiting
    assert (last.name, server.output(response_of(last).result)) == (name, b"at last\n")


@rule
def what_is_over_is_told_at_once(server: Server) -> None:
    """WaitExecution on an operation that is done answers with it."""
    (*_, last) = server.begin(server.action("true"))
    assert [each.done for each in server.wait(last.name)] == [True]


@rule
def an_unknown_operation_is_not_found(server: Server) -> None:
    """WaitExecution on a name that no operation has is NOT_FOUND, at which clients call Execute again."""
    with refused(StatusCode.NOT_FOUND):
        list(server.wait(f"{parent(server)}/{uuid4()}"))


@rule
def an_operation_can_be_read(server: Server) -> None:
    """GetOperation tells how an operation stands."""
    with server.waits():
        stream = server.begin(server.action("sleep 0.1"))
        name = next(stream).name
        assert (server.operation(name).name, server.operation(name).done) == (name, False)
    list(stream)
    assert server.operation(name).done


def listed(server: Server, **fields: Any) -> Any:
    asked = ListOperationsRequest(name=parent(server), **fields)
    return server.call("/google.longrunning.Operations/ListOperations", asked, ListOperationsResponse)


@rule
def operations_are_listed_in_pages(server: Server) -> None:
    """ListOperations has at most page_size operations, and the next page by the token; all have other names."""
    with server.waits():
        streams = [server.begin(server.action("sleep 1")) for _ in range(3)]
        names, found, token = {next(stream).name for stream in streams}, list[str](), ""
        while token or not found:
            page = listed(server, page_size=2, page_token=token)
            assert len(page.operations) <= 2
            found += [each.name for each in page.operations]
            token = page.next_page_token
    assert len(found) == len({*found})
    assert {*found} >= names
    assert all(response_of([*stream][-1]).status.code == 0 for stream in streams)


@rule
def a_listed_operation_that_is_done_has_its_response(server: Server) -> None:
    """A listed operation is as GetOperation has it: done with a response, or not done."""
    name = [*server.begin(server.action("exit 3"))][-1].name
    (found,) = [each for each in listed(server).operations if each.name == name]
    assert (found.done, response_of(found).result.exit_code) == (True, 3), found


@rule
def a_token_of_no_page_is_refused(server: Server) -> None:
    """A page token is one that an earlier page gave."""
    with refused(StatusCode.INVALID_ARGUMENT):
        listed(server, page_token="nonsense")


@rule
def a_cancelled_operation_ends_so(server: Server) -> None:
    """A cancelled operation ends with the code CANCELLED, for all who wait for it."""
    with server.waits():
        stream = server.begin(server.action("sleep 5"))
        asked = CancelOperationRequest(name=next(stream).name)
        server.call("/google.longrunning.Operations/CancelOperation", asked, Empty)
        (*_, last) = stream
    found = last.error if last.HasField("error") else response_of(last).status
    assert found.code == code_pb2.CANCELLED


@rule
def two_who_ask_for_one_action_get_one_answer(server: Server) -> None:
    """Equal actions at the same time both end with a result of the action."""
    action = server.action("sleep 0.1; echo one")
    with server.waits():
        streams = [server.begin(action), server.begin(action)]
        assert all(not next(each).done for each in streams)
    ends = [response_of([*each][-1]) for each in streams]
    assert [server.output(each.result) for each in ends] == [b"one\n", b"one\n"]


@pytest.mark.parametrize("check", CASES, ids=lambda check: check.__name__)
def test_the_server_keeps_the_rule(server: Server, check: Check) -> None:
    check(server)
