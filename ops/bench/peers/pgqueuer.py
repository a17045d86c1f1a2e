"""Measure PgQueuer with asyncpg, uvloop and batches, on tables as `pgq install` creates them."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import asyncpg
import contest
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.domain.types import QueueExecutionMode
from pgqueuer.models import Job
from pgqueuer.queries import Queries

ENTRYPOINT = "bench"
#: Jobs of one submit, and jobs that a worker takes and completes together.
BATCH = 1000
LEFT = "SELECT count(*) FROM pgqueuer"
SUCCESSFUL = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"


class Telling(Queries):
    """Queries that report how many jobs they have just completed."""

    tell: Callable[[int], None]

    async def log_jobs(self, job_status: list[Any]) -> None:
        await super().log_jobs(job_status)
        self.tell(len(job_status))


def ask(dsn: str, statement: str) -> Any:
    async def once() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(once())


def prepare(settings: contest.Settings) -> contest.Track:
    async def install() -> None:
        connection = await asyncpg.connect(settings.dsn)
        await Queries.from_asyncpg_connection(connection).install()
        await connection.close()

    asyncio.run(install())
    return contest.Track(settings.dsn, ask)


def submit_share(start: contest.Start, settings: contest.Settings, jobs: int, batch: int) -> contest.Done:
    """Run clients that each have a connection and submit one batch after the other."""

    async def client(connection: asyncpg.Connection, share: int) -> None:
        queries = Queries.from_asyncpg_connection(connection)
        for left in range(share, 0, -batch):
            size = min(batch, left)
            await queries.enqueue([ENTRYPOINT] * size, [None] * size, [0] * size)

    async def clients() -> contest.Done:
        threads = settings.threads
        connections = [await asyncpg.connect(settings.dsn) for _ in range(threads)]
        start()
        shares = [jobs // threads + (number < jobs % threads) for number in range(threads)]
        await asyncio.gather(*map(client, connections, shares))
        last = time.monotonic()
        for connection in connections:
            await connection.close()
        return contest.Done(jobs, last)

    return uvloop.run(clients())


def drain_share(start: contest.Start, settings: contest.Settings) -> contest.Done:
    """Run a worker until the queue is empty; a job is done when its completion is committed."""
    logging.disable(logging.INFO)
    jobs, last = 0, time.monotonic()

    def tell(more: int) -> None:
        nonlocal jobs, last
        jobs, last = jobs + more, time.monotonic()

    async def work() -> None:
        async with asyncpg.create_pool(settings.dsn, min_size=3, max_size=3) as pool:
            driver = AsyncpgPoolDriver(pool)
            queries = Telling(driver)
            queries.tell = tell
            worker = PgQueuer(driver, queries=queries)

            async def coroutine(_: Job) -> None:
                pass

            async def plain(_: Job) -> None:
                # Its own advice for a plain function.
                await asyncio.to_thread(int)

            worker.entrypoint(ENTRYPOINT)(plain if settings.plain else coroutine)
            start()
            await worker.qm.run(batch_size=BATCH, mode=QueueExecutionMode.drain, log_aggregation_interval=timedelta(0))

    uvloop.run(work())
    return contest.Done(jobs, last)


def consume(settings: contest.Settings, started: Connection) -> None:
    """Run a worker that sends the start time of each job."""

    async def work() -> None:
        async with asyncpg.create_pool(settings.dsn, min_size=3, max_size=3) as pool:
            worker = PgQueuer.from_asyncpg_pool(pool)

            @worker.entrypoint(ENTRYPOINT)
            async def nothing(_: Job) -> None:
                started.send(time.monotonic())

            await worker.qm.run(batch_size=BATCH)

    uvloop.run(work())


def produce(settings: contest.Settings, samples: contest.Samples) -> None:
    async def client() -> None:
        connection = await asyncpg.connect(settings.dsn)
        queries = Queries.from_asyncpg_connection(connection)
        for _ in samples.rounds():
            await queries.enqueue(ENTRYPOINT, None)
        await connection.close()

    uvloop.run(client())


def submitted(track: contest.Track, settings: contest.Settings, batch: int) -> contest.Run:
    return track.race(submit_share, [(settings, share, batch) for share in settings.shares(settings.jobs)])


def submit_bulk(settings: contest.Settings) -> dict[str, Any]:
    track = prepare(settings)
    return track.as_result(submitted(track, settings, BATCH))


def submit_single(settings: contest.Settings) -> dict[str, Any]:
    track = prepare(settings)
    return track.as_result(submitted(track, settings, 1))


def drained(track: contest.Track, settings: contest.Settings) -> contest.Run:
    ask(settings.dsn, "VACUUM ANALYZE")
    run = track.race(drain_share, [(settings,)] * settings.processes)
    left, successful = ask(settings.dsn, LEFT), ask(settings.dsn, SUCCESSFUL)
    if left or successful != settings.jobs:
        raise contest.Failed(f"{successful} of {settings.jobs} jobs are done, {left} are left")
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
        "pgqueuer",
        {
            "submit-bulk": submit_bulk,
            "submit-single": submit_single,
            "drain": drain,
            "cycle": cycle,
            "latency": latency,
        },
    )
