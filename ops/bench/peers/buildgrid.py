"""One measurement of BuildGrid's scheduler at the level of its functions: no gRPC, no bots, no storage server.

Jobs are unique actions that may not be cached, without platform properties; bots have no cohort, so that no quota is
looked at. That is the cheapest way through every function. Job history cannot be switched off.
"""

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psycopg2
import race
from alembic import command
from alembic.config import Config
from buildgrid._protos.build.bazel.remote.execution.v2.remote_execution_pb2 import Action, Command
from buildgrid._protos.google.devtools.remoteworkers.v1test2.bots_pb2 import Lease
from buildgrid.server import sql
from buildgrid.server.cas.storage.lru_memory_cache import LRUMemoryCache
from buildgrid.server.context import instance_context
from buildgrid.server.enums import BotStatus, LeaseState
from buildgrid.server.scheduler import DynamicPropertySet, PriorityAgeAssignerConfig, Scheduler
from buildgrid.server.scheduler.assigner import AssignByCapacity, SamplingConfig
from buildgrid.server.sql.provider import SqlProvider
from buildgrid.server.utils.cancellation import CancellationContext
from buildgrid.server.utils.digests import create_digest

INSTANCE = "bench"
STORAGE_BYTES = 64 << 20
#: A queue of any depth from one job that was submitted.
COPY_JOB = """
INSERT INTO jobs SELECT copy.* FROM jobs AS job, generate_series(2, %s) AS number, LATERAL jsonb_populate_record(job,
  jsonb_build_object('name', gen_random_uuid(), 'action_digest', md5(number::text) || '/1',
                     'queued_timestamp', job.queued_timestamp - number * interval '1 us')) AS copy
"""
ASSIGNED = "SELECT count(*) FROM jobs WHERE assigned AND stage = 3"
COMPLETED = "SELECT count(*) FROM jobs WHERE stage = 4"


class Counting(Scheduler):
    """A scheduler that tells which of its assignments found a bot: a job that is put off counts as updated, too."""

    def __init__(self, *args: Any, assigned: Callable[[], None], **kwargs: Any) -> None:
        self._assigned, self._found = assigned, threading.local()
        super().__init__(*args, **kwargs)

    def match_bot_by_capacity(self, *args: Any, **kwargs: Any) -> Any:
        found = super().match_bot_by_capacity(*args, **kwargs)
        self._found.bot = found is not None
        return found

    def assign_job_by_priority(self, *args: Any, **kwargs: Any) -> int:
        self._found.bot = False
        updated = super().assign_job_by_priority(*args, **kwargs)
        if self._found.bot:
            self._assigned()
        return updated


class Tally:
    """Counts across threads and processes, up to a goal, and remembers when this process counted last."""

    def __init__(self, counter: "Synchronized[int]", goal: int) -> None:
        self.jobs, self.last = 0, time.monotonic()
        self.reached = threading.Event()
        self._counter, self._goal = counter, goal

    def add(self, jobs: int = 1) -> None:
        with self._counter.get_lock():
            self._counter.value += jobs
            self.jobs, self.last = self.jobs + jobs, time.monotonic()
            if self._counter.value >= self._goal:
                self.reached.set()

    def over(self) -> bool:
        return self._counter.value >= self._goal


class Call:
    """A gRPC call that nobody cancels."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return callback is not None


def ask(dsn: str, statement: str) -> Any:
    with closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None


def url(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg2://", 1)


@contextmanager
def scheduler(settings: race.Settings, **options: Any) -> Iterator[Any]:
    """One with connections open for all threads, each of which may use two at once, and no timers of its own."""
    logging.getLogger().setLevel(logging.ERROR)
    connections = 2 * settings.threads
    provider = SqlProvider(connection_string=url(settings.dsn), pool_size=connections)
    with ExitStack() as opened:
        for _ in range(connections):
            opened.enter_context(provider.session()).connection()
    kind = Counting if "assigned" in options else Scheduler
    yield kind(
        provider,
        LRUMemoryCache(STORAGE_BYTES),
        property_set=DynamicPropertySet(
            unique_property_keys=set(), match_property_keys=set(), wildcard_property_keys=set()
        ),
        poll_interval=0,
        execution_timer_interval=0,
        **options,
    )
    provider._engine.dispose()


def prepare(settings: race.Settings) -> None:
    """The tables, by BuildGrid's own migrations, and the bots."""
    config = Config()
    config.set_main_option("script_location", str(Path(sql.__file__).parent / "alembic"))
    config.set_main_option("sqlalchemy.url", url(settings.dsn).replace("%", "%%"))
    command.upgrade(config, "head")
    with scheduler(settings) as built, instance_context(INSTANCE):
        for number in range(settings.bots):
            built.add_bot_entry(
                bot_name=f"{INSTANCE}/{number}",
                bot_session_id=f"bot-{number}",
                bot_session_status=BotStatus.OK.value,
                bot_capacity=settings.capacity or settings.jobs,
            )


def submit(built: Scheduler) -> None:
    """One job: one call, one transaction."""
    what = Command(arguments=["true", str(uuid.uuid4())])
    action = Action(command_digest=create_digest(what.SerializeToString()), do_not_cache=True)
    built.queue_job_action(
        action=action,
        action_digest=create_digest(action.SerializeToString()),
        command=what,
        platform_requirements={},
        property_label="unknown",
        priority=1,
        skip_cache_lookup=True,
    )


