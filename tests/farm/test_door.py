"""Actions through the door: they run once, their ends reach the clients, and no restart of a door loses one."""

import asyncio
import gc
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import uuid4

import grpc
import psycopg
import pytest
from google.longrunning.operations_proto_pb2 import ListOperationsRequest, ListOperationsResponse
from google.rpc import code_pb2, error_details_pb2, status_pb2
from leasehold.errors import BadInput, Forbidden, NotReady
from structlog.testing import capture_logs

from assigner.api.submission import submit_completed
from assigner.queries import builds
from bots.farm import server
from bots.farm.client import Client, Work, response_of
from bots.farm.execution.jobs import END, NEWS, Jobs, ends_in
from bots.farm.execution.operations import Filter
from bots.farm.execution.request_metadata import HEADERS
from bots.farm.execution.watches import Watches
from bots.farm.identity import DoorCaller
from bots.farm.metrics import MOST, DoorMetrics
from bots.farm.protos import remote_execution_pb2
from bots.farm.server import OPERATIONS, run
from bots.farm.settings import PropertyPolicy
from bots.farm.storage import upstream
from bots.farm.storage.upstream import CAPABILITIES, Digest
from bots.gateway.workers import WorkerPool
from schema.moves.cancel import cancel
from schema.moves.waiting import abandon
from schema.postgres.engine import Database, DatabaseSettings, libpq_url
from schema.requests import JobRequest
from schema.tenancy import instances
from schema.tenancy.tokens import Kind
from tests.support.farm.certificates import Authority
from tests.support.farm.conformance import runs_actions
from tests.support.farm.doors import Farm, executes, finish, left, reachable
from tests.support.patience import MINUTE, eventually
from tests.support.plans import round_trips
from tests.support.pool import Pool, completed
from tests.support.race import Race
from tests.support.servers import Served


def work(**more: Any) -> Work:
    """An action that no other test has run."""
    return Work(**{"arguments": ["/bin/true"], "salt": uuid4().bytes, **more})


def states(farm: Farm) -> list[str]:
    return [row.state for row in farm.pool.rows("SELECT state FROM jobs ORDER BY id")]


def words(farm: Farm, given: dict[str, Any]) -> list[str]:
    """The command of a job that a bot has been given."""
    query = "SELECT payload FROM job_payloads JOIN jobs j ON j.id = job_id WHERE j.public_id = CAST(:job AS uuid)"
    (row,) = farm.pool.rows(query, job=given["job"])
    return list(row.payload["command"])


def test_an_action_that_two_clients_want_runs_once_and_later_comes_from_the_cache(farm: Farm) -> None:
    bot, wanted = farm.bot(), work()
    with ThreadPoolExecutor() as crew, farm.client() as first, farm.client() as second:
        calls = [crew.submit(each.run, wanted) for each in (first, second)]
        eventually(lambda: farm.pool.rows("SELECT FROM job_followers"))
        (given,) = farm.given(bot)
        finish(bot, given, exit_code=0, result=left())
        answers = [call.result(MINUTE) for call in calls]
        assert [(each.status.code, each.cached_result) for each in answers] == [(0, False)] * 2
        assert answers[0].result.execution_metadata.worker == "w1"
        assert first.run(wanted).cached_result
        # What does not want to be kept is neither joined nor looked up, and a look-up can be skipped.
        fresh = [
            crew.submit(first.run, wanted, skip_cache=True),
            *(crew.submit(second.run, wanted._replace(do_not_cache=True)) for _ in range(2)),
        ]
        eventually(lambda: len(states(farm)) == 4)
        finish(bot, *farm.given(bot), verdict="failed", exit_code=1, result=left(exit_code=3))
        assert [call.result(MINUTE).result.exit_code for call in fresh] == [3, 3, 3]


