"""Actions and commands that vanish from the storage, as old blobs do, although the door remembers them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from google.rpc import code_pb2, error_details_pb2

from bots.farm.client import Storage, Work, response_of
from bots.farm.storage.own_storage import running
from bots.farm.storage.upstream import Digest
from tests.support.farm.conformance import runs_actions
from tests.support.farm.doors import Farm, executes, finish
from tests.support.farm.workers import Worker
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool


class Kept:
    """Storage of one test, whose blobs can be taken away."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory, self.address = directory, address

    def loses(self, *blobs: bytes) -> None:
        for name in (Digest.of(each).hash for each in blobs):
            (self._directory / "cas" / "objects" / name[:2] / name[2:]).unlink()


@pytest.fixture
def kept() -> Iterator[Kept]:
    with tempfile.TemporaryDirectory(prefix="leasehold-farm-") as directory, running(Path(directory)) as own:
        with Storage(own.address) as calls:
            calls.upload([b"ready"])
        yield Kept(Path(directory), own.address)


def work() -> list[bytes]:
    """The blobs of an action that no other test has run: the action, its command, its inputs."""
    return Work(["/bin/true"], salt=uuid4().bytes).blobs()


def named(operation: Any) -> list[str]:
    """The blobs that a client is asked for."""
    status, failure = response_of(operation).status, error_details_pb2.PreconditionFailure()
    assert status.code == code_pb2.FAILED_PRECONDITION, status
    assert status.details[0].Unpack(failure)
    return [each.subject for each in failure.violations]


def placed(pool: Pool) -> bool:
    """Whether the only job has a lease. Assigners pass over a bot while a call of it is settled."""
    pool.assigner().run_once()
    return bool(pool.rows("SELECT FROM leases"))


@pytest.mark.skipif(not runs_actions(), reason="no buildbox-run, or no sandbox by bubblewrap")
def test_a_client_is_told_of_a_command_that_has_gone(
    pool: Pool, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm = Farm(pool, kept.address)
    bot, blobs = farm.bot(), work()
    with farm.client() as client:
        stream = client.execute(client.upload(blobs)[0])
        next(stream)
        (given,) = farm.given(bot)
        kept.loses(blobs[1])
        query = "SELECT payload FROM job_payloads JOIN jobs j ON j.id = job_id WHERE j.public_id = CAST(:job AS uuid)"
        (row,) = pool.rows(query, job=given["job"])
        code, result = executes(tmp_path, row.payload["command"], monkeypatch)
        assert code == 1, "the first attempt tells it; others would be in vain"
        finish(bot, given, verdict="failed", exit_code=code, result=result)
        (*_, last) = stream
        assert named(last) == [f"blobs/{Digest.of(blobs[1])}"]
        # Once it is there again the action runs.
        stream = client.execute(client.upload(blobs)[0])
        next(stream)
        assert farm.given(bot)
    farm.stop()


@pytest.mark.parametrize("gone", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=["action", "command", "both"])
def test_a_worker_that_cannot_fetch_what_has_gone_is_not_asked_again(pool: Pool, kept: Kept, gone: slice) -> None:
    farm = Farm(pool, kept.address, anonymous_workers=True)
    blobs = work()
    with farm.client() as client, Worker(farm.address, properties=()).create() as worker:
        call = worker.calling()
        stream = client.execute(client.upload(blobs)[0])
        next(stream)
        eventually(lambda: placed(pool))
        worker.session = call.result(MINUTE)
        worker.starts()
        kept.loses(*blobs[gone])
        worker.ends(code_pb2.INTERNAL, "Error fetching Action")
        worker.update(within=2)
        (*_, last) = stream
        assert named(last) == [f"blobs/{Digest.of(blobs[gone][0])}"]
    farm.stop()
