"""Tenants of a pool in a test: quotas, cohorts, accounts, evictions, and the units that each tenant uses."""

from typing import Any

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.preemption.plan import QuotaSettings
from schema.accounting import accounts, counters
from schema.accounting import quotas as quotas_accounting
from schema.accounting.accounts import Account
from schema.tenancy import cohorts
from tests.support.pool import Bot, Pool

#: Settings that preempt at once.
EAGER = QuotaSettings(preemption_delay=0)
#: Settings whose evictions lower a maximum also while nobody else waits.
LITERAL = QuotaSettings(cooldown="literal")

# An independent formula of the effective maximum, to compare with that of the product. It only grows with time, so a
# later evaluation is never stricter.
NOTE_GROWTH = """
CREATE TABLE grown_too_far (at timestamptz DEFAULT clock_timestamp(), cohort integer, instance integer, usage integer,
    maximum integer);
CREATE FUNCTION note_growth() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    maximum integer := greatest(NEW.min_quota, NEW.max_quota - (
        SELECT count(*) FROM evictions e WHERE e.cohort = NEW.cohort AND e.instance = NEW.instance
            AND e.at > clock_timestamp() - interval '{cooldown} s'));
BEGIN
    IF NEW.max_quota IS NOT NULL AND NEW.usage > OLD.usage AND NEW.usage > maximum THEN
        INSERT INTO grown_too_far (cohort, instance, usage, maximum)
        VALUES (NEW.cohort, NEW.instance, NEW.usage, maximum);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER note_growth BEFORE UPDATE OF usage ON quotas FOR EACH ROW EXECUTE FUNCTION note_growth()"""


def watch_maxima(pool: Pool, *, cooldown: float = quotas_accounting.EVICTION_COOLDOWN.seconds) -> None:
    """Record, by a trigger, every usage that grows beyond its effective maximum."""
    pool.change(NOTE_GROWTH.replace("{cooldown}", str(cooldown)))


def grown_too_far(pool: Pool) -> list[object]:
    """The rows that the trigger of `watch_maxima` has recorded."""
    return pool.rows("SELECT * FROM grown_too_far")


class Tenancy:
    """Instances and their quotas on the database of one pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def quota(self, instance: str, *, minimum: int = 0, maximum: int | None = None, cohort: str = "default") -> None:
        """Set a quota through the function that operators use."""
        self.pool.database.run(
            lambda connection: quotas_accounting.set_quota(
                connection, cohort, instance, minimum=minimum, maximum=maximum, actor="test"
            )
        )

    def usage(self, instance: str, *, cohort: str = "default") -> int:
        """Units that the instance uses in the cohort, as its quota counts them."""
        found: int = self.pool.row(
            "SELECT q.usage FROM quotas q JOIN instances i ON i.id = q.instance JOIN cohorts c ON c.id = q.cohort"
            " WHERE i.name = :instance AND c.name = :cohort",
            instance=instance,
            cohort=cohort,
        ).usage
        return found

    def effective_maximum(self, instance: str) -> int | None:
        """The maximum quota, less the evictions within the cooldown, also while nobody else waits."""
        found: int | None = self.pool.row(
            f"SELECT {quotas_accounting.EFFECTIVE_MAX} AS maximum FROM quotas q JOIN instances i ON i.id = q.instance"
            " WHERE i.name = :instance",
            instance=instance,
            **quotas_accounting.Cooldown(literal=True).values(),
        ).maximum
        return found

    def running(self) -> dict[str, int]:
        """Instance → units of its live leases."""
        return {
            row.name: row.units
            for row in self.pool.rows(
                "SELECT i.name, sum(l.units) AS units FROM live l JOIN instances i ON i.id = l.instance GROUP BY i.name"
            )
        }

    def evicted(self, instance: str, *, age: float = 0) -> None:
        """Insert an eviction of the instance that happened `age` seconds ago."""
        self.pool.change(
            "INSERT INTO evictions (at, cohort, instance, job_id, fence, bot_id, preemptor, preemptor_instance, rule,"
            " details) SELECT clock_timestamp() - make_interval(secs => :age), 0, id, 1, 1, 1, 2, 2, 'any', '{}'"
            " FROM instances WHERE name = :instance",
            instance=instance,
            age=age,
        )

    def stop_requests(self) -> int:
        """Number of jobs that preemption asked to stop."""
        count: int = self.pool.row("SELECT count(*) AS n FROM job_events WHERE move = 'preempted'").n
        return count

    def evictions(self) -> int:
        """Number of evictions."""
        count: int = self.pool.row("SELECT count(*) AS n FROM evictions").n
        return count

    def assigner(self, quotas: QuotaSettings, **settings: object) -> PriorityAgeAssigner:
        """A priority-age assigner with these quota settings; it serves minimums first."""
        return self.pool.assigner(quotas=quotas, **settings)

    def cohort_assigner(self, cohort: int = 0, quotas: QuotaSettings | None = None) -> PriorityAgeAssigner:
        """A cohort assigner for one cohort."""
        return self.pool.assigner(kind="cohort", cohorts=(cohort,), quotas=quotas)


def contested(pool: Pool, tenancy: Tenancy, **fields: Any) -> tuple[str, str, Bot, dict[str, Any]]:
    """Make a bot that runs a job of team-b, while a job of team-a, which is below its minimum, needs the bot.

    Returns the ids of both jobs, first that of team-b, the bot and its lease.
    """
    tenancy.quota("team-a", minimum=1, maximum=3)
    tenancy.quota("team-b", maximum=3)
    (victim,) = pool.submit(instance="team-b", priority=10, **fields)
    bot = pool.bot(**fields)
    tenancy.assigner(EAGER).run_once()
    (work,) = bot.take()
    (wanting,) = pool.submit(instance="team-a", **fields)
    return victim, wanting, bot, work


def assign(pool: Pool) -> None:
    """Run one cycle of an assigner that preempts at once."""
    Tenancy(pool).assigner(EAGER).run_once()


def share(pool: Pool, name: str, **given: Any) -> None:
    """Give the instance an account, and with it a share of the pool."""
    account = Account.model_validate(given)
    pool.database.run(lambda c: accounts.put_account(c, name, account, actor="test"))


def no_share(pool: Pool, name: str) -> None:
    """Remove the account of the instance."""
    pool.database.run(lambda c: accounts.remove_account(c, name, actor="test"))


def put_cohort(pool: Pool, name: str, *labels: str, position: int | None = None) -> None:
    """Set a cohort as an operator."""
    pool.database.run(lambda c: cohorts.put_cohort(c, name, labels=labels, position=position, actor="test"))


def remove_cohort(pool: Pool, name: str) -> None:
    """Remove a cohort as an operator."""
    pool.database.run(lambda c: cohorts.remove_cohort(c, name, actor="test"))


def cohort_of(pool: Pool, table: str) -> str:
    """The cohort of the only row of this table."""
    return str(pool.row(f"SELECT c.name FROM {table} t JOIN cohorts c ON c.id = t.cohort").name)


def used(pool: Pool, name: str) -> float:
    """How much of the counter is taken."""
    found = pool.database.run(lambda c: counters.read(c, [name]))
    return found[name].used if found else 0.0
