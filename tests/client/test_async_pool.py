"""Programs with an event loop: `AsyncPool`, and tasks that coroutines defer on it and on a `Pool`."""

import asyncio
import gc
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import leasehold
import psycopg
import pytest
from leasehold.async_calls import THREADS
from leasehold.async_pool import AsyncPool
from leasehold.errors import BadInput, NoAnswer, NotFound, TaskFailed, TimedOut
from leasehold.graphs import GraphState
from leasehold.jobs import JobRequest, Result
from leasehold.pool import Pool
from leasehold.states import JobState
from leasehold.tasks.task import AsyncTaskJob, Task, TaskJob

from schema.postgres.engine import Database, libpq_url
from tests.support.apps import task_app
from tests.support.http import AT, OTHER, Answer, Gateway, ReceivedRequest, final, gateway, in_turn, problem
from tests.support.http import JOB_COMMANDING as JOB
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool as Made
from tests.support.pool import active, completed
from tests.support.servers import Served


def run(work: Callable[[AsyncPool], Awaitable[Any]], url: str, token: str = "lh_operator_x_y", **options: Any) -> Any:
    """Run a coroutine that uses a pool."""

    async def main() -> Any:
        async with AsyncPool(url, token, **options) as pool:
            return await asyncio.wait_for(work(pool), MINUTE)

    return asyncio.run(main())


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keep what earlier tests have left out of the collections of `threads`, each of which would take a second."""
    gc.collect()
    gc.freeze()


def threads() -> list[str]:
    """The threads of pools that are open."""
    gc.collect()  # the event loop, with which those of a `Pool` end
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
        seen: list[GraphState] = []
        with pytest.raises(TimedOut):
            await taken.wait(timeout=0.1, on_progress=seen.append)
        assert [state.blocked for state in seen] == [1], "a state is told once"
        assert await taken.cancel() == 2
        assert (await taken.wait()).state == "cancelled"
        assert {result.state for result in (await taken.results()).values()} == {JobState.CANCELLED}

    run(work, served.url, served.token("operator"))
    assert threads() == []


def test_any_number_of_coroutines_wait_by_one_request(served: Served, pool: Made) -> None:
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


def test_jobs_come_in_the_order_of_their_ends(served: Served, pool: Made) -> None:
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


def test_a_cancelled_call_breaks_off_its_request_and_leaves_no_thread_behind(served: Served, pool: Made) -> None:
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


def test_a_job_that_is_deleted_while_others_are_waited_for_is_told_to_its_caller_only() -> None:
    def script(asked: ReceivedRequest) -> Answer:
        ids = asked.body["ids"]
        if len(stands.asked) <= 2:
            return Answer({"jobs": [{"id": each, "state": "running"} for each in ids]})
        if OTHER in ids:
            return problem(404, f"job {OTHER} does not exist")
        return Answer({"jobs": [ended]})

    ended = final(JOB, "succeeded") | {"created_at": f"{AT}0Z", "started_at": None}

    async def work(pool: AsyncPool) -> None:
        found, gone = await asyncio.gather(pool.result(JOB), pool.result(OTHER), return_exceptions=True)
        assert isinstance(found, Result)
        assert found.succeeded
        assert isinstance(gone, NotFound)

    with gateway(script) as stands:
        run(work, stands.url)


def test_an_end_is_told_however_often_other_coroutines_begin_to_wait() -> None:
    most, over = 20, threading.Event()
    opened: list[tuple[asyncio.AbstractEventLoop, AsyncPool]] = []
    begun: list[asyncio.Task[Result]] = []
    ended = final(JOB, "succeeded") | {"created_at": f"{AT}0Z", "started_at": None}

    def script(asked: ReceivedRequest) -> Answer:
        if asked.body["wait"] and len(begun) < most:
            loop, pool = opened[0]
            loop.call_soon_threadsafe(begin, pool)
            over.wait(MINUTE)
        jobs = {each: {"id": each, "state": "running"} for each in asked.body["ids"]}
        return Answer({"jobs": list((jobs | ({JOB: ended} if len(stands.asked) > 1 else {})).values())})

    def begin(pool: AsyncPool) -> None:
        begun.append(asyncio.ensure_future(pool.result(f"{JOB[:-4]}{len(begun):04}")))

    async def work(pool: AsyncPool) -> None:
        opened.append((asyncio.get_running_loop(), pool))
        try:
            assert (await pool.result(JOB)).succeeded
            assert len(begun) < most
        finally:
            over.set()
            for each in begun:
                each.cancel()

    with gateway(script) as stands:
        run(work, stands.url)


def test_output_that_would_block_the_event_loop_is_refused_there() -> None:
    ended = final(JOB, "succeeded") | {"created_at": f"{AT}0Z", "started_at": None}
    output = {"start": 0, "data": "NDIK", "next": 3, "state": "succeeded", "attempt": 1, "final": True}
    script = in_turn(Answer({"jobs": [ended]}), Answer(output), Answer(output | {"data": "", "start": 3}))

    async def work(pool: AsyncPool) -> None:
        result = await pool.result(JOB)
        with pytest.raises(RuntimeError, match=r"use `await pool\.output"):
            _ = result.output
        assert await pool.output(result) == b"42\n"

    with gateway(script) as stands:
        run(work, stands.url)


# Tasks


IDS = [f"0196f0a0-0000-7000-8000-00000000000{n}" for n in range(4)]


class App:
    """A pool with the task `add`, of which a bot finds the module."""

    def __init__(self, pool: Pool | AsyncPool) -> None:
        self.pool = pool
        self.add: Task[..., int] = pool.task(task_app.add.function)


@pytest.fixture(params=["Pool", "AsyncPool"])
def app(request: pytest.FixtureRequest, stands: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An app of each kind of pool, whose calls a gateway accepts."""
    stands.script = pool_of_jobs()
    arguments: dict[str, Any] = {"url": stands.url, "token": "lh_operator_x_y", "patience": 0.0}
    pool = Pool(**arguments) if request.param == "Pool" else AsyncPool(**arguments)
    monkeypatch.setattr(task_app, "pool_of_a_test", pool, raising=False)
    yield App(pool)
    asyncio.run(pool.close()) if isinstance(pool, AsyncPool) else pool.close()
    eventually(lambda: not threads(), what="the threads of the pool have ended")


