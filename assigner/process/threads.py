"""The assigners of one process, each in a thread of its own: a fixed number, or one for each cohort.

The process also records its presence in the table of assigners, and reads there whether an operator drains it.
"""

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from assigner.admission.rules import Rules
from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.cycle.shadow import Shadow
from assigner.loops import Loop
from assigner.placement.decision_sample import DecisionRecorder, stored
from assigner.process.policies import Trial
from assigner.process.shadows import Comparison
from assigner.settings import PoolSettings
from schema import clock
from schema.postgres.engine import Database
from schema.postgres.notify import Signal, SignalGroup, Wakeups
from schema.tenancy import drains, processes
from schema.tenancy.cohorts import Cohort, cohorts
from schema.tenancy.processes import Configuration, Kind

#: Seconds between two runs of an assigner whose process is draining.
DRAINED_INTERVAL = 1.0
#: Seconds between two checks whether the last cycle of a draining process has ended; callers may wait for that.
OBEY_INTERVAL = 0.2


class Presence:
    """The row of one assigner process in the table of assigners. Methods may be called from any thread."""

    def __init__(self, database: Database, name: str, *, interval: float) -> None:
        self._database, self._name, self._interval = database, name, interval
        self._lock = threading.Lock()
        self._draining, self._at_work = False, 0
        self._serves: Sequence[Mapping[str, Any]] | None = None
        self._configuration: Configuration | None = None
        self._written: Configuration | None = None
        #: Samples of the process's decisions, written with its signs of life.
        self.recorder = DecisionRecorder(clock.monotonic)

    def configured(self, configuration: Configuration) -> None:
        """Set what the process says of its configuration, written with the next sign of life if it has changed."""
        with self._lock:
            self._configuration = configuration

    def serves(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Set what each of the process's assigners serves, written with the next sign of life.

        entries: for each assigner the names of its `instances` and `cohorts`, None = all; and once the process works by
            a version, `tries`: whether it decides otherwise where another version is tried.
        """
        with self._lock:
            self._serves = entries

    def begin(self) -> None:
        """Register the process before it places anything. A drain of an earlier process of this name still holds."""
        self._obey(
            self._database.run(
                lambda connection: drains.record_assigner_alive(
                    connection, self._name, starts=True, serves=self._serves
                )
            )
        )

    def run_once(self) -> float:
        """Write a sign of life, and that a drain is complete. Returns the seconds until the next call."""
        idle = self._idle()
        draining = self._database.run(
            lambda connection: drains.record_assigner_alive(connection, self._name, idle=idle, serves=self._serves),
            urgent=True,
        )
        self._obey(draining)
        self._tell()
        return OBEY_INTERVAL if draining and not idle else self._interval

    def end(self) -> None:
        """Record that the process stops."""
        self._database.run(lambda connection: drains.record_assigner_stopped(connection, self._name))

    def guarded(self, run_once: Callable[[], float]) -> Callable[[], float]:
        """Wrap `run_once` so that it does nothing while the process is drained."""

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

    def _tell(self) -> None:
        """Write what operators may want to see: a changed configuration, and a sampled decision."""
        with self._lock:
            configuration = self._configuration
        if configuration is not None and configuration != self._written:
            self._database.run(
                lambda connection: processes.record_configuration(connection, Kind.ASSIGNER, self._name, configuration)
            )
            self._written = configuration
        sample = self.recorder.take()
        if sample is not None:
            self._database.run(lambda connection: processes.record_decision(connection, self._name, **stored(sample)))

    def _obey(self, draining: bool) -> None:
        with self._lock:
            self._draining = draining

    def _idle(self) -> bool:
        with self._lock:
            return self._draining and self._at_work == 0


#: Seconds between two reads of the cohorts.
COHORTS_INTERVAL = 3.0
#: The place of a thread that serves the cohorts in which other settings are tried.
CANARY = "canary"
#: Seconds that the thread of a removed cohort gets to end its cycle before the next read.
STOP_WITHIN = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class ThreadRole:
    """What one thread is for.

    entry: number of its `[[assigners]]` entry.
    place: number of the thread, or `cohort-` and the cohort's name, or CANARY.
    cohort: id of the cohort; None for a thread with a number, and for one that serves the cohorts of a trial.
    """

    entry: int
    place: str
    cohort: int | None = None


@dataclass(frozen=True)
class RunningThread:
    """A running assigner thread."""

    assigner: PriorityAgeAssigner
    loop: Loop
    signal: Signal


class AssignerThreads:
    """Starts and stops the assigner threads of one process. After `stop`, nothing starts again."""

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
        self._threads = [each.threads for each in settings.assigners]
        self._lock = threading.Lock()
        self._held: dict[ThreadRole, RunningThread] = {}
        self._groups: dict[int, SignalGroup] = {}
        self._missing: set[str] = set()
        self._started = self._over = False
        self._policy: int | None = None
        self._trial: Trial | None = None
        self._comparison: Comparison | None = None
        self._filters = [_filters(each) for each in settings.assigners]
        presence.serves(list(self._filters))

    @property
    def follows_cohorts(self) -> bool:
        """True if some threads depend on the cohorts in the database."""
        return "cohort" in self._kinds

    def start(self) -> None:
        """Start the threads that serve no single cohort."""
        with self._lock:
            self._started = True
            self._match_numbered()

    def run_once(self) -> float:
        """Start and stop threads so that each cohort has one. Returns the seconds until the next call."""
        found = self._database.run(cohorts)
        with self._lock:
            if not self._over:
                self._match(found)
        return COHORTS_INTERVAL

    def reconfigure(self, settings: PoolSettings, policy: int | None = None, trial: Trial | None = None) -> None:
        """Use other settings, of this version of the policy, from each thread's next cycle on; in the cohorts of the
        trial those of the trial. The number and the kinds of entries do not change."""
        with self._lock:
            self._settings, self._policy, self._trial = settings, policy, trial
            for role, held in self._held.items():
                if (entry := self._entry(role.entry, self._of_role(role))) is not None:
                    held.assigner.reconfigure(
                        entry,
                        self._of_role(role).quotas,
                        rules_from(self._of_role(role)),
                        policy=policy,
                        cohorts=self._cohorts_of(role),
                    )
                    held.loop.on_error_delay = entry.interval
                    held.loop.wake()  # the wake-up of the change has come before it was read
            if self._started and not self._over:
                self._match_numbered()
            for number in range(len(self._kinds)):
                if (entry := self._entry(number)) is not None:
                    self._filters[number] = _filters(entry)
            self._presence.serves([{**each, "tries": self._tries(nth)} for nth, each in enumerate(self._filters)])

    def tend(self) -> None:
        """Start threads for which `reconfigure` has waited in vain, because the one before was in a cycle."""
        with self._lock:
            if self._started and not self._over:
                self._match_numbered(within=0.0)

    def compare(self, comparison: Comparison | None) -> None:
        """Let each thread compare its decisions from its next cycle on; None = no more."""
        with self._lock:
            self._comparison = comparison
            for role, held in self._held.items():
                held.assigner.shadow_by(self._shadow(role.entry))

    def _shadow(self, entry: int) -> Shadow | None:
        compared = self._comparison
        if compared is None or (decider := compared.decider(entry)) is None:
            return None
        chance, processor = seeded(self._chance), clock.thread_processor
        return Shadow(decider, share=compared.share, tally=compared.tally, chance=chance, processor=processor)

    def stop(self, deadline: float) -> None:
        """Let every thread end its cycle, at most until `deadline`, in seconds on the monotonic clock."""
        with self._lock:
            self._over = True
            for role in list(self._held):
                self._stop_thread(role, max(0.0, deadline - clock.monotonic()))
            while self._groups:
                self._groups.popitem()[1].close()

    def _entry(self, entry: int, settings: PoolSettings | None = None) -> AssignerSettings | None:
        """Return the entry's current settings, or None if it is gone or now of another kind."""
        entries = (settings or self._settings).assigners
        if entry >= min(len(entries), len(self._kinds)):
            return None
        found = entries[entry]
        return found if found.kind == self._kinds[entry] else None

    def _tries(self, entry: int) -> bool:
        """Return whether an entry decides otherwise in the cohorts of a trial.

        It does not if the version has no entry of its name, or has it as it is.
        """
        if self._trial is None:
            return False
        now, tried = self._settings, self._trial.settings
        same = self._entry(entry) == self._entry(entry, tried) and now.quotas == tried.quotas
        return not (same and rules_from(now) == rules_from(tried))

    def _is_tried(self, role: ThreadRole) -> bool:
        """Whether the thread serves cohorts in which other settings are tried."""
        trial = self._trial
        return trial is not None and (role.place == CANARY if role.cohort is None else role.cohort in trial.cohorts)

    def _of_role(self, role: ThreadRole) -> PoolSettings:
        return self._trial.settings if self._trial is not None and self._is_tried(role) else self._settings

    def _cohorts_of(self, role: ThreadRole) -> Sequence[int] | None:
        if role.cohort is not None:
            return (role.cohort,)
        if self._trial is None:
            return None
        return self._trial.cohorts if role.place == CANARY else self._trial.others

    def _match_numbered(self, within: float = STOP_WITHIN) -> None:
        """Start the threads that serve no single cohort; for a trial one more of each entry, which ends with it.

        One that was to stop and is still in a cycle has no successor until that has ended.
        """
        places = [[str(number) for number in range(threads)] for threads in self._threads]
        wanted = {
            ThreadRole(entry, place)
            for entry, kind in enumerate(self._kinds)
            if kind != "cohort"
            for place in [*places[entry], *([] if self._trial is None else [CANARY])]
        }
        numbered = {role: held for role, held in self._held.items() if role.cohort is None}
        for role, held in numbered.items():
            if held.loop.stopping or role not in wanted:
                self._stop_thread(role, within)
        for role in sorted(wanted - self._held.keys(), key=lambda role: (role.entry, role.place)):
            self._start_thread(role)

    def _match(self, found: Sequence[Cohort]) -> None:
        wanted = {role for entry, kind in enumerate(self._kinds) if kind == "cohort" for role in self._of(entry, found)}
        for role in [role for role in self._held if role.cohort is not None and role not in wanted]:
            self._stop_thread(role, STOP_WITHIN)
        names = {(role.entry, role.place) for role in self._held}
        for role in wanted - self._held.keys():
            # A cohort that was removed and made again waits until the thread of the old one has ended.
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
        settings = self._of_role(role)
        entry = self._entry(role.entry, settings) or settings.assigners[role.entry]
        assigner = PriorityAgeAssigner(
            self._database,
            entry,
            timing=settings.timing,
            chance=seeded(self._chance),
            name=f"{self._name}/{role.entry}.{role.place}",
            now=clock.monotonic,
            quotas=settings.quotas,
            cohorts=self._cohorts_of(role),
            rules=rules_from(settings),
            recorder=self._presence.recorder,
            policy=self._policy,
        )
        assigner.shadow_by(self._shadow(role.entry))
        signal = self._signal(role)
        loop = Loop(
            f"assigner-{role.entry}-{role.place}",
            self._presence.guarded(assigner.run_once),
            chance=seeded(self._chance),
            signal=signal,
            idle=lambda: self._wakeups.idle("jobs"),
            on_error_delay=entry.interval,
        )
        self._held[role] = RunningThread(assigner, loop, signal)
        loop.start()
        if role.cohort is not None:
            log.info("a cohort has an assigner", assigner=assigner.name)

    def _signal(self, role: ThreadRole) -> Signal:
        """Return the signal of a thread. A wake-up wakes one of an entry's threads, that of a trial, and that of each
        cohort: those that serve other jobs cannot stand in for it."""
        if role.cohort is not None or role.place == CANARY:
            return self._wakeups.signal("jobs")
        if role.entry not in self._groups:
            self._groups[role.entry] = self._wakeups.group("jobs")
        return self._groups[role.entry].signal()

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
    """Return the configured rules of admission."""
    return Rules(settings.ordering, settings.checkers, settings.fair_share)


def seeded(chance: random.Random) -> random.Random:
    """Return a source of chance for one thread, so that threads neither share state nor act in step."""
    return random.Random(chance.getrandbits(64))
