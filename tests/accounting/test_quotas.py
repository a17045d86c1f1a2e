"""Quotas: counted where leases begin and end, never granted above the limit, and what metrics say of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from leasehold.errors import NotReady
from prometheus_client import REGISTRY, generate_latest
from structlog.testing import capture_logs

from assigner import metrics
from assigner.preemption.plan import QuotaSettings
from schema.accounting import accounts
from schema.accounting import quotas as quotas_accounting
from schema.accounting.accounts import Account
from schema.accounting.quota_uses import QuotaUse, QuotaUses, quota_uses
from schema.accounting.quotas import Cooldown, QuotaDrift
from schema.postgres.statements import Statement
from schema.tenancy import cohorts, instances
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, Undecided, outcome
from tests.support.tenancy import EAGER, LITERAL, Tenancy, contested


def test_an_instance_never_gets_more_than_its_maximum_and_without_one_any_number(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=3)
    pool.submit(8, instance="team-a", priority=-5)
    pool.submit(4, instance="team-b")
    pool.bot(capacity=10)
    for _ in range(4):
        pool.assigner().run_once()
    assert tenancy.usage("team-a") == 3
    assert tenancy.running() == {"team-a": 3, "team-b": 4}, "those behind it are not held up"


def test_each_eviction_takes_one_off_the_maximum_down_to_the_minimum(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=4, maximum=10)
    tenancy.evicted("team-a", age=700)
    tenancy.evicted("team-a", age=500)
    assert tenancy.effective_maximum("team-a") == 9, "those within the cooldown count"
    for _ in range(6):
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


@pytest.mark.parametrize("others", OTHERS)
def test_evictions_lower_a_maximum_only_while_another_instance_wants_what_is_left(
    pool: Pool, tenancy: Tenancy, others: str
) -> None:
    act, expected = OTHERS[others]
    tenancy.quota("team-a", minimum=1, maximum=6)
    for _ in range(4):
        tenancy.evicted("team-a")
    act(tenancy)
    pool.submit(6, instance="team-a", priority=-5)
    bot = pool.bot(capacity=6)
    with pool.database.connect() as connection:
        fetching = Undecided(pool, connection)
        replace(bot, sync_service=fetching.sync_service(to_capacity=True)).sync()
        # A bot fetches jobs only of an instance that may use all of it.
        assert Tenancy(fetching).usage("team-a") == (6 if expected == 6 else 0)
        connection.rollback()
    pool.assigner().run_once()
    assert tenancy.usage("team-a") == expected


@pytest.mark.parametrize("kind", ["priority-age", "cohort"])
def test_assigners_of_both_kinds_preempt(pool: Pool, tenancy: Tenancy, kind: str) -> None:
    contested(pool, tenancy)
    assigner = tenancy.cohort_assigner(0, EAGER) if kind == "cohort" else tenancy.assigner(EAGER)
    assigner.run_once()
    assert tenancy.stop_requests() == 1


def test_a_job_of_an_instance_below_its_minimum_evicts_after_the_delay(pool: Pool, tenancy: Tenancy) -> None:
    """The victim keeps its age, is not charged, and can be told why."""
    tenancy.quota("team-a", minimum=1, maximum=5)
    tenancy.quota("team-b", maximum=3)
    queued_at = {
        pool.job(each).public_id: pool.job(each).queued_at for each in pool.submit(2, instance="team-b", priority=10)
    }
    bot = pool.bot(capacity=2)
    held = pool.given(bot)
    (job,) = pool.submit(instance="team-a")
    assigner = tenancy.assigner(QuotaSettings(preemption_delay=20))
    assigner.run_once()
    assert tenancy.stop_requests() == 0, "it has not waited for long enough"
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '21 s' WHERE public_id = CAST(:id AS uuid)", id=job)
    assigner.run_once()
    assigner.run_once()
    assert tenancy.stop_requests() == 1, "one is enough"
    answer = bot.sync(*map(active, held))
    (stopped,) = [work for work in answer["leases"] if work["state"] == "cancelling"]
    (kept,) = [work for work in answer["leases"] if work["state"] == "active"]
    assert (tenancy.usage("team-b"), tenancy.usage("team-a")) == (2, 0), "until it has stopped"
    bot.sync(completed(stopped, "stopped"), active(kept))
    assigner.run_once()
    answer = bot.sync(active(kept))
    assert {work["job"] for work in answer["leases"]} == {kept["job"], job}, "the room was kept for it"
    assert (tenancy.usage("team-b"), tenancy.usage("team-a")) == (1, 1)
    row = pool.job(stopped["job"])
    assert (row.state, row.queued_at, row.attempts, row.evictions) == ("queued", queued_at[row.public_id], 0, 1)
    assert pool.history(stopped["job"])[-2:] == ["preempted", "evict"]
    eviction = pool.row("SELECT * FROM evictions")
    assert (eviction.job_id, eviction.preemptor) == (row.id, pool.job(job).id)
    receipts = pool.rows("SELECT details FROM job_events WHERE move IN ('preempt', 'preempted')")
    assert [receipt.details for receipt in receipts] == [eviction.details] * 2
    assert eviction.details["victims"][0]["job"] == stopped["job"]


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


# What metrics say of quotas: the figures of each pair of cohort and instance, their bound, and a read that fails.


def read(pool: Pool, *, most: int = 100, cooldown: float = 600.0) -> QuotaUses:
    return pool.database.run(
        lambda connection: quota_uses(connection, most=most, cooldown=Cooldown(cooldown, literal=True))
    )


def uses(pool: Pool) -> dict[str, QuotaUse]:
    return {use.instance: use for use in read(pool).pairs}


@pytest.fixture
def exposed(pool: Pool) -> Iterator[Pool]:
    """The pool's figures are in the metrics of this process."""
    metrics.QUOTAS.read_from(lambda: read(pool))
    yield pool
    metrics.QUOTAS.read_from(None)


