"""Reconciling the quotas' counters: a drift is found, repaired, counted and reported, and nothing else is."""

from prometheus_client import REGISTRY
from sqlalchemy import text
from structlog.testing import capture_logs

from schema import ledger
from schema.ledger import Drift
from tests.pool import Pool
from tests.racing import Race, outcome
from tests.tenancy import Tenancy

WRONG = "UPDATE quotas SET usage = usage + 2"


def test_a_drift_is_repaired_counted_and_reported_by_upkeep(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("default", maximum=5)
    pool.running()
    before = REGISTRY.get_sample_value("leasehold_quota_drift_total") or 0
    upkeep = pool.upkeep()
    with capture_logs() as logs:
        upkeep.run_once()
    assert [entry for entry in logs if entry["log_level"] == "error"] == []

    pool.change(WRONG)
    with capture_logs() as logs:
        upkeep.run_once()
        pool.upkeep().run_once()

    assert tenancy.usage("default") == 1
    (entry,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert (entry["cohort"], entry["instance"], entry["usage"], entry["live"]) == ("default", "default", 3, 1)
    assert REGISTRY.get_sample_value("leasehold_quota_drift_total") == before + 1


def test_counters_that_are_right_are_not_touched_by_the_repair_of_another(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    tenancy.quota("default", maximum=5)
    tenancy.quota("ci", maximum=5)
    pool.change("UPDATE quotas SET usage = 4 WHERE instance = (SELECT id FROM instances WHERE name = 'ci')")
    with race.first() as ahead:
        ahead.change("SELECT FROM quotas q JOIN instances i ON i.id = q.instance"
                     " WHERE i.name = 'default' FOR NO KEY UPDATE OF q")  # fmt: skip
        found = race.unhindered(lambda: pool.database.run(ledger.reconcile), by=ahead)
    assert found == [Drift("default", "ci", usage=4, live=0)]


def test_a_drift_that_is_gone_once_nobody_writes_leases_is_none(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("default", maximum=5)
    pool.running()
    pool.change(WRONG)
    with race.first() as ahead:
        ahead.connection.execute(text("LOCK TABLE leases IN ROW EXCLUSIVE MODE"))
        ahead.change("UPDATE quotas SET usage = usage - 2")
        found = race.second(lambda: pool.database.run(ledger.reconcile), behind=ahead)
        ahead.commit()
        assert outcome(found) == []
    assert tenancy.usage("default") == 1


def test_grants_and_endings_beside_a_repair_are_counted(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("default", maximum=5)
    pool.running()
    pool.submit()
    pool.bot("bot-2")
    pool.change(WRONG)
    with race.first() as ahead:
        assert len(ledger.reconcile(ahead.connection)) == 1
        granted = race.second(pool.assigner().run_once, behind=ahead)
        ahead.commit()
        outcome(granted)
    assert tenancy.usage("default") == 2
    assert pool.database.run(ledger.reconcile) == []
