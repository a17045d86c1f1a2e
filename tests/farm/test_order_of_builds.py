"""The build of an instance that began first goes before the others, where operators want that."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from bots.farm.client import Client, Work
from bots.farm.execution.builds import MOST_WAITING, Builds
from bots.farm.execution.request_metadata import HEADERS
from bots.farm.protos import remote_execution_pb2
from bots.farm.storage.upstream import Digest
from schema.tenancy import tokens
from tests.support.farm.certificates import Authority
from tests.support.farm.doors import Farm, reachable
from tests.support.pool import Pool

ENDED = "UPDATE builds SET seen_at = seen_at - interval '1 minute' WHERE invocation = :build"


def uploaded(client: Client) -> Digest:
    """An action that no other test has run."""
    return client.upload(Work(["/bin/true"], salt=uuid4().bytes).blobs())[0]


def sent(client: Client, build: str | None, action: Digest | None = None, *, priority: int = 0) -> str:
    """The id of an action that a build has sent; None: one whose client tells no build."""
    told = remote_execution_pb2.RequestMetadata(tool_invocation_id=build or "").SerializeToString()
    before, client.headers = client.headers, (*client.headers, (HEADERS[0], told))
    name: str = next(client.execute(action or uploaded(client), priority=priority)).name
    client.headers = before
    return name.rpartition("/")[2]


def priorities(pool: Pool) -> list[int]:
    return [row.priority for row in pool.rows("SELECT priority FROM jobs ORDER BY id")]


def test_new_actions_of_the_build_that_began_first_start_before_those_of_others_that_wait(pool: Pool, cas: str) -> None:
    farm = Farm(pool, cas, earlier_build_first=True)
    with farm.client() as client:
        sent(client, "one")
        shared = uploaded(client)
        waiting = [sent(client, "two"), sent(client, "two", shared), sent(client, None)]
        later = sent(client, "one")
        sent(client, "two", priority=1000)
        assert priorities(pool) == [0, 1, 1, 1, 0, 1000]
        bot = farm.bot(capacity=2)
        assert [each["job"] for each in farm.given(bot)][1:] == [later]
        sent(client, "one", shared)
    assert pool.job(waiting[1]).priority == 0, "the build that began first wants this one too"
    farm.stop()


def test_doors_and_restarts_agree_on_the_build_that_began_first_until_it_ends(pool: Pool, cas: str) -> None:
    farm = Farm(pool, cas, earlier_build_first=True)
    with farm.client() as client:
        sent(client, "one")
    farm.stop()
    farm.start()
    with farm.client() as client:
        sent(client, "two")
        sent(client, "one")
    assert priorities(pool) == [0, 1, 0]
    other = Farm(pool, cas, earlier_build_first=True)
    with other.client() as client:
        sent(client, "two")
    other.stop()
    farm.stop()
    pool.change(ENDED, build="one")
    farm.start()
    with farm.client() as client:
        sent(client, "two")
    assert priorities(pool) == [0, 1, 0, 1, 0]
    farm.stop()


def test_a_ceiling_holds_for_what_the_client_asks_and_without_the_setting_builds_are_alike(
    pool: Pool, cas: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    farm = reachable(pool, cas, authority, earlier_build_first=True)
    token = pool.database.run(lambda each: tokens.create(each, "submitter", instance="default", priority_ceiling=0))
    with farm.client(token=token, ca=authority.ca) as client:
        sent(client, "one")
        sent(client, "two")
        for build in ("one", "two"):
            with pytest.raises(grpc.RpcError) as refused:
                sent(client, build, priority=-1)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    farm.stop()
    plain = Farm(pool, cas)
    with plain.client() as client:
        sent(client, "two")
    plain.stop()
    assert priorities(pool) == [0, 1, 0]


def test_a_build_whose_clients_only_wait_stays_the_first_and_each_instance_has_its_own(pool: Pool) -> None:
    class Workers:
        async def run(self, work: Any) -> Any:
            return pool.database.run(work)

    def builds() -> Builds:
        return Builds(Workers(), earlier_first=True)  # type: ignore[arg-type]

    def told(build: str) -> Mapping[str, str]:
        return {"invocation": build}

    for instance in ("a", "b"):
        pool.submit(instance=instance)
    door = builds()
    with door.waiting("a", told("one")), door.waiting("a", {}):
        door.note("a", told("one"), "new")
        asyncio.run(door.write())
        pool.change(ENDED, build="one")
        asyncio.run(door.write())
        other = builds()
        assert other.behind("a", told("two")) == 0, "it has not looked yet"
        asyncio.run(other.write())
        behind = [other.behind("a", told(each)) for each in ("one", "two", "three", "")]
        assert behind == [0, 1, 1, 1]
        assert [other.behind("b", told(each)) for each in ("two", "one")] == [0, 1]
    pool.change(ENDED, build="one")
    with ExitStack() as stack:
        for number in range(MOST_WAITING + 1):
            stack.enter_context(door.waiting("b", told(str(number))))
        asyncio.run(door.write())
    assert door.behind("a", told("two")) == 0
    assert pool.row("SELECT count(*) FROM builds").count == 1 + MOST_WAITING