def in_threads(threads: int, run: Callable[[int], float]) -> float:
    """The latest of what the threads of this process give."""
    with ThreadPoolExecutor(threads) as pool:
        return max(pool.map(run, range(threads)))


def submit_share(start: race.Start, settings: race.Settings, jobs: int) -> race.Done:
    with scheduler(settings) as built:

        def client(number: int) -> float:
            start()
            with instance_context(INSTANCE):
                for _ in range(number, jobs, settings.threads):
                    submit(built)
            return time.monotonic()

        return race.Done(jobs, in_threads(settings.threads, client))


def assign_share(start: race.Start, settings: race.Settings, counter: "Synchronized[int]") -> race.Done:
    """The assigners as a server runs them, but never sleeping and never putting a job off."""
    tally = Tally(counter, settings.jobs)
    sampling = SamplingConfig(sample_size=settings.sample) if settings.sample else None
    config = PriorityAgeAssignerConfig(
        name="bench",
        count=settings.threads,
        interval=0,
        jitter_factor=0,
        busy_sleep_factor=0,
        failure_backoff=0,
        bot_assignment_strategy=AssignByCapacity(sampling=sampling),
    )
    with scheduler(settings, assigned=tally.add) as built:
        assigners = list(config.generate_assigners(built))
        start()
        for assigner in assigners:
            assigner.start()
        while not tally.reached.wait(0.01) and not tally.over():
            pass
        for assigner in assigners:
            assigner.stop()
    return race.Done(tally.jobs, tally.last)


def cycle_share(start: race.Start, settings: race.Settings, process: int, counter: "Synchronized[int]") -> race.Done:
    """Bots that finish at once what they hold and take what they are given for it, until all jobs are done."""
    tally = Tally(counter, settings.jobs)
    with scheduler(settings, proactive_fetch_to_capacity=True) as built:

        def serve(number: int) -> float:
            crew = settings.processes * settings.threads
            mine = range(process * settings.threads + number, settings.bots, crew)
            held: dict[int, tuple[list[Lease], int]] = {bot: ([], 0) for bot in mine}
            start()
            with instance_context(INSTANCE):
                for bot in itertools.cycle(mine):
                    if tally.over():
                        break
                    leases, version = held[bot]
                    held[bot] = sync(built, bot, leases, version)
                    if leases:
                        tally.add(len(leases))
            return tally.last

        last = in_threads(settings.threads, serve)
    return race.Done(tally.jobs, last)


def sync(built: Scheduler, bot: int, leases: list[Lease], version: int) -> tuple[list[Lease], int]:
    for lease in leases:
        lease.state = LeaseState.COMPLETED.value
    return built.synchronize_bot_leases(
        f"{INSTANCE}/{bot}", f"bot-{bot}", BotStatus.OK.value, version, leases, CancellationContext(Call())
    )


def submit_single(settings: race.Settings) -> dict[str, Any]:
    prepare(settings)
    track = race.Track(settings.dsn, ask)
    return track.as_result(submitted(track, settings))


def submitted(track: race.Track, settings: race.Settings) -> race.Run:
    shares = [(settings, share) for share in settings.shares(settings.jobs)]
    return track.race(submit_share, shares, threads=settings.threads)


def assign(settings: race.Settings) -> dict[str, Any]:
    if settings.capacity and settings.bots * settings.capacity < settings.jobs:
        raise race.Failed(f"{settings.bots} bots of capacity {settings.capacity} cannot hold {settings.jobs} jobs")
    prepare(settings)
    with scheduler(settings) as built, instance_context(INSTANCE):
        submit(built)
    ask(settings.dsn, COPY_JOB % max(settings.queued, settings.jobs))
    ask(settings.dsn, "VACUUM ANALYZE")
    track = race.Track(settings.dsn, ask)
    counter = get_context("spawn").Value("q", 0)
    run = track.race(assign_share, [(settings, counter)] * settings.processes)
    if (assigned := ask(settings.dsn, ASSIGNED)) != run.jobs:
        raise race.Failed(f"{run.jobs} assignments were counted, but {assigned} jobs are assigned")
    return track.as_result(run)


def cycle(settings: race.Settings) -> dict[str, Any]:
    if settings.bots < settings.processes * settings.threads:
        raise race.Failed("every thread needs a bot of its own")
    prepare(settings)
    track = race.Track(settings.dsn, ask)
    before = submitted(track, settings)
    ask(settings.dsn, "VACUUM ANALYZE")
    counter = get_context("spawn").Value("q", 0)
    shares = [(settings, process, counter) for process in range(settings.processes)]
    run = track.race(cycle_share, shares, threads=settings.threads)
    if (completed := ask(settings.dsn, COMPLETED)) != settings.jobs:
        raise race.Failed(f"{completed} of {settings.jobs} jobs are completed")
    return track.as_result(run, submit_seconds=before.seconds)


if __name__ == "__main__":
    race.main("buildgrid", {"submit-single": submit_single, "assign": assign, "cycle": cycle})
