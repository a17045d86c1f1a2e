"""What operators watch: the backlog as metrics, and the alerts that are shipped."""

import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from assigner import glance
from schema import moves
from tests.pool import Pool

RULES = Path(__file__).parent.parent / "ops" / "prometheus" / "leasehold.rules.yml"


def metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"leasehold_{name}", labels)


def test_sa_36_upkeep_tells_how_much_waits_for_how_long_and_what_nobody_can_run(pool: Pool) -> None:
    bot = pool.bot(capacity=1)
    pool.submit(3)
    pool.submit(2, properties={"gpu": ["h100"]})
    pool.submit(1, terms={"locks": ["door"]})
    (parked,) = pool.submit()
    pool.database.run(lambda connection: moves.park(connection, [parked], instances=None, reason="", actor="test"))
    pool.assigner().run_once()
    assert len(bot.take()) == 1
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '2 h' WHERE state = 'queued'")
    pool.upkeep().run_once()
    told = {state: metric("jobs", state=state) for state in ("queued", "running", "parked", "leased", "deferred")}
    assert told == {"queued": 5, "running": 1, "parked": 1, "leased": 0, "deferred": 0}
    assert metric("jobs_unmatchable") == 2
    assert metric("oldest_wait_seconds") == pytest.approx(7200, abs=60)


def test_sa_36_an_idle_pool_has_no_backlog(pool: Pool) -> None:
    found = pool.database.run(glance.backlog)
    assert (set(found.jobs.values()), found.oldest, found.unmatchable) == ({0}, 0, 0)


def test_sa_36_va_20_the_alerts_ask_for_metrics_that_there_are_and_say_what_to_do() -> None:
    rules = RULES.read_text()
    asked = set(re.findall(r"\b(leasehold_\w+)\b", rules))
    known = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    known |= {family.name for family in REGISTRY.collect()}
    known |= {f"{family.name}_total" for family in REGISTRY.collect() if family.type == "counter"}
    assert asked <= known
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert {"LeaseholdBacklogGrows", "LeaseholdJobsWaitLong", "LeaseholdWorkIsConcentrated"} <= set(alerts)
    assert len(alerts) == len(re.findall(r"\n +action: ", rules)) == len(re.findall(r"\n +summary: ", rules))
