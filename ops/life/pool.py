"""A whole pool on a virtual clock: its database, its assigners and upkeep, and its bots."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from assigner.settings import PoolSettings
from assigner.simulation.clock import VirtualClock, make
from assigner.simulation.loop import HOUR, SimulatedPool
from bots.simulation.bots import Runs, SimulatedBots
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock


@contextmanager
def living(
    url: str, settings: PoolSettings, runs: Runs, *, start: float, seed: int, upkeep_every: float = HOUR
) -> Iterator[tuple[SimulatedPool, SimulatedBots]]:
    """Make a pool in the empty database of `url` and let this process live in its time until the block ends.

    start: the virtual time at first, in seconds since 1970. Everything that chance decides follows from `seed`.
    """
    now = VirtualClock(start)
    with clock.replaced(now):
        database, sessions = make(url, now, seed=seed)
        pool = SimulatedPool(database, now, sessions, settings, seed, upkeep_every)
        service = SyncService(database, timing=settings.timing, fetch=FetchSettings(), now=now)
        chance = random.Random(f"{seed} bots")
        pool.bots = bots = SimulatedBots(database, service, timing=settings.timing, runs=runs, chance=chance)
        try:
            yield pool, bots
        finally:
            pool.close()
