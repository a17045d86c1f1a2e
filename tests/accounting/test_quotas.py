"""Quotas: counted where leases begin and end, never granted above the limit, whoever grants."""

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.preemption.plan import QuotaSettings
from schema.accounting import quotas as quotas_accounting
from schema.accounting.quotas import QuotaDrift
from schema.postgres.statements import Statement
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, outcome
from tests.support.tenancy import EAGER, LITERAL, Tenancy, assign, contested


def test_usage_counts_the_units_of_live_leases(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=10)
    pool.submit(2, instance="team-a", units=3)
    bot = pool.bot(capacity=10)
    pool.assigner().run_once()
    assert tenancy.usage("team-a") == 6
    first, second = bot.take()
    bot.sync(completed(first), completed(second, "failed"))
    assert tenancy.usage("team-a") == 0


def test_an_instance_never_gets_more_than_its_maximum(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=3)
    pool.submit(8, instance="team-a", priority=-5)
    pool.submit(2, instance="team-b")
    pool.bot(capacity=10)
    for _ in range(4):
        pool.assigner().run_once()
    assert tenancy.usage("team-a") == 3
    assert tenancy.running() == {"team-a": 3, "team-b": 2}, "those behind it are not held up"


def test_an_instance_without_a_quota_is_unlimited_and_not_counted(pool: Pool, tenancy: Tenancy) -> None:
    pool.submit(4, instance="team-a")
    pool.bot(capacity=10)
    pool.assigner().run_once()
    assert tenancy.running() == {"team-a": 4}


def test_each_eviction_takes_one_off_the_maximum_down_to_the_minimum(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=4, maximum=10)
    for _ in range(7):
        tenancy.evicted("team-a")
    assert tenancy.effective_maximum("team-a") == 4
    pool.submit(10, instance="team-a")
    pool.bot(capacity=10)
    for _ in range(3):
        tenancy.assigner(LITERAL).run_once()
    assert tenancy.usage("team-a") == 4


def waits(tenancy: Tenancy, **fields: Any) -> None:
    tenancy.pool.submit(instance="team-b", priority=5, **fields)


# What else is there → the units that an instance uses whose evictions take its maximum of 6 down to 2.
OTHERS: dict[str, tuple[Callable[[Tenancy], object], int]] = {
    "nobody waits": (lambda _: None, 6),
    "a job waits": (waits, 2),
    "a constrained job waits": (lambda tenancy: waits(tenancy, terms={"owner": "ann"}), 2),
    "a job waits below its own maximum": (lambda tenancy: (tenancy.quota("team-b", maximum=1), waits(tenancy)), 2),
    "a job waits at its own maximum": (lambda tenancy: (tenancy.quota("team-b", maximum=0), waits(tenancy)), 6),
    "a job waits at its own lowered maximum": (
        lambda tenancy: (tenancy.quota("team-b", maximum=1), waits(tenancy), tenancy.evicted("team-b")),
        6,
    ),
    "a job waits that is too large": (
        lambda tenancy: (tenancy.quota("team-b", maximum=1), waits(tenancy, units=2)),
        6,
    ),
    "a job waits for a bot that is not there": (
        lambda tenancy: (waits(tenancy, properties={"gpu": "yes"}), tenancy.pool.assigner().run_once()),
        6,
    ),
    "a job of a drained instance waits": (
        lambda tenancy: (waits(tenancy), tenancy.pool.change("UPDATE instances SET draining = name = 'team-b'")),
        6,
    ),
}


@pytest.mark.parametrize("fetched", [False, True], ids=["assigned", "fetched"])
@pytest.mark.parametrize("others", OTHERS)
def test_evictions_lower_a_maximum_only_while_another_instance_wants_what_is_left(
    pool: Pool, tenancy: Tenancy, others: str, fetched: bool
) -> None:
    act, expected = OTHERS[others]
    tenancy.quota("team-a", minimum=1, maximum=6)
    for _ in range(4):
        tenancy.evicted("team-a")
    act(tenancy)
    pool.submit(6, instance="team-a", priority=-5)
    bot = pool.bot(capacity=6, sync_service=pool.sync_service(to_capacity=True))
    if fetched:
        bot.sync()
    else:
        pool.assigner().run_once()
    # A bot fetches jobs only of an instance that may use all of it.
    assert tenancy.usage("team-a") == (expected if expected == 6 or not fetched else 0)


