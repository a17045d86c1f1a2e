"""Measure BuildGrid's scheduler at the level of its functions, without gRPC, bots or a storage server; `wire` has them.

Jobs are unique actions that may not be cached, without platform properties. Bots have no cohort, so no quota is
checked. That is the cheapest way through every function. Job history cannot be switched off. Versions 0.4.4 and 0.9.1
are known; where they differ, `NEW` says which is installed.
"""

import itertools
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import contest

KNOWN = ("0.4.4", "0.9.1")
VERSION = version("buildgrid")
#: Whether this is the newer one, which has another driver, a storage with a root, and one function for two assigners.
NEW = VERSION.startswith("0.9.")
if VERSION not in KNOWN:
    sys.exit(f"error: this script knows BuildGrid {' and '.join(KNOWN)}, but {VERSION} is installed")
try:
    import buildgrid_wire
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

    if NEW:
        import psycopg as driver
        from buildgrid.server.cas.root_storage import RootStorage
    else:
        import psycopg2 as driver
except ImportError as error:
    sys.exit(f"error: BuildGrid {VERSION} differs from what this script knows: {error}")

INSTANCE = buildgrid_wire.INSTANCE
STORAGE_BYTES = 64 << 20
#: The function that one assigner calls for one job; it takes the name and the arguments that the version has.
ASSIGN_ONE = "assign_job_by_priority_age" if NEW else "assign_job_by_priority"
#: Copies one submitted job, for a queue of any depth.
COPY_JOB = """
INSERT INTO jobs SELECT copy.* FROM jobs AS job, generate_series(2, %s) AS number, LATERAL jsonb_populate_record(job,
  jsonb_build_object('name', gen_random_uuid(), 'action_digest', md5(number::text) || '/1',
                     'queued_timestamp', job.queued_timestamp - number * interval '1 us')) AS copy
"""
ASSIGNED = "SELECT count(*) FROM jobs WHERE assigned AND stage = 3"
COMPLETED = "SELECT count(*) FROM jobs WHERE stage = 4"


class Counting(Scheduler):
    """A scheduler that reports the assignments that found a bot; its own count includes postponed jobs."""

    def __init__(self, *args: Any, assigned: Callable[[], None], **kwargs: Any) -> None:
        self._assigned, self._found = assigned, threading.local()
        super().__init__(*args, **kwargs)

    def match_bot_by_capacity(self, *args: Any, **kwargs: Any) -> Any:
        found = super().match_bot_by_capacity(*args, **kwargs)
        self._found.bot = found is not None
        return found

    def _assign_one(self, *args: Any, **kwargs: Any) -> int:
        self._found.bot = False
        updated: int = getattr(super(), ASSIGN_ONE)(*args, **kwargs)
        if self._found.bot:
            self._assigned()
        return updated


setattr(Counting, ASSIGN_ONE, Counting._assign_one)


class Tally:
    """Counts jobs across threads and processes up to a goal, and records when this process counted last."""

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
    """A gRPC call that is never cancelled."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return callback is not None


def ask(dsn: str, statement: str) -> Any:
    with closing(driver.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None


def url(dsn: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver.__name__}://", 1)


@contextmanager
def scheduler(settings: contest.Settings, **options: Any) -> Iterator[Any]:
    """Build a scheduler with two open connections for each thread and without timers."""
    logging.getLogger().setLevel(logging.ERROR)
    connections = 2 * settings.threads
    provider = SqlProvider(connection_string=url(settings.dsn), pool_size=connections)
    with ExitStack() as opened:
        for _ in range(connections):
            opened.enter_context(provider.session()).connection()
    kind = Counting if "assigned" in options else Scheduler
    cache = LRUMemoryCache(STORAGE_BYTES)
    yield kind(
        provider,
        RootStorage(cache) if NEW else cache,
        property_set=DynamicPropertySet(
            unique_property_keys=set(), match_property_keys=set(), wildcard_property_keys=set()
        ),
        poll_interval=0,
        execution_timer_interval=0,
        **options,
    )
    provider._engine.dispose()


def migrate(settings: contest.Settings) -> None:
    """Create the tables, by BuildGrid's own migrations."""
    config = Config()
    config.set_main_option("script_location", str(Path(sql.__file__).parent / "alembic"))
    config.set_main_option("sqlalchemy.url", url(settings.dsn).replace("%", "%%"))
    command.upgrade(config, "head")


def prepare(settings: contest.Settings) -> None:
    """Create the tables and the bots."""
    migrate(settings)
    with scheduler(settings) as built, instance_context(INSTANCE):
        for number in range(settings.bots):
            built.add_bot_entry(
                bot_name=f"{INSTANCE}/{number}",
                bot_session_id=f"bot-{number}",
                bot_session_status=BotStatus.OK.value,
                bot_capacity=settings.capacity or settings.jobs,
            )


