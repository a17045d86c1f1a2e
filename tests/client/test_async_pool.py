"""`AsyncPool` against a real gateway without bots, and against one that answers what the test says."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from leasehold.async_pool import AsyncPool
from leasehold.errors import BadInput, NotFound, TimedOut
from leasehold.jobs import JobRequest, Result
from leasehold.states import JobState

from tests.support.http import Answer, ReceivedRequest, gateway, in_turn, problem
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool as Database
from tests.support.pool import active, completed
from tests.support.servers import Served

JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
OTHER = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0002"
TOKEN = "lh_operator_x_y"


def run(work: Callable[[AsyncPool], Awaitable[Any]], url: str, token: str = TOKEN, **options: Any) -> Any:
    """Run a coroutine that uses a pool."""

    async def main() -> Any:
        async with AsyncPool(url, token, **options) as pool:
            return await asyncio.wait_for(work(pool), MINUTE)

    return asyncio.run(main())


def threads() -> list[str]:
    """The threads of pools that are open."""
    kinds = ("leasehold-call", "leasehold-wait_", "leasehold-follow")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(kinds)]


def test_the_calls_of_a_pool_are_coroutines(served: Served) -> None:
    async def work(pool: AsyncPool) -> None:
        job = await pool.submit(["true"], label="x", properties={"os": "plan9"})
        requests: list[JobRequest] = [{"command": ["true"]}] * 3
        more = await pool.submit_many(requests, key="many")
        assert [each.created for each in await pool.submit_many(requests, key="many")] == [False] * 3
        assert (await pool.job(job)).label == "x"
        assert [each.id async for each in pool.jobs(order="asc")] == [job.id, *(each.id for each in more)]
        assert (await pool.explain(job)).change == ("a bot with os=plan9",)
        assert [result.state for result in await pool.results(more)] == [JobState.QUEUED] * 3
        assert [each.changed for each in await pool.cancel(more)] == [True] * 3
        assert [result.state for result in await pool.wait(more)] == [JobState.CANCELLED] * 3
        assert [piece async for piece in pool.logs(more[0], follow=True)] == []
        with pytest.raises(TimedOut) as over:
            await pool.wait([job, more[0]], timeout=0.1)
        assert over.value.pending == (job.id,)
        with pytest.raises(BadInput, match="not the id of a job"):
            await pool.job("x")
        graph = pool.graph("release")
        graph.add(["tell"], after=[graph.add(["make"])])
        taken = await graph.submit()
        with pytest.raises(TimedOut):
            await taken.wait(timeout=0.1)
        assert await taken.cancel() == 2
        assert (await taken.wait()).state == "cancelled"
        assert {result.state for result in (await taken.results()).values()} == {JobState.CANCELLED}

    run(work, served.url, served.token("operator"))
    assert threads() == []


def test_any_number_of_coroutines_wait_by_one_request(served: Served, pool: Database) -> None:
    """A job that does not exist, or a wait that is cancelled, concerns no other coroutine."""
    ids = pool.submit(40)

    async def work(connected: AsyncPool) -> None:
        waiting = [asyncio.create_task(connected.result(id)) for id in ids]
        while len(connected._calls._watch._asking) < len(ids):
            await asyncio.sleep(0.01)
        assert sum(name.startswith("leasehold-wait_") for name in threads()) == 1
        with pytest.raises(NotFound):
            await connected.result(OTHER)
        waiting[7].cancel()
        await asyncio.to_thread(pool_cancels, ids[:3])
        assert [(await task).state for task in waiting[:3]] == [JobState.CANCELLED] * 3
        assert {task.done() for task in waiting[8:]} == {False}
        await asyncio.to_thread(pool_cancels, ids[3:])
        assert [(await task).id for task in waiting if task is not waiting[7]] == [*ids[:7], *ids[8:]]
        assert waiting[7].cancelled()

    def pool_cancels(some: list[str]) -> None:
        with served.client(served.token("operator")) as http:
            assert http.post("/v1/jobs/cancel", json={"ids": some}).status_code == 200

    run(work, served.url, served.token("operator"))


def test_jobs_come_in_the_order_of_their_ends(served: Served, pool: Database) -> None:
    bot = pool.bot(capacity=3)
    ids = pool.submit(3)
    pool.assigner().run_once()
    works = {work["job"]: work for work in bot.take()}
    going = list(ids)

    def end(id: str) -> None:
        going.remove(id)
        bot.sync(completed(works[id]), *(active(works[each]) for each in going))

    async def work(connected: AsyncPool) -> list[tuple[Result, tuple[int, int]]]:
        told: list[tuple[int, int]] = []
        found: list[tuple[Result, tuple[int, int]]] = []
        order = [ids[2], ids[0], ids[1]]
        end(order[0])
        async for result in connected.as_completed(ids, progress=lambda *counts: told.append(counts)):
            found.append((result, told[-1]))
            if len(found) < len(order):
                await asyncio.to_thread(end, order[len(found)])
        assert [each.id for each, _ in found] == order
        return found

    found = run(work, served.url, served.token("operator"))
    assert [counts for _, counts in found] == [(1, 3), (2, 3), (3, 3)]


def test_a_cancelled_call_breaks_off_its_request_and_leaves_no_thread_behind(served: Served, pool: Database) -> None:
    id, _, _ = pool.running()

    async def follow(connected: AsyncPool) -> None:
        async for _ in connected.logs(id, follow=True):
            pass

    async def work(connected: AsyncPool) -> None:
        for call in (connected.result(id), follow(connected), connected.call(hold, connected)):
            task = asyncio.create_task(call)
            await asyncio.to_thread(eventually, lambda: served.waits("done") == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The gateway has seen the end of the connection, so the thread no longer waits for an answer.
            await asyncio.to_thread(eventually, lambda: served.waits("done") == 0)
        assert (await connected.job(id)).state is JobState.RUNNING

    def hold(connected: AsyncPool) -> None:
        connected.client.read_states([id], wait=30)

    run(work, served.url, served.token("operator"))
    assert threads() == []


def test_a_submit_that_was_cancelled_is_repeated_with_its_key(served: Served) -> None:
    """The gateway may have executed it, and the repeat then finds its job."""
    held, go_on = threading.Event(), threading.Event()

    def late(asked: ReceivedRequest) -> Answer:
        with served.client(served.token("operator")) as http:
            answer = http.post("/v1/jobs", json=asked.body)
        if not go_on.is_set():
            held.set()
            go_on.wait(MINUTE)
        return Answer(answer.json(), answer.status_code)

    async def work(pool: AsyncPool) -> None:
        task = asyncio.create_task(pool.submit(["true"], key="order-7"))
        await asyncio.to_thread(held.wait, MINUTE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert not (await pool.submit(["true"], key="order-7")).created

    with gateway(late) as stands:
        run(work, stands.url)


def test_an_outage_reaches_every_coroutine_that_waits() -> None:
    def script(asked: ReceivedRequest) -> Answer:
        if asked.body["wait"] == 0:
            return Answer({"jobs": [{"id": JOB, "state": "running"}]})
        return problem(503, "the database cannot be reached")

    async def work(pool: AsyncPool) -> None:
        waits = await asyncio.gather(pool.result(JOB), pool.result(JOB), return_exceptions=True)
        assert [str(error) for error in waits] == ["the database cannot be reached"] * 2

    with gateway(script) as stands:
        run(work, stands.url, patience=0.1)


def test_a_pool_that_is_closed_leaves_no_coroutine_waiting(served: Served, pool: Database) -> None:
    (id,) = pool.submit()

    async def main() -> None:
        connected = AsyncPool(served.url, served.token("operator"))
        task = asyncio.create_task(connected.result(id))
        while not connected._calls._watch._asking:
            await asyncio.sleep(0.01)
        await connected.close()
        with pytest.raises(RuntimeError, match="the pool is closed"):
            await asyncio.wait_for(task, MINUTE)

    asyncio.run(main())
    assert threads() == []


def test_a_job_that_is_deleted_while_others_are_waited_for_is_told_to_its_caller_only() -> None:
    def script(asked: ReceivedRequest) -> Answer:
        ids = asked.body["ids"]
        if len(stands.asked) <= 2:
            return Answer({"jobs": [{"id": each, "state": "running"} for each in ids]})
        if OTHER in ids:
            return problem(404, f"job {OTHER} does not exist")
        return Answer({"jobs": [ended]})

    ended = {"id": JOB, "state": "succeeded", "reason": None, "attempts": 1, "result": None}
    ended |= {"created_at": "2026-03-01T12:00:00Z", "started_at": None, "finished_at": "2026-03-01T12:00:01Z"}

    async def work(pool: AsyncPool) -> None:
        found, gone = await asyncio.gather(pool.result(JOB), pool.result(OTHER), return_exceptions=True)
        assert isinstance(found, Result)
        assert found.succeeded
        assert isinstance(gone, NotFound)

    with gateway(script) as stands:
        run(work, stands.url)


def test_output_that_would_block_the_event_loop_is_refused_there() -> None:
    ended = {"id": JOB, "state": "succeeded", "reason": None, "attempts": 1, "result": None}
    ended |= {"created_at": "2026-03-01T12:00:00Z", "started_at": None, "finished_at": "2026-03-01T12:00:01Z"}
    output = {"start": 0, "data": "NDIK", "next": 3, "state": "succeeded", "attempt": 1, "final": True}
    script = in_turn(Answer({"jobs": [ended]}), Answer(output), Answer(output | {"data": "", "start": 3}))

    async def work(pool: AsyncPool) -> None:
        result = await pool.result(JOB)
        with pytest.raises(RuntimeError, match=r"use `await pool\.output"):
            _ = result.output
        assert await pool.output(result) == b"42\n"

    with gateway(script) as stands:
        run(work, stands.url)
