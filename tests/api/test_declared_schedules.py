"""Schedules of an app over HTTP, by the library and on the command line: applied, shown, refused and taken over."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from schema.policy import schedule_changes
from tests.support.http import audited
from tests.support.pool import Pool
from tests.support.servers import Served

JOB = {"command": ["make", "nightly"]}


def nightly(**fields: Any) -> dict[str, Any]:
    return {"name": "nightly", "cron": "0 3 * * *", "zone": "Europe/Berlin", "job": JOB, **fields}


def apply(http: httpx.Client, *schedules: dict[str, Any], app: str = "shop", **how: Any) -> httpx.Response:
    return http.post("/v1/schedules/apply", json={"app": app, "schedules": schedules, **how})


def outcomes(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: each["outcome"] for each in answer.json()["schedules"]}


def test_an_app_applies_its_schedules_twice_and_the_list_tells_who_declares_them(
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
    assert outcomes(apply(operator, nightly(), nightly(name="weekly"))) == {
        "nightly": "unchanged",
        "weekly": "unchanged",
    }
    assert operator.put("/v1/schedules/nightly", json=changed | {"take_over": True}).json()["enabled"] is True
    assert operator.get("/v1/schedules/nightly").json()["declared_by"] is None
    assert operator.delete("/v1/schedules/weekly?take_over=true").status_code == 200


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"schedules": [nightly(), nightly(cron="0 3 * *")]}, "schedules.1.cron", "has 4 fields"),
        ({"schedules": [nightly(), nightly()]}, "schedules.1.name", "'nightly' is declared twice"),
        ({"schedules": [nightly(zone="Mars")]}, "schedules.0.zone", "'Mars' is not a time zone"),
        ({"schedules": [nightly(name="Nightly")]}, "schedules.0.name", "match"),
        ({"schedules": [nightly(every=5)]}, "schedules.0.every", "extra inputs are not permitted"),
        ({"schedules": [nightly(job={})]}, "schedules.0.job.command", "field required"),
        ({"schedules": [nightly(job=JOB | {"key": "k"})]}, "schedules.0.job.key", "belongs to the schedule"),
        ({"schedules": [nightly(job=JOB | {"model": "m"})]}, "schedules.0.job.model", "needs a resource_class"),
        ({"app": ""}, "app", "at least 1"),
        ({"app": "x" * 201}, "app", "is 201 bytes long, at most 200"),
        ({"app": "a\0"}, "body", "NUL"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place_and_nothing_is_stored(
    operator: httpx.Client, given: dict[str, Any], field: str, said: str
) -> None:
    answer = operator.post("/v1/schedules/apply", json={"app": "shop", "schedules": [], **given})
    assert answer.status_code in (400, 422), answer.text
    assert (answer.json()["field"], said in answer.json()["detail"]) == (field, True), answer.text
    assert operator.get("/v1/schedules").json()["schedules"] == []


def test_a_full_instance_refuses_the_whole(operator: httpx.Client, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_changes, "MAX_SCHEDULES", 1)
    answer = apply(operator, nightly(), nightly(name="weekly"))
    assert (answer.status_code, answer.json()["code"]) == (409, "too_many_schedules")
    assert pool.rows("SELECT FROM schedules") == []


def test_a_submitter_applies_and_prunes_in_its_instance_only(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    apply(operator, nightly(instance="ours"), nightly(instance="theirs"))
    with served.client(served.token("submitter", instance="ours", priority_ceiling=50)) as http:
        assert apply(http, nightly(instance="theirs")).status_code == 403
        urgent = JOB | {"priority": 49}
        assert "schedules.0.job.priority" in apply(http, nightly(job=urgent)).json()["detail"]
        by_class = JOB | {"job_class": "critical"}
        assert apply(http, nightly(job=by_class)).status_code == 403
        assert outcomes(apply(http, nightly(name="mine", job=JOB | {"priority": 50}), prune=True)) == {
            "mine": "created", "nightly": "removed"
        }  # fmt: skip
    left = "SELECT i.name AS instance, s.name, priority_ceiling FROM schedules s JOIN instances i ON i.id = instance"
    assert {tuple(row) for row in pool.rows(left)} == {("ours", "mine", 50), ("theirs", "nightly", None)}


def test_the_commands_say_who_declares_and_take_over(
    operate: Callable[..., tuple[int, str]], operator: httpx.Client
) -> None:
    apply(operator, nightly())
    assert [each["declared_by"] for each in json.loads(operate("schedule", "list", "--json")[1])] == ["app:shop"]
    assert "app:shop" in operate("schedule", "list")[1]
    add = ("schedule", "add", "nightly", "--cron", "0 4 * * *")
    for given in ((*add, "--", "true"), ("schedule", "rm", "nightly")):
        code, said = operate(*given)
        assert (code != 0, "'nightly' is declared by the app 'shop'" in said, "--take-over" in said) == (True,) * 3, (
            said
        )
    assert operate(*add, "--take-over", "--", "true")[0] == 0
    assert operator.get("/v1/schedules/nightly").json()["declared_by"] is None
    apply(operator, nightly(), take_over=True)
    assert operate("schedule", "rm", "nightly", "--take-over") == (0, "nightly is removed\n")
