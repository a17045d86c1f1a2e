"""One measurement of Procrastinate: psycopg, its schema as `procrastinate schema --apply` makes it."""

import asyncio
import logging
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import psycopg
import race
from procrastinate import App, PsycopgConnector
from procrastinate.tasks import Task

TASK = "bench"
#: Jobs that are submitted at once, and jobs that a worker has in hand at once.
BATCH, CONCURRENCY = 1000, 2
LEFT = "SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'"


def ask(dsn: str, statement: str) -> Any:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


def pool_of(settings: race.Settings, connections: int) -> App:
    logging.disable(logging.WARNING)
    return App(connector=PsycopgConnector(conninfo=settings.dsn, min_size=connections, max_size=connections))


def task_of(app: App, started: Connection | None = None) -> Task[Any, Any, Any]:
    @app.task(name=TASK)
    async def nothing() -> None:
        if started is not None:
            started.send(time.monotonic())

    return nothing


def prepare(settings: race.Settings) -> race.Track:
    async def install() -> None:
        async with pool_of(settings, 1).open_async() as app:
            await app.schema_manager.apply_schema_async()

    asyncio.run(install())
    return race.Track(settings.dsn, ask)


def submit_share(start: race.Start, settings: race.Settings, jobs: int, batch: int) -> race.Done:
    """Each client has a connection of the pool to itself and submits one batch after the other."""

    async def client(task: Task[Any, Any, Any], share: int) -> None:
        if batch == 1:
            for _ in range(share):
                await task.defer_async()
        else:
            for left in range(share, 0, -batch):
                await task.batch_defer_async(*[{} for _ in range(min(batch, left))])

    async def clients() -> race.Done:
        threads = settings.threads
        async with pool_of(settings, threads).open_async() as app:
            await app.connector.pool.wait()
            task = task_of(app)
            start()
            shares = [jobs // threads + (number < jobs % threads) for number in range(threads)]
            await asyncio.gather(*[client(task, share) for share in shares])
            return race.Done(jobs, time.monotonic())

    return asyncio.run(clients())


def drain_share(start: race.Start, settings: race.Settings, jobs: int) -> race.Done:
    """A worker that ends when the queue is empty."""

    async def work() -> float:
        async with pool_of(settings, CONCURRENCY + 1).open_async() as app:
            await app.connector.pool.wait()
            task_of(app)
            start()
            await app.run_worker_async(
                wait=False, concurrency=CONCURRENCY, listen_notify=False, install_signal_handlers=False
            )
            return time.monotonic()

    return race.Done(jobs, asyncio.run(work()))


def consume(settings: race.Settings, started: Connection) -> None:
    """A worker that tells for every job when it began."""

    async def work() -> None:
        async with pool_of(settings, 4).open_async() as app:
            task_of(app, started)
            await app.run_worker_async(install_signal_handlers=False)

    asyncio.run(work())


def produce(settings: race.Settings, samples: race.Samples) -> None:
    async def client() -> None:
        async with pool_of(settings, 1).open_async() as app:
            task = task_of(app)
            for _ in samples.rounds():
                await task.defer_async()

    asyncio.run(client())


def submitted(track: race.Track, settings: race.Settings, batch: int) -> race.Run:
    return track.race(submit_share, [(settings, share, batch) for share in settings.shares(settings.jobs)])


def submit_bulk(settings: race.Settings) -> dict[str, Any]:
    track = prepare(settings)
    return track.as_result(submitted(track, settings, BATCH))


def submit_single(settings: race.Settings) -> dict[str, Any]:
    track = prepare(settings)
    return track.as_result(submitted(track, settings, 1))


def drained(track: race.Track, settings: race.Settings) -> race.Run:
    """A worker does not tell which jobs were its own: the shares only add up."""
    ask(settings.dsn, "VACUUM ANALYZE")
    run = track.race(drain_share, [(settings, share) for share in settings.shares(settings.jobs)])
    if left := ask(settings.dsn, LEFT):
        raise race.Failed(f"{left} of {settings.jobs} jobs are left")
    return run


def drain(settings: race.Settings) -> dict[str, Any]:
    submitted(prepare(settings), settings, BATCH)
    track = race.Track(settings.dsn, ask)
    return track.as_result(drained(track, settings))


def cycle(settings: race.Settings) -> dict[str, Any]:
    track = prepare(settings)
    before = submitted(track, settings, BATCH)
    return track.as_result(drained(track, settings), submit_seconds=before.seconds)


def latency(settings: race.Settings) -> dict[str, Any]:
    return prepare(settings).latency(settings, consume, produce)


if __name__ == "__main__":
    race.main(
        "procrastinate",
        {
            "submit-bulk": submit_bulk,
            "submit-single": submit_single,
            "drain": drain,
            "cycle": cycle,
            "latency": latency,
        },
    )
