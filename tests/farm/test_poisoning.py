"""Attempts to decide what others get for an action: none may reach the cache of results."""

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import grpc
import psycopg
import pytest
from leasehold.errors import BadInput, Forbidden
from structlog.testing import capture_logs

from bots.farm.client import Client, Work, response_of
from bots.farm.protos import remote_execution_pb2
from bots.farm.storage.upstream import ACTION_CACHE, CAS, Digest
from bots.protocol import OpenSession
from schema.postgres.statements import Statement
from schema.tenancy.tokens import Kind, Principal
from tests.support.farm.doors import FARM_BOT, Farm, finish, left
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, open_session
from tests.support.servers import Served

OUTPUT = b"what somebody else wants others to get"
RESERVED = {"leasehold.farm": "action"}


def work(**more: Any) -> Work:
    return Work(**{"arguments": ["/bin/true"], "salt": uuid4().bytes, **more})


def forged() -> str:
    return left(stdout_raw=OUTPUT)


def ends(farm: Farm, jobs: list[str]) -> None:
    """Let a farm bot, or else a plain one, run all jobs that wait, with a forged result."""
    for bot in (farm.bot(f"w-{uuid4().hex[:8]}"), farm.pool.bot(f"p-{uuid4().hex[:8]}", capacity=10)):
        if given := farm.given(bot):
            finish(bot, *given, exit_code=0, result=forged())
    states = farm.pool.rows("SELECT state FROM jobs WHERE public_id = ANY (CAST(:ids AS uuid[]))", ids=jobs)
    assert {row.state for row in states} == {"succeeded"}


def asks(client: Client, name: str) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        list(client.wait(name))
    code: grpc.StatusCode = refused.value.code()
    return code


def test_no_client_stores_a_result_or_a_blob_under_a_name_that_is_not_its_own(farm: Farm) -> None:
    with farm.client() as client:
        digest = client.upload(work().blobs())[0]
        result = remote_execution_pb2.ActionResult(stdout_raw=OUTPUT)
        asked = remote_execution_pb2.UpdateActionResultRequest(action_digest=digest.message, action_result=result)
        with pytest.raises(grpc.RpcError) as refused:
            client.call(ACTION_CACHE + "UpdateActionResult", asked, remote_execution_pb2.ActionResult)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert client.cached(digest) is None
        wanted = Digest.of(uuid4().bytes)
        one = remote_execution_pb2.BatchUpdateBlobsRequest.Request(digest=wanted.message, data=b"0" * wanted.size)
        asked = remote_execution_pb2.BatchUpdateBlobsRequest(requests=[one])
        (answer,) = client.call(
            CAS + "BatchUpdateBlobs", asked, remote_execution_pb2.BatchUpdateBlobsResponse
        ).responses
        assert answer.status.code != 0


def test_nobody_but_the_door_submits_what_could_pass_for_an_action(
    farm: Farm, served: Served, database_url: str, operate: Callable[..., tuple[int, str]]
) -> None:
    """By HTTP in every form and as every kind of caller, by SQL, and by the command."""
    words = ["leasehold-action", f"{'0' * 64}/1"]
    plain, asking = {"command": words}, {"command": words, "properties": RESERVED}
    key = {**plain, "dedup_key": f"a:{'0' * 64}/1"}
    nested = {"payload": plain, "properties": RESERVED}
    for kind in ("submitter", "operator"):
        with served.client(served.token(kind)) as http:
            for path, body in (
                *(("/v1/jobs", {"jobs": [job]}) for job in (asking, nested, key, {**key, "on_conflict": "replace"})),
                ("/v1/jobs", {"jobs": [{**plain, "preferred_properties": RESERVED}]}),
                ("/v1/graphs", {"name": "g", "nodes": [{"node": 0, **asking}]}),
                ("/v1/graphs", {"name": "g", "nodes": [{"node": 0, **nested}]}),
                ("/v1/graphs", {"name": "g", "nodes": [{"node": 0, **plain}], "callback": asking}),
            ):
                answer = http.post(path, json=body)
                assert answer.status_code == 400, (path, body, answer.text)
                assert "farm door" in answer.text
    graph = {"name": "g", "nodes": [{"node": 0, **nested}]}
    with psycopg.connect(database_url, autocommit=True) as connection:
        for function, given in (
            *(("submit", [job]) for job in (asking, nested, key)),
            *(("submit_graph", graph | {"nodes": [{"node": 0, **each}]}) for each in (asking, nested)),
        ):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                connection.execute(f"SELECT leasehold.{function}(%s, 'farm:x')", [json.dumps(given)])  # type: ignore[arg-type]
    code, said = operate("submit", "--property", "leasehold.farm=action", "--", *words)
    assert (code, "farm door" in said) == (2, True)
    code, said = operate(
        "schedule", "add", "s", "--cron", "* * * * *", "--property", "leasehold.farm=action", "--", "true"
    )
    assert (code, "farm door" in said) == (2, True), said
    assert farm.pool.rows("SELECT FROM jobs") == []


