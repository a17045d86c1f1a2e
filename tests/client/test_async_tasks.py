"""Tasks that coroutines defer: on a `Pool` and on an `AsyncPool`, with what both of them refuse."""

import asyncio
import gc
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from leasehold.async_pool import AsyncPool
from leasehold.errors import BadInput, NoAnswer, TaskFailed, TimedOut
from leasehold.pool import Pool
from leasehold.tasks import AsyncTaskJob, Task, TaskJob

from schema.postgres.engine import Database, libpq_url
from tests.support.apps import task_app
from tests.support.http import Answer, Gateway, ReceivedRequest, problem
from tests.support.patience import MINUTE, eventually

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


def threads() -> list[str]:
    gc.collect()  # the event loop, with which those of a `Pool` end
    names = ("leasehold-call", "leasehold-wait_")
    return [each.name for each in threading.enumerate() if each.name.startswith(names)]


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


def run(work: Callable[[], Awaitable[Any]]) -> Any:
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

    run(work)
    submits = [asked.body["jobs"] for asked in stands.asked if asked.path == "/v1/jobs"]
    assert [len(jobs) for jobs in submits] == [1, 2]
    assert json.loads(submits[0][0]["stdin"]) == {"args": [1], "kwargs": {"right": 2}}
    assert submits[0][0]["command"][1] == "tests.support.apps.task_app:pool_of_a_test"
    assert stands.paths()[-1] == "POST /v1/jobs/cancel"


def test_a_job_without_a_value_and_one_that_goes_on_are_told_as_of_a_pool(app: App, stands: Gateway) -> None:
    stands.script = pool_of_jobs(job_0="cancelled", job_1="running")

    async def work() -> None:
        cancelled, running = await app.add.batch_async([(1,), (2,)])
        with pytest.raises(TaskFailed, match=r"task '.*add' cancelled: no reason is stored"):
            await cancelled.result()
        with pytest.raises(TimedOut) as going:
            await running.result(timeout=0.05)
        assert going.value.pending == (running.id,)

    run(work)


def test_what_cannot_be_sent_is_refused_before_anything_is(app: App, stands: Gateway) -> None:
    async def work() -> None:
        with pytest.raises(BadInput, match="left: a value of type 'object' is not JSON"):
            await app.add.defer_async(object())
        with pytest.raises(BadInput, match=r"1\.right: a value of type 'set' is not JSON"):
            await app.add.batch_async([(1,), (1, {2})])
        with pytest.raises(TypeError, match="too many positional arguments"):
            await app.add.defer_async(1, 2, 3)

    run(work)
    assert stands.asked == []


def test_many_results_are_read_together(app: App, stands: Gateway) -> None:
    stands.script = pool_of_jobs(job_1="failed")

    async def work() -> None:
        jobs = await app.add.batch_async([(1,), (2,), (3,)])
        before = len(stands.asked)
        async with AsyncPool(stands.url, "lh_operator_x_y", patience=0.0) as pool:
            values = await pool.gather([*jobs, jobs[0]], return_errors=True)
            assert [str(value) for value in values] == [
                "1", f"task '{app.add.name}' failed: no reason is stored", "3", "1"
            ]  # fmt: skip
            assert [asked.path for asked in stands.asked[before:]] == ["/v1/jobs/wait", "/v1/results"]
            with pytest.raises(TaskFailed):
                await pool.gather(jobs)
            with pytest.raises(BadInput, match="jobs: are many, and this is one"):
                await pool.gather(jobs[0])
            with pytest.raises(BadInput, match=r"jobs\.0: is a 'coroutine', not the job of a task; await it first"):
                await pool.gather([unawaited := app.add.defer_async(1)])
        unawaited.close()

    run(work)


def test_only_a_task_of_a_pool_has_calls_that_block(app: App, stands: Gateway) -> None:
    assert app.add(1, right=2) == 3, "a task that is called runs here"
    if isinstance(app.pool, Pool):
        assert app.add.defer(1).result() == 1
        return
    with pytest.raises(RuntimeError, match=r"of an AsyncPool has no `defer`: use `await add.defer_async\(…\)`"):
        app.add.defer(1)
    with pytest.raises(RuntimeError, match=r"of an AsyncPool has no `batch`: use `await add.batch_async\(…\)`"):
        app.add.batch([(1,)])
    assert stands.asked == []


def test_a_call_in_a_transaction_gives_the_kind_of_job_that_the_pool_has(app: App, database: Database) -> None:
    kind = TaskJob if isinstance(app.pool, Pool) else AsyncTaskJob

    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(libpq_url(database.url)) as connection:
            assert type(await app.add.defer_in(connection, 1)) is kind
        with psycopg.connect(libpq_url(database.url)) as blocking:
            assert [type(job) for job in app.add.batch_in(blocking, [(1,), (2,)])] == [kind] * 2

    run(work)


def test_one_event_loop_after_the_other_uses_a_pool_and_several_at_once(app: App) -> None:
    async def add() -> int:
        return await (await app.add.defer_async(1)).result()

    results: list[int] = []
    if isinstance(app.pool, Pool):  # an AsyncPool belongs to one loop at a time
        other = threading.Thread(target=lambda: results.append(run(add)))
        other.start()
        results.append(run(add))
        other.join(MINUTE)
    results += [run(add), run(add)]
    assert set(results) == {1}


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

    run(work)


def test_an_async_pool_without_an_environment_can_be_imported_but_not_opened(
    no_pool_of_our_own: None, tmp_path: Path
) -> None:
    pool = AsyncPool.from_env(data=tmp_path)

    async def work() -> None:
        async with pool:
            pass

    with pytest.raises(BadInput, match=r"^url: no gateway is known"):
        run(work)