def figure(name: str, instance: str = "team-a", cohort: str = "default") -> float | None:
    return REGISTRY.get_sample_value(f"leasehold_quota_{name}", {"cohort": cohort, "instance": instance})


def test_the_figures_of_a_pair_are_all_of_one_moment(pool: Pool, tenancy: Tenancy) -> None:
    assert read(pool) == QuotaUses([], 0)
    tenancy.quota("team-a", minimum=10, maximum=20)
    tenancy.quota("team-b", minimum=1, maximum=9)
    tenancy.evicted("team-a")
    tenancy.evicted("team-a", age=700)
    pool.submit(2, instance="team-a")
    pool.submit(3, instance="team-b")
    pool.bot(capacity=6)
    pool.assigner().run_once()
    assert read(pool).pairs == [
        QuotaUse("default", "team-a", 10, 20, 2, 19, free=1, lent=2, uncounted=0, evictions=1, unmet=0),
        QuotaUse("default", "team-b", 1, 9, 3, 9, free=1, lent=0, uncounted=0, evictions=0, unmet=0),
    ]
    first, second = read(pool).pairs
    assert (first.opportunistic, first.capacity_gap) == (0, 10 - 2 - 1 - 2)
    assert (second.opportunistic, second.capacity_gap) == (2, 0)


def test_a_pair_counts_in_its_own_cohort_only(pool: Pool, tenancy: Tenancy) -> None:
    pool.database.run(lambda c: cohorts.put_cohort(c, "gpus", labels=["gpu"], actor="test", reason=""))
    tenancy.quota("team-a", minimum=4)
    tenancy.quota("team-a", minimum=4, cohort="gpus")
    pool.bot("plain", capacity=3)
    pool.bot("gpu", capacity=1, labels=["gpu"])
    found = {use.cohort: use for use in read(pool).pairs}
    assert {cohort: (use.free, use.capacity_gap, use.max_quota) for cohort, use in found.items()} == {
        "default": (3, 1, None),
        "gpus": (1, 3, None),
    }


def test_free_units_are_those_that_the_instance_could_have(pool: Pool, tenancy: Tenancy) -> None:
    """Of bots that serve it; those kept for it included, and no bot that takes no work."""
    pool.database.run(lambda c: instances.put_instance(c, "team-b", pool="builds", actor="test", reason=""))
    for name in ("team-a", "team-b", "team-c"):
        tenancy.quota(name, minimum=50)
    pool.bot("everybody", capacity=10)
    pool.bot("own", capacity=100, instance="team-a")
    pool.bot("pooled", capacity=1000, pool="builds")
    for name in ("draining", "unhealthy", "gone"):
        pool.bot(name, capacity=7)
    pool.change("UPDATE bots SET draining = true WHERE name = 'draining'")
    pool.change("UPDATE bots SET status = 'unhealthy' WHERE name = 'unhealthy'")
    pool.change("UPDATE bots SET status = 'gone', session = NULL, expires_at = NULL WHERE name = 'gone'")
    assert {name: use.free for name, use in uses(pool).items()} == {"team-a": 110, "team-b": 1010, "team-c": 10}
    pool.change(
        "UPDATE bots SET kept_units = 4, kept_until = now() + interval '1 h',"
        " kept_for = (SELECT id FROM instances WHERE name = 'team-c') WHERE name = 'everybody'"
    )
    assert {name: use.free for name, use in uses(pool).items()} == {"team-a": 106, "team-b": 1006, "team-c": 10}


