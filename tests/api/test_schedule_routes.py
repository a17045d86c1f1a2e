"""Schedules over HTTP and on the command line: set one by one, or applied for an app that declares them."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from assigner.maintenance.schedules import Schedules
from schema.diagnostics import checks
from schema.diagnostics.checks import Verdict
from schema.policy import pauses, schedule_changes
from tests.support.http import audited
from tests.support.pool import Pool
from tests.support.servers import Served

Operate = Callable[..., tuple[int, str]]
JOB = {"command": ["make", "nightly"]}
NIGHTLY: dict[str, Any] = {"cron": "0 3 * * *", "zone": "Europe/Berlin", "job": JOB}


def nightly(**fields: Any) -> dict[str, Any]:
    return NIGHTLY | {"name": "nightly"} | fields


def apply(http: httpx.Client, *schedules: dict[str, Any], app: str = "shop", **how: Any) -> httpx.Response:
    return http.post("/v1/schedules/apply", json={"app": app, "schedules": schedules, **how})


def test_a_schedule_is_set_shown_listed_disabled_run_and_removed(operator: httpx.Client, pool: Pool) -> None:
    plan = operator.post("/v1/schedules/nightly/plan", json=NIGHTLY)
    assert (plan.status_code, plan.json()["exists"], len(plan.json()["ticks"])) == (200, False, 5)
    assert operator.get("/v1/schedules/nightly").status_code == 404
    made = operator.put("/v1/schedules/nightly", json=NIGHTLY)
    assert made.json()["next_tick"] == plan.json()["ticks"][0]
    assert operator.post("/v1/schedules/nightly/plan", json=NIGHTLY).json()["exists"]
    assert made.status_code == 200, made.text
    assert (made.json()["created"], made.json()["instance"]) == (True, "default")
    again = operator.put("/v1/schedules/nightly", json=NIGHTLY).json()
    assert (again["created"], again["next_tick"]) == (False, made.json()["next_tick"])
    shown = operator.get("/v1/schedules/nightly").json()
    assert (shown["job"], shown["catch_up"], shown["failures"]) == (JOB, "skip", 0)

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


def test_a_submitter_ends_no_pause_of_an_operator_and_takes_no_reason_away(
    operator: httpx.Client, served: Served, pool: Pool
) -> None:
    with served.client(served.token("submitter", instance="default")) as submitter:
        submitter.put("/v1/schedules/nightly", json=NIGHTLY)
        assert operator.put("/v1/pauses/schedule/default/nightly", json={"reason": "disk full"}).status_code == 200
        assert submitter.patch("/v1/schedules/nightly", json={"enabled": False}).status_code == 200
        for refused in (
            submitter.patch("/v1/schedules/nightly", json={"enabled": True}),
            submitter.put("/v1/schedules/nightly", json=NIGHTLY),
            submitter.delete("/v1/schedules/nightly"),
        ):
            assert (refused.status_code, refused.json()["detail"]) == (
                403, "schedule: an operator has paused 'nightly': disk full"
            )  # fmt: skip
        (found,) = pool.database.run(pauses.pauses)
        assert (found.reason, found.actor.partition(":")[0]) == ("disk full", "operator")
        operator.put("/v1/pauses/schedule/default/nightly", json={"reason": "still full"})
        assert [each for each in audited(pool.database) if each == "schedule.disable"] == ["schedule.disable"] * 2
        assert operator.patch("/v1/schedules/nightly", json={"enabled": True}).json()["enabled"]
        for enabled in (False, True):
            done = submitter.patch("/v1/schedules/nightly", json={"enabled": enabled})
            assert done.json()["enabled"] is enabled, "what a submitter has disabled it may enable"


def test_schedules_are_listed_in_pages_by_instance_and_name(operator: httpx.Client) -> None:
    for instance, name in (("b", "x"), ("a", "y"), ("a", "x")):
        operator.put(f"/v1/schedules/{name}", json=NIGHTLY | {"instance": instance})
    page = operator.get("/v1/schedules", params={"limit": 2}).json()["schedules"]
    rest = operator.get("/v1/schedules", params={"after": "a/y"}).json()["schedules"]
    assert [(each["instance"], each["name"]) for each in page + rest] == [("a", "x"), ("a", "y"), ("b", "x")]
    assert [each["name"] for each in operator.get("/v1/schedules?instance=b").json()["schedules"]] == ["x"]
    assert operator.get("/v1/schedules?after=a").json()["field"] == "after"


#: What is wrong with a schedule, the field that is named for it, and what is said.
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"cron": "0 * * * * *"}, "cron", "'0 * * * * *' has 6 fields, not the five fields minute, hour,"),
    ({"cron": "61 * * * *"}, "cron", "is not a cron expression: bad minute"),
    ({"cron": "0 0 */31 2 MON#5"}, "cron", "has no tick within 50 years"),
    ({"zone": "Europe/Atlantis"}, "zone", "'Europe/Atlantis' is not a time zone"),
    ({"catch_up": "some"}, "catch_up", "'skip', 'all' or 'none'"),
    ({"catch_up_most": 0}, "catch_up_most", "greater than or equal to 1"),
    ({"overlap": True}, "overlap", "'allow' or 'skip'"),
    ({"job": {}}, "job.command", "field required"),
    ({"job": JOB | {"key": "k"}}, "job.key", "belongs to the schedule"),
    ({"job": JOB | {"instance": "x"}}, "job.instance", "belongs to the schedule"),
    ({"job": JOB | {"dedup_key": "x"}}, "job.dedup_key", "belongs to the schedule"),
    ({"job": JOB | {"metadata": {"tick": "1"}}}, "job.metadata", "'tick' is set by the schedule"),
    ({"job": JOB | {"model": "m"}}, "job.model", "needs a resource_class"),
    ({"job": {"command": [""]}}, "job.command", "must name a program"),
    ({"every": 5}, "every", "there is no such field"),
]


def test_what_is_wrong_is_refused_with_its_field_and_nothing_is_stored(operator: httpx.Client) -> None:
    def refused(answer: httpx.Response, field: str, said: str) -> None:
        assert answer.status_code in (400, 422), answer.text
        assert (answer.json()["field"], said in answer.json()["detail"]) == (field, True), answer.text

    for change, field, said in WRONG:
        refused(operator.put("/v1/schedules/nightly", json=NIGHTLY | change), field, said)
        refused(apply(operator, nightly(), nightly(name="weekly", **change)), f"schedules.1.{field}", said)
    refused(operator.put("/v1/schedules/Nightly", json=NIGHTLY), "name", "is not a name")
    refused(apply(operator, nightly(name="Nightly")), "schedules.0.name", "is not a name")
    refused(apply(operator, nightly(), nightly()), "schedules.1.name", "'nightly' is declared twice")
    refused(apply(operator, app=""), "app", "at least 1")
    refused(apply(operator, app="x" * 201), "app", "is 201 bytes long, at most 200")
    refused(apply(operator, app="a\0"), "body", "NUL")
    assert operator.get("/v1/schedules").json()["schedules"] == []


def test_the_commands_do_the_same(operate: Operate, pool: Pool) -> None:
    given = ("--cron", "0 3 * * *", "--zone", "Europe/Berlin", "--catch-up", "all", "--label", "night")
    code, said = operate("schedule", "add", "nightly", *given, "--", "sh", "-c", "make --all")
    assert code == 0
    assert re.fullmatch(r"nightly is made; the next tick is \d{4}-\d\d-\d\dT03:00:00\+0[12]:00\n", said), said
    planned = operate("schedule", "add", "nightly", *given, "--plan", "--", "true")[1]
    assert len(re.findall(r"^  \d{4}-\d\d-\d\dT03:00:00\+0[12]:00$", planned, re.M)) == 5, planned
    for told in (operate("schedule", "show", "nightly")[1], operate("schedule", "list")[1]):
        assert re.search(r"T03:00:00\+0[12]:00", told), told
    shown = operate("schedule", "show", "nightly")[1]
    assert re.search(r"^job: command +sh -c 'make --all'$", shown, re.M), shown
    assert re.search(r"^enabled +yes$", shown, re.M), shown
    assert "due at" not in shown, "it is the next tick"
    pool.change("UPDATE schedules SET due_at = next_tick + interval '1 minute'")
    shown = operate("schedule", "show", "nightly")[1]
    assert re.search(r"^due at +\d{4}-\d\d-\d\dT03:01:00\+0[12]:00$", shown, re.M), shown
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


def test_a_wrong_option_is_named(operate: Operate) -> None:
    for cron, options, said in (
        ("0 3 * *", "", "error: --cron: '0 3 * *' has 4 fields"),
        ("0 3 * * *", "--zone Mars", "error: --zone: 'Mars' is not a time zone"),
        ("0 3 * * *", "--key k", "error: --key: belongs to the schedule"),
        ("0 3 * * *", "--model m", "error: --model: needs a --resource-class"),
    ):
        code, told = operate("schedule", "add", "nightly", "--cron", cron, *options.split(), "--", "true")
        assert (code, said in told) == (2, True), told
    for words in (["add", "a/b", "--cron", "0 3 * * *", "--", "true"], ["show", "../x"], ["rm", "A"], ["enable", "a/"]):
        code, told = operate("schedule", *words)
        assert (code, told.startswith("error: name: ")) == (2, True), told


def test_db_doctor_names_a_schedule_whose_job_is_refused_again_and_again(operator: httpx.Client, pool: Pool) -> None:
    operator.put("/v1/schedules/nightly", json=NIGHTLY | {"job": JOB | {"job_class": "gone"}})
    assert pool.database.run(checks.check_schedules).verdict is Verdict.OK
    past = "date_trunc('minute', now())"
    for _ in range(3):
        pool.change(f"UPDATE schedules SET cron = '* * * * *', next_tick = {past}, due_at = {past}")
        Schedules(pool.database).run_once()
    found = pool.database.run(checks.check_schedules)
    assert found.verdict is Verdict.WARNING
    assert "default/nightly was refused 3 times: job_class: " in found.found


# Schedules of an app: applied, shown, refused and taken over


def outcomes(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: each["outcome"] for each in answer.json()["schedules"]}


def test_an_app_applies_its_schedules_twice_and_the_list_tells_whose_they_are(
    operator: httpx.Client, pool: Pool
) -> None:
    operator.put("/v1/schedules/by-hand", json={"cron": "0 3 * * *", "job": JOB})
    first = apply(operator, nightly())
    assert outcomes(first) == {"nightly": "created"}
    assert first.json()["schedules"][0]["next_tick"] == operator.get("/v1/schedules/nightly").json()["next_tick"]
    written = audited(pool.database)
    assert outcomes(apply(operator, nightly())) == {"nightly": "unchanged"}
    assert audited(pool.database) == written
    listed = {each["name"]: each["declared_by"] for each in operator.get("/v1/schedules").json()["schedules"]}
    assert listed == {"by-hand": None, "nightly": "app:shop"}
    assert outcomes(apply(operator)) == {"nightly": "left"}
    assert outcomes(apply(operator, prune=True)) == {"nightly": "removed"}


def test_a_refused_one_keeps_all_from_being_changed(operator: httpx.Client, pool: Pool) -> None:
    operator.put("/v1/schedules/by-hand", json={"cron": "0 3 * * *", "job": JOB})
    answer = apply(operator, nightly(), nightly(name="by-hand"))
    assert (answer.status_code, answer.json()["code"]) == (409, "schedule_owned")
    assert "default/by-hand (a command); take them over" in answer.json()["detail"]
    assert [row.name for row in pool.rows("SELECT name FROM schedules")] == ["by-hand"]
    assert outcomes(apply(operator, nightly(), nightly(name="by-hand"), take_over=True)) == {
        "by-hand": "changed", "nightly": "created"
    }  # fmt: skip


def test_a_command_is_told_what_declares_a_schedule_and_may_take_it_over(operator: httpx.Client) -> None:
    apply(operator, nightly(), nightly(name="weekly"))
    changed = {"cron": "0 4 * * *", "job": JOB}
    for answer in (operator.put("/v1/schedules/nightly", json=changed), operator.delete("/v1/schedules/nightly")):
        assert (answer.status_code, answer.json()["code"]) == (409, "declared")
        assert "'nightly' is declared by the app 'shop': change it there" in answer.json()["detail"]
    assert operator.patch("/v1/schedules/nightly", json={"enabled": False}).status_code == 200
    applied = apply(operator, nightly(), nightly(name="weekly"))
    assert outcomes(applied) == {"nightly": "unchanged", "weekly": "unchanged"}
    assert operator.put("/v1/schedules/nightly", json=changed | {"take_over": True}).json()["enabled"] is True
    assert operator.get("/v1/schedules/nightly").json()["declared_by"] is None
    assert operator.delete("/v1/schedules/weekly?take_over=true").status_code == 200


def test_a_full_instance_refuses_the_whole(operator: httpx.Client, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_changes, "MAX_SCHEDULES", 1)
    answer = apply(operator, nightly(), nightly(name="weekly"))
    assert (answer.status_code, answer.json()["code"]) == (409, "too_many_schedules")
    assert pool.rows("SELECT FROM schedules") == []


def test_a_submitter_keeps_to_its_instance_and_its_ceiling(served: Served, operator: httpx.Client, pool: Pool) -> None:
    apply(operator, nightly(instance="ours"), nightly(instance="theirs"))
    with served.client(served.token("submitter", instance="ours", priority_ceiling=50)) as http:
        for change in (
            {"instance": "theirs"},
            {"job": JOB | {"priority": 49}},
            {"job": JOB | {"job_class": "critical"}},
        ):
            put, applied = http.put("/v1/schedules/other", json=NIGHTLY | change), apply(http, nightly(**change))
            assert (put.status_code, applied.status_code) == (403, 403), change
        assert "schedules.0.job.priority" in apply(http, nightly(job=JOB | {"priority": 49})).json()["detail"]
        urgent = {"job": JOB | {"priority": 50}}
        assert http.put("/v1/schedules/set", json=NIGHTLY | urgent).json()["instance"] == "ours"
        assert outcomes(apply(http, nightly(name="mine", **urgent), prune=True)) == {
            "mine": "created", "nightly": "removed"
        }  # fmt: skip
    left = "SELECT i.name AS instance, s.name, priority_ceiling FROM schedules s JOIN instances i ON i.id = instance"
    assert {tuple(row) for row in pool.rows(left)} == {
        ("ours", "mine", 50), ("ours", "set", 50), ("theirs", "nightly", None)
    }  # fmt: skip


def test_the_commands_say_who_declares_and_take_over(operate: Operate, operator: httpx.Client) -> None:
    apply(operator, nightly())
    assert [each["declared_by"] for each in json.loads(operate("schedule", "list", "--json")[1])] == ["app:shop"]
    assert "app:shop" in operate("schedule", "list")[1]
    add = ("schedule", "add", "nightly", "--cron", "0 4 * * *")
    for given in ((*add, "--", "true"), ("schedule", "rm", "nightly")):
        code, said = operate(*given)
        assert code != 0
        assert "'nightly' is declared by the app 'shop'" in said
        assert "--take-over" in said
    assert operate(*add, "--take-over", "--", "true")[0] == 0
    assert operator.get("/v1/schedules/nightly").json()["declared_by"] is None
    apply(operator, nightly(), take_over=True)
    assert operate("schedule", "rm", "nightly", "--take-over") == (0, "nightly is removed\n")