def test_a_new_action_is_told_without_a_look_at_its_job_and_its_end_takes_one_round_trip(farm: Farm) -> None:
    bot, wanted = farm.bot(), work()
    with farm.client() as client:
        digest = client.upload(wanted.blobs())[0]
        with round_trips() as sent:
            told = next(stream := client.execute(digest))
        assert not [each for each in sent if NEWS.query.decode() in each and each[-1] == "COMMIT"]
        metadata = remote_execution_pb2.ExecuteOperationMetadata()
        told.metadata.Unpack(metadata)
        queued = metadata.partial_execution_metadata.queued_timestamp.ToDatetime(UTC)
        (row,) = farm.pool.rows("SELECT queued_at FROM jobs")
        assert metadata.stage == remote_execution_pb2.ExecutionStage.QUEUED
        assert abs(queued - row.queued_at) < timedelta(seconds=1)
        (given,) = farm.given(bot)
        with round_trips() as sent:
            finish(bot, given, exit_code=0, result=left())
            *_, last = stream
        assert last.done
        looks = [each for each in sent if END.query.decode() in each]
        assert [(each[0].split()[0], each[-1]) for each in looks] == [("BEGIN", "COMMIT")]


def test_a_client_waits_on_at_a_door_that_was_restarted_in_the_middle_of_its_action(farm: Farm, served: Served) -> None:
    bot, wanted = farm.bot(), work()
    with ThreadPoolExecutor() as crew, farm.client() as client:
        call = crew.submit(client.run, wanted)
        eventually(lambda: states(farm) == ["queued"])
        (given,) = farm.given(bot)
        farm.stop()
        finish(bot, given, exit_code=0, result=left())
        farm.start()
        answer = call.result(MINUTE)
    assert (answer.status.code, answer.cached_result, states(farm)) == (0, False, ["succeeded"])
    with farm.client() as client:
        assert client.cached(Digest.of(wanted.blobs()[0])) is not None, "the new door has kept the result"
        # Nobody waits any more for what ends while no door is there: who asks next gets its result all the same.
        next(client.execute(client.upload((wanted := work()).blobs())[0]))
        (given,) = farm.given(bot)
        farm.stop()
        finish(bot, given, exit_code=0, result=left())
        farm.start()
    # A result that comes late is a result: it is told whoever could not have had the action run so urgently.
    limited = served.token("submitter", priority_ceiling=0)
    with farm.client() as client, farm.client(token=limited) as urgent:
        digest = urgent.upload(wanted.blobs())[0]
        with pytest.raises(grpc.RpcError, match="more urgent than 0"):
            next(urgent.execute(digest, priority=-1, skip_cache=True))
        (last,) = urgent.execute(digest, priority=-1)
        assert (response_of(last).cached_result, states(farm)) == (True, ["succeeded"] * 2)
        assert client.cached(Digest.of(wanted.blobs()[0])) is not None