def test_evictions_older_than_the_cooldown_do_not_count(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=10)
    tenancy.evicted("team-a", age=700)
    tenancy.evicted("team-a", age=500)
    assert tenancy.effective_maximum("team-a") == 9


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
def test_instances_below_their_minimum_come_first(pool: Pool, tenancy: Tenancy, kind: str) -> None:
    """With both assigners: what is given now need not be evicted for later."""
    tenancy.quota("team-a", minimum=1, maximum=5)
    tenancy.quota("team-b", maximum=5)
    pool.submit(3, instance="team-b", priority=-100)
    pool.submit(3, instance="team-a", priority=100)
    pool.bot(capacity=1)
    (tenancy.cohort_assigner() if kind == "cohort" else pool.assigner()).run_once()
    assert tenancy.running() == {"team-a": 1}


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
def test_assigners_of_both_kinds_preempt(pool: Pool, tenancy: Tenancy, kind: str) -> None:
    contested(pool, tenancy)
    assigner = tenancy.cohort_assigner(0, EAGER) if kind == "cohort" else tenancy.assigner(EAGER)
    assigner.run_once()
    assert tenancy.stop_requests() == 1


def test_a_victim_keeps_its_age_is_not_charged_and_can_be_told_why(pool: Pool, tenancy: Tenancy) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    queued_at = pool.job(victim).queued_at
    assign(pool)
    assert (tenancy.usage("team-b"), tenancy.usage("team-a")) == (1, 0), "until it has stopped"
    bot.sync(completed(work, "stopped"))
    assign(pool)
    assert (tenancy.usage("team-b"), tenancy.usage("team-a")) == (0, 1)
    row = pool.job(victim)
    assert (row.state, row.queued_at, row.attempts, row.evictions) == ("queued", queued_at, 0, 1)
    assert pool.history(victim)[-2:] == ["preempted", "evict"]
    eviction = pool.row("SELECT * FROM evictions")
    assert (eviction.job_id, eviction.preemptor) == (row.id, pool.job(wanting).id)
    receipts = pool.rows("SELECT details FROM job_events WHERE move IN ('preempt', 'preempted')")
    assert [receipt.details for receipt in receipts] == [eviction.details] * 2
    assert eviction.details["victims"][0]["job"] == victim


def test_a_job_of_an_instance_below_its_minimum_evicts_after_the_delay(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=1, maximum=5)
    pool.submit(2, instance="team-b", priority=10)
    bot = pool.bot(capacity=2)
    held = pool.given(bot)
    (job,) = pool.submit(instance="team-a")
    quotas = QuotaSettings(preemption_delay=20)
    tenancy.assigner(quotas).run_once()
    assert tenancy.stop_requests() == 0, "it has not waited for long enough"
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '21 s' WHERE public_id = CAST(:id AS uuid)", id=job)
    tenancy.assigner(quotas).run_once()
    tenancy.assigner(quotas).run_once()
    assert tenancy.stop_requests() == 1, "one is enough"
    answer = bot.sync(*[{"job": w["job"], "fence": w["fence"], "state": "active"} for w in held])
    (stopped,) = [work for work in answer["leases"] if work["state"] == "cancelling"]
    (kept,) = [work for work in answer["leases"] if work["state"] == "active"]
    bot.sync(completed(stopped, "stopped"), active(kept))
    tenancy.assigner(quotas).run_once()
    answer = bot.sync(active(kept))
    assert {work["job"] for work in answer["leases"]} == {kept["job"], job}, "the room was kept for it"
    victim = pool.job(stopped["job"])
    assert (victim.state, victim.attempts, victim.evictions) == ("queued", 0, 1)
    assert pool.history(stopped["job"])[-2:] == ["preempted", "evict"]
    assert "preempt" in pool.history(job)


def test_reconcile_repairs_a_counter_and_tells(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=5)
    pool.change("UPDATE quotas SET usage = 3")
    (drift,) = pool.database.run(quotas_accounting.reconcile_quotas)
    assert (drift.cohort, drift.instance, drift.usage, drift.live) == ("default", "team-a", 3, 0)
    assert tenancy.usage("team-a") == 0
    assert pool.database.run(quotas_accounting.reconcile_quotas) == []


# Reconciling the quotas' counters: a drift is found, repaired, counted and reported, and nothing else is.


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
        found = race.unhindered(lambda: pool.database.run(quotas_accounting.reconcile_quotas), by=ahead)
    assert found == [QuotaDrift("default", "ci", usage=4, live=0)]


def test_a_drift_that_is_gone_once_nobody_writes_leases_is_none(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("default", maximum=5)
    pool.running()
    pool.change(WRONG)
    with race.first() as ahead:
        ahead.connection.execute(Statement("LOCK TABLE leases IN ROW EXCLUSIVE MODE"))
        ahead.change("UPDATE quotas SET usage = usage - 2")
        found = race.second(lambda: pool.database.run(quotas_accounting.reconcile_quotas), behind=ahead)
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
        assert len(quotas_accounting.reconcile_quotas(ahead.connection)) == 1
        granted = race.second(pool.assigner().run_once, behind=ahead)
        ahead.commit()
        outcome(granted)
    assert tenancy.usage("default") == 2
    assert pool.database.run(quotas_accounting.reconcile_quotas) == []
