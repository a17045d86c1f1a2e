"""Quotas: counted where leases begin and end, never granted above the limit, whoever grants."""

import pytest

from assigner.quotas import QuotaSettings
from schema import ledger
from tests.pool import Pool, completed
from tests.tenancy import EAGER, Tenancy, assign, contested


def test_bg_14_usage_counts_the_units_of_live_leases(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=10)
    pool.submit(2, instance="team-a", units=3)
    bot = pool.bot(capacity=10)
    pool.assigner().run_once()
    assert tenancy.usage("team-a") == 6
    first, second = bot.take()
    bot.sync(completed(first), completed(second, "failed"))
    assert tenancy.usage("team-a") == 0


def test_bg_22_an_instance_never_gets_more_than_its_maximum(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=3)
    pool.submit(8, instance="team-a", priority=-5)
    pool.submit(2, instance="team-b")
    pool.bot(capacity=10)
    for _ in range(4):
        pool.assigner().run_once()
    assert tenancy.usage("team-a") == 3
    assert tenancy.running() == {"team-a": 3, "team-b": 2}, "those behind it are not held up"


def test_a_33_an_instance_without_a_quota_is_unlimited_and_not_counted(pool: Pool, tenancy: Tenancy) -> None:
    pool.submit(4, instance="team-a")
    pool.bot(capacity=10)
    pool.assigner().run_once()
    assert tenancy.running() == {"team-a": 4}


def test_bg_21_each_eviction_takes_one_off_the_maximum_down_to_the_minimum(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=4, maximum=10)
    for _ in range(7):
        tenancy.evicted("team-a")
    assert tenancy.effective_maximum("team-a") == 4
    pool.submit(10, instance="team-a")
    pool.bot(capacity=10)
    for _ in range(3):
        pool.assigner().run_once()
    assert tenancy.usage("team-a") == 4


def test_evictions_older_than_the_cooldown_do_not_count(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=10)
    tenancy.evicted("team-a", age=700)
    tenancy.evicted("team-a", age=500)
    assert tenancy.effective_maximum("team-a") == 9


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
def test_bg_15_instances_below_their_minimum_come_first(pool: Pool, tenancy: Tenancy, kind: str) -> None:
    """With both assigners: what is given now need not be evicted for later."""
    tenancy.quota("team-a", minimum=1, maximum=5)
    tenancy.quota("team-b", maximum=5)
    pool.submit(3, instance="team-b", priority=-100)
    pool.submit(3, instance="team-a", priority=100)
    pool.bot(capacity=1)
    (tenancy.cohort_assigner() if kind == "cohort" else pool.assigner()).run_once()
    assert tenancy.running() == {"team-a": 1}


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
def test_bg_18_a_24_assigners_of_both_kinds_preempt(pool: Pool, tenancy: Tenancy, kind: str) -> None:
    contested(pool, tenancy)
    assigner = tenancy.cohort_assigner(0, EAGER) if kind == "cohort" else tenancy.assigner(EAGER)
    assigner.run_once()
    assert tenancy.asked() == 1


def test_bg_20_a_victim_keeps_its_age_is_not_charged_and_can_be_told_why(pool: Pool, tenancy: Tenancy) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    queued_at = pool.job(victim).queued_at
    assign(pool)
    assert (tenancy.usage("team-b"), tenancy.usage("team-a")) == (1, 0), "until it has stopped"
    bot.sync(completed(work, "stopped"))
    assert (tenancy.usage("team-b"), tenancy.usage("team-a")) == (0, 1)
    row = pool.job(victim)
    assert (row.state, row.queued_at, row.attempts, row.evictions) == ("queued", queued_at, 0, 1)
    assert pool.history(victim)[-2:] == ["preempted", "evict"]
    eviction = pool.row("SELECT * FROM evictions")
    assert (eviction.job_id, eviction.preemptor) == (row.id, pool.job(wanting).id)
    receipts = pool.rows("SELECT details FROM job_events WHERE move IN ('preempt', 'preempted')")
    assert [receipt.details for receipt in receipts] == [eviction.details] * 2
    assert eviction.details["victims"][0]["job"] == victim


def test_bg_16_a_job_of_an_instance_below_its_minimum_evicts_after_the_delay(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=1, maximum=5)
    pool.submit(2, instance="team-b", priority=10)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    held = bot.take()
    (job,) = pool.submit(instance="team-a")
    quotas = QuotaSettings(preemption_delay=20)
    tenancy.assigner(quotas).run_once()
    assert tenancy.asked() == 0, "it has not waited for long enough"
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '21 s' WHERE public_id = CAST(:id AS uuid)", id=job)
    tenancy.assigner(quotas).run_once()
    tenancy.assigner(quotas).run_once()
    assert tenancy.asked() == 1, "one is enough"
    answer = bot.sync(*[{"job": w["job"], "fence": w["fence"], "state": "active"} for w in held])
    (stopped,) = [work for work in answer["leases"] if work["state"] == "cancelling"]
    (kept,) = [work for work in answer["leases"] if work["state"] == "active"]
    answer = bot.sync(completed(stopped, "stopped"), {"job": kept["job"], "fence": kept["fence"], "state": "active"})
    assert {work["job"] for work in answer["leases"]} == {kept["job"], job}, "the room was kept for it"
    victim = pool.job(stopped["job"])
    assert (victim.state, victim.attempts, victim.evictions) == ("queued", 0, 1)
    assert pool.history(stopped["job"])[-2:] == ["preempted", "evict"]
    assert "preempt" in pool.history(job)


def test_reconcile_repairs_a_counter_and_tells(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=5)
    pool.change("UPDATE quotas SET usage = 3")
    (drift,) = pool.database.run(ledger.reconcile)
    assert (drift.cohort, drift.instance, drift.usage, drift.live) == ("default", "team-a", 3, 0)
    assert tenancy.usage("team-a") == 0
    assert pool.database.run(ledger.reconcile) == []