def pool_of_jobs(**states: str) -> Callable[[ReceivedRequest], Answer]:
    """A gateway that runs each call of `add` at once; `states` are those of other ends, by the last digit of the id."""
    made: list[dict[str, Any]] = []

    def answer(asked: ReceivedRequest) -> Answer:
        match asked.path:
            case "/v1/jobs":
                ids = IDS[len(made) : len(made) + len(asked.body["jobs"])]
                made.extend(asked.body["jobs"])
                return Answer({"jobs": [{"id": id, "created": True} for id in ids]})
            case "/v1/jobs/wait" | "/v1/results":
                return Answer({"jobs": [shown(id) for id in asked.body["ids"]]})
            case "/v1/jobs/cancel":
                return Answer({"jobs": [{"id": id, "state": "cancelled", "changed": True} for id in asked.body["ids"]]})
        return problem(404, asked.path)

    def shown(id: str) -> dict[str, Any]:
        state = states.get(f"job_{id[-1]}", "succeeded")
        sum_ = sum(json.loads(made[IDS.index(id)]["stdin"])["args"])
        result = {"ok": sum_} if state == "succeeded" else None
        return {"id": id, "state": state, "reason": None, "has_result": True, "exit_code": 0, "result": result}

    return answer


def run_alone(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work(), MINUTE)

    return asyncio.run(main())


