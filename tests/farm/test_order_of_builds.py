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
from bots.farm.execution.builds import MOST, MOST_WAITING, Builds
from bots.farm.execution.request_metadata import HEADERS
from bots.farm.protos import remote_execution_pb2
from bots.farm.storage.upstream import Digest
from schema import clock
from schema.accounting.builds import Asked, count
from schema.tenancy import tokens
from tests.support.farm.certificates import Authority
from tests.support.farm.doors import Farm, reachable
from tests.support.plans import watched
from tests.support.pool import Pool

ENDED = "UPDATE builds SET seen_at = seen_at - interval '1 minute' WHERE invocation = :build"
BEGAN = "SELECT round(extract(epoch FROM now() - began_at) / 3600) AS hours FROM builds ORDER BY invocation"


def uploaded(client: Client) -> Digest:
    """An action that no other test has run."""
    return client.upload(Work(["/bin/true"], salt=uuid4().bytes).blobs())[0]


def sent(client: Client, build: str | None, action: Digest | None = None, *, priority: int = 0) -> str:
    """The id of an action that a build has sent; None: one whose client tells no build."""
    told = remote_execution_pb2.RequestMetadata(tool_invocation_id=build or "").SerializeToString()
    before, client.headers = client.headers, (*client.headers, (HEADERS[0], told))
    try:
        name: str = next(client.execute(action or uploaded(client), priority=priority)).name
    finally:
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
    pool: Pool, cas: str, port: int, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    farm = reachable(pool, cas, authority, port, earlier_build_first=True)
    token = pool.database.run(lambda each: tokens.create(each, "submitter", instance="default", priority_ceiling=0))
    with farm.client(token=token, ca=authority.ca) as client:

        def refused(build: str) -> None:
            with pytest.raises(grpc.RpcError) as error:
                sent(client, build, priority=-1)
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED

        refused("two")
        sent(client, "one")
        sent(client, "two")
        refused("one")
        refused("two")
    farm.stop()
    plain = Farm(pool, cas)
    with plain.client() as client:
        sent(client, "two")
    plain.stop()
    assert priorities(pool) == [0, 1, 0]


class Doors:
    """Doors of one pool that count builds, and look only when they are told to."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        for instance in ("a", "b"):
            pool.submit(instance=instance)

    async def run(self, work: Any) -> Any:
        return self._pool.database.run(work)

    def door(self) -> Builds:
        return Builds(self, earlier_first=True)  # type: ignore[arg-type]

    def behind(self, *builds: str, instance: str = "a") -> list[int]:
        """The steps of each build at a door that has looked."""
        door = self.door()
        asyncio.run(door.write())
        return [door.behind(instance, told(each)) for each in builds]


@pytest.fixture
def doors(pool: Pool) -> Doors:
    return Doors(pool)


def told(build: str) -> Mapping[str, str]:
    return {"invocation": build}


def ask(door: Builds, build: str, instance: str = "a") -> None:
    door.note(instance, told(build), "new")
    asyncio.run(door.write())


def test_a_build_whose_clients_only_wait_stays_the_first_and_each_instance_has_its_own(
    pool: Pool, doors: Doors
) -> None:
    door = doors.door()
    with door.waiting("a", told("one")), door.waiting("a", {}):
        ask(door, "one")
        pool.change(ENDED, build="one")
        asyncio.run(door.write())
        other = doors.door()
        assert other.behind("a", told("two")) == 0, "it has not looked yet"
        asyncio.run(other.write())
        assert [other.behind("a", told(each)) for each in ("one", "two", "three", "")] == [0, 1, 1, 1]
        other.note("b", told("two"), "cached")
        assert [other.behind("b", told(each)) for each in ("two", "one")] == [0, 1]
    pool.change(ENDED, build="one")
    assert doors.behind("two") == [0]


def test_a_build_that_asks_again_after_it_has_ended_begins_anew(pool: Pool, doors: Doors) -> None:
    door = doors.door()
    ask(door, "ci")
    pool.change("UPDATE builds SET began_at = began_at - interval '1 day', seen_at = seen_at - interval '1 day'")
    ask(door, "real")
    ask(door, "ci")
    assert doors.behind("real", "ci") == [0, 1]
    assert pool.row("SELECT made FROM builds WHERE invocation = 'ci'").made == 2


def test_a_build_goes_on_that_waited_at_a_door_which_could_not_write_for_a_minute(pool: Pool, doors: Doors) -> None:
    door = doors.door()
    ask(door, "one")
    ask(door, "two")
    pool.change("UPDATE builds SET seen_at = seen_at - interval '1 minute', began_at = began_at - interval '1 hour'")
    now = clock.monotonic()
    waits = [("a", "one", Asked("", now - 65)), ("a", "two", Asked("", now))]
    pool.database.run(lambda connection: count(connection, waits, now=now, pause=10))
    assert [row.hours for row in pool.rows(BEGAN)] == [1, 0]
    pool.change("UPDATE builds SET seen_at = seen_at - interval '1 minute', began_at = began_at - interval '1 hour'")
    pool.database.run(lambda connection: count(connection, waits, now=now))
    assert [row.hours for row in pool.rows(BEGAN)] == [2, 1], "without the order a build has one begin"


def test_builds_of_one_instance_crowd_out_none_of_another_nor_their_own_first(pool: Pool, doors: Doors) -> None:
    door = doors.door()
    with ExitStack() as stack:
        for number in range(MOST_WAITING):
            for instance in ("b", "a"):
                stack.enter_context(door.waiting(instance, told(str(number))))
        for number in range(MOST):
            door.note("b", told(str(number)), "cached")
        for build in ("one", "two"):
            ask(door, build)
        stack.enter_context(door.waiting("a", told("one")))
        pool.change("UPDATE builds SET seen_at = seen_at - interval '1 minute'")
        asyncio.run(door.write())
    assert doors.behind("one", "two") == [0, 1]
    assert doors.behind("0", "one", instance="b") == [0, 1]
    assert pool.row("SELECT count(*) FROM builds").count == MOST + 2, "who has only waited has no row"
    waits = [("b", str(number), Asked("", 0.0)) for number in range(MOST_WAITING)]
    acts = {"wait": lambda connection: count(connection, waits, now=0.0, pause=10)}
    seen = pool.database.run(lambda connection: watched(connection, acts, kept=False))["wait"]
    assert MOST_WAITING <= seen.touched < MOST / 2, f"old builds are not read:\n{seen}"