def submit(built: Scheduler) -> None:
    """Submit one job, in one call and one transaction."""
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
    """Run a function in each thread of this process and return the largest result."""
    with ThreadPoolExecutor(threads) as pool:
        return max(pool.map(run, range(threads)))


def submit_share(start: contest.Start, settings: contest.Settings, jobs: int) -> contest.Done:
    with scheduler(settings) as built:

        def client(number: int) -> float:
            start()
            with instance_context(INSTANCE):
                for _ in range(number, jobs, settings.threads):
                    submit(built)
            return time.monotonic()

        return contest.Done(jobs, in_threads(settings.threads, client))


def assign_share(start: contest.Start, settings: contest.Settings, counter: "Synchronized[int]") -> contest.Done:
    """Run the assigners as a server does, but without sleep and without postponing a job."""
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
    return contest.Done(tally.jobs, tally.last)


def cycle_share(
    start: contest.Start, settings: contest.Settings, process: int, counter: "Synchronized[int]"
) -> contest.Done:
    """Run bots that finish their jobs at once and take the next ones, until all jobs are done."""
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
    return contest.Done(tally.jobs, last)


def sync(built: Scheduler, bot: int, leases: list[Lease], version: int) -> tuple[list[Lease], int]:
    for lease in leases:
        lease.state = LeaseState.COMPLETED.value
    return built.synchronize_bot_leases(
        f"{INSTANCE}/{bot}", f"bot-{bot}", BotStatus.OK.value, version, leases, CancellationContext(Call())
    )


def submit_single(settings: contest.Settings) -> dict[str, Any]:
    prepare(settings)
    track = contest.Track(settings.dsn, ask)
    return track.as_result(submitted(track, settings))


def submitted(track: contest.Track, settings: contest.Settings) -> contest.Run:
    shares = [(settings, share) for share in settings.shares(settings.jobs)]
    return track.race(submit_share, shares, threads=settings.threads)


def assign(settings: contest.Settings) -> dict[str, Any]:
    if settings.capacity and settings.bots * settings.capacity < settings.jobs:
        raise contest.Failed(f"{settings.bots} bots of capacity {settings.capacity} cannot hold {settings.jobs} jobs")
    prepare(settings)
    with scheduler(settings) as built, instance_context(INSTANCE):
        submit(built)
    ask(settings.dsn, COPY_JOB % max(settings.queued, settings.jobs))
    ask(settings.dsn, "VACUUM ANALYZE")
    track = contest.Track(settings.dsn, ask)
    counter = get_context("spawn").Value("q", 0)
    run = track.race(assign_share, [(settings, counter)] * settings.processes)
    if (assigned := ask(settings.dsn, ASSIGNED)) != run.jobs:
        raise contest.Failed(f"{run.jobs} assignments were counted, but {assigned} jobs are assigned")
    return track.as_result(run)


def cycle(settings: contest.Settings) -> dict[str, Any]:
    if settings.bots < settings.processes * settings.threads:
        raise contest.Failed("every thread needs a bot of its own")
    prepare(settings)
    track = contest.Track(settings.dsn, ask)
    before = submitted(track, settings)
    ask(settings.dsn, "VACUUM ANALYZE")
    counter = get_context("spawn").Value("q", 0)
    shares = [(settings, process, counter) for process in range(settings.processes)]
    run = track.race(cycle_share, shares, threads=settings.threads)
    if (completed := ask(settings.dsn, COMPLETED)) != settings.jobs:
        raise contest.Failed(f"{completed} of {settings.jobs} jobs are completed")
    return track.as_result(run, submit_seconds=before.seconds)


def wire(settings: contest.Settings) -> dict[str, Any]:
    """Measure real servers: bots report all their leases as completed and are given the next ones, over gRPC."""
    migrate(settings)
    track = contest.Track(settings.dsn, ask)
    # Some more jobs, so that no bot is without one before the last job that counts is done.
    spare = 2 * settings.bots * settings.capacity
    submitted(track, replace(settings, jobs=settings.jobs + spare, processes=2, threads=2))
    ask(settings.dsn, "VACUUM ANALYZE")
    drained = buildgrid_wire.drain(settings, url(settings.dsn))
    if (completed := ask(settings.dsn, COMPLETED)) != drained.reported:
        raise contest.Failed(f"{drained.reported} jobs were reported as completed, but {completed} are")
    return drained.as_result()


if __name__ == "__main__":
    contest.main("buildgrid", {"submit-single": submit_single, "assign": assign, "cycle": cycle, "wire": wire})
