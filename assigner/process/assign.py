"""One assigner process: every configured assigner thread, upkeep, and the configuration kept current.

When it starts, and after each reload, the process writes what the configuration declares into the database. What of
it decides makes a version of the policy, if the file has changed. Each second it looks which version is in force.
"""

import random
import re

import structlog
from leasehold.errors import BadInput, Conflict

from assigner import metrics
from assigner.config.loading import Reloader, changed_keys, masked
from assigner.explain.forecast import foresee
from assigner.loops import Loop
from assigner.maintenance import schedule_forms
from assigner.maintenance.meters import MeterPoller
from assigner.maintenance.retention import Retention
from assigner.maintenance.schedules import Schedules
from assigner.maintenance.upkeep import Upkeep
from assigner.maintenance.webhooks import Webhooks
from assigner.operator_resources import canaries
from assigner.process import policies
from assigner.process.policies import ACTOR, LOOK_EVERY, InForce
from assigner.process.shadows import Shadowing
from assigner.process.threads import AssignerThreads, Presence, rules_from, seeded
from assigner.settings import PoolSettings
from schema import clock
from schema.accounting import forecasts
from schema.accounting.forecasts import Stored
from schema.accounting.quota_uses import QuotaUses, quota_uses
from schema.diagnostics.tracing import AttemptTracer
from schema.policy import new_instances, schedules
from schema.policy.schedule_changes import owner_in_words
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.notify import Wakeups
from schema.tenancy.processes import Configuration

log = structlog.get_logger()


def declare(database: Database, settings: PoolSettings) -> None:
    """Write what the configuration declares into the database, and put its policy into force.

    Operators cannot change by command what is declared here.
    """
    database.run(lambda connection: policies.declare(connection, settings))
    declare_others(database, settings)


def declare_others(database: Database, settings: PoolSettings) -> None:
    """Write what is declared and is no part of the policy; what is stored already is not written again."""
    database.run(lambda connection: new_instances.declare(connection, settings.tenancy, actor=ACTOR))
    _declare_schedules(database, settings)


def _declare_schedules(database: Database, settings: PoolSettings) -> None:
    """Write the schedules. What somebody else has set stays, is logged and tried again at the next start or reload."""
    try:
        refused = database.run(lambda c: schedule_forms.declare(c, settings.schedules, actor=ACTOR))
    except (Conflict, BadInput) as error:
        log.error("the schedules cannot be as configured now", error=str(error))
        return
    for each in refused:
        log.error(
            "a schedule is not as configured, because it has another owner: remove it, or name yours otherwise",
            instance=each.instance,
            schedule=each.name,
            owner=owner_in_words(each.owner),
        )


#: Sections that an assigner process tells to operators. Others declare what can be listed, or may hold secrets.
TOLD = (
    "assigners", "timing", "quotas", "tenancy", "fair_share", "ordering", "upkeep", "success", "estimates",
    "service_levels",
)  # fmt: skip


#: Which settings processes read at their start alone. The number and the kinds of assigners and threads are fixed.
NEED_RESTART = {
    "assigners": re.compile(r"(database|timing|tracing|log)\b|assigners$|assigners\[\d+\]\.(kind|threads)$"),
    "gateways": re.compile(r"(database|timing|tracing|log|gateway|estimates|service_levels)\b"),
    "bots": re.compile(r"(bot|log)\b"),
}

#: Thresholds of Python's garbage collector. A cycle makes short-lived objects for each of hundreds of jobs; with
#: Python's default of 700 new objects between two collections, they would cause many collections that free nothing.
GARBAGE = (50_000, 10, 10)
#: Seconds that a loop gets at shutdown to end its transaction; more than the statement timeout would not help.
STOP_WITHIN = 10.0


def foreseen(connection: Connection, job: int, settings: PoolSettings) -> Stored | None:
    """Foresee the start of a job as the gates are configured; None if it does not wait any more."""
    if not forecasts.still_waits(connection, job):
        return None
    rules = rules_from(settings)
    return foresee(connection, job, cooldown=settings.quotas.of_evictions, rules=rules).stored


