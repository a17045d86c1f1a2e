"""The installation that a command runs in: data directory, configuration, and the database that they name."""

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psycopg
from leasehold.errors import BadInput, LeaseholdError, NotReady
from leasehold.wire import escaped
from pydantic import BaseModel, Field, field_validator

from assigner.admission.checkers import CheckerSettings
from assigner.admission.ordering import OrderingSettings
from assigner.config import loading
from assigner.config.loading import ConfigModel
from assigner.cycle.settings import AssignerSettings
from assigner.estimation import EstimateSettings
from assigner.logs import LogSettings
from assigner.maintenance.meters import MeterSettings
from assigner.maintenance.schedule_forms import ScheduleSettings
from assigner.maintenance.upkeep import UpkeepSettings
from assigner.maintenance.webhooks import WebhookSettings
from assigner.preemption.plan import QuotaSettings
from schema.accounting.fair_share import FairShareSettings
from schema.accounting.rates import RateSettings
from schema.diagnostics.tracing import TracingSettings
from schema.fleet.success import SuccessSettings
from schema.policy.new_instances import TenancySettings
from schema.policy.priority_classes import ServiceLevelSettings
from schema.policy.queue_limits import QueueSettings
from schema.policy.schedule_changes import MAX_SCHEDULES
from schema.policy.time_windows import WindowSettings
from schema.postgres import embedded, migrate, urls
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.standby import StandbyReads
from schema.tenancy.cohorts import CohortSettings
from schema.tenancy.instances import InstanceSettings
from schema.timing import Timing

#: Seconds that a command waits for an unreachable database; processes of the pool wait longer.
COMMAND_TIMEOUT = 3.0
#: Keys by which an entry of a list of sections is named.
NAMES = ("name", "label", "resource")


