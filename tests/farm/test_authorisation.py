"""Who may call what, where other machines reach the door: every method against every kind of caller."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from google.longrunning.operations_proto_pb2 import CancelOperationRequest

from bots.farm import server
from bots.farm.client import Client, Keys, Work, response_of
from bots.farm.protos import remote_execution_pb2 as messages
from schema.tenancy import tokens
from tests.support.farm.certificates import Authority, behind_tls
from tests.support.farm.doors import Farm, finish, left, reachable
from tests.support.pool import Pool

#: Method, and what a submitter of the job's instance, one of another instance, a bot and an operator get: + = not
#: refused, - = PERMISSION_DENIED, ? = NOT_FOUND. Everybody else gets UNAUTHENTICATED, but for capabilities: Bazel 2
#: asks for them without its token.
RULES = """
build.bazel.remote.execution.v2.Execution/Execute                              + - - +
build.bazel.remote.execution.v2.Execution/WaitExecution                        + ? - +
google.longrunning.Operations/GetOperation                                     + ? - +
google.longrunning.Operations/ListOperations                                   + + - +
google.longrunning.Operations/CancelOperation                                  + ? - +
build.bazel.remote.execution.v2.Capabilities/GetCapabilities                   + + + +
build.bazel.remote.execution.v2.ContentAddressableStorage/FindMissingBlobs     + + + +
build.bazel.remote.execution.v2.ContentAddressableStorage/BatchUpdateBlobs     + + + +
build.bazel.remote.execution.v2.ContentAddressableStorage/BatchReadBlobs       + + + +
build.bazel.remote.execution.v2.ContentAddressableStorage/GetTree              + + + +
google.bytestream.ByteStream/Read                                              + + + +
google.bytestream.ByteStream/Write                                             + + + +
google.bytestream.ByteStream/QueryWriteStatus                                  + + + +
build.bazel.remote.execution.v2.ActionCache/GetActionResult                    + + + +
build.bazel.remote.execution.v2.ActionCache/UpdateActionResult                 - - - -
google.devtools.remoteworkers.v1test2.Bots/CreateBotSession                    - - + -
google.devtools.remoteworkers.v1test2.Bots/UpdateBotSession                    - - ? -
"""
CODE = grpc.StatusCode
NAMED = {"-": CODE.PERMISSION_DENIED, "?": CODE.NOT_FOUND}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def token(pool: Pool, kind: str, **scope: Any) -> str:
    return pool.database.run(lambda connection: tokens.create(connection, kind, **scope))


def answer(client: Client, method: str, request: bytes) -> grpc.StatusCode:
    """The code of a call, or OK once it has been answered once. A stream is the same as one message on the wire."""
    call = client.channel.stream_stream(f"/{method}")(iter([request]), metadata=client.headers, timeout=20)
    try:
        next(call)
    except StopIteration:
        return CODE.OK
    except grpc.RpcError as error:
        found: grpc.StatusCode = error.code()
        return found
    finally:
        call.cancel()
    return CODE.OK


def test_every_method_is_open_to_the_callers_that_the_table_names(
    pool: Pool, cas: str, port: int, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[str] = []
    plain = server._by_service
    monkeypatch.setattr(server, "_by_service", lambda handlers: (answered.extend(handlers), plain(handlers))[1])
    farm = reachable(pool, cas, authority, port)
    rules = {line.split()[0]: line.split()[1:] for line in RULES.strip().splitlines()}
    assert {name.removeprefix("/") for name in answered} == set(rules)

    expired, revoked = token(pool, "submitter"), token(pool, "submitter")
    pool.change("UPDATE tokens SET expires_at = now() WHERE id = :id", id=tokens.parse(expired))
    pool.database.run(lambda connection: tokens.revoke(connection, tokens.parse(revoked)))
    known = [
        token(pool, "submitter", instance="ci"),
        token(pool, "submitter", instance="other"),
        token(pool, "bot", bot="*"),
        token(pool, "operator"),
    ]
    unknown = [None, expired, revoked, "lh_no", token(pool, "submitter")[:-1] + "x"]
    with Client(farm.address, Keys(known[0], authority.ca), instance="ci") as client:
        digest = client.upload(Work(["/bin/true"], salt=uuid4().bytes).blobs())[0]
        operation = next(client.execute(digest)).name
    asked = messages.ExecuteRequest(instance_name="ci", action_digest=digest.message).SerializeToString()
    named = CancelOperationRequest(name=operation).SerializeToString()
    requests: Mapping[str, bytes] = {"Execute": asked, **dict.fromkeys(("WaitExecution", "GetOperation"), named)}
    # The operation is cancelled by the last call of all.
    for method in sorted(rules, key=lambda name: name.endswith("CancelOperation")):
        request = requests.get(method.rpartition("/")[2], named if method.endswith("CancelOperation") else b"")
        for one in unknown:
            with Client(farm.address, Keys(one, authority.ca)) as client:
                found = answer(client, method, request)
                assert (found is CODE.UNAUTHENTICATED) is (not method.endswith("/GetCapabilities")), (method, one)
        for one, expected in zip(known, rules[method], strict=True):
            with Client(farm.address, Keys(one, authority.ca)) as client:
                found = answer(client, method, request)
            refused = found if found in (CODE.PERMISSION_DENIED, CODE.UNAUTHENTICATED) else None
            assert (found if expected == "?" else refused) is NAMED.get(expected), (method, expected)
    assert len(pool.rows("SELECT FROM jobs")) == 1, "nobody has submitted for another instance"
    farm.stop()


def test_the_holder_of_a_certificate_may_do_what_its_common_name_may(
    pool: Pool, cas: str, port: int, authority: Authority, tmp_path: Path
) -> None:
    scopes = {"builder": {"instance": "ci"}, "w1": {"kind": "bot", "bot": "w*"}}
    farm = reachable(pool, cas, authority, port, tls_client_ca=authority.ca, certificates=scopes)
    blobs = Work(["/bin/true"], salt=uuid4().bytes).blobs()
    keys = {name: Keys(None, authority.ca, **authority.pair(name)) for name in ("builder", "w1", "stranger")}
    with Client(farm.address, keys["builder"]) as client:
        digest = client.upload(blobs)[0]
        assert next(client.execute(digest)).name.startswith("ci/operations/")
    (job,) = pool.rows("SELECT submitted_by FROM job_payloads")
    assert job.submitted_by == "farm:submitter:certificate builder"
    operator = keys["stranger"]._replace(token=token(pool, "operator"))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    other = Authority(elsewhere)
    for key, code in (
        (keys["w1"], CODE.PERMISSION_DENIED),
        (keys["stranger"], CODE.UNAUTHENTICATED),
        (operator, CODE.OK),
        # No handshake without a certificate of the authority.
        (Keys(operator.token, authority.ca), CODE.UNAVAILABLE),
        (Keys(operator.token, authority.ca, **other.pair("builder")), CODE.UNAVAILABLE),
    ):
        asked = messages.ExecuteRequest(action_digest=digest.message).SerializeToString()
        with Client(farm.address, key) as client:
            assert answer(client, "build.bazel.remote.execution.v2.Execution/Execute", asked) is code, key
    farm.stop()


def test_a_door_reaches_its_storage_by_tls_and_is_known_by_its_certificate(
    pool: Pool, cas: str, authority: Authority
) -> None:
    wanted = Work(["/bin/true"], salt=uuid4().bytes)
    own = {f"cas_{name}": path for name, path in authority.pair("door").items()}
    with behind_tls(cas.removeprefix("unix:"), authority) as place:
        farm = Farm(pool, f"grpcs://{place}", cas_ca=authority.ca, **own)
        with farm.client() as client:
            digest = client.upload(wanted.blobs())[0]
            stream, bot = client.execute(digest), farm.bot()
            next(stream)
            finish(bot, *farm.given(bot), exit_code=0, result=left())
            (*_, last) = stream
            assert response_of(last).status.code == 0
            assert client.cached(digest) is not None
        farm.stop()
