"""A stored value that was valid once and is not any more stops nothing but what belongs to it.

Another host has other time zones, and another version other rules for names, fields and payloads. Such values are
stored beside sound rows. Then every loop goes on, every list of operators can be read, and `db doctor` names the row.
"""

from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from pydantic import TypeAdapter

from assigner.admission.rules import RULES
from assigner.maintenance.schedules import Schedules
from assigner.operator_resources.declaration import Page
from assigner.operator_resources.registry import RESOURCES
from assigner.placement.registry import StrategySettings
from assigner.queries.demand import Scale, demand
from schema.accounting.quotas import EVICTION_COOLDOWN
from schema.diagnostics.checks import Verdict
from schema.diagnostics.doctor import run_checks
from schema.policy import schedule_changes
from schema.policy.schedule_changes import Author
from schema.policy.schedules import ScheduleTerms
from schema.requests import JobRequest
from tests.support.explain import explained
from tests.support.pool import Pool, completed, states, submitted
from tests.support.servers import Served


def poisoned(hour: int, terms: str) -> str:
    """Store these terms for the jobs that prefer that hour."""
    return f"UPDATE constraint_sets SET terms = '{terms}' WHERE terms->'preferred_hours' = '[{hour}]'"


#: What stores a poisoned value, and how `db doctor` names it; None = nothing is wrong with the pool.
POISONS: list[tuple[str, str | None]] = [
    ("UPDATE schedules SET zone = 'Mars/Phobos' WHERE name = 'zone'", "default/zone"),
    ("UPDATE schedules SET cron = '0 0 99 * *' WHERE name = 'cron'", "default/cron"),
    ("""UPDATE schedules SET request = '{"command": ["true"], "gone": 1}' WHERE name = 'field'""", "default/field"),
    ("UPDATE schedules SET request = '7' WHERE name = 'no-job'", "default/no-job"),
    ("UPDATE windows SET zone = 'Mars/Phobos' WHERE name = 'night'", "window 'night'"),
    ("UPDATE windows SET types = '{No Name}' WHERE name = 'noon'", "window 'noon'"),
    ("""UPDATE platforms SET properties = '["os"]' WHERE properties = '{"os": ["plan9"]}'""", "requirement set"),
    ("""UPDATE kinds SET properties = '{"os": 7}' WHERE properties = '{"os": ["vms"]}'""", "kind of bots"),
    (poisoned(1, '{"preferred_hours": [1], "preferred_zone": "Mars/Phobos"}'), "Mars/Phobos"),
    (poisoned(2, '{"locks": 7, "preferred_hours": "x"}'), "constraint set"),
    (poisoned(3, '{"locks": 7}'), "constraint set"),
    (poisoned(4, '{"resources": [1]}'), "constraint set"),
    (poisoned(5, '{"resources": {"cpu_milli": "x"}}'), "constraint set"),
    ("DELETE FROM job_classes WHERE name = 'random'", None),
    (r"INSERT INTO ceilings (label, max_timeout) VALUES (E'a\tb', 60)", None),
    (r"INSERT INTO submit_rules (commands) VALUES (ARRAY['true', ''])", "submit rule"),
    ("UPDATE job_metadata SET value = 'no context' WHERE key = 'traceparent'", None),
    ("""UPDATE job_payloads SET payload = '{"command": 7}' WHERE job_id = 1""", None),
    ("UPDATE job_payloads SET payload = '[]' WHERE job_id = 2", None),
]


