"""Measure Procrastinate with psycopg, on the schema that `procrastinate schema --apply` creates."""

import asyncio
import logging
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import contest
import psycopg
from procrastinate import App, PsycopgConnector
from procrastinate.tasks import Task

TASK = "bench"
#: Jobs of one submit, and jobs that a worker runs at the same time.
BATCH, CONCURRENCY = 1000, 2
LEFT = "SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'"


def ask(dsn: str, statement: str) -> Any:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


def pool_of(settings: contest.Settings, connections: int) -> App:
    logging.disable(logging.WARNING)
    return App(connector=PsycopgConnector(conninfo=settings.dsn, min_size=connections, max_size=connections))


def task_of(app: App, started: Connection | None = None, *, plain: bool = False) -> Task[Any, Any, Any]:
    if plain:

        @app.task(name=TASK)
        def nothing_plain() -> None:
            pass

        return nothing_plain

    @app.task(name=TASK)
    async def nothing() -> None:
        if started is not None:
            started.send(time.monotonic())

    return nothing


def prepare(settings: contest.Settings) -> contest.Track:
    async def install() -> None:
        async with pool_of(settings, 1).open_async() as app:
            await app.schema_manager.apply_schema_async()

    asyncio.run(install())
    return contest.Track(settings.dsn, ask)


def submit_share(start: contest.Start, settings: contest.Settings, jobs: int, batch: int) -> contest.Done:
    """Run clients that each use one connection of the pool and submit one batch after the other."""

    async def client(task: Task[Any, Any, Any], share: int) -> None:
        if batch == 1:
            for _ in range(share):
                await task.defer_async()
        else:
            for left in range(share, 0, -batch):
                await task.batch_defer_async(*[{} for _ in range(min(batch, left))])

    async def clients() -> contest.Done:
        threads = settings.threads
        async with pool_of(settings, threads).open_async() as app:
            await app.connector.pool.wait()
            task = task_of(app)
            start()
            shares = [jobs // threads + (number < jobs % threads) for number in range(threads)]
            await asyncio.gather(*[client(task, share) for share in shares])
            return contest.Done(jobs, time.monotonic())

    return asyncio.run(clients())


def drain_share(start: contest.Start, settings: contest.Settings, jobs: int) -> contest.Done:
    """Run a worker until the queue is empty."""

    async def work() -> float:
        async with pool_of(settings, CONCURRENCY + 1).open_async() as app:
            await app.connector.pool.wait()
            task_of(app, plain=bool(settings.plain))
            start()
            await app.run_worker_async(
                wait=False, concurrency=CONCURRENCY, listen_notify=False, install_signal_handlers=False
            )
            return time.monotonic()

    return contest.Done(jobs, asyncio.run(work()))


def consume(settings: contest.Settings, started: Connection) -> None:
    """Run a worker that sends the start time of each job."""

    async def work() -> None:
        async with pool_of(settings, 4).open_async() as app:
            task_of(app, started)
            await app.run_worker_async(install_signal_handlers=False)

    asyncio.run(work())


def produce(settings: contest.Settings, samples: contest.Samples) -> None:
    async def client() -> None:
        async with pool_of(settings, 1).open_async() as app:
            task = task_of(app)
            for _ in samples.rounds():
                await task.defer_async()

    asyncio.run(client())


def submitted(track: contest.Track, settings: contest.Settings, batch: int) -> contest.Run:
    return track.race(submit_share, [(settings, share, batch) for share in settings.shares(settings.jobs)])


def submit_bulk(settings: contest.Settings) -> dict[str, Any]:
    track = prepare(settings)
    return track.as_result(submitted(track, settings, BATCH))


def submit_single(settings: contest.Settings) -> dict[str, Any]:
    track = prepare(settings)
    return track.as_result(submitted(track, settings, 1))


def drained(track: contest.Track, settings: contest.Settings) -> contest.Run:
    """Drain the queue; a worker does not report which jobs it ran, so each is counted with an equal share."""
    ask(settings.dsn, "VACUUM ANALYZE")
    run = track.race(drain_share, [(settings, share) for share in settings.shares(settings.jobs)])
    if left := ask(settings.dsn, LEFT):
        raise contest.Failed(f"{left} of {settings.jobs} jobs are left")
    return run


def drain(settings: contest.Settings) -> dict[str, Any]:
    submitted(prepare(settings), settings, BATCH)
    track = contest.Track(settings.dsn, ask)
    return track.as_result(drained(track, settings))


def cycle(settings: contest.Settings) -> dict[str, Any]:
    track = prepare(settings)
    before = submitted(track, settings, BATCH)
    return track.as_result(drained(track, settings), submit_seconds=before.seconds)


def latency(settings: contest.Settings) -> dict[str, Any]:
    return prepare(settings).latency(settings, consume, produce)


if __name__ == "__main__":
    contest.main(
        "procrastinate",
        {
            "submit-bulk": submit_bulk,
            "submit-single": submit_single,
            "drain": drain,
            "cycle": cycle,
            "latency": latency,
        },
    )
