"""The assigners of one process, each in a thread of its own: a fixed number, or one for each cohort there is."""

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from assigner.admission.rules import Rules
from assigner.cycle.assigner import CohortAssigner, PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.loops import Loop
from assigner.settings import PoolSettings
from schema import clock
from schema.postgres.engine import Database
from schema.postgres.notify import Signal, Wakeups
from schema.tenancy import drains
from schema.tenancy.cohorts import Cohort, cohorts

# An assigner process shows that it is there, and learns whether an operator wants it to place nothing.


#: Seconds between two looks of an assigner that may place nothing.
DRAINED_INTERVAL = 1.0
#: Seconds until the next look at whether the last cycle has ended, so that who waits for a drain hears of it soon.
OBEY_INTERVAL = 0.2


class Presence:
    """The row of one process in the table of assigners. Methods may be called from any thread."""

    def __init__(self, database: Database, name: str, *, interval: float) -> None:
        self._database, self._name, self._interval = database, name, interval
        self._lock = threading.Lock()
        self._draining, self._at_work = False, 0
        self._serves: Sequence[Mapping[str, Sequence[str] | None]] | None = None

    def serves(self, entries: Sequence[Mapping[str, Sequence[str] | None]]) -> None:
        """What each of the process's assigners serves, told the next time it is seen: names of `instances` and
        `cohorts`, None = all."""
        with self._lock:
            self._serves = entries

    def begin(self) -> None:
        """Register the process before it places anything. What an operator wished of one of its name still holds."""
        self._obey(
            self._database.run(
                lambda connection: drains.record_assigner_alive(
                    connection, self._name, starts=True, serves=self._serves
                )
            )
        )

    def run_once(self) -> float:
        """Mark the process seen; once it places nothing more, tell that too. Returns the seconds until the next."""
        idle = self._idle()
        draining = self._database.run(
            lambda connection: drains.record_assigner_alive(connection, self._name, idle=idle, serves=self._serves),
            urgent=True,
        )
        self._obey(draining)
        return OBEY_INTERVAL if draining and not idle else self._interval

    def end(self) -> None:
        """The process stops."""
        self._database.run(lambda connection: drains.record_assigner_stopped(connection, self._name))

    def guarded(self, run_once: Callable[[], float]) -> Callable[[], float]:
        """The same work, left out while the process is drained."""

        def run() -> float:
            with self._lock:
                if self._draining:
                    return DRAINED_INTERVAL
                self._at_work += 1
            try:
                return run_once()
            finally:
                with self._lock:
                    self._at_work -= 1

        return run

    def _obey(self, draining: bool) -> None:
        with self._lock:
            self._draining = draining

    def _idle(self) -> bool:
        with self._lock:
            return self._draining and self._at_work == 0


#: Seconds between two looks at the cohorts.
COHORTS_INTERVAL = 3.0
#: Seconds the thread of a cohort that is no more gets to end its cycle before the next look.
STOP_WITHIN = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class ThreadRole:
    """What one thread is for. `entry` is the number of its `[[assigners]]` entry; `place` the number of the thread, or
    `cohort-` and the cohort's name; `cohort` the cohort's id."""

    entry: int
    place: str
    cohort: int | None = None


@dataclass(frozen=True)
class RunningThread:
    """A post and who holds it."""

    assigner: PriorityAgeAssigner
    loop: Loop
    signal: Signal