def prepared(pool: Pool) -> None:
    """Jobs with constraints of several kinds, schedules and windows."""
    traced = {"metadata": {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}}
    pool.submit(**JobRequest(command=["true"], priority=-5, **traced).normal())
    pool.submit(properties={"os": ["plan9"]})
    pool.bot("vms", properties={"os": ["vms"]})
    hours = [{"preferred_hours": [hour]} for hour in range(1, 6)]
    for terms in ({"job_class": "random"}, {"locks": ["tree"]}, *hours):
        pool.submit(terms=terms)
    terms = ScheduleTerms("* * * * *", "UTC", "skip", 10, 86400.0, "allow", True, {"command": ["true"]})
    for name in ("zone", "cron", "field", "no-job", "sound"):
        pool.database.run(
            lambda c, name=name: schedule_changes.put_schedule(c, "default", name, terms, author=Author("test"))
        )
    pool.change("UPDATE schedules SET next_tick = now() - interval '2 min', due_at = now() - interval '2 min'")
    pool.change(
        "INSERT INTO windows (name, starts, ends, zone, types, match, meter_max_age)"
        " SELECT name, 0, 24, 'UTC', '{all}', 'exact', 60 FROM unnest(ARRAY['night', 'noon']) name"
    )


def failures(duty: str) -> float | None:
    return REGISTRY.get_sample_value("leasehold_upkeep_duty_failures", {"duty": duty})


def lists(pool: Pool) -> dict[str, Any]:
    """What every list of operators answers."""
    found = {}
    for resource in RESOURCES:
        rows = pool.database.run(lambda c, resource=resource: list(resource.rows(c, Page("", 100, EVICTION_COOLDOWN))))
        found[resource.name] = TypeAdapter(list[resource.row]).validate_python(rows, from_attributes=True)  # type: ignore[name-defined]
    return found