def test_a_cancelled_submission_ends_and_the_job_only_with_the_last_of_them(farm: Farm) -> None:
    wanted = work()
    with farm.client() as client:
        digest = client.upload(wanted.blobs())[0]
        streams = [client.execute(digest), client.execute(digest)]
        names = [next(each).name for each in streams]
        assert len({*names}) == 2
        first = [names[0].rpartition("/")[2]]
        farm.pool.database.run(lambda each: cancel(each, first, instances=None, sync=1.0, actor="operator:1"))
        (*_, last), told = streams[0], "cancelled by operator:1; the job goes on for others who share it"
        status = response_of(last).status
        assert (last.done, status.code, status.message) == (True, code_pb2.FAILED_PRECONDITION, told)
        assert states(farm) == ["queued"]
        client.cancel(names[1])
        *_, last = streams[1]
        assert (last.done, response_of(last).status.code) == (True, code_pb2.CANCELLED)
        assert states(farm) == ["cancelled"]
        (ended,) = ends_in(farm.pool.database.run(lambda each: each.execute(END, {"ids": first}))).values()
        assert ended.withdrawn == {first[0]: "operator:1"}, "who gave it up earlier is told that, not the end"
        name = next(client.execute(digest)).name
        with psycopg.connect(libpq_url(farm.pool.database.url)) as holder, ThreadPoolExecutor() as crew:
            holder.execute("SELECT FROM leasehold.jobs FOR UPDATE")
            with farm.client() as leaving:
                crew.submit(leaving.cancel, name)
                eventually(lambda: farm.pool.rows("SELECT FROM pg_locks WHERE NOT granted"))
        eventually(lambda: states(farm) == ["cancelled", "cancelled"])
        for unknown in (f"default/operations/{uuid4()}", "nonsense", f"cached-{digest.hash}"):
            with pytest.raises(grpc.RpcError) as refused:
                list(client.wait(unknown))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_lost_and_stopped_actions_wait_again_without_a_word_to_the_client(farm: Farm) -> None:
    bot = farm.bot()
    with farm.client() as client:
        stream = client.execute(client.upload(work().blobs())[0])
        stage = lambda: remote_execution_pb2.ExecuteOperationMetadata.FromString(next(stream).metadata.value).stage  # noqa: E731
        assert stage() == remote_execution_pb2.ExecutionStage.QUEUED
        (given,) = farm.given(bot)
        assert stage() == remote_execution_pb2.ExecutionStage.EXECUTING
        finish(bot, given, verdict="error", reason="the disk is full")
        assert stage() == remote_execution_pb2.ExecutionStage.QUEUED


def test_the_door_announces_versions_that_old_clients_speak(farm: Farm) -> None:
    with farm.client() as client:
        asked = remote_execution_pb2.GetCapabilitiesRequest()
        found = client.call(CAPABILITIES + "GetCapabilities", asked, remote_execution_pb2.ServerCapabilities)
    low, high = found.low_api_version, found.high_api_version
    assert ((low.major, low.minor), (high.major, high.minor)) == ((2, 0), (2, 3))
    assert found.execution_capabilities.exec_enabled
    assert not found.cache_capabilities.action_cache_update_capabilities.update_enabled


