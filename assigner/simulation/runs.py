"""Replays of a past under several policies, each in a process and on a server of its own, as many at once as there are
processors.

The first replay makes a cluster with the pool's tables. Each replay begins with a copy of it.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from leasehold.errors import NotReady

from assigner.settings import PoolSettings
from assigner.simulation.clock import VirtualClock, make
from assigner.simulation.past import Past, PastBot, shaken
from assigner.simulation.replay import BotsOf, Replayed, replay
from assigner.simulation.report import Measured
from schema import clock
from schema.gc_tuning import infrequent_gc
from schema.policy.versions import Content
from schema.postgres import embedded

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

PREFIX = "leasehold-simulate-"


@dataclass(frozen=True)
class Trial:
    """A policy to try: its name, its settings, its bots, and what makes them.

    limits: those of a version; None = those that operators had set, and what the settings declare.
    """

    name: str
    settings: PoolSettings
    limits: Content | None
    bots: Sequence[PastBot]
    bots_of: BotsOf


@dataclass(frozen=True)
class Outcome:
    """What a policy did with the past, and with each shaken one. The shaken pasts are the same for all policies."""

    replayed: Replayed
    shaken: Sequence[Measured]


@dataclass(frozen=True)
class _Work:
    """What there is to repeat. like: the data directory of the cluster that all copy; None = there is one replay."""

    past: Past
    trials: Sequence[Trial]
    seed: int
    step: float
    like: Path | None


# What a worker process repeats. It is set once, when the process begins, because a past is large.
_work: "_Work"
#: Set while no replay runs in this process.
_rests = Event()
_rests.set()


def run_all(
    past: Past, trials: Sequence[Trial], *, seed: int, step: float, shakes: int, told: Callable[[int, int], object]
) -> list[Outcome]:
    """Replay the past under each policy, once as it was and `shakes` times shaken.

    told: is called with the number of finished replays and that of all. Raises what a replay raises.
    """
    tasks = [*product(range(len(trials)), range(shakes + 1))]
    workers = min(len(tasks), os.cpu_count() or 1)
    found: dict[tuple[int, int], Replayed | Measured] = {}
    # The settings are models of this program alone, which another process may not know: it gets the sections that it
    # needs.
    plain = [replace(trial, settings=_plain(trial.settings)) for trial in trials]
    work = _Work(past, plain, seed, step, embedded.scratch(PREFIX) if len(tasks) > 1 else None)
    context = multiprocessing.get_context("spawn")
    with (
        _removed(work.like),
        ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(work, context.Value("i", 0))) as pool,
    ):
        waiting = {pool.submit(_run, *task): task for task in tasks}
        try:
            for done in as_completed(waiting):
                found[waiting[done]] = done.result()
                told(len(found), len(tasks))
        except BrokenProcessPool:
            raise NotReady("A process that replayed was killed, perhaps for want of memory.") from None
        except BaseException:
            # What a worker has taken already cannot be cancelled: each ends when its server has stopped.
            for worker in multiprocessing.active_children():
                worker.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes = []
    for trial in range(len(trials)):
        first, *others = (found[trial, shake] for shake in range(shakes + 1))
        assert isinstance(first, Replayed)
        outcomes.append(Outcome(first, [each for each in others if isinstance(each, Measured)]))
    return outcomes


def _plain(settings: PoolSettings) -> PoolSettings:
    return PoolSettings.model_construct(**{name: getattr(settings, name) for name in PoolSettings.model_fields})


@contextmanager
def _removed(directory: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _begin(work: _Work, begun: "Synchronized[int]") -> None:
    """Prepare this process. begun: counts those that have begun."""
    global _work
    _work = work
    with begun:
        nth, begun.value = begun.value, begun.value + 1
    # It and its server take turns, and never work at once. On one processor each wakes the other in less time.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[nth % len(processors)]})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its server ends with it
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone: its replay is interrupted, and its server ends, as with Ctrl-C."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if not _rests.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        _rests.wait()
        if _work.like is not None:
            shutil.rmtree(_work.like, ignore_errors=True)
        os._exit(1)


def _run(trial: int, shake: int) -> Replayed | Measured:
    """Replay under a policy: the past as it was for shake 0."""
    _rests.clear()
    try:
        return _replayed(trial, shake)
    except (KeyboardInterrupt, SystemExit):
        os._exit(130)
    finally:
        _rests.set()


def _replayed(trial: int, shake: int) -> Replayed | Measured:
    tried, past, seed = _work.trials[trial], _work.past, _work.seed
    if shake:
        past = shaken(past, random.Random(f"{seed} shake {shake}"))
    past = replace(past, bots=tried.bots)
    if _work.like is not None:
        make_once(_work.like, _work.past.since)
    with embedded.serve_for_now(PREFIX, like=_work.like) as server, infrequent_gc(50_000, 20, 100):
        done = replay(
            past, tried.settings, server.url, tried.bots_of, seed=seed + shake, step=_work.step, limits=tried.limits
        )
    return done.measured if shake else done


def make_once(data: Path, since: float) -> None:
    """Make the pool's tables in the cluster of this directory, and stop its server, unless another process has."""
    with embedded.exclusive_lock(data / "made.lock") as made:
        if os.fstat(made.fileno()).st_size == 0:
            with embedded.serve(data, durable=False) as server, clock.replaced(now := VirtualClock(since)):
                database, _ = make(server.url, now, seed=0)
                database.close()
            made.write(b"made")