def test_the_result_of_a_job_that_is_not_the_doors_is_never_kept(farm: Farm) -> None:
    """Jobs that only look like those of the door, as a requeue makes one or whoever writes into the database."""
    wanted = work()
    with farm.client() as client, ThreadPoolExecutor() as crew:
        digest = client.upload(wanted.blobs())[0]
        action = base64.b64encode(wanted.blobs()[0]).decode()
        payload = {"command": ["leasehold-action", str(digest), f"--cas={farm.address}", f"--action={action}"]}
        jobs = [
            *farm.pool.submit(payload=payload),
            *farm.pool.submit(payload=payload, properties=RESERVED),
            *farm.pool.submit(payload=payload, properties=RESERVED, dedup_key=f"a:{digest}"),
        ]
        with pytest.raises(grpc.RpcError) as refused:
            list(client.execute(digest))
        assert refused.value.code() is grpc.StatusCode.ABORTED, "the job with the key is not joined as if it were ours"
        calls = [crew.submit(asks, client, f"default/operations/{job}") for job in jobs]
        assert {call.result(MINUTE) for call in calls} == {grpc.StatusCode.NOT_FOUND}
        ends(farm, jobs)
        assert {asks(client, f"default/operations/{job}") for job in jobs} == {grpc.StatusCode.NOT_FOUND}
        assert client.cached(digest) is None


def test_the_door_keeps_a_result_only_for_the_action_that_the_job_has_run(farm: Farm) -> None:
    """The job's payload is changed under the door; each change could make the runner do something else."""
    other = base64.b64encode(work(arguments=["/bin/false"]).blobs()[0]).decode()
    with farm.client() as client, ThreadPoolExecutor() as crew:
        for change, kept in (
            ("payload", True),
            ("jsonb_set(payload, '{command,2}', '\"--cas=grpc://127.0.0.1:1\"')", False),
            (f"jsonb_set(payload, '{{command,-1}}', '\"--action={other}\"')", False),
            ("jsonb_set(payload, '{command,1}', to_jsonb(CAST(:other AS text)))", False),
            ("jsonb_set(payload, '{env}', '{\"LD_PRELOAD\": \"x\"}')", False),
            ("jsonb_set(payload, '{stdin}', '\"x\"')", False),
        ):
            wanted = work()
            victim = client.upload(work().blobs())[0]
            call = crew.submit(client.run, wanted)
            eventually(lambda: farm.pool.rows("SELECT FROM jobs WHERE state = 'queued'"))
            values = {"other": str(victim)} if ":other" in change else {}
            where = "job_id IN (SELECT id FROM jobs WHERE state = 'queued')"
            farm.pool.change(f"UPDATE job_payloads SET payload = {change} WHERE {where}", **values)
            bot = farm.bot()
            finish(bot, *farm.given(bot), exit_code=0, result=forged())
            assert call.result(MINUTE).status.code == 0
            assert (client.cached(Digest.of(wanted.blobs()[0])) is not None, change) == (kept, change)
            assert client.cached(victim) is None, change


