"""One assigner process: every configured assigner thread, upkeep, and the configuration kept current.

The process writes what the configuration declares (cohorts, queues, success, tenancy, instances and their shares,
rates, windows, schedules) into the database when it starts and after each reload.
"""

import random
import re
from collections.abc import Sequence
from functools import partial

import structlog
from leasehold.errors import BadInput, Conflict

from assigner import metrics
from assigner.config.loading import Reloader, changed_keys, masked
from assigner.loops import Loop
from assigner.maintenance import schedule_forms
from assigner.maintenance.meters import MeterPoller
from assigner.maintenance.retention import Retention
from assigner.maintenance.schedules import Schedules
from assigner.maintenance.upkeep import Upkeep
from assigner.maintenance.webhooks import Webhooks
from assigner.process.threads import AssignerThreads, Presence, seeded
from assigner.settings import PoolSettings
from schema import clock, declarations
from schema.accounting import accounts, quotas, rates
from schema.accounting.accounts import PoolLimits
from schema.accounting.quotas import QuotaUses
from schema.diagnostics.tracing import AttemptTracer
from schema.fleet import success
from schema.policy import new_instances, queue_limits, schedules, time_windows
from schema.policy.schedule_changes import owner_in_words
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.notify import Wakeups
from schema.tenancy import cohorts, instances
from schema.tenancy.instances import InstanceSettings
from schema.tenancy.processes import Configuration

#: Actor and reason of declared changes in the audit.
ACTOR = "config"
REASON = "configuration"

log = structlog.get_logger()


def declare(database: Database, settings: PoolSettings) -> None:
    """Write what the configuration declares into the database; what is stored already is not written again.

    Cohorts, queues, success, tenancy, rates and windows take one transaction each, and so does each instance. An
    instance that cannot change its pool now is logged and tried again at the next start or reload. Operators cannot
    change by command what is declared here.
    """
    database.run(lambda connection: cohorts.declare(connection, settings.cohorts, actor=ACTOR))
    database.run(lambda connection: queue_limits.declare(connection, settings.queues, actor=ACTOR))
    database.run(lambda connection: success.declare(connection, settings.success, actor=ACTOR))
    database.run(lambda connection: new_instances.declare(connection, settings.tenancy, actor=ACTOR))
    database.run(lambda connection: rates.declare(connection, settings.rates, actor=ACTOR))
    database.run(lambda connection: time_windows.declare(connection, settings.windows, actor=ACTOR))
    for each in database.run(lambda connection: instances.changed_instances(connection, settings.instances)):
        try:
            database.run(partial(instances.put_instance, name=each.name, pool=each.pool, actor=ACTOR, reason=REASON))
        except Conflict as error:
            log.error("an instance cannot be as configured now", instance=each.name, error=str(error))
    _declare_schedules(database, settings)
    is_given = settings.fair_share.model_dump(include=set(PoolLimits.model_fields), exclude_none=True)
    database.run(lambda connection: _note(connection, settings.instances, limits=list(is_given)))
    shares = {each.name: each for each in settings.instances if each.is_given}
    if shares:
        database.run(lambda connection: accounts.declare(connection, shares, actor=ACTOR, reason=REASON))
    if is_given:
        limits = PoolLimits.model_validate(is_given)
        database.run(lambda connection: accounts.limit_pool(connection, limits, actor=ACTOR, reason=REASON))


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


def _note(connection: Connection, named: Sequence[InstanceSettings], *, limits: Sequence[str]) -> None:
    """Record which instances, shares, locks and pool limits the configuration declares."""
    declarations.replace(connection, "instance", (each.name for each in named))
    declarations.replace(connection, "account", (each.name for each in named if each.is_given))
    declarations.replace(connection, "lock", (f"{each.name}/{lock}" for each in named for lock in each.locks))
    declarations.replace(connection, "pool-limit", limits)


#: Sections that an assigner process tells to operators. Others declare what can be listed, or may hold secrets.
TOLD = (
    "assigners", "timing", "quotas", "tenancy", "fair_share", "ordering", "upkeep", "success", "estimates",
    "service_levels",
)  # fmt: skip


#: Which settings processes read at their start alone. The number and the kinds of assigners and threads are fixed.
NEED_RESTART = {
    "assigners": re.compile(r"(database|timing|tracing|log)\b|assigners$|assigners\[\d+\]\.(kind|threads)$"),
    "gateways": re.compile(r"(database|timing|tracing|log|gateway|fetch|quotas|ordering|estimates|service_levels)\b"),
    "bots": re.compile(r"(bot|log)\b"),
}

#: Thresholds of Python's garbage collector. A cycle makes short-lived objects for each of hundreds of jobs; with
#: Python's default of 700 new objects between two collections, they would cause many collections that free nothing.
GARBAGE = (50_000, 10, 10)
#: Seconds that a loop gets at shutdown to end its transaction; more than the statement timeout would not help.
STOP_WITHIN = 10.0


class AssignerProcess:
    """The loops of one assigner process. `start` and `stop` may be called once each; `reload` after a SIGHUP."""

    def __init__(
        self, database: Database, reloader: Reloader[PoolSettings], *, name: str, chance: random.Random
    ) -> None:
        settings = reloader.current
        self._database, self._reloader, self._in_force = database, reloader, settings
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
        self._config_loop = Loop("config", self._look_at_configuration, chance=seeded(chance))
        self._loops = [
            self._config_loop,
            Loop("presence", self._presence.run_once, chance=seeded(chance)),
            Loop("upkeep", self._upkeep.run_once, chance=seeded(chance)),
            Loop("retention", self._retention.run_once, chance=seeded(chance)),
            Loop("meters", self._polling.run_once, chance=seeded(chance)),
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
        self._tell_configuration()
        declare(self._database, self._reloader.current)
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

    def _quota_uses(self) -> QuotaUses:
        """Read what metrics say of quotas. It is not repeated after an error, because a scrape has a deadline."""
        settings = self._in_force.quotas
        return self._database.run(
            lambda connection: quotas.quota_uses(
                connection, most=settings.metric_pairs, cooldown=settings.of_evictions
            ),
            repeat=False,
        )

    def _look_at_configuration(self) -> float:
        error = self._reloader.error
        delay = self._reloader.run_once()
        before, now = self._in_force, self._reloader.current
        if now is not before:
            self._reconfigure(before, now)
            # Set last: if the database fails above, the next look tries again.
            self._in_force = now
        if now is not before or self._reloader.error != error:
            self._tell_configuration()
        return delay

    def _tell_configuration(self) -> None:
        shown = masked(self._reloader.current)
        told = {section: shown[section] for section in TOLD}
        self._presence.configured(Configuration(self._reloader.file, told, self._reloader.error))

    def _reconfigure(self, before: PoolSettings, now: PoolSettings) -> None:
        self._assigner_threads.reconfigure(now)
        if self._cohort_loop is not None:
            self._cohort_loop.wake()
        self._upkeep.reconfigure(now.upkeep, now.fair_share)
        self._retention.reconfigure(now.upkeep)
        self._polling.reconfigure(now.meters)
        self._webhooks.reconfigure(now.webhooks)
        self._schedules.reconfigure(level=now.service_levels.default, estimate=now.estimates.estimate)
        changed = changed_keys(before, now)
        for processes, read_at_start in NEED_RESTART.items():
            if found := [key for key in changed if read_at_start.match(key)]:
                log.warning("changed keys need a restart", of=processes, keys=", ".join(found))
        declare(self._database, now)