class AssignerThreads:
    """Starts and stops the assigners of one process. `stop` is the end; the other methods come from one thread each."""

    def __init__(
        self,
        database: Database,
        settings: PoolSettings,
        *,
        name: str,
        wakeups: Wakeups,
        presence: Presence,
        chance: random.Random,
    ) -> None:
        self._database, self._settings, self._name = database, settings, name
        self._wakeups, self._presence, self._chance = wakeups, presence, chance
        self._kinds = [each.kind for each in settings.assigners]
        self._lock = threading.Lock()
        self._held: dict[ThreadRole, RunningThread] = {}
        self._missing: set[str] = set()
        self._over = False
        self._filters = [_filters(each) for each in settings.assigners]
        presence.serves(list(self._filters))

    @property
    def follows_cohorts(self) -> bool:
        """Whether its threads depend on the cohorts in the database."""
        return "cohort" in self._kinds

    def start(self) -> None:
        """Start the threads whose number is fixed."""
        with self._lock:
            for entry, settings in enumerate(self._settings.assigners):
                if settings.kind != "cohort":
                    for thread in range(settings.threads):
                        self._start_thread(ThreadRole(entry, str(thread)))

    def run_once(self) -> float:
        """Start and stop the threads of cohorts so that there is one for each; returns the seconds until the next."""
        found = self._database.run(cohorts)
        with self._lock:
            if not self._over:
                self._match(found)
        return COHORTS_INTERVAL

    def reconfigure(self, settings: PoolSettings) -> None:
        """Use other settings from each thread's next cycle on. The number and the kinds of entries stay."""
        with self._lock:
            self._settings = settings
            for role, held in self._held.items():
                if (entry := self._entry(role.entry)) is not None:
                    held.assigner.reconfigure(entry, settings.quotas, rules_from(settings))
            for number in range(len(self._kinds)):
                if (entry := self._entry(number)) is not None:
                    self._filters[number] = _filters(entry)
            self._presence.serves(list(self._filters))

    def stop(self, deadline: float) -> None:
        """Let every thread end its cycle, until `deadline` on the monotonic clock at most."""
        with self._lock:
            self._over = True
            for role in list(self._held):
                self._stop_thread(role, max(0.0, deadline - clock.monotonic()))

    def _entry(self, entry: int) -> AssignerSettings | None:
        """The entry's settings as they are now, None if it is gone or another kind has taken its place."""
        if entry >= min(len(self._settings.assigners), len(self._kinds)):
            return None
        found = self._settings.assigners[entry]
        return found if found.kind == self._kinds[entry] else None

    def _match(self, found: Sequence[Cohort]) -> None:
        wanted = {role for entry, kind in enumerate(self._kinds) if kind == "cohort" for role in self._of(entry, found)}
        for role in [role for role in self._held if role.cohort is not None and role not in wanted]:
            self._stop_thread(role, STOP_WITHIN)
        names = {(role.entry, role.place) for role in self._held}
        for role in wanted - self._held.keys():
            # A cohort that has been made anew under the same name waits for the thread of the old one.
            if (role.entry, role.place) not in names:
                self._start_thread(role)
        self._report_missing(found)

    def _of(self, entry: int, found: Sequence[Cohort]) -> Iterable[ThreadRole]:
        settings = self._entry(entry)
        if settings is None:
            return (role for role in self._held if role.entry == entry)
        chosen = (each for each in found if settings.cohorts is None or each.name in settings.cohorts)
        return (ThreadRole(entry, f"cohort-{each.name}", each.id) for each in chosen)

    def _report_missing(self, found: Sequence[Cohort]) -> None:
        wished = {name for each in self._settings.assigners for name in each.cohorts or ()}
        missing = wished - {each.name for each in found}
        if missing - self._missing:
            log.warning("configured cohorts do not exist", cohorts=sorted(missing))
        self._missing = missing

    def _start_thread(self, role: ThreadRole) -> None:
        settings = self._settings.assigners[role.entry]
        assigner = (PriorityAgeAssigner if role.cohort is None else CohortAssigner)(
            self._database,
            settings,
            timing=self._settings.timing,
            chance=seeded(self._chance),
            name=f"{self._name}/{role.entry}.{role.place}",
            now=clock.monotonic,
            quotas=self._settings.quotas,
            cohort=role.cohort,
            rules=rules_from(self._settings),
        )
        signal = self._wakeups.signal("jobs")
        loop = Loop(
            f"assigner-{role.entry}-{role.place}",
            self._presence.guarded(assigner.run_once),
            chance=seeded(self._chance),
            signal=signal,
            idle=lambda: self._wakeups.idle("jobs"),
            on_error_delay=settings.interval,
        )
        self._held[role] = RunningThread(assigner, loop, signal)
        loop.start()
        if role.cohort is not None:
            log.info("a cohort has an assigner", assigner=assigner.name)

    def _stop_thread(self, role: ThreadRole, within: float) -> None:
        held = self._held[role]
        if held.loop.stop(within):
            held.signal.close()
            del self._held[role]
            if role.cohort is not None and not self._over:
                log.info("a cohort has no assigner any more", assigner=held.assigner.name)


def _filters(settings: AssignerSettings) -> Mapping[str, Sequence[str] | None]:
    return {"instances": settings.instances, "cohorts": settings.cohorts}


def rules_from(settings: PoolSettings) -> Rules:
    """What the configuration says of jobs that ask for more than a place."""
    return Rules(settings.ordering, settings.checkers, settings.fair_share)


def seeded(chance: random.Random) -> random.Random:
    """A source for one thread alone, so that threads neither share state nor march in step."""
    return random.Random(chance.getrandbits(64))