def test_a_door_says_which_settings_of_another_door_keep_it_from_keeping_a_result(pool: Pool, cas: str) -> None:
    """The door that made the job has gone, and the one whose client joined it would have made another."""
    first = Farm(pool, cas)
    first.stop()
    bot = first.bot()
    differing = (
        f"bots_reach: there {first.address}, here ADDRESS; mounts: there /usr /bin /lib /lib64 /etc/alternatives, "
    )
    for settings, said, kept in (
        ({"mounts": ("/usr",)}, [f"{differing}here /usr"], False),
        ({"bots_token_file": "/t", "bots_reach": first.address}, ["bots_token_file: there unset, here /t"], False),
        ({"bots_reach": first.address}, [], True),
    ):
        first.start()
        other = Farm(pool, cas, **settings)
        with other.client() as client, capture_logs() as logs:
            digest = client.upload(work().blobs())[0]
            with first.client() as gone:
                next(gone.execute(digest))
            joined = client.execute(digest)
            next(joined)
            first.stop()
            finish(bot, *first.given(bot), exit_code=0, result=forged())
            (*_, last) = joined
            assert response_of(last).status.code == 0
            assert (client.cached(digest) is not None) == kept
        other.stop()
        told = [each["differing"] for each in logs if each["event"].startswith("a door with other settings")]
        assert [each.replace(other.address, "ADDRESS") for each in told] == said


def test_only_successes_whose_outputs_are_there_are_kept(farm: Farm) -> None:
    lost = remote_execution_pb2.OutputFile(path="a", digest=Digest.of(b"not uploaded").message)
    bot = farm.bot()
    root = remote_execution_pb2.Directory(files=[{"name": "a", "digest": lost.digest}])
    tree = remote_execution_pb2.Tree(root=root).SerializeToString()
    hollow = remote_execution_pb2.OutputDirectory(path="a", tree_digest=Digest.of(tree).message)
    with farm.client() as client, ThreadPoolExecutor() as crew:
        client.upload([tree])
        for wanted, verdict, result in (
            (work(), "failed", left(exit_code=1)),
            (work(), "failed", left(4, exit_code=137)),
            (work(), "succeeded", left(exit_code=1)),
            (work(), "succeeded", left(output_files=[lost])),
            (work(), "succeeded", left(output_directories=[hollow])),
            (work(), "succeeded", '{"code": 0, "result": "AAA"}'),
            (work(), "succeeded", "[1]"),
            (work(do_not_cache=True), "succeeded", left()),
        ):
            call = crew.submit(client.run, wanted)
            given = eventually(lambda: farm.given(bot))
            finish(bot, *given, verdict=verdict, exit_code=0 if verdict == "succeeded" else 1, result=result)
            call.result(MINUTE)
            assert client.cached(Digest.of(wanted.blobs()[0])) is None, result


def test_only_bots_that_an_operator_has_named_run_actions_and_nothing_else(farm: Farm) -> None:
    asked = OpenSession(bot="b", capacity=1, properties=RESERVED)
    with pytest.raises(BadInput, match="bots that run actions run nothing else"):
        open_session(farm.pool.database, asked, timing=farm.pool.timing)
    tenant = {"kind": Kind.BOT, "id": "t", "bot": "b*", "instance": "ci"}
    with pytest.raises(Forbidden, match=r"leasehold\.farm"):
        Principal(**tenant).check_session("b1", instance="ci", properties=RESERVED)
    Principal(**tenant, properties={"leasehold.farm": ["action"]}).check_session(
        "b1", instance="ci", properties=RESERVED
    )
    Principal(kind=Kind.BOT, id="t", bot="b*").check_session("b1", instance=None, properties=RESERVED)
    # A bot that runs actions is given no plain job.
    farm.pool.submit()
    assert farm.given(farm.bot()) == []
    assert FARM_BOT["exclusive"] == ["leasehold.farm"]
    assert farm.pool.database.run(lambda c: c.execute(Statement("SELECT count(*) FROM leases")).scalar_one()) == 0
