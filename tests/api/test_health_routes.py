"""The operators' routes on the health of a pool: alerts, checks, invariants, gateways, the audit."""

import httpx
import pytest

from schema import audit
from schema.diagnostics import invariants
from schema.postgres.statements import Statement
from schema.tenancy import processes
from tests.support.pool import Pool
from tests.support.servers import Served


def test_alerts_say_what_is_wrong_and_what_to_do(pool: Pool, operator: httpx.Client) -> None:
    pool.upkeep().run_once()
    assert operator.get("/v1/alerts").json()["alerts"] == []


def test_the_most_severe_alert_comes_first_and_names_the_remedy(pool: Pool, operator: httpx.Client) -> None:
    pool.submit()
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 hours'")
    found = operator.get("/v1/alerts").json()["alerts"]
    assert [(each["name"], each["severity"]) for each in found] == [
        ("LeaseholdUpkeepStands", "critical"),
        ("LeaseholdJobsWaitLong", "warning"),
        ("LeaseholdJobsThatNobodyCanRun", "warning"),
    ]
    assert found[1]["summary"] == "A job has been queued for 2 h."
    assert "leasehold explain JOB" in found[1]["action"]


def test_alerts_are_read_once_for_all_who_ask_within_seconds(pool: Pool, operator: httpx.Client) -> None:
    first = operator.get("/v1/alerts").json()
    pool.submit()
    pool.change("UPDATE jobs SET queued_at = now() - interval '2 hours'")
    assert operator.get("/v1/alerts").json() == first


def test_the_doctor_says_over_http_what_the_command_says(operator: httpx.Client) -> None:
    checks = operator.get("/v1/doctor").json()["checks"]
    assert {"schema", "wake-ups", "indexes", "autovacuum", "durability"} <= {each["name"] for each in checks}
    assert next(each["verdict"] for each in checks if each["name"] == "schema") == "ok"


@pytest.mark.breaks_invariants
def test_invariants_are_checked_and_what_breaks_one_is_named(pool: Pool, operator: httpx.Client) -> None:
    def broken() -> list[tuple[str, int]]:
        answer = operator.get("/v1/invariants?seconds=60").json()
        assert answer["finished"]
        assert len(answer["invariants"]) == len(invariants.INVARIANTS)
        return [(each["id"], each["rows"]) for each in answer["invariants"] if each["rows"]]

    pool.bot("bot-1")
    assert broken() == []
    pool.change("UPDATE bots SET in_use = 1")
    assert broken() == [("S3", 1)]


def test_a_check_of_invariants_that_takes_too_long_says_that_nothing_is_known(
    pool: Pool, operator: httpx.Client
) -> None:
    with pool.database.connect() as other:
        other.execute(Statement("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"))
        answers = [operator.get(f"/v1/invariants?seconds={seconds}").json() for seconds in (0.2, 0.0001)]
        other.rollback()
    assert [(each["finished"], each["invariants"]) for each in answers] == [(False, [])] * 2
    assert operator.get("/v1/invariants?seconds=61").status_code == 422


def test_gateways_come_in_pages_and_a_silent_one_is_dead(pool: Pool, operator: httpx.Client) -> None:
    for name in ("g1", "g2", "g3"):
        pool.database.run(
            lambda c, n=name: processes.record_gateway_alive(c, n, url=f"http://{n}", figures={"queue": 1.0})
        )
    pool.change("UPDATE gateways SET seen_at = now() - interval '2 minutes' WHERE name = 'g2'")
    pool.database.run(lambda c: processes.record_gateway_stopped(c, "g3"))
    page = operator.get("/v1/gateways?limit=2").json()["gateways"]
    assert [(each["name"], each["state"], each["figures"]) for each in page] == [
        ("g1", "running", {"queue": 1.0}), ("g2", "dead", {"queue": 1.0})
    ]  # fmt: skip
    (last,) = operator.get("/v1/gateways?after=g2").json()["gateways"]
    assert (last["name"], last["state"]) == ("g3", "stopped")
    pool.change("UPDATE gateways SET seen_at = now() - interval '25 hours' WHERE name = 'g2'")
    pool.upkeep().run_once()
    assert [each["name"] for each in operator.get("/v1/gateways").json()["gateways"]] == ["g1", "g3"]


def test_the_audit_comes_in_pages_newest_first(pool: Pool, operator: httpx.Client, served: Served) -> None:
    for number in range(5):
        pool.database.run(
            lambda c, n=number: audit.write(c, "limit.set", actor="op", subject=f"s{n}", details={"n": n})
        )
    page = operator.get("/v1/audit?limit=3").json()["audit"]
    assert [each["subject"] for each in page] == ["s4", "s3", "s2"]
    assert (page[0]["actor"], page[0]["action"], page[0]["details"]) == ("op", "limit.set", {"n": 4})
    rest = operator.get(f"/v1/audit?limit=3&before={page[-1]['id']}").json()["audit"]
    assert [each["subject"] for each in rest][:2] == ["s1", "s0"]
    assert operator.get("/v1/audit?before=x").headers["content-type"] == "application/problem+json"
    assert operator.get("/v1/audit?limit=1001").status_code == 422