def test_coroutines_defer_calls_and_read_what_the_functions_returned(app: App, stands: Gateway) -> None:
    async def work() -> None:
        job = await app.add.defer_async(1, right=2)
        assert isinstance(job, AsyncTaskJob)
        assert (job.created, await job.state(), await job.wait()) == (True, "succeeded", "succeeded")
        assert await job.result(timeout=MINUTE) == 1
        first, second = await app.add.batch_async([(2, 3), (4, 5)])
        assert [await second.result(), await first.result()] == [9, 5]
        await job.cancel()

    run_alone(work)
    submits = [asked.body["jobs"] for asked in stands.asked if asked.path == "/v1/jobs"]
    assert [len(jobs) for jobs in submits] == [1, 2]
    assert json.loads(submits[0][0]["stdin"]) == {"args": [1], "kwargs": {"right": 2}}
    assert submits[0][0]["command"][1] == "tests.support.apps.task_app:pool_of_a_test"
    assert stands.paths()[-1] == "POST /v1/jobs/cancel"


def test_calls_that_are_put_together_are_deferred_and_awaited_by_coroutines(app: App, stands: Gateway) -> None:
    jobs, looks = pool_of_jobs(), list[str]()

    def answer(asked: ReceivedRequest) -> Answer:
        counts = dict.fromkeys(("blocked", "blocked_forever", "parked", "active", "failed", "cancelled", "dead"), 0)
        state = "active" if len(looks) < 2 else "finished"
        graph = {"id": IDS[0], "name": "sums", "nodes": 2, "queued": 0, "succeeded": 2, "state": state, **counts}
        match asked.path:
            case "/v1/graphs":
                made = jobs(replace(asked, path="/v1/jobs", body={"jobs": asked.body["nodes"]}))
                nodes = [{"node": node, "id": each["id"]} for node, each in enumerate(made.body["jobs"])]
                return Answer({"id": IDS[0], "name": "sums", "created": True, "nodes": nodes, "warnings": []})
            case path if path.startswith("/v1/graphs/"):
                looks.append(path)
                page = [{"node": node, "job": IDS[node], "state": "succeeded"} for node in range(2)]
                return Answer({**graph, "page": page})
        return jobs(asked)

    async def work() -> None:
        calls = leasehold.group(app.add.s(1, 2), app.add.s(3, 4))
        waits = asyncio.create_task((await calls.defer_async()).result(timeout=MINUTE))
        await asyncio.sleep(0)
        assert not waits.done(), "the event loop goes on"
        assert await waits == [3, 7]
        with pytest.raises(AttributeError, match=r"a graph of calls has no 'get': use .result\(timeout=60\)"):
            (await leasehold.chain(app.add.s(1)).defer_async()).get()  # type: ignore[attr-defined]

    stands.script = answer
    run_alone(work)
    assert len(looks) > 2
    if isinstance(app.pool, AsyncPool):
        with pytest.raises(RuntimeError, match=r"of an AsyncPool have no `defer`: use `await ….defer_async\(\)`"):
            leasehold.chain(app.add.s(1)).defer()


def test_a_job_without_a_value_and_one_that_goes_on_are_told_as_of_a_pool(app: App, stands: Gateway) -> None:
    stands.script = pool_of_jobs(job_0="cancelled", job_1="running")

    async def work() -> None:
        cancelled, running = await app.add.batch_async([(1,), (2,)])
        with pytest.raises(TaskFailed, match=r"task '.*add' cancelled: nobody gave a reason"):
            await cancelled.result()
        with pytest.raises(TimedOut) as going:
            await running.result(timeout=0.05)
        assert going.value.pending == (running.id,)

    run_alone(work)