def test_values_that_are_not_valid_any_more_stop_nothing_else(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schema.diagnostics.stored_values.NAMED", len(POISONS))
    prepared(pool)
    for statement, _ in POISONS:
        pool.change(statement)
    waiting = pool.database.run(lambda c: demand(c, Scale(), rules=RULES))
    assert sum(each.queued for each in waiting.demand) == 9
    (plain,), (locked,) = pool.submit(), pool.submit(terms={"locks": ["other"]})
    bot = pool.bot(capacity=20)
    for kind in ("fragmentation", "capacity", "capacity"):
        pool.assigner(strategy=StrategySettings(kind=kind)).run_once()
    started = bot.take()
    assert {plain, locked} <= {work["job"] for work in started}, "jobs that have nothing to do with it start"
    bot.sync(*(completed(work) for work in started))
    for job in pool.rows("SELECT public_id FROM jobs"):
        explained(pool, str(job.public_id))
    pool.change("UPDATE schedules SET due_at = next_tick")
    for _ in range(3):
        Schedules(pool.database).run_once()
    assert pool.row("SELECT last_job FROM schedules WHERE name = 'sound'").last_job is not None
    upkeep = pool.upkeep()
    upkeep.run_once()
    assert {duty.name: failures(duty.name) for duty in upkeep.duties if failures(duty.name) != 0} == {}
    assert set(lists(pool)) == {resource.name for resource in RESOURCES}
    grave = [check for check in run_checks(pool.database) if check.name in ("schedules", "stored values")]
    assert all(check.verdict in (Verdict.OK, Verdict.WARNING) for check in grave)
    said = "; ".join(check.found for check in grave)
    assert [told for _, told in POISONS if told is not None and told not in said] == []
    assert said.count("constraint set") >= 4, said


#: Columns of seconds, whose conditions infinity and NaN fulfil.
ENDLESS = (
    *("preference_waits.seconds", "graph_nodes.queue_timeout_seconds", "graph_nodes.delay"),
    "job_classes.seconds_high",
)


@pytest.mark.parametrize("endless", ["Infinity", "NaN", "1e308"])
def test_seconds_without_an_end_stop_neither_jobs_nor_ends_nor_duties(pool: Pool, endless: str) -> None:
    graph = submitted(pool, {1: [], 2: [1], 3: [1]})
    pool.submit(**JobRequest(command=["true"], job_class="background").normal())
    preferring = JobRequest(command=["true"], preferred_properties={"gpu": ["a100"]}, prefer_seconds=60)
    pool.submit(**preferring.normal())
    (plain,) = pool.submit()
    pool.change("UPDATE preference_waits SET until = now()")
    for each in ENDLESS:
        table, _, column = each.partition(".")
        pool.change(f"UPDATE {table} SET {column} = '{endless}'")
    pool.change("UPDATE job_constraints SET watch_at = now()")
    bot = pool.bot(capacity=9)
    started = pool.given(bot)
    assert {plain, graph.jobs[1]} <= {work["job"] for work in started}
    bot.sync(*(completed(work) for work in started))
    assert states(pool, graph) == {1: "succeeded", 2: "queued", 3: "queued"}, "their delay has no end"
    upkeep = pool.upkeep()
    upkeep.run_once()
    assert {duty.name: failures(duty.name) for duty in upkeep.duties if failures(duty.name) != 0} == {}
    explained(pool, graph.jobs[2])


#: What another version or a stranger can have written where nothing keeps them from it.
STRANGE = (
    """UPDATE job_payloads SET payload = '{"command": "true", "env": 3}' WHERE job_id = 1""",
    """UPDATE job_payloads SET payload = '{"command": ["a", null, {}]}' WHERE job_id = 2""",
    "UPDATE job_payloads SET payload = '[]' WHERE job_id = 3",
    "UPDATE job_payloads SET origin = '[1]'",
    "UPDATE leases SET decision = '7'",
    """UPDATE instances SET report_ceilings = '7' WHERE name = 'ci'""",
    """UPDATE instances SET report_ceilings = '{"tokens": "x"}' WHERE name = 'web'""",
    "UPDATE gateways SET figures = '[1]', settings = '7'",
    "UPDATE assigners SET serves = '7', settings = '[]'",
    "UPDATE kinds SET properties = '7'",
    """UPDATE platforms SET properties = '["os"]' WHERE properties = '{"os": ["plan9"]}'""",
    "UPDATE constraint_sets SET terms = '7'",
    "UPDATE schedules SET request = '7'",
    "UPDATE audit SET details = '7'",
    "UPDATE stored_events SET details = '7'",
    "UPDATE simulations SET report = '7'",
    "UPDATE policies SET content = '7', changes = '{}'",
    "UPDATE policy_in_force SET origin = '7'",
)


@pytest.mark.breaks_invariants
def test_every_route_answers_beside_values_that_cannot_be_used(
    served: Served, operator: httpx.Client, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of the console and a command of operators reads each of these routes; one row must hide no other."""
    monkeypatch.setattr("schema.diagnostics.stored_values.NAMED", 100)
    prepared(pool)
    for name in ("ci", "web"):
        assert operator.put(f"/v1/instances/{name}", json={}).status_code < 300
    assert operator.put("/v1/report-ceilings/web/tokens", json={"amount": 7}).status_code < 300
    bot = pool.bot("sound", capacity=3)
    pool.given(bot)
    pool.upkeep().run_once()
    for statement in STRANGE:
        pool.change(statement)
    jobs = [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs ORDER BY id")]
    values = {"id": jobs, "bots": ["sound", "vms"], "instances": ["ci", "web", "default"]}
    asked = {
        path.replace("{id}", job).replace("{name}", name)
        for path, methods in served.described()["paths"].items()
        if "get" in methods
        for job in (values["id"] if "/jobs/{id}" in path else [jobs[0]])
        for name in values.get(path.split("/")[2] if path.startswith("/v1/") else "", ["sound"])
    }
    found = {path: operator.get(path, params={"instance": "default"} if "schedules" in path else {}) for path in asked}
    failed = {path: answer.text[:300] for path, answer in found.items() if answer.status_code >= 500}
    assert failed == {}
    assert len(operator.get("/v1/jobs").json()["jobs"]) == len(jobs)
    assert len(operator.get("/v1/bots").json()["bots"]) == 2
    said = {each["name"]: each["found"] for each in operator.get("/v1/doctor").json()["checks"]}["stored values"]
    for told in ("ceilings of reports of ci", "ceilings of reports of web", "which is in force: wrong JSON"):
        assert told in said
    assert operator.put("/v1/report-ceilings/ci/tokens", json={"amount": 7}).status_code == 409, "of the policy"