def test_what_instances_without_a_quota_use_can_be_reclaimed_too(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=3)
    tenancy.quota("team-b", minimum=1)
    pool.submit(instance="team-b")
    pool.submit(2, instance="team-c")
    pool.bot(capacity=3)
    pool.assigner().run_once()
    (first, _) = read(pool).pairs
    assert (first.lent, first.uncounted, first.capacity_gap) == (0, 2, 1)


def test_a_minimum_is_not_met_once_a_job_that_needs_only_room_has_waited_for_a_minute(
    pool: Pool, tenancy: Tenancy
) -> None:
    def unmet() -> int:
        return uses(pool)["team-a"].unmet

    tenancy.quota("team-a", minimum=3)
    assert unmet() == 0, "none waits"
    pool.submit(instance="team-a", priority=-5)
    pool.submit(instance="team-a", units=2)
    assert unmet() == 0, "they have come just now"
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '61 s' WHERE units = 2")
    assert unmet() == 3
    pool.change("UPDATE instances SET draining = true WHERE name = 'team-a'")
    assert unmet() == 0, "its instance starts no jobs"
    pool.change("UPDATE instances SET draining = false")
    pool.change("UPDATE queues SET schedule_after = now() + interval '1 min', looks = 1 WHERE units = 2")
    assert unmet() == 0, "no bot offers what it requires"
    pool.change("UPDATE queues SET schedule_after = NULL, looks = 0")
    pool.bot(capacity=3)
    assert unmet() == 0, "there is room"


def test_a_job_of_a_share_may_need_only_room_and_one_with_a_lock_may_not(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=3)
    pool.database.run(lambda c: accounts.put_account(c, "team-a", Account(weight=1), actor="test"))
    pool.submit(instance="team-a", terms={"locks": ["tree"]})
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '61 s'")
    assert uses(pool)["team-a"].unmet == 0
    pool.submit(instance="team-a")
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '61 s'")
    assert uses(pool)["team-a"].unmet == 3


def test_pairs_beyond_the_bound_are_counted_and_a_new_one_displaces_none(exposed: Pool, tenancy: Tenancy) -> None:
    for name in ("team-z", "team-b", "team-a"):
        tenancy.quota(name, minimum=2)
    exposed.submit(3, instance="team-a")
    exposed.bot(capacity=5)
    exposed.assigner().run_once()
    found = read(exposed, most=2)
    assert ([use.instance for use in found.pairs], found.left_out) == (["team-z", "team-b"], 1)
    assert found.pairs[0].reclaimable == 1, "those that are left out count nevertheless"
    assert read(exposed, most=0) == QuotaUses([], 3)
    assert read(exposed).left_out == 0
    metrics.QUOTAS.read_from(lambda: found)
    assert REGISTRY.get_sample_value("leasehold_quota_pairs_left_out") == 1
    assert figure("usage_units") is None


def test_a_scrape_reads_what_is_so_now(exposed: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=3, maximum=8)
    tenancy.quota("team-b")
    tenancy.evicted("team-a")
    exposed.submit(4, instance="team-a")
    exposed.bot(capacity=5)
    assert (figure("usage_units"), figure("free_units")) == (0, 5)
    exposed.assigner().run_once()
    names = ("usage", "min", "max", "effective_max", "free", "opportunistic", "capacity_gap")
    assert {name: figure(f"{name}_units") for name in names} == {
        "usage": 4, "min": 3, "max": 8, "effective_max": 7, "free": 1, "opportunistic": 1, "capacity_gap": 0,
    }  # fmt: skip
    assert figure("recent_evictions") == 1
    assert (figure("max_units", "team-b"), figure("effective_max_units", "team-b")) == (None, None), "there is none"
    assert figure("usage_units", "team-b") == 0


def test_a_read_that_fails_is_counted_and_the_scrape_has_the_other_metrics() -> None:
    def fail() -> QuotaUses:
        raise NotReady("the database cannot be reached")

    before = REGISTRY.get_sample_value("leasehold_quota_reads_failed_total") or 0.0
    metrics.QUOTAS.read_from(fail)
    try:
        page = generate_latest(REGISTRY).decode()
    finally:
        metrics.QUOTAS.read_from(None)
    assert "leasehold_assigner_cycles_total" in page
    assert "leasehold_quota_usage_units{" not in page
    assert REGISTRY.get_sample_value("leasehold_quota_reads_failed_total") == before + 1