def test_many_results_are_read_together(app: App, stands: Gateway) -> None:
    stands.script = pool_of_jobs(job_1="failed")

    async def work() -> None:
        jobs = await app.add.batch_async([(1,), (2,), (3,)])
        before = len(stands.asked)
        async with AsyncPool(stands.url, "lh_operator_x_y", patience=0.0) as pool:
            values = await pool.gather([*jobs, jobs[0]], return_errors=True)
            assert [str(value) for value in values] == [
                "1", f"task '{app.add.name}' failed: nobody gave a reason", "3", "1"
            ]  # fmt: skip
            assert [asked.path for asked in stands.asked[before:]] == ["/v1/jobs/wait", "/v1/results"]
            with pytest.raises(TaskFailed):
                await pool.gather(jobs)
            with pytest.raises(BadInput, match="jobs: are many, and this is one"):
                await pool.gather(jobs[0])
            with pytest.raises(BadInput, match=r"jobs\.0: is a 'coroutine', not the job of a task; await it first"):
                await pool.gather([unawaited := app.add.defer_async(1)])
        unawaited.close()

    run_alone(work)


def test_only_a_task_of_a_pool_has_calls_that_block(app: App, stands: Gateway) -> None:
    assert app.add(1, right=2) == 3, "a task that is called runs here"
    with pytest.raises(BadInput, match=r"1\.right: a value of type 'set' is not JSON"):
        run_alone(lambda: app.add.batch_async([(1,), (1, {2})]))
    assert stands.asked == []
    if isinstance(app.pool, Pool):
        assert app.add.defer(1).result() == 1
        return
    with pytest.raises(RuntimeError, match=r"of an AsyncPool has no `defer`: use `await add.defer_async\(…\)`"):
        app.add.defer(1)
    with pytest.raises(RuntimeError, match=r"of an AsyncPool has no `batch`: use `await add.batch_async\(…\)`"):
        app.add.batch([(1,)])
    with pytest.raises(RuntimeError, match=r"of an AsyncPool has no `job`: use `add.job_async\(…\)`"):
        app.add.job(JOB)
    assert stands.asked == []


def test_a_call_in_a_transaction_gives_the_kind_of_job_that_the_pool_has(app: App, database: Database) -> None:
    kind = TaskJob if isinstance(app.pool, Pool) else AsyncTaskJob

    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(libpq_url(database.url)) as connection:
            assert type(await app.add.defer_in(connection, 1)) is kind
        with psycopg.connect(libpq_url(database.url)) as blocking:
            assert [type(job) for job in app.add.batch_in(blocking, [(1,), (2,)])] == [kind] * 2

    run_alone(work)


def test_one_event_loop_after_the_other_uses_a_pool_and_several_at_once(app: App) -> None:
    async def add() -> int:
        return await (await app.add.defer_async(1)).result()

    results: list[int] = []
    if isinstance(app.pool, Pool):  # an AsyncPool belongs to one loop at a time
        other = threading.Thread(target=lambda: results.append(run_alone(add)))
        other.start()
        results.append(run_alone(add))
        other.join(MINUTE)
    results += [run_alone(add), run_alone(add)]
    assert set(results) == {1}


def test_calls_that_a_closed_pool_has_not_made_are_told_so_and_not_cancelled(stands: Gateway) -> None:
    begun, over = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        begun.release()
        over.wait(MINUTE)

    async def work() -> None:
        pool = AsyncPool(stands.url, "lh_operator_x_y")
        held = [asyncio.create_task(pool.call(hold)) for _ in range(THREADS)]
        late = asyncio.create_task(pool.call(hold))
        for _ in held:
            await asyncio.to_thread(begun.acquire)
        closing = asyncio.create_task(pool.close())
        with pytest.raises(RuntimeError, match="the pool is closed"):
            await late
        over.set()
        await closing
        await asyncio.gather(*held)

    run_alone(work)


def test_a_pool_that_is_closed_ends_the_waits_of_coroutines(app: App, stands: Gateway) -> None:
    stands.script = pool_of_jobs(job_0="running")

    async def work() -> None:
        job = await app.add.defer_async(1)
        waiting = asyncio.create_task(job.wait())
        while not any(asked.path == "/v1/jobs/wait" and asked.body["wait"] for asked in stands.asked):
            await asyncio.sleep(0.01)
        await app.pool.close() if isinstance(app.pool, AsyncPool) else app.pool.close()
        with pytest.raises((NoAnswer, RuntimeError)):
            await waiting

    run_alone(work)
