"""Schedules over HTTP and on the command line."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from assigner.maintenance.schedules import Schedules
from schema.diagnostics import checks
from schema.diagnostics.checks import Verdict
from tests.support.http import audited
from tests.support.pool import Pool
from tests.support.servers import Served

NIGHTLY: dict[str, Any] = {"cron": "0 3 * * *", "zone": "Europe/Berlin", "job": {"command": ["make", "nightly"]}}


def test_a_schedule_is_set_shown_listed_disabled_run_and_removed(operator: httpx.Client, pool: Pool) -> None:
    made = operator.put("/v1/schedules/nightly", json=NIGHTLY)
    assert made.status_code == 200, made.text
    assert (made.json()["created"], made.json()["instance"]) == (True, "default")
    again = operator.put("/v1/schedules/nightly", json=NIGHTLY).json()
    assert (again["created"], again["next_tick"]) == (False, made.json()["next_tick"])
    shown = operator.get("/v1/schedules/nightly").json()
    assert (shown["job"], shown["catch_up"], shown["failures"]) == ({"command": ["make", "nightly"]}, "skip", 0)

    off = operator.patch("/v1/schedules/nightly", json={"enabled": False}).json()
    assert (off["enabled"], off["next_tick"]) == (False, None)
    run = operator.post("/v1/schedules/nightly/run", json={"key": "k"}).json()
    assert operator.post("/v1/schedules/nightly/run", json={"key": "k"}).json() == {**run, "created": False}
    job = operator.get(f"/v1/jobs/{run['id']}").json()
    assert (job["state"], job["metadata"]) == ("queued", {"schedule": "nightly"})
    (listed,) = operator.get("/v1/schedules").json()["schedules"]
    assert (listed["last_job"], listed["last_state"], listed["last_tick"]) == (run["id"], "queued", None)
    assert "job" not in listed

    assert operator.delete("/v1/schedules/nightly").status_code == 200
    assert operator.get("/v1/schedules/nightly").status_code == 404
    assert operator.get(f"/v1/jobs/{run['id']}").status_code == 200
    assert [each for each in audited(pool.database) if each.startswith("schedule")] == [
        "schedule.set", "schedule.read", "schedule.disable", "schedule.run", "schedule.run", "schedule.rm"
    ]  # fmt: skip


def test_schedules_are_listed_in_pages_by_instance_and_name(operator: httpx.Client) -> None:
    for instance, name in (("b", "x"), ("a", "y"), ("a", "x")):
        operator.put(f"/v1/schedules/{name}", json=NIGHTLY | {"instance": instance})
    page = operator.get("/v1/schedules", params={"limit": 2}).json()["schedules"]
    rest = operator.get("/v1/schedules", params={"after": "a/y"}).json()["schedules"]
    assert [(each["instance"], each["name"]) for each in page + rest] == [("a", "x"), ("a", "y"), ("b", "x")]
    assert [each["name"] for each in operator.get("/v1/schedules?instance=b").json()["schedules"]] == ["x"]
    assert operator.get("/v1/schedules?after=a").json()["field"] == "after"


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"cron": "0 * * * * *"}, "cron", "'0 * * * * *' has 6 fields, not the five fields minute, hour,"),
        ({"cron": "61 * * * *"}, "cron", "is not a cron expression: bad minute"),
        ({"cron": "0 0 */31 2 MON#5"}, "cron", "has no tick within 50 years"),
        ({"zone": "Europe/Atlantis"}, "zone", "'Europe/Atlantis' is not a time zone"),
        ({"catch_up": "some"}, "catch_up", "'skip', 'all' or 'none'"),
        ({"catch_up_most": 0}, "catch_up_most", "greater than or equal to 1"),
        ({"overlap": True}, "overlap", "'allow' or 'skip'"),
        ({"job": {}}, "job.command", "field required"),
        ({"job": {"command": ["true"], "key": "k"}}, "job.key", "belongs to the schedule"),
        ({"job": {"command": ["true"], "instance": "x"}}, "job.instance", "belongs to the schedule"),
        ({"job": {"command": ["true"], "dedup_key": "x"}}, "job.dedup_key", "belongs to the schedule"),
        ({"job": {"command": ["true"], "metadata": {"tick": "1"}}}, "job.metadata", "'tick' is set by the schedule"),
        ({"job": {"command": ["true"], "model": "m"}}, "job.model", "needs a resource_class"),
        ({"job": {"command": [""]}}, "job.command", "must name a program"),
        ({"every": 5}, "every", "extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field_and_nothing_is_stored(
    operator: httpx.Client, change: dict[str, Any], field: str, said: str
) -> None:
    answer = operator.put("/v1/schedules/nightly", json=NIGHTLY | change)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["field"] == field
    assert said in answer.json()["detail"]
    assert operator.get("/v1/schedules").json()["schedules"] == []


def test_a_bad_name_is_refused(operator: httpx.Client) -> None:
    assert operator.put("/v1/schedules/Nightly", json=NIGHTLY).json()["field"] == "name"


def test_a_submitter_keeps_to_its_instance_and_to_its_priority_ceiling(served: Served, pool: Pool) -> None:
    with served.client(served.token("submitter", instance="ours", priority_ceiling=50)) as http:
        assert http.put("/v1/schedules/nightly", json=NIGHTLY | {"instance": "theirs"}).status_code == 403
        urgent = {"command": ["true"], "priority": 49}
        assert http.put("/v1/schedules/nightly", json=NIGHTLY | {"job": urgent}).status_code == 403
        by_class = {"command": ["true"], "job_class": "critical"}
        assert http.put("/v1/schedules/nightly", json=NIGHTLY | {"job": by_class}).status_code == 403
        job = {"command": ["true"], "priority": 50}
        assert http.put("/v1/schedules/nightly", json=NIGHTLY | {"job": job}).json()["instance"] == "ours"
    assert pool.row("SELECT priority_ceiling FROM schedules").priority_ceiling == 50


def test_the_commands_do_the_same(operate: Callable[..., tuple[int, str]], pool: Pool) -> None:
    given = ("--cron", "0 3 * * *", "--zone", "Europe/Berlin", "--catch-up", "all", "--label", "night")
    code, said = operate("schedule", "add", "nightly", *given, "--", "sh", "-c", "make --all")
    assert (code, said.startswith("nightly is made; the next tick is 20")) == (0, True), said
    shown = operate("schedule", "show", "nightly")[1]
    assert re.search(r"^job: command +sh -c 'make --all'$", shown, re.M), shown
    assert re.search(r"^enabled +yes$", shown, re.M), shown
    code, said = operate("schedule", "add", "nightly", *given, "--disabled", "--", "true")
    assert (code, said.strip()) == (0, "nightly is set, disabled")
    assert operate("schedule", "enable", "nightly")[1].startswith("nightly is enabled; the next tick is 20")
    assert operate("schedule", "disable", "nightly")[1].strip() == "nightly is disabled"
    job = operate("schedule", "run-now", "nightly")[1].strip()
    code, said = operate("schedule", "list", "--json")
    assert [(each["name"], each["last_job"]) for each in json.loads(said)] == [("nightly", job)]
    said = operate("schedule", "show", "nightly")[1]
    assert "Europe/Berlin" in said
    assert "night" in said
    assert operate("schedule", "rm", "nightly") == (0, "nightly is removed\n")
    assert operate("schedule", "rm", "nightly")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cron", "0 3 * *", "--", "true"), "error: --cron: '0 3 * *' has 4 fields"),
        (("--cron", "0 3 * * *", "--zone", "Mars", "--", "true"), "error: --zone: 'Mars' is not a time zone"),
        (("--cron", "0 3 * * *", "--key", "k", "--", "true"), "error: --key: belongs to the schedule"),
        (("--cron", "0 3 * * *", "--model", "m", "--", "true"), "error: --model: needs a resource_class"),
    ],
)
def test_a_wrong_option_is_named(
    operate: Callable[..., tuple[int, str]], arguments: tuple[str, ...], said: str
) -> None:
    code, told = operate("schedule", "add", "nightly", *arguments)
    assert (code, said in told) == (2, True), told


def test_db_doctor_names_a_schedule_whose_job_is_refused_again_and_again(operator: httpx.Client, pool: Pool) -> None:
    operator.put("/v1/schedules/nightly", json=NIGHTLY | {"job": {"command": ["true"], "job_class": "gone"}})
    assert pool.database.run(checks.check_schedules).verdict is Verdict.OK
    past = "date_trunc('minute', now())"
    for _ in range(3):
        pool.change(f"UPDATE schedules SET cron = '* * * * *', next_tick = {past}, due_at = {past}")
        Schedules(pool.database).run_once()
    found = pool.database.run(checks.check_schedules)
    assert found.verdict is Verdict.WARNING
    assert "default/nightly was refused 3 times: job_class: " in found.found