def test_what_cannot_be_run_is_refused_with_the_reason(farm: Farm, served: Served) -> None:
    """Each call, the code and a part of the reason; nothing is stored."""
    token = served.token("submitter", instance="ci", priority_ceiling=0)
    with farm.client() as client, farm.client(token=token) as limited:
        action, command, *_ = work(arguments=["/bin/true", uuid4().hex]).blobs()
        there = client.upload(work(properties={"leasehold.farm": "action"}).blobs())[0]
        good = client.upload(work().blobs())[0]
        lonely = client.upload([action])[0]
        large, long = (client.upload(each.blobs())[0] for each in (work(salt=b"x" * 98_300), work(timeout=4e7)))
        code = grpc.StatusCode
        for call, expected, reason in (
            (lambda: client.execute(Digest("0" * 63, 1)), code.INVALID_ARGUMENT, "is not a digest"),
            (lambda: client.execute(Digest("0" * 64, 1)), code.FAILED_PRECONDITION, "does not have"),
            (lambda: client.execute(lonely), code.FAILED_PRECONDITION, str(Digest.of(command))),
            (lambda: client.execute(there), code.INVALID_ARGUMENT, "leasehold.farm"),
            # No program starts with a longer word: the bots would try in vain, and be put on probation.
            (lambda: client.execute(large), code.INVALID_ARGUMENT, "action: has 9"),
            (lambda: client.execute(long), code.INVALID_ARGUMENT, "action.timeout: is more than"),
            (lambda: client.execute(good, priority=1001), code.INVALID_ARGUMENT, "from -1000 to 1000"),
            (lambda: limited.execute(good, priority=-1), code.PERMISSION_DENIED, "more urgent"),
            (lambda: farm.client(instance="other", token=token).execute(good), code.PERMISSION_DENIED, "'ci'"),
            (lambda: farm.client(token=served.token("bot", bot="*")).execute(good), code.PERMISSION_DENIED, "bots"),
            (lambda: farm.client(token="lh_no").execute(good), code.UNAUTHENTICATED, "token"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(call())
            assert (refused.value.code(), reason in refused.value.details()) == (expected, True), (
                refused.value.details()
            )
            if expected is code.FAILED_PRECONDITION:
                (trailing,) = [each.value for each in refused.value.trailing_metadata() if each.key.endswith("-bin")]
                (detail,) = status_pb2.Status.FromString(trailing).details
                failure = error_details_pb2.PreconditionFailure.FromString(detail.value)
                assert [each.type for each in failure.violations] == ["MISSING"]
    assert states(farm) == []


def test_an_action_that_may_not_be_cached_and_one_that_is_missing_do_not_depend_on_the_cache(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> NoReturn:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, details="no cache")

    monkeypatch.setattr(upstream.Upstream, "cached", refuse)
    with farm.client() as client:
        fresh, kept = (client.upload(work(do_not_cache=each).blobs())[0] for each in (True, False))
        assert not next(client.execute(fresh)).done
        for digest, code in (
            (kept, grpc.StatusCode.UNIMPLEMENTED),
            (Digest("0" * 64, 1), grpc.StatusCode.FAILED_PRECONDITION),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                next(client.execute(digest))
            assert refused.value.code() is code


def test_clients_try_again_when_the_storage_of_a_door_is_away(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "ANSWER_WITHIN", 0.2)
    farm = Farm(pool, "grpc://127.0.0.1:1", host="::1")
    with farm.client() as client, pytest.raises(grpc.RpcError) as refused:
        list(client.execute(Digest("0" * 64, 1)))
    farm.stop()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the storage cannot be reached" in refused.value.details()


def test_a_client_asks_again_for_a_blob_when_the_door_goes_away_before_it_answers() -> None:
    blob, calls = b"an object", itertools.count()
    answer = remote_execution_pb2.BatchReadBlobsResponse()
    answer.responses.add(digest=Digest.of(blob).message, data=blob)

    def once_in_two(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if next(calls) == 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")
        return answer.SerializeToString()

    handler = grpc.method_handlers_generic_handler(
        upstream.CAS.strip("/"), {"BatchReadBlobs": grpc.unary_unary_rpc_method_handler(once_in_two)}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"grpc://127.0.0.1:{port}") as client:
        assert client.download(Digest.of(blob)) == blob
    server.stop(None).wait()
    assert next(calls) == 2


def test_an_action_that_no_bot_takes_ends_with_the_reason_and_a_build_is_found_by_its_metadata(
    pool: Pool, cas: str, operate: Callable[..., tuple[int, str]]
) -> None:
    rules = PropertyPolicy(wildcard=("container-image",), preferred=("size",))
    farm = Farm(pool, cas, queue_seconds=60, properties=rules)
    farm.bot()
    told = remote_execution_pb2.RequestMetadata(tool_invocation_id="build-7", target_id="//a:b").SerializeToString()
    asked = {"OSFamily": "plan9", "container-image": "docker://x", "size": "small"}
    with farm.client() as client:
        digest = client.upload(work(properties=asked).blobs())[0]
        client.headers += ((HEADERS[0], told),)
        streams = [client.execute(digest), client.execute(client.upload(work().blobs())[0])]
        name, _ = [next(each).name for each in streams]
        client.headers = client.headers[:-1]
        next(other := client.execute(digest))
        assert operate("list", "--meta", "invocation=build-7", "--json")[1].count("//a:b") == 2
        for text, number in (
            *(("", 3), ("invocation=build-7 AND done=false", 2), ('invocation = "build-7" AND stage=EXECUTING', 0)),
            *(("target=//a:b", 2), ("done=true", 0)),
        ):
            asked_for = ListOperationsRequest(name="default/operations", filter=text)
            listed = client.call(OPERATIONS + "ListOperations", asked_for, ListOperationsResponse)
            assert len(listed.operations) == number, text
        late = "UPDATE jobs SET queue_deadline = now() WHERE public_id = CAST(:id AS uuid)"
        pool.change(late, id=name.rpartition("/")[2])
        pool.upkeep().run_once()
        (*_, last) = streams[0]
        status = response_of(last).status
        assert (status.code, "OSFamily=plan9" in status.message) == (code_pb2.UNAVAILABLE, True), status.message
        assert response_of([*other][-1]).status.code == code_pb2.UNAVAILABLE
        assert operate("cancel", "--all", "--meta", "invocation=build-7")[0] == 0
        (*_, last) = streams[1]
        status = response_of(last).status
        assert status.code == code_pb2.FAILED_PRECONDITION, "Bazel would send the action again"
        assert status.message.startswith("cancelled by operator:")
    farm.stop()
    (build,) = pool.database.run(lambda connection: builds.newest(connection, instances=None, instance=None, limit=9))
    counted = ("invocation", "cached", "joined", "made", "waiting", "running", "failed", "cancelled", "bots")
    assert [build[each] for each in counted] == ["build-7", 0, 0, 2, 0, 0, 1, 1, 0]


@pytest.mark.skipif(not runs_actions(), reason="no buildbox-run, or no sandbox by bubblewrap")
def test_the_program_of_the_job_runs_actions_of_new_and_old_clients(
    pool: Pool, cas: str, port: int, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of both, a failure with its output, a time-out, and a result that is too large for the job; with TLS."""
    authority, file = Authority(tmp_path), tmp_path / "farm-blobs.token"
    file.write_text(served.token("bot", bot="farm-blobs", pool="none") + "\n")
    farm = reachable(pool, cas, authority, port, bots_ca=str(authority.ca), bots_token_file=str(file))
    bot, many = farm.bot(), [f"{'x' * 200}-{n}" for n in range(150)]
    write = "mkdir -p out/in && cat src/a.txt > out/in/b.txt"
    cases: list[tuple[Work, int, int]] = [
        (work(arguments=["/bin/sh", "-c", write], inputs={"src/a.txt": b"text"}, outputs=["out/in/b.txt"]), 0, 0),
        (work(arguments=["/bin/sh", "-c", "echo x > a"], outputs=["a"], legacy=True), 0, 0),
        (work(arguments=["/bin/sh", "-c", "echo no; exit 3"], outputs=["a"]), 0, 3),
        (work(arguments=["/bin/sh", "-c", "echo so far; exec sleep 60"], timeout=0.5), code_pb2.DEADLINE_EXCEEDED, 137),
        (work(arguments=["/usr/bin/touch", *many], outputs=many), 0, 0),
    ]
    keys = {"token": served.token("submitter"), "ca": authority.ca}
    with ThreadPoolExecutor() as crew, farm.client(**keys) as client:
        for wanted, code, exit_code in cases:
            call = crew.submit(client.run, wanted)
            (given,) = eventually(lambda: farm.given(bot))
            place = tmp_path / given["job"]
            place.mkdir()
            ended, result = executes(place, words(farm, given), monkeypatch)
            assert ended == (0 if exit_code == 0 else 1)
            finish(bot, given, verdict="failed" if ended else "succeeded", exit_code=ended, result=result)
            answer = call.result(MINUTE)
            assert (answer.status.code, answer.result.exit_code) == (code, exit_code), answer
            assert sorted(each.path for each in answer.result.output_files) == sorted(
                () if exit_code else wanted.outputs
            )
        assert client.cached(Digest.of(cases[-1][0].blobs()[0])) is not None
        # An input that was never there: nobody tries again, and the client is told which.
        wanted = work(inputs={"in/a": uuid4().bytes})
        stream = client.execute(client.upload(wanted.blobs()[:-1])[0])
        next(stream)
        (given,) = farm.given(bot)
        (place := tmp_path / given["job"]).mkdir()
        ended, result = executes(place, words(farm, given), monkeypatch)
        assert ended == 1
        finish(bot, given, verdict="failed", exit_code=1, result=result)
        (*_, last) = stream
        status, failure = response_of(last).status, error_details_pb2.PreconditionFailure()
        assert (status.code, status.details[0].Unpack(failure)) == (code_pb2.FAILED_PRECONDITION, True)
        subject = f"blobs/{Digest.of(wanted.inputs['in/a'])}"
        assert [(each.type, each.subject) for each in failure.violations] == [("MISSING", subject)]
    farm.stop()


def test_an_action_that_no_client_watches_any_more_is_withdrawn_unless_others_want_it(pool: Pool, cas: str) -> None:
    farm = Farm(pool, cas)
    farm.stop()
    farm.settings = farm.settings.model_copy(update={"abandoned_seconds": 0.9})
    farm.start()
    alone, shared = work(), work()
    with ThreadPoolExecutor() as crew, farm.client() as second:
        with farm.client() as first:
            names = []
            for each in (alone, shared):
                digest = first.upload(each.blobs())[0]
                names.append(next(first.execute(digest)).name)
            kept = crew.submit(second.run, shared)
            eventually(lambda: farm.pool.rows("SELECT FROM job_followers"))
            eventually(lambda: len(farm.pool.rows("SELECT FROM submission_watches")) == 3)
            assert states(farm) == ["queued", "queued"], "a client watches each"
        eventually(lambda: states(farm) == ["cancelled", "queued"])
        eventually(lambda: len(farm.pool.rows("SELECT FROM submission_watches")) == 1)
        for name in names:
            *_, last = second.wait(name)
            assert response_of(last).status.code == code_pb2.CANCELLED
        bot = farm.bot()
        (given,) = farm.given(bot)
        finish(bot, given, exit_code=0, result=left())
        assert kept.result(MINUTE).status.code == code_pb2.OK
        # So is one whose client has gone before it was stored.
        with psycopg.connect(libpq_url(pool.database.url)) as holder, farm.client() as gone:
            digest = gone.upload(work().blobs())[0]
            holder.execute("LOCK TABLE leasehold.jobs IN SHARE MODE")
            crew.submit(next, gone.execute(digest))
            eventually(lambda: farm.pool.rows("SELECT FROM pg_locks WHERE NOT granted"))
            gone.channel.close()
            assert second.cached(digest) is None
        eventually(lambda: states(farm) == ["cancelled", "succeeded", "cancelled"])
    eventually(lambda: not farm.pool.rows("SELECT FROM submission_watches"))
    farm.stop()


def test_an_action_that_a_bot_cannot_start_is_tried_again(farm: Farm) -> None:
    bot = farm.bot()
    with ThreadPoolExecutor() as crew, farm.client() as client:
        call = crew.submit(client.run, work())
        eventually(lambda: states(farm) == ["queued"])
        (given,) = farm.given(bot)
        bot.sync(completed(given, "failed", exit_code=127))
        assert states(farm) == ["queued"]
        finish(bot, *eventually(lambda: farm.given(bot)), exit_code=0, result=left())
        assert call.result(MINUTE).status.code == code_pb2.OK


def test_a_filter_of_operations_that_the_database_cannot_take_is_refused() -> None:
    with pytest.raises(BadInput, match="filter: holds a NUL character"):
        Filter.parse('invocation = "a\0b"')


def test_the_door_counts_actions_by_what_clients_tell_and_ends_by_status() -> None:
    metrics = DoorMetrics()
    with metrics.waiting():
        for nth in range(MOST + 9):
            metrics.answered("new", {"tool": "bazel 7.1", "mnemonic": f"Kind{nth}"})()
    metrics.answered("cached", {})
    for code in (0, 4, 999):
        metrics.ended(code)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"leasehold_farm_{name}", labels)

    assert value("actions_total", answer="new", tool="bazel", mnemonic="Kind0") == 1
    assert value("actions_total", answer="new", tool="bazel", mnemonic="other") == 9
    assert value("actions_total", answer="cached", tool="other", mnemonic="other") == 1
    assert [value("jobs_ended_total", code=each) for each in ("OK", "DEADLINE_EXCEEDED", "other")] == [1, 1, 1]
    assert (value("streams"), value("action_seconds_count", answer="new")) == (0, MOST + 9)


def test_what_one_door_writes_of_a_submission_another_does_not_withdraw(pool: Pool) -> None:
    (id,) = pool.submit(1)

    def withdrawn() -> list[str]:
        found = pool.database.run(lambda connection: abandon.withdraw(connection, most=9, sync=1.0, actor="farm:x"))
        return [each.public_id for each in found]

    pool.database.run(lambda connection: abandon.watch(connection, [id], seconds=-1.0))
    with psycopg.connect(libpq_url(pool.database.url)) as other:
        other.execute("UPDATE leasehold.submission_watches SET watched_until = now() + interval '1 h'")
        assert withdrawn() == []
    assert withdrawn() == []
    pool.change("UPDATE submission_watches SET watched_until = now() - interval '1 s'")
    assert [withdrawn(), withdrawn()] == [[id], []]
    assert [row.state for row in pool.rows("SELECT state FROM jobs")] == ["cancelled"]


def test_actions_that_come_together_are_stored_together_and_a_refused_one_fails_no_other(pool: Pool) -> None:
    one, two = (DoorCaller(kind=Kind.SUBMITTER, id=each, instance=each) for each in ("a", "b"))
    pool.database.run(lambda connection: [instances.require(connection, each, create=True, actor="t") for each in "ab"])

    def job(instance: str) -> JobRequest:
        return JobRequest(instance=instance, command=["true"])

    def keyed(normal: dict[str, Any]) -> dict[str, Any]:
        return normal | {"dedup_key": "a:x"}

    def bad(normal: dict[str, Any]) -> dict[str, Any]:
        return normal | {"units": -1}

    wanted = [
        (job("a"), one, keyed), (job("a"), one, bad), (job("a"), one, keyed), (job("b"), two, dict),
        (job("b"), one, dict), (job("a"), one, dict), (job("a"), one, dict),
    ]  # fmt: skip
    first, refused, joined, other, forbidden, *alike = submit_completed(pool.database, None, wanted)
    assert [each.created for each in (first, joined, other, *alike)] == [True, False, True, True, True]  # type: ignore[union-attr]
    assert isinstance(refused, psycopg.errors.CheckViolation)
    assert isinstance(forbidden, Forbidden)
    assert len(pool.rows("SELECT FROM jobs")) == 4


def test_jobs_of_a_caller_are_stored_in_one_round_trip(pool: Pool) -> None:
    caller = DoorCaller(kind=Kind.SUBMITTER, id="a", instance="default")
    for count in 1, 3:
        wanted = [(JobRequest(command=["true"]), caller, partial(dict, dedup_key=f"{count}:{n}")) for n in range(count)]
        with round_trips() as sent:
            stored = submit_completed(pool.database, None, wanted)
        assert [each.created for each in stored] == [True] * count  # type: ignore[union-attr]
        assert [len(each) for each in sent] == [1]


def test_actions_that_were_stored_together_are_not_stored_again_if_they_cannot_be_looked_at(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fails(*_: Any, **__: Any) -> NoReturn:
        asked.append("find")
        raise psycopg.errors.InternalError_("broken")

    async def submits(count: int) -> list[Any]:
        jobs = Jobs(
            pool.database, WorkerPool(pool.database, threads=1, queue=9), partial(submit_completed, pool.database, None)
        )
        caller = DoorCaller(kind=Kind.SUBMITTER, id="a", instance="default")
        job = JobRequest(command=["true"])
        calls = [jobs.submit(job, caller, lambda normal: {**normal, "dedup_key": "k"}) for _ in range(count)]
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr("bots.farm.execution.jobs.found_in", fails)
    (made,) = asyncio.run(submits(1))
    assert (made.created, made.instance, asked) == (True, "default", []), "what was just made is not looked at"
    assert [type(each) for each in asyncio.run(submits(2))] == [psycopg.errors.InternalError_] * 2
    assert (len(asked), len(pool.rows("SELECT FROM job_followers"))) == (1, 2)


def test_the_log_tells_once_that_the_storage_is_away_and_that_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_AT_STORAGE", 0.0)
    nothing = grpc.aio.Metadata()
    away = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="no\nsocket")
    answers = iter([None, away, away, None, away])

    class Storage(upstream.Upstream):
        def __init__(self) -> None: ...

        async def look(self) -> None:
            if (error := next(answers)) is not None:
                raise error

    with capture_logs() as logs, pytest.raises(RuntimeError):  # the answers are over
        asyncio.run(server._tell_of_storage(Storage(), "unix:/a"))
    told = ("warning", "UNAVAILABLE: no socket")
    assert [(each["log_level"], each.get("reason")) for each in logs] == [told, ("info", None), told]


def test_after_an_outage_a_door_lets_the_clients_of_other_doors_be_seen_before_it_withdraws(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could write who watches what: the first door that can must not judge the clients of the others."""
    (id,) = pool.submit(1)
    now, reached = [0.0], [True]

    class Workers:
        async def run(self, work: Any) -> Any:
            if not reached[0]:
                raise NotReady("no database")
            return pool.database.run(work)

    def looks_at(second: float) -> list[str]:
        now[0] = second
        return [each.public_id for each in asyncio.run(watches.look())]

    monkeypatch.setattr("bots.farm.execution.watches.clock", SimpleNamespace(monotonic=lambda: now[0]))
    watches = Watches(Workers(), seconds=60.0, sync=1.0)  # type: ignore[arg-type]
    assert [looks_at(second) for second in (20, 40)] == [[], []]
    pool.database.run(lambda connection: abandon.watch(connection, [id], seconds=-1.0))
    reached[0] = False
    with pytest.raises(NotReady):
        looks_at(60)
    reached[0] = True
    assert [looks_at(second) for second in (80, 100)] == [[], []], "others get as long as after a start"
    assert looks_at(170) == [], "nor does one that has stood still"
    assert [looks_at(second) for second in (190, 210, 230)] == [[], [], [id]]


@pytest.mark.conflicts
def test_an_action_whose_job_is_held_keeps_no_other_from_being_withdrawn_nor_a_look_waiting(
    pool: Pool, race: Race
) -> None:
    held, other = pool.submit(2)
    settings = DatabaseSettings(lock_timeout=60.0, statement_timeout=60.0)

    def withdrawn() -> list[str]:
        watches._withdraws_from = 0.0
        return [each.public_id for each in asyncio.run(watches.look())]

    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:

        class Workers:
            async def run(self, work: Any) -> Any:
                return database.run(work)

        watches = Watches(Workers(), seconds=60.0, sync=1.0)  # type: ignore[arg-type]
        for seconds, submission in ((-2.0, held), (-1.0, other)):
            pool.database.run(
                lambda c, submission=submission, seconds=seconds: abandon.watch(c, [submission], seconds=seconds)
            )
        with race.first() as stranger:
            stranger.row("SELECT id FROM jobs WHERE public_id = CAST(:id AS uuid) FOR UPDATE", id=held)
            assert withdrawn() == [other]
        race.forget_errors()
        assert withdrawn() == [held]


def test_a_door_that_cannot_listen_says_so_and_nothing_else(recwarn: pytest.WarningsRecorder) -> None:
    class Busy:
        async def serve(self, *_: Any, **__: Any) -> None:
            raise BadInput("farm.port", "cannot listen")

    # What earlier tests have left is not of this one.
    gc.collect()
    recwarn.clear()
    with pytest.raises(BadInput):
        run(Busy(), print)  # type: ignore[arg-type]
    gc.collect()
    assert [str(each.message) for each in recwarn] == []
