"""One assigner process: every configured assigner thread, upkeep, and the configuration kept current."""

import random

import structlog

from assigner.config import Reloader
from assigner.declaring import declare
from assigner.installation import PoolSettings
from assigner.loops import Loop
from assigner.polling import Polling
from assigner.presence import Presence
from assigner.staff import Staff, seeded
from assigner.upkeep import Upkeep
from schema import clock
from schema.engine import Database
from schema.wakeups import Wakeups

#: New objects between two searches for garbage, and how seldom older objects are searched. A cycle makes some of them
#: for each of hundreds of jobs, and they are gone when it ends; Python's own value is 700.
GARBAGE = (50_000, 10, 10)
#: Seconds a loop gets to end its transaction at shutdown; more than the statement timeout would not help.
STOP_WITHIN = 10.0

log = structlog.get_logger()


class AssignerProcess:
    """The loops of one process. `start` and `stop` may be called once each; `reload` after a SIGHUP."""

    def __init__(
        self, database: Database, reloader: Reloader[PoolSettings], *, name: str, chance: random.Random
    ) -> None:
        settings = reloader.current
        self._database, self._reloader, self._in_force = database, reloader, settings
        self._wakeups = Wakeups(database, chance=seeded(chance))
        self._presence = Presence(database, name, interval=settings.timing.reap)
        self._upkeep = Upkeep(
            database,
            settings.upkeep,
            timing=settings.timing,
            name=name,
            now=clock.monotonic,
            fair=settings.fair_share,
        )
        self._polling = Polling(database, settings.meters)
        self._staff = Staff(
            database, settings, name=name, wakeups=self._wakeups, presence=self._presence, chance=seeded(chance)
        )
        self._config_loop = Loop("config", self._look_at_configuration, chance=seeded(chance))
        self._loops = [
            self._config_loop,
            Loop("presence", self._presence.run_once, chance=seeded(chance)),
            Loop("upkeep", self._upkeep.run_once, chance=seeded(chance)),
            Loop("meters", self._polling.run_once, chance=seeded(chance)),
        ]
        self._cohort_loop: Loop | None = None
        if self._staff.follows_cohorts:
            self._cohort_loop = Loop("cohorts", self._staff.run_once, chance=seeded(chance))
            self._loops.insert(0, self._cohort_loop)

    def start(self) -> None:
        declare(self._database, self._reloader.current)
        self._presence.begin()
        self._wakeups.start()
        self._staff.start()
        for loop in self._loops:
            loop.start()

    def reload(self) -> None:
        """Read the configuration again at once."""
        self._reloader.request()
        self._config_loop.wake()

    def stop(self) -> None:
        """Let every loop end what it does, then return. What a killed loop would leave is a transaction undone."""
        deadline = clock.monotonic() + STOP_WITHIN
        self._staff.stop(deadline)
        for loop in self._loops:
            loop.stop(max(0.0, deadline - clock.monotonic()))
        self._wakeups.stop()
        self._presence.end()

    def _look_at_configuration(self) -> float:
        delay = self._reloader.run_once()
        before, now = self._in_force, self._reloader.current
        if now is not before:
            self._reconfigure(before, now)
            # The last thing, so that what the database could not take now is tried again.
            self._in_force = now
        return delay

    def _reconfigure(self, before: PoolSettings, now: PoolSettings) -> None:
        self._staff.reconfigure(now)
        if self._cohort_loop is not None:
            self._cohort_loop.wake()
        self._upkeep.reconfigure(now.upkeep, now.fair_share)
        self._polling.reconfigure(now.meters)
        posts = [[(each.kind, each.threads) for each in settings.assigners] for settings in (before, now)]
        if posts[0] != posts[1] or (before.database, before.timing) != (now.database, now.timing):
            log.warning(
                "some changes need a restart", sections="database, timing, number and kinds of assigners, threads"
            )
        declare(self._database, now)
