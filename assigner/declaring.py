"""What the configuration says of cohorts, queues, success, instances and their shares, made so in the database."""

from collections.abc import Sequence
from functools import partial

import structlog
from sqlalchemy import Connection

from assigner.installation import PoolSettings
from schema import accounts, cohorts, declarations, instances, openings, queue_limits, rates, success
from schema.accounts import PoolLimits
from schema.engine import Database
from schema.errors import Conflict
from schema.instances import InstanceSettings

#: Who did it, in the audit.
ACTOR = "config"
REASON = "configuration"

log = structlog.get_logger()


def declare(database: Database, settings: PoolSettings) -> None:
    """Make it so; what is so already is not written. Cohorts, queues, success, rates and windows are a transaction
    each, and so is each instance: one that cannot change its pool now is logged and left until the next start or
    reload. Operators cannot change by command what is declared here."""
    database.run(lambda connection: cohorts.declare(connection, settings.cohorts, actor=ACTOR))
    database.run(lambda connection: queue_limits.declare(connection, settings.queues, actor=ACTOR))
    database.run(lambda connection: success.declare(connection, settings.success, actor=ACTOR))
    database.run(lambda connection: rates.declare(connection, settings.rates, actor=ACTOR))
    database.run(lambda connection: openings.declare(connection, settings.windows, actor=ACTOR))
    for each in database.run(lambda connection: instances.different(connection, settings.instances)):
        try:
            database.run(partial(instances.put_instance, name=each.name, pool=each.pool, actor=ACTOR, reason=REASON))
        except Conflict as error:
            log.error("an instance cannot be as configured now", instance=each.name, error=str(error))
    given = settings.fair_share.model_dump(include=set(PoolLimits.model_fields), exclude_none=True)
    database.run(lambda connection: _note(connection, settings.instances, limits=list(given)))
    shares = {each.name: each for each in settings.instances if each.given}
    if shares:
        database.run(lambda connection: accounts.declare(connection, shares, actor=ACTOR, reason=REASON))
    if given:
        limits = PoolLimits.model_validate(given)
        database.run(lambda connection: accounts.limit_pool(connection, limits, actor=ACTOR, reason=REASON))


def _note(connection: Connection, named: Sequence[InstanceSettings], *, limits: Sequence[str]) -> None:
    """Remember which instances, shares, locks and limits of all are declared."""
    declarations.replace(connection, "instance", (each.name for each in named))
    declarations.replace(connection, "account", (each.name for each in named if each.given))
    declarations.replace(connection, "lock", (f"{each.name}/{lock}" for each in named for lock in each.locks))
    declarations.replace(connection, "pool-limit", limits)