class PoolSettings(ConfigModel):
    """The sections that `assigner` reads; `assigner/cli/main.py` adds those of `bots` for the whole file."""

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    timing: Timing = Field(default_factory=Timing)
    assigners: tuple[AssignerSettings, ...] = Field(
        default=(AssignerSettings(minimums_first=True),), min_length=1, max_length=100
    )
    quotas: QuotaSettings = Field(default_factory=QuotaSettings)
    upkeep: UpkeepSettings = Field(default_factory=UpkeepSettings)
    fair_share: FairShareSettings = Field(default_factory=FairShareSettings)
    cohorts: tuple[CohortSettings, ...] = Field(default=(), max_length=1000)
    success: SuccessSettings = Field(default_factory=SuccessSettings)
    tenancy: TenancySettings = Field(default_factory=TenancySettings)
    queues: tuple[QueueSettings, ...] = Field(default=(), max_length=10_000)
    instances: tuple[InstanceSettings, ...] = Field(default=(), max_length=10_000)
    ordering: OrderingSettings = Field(default_factory=OrderingSettings)
    checkers: CheckerSettings = Field(default_factory=CheckerSettings)
    rates: tuple[RateSettings, ...] = Field(default=(), max_length=10_000)
    windows: tuple[WindowSettings, ...] = Field(default=(), max_length=100)
    estimates: EstimateSettings = Field(default_factory=EstimateSettings)
    service_levels: ServiceLevelSettings = Field(default_factory=ServiceLevelSettings)
    meters: tuple[MeterSettings, ...] = Field(default=(), max_length=100)
    webhooks: tuple[WebhookSettings, ...] = Field(default=(), max_length=20)
    schedules: tuple[ScheduleSettings, ...] = Field(default=(), max_length=MAX_SCHEDULES)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    @property
    def job_reach(self) -> str | None:
        """What jobs of this machine's bots can reach, in one line; None where no bots are configured."""
        return None

    @property
    def task_reach(self) -> str | None:
        """The same of tasks, whose processes have one account; None where no bots are configured."""
        return None

    def seen_by_tasks(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of this environment that tasks of this machine's bots see; all where there are none."""
        return environ

    @field_validator("cohorts", "queues", "instances", "rates", "windows", "meters", "webhooks")
    @classmethod
    def _names_are_unique(cls, settings: tuple[BaseModel, ...]) -> tuple[BaseModel, ...]:
        names = [str(next(getattr(each, key) for key in NAMES if hasattr(each, key))) for each in settings]
        repeated = (
            next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        )
        if repeated is not None:
            raise ValueError(f"'{escaped(repeated, 64)}' is declared twice")
        return settings

    @field_validator("schedules")
    @classmethod
    def _schedules_are_unique(cls, settings: tuple[ScheduleSettings, ...]) -> tuple[ScheduleSettings, ...]:
        names = [(each.declared().instance, each.name) for each in settings]
        repeated = next((name for place, (_, name) in enumerate(names) if names[place] in names[:place]), None)
        if repeated is not None:
            raise ValueError(f"'{repeated}' is declared twice in one instance")
        return settings

    @field_validator("database")
    @classmethod
    def _urls_are_postgresql(cls, settings: DatabaseSettings) -> DatabaseSettings:
        if settings.pooler == "transaction" and settings.url.get_secret_value() == "embedded":
            raise ValueError('pooler = "transaction" needs a url that leads to the pooler, not "embedded"')
        named = {"url": settings.url, "listen_url": settings.listen_url, "read_url": settings.read_url}
        for name, value in named.items():
            if value is None or (name == "url" and value.get_secret_value() == "embedded"):
                continue
            mistake = urls.find_mistake(value.get_secret_value())
            if mistake is not None:
                or_embedded = " or 'embedded'" if name == "url" and mistake == urls.NO_URL else ""
                raise ValueError(f"{name} {mistake}{or_embedded}")
        return settings


@dataclass(frozen=True)
class Installation:
    """Where a command runs.

    sections: the model of the whole configuration file.
    at_home: True if the data directory is the default one.
    """

    data: Path
    config: Path | None
    sections: type[PoolSettings]
    environ: Mapping[str, str] = field(repr=False)
    at_home: bool = False

    @cached_property
    def settings(self) -> PoolSettings:
        """The configuration, read on first use. Raises BadInput."""
        return loading.load(self.config, self.sections, self.environ)

    @property
    def is_embedded(self) -> bool:
        """True if the database is a private server in the data directory."""
        return self.settings.database.url.get_secret_value() == "embedded"

    @property
    def described(self) -> str:
        """The database, without its password, and the configuration file, in one line."""
        url = self.settings.database.url.get_secret_value()
        named = f"embedded, in {self.data}" if self.is_embedded else urls.without_password(url)
        return f"database {named}; configuration {'none' if self.config is None else self.config.absolute()}"

    def require_cluster(self) -> None:
        """Raise BadInput if the database is a private server which is not there, and for which nobody has asked."""
        settings = self.settings.database
        is_asked_for = not self.at_home or "url" in settings.model_fields_set
        if not self.is_embedded or is_asked_for or embedded.directory_of(self.data).exists():
            return
        raise BadInput(
            "database.url",
            f"is not set, and no private server is in {self.data}; name the configuration with --config, or the "
            "directory of a server with --data",
        )

    @contextmanager
    def database(self, role: str, *, patience: float | None = None) -> Iterator[Database]:
        """Connect to the configured database, and keep an embedded server running until the context ends.

        patience: seconds to wait for an unreachable database, at most the configured ones.
        """
        settings = self.settings.database
        if patience is not None:
            settings = settings.model_copy(update={"outage_seconds": min(patience, settings.outage_seconds)})
        with ExitStack() as stack:
            url = settings.url.get_secret_value()
            if url == "embedded":
                url = stack.enter_context(embedded.serve(self.data)).url
            database = Database(url, settings, role=f"leasehold-{role}", chance=random.SystemRandom())
            stack.callback(database.close)
            with explaining_errors():
                yield database

    @contextmanager
    def ready_database(self, role: str) -> Iterator[Database]:
        """Connect as `database` does. Raises NotReady if a pooler makes that unsafe, or the schema is not ours."""
        with self.database(role) as database:
            _require_ready(database)
            yield database

    @contextmanager
    def standby_reads(self, role: str, primary: Database) -> Iterator[StandbyReads | None]:
        """Give the reads from the configured standby until the context ends; None if there is none."""
        settings = self.settings.database
        if settings.read_url is None:
            yield None
            return
        url = settings.read_url.get_secret_value()
        standby = Database(url, settings, role=f"leasehold-{role}-read", chance=random.SystemRandom())
        try:
            yield StandbyReads(primary, standby, max_lag=settings.read_max_lag)
        finally:
            standby.close()

    @contextmanager
    def command_database(self, role: str, *, ready: bool = True) -> Iterator[Database]:
        """Connect for a command, which waits a few seconds at most for an unreachable database.

        ready: raise NotReady as `ready_database` does. Raises BadInput for a private server, as `require_cluster` does.
        """
        self.require_cluster()
        with self.database(role, patience=COMMAND_TIMEOUT) as database:
            if ready:
                _require_ready(database)
            yield database


def _require_ready(database: Database) -> None:
    require_safe_way(database)
    migrate.require(database)


def require_safe_way(database: Database) -> None:
    """Raise NotReady if the database is reached through a pooler that the settings do not name."""
    problem = database.find_pooler_problem()
    if problem is not None:
        raise NotReady(f"{problem.found}; {problem.remedy}")


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Turn PostgreSQL's errors into one line each. For operators only: others must not see the server's messages."""
    try:
        yield
    except NotReady as error:
        cause = error.__cause__
        raise NotReady(f"{error}: {first_line(cause)}" if isinstance(cause, psycopg.Error) else str(error)) from cause
    except psycopg.Error as error:
        told = first_line(error)
        if isinstance(error, psycopg.errors.InsufficientPrivilege) and _LACKS_RIGHTS.match(told):
            told += "; the owner of the schema lets a role do this by: leasehold db grant-process ROLE"
        if isinstance(error, psycopg.errors.LockNotAvailable):
            told += "; `leasehold db doctor` names who holds the lock"
        raise LeaseholdError(f"database: {told}") from error


#: What the server says of a role that may not read or write rows; of one that may not change a table it says otherwise.
_LACKS_RIGHTS = re.compile("permission denied for (schema|table|sequence) ")


def first_line(error: BaseException | None) -> str:
    """Return the first line of PostgreSQL's message, without the details, which hold values."""
    lines = str(error).strip().splitlines()
    return escaped(lines[0] if lines else type(error).__name__, 300)