class AssignerProcess:
    """The loops of one assigner process. `start` and `stop` may be called once each; `reload` after a SIGHUP."""

    def __init__(
        self, database: Database, reloader: Reloader[PoolSettings], *, name: str, chance: random.Random
    ) -> None:
        settings = reloader.current
        self._database, self._reloader, self._name = database, reloader, name
        self._file, self._policy = settings, InForce(settings)
        self._wakeups = Wakeups(database, chance=seeded(chance))
        self._presence = Presence(database, name, interval=settings.timing.reap)
        self._webhooks = Webhooks(database, settings.webhooks, chance=seeded(chance))
        self._tracer = AttemptTracer.to_collector(settings.tracing)
        self._upkeep = Upkeep(
            database,
            settings.upkeep,
            timing=settings.timing,
            name=name,
            now=clock.monotonic,
            fair=settings.fair_share,
            webhooks=self._webhooks,
            tracer=self._tracer,
            foresee=lambda connection, job: foreseen(connection, job, self._policy.settings),
        )
        self._retention = Retention(database, settings.upkeep, now=clock.monotonic)
        self._polling = MeterPoller(database, settings.meters)
        self._schedules = Schedules(
            database, level=settings.service_levels.default, estimate=settings.estimates.estimate
        )
        self._schedules_signal = self._wakeups.signal(schedules.TOPIC)
        self._assigner_threads = AssignerThreads(
            database, settings, name=name, wakeups=self._wakeups, presence=self._presence, chance=seeded(chance)
        )
        self._shadowing = Shadowing(database, name)
        self._config_loop = Loop("config", self._look_at_configuration, chance=seeded(chance))
        self._loops = [
            self._config_loop,
            Loop("presence", self._presence.run_once, chance=seeded(chance)),
            Loop("upkeep", self._upkeep.run_once, chance=seeded(chance)),
            Loop("retention", self._retention.run_once, chance=seeded(chance)),
            Loop("meters", self._polling.run_once, chance=seeded(chance)),
            Loop("canary", self._watch_canary, chance=seeded(chance)),
            Loop("webhooks", self._webhooks.run_once, chance=seeded(chance)),
            Loop(
                "schedules",
                self._schedules.run_once,
                chance=seeded(chance),
                signal=self._schedules_signal,
                idle=lambda: self._wakeups.idle(schedules.TOPIC),
            ),
        ]
        self._cohort_loop: Loop | None = None
        if self._assigner_threads.follows_cohorts:
            self._cohort_loop = Loop("cohorts", self._assigner_threads.run_once, chance=seeded(chance))
            self._loops.insert(0, self._cohort_loop)

    def start(self) -> None:
        self._put_file(self._file, before=None)
        self._follow_policy()
        self._tell_configuration()
        self._presence.begin()
        self._wakeups.start()
        self._assigner_threads.start()
        for loop in self._loops:
            loop.start()
        metrics.QUOTAS.read_from(self._quota_uses)

    def reload(self) -> None:
        """Read the configuration again at once."""
        self._reloader.request()
        self._config_loop.wake()

    def stop(self) -> None:
        """Let every loop end its current run, then return. The transaction of a killed loop would be rolled back."""
        metrics.QUOTAS.read_from(None)
        deadline = clock.monotonic() + STOP_WITHIN
        self._assigner_threads.stop(deadline)
        for loop in self._loops:
            loop.stop(max(0.0, deadline - clock.monotonic()))
        self._schedules_signal.close()
        self._wakeups.stop()
        self._presence.end()
        if self._tracer is not None:
            self._tracer.close()
        self._shadowing.run_once(last=True)

    def _quota_uses(self) -> QuotaUses:
        """Read what metrics say of quotas. It is not repeated after an error, because a scrape has a deadline."""
        settings = self._policy.settings.quotas
        return self._database.run(
            lambda connection: quota_uses(connection, most=settings.metric_pairs, cooldown=settings.of_evictions),
            repeat=False,
        )

    def _look_at_configuration(self) -> float:
        error = self._reloader.error
        delay = self._reloader.run_once()
        before, file = self._file, self._reloader.current
        try:
            if file is not before:
                self._put_file(file, before=policies.file_digest(before))
                self._warn_of_restarts(before, file)
                # Set last: if it fails above, the next look tries again.
                self._file = file
        finally:  # a file that cannot be written keeps nobody from following the version in force
            has_followed = self._follow_policy()
            if has_followed or self._reloader.error != error:
                self._tell_configuration()
        self._assigner_threads.tend()
        self._shadowing.run_once()
        return min(delay, LOOK_EVERY)

    def _put_file(self, file: PoolSettings, *, before: bytes | None) -> None:
        """Put the file into force, unless that has been done since it was changed; write what it declares besides."""
        self._database.run(lambda c: policies.put_file(c, file, process=self._name, before=before))
        declare_others(self._database, file)

    def _follow_policy(self) -> bool:
        """Work by the version in force, if it or the file is another one now; return whether that was so."""
        known = self._policy if self._policy.file is self._file else None
        found = self._database.run(lambda connection: policies.look(connection, self._file, known))
        if found is self._policy:
            return False
        for name in set(found.absent) - set(self._policy.absent):
            log.info("an entry is as the file says: the policy in force has none of its name", entry=name)
        self._reconfigure(found)
        is_other, comparison = self._shadowing.follow(found)
        if is_other:
            self._assigner_threads.compare(comparison)
        self._policy = found
        return True

    def _tell_configuration(self) -> None:
        policy = self._policy
        shown = masked(policy.settings)
        told = {section: shown[section] for section in TOLD}
        error = self._reloader.error or policy.error
        digest = policies.file_digest(self._file)
        self._presence.configured(Configuration(self._reloader.file, told, error, policy.version, digest))

    def _reconfigure(self, policy: InForce) -> None:
        now = policy.settings
        metrics.POLICY.set(policy.version or 0)
        self._assigner_threads.reconfigure(now, policy.version, policy.trial)
        if self._cohort_loop is not None:
            self._cohort_loop.wake()
        self._upkeep.reconfigure(now.upkeep, now.fair_share)
        self._retention.reconfigure(now.upkeep)
        self._polling.reconfigure(now.meters)
        self._webhooks.reconfigure(now.webhooks)
        self._schedules.reconfigure(level=now.service_levels.default, estimate=now.estimates.estimate)

    def _watch_canary(self) -> float:
        """Look at a trial of a version, if there is one and it is time."""
        canaries.watch(self._database)
        return canaries.LOOK_EVERY

    def _warn_of_restarts(self, before: PoolSettings, now: PoolSettings) -> None:
        changed = changed_keys(before, now)
        for processes, read_at_start in NEED_RESTART.items():
            if found := [key for key in changed if read_at_start.match(key)]:
                log.warning("changed keys need a restart", of=processes, keys=", ".join(found))
