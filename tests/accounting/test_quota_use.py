"""What metrics say of quotas: the figures of each pair of cohort and instance, their bound, and a read that fails."""

from collections.abc import Iterator

import pytest
from leasehold.errors import NotReady
from prometheus_client import REGISTRY, generate_latest

from assigner import metrics
from schema.accounting import quotas
from schema.accounting.quotas import Cooldown, QuotaUse, QuotaUses
from schema.tenancy import cohorts, instances
from tests.support.pool import Pool, completed
from tests.support.tenancy import Tenancy, assign, contested


def read(pool: Pool, *, most: int = 100, cooldown: float = 600.0) -> QuotaUses:
    return pool.database.run(
        lambda connection: quotas.quota_uses(connection, most=most, cooldown=Cooldown(cooldown, literal=True))
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
    tenancy.quota("team-a", minimum=10, maximum=20)
    tenancy.quota("team-b", minimum=1, maximum=9)
    tenancy.evicted("team-a")
    tenancy.evicted("team-a", age=700)
    pool.submit(2, instance="team-a")
    pool.submit(3, instance="team-b")
    pool.bot(capacity=6)
    pool.assigner().run_once()
    assert read(pool).pairs == [
        QuotaUse("default", "team-a", 10, 20, 2, 19, free=1, reclaimable=2, evictions=1),
        QuotaUse("default", "team-b", 1, 9, 3, 9, free=1, reclaimable=0, evictions=0),
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


def test_an_eviction_counts_for_the_instance_that_lost_a_job(pool: Pool, tenancy: Tenancy) -> None:
    _, _, bot, work = contested(pool, tenancy)
    assign(pool)
    assert uses(pool)["team-b"].evictions == 0, "the job has only been asked to stop"
    bot.sync(completed(work, "stopped"))
    assert {name: use.evictions for name, use in uses(pool).items()} == {"team-a": 0, "team-b": 1}


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


def test_a_pool_without_quotas_has_no_pairs(pool: Pool) -> None:
    assert read(pool) == QuotaUses([], 0)


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
