"""Workers of the Remote Workers API: they run actions as bots do, at any door, and only those that may."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import grpc
import pytest
from google.rpc import code_pb2

from bots.farm.client import Client, Work
from bots.farm.protos import remote_execution_pb2, remote_workers_pb2
from bots.farm.storage.upstream import Digest
from schema.postgres.statements import Statement
from tests.support.farm.doors import Farm
from tests.support.farm.workers import State, Status, Worker, refused
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.race import BLOCKED, PID
from tests.support.servers import Served


@pytest.fixture
def farm(pool: Pool, cas: str) -> Iterator[Farm]:
    made = Farm(pool, cas, anonymous_workers=True)
    yield made
    made.stop()


def work(**more: Any) -> Work:
    return Work(**{"arguments": ["/bin/true"], "salt": uuid4().bytes, **more})


def submitted(farm: Farm, client: Client, wanted: Work) -> Any:
    """Send an action and place it; return its stream, of which the first message is read."""
    stream = client.execute(client.upload(wanted.blobs())[0])
    next(stream)
    place(farm)
    return stream


def place(farm: Farm) -> None:
    """Place the action that waits, once its bot has called. Assigners pass over a bot while a call of it is settled."""
    eventually(lambda: farm.pool.rows("SELECT FROM bots WHERE session IS NOT NULL AND sync_seq > 0"))
    leases = len(farm.pool.rows("SELECT FROM leases"))

    def is_placed() -> bool:
        farm.pool.change("UPDATE jobs SET schedule_after = NULL")
        farm.pool.change("UPDATE queues SET schedule_after = NULL")
        farm.pool.assigner().run_once()
        return len(farm.pool.rows("SELECT FROM leases")) > leases

    eventually(is_placed)


def settled_calls(farm: Farm) -> int:
    return int(farm.pool.row("SELECT sync_seq FROM bots").sync_seq)


def held(farm: Farm, worker: Worker) -> Any:
    """Begin a call that is held. A wake-up that comes late, and was for an earlier call, may answer it for nothing."""
    before, call = settled_calls(farm), worker.calling()
    eventually(lambda: settled_calls(farm) > before)
    return call


def answer(stream: Any) -> Any:
    *_, last = stream
    return remote_execution_pb2.ExecuteResponse.FromString(last.response.value)


def job(farm: Farm) -> tuple[str, int, int]:
    (row,) = farm.pool.rows("SELECT state, attempts, kills FROM jobs")
    return row.state, row.attempts, row.kills


def test_actions_run_on_a_worker_and_are_kept_by_the_digest_that_the_client_knows(farm: Farm) -> None:
    """One of an old client, which runners know by another digest, and one whose result is too large for a job."""
    farm.pool.submit()
    with farm.client() as client, Worker(farm.address, capacity=2).create() as worker:
        for wanted, stdout in ((work(outputs=["a"], legacy=True), b"said"), (work(), b"x" * 70_000)):
            digest = Digest.of(wanted.blobs()[0])
            call = worker.calling()
            stream = submitted(farm, client, wanted)
            worker.session = call.result(MINUTE)
            lease = worker.starts()
            action = remote_execution_pb2.Action.FromString(worker.action(lease))
            assert (Digest.of(worker.action(lease)) == digest) is not wanted.legacy
            command = remote_execution_pb2.Command.FromString(
                client.download(Digest(action.command_digest.hash, action.command_digest.size_bytes))
            )
            assert list(command.output_paths) == list(wanted.outputs)
            assert worker.session.expire_time.ToNanoseconds() > 0
            worker.ends(stdout_raw=stdout)
            assert worker.update() == []
            found = answer(stream)
            assert (found.status.code, found.result.stdout_raw) == (0, stdout)
            assert found.result.execution_metadata.worker == "w1"
            assert client.cached(digest).stdout_raw == stdout
        assert [row.state for row in farm.pool.rows("SELECT state FROM jobs ORDER BY id")] == [
            "queued",
            *["succeeded"] * 2,
        ]


def test_a_session_goes_on_at_another_door_and_only_its_newest_call_is_held(farm: Farm) -> None:
    other = Farm(farm.pool, farm.settings.cas or "", anonymous_workers=True)
    with other.client() as client, Worker(farm.address).create() as worker, Worker(other.address) as moved:
        idle = worker.calling()
        stream = client.execute(client.upload(work().blobs())[0])
        name = next(stream).name
        place(farm)
        worker.session = idle.result(MINUTE)
        lease = worker.starts()
        busy = held(farm, worker)
        farm.stop()
        while busy.exception(MINUTE) is None:
            farm.start()
            worker.session = busy.result()
            busy = held(farm, worker)
            farm.stop()
        assert refused(busy)[0] is grpc.StatusCode.UNAVAILABLE, "a worker ends at any other error"
        moved.session = worker.session
        older, newer = held(farm, moved), held(farm, moved)
        while older.exception(MINUTE) is None:
            older, newer = newer, held(farm, moved)
        assert refused(older) == (grpc.StatusCode.UNAVAILABLE, "a newer call of this session has come")
        client.cancel(name)
        moved.session = newer.result(MINUTE)
        while moved.session.leases[0].state == State.ACTIVE:
            moved.update()
        assert [(each.id, each.state) for each in moved.session.leases] == [(lease.id, State.CANCELLED)]
        assert moved.action(moved.session.leases[0]), "the other door has read what the lease runs"
        moved.ends(code_pb2.CANCELLED, state=State.CANCELLED)
        assert moved.update() == []
        assert answer(stream).status.code == code_pb2.CANCELLED
        secret = moved.session.name.rpartition(".")[2]
        for wrong in (moved.session.name[:-1] + "é", f"/w1.9.{secret}", f"w1.{secret}", secret):
            moved.session.name = wrong
            code, details = refused(moved.calling())
            assert (code, secret[:-1] in details) == (grpc.StatusCode.NOT_FOUND, False)
    other.stop()
    farm.start()


def test_duplicate_calls_at_two_doors_and_reports_of_other_fences_change_nothing(farm: Farm) -> None:
    """Both calls wait for the row of the bot, which a third transaction holds."""
    other = Farm(farm.pool, farm.settings.cas or "", anonymous_workers=True)
    with farm.client() as client, Worker(farm.address).create() as worker, Worker(other.address) as twin:
        call = worker.calling()
        stream = submitted(farm, client, work())
        worker.session = call.result(MINUTE)
        lease = worker.starts()
        place_, _, fence = lease.id.rpartition(".")
        worker.session.leases.add(id=f"{place_}.{int(fence) + 1}", state=State.COMPLETED)
        worker.session.leases.add(id="default/nonsense", state=State.ACTIVE)
        assert [(each.id, each.state) for each in worker.update()] == [(lease.id, State.ACTIVE)]
        worker.ends(exit_code=7)
        twin.session.CopyFrom(worker.session)
        with farm.pool.database.connect() as connection:
            pid = connection.execute(PID).scalar_one()
            connection.execute(Statement("SELECT FROM bots FOR UPDATE"))
            before = settled_calls(farm)
            calls = [worker.calling(), twin.calling()]
            blocked = lambda: connection.execute(BLOCKED, {"holder": pid}).scalar_one()  # noqa: E731
            eventually(lambda: blocked() >= 1)
            connection.rollback()
        eventually(lambda: settled_calls(farm) == before + 2)
        # One of them has ended the lease. The other one finds it ended.
        assert answer(stream).result.exit_code == 7
        assert job(farm) == ("failed", 1, 0)
        assert [list(call.result(MINUTE).leases) for call in calls] == [[], []]
    other.stop()


def test_a_worker_that_ends_or_cannot_run_an_action_gives_it_to_others(farm: Farm) -> None:
    with farm.client() as client, Worker(farm.address).create() as leaving, Worker(farm.address, "w2") as broken:
        call = leaving.calling()
        stream = submitted(farm, client, work())
        leaving.session = call.result(MINUTE)
        leaving.starts()
        leaving.ends(code_pb2.UNAVAILABLE, "Worker is shutting down")
        assert leaving.update(status=Status.BOT_TERMINATING) == []
        assert job(farm) == ("queued", 0, 0), "that is no attempt"
        assert farm.pool.row("SELECT status FROM bots")[0] == "gone"
        assert refused(leaving.calling())[0] is grpc.StatusCode.NOT_FOUND
        # Whoever writes into the database can make a job that is no action: no worker is told of it.
        kept = farm.pool.row("SELECT payload::text FROM job_payloads")[0]
        farm.pool.change("UPDATE job_payloads SET payload = jsonb_set(payload, '{command,0}', '\"sh\"')")
        call = broken.create().calling()
        place(farm)
        assert (list(call.result(MINUTE).leases), job(farm)) == ([], ("queued", 1, 0))
        farm.pool.change("UPDATE job_payloads SET payload = CAST(:kept AS jsonb)", kept=kept)
        for _ in range(2):
            call = broken.create().calling()
            place(farm)
            broken.session = call.result(MINUTE)
            broken.starts()
            broken.ends(code_pb2.INTERNAL, "the disk is full")
            assert broken.update() == []
        lacking = work(inputs={"a": uuid4().bytes})
        digest = client.upload(lacking.blobs()[:-1])[0]
        second = client.execute(digest)
        next(second)
        call = broken.create().calling()
        place(farm)
        broken.session = call.result(MINUTE)
        broken.starts()
        broken.ends(code_pb2.INTERNAL)
        assert broken.update() == []
        assert answer(second).status.code == code_pb2.FAILED_PRECONDITION, "the client uploads it and tries again"
        found = answer(stream)
        assert (found.status.code, "INTERNAL: the disk is full" in found.status.message) == (code_pb2.INTERNAL, True), (
            found
        )


def test_clients_and_workers_may_call_an_instance_as_at_another_farm(pool: Pool, cas: str) -> None:
    farm = Farm(pool, cas, anonymous="main", anonymous_workers=True, instances={"Builds/main": "main"})
    with Client(farm.address, instance="Builds/main") as client, Worker(farm.address, parent="Builds/main") as worker:
        worker.create().update(within=2)
        stream = client.execute(client.upload(work().blobs())[0])
        assert next(stream).name.startswith("main/operations/")
        assert worker.session.name.startswith("Builds/main/w1.")
        named = "SELECT i.name FROM {} j JOIN instances i ON i.id = j.instance"
        assert [pool.row(named.format(table)).name for table in ("jobs", "bots")] == ["main", "main"]
        other = remote_workers_pb2.CreateBotSessionRequest(parent="Builds", bot_session=worker.session)
        unnamed = remote_workers_pb2.CreateBotSessionRequest()
        said = [refused(worker.begin("CreateBotSession", asked))[1] for asked in (other, unnamed)]
        assert said[0].startswith("parent: 'Builds' is not a name, nor one of farm.instances: use a-z")
        assert said[1].startswith("bot_session.bot_id: '' is not a name: use a-z")
    with Client(farm.address, instance="UP") as client, pytest.raises(grpc.RpcError) as raised:
        next(client.execute(client.upload(work().blobs())[0]))
    assert raised.value.details().startswith("instance_name: 'UP' is not a name")
    farm.stop()


def test_only_workers_that_an_operator_has_named_run_actions(pool: Pool, cas: str, served: Served) -> None:
    farm = Farm(pool, cas)
    named = {"leasehold.farm": ["action"], "OSFamily": ["*"]}
    code = grpc.StatusCode
    for token, name, parent, expected in (
        (None, "w1", "", code.PERMISSION_DENIED),
        ("lh_no", "w1", "", code.UNAUTHENTICATED),
        (served.token("submitter"), "w1", "", code.PERMISSION_DENIED),
        (served.token("operator"), "w1", "", code.PERMISSION_DENIED),
        (served.token("bot", bot="x*"), "w1", "", code.PERMISSION_DENIED),
        (served.token("bot", bot="w*", instance="ci"), "w1", "", code.PERMISSION_DENIED),
        (served.token("bot", bot="w*", properties={"leasehold.farm": ["action"]}), "w1", "", code.PERMISSION_DENIED),
        (served.token("bot", bot="w*", instance="ci", properties=named), "w1", "other", code.PERMISSION_DENIED),
        (served.token("bot", bot="w*"), "W 1", "", code.INVALID_ARGUMENT),
        (served.token("bot", bot="w*"), "w1", "no/instance", code.INVALID_ARGUMENT),
        (served.token("bot", bot="w*", instance="ci", properties=named), "w2", "", None),
        (served.token("bot", bot="w*"), "w1", "", None),
    ):
        with Worker(farm.address, name, token=token, parent=parent, priority=-5, capacity=3) as worker:
            if expected is not None:
                asked = remote_workers_pb2.CreateBotSessionRequest(parent=parent, bot_session=worker.session)
                assert refused(worker.begin("CreateBotSession", asked))[0] is expected, (name, parent)
                continue
            worker.create()
            for other in (None, "lh_no", served.token("bot", bot="x*")):
                worker.metadata = None if other is None else (("authorization", f"Bearer {other}"),)
                assert refused(worker.calling())[0] in (code.UNAUTHENTICATED, code.PERMISSION_DENIED)
    rows = pool.rows(
        "SELECT b.name, i.name AS instance, priority, capacity, properties, exclusive FROM bots b "
        "JOIN kinds k ON k.id = kind LEFT JOIN instances i ON i.id = instance ORDER BY 1"
    )
    offered = {"OSFamily": ["linux"], "leasehold.farm": ["action"]}
    assert [tuple(row) for row in rows] == [
        (*("w1", None, -5, 3), offered, ["leasehold.farm"]),
        (*("w2", "ci", -5, 3), offered, ["leasehold.farm"]),
    ]
    farm.stop()
