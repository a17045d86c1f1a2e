"""Versions of the policy: who makes one, what a rollback brings back, which file counts, and who names them."""

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from leasehold.errors import BadInput, Conflict

from assigner.cli import errors
from assigner.cli.main import cli
from assigner.operator_resources import versions as activation
from assigner.operator_resources.registry import RESOURCES
from assigner.preemption.plan import QuotaSettings
from assigner.process import policies
from assigner.process.policies import Follower, InForce, declare, look
from assigner.settings import PoolSettings
from bots.sync.fetch import FetchSettings
from schema.accounting import rates
from schema.accounting.quotas import EVICTION_COOLDOWN
from schema.moves.preempt import WRITES_LEASES
from schema.policy import versions
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from schema.tenancy import processes
from schema.tenancy.instances import InstanceSettings
from schema.timing import Timing
from tests.support import plans
from tests.support.explain import explained
from tests.support.patience import eventually
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, outcome
from tests.support.servers import Processes, assigner_process
from tests.support.tenancy import Tenancy

#: What operators set before and after a version, by the path of a request.
SET: dict[str, dict[str, Any]] = {
    "instances/ci": {"pool": "builds", "weight": 2.0, "budget": 9.5, "slots": 3, "locks": {"tree": 2, "c-*": 4}},
    "cohorts/gpus": {"labels": ["gpu"], "reclaim_min": "any"},
    "quotas/gpus/ci": {"min": 1, "max": 4},
    "owner-quotas/ci/ann": {"cost": 2.5},
    "project-quotas/ci/site": {"cost": 3},
    "limits": {"max_concurrent": 8},
    "rates/cli/opus": {"per_second": 0.5, "burst": 2},
    "rates/api-*": {"per_second": 1.5},
    "queue-limits/a/b": {"max_queued": 5},
    "instance-queue-limits/*": {"max_queued": 7},
    "ceilings/ci/a": {"max_timeout": 60.5},
    "submit-rules/ci": {"commands": ["make"], "owner_cost": 10},
    "report-ceilings/ci/tokens": {"amount": 1000.5},
    "windows/night": {"start": 20, "end": 8, "types": ["nightly"]},
    "classes/nightly": {"points": -5},
    "class-limits/nightly": {"jobs": 2},
    "class-reserves/nightly": {"jobs": 1},
    "service-levels/slow": {"points": -10, "timeout_seconds": 7200},
    "scheduling": {"starvation_seconds": 1800, "high": 41},
}
PATCHED = ("instances/ci", "quotas/gpus/ci")


def usable(_: Any) -> None:
    """Say of any version that it can be used here."""


def limits(pool: Pool) -> Any:
    return pool.database.run(lambda c: versions.read(c, {}))["limits"]


def test_each_change_makes_a_version_and_any_version_can_be_in_force_again(operator: httpx.Client, pool: Pool) -> None:
    before = limits(pool)
    for path, body in SET.items():
        method = "PATCH" if path in PATCHED else "PUT"
        answer = operator.request(method, f"/v1/{path}", json={**body, "reason": "why"})
        assert answer.status_code == 200, (path, answer.text)
    after = limits(pool)
    assert set(after) == versions.DECIDING == {each.name for each in RESOURCES} - {"backpressure", "meter", "pause"}
    assert all(after[name] != before[name] for name in after), "each has something to restore"
    (last, *_, first) = operator.get("/v1/policies", params={"limit": 200}).json()["policies"]
    assert (last["id"], last["in_force"], last["reason"]) == (len(SET), True, "why")
    assert (last["parent"], first["parent"], first["changes"]) == (len(SET) - 1, None, [])
    assert {"what": "scheduling", "field": "high", "before": 40, "after": 41} in last["changes"]
    pool.submit(instance="ci", payload={"command": ["make"]})

    assert operator.post("/v1/policies/1/activate", json={"reason": "back"}).json() == {"id": 1, "kept": []}
    assert limits(pool) == operator.get("/v1/policies/1").json()["content"]["limits"]
    told = operator.get("/v1/policies/1/diff", params={"other": last["id"]}).json()
    assert {"what": "quota gpus/ci", "field": "max", "before": None, "after": 4} in told["changes"]
    answer = operator.post(f"/v1/policies/{last['id']}/activate", json={})
    assert answer.json() == {"id": last["id"], "kept": []}
    assert limits(pool) == after
    # A repeated request changes nothing more, and a rollback after an activation goes to what was in force before it.
    for _ in range(2):
        assert operator.post("/v1/policies/rollback", json={"from": last["id"]}).json() == {"id": 1, "kept": []}
        assert operator.post("/v1/policies/1/activate", json={}).json() == {"id": 1, "kept": []}
    assert operator.get("/v1/policies/active").json()["id"] == 1
    acts = [row.subject for row in pool.rows("SELECT subject FROM audit WHERE action = 'policy.activate' ORDER BY id")]
    assert acts == [f"policy:{id}" for id in (1, last["id"], 1)]
    operator.put("/v1/rates/cli", json={"per_second": 1})
    for asked, code in (({"from": last["id"]}, "other_policy_in_force"), ({}, None), ({}, "policy_in_force")):
        assert operator.post("/v1/policies/rollback", json=asked).json().get("code") == code


@pytest.mark.parametrize("wrong", ["7", '["x"]', '[{"what": 1}]'])
def test_wrong_json_of_one_version_hides_no_other_and_is_told(operator: httpx.Client, pool: Pool, wrong: str) -> None:
    for number in (1, 2):
        operator.put("/v1/rates/cli", json={"per_second": number})
    pool.change("UPDATE policies SET changes = CAST(:wrong AS jsonb) WHERE id = 2", wrong=wrong)
    last, first = operator.get("/v1/policies").json()["policies"]
    assert first["changes"] == []
    assert [each["after"] for each in last["changes"]] == ["cannot be read: wrong JSON is stored"]
    pool.change("UPDATE policies SET content = CAST(:wrong AS jsonb) WHERE id = 1", wrong=wrong)
    answer = operator.get("/v1/policies/1")
    assert (answer.status_code, answer.json()["detail"]) == (
        404, "policy: the content of version 1 cannot be read: wrong JSON is stored"
    )  # fmt: skip
    assert operator.get("/v1/policies/2").json()["content"]["limits"]["rate"]["cli"]["per_second"] == 2


@pytest.mark.parametrize("wrong", ["7", "{}", '{"settings": {}, "limits": {"rate": 7}}'])
def test_while_the_version_in_force_cannot_be_read_another_one_can_be_put_into_force(
    operator: httpx.Client, pool: Pool, wrong: str
) -> None:
    for number in (1, 2):
        operator.put("/v1/rates/cli", json={"per_second": number})
    draft = activation.draft_by(pool.database, lambda content: content, actor="tune", reason="the same").id
    pool.change("UPDATE policies SET content = CAST(:wrong AS jsonb) WHERE id = 2", wrong=wrong)
    answer = operator.put("/v1/rates/cli", json={"per_second": 3})
    assert (answer.status_code, answer.json()["code"]) == (409, versions.UNREADABLE)
    answer = operator.post(f"/v1/policies/{draft}/activate", json={})
    assert (answer.status_code, answer.json()["code"]) == (409, activation.STALE)
    assert operator.post(f"/v1/policies/{draft}/activate", json={"stale": True}).json() == {"id": draft, "kept": []}
    pool.change("UPDATE policies SET content = CAST(:wrong AS jsonb) WHERE id = :id", wrong=wrong, id=draft)
    assert operator.post("/v1/policies/1/activate", json={}).json() == {"id": 1, "kept": []}
    assert operator.put("/v1/rates/cli", json={"per_second": 3}).status_code == 200


def test_a_draft_leads_out_of_a_version_in_force_that_cannot_be_read_although_no_other_is_kept(
    operator: httpx.Client, pool: Pool
) -> None:
    operator.put("/v1/rates/cli", json={"per_second": 2})
    pool.change("UPDATE policies SET content = '7'")
    made = operator.post("/v1/policies", json={"settings": {"success": {"memory": 100}}})
    assert made.status_code == 200, made.text
    refused = operator.put("/v1/rates/cli", json={"per_second": 3}).json()["detail"]
    assert "`leasehold policy draft FILE`" in refused
    draft = made.json()["id"]
    assert operator.post(f"/v1/policies/{draft}/activate", json={"stale": True}).json() == {"id": draft, "kept": []}
    assert operator.get("/v1/rates").json()["rates"][0]["per_second"] == 2, "what operators have set stays"
    assert operator.put("/v1/rates/cli", json={"per_second": 3}).status_code == 200


@pytest.mark.parametrize("wrong", ["7", '{"settings": 7, "limits": {}}'])
def test_while_the_version_in_force_cannot_be_read_a_file_is_refused_only_if_it_was_changed(
    pool: Pool, wrong: str
) -> None:
    file = PoolSettings(instances=(InstanceSettings(name="a"),))
    pool.database.run(lambda c: policies.put_file(c, file, process="host", before=None))
    pool.change("UPDATE policies SET content = CAST(:wrong AS jsonb)", wrong=wrong)
    assert not pool.database.run(lambda c: policies.put_file(c, file, process="host", before=None))
    changed, digest = PoolSettings(), policies.file_digest(file)
    with pytest.raises(Conflict, match="cannot be read") as refused:
        pool.database.run(lambda c: policies.put_file(c, changed, process="host", before=digest))
    assert refused.value.code == versions.UNREADABLE


def test_a_draft_and_what_cannot_be_as_it_was_blame_nobody_else(operator: httpx.Client, pool: Pool) -> None:
    operator.put("/v1/limits", json={"max_concurrent": 8})
    operator.put("/v1/classes/nightly", json={"points": -5})
    operator.put("/v1/rates/cli", json={"per_second": 1})
    pool.submit(**JobRequest(command=["true"], job_class="nightly").normal())
    for _ in range(2):
        done = operator.post("/v1/policies/1/activate", json={}).json()
        assert done == {"id": 4, "kept": ["class nightly: class 'nightly' is used by unfinished jobs"]}
    made = operator.get("/v1/policies/4").json()
    assert (made["in_force"], made["reason"]) == (True, f"as version 1, except {done['kept'][0]}")
    assert {each["what"] for each in made["changes"]} == {"rate cli"}
    operator.put("/v1/limits", json={"max_concurrent": 7})
    assert [each["what"] for each in operator.get("/v1/policies/active").json()["changes"]] == ["pool-limit"]

    def changed(content: versions.Content) -> versions.Content:
        return {**content, "settings": {"success": {"memory": 0}}, "limits": {**content["limits"], "class": {}}}

    draft = activation.draft_by(pool.database, changed, actor="tune", reason="better").id
    assert [each["drafted"] for each in operator.get("/v1/policies").json()["policies"][:2]] == [True, False]
    operator.put("/v1/limits", json={"max_concurrent": 6})
    refused = operator.post(f"/v1/policies/{draft}/activate", json={})
    assert (refused.status_code, refused.json()["code"], limits(pool)["pool-limit"][""]["max_concurrent"]) == (
        409, "stale_draft", 6)  # fmt: skip
    done = operator.post(f"/v1/policies/{draft}/activate", json={"stale": True}).json()
    assert [each.partition(":")[0] for each in done["kept"]] == ["class nightly", "success"]
    assert limits(pool)["pool-limit"][""]["max_concurrent"] == 7


def test_a_draft_is_made_while_the_policy_can_be_changed_and_is_of_the_newest_version(
    operator: httpx.Client, pool: Pool
) -> None:
    """To make one of a large policy takes seconds, for which nobody may wait and no transaction may be idle."""
    operator.put("/v1/rates/cli", json={"per_second": 1})
    seen: list[Any] = []

    def changed(content: versions.Content) -> versions.Content:
        seen.append(content["limits"]["rate"]["cli"]["per_second"])
        if len(seen) == 1:
            assert operator.put("/v1/rates/cli", json={"per_second": 2}).status_code == 200
        return {**content, "settings": {"success": {"memory": 5}}}

    draft = activation.draft_by(pool.database, changed, actor="tune", reason="better")
    assert (seen, draft.parent, draft.drafted, [each.what for each in draft.changes]) == (
        [1, 2], draft.id - 1, True, ["[success]"])  # fmt: skip
    noted = pool.rows("SELECT subject FROM audit WHERE action = 'policy.draft'")
    assert [row.subject for row in noted] == [f"policy:{draft.id}"]


WINDOW = {
    "start": 22, "end": 6, "zone": "Europe/Berlin", "types": ["night", "all"], "exempt_types": [], "match": "prefix",
    "meter": "tokens", "usage_threshold": 62.5, "meter_max_age": 60.0,
}  # fmt: skip


def many(count: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Limits with this number of items of each resource that may have thousands of them."""
    names = [f"i{nth}" for nth in range(count)]
    share = {"weight": 2.0, "unit": "cost", "budget": 9.5, "max_concurrent": 3, "slots": 4}
    return {
        "instance": {name: {"pool": "builds"} for name in names},
        "account": dict.fromkeys(names, share),
        "lock": {f"{name}/tree": {"slots": 2} for name in names},
        "quota": {f"default/{name}": {"min": 1, "max": nth + 1} for nth, name in enumerate(names)},
        "owner-quota": {f"{name}/ann": {"cost": 2.5} for name in names},
        "project-quota": {f"{name}/site": {"cost": 3.0} for name in names},
        "instance-queue-limit": {name: {"max_queued": 50} for name in names},
        "ceiling": {
            f"{name}/*": {"default_timeout": None, "max_timeout": 9.5, "max_queue_age": None} for name in names
        },
        "submit-rule": {
            name: {"property_keys": ["os"], "commands": None, "owner_cost": 2.5, "owner_penalty": None}
            for name in names
        },
        "queue-limit": {f"a/{name}": {"max_queued": 5} for name in names},
        "rate": {f"api/{name}": {"per_second": 2.5, "burst": nth + 1} for nth, name in enumerate(names)},
        "window": {name: {**WINDOW, "start": nth % 6, "exempt_types": [name]} for nth, name in enumerate(names)},
    }


def test_many_limits_become_as_they_were_in_as_many_statements_as_few(operator: httpx.Client, pool: Pool) -> None:
    operator.put("/v1/limits", json={"max_concurrent": 8})
    pool.running(instance="i0")
    before, told = limits(pool), []
    for count in (2, 60):
        draft = activation.draft(pool.database, {}, many(count), actor="ann", reason="").id
        with plans.statements() as set_all:
            pool.database.run(lambda c, id=draft: activation.activate(c, id, actor="ann", reason="", check=usable))
        assert limits(pool) == {**before, **many(count)}
        assert pool.row("SELECT usage FROM quotas ORDER BY instance LIMIT 1").usage == 1
        with plans.statements() as removed_all:
            assert rolled_back(pool) == 1
        assert limits(pool) == before
        told.append((len(set_all), len(removed_all)))
    assert told[0] == told[1]
    others = {"policy", "instance", "pool", "token"}
    noted = pool.rows("SELECT action, count(*) AS times FROM audit GROUP BY action ORDER BY action")
    assert {row.action: row.times for row in noted if row.action.split(".")[0] not in others} == {
        "account.set": 62, "account.remove": 62, "limit.set": 186, "limit.rm": 186, "quota.set": 62, "quota.rm": 62,
        "queue.set": 248, "rate.set": 62, "rate.rm": 62, "ceiling.set": 62, "ceiling.rm": 62, "submit-rule.set": 62,
        "submit-rule.rm": 62, "window.set": 62, "window.rm": 62,
    }  # fmt: skip

    wrong = {"quota": {**many(20)["quota"], "gone/i1": {"min": 1, "max": None}}, "instance": many(20)["instance"]}
    draft = activation.draft(pool.database, {}, wrong, actor="ann", reason="").id
    done = pool.database.run(lambda c: activation.activate(c, draft, actor="ann", reason="", check=usable))
    assert done.kept == ["quota gone/i1: cohort: no cohort 'gone'"]
    assert limits(pool)["quota"] == many(20)["quota"]


FILE = """
[quotas]
preemption_delay = {delay}
[[rates]]
resource = "cli"
per_second = {rate}
[[assigners]]
[assigners.strategy.weights]
priority = -2.0
[[instances]]
name = "ci"
weight = 2.0
"""


def written(file: Path, delay: float, rate: float) -> None:
    file.write_text(FILE.format(delay=delay, rate=rate))


def history(pool: Pool) -> list[tuple[int, str, bool]]:
    found = pool.database.run(lambda c: versions.versions(c, limit=20))
    return [(each.id, each.author, each.in_force) for each in reversed(found)]


def rolled_back(pool: Pool) -> int:
    return pool.database.run(lambda c: activation.roll_back(c, of=None, actor="ann", reason="worse", check=usable)).id


def test_a_changed_file_counts_once_and_a_rollback_outlasts_restarts(
    pool: Pool, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEASEHOLD_DATABASE_URL", database_url)
    file, other = tmp_path / "leasehold.toml", tmp_path / "other.toml"
    written(file, 3, 2)
    with assigner_process(pool, file) as (process, _), assigner_process(pool, file, "host-2"):
        assert history(pool) == [(1, "config", True)]
        written(file, 5, 4)
        process.reload()
        eventually(lambda: history(pool) == [(1, "config", False), (2, "config", True)])
        # Both processes follow within two seconds and say so, and leases name the version.
        eventually(lambda: {row.policy for row in pool.rows("SELECT policy FROM assigners")} == {2})
        assert rolled_back(pool) == 1
        eventually(lambda: {row.policy for row in pool.rows("SELECT policy FROM assigners")} == {1})
        (told,) = pool.database.run(lambda c: processes.settings_in_force(c, limit=9))
        assert told.settings["quotas"]["preemption_delay"] == 3
        job, bot = pool.submit()[0], pool.bot()
        eventually(lambda: pool.job(job).state == "leased")
        assert pool.row("SELECT policy FROM leases").policy == 1
        bot.take()
    other.write_text('[quotas]\npreemption_delay = 7\n[[assigners]]\nkind = "cohort"\n')
    with assigner_process(pool, file) as (process, _):
        assert history(pool) == [(1, "config", True), (2, "config", False)]
        assert limits(pool)["rate"] == {"cli": {"per_second": 2, "burst": 1}}
        assert errors.run(cli, ["--config", str(file), "config", "check"]) == 0
        said = capsys.readouterr().out
        assert "policy: version 1 is in force" in said
        assert "  [quotas] preemption_delay: 5 here, 3 in force\n  rate cli per_second: 4 here, 2 in force\n" in said
        # Another host's file counts once too, and leaves the entries that it does not name.
        with assigner_process(pool, other, "host-2"):
            pass
        with assigner_process(pool, file), assigner_process(pool, other, "host-2"):
            assert history(pool)[2:] == [(3, "config", True)]
        content = pool.database.run(versions.in_force)
        assert set(content.content["settings"]["assigners"]) == {"priority-age", "cohort"}
        # The text that the file once had is a change, too.
        written(file, 3, 2)
        process.reload()
        eventually(lambda: history(pool)[3:] == [(4, "config", True)])
        # A file that cannot be written keeps no process from following the version in force.
        monkeypatch.setattr(policies, "put_file", Mock(side_effect=BadInput("file", "cannot be written")))
        written(file, 8, 8)
        process.reload()
        eventually(lambda: policies.put_file.called)  # type: ignore[attr-defined]
        assert rolled_back(pool) == 3
        eventually(lambda: pool.row("SELECT policy FROM assigners WHERE name = 'host'").policy == 3)


def rate(connection: Connection, resource: str) -> None:
    versions.hold(connection)
    rates.set_rates(connection, {resource: rates.RateTerms(1, 1)}, actor="ann")
    versions.note_change(connection, actor="ann", reason=resource)


def test_changes_take_turns_and_each_version_follows_from_the_one_before(pool: Pool, race: Race) -> None:
    pool.database.run(lambda c: rate(c, "a"))
    race.in_turn(lambda ahead: rate(ahead.connection, "b"), lambda: pool.database.run(lambda c: rate(c, "c")))
    two, three = (pool.database.run(partial(versions.version, id=id)) for id in (2, 3))
    assert [(each.what, each.field) for each in three.changes] == [("rate c", "burst"), ("rate c", "per_second")]
    assert (two.parent, three.parent, two.changed, three.in_force) == (1, 2, 2, True)
    with race.first() as ahead:
        activation.activate(ahead.connection, 1, actor="ann", reason="", check=usable)
        late = race.second(lambda: rolled_back(pool), behind=ahead)
        ahead.commit()
        assert outcome(late) == 3


#: What a cycle of an assigner locks, in its order: tokens, leases, counters.
DRAWS = Statement("UPDATE rate_buckets SET tokens = 0")
COUNTS = [
    Statement(f"UPDATE counters SET used = 0 WHERE name = '{name}'") for name in ("instance:ci\\:jobs", "lock:a\\:x")
]


@pytest.mark.conflicts
@pytest.mark.parametrize("locked", [(DRAWS, WRITES_LEASES, *COUNTS), COUNTS])
def test_a_change_of_many_limits_and_a_cycle_lock_in_one_order(
    operator: httpx.Client, pool: Pool, race: Race, locked: Sequence[Statement]
) -> None:
    operator.patch("/v1/instances/a", json={"locks": {"x": 1}})
    operator.put("/v1/rates/cli", json={"per_second": 1})
    operator.patch("/v1/instances/ci", json={"pool": "builds", "max_concurrent": 5})
    operator.patch("/v1/instances/ci", json={"pool": "other", "max_concurrent": 6})
    operator.put("/v1/rates/cli", json={"per_second": 2})
    a, ci = (InstanceSettings(name="a", locks={"x": 2}), InstanceSettings(name="ci", max_concurrent=7))

    def change(connection: Connection) -> None:
        if locked is COUNTS:
            declare(connection, PoolSettings(instances=(a, ci)))
        else:
            activation.activate(connection, 3, actor="ann", reason="", check=usable)

    with race.first() as ahead:
        ahead.connection.execute(locked[0])
        late = race.second(lambda: pool.database.run(change), behind=ahead)
        for each in locked[1:]:
            ahead.connection.execute(each)
        ahead.commit()
        outcome(late)
    assert race.errors == []
    assert limits(pool)["account"]["ci"]["max_concurrent"] == (7 if locked is COUNTS else 5)


def test_what_is_granted_fetched_and_evicted_names_the_version_that_decided(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=1)
    pool.submit(2, instance="team-b", priority=10)
    bot, first = pool.bot(), pool.assigner(policy=3)
    first.run_once()
    bot.sync_service.reconfigure(FetchSettings(), EVICTION_COOLDOWN, policy=4)
    (work,) = bot.sync(completed(*bot.take()))["leases"]
    bot.sync(active(work))
    pool.submit(instance="team-a")
    pool.assigner(quotas=QuotaSettings(preemption_delay=0), policy=5).run_once()
    bot.sync(active(work))
    bot.sync(completed(work, "stopped"))
    assert [row.policy for row in pool.rows("SELECT policy FROM leases ORDER BY granted_at")] == [3, 4]
    assert pool.row("SELECT details FROM evictions").details["policy"] == 5
    (attempt,) = explained(pool, work["job"]).attempts
    assert attempt.policy == 4


@pytest.mark.conflicts
def test_processes_follow_within_two_seconds_although_one_of_them_was_killed(
    pool: Pool, scratch: Path, database_url: str, timing: Timing
) -> None:
    with Processes(scratch, database_url, timing, config="[quotas]\npreemption_delay = 3\n") as running:
        dead = running.assigner("assigner-1")
        running.assigner("assigner-2")
        running.gateway()
        told = "SELECT policy FROM assigners WHERE name <> 'assigner-1' UNION ALL SELECT policy FROM gateways"
        dead.signal(signal.SIGKILL)
        headers = {"Authorization": f"Bearer {running.operator_token}"}
        with httpx.Client(base_url=running.url, headers=headers, trust_env=False) as operator:
            assert operator.put("/v1/rates/cli", json={"per_second": 1}).status_code == 200
            eventually(lambda: [row.policy for row in pool.rows(told)] == [2, 2])
            assert operator.post("/v1/policies/1/activate", json={}).json() == {"id": 1, "kept": []}
            eventually(lambda: [row.policy for row in pool.rows(told)] == [1, 1])
            found = operator.get("/v1/policies").json()["processes"]
            assert {each["name"]: each["policy"] for each in found if each["kind"] == "assigner"}["assigner-2"] == 1
            text = operator.get("/metrics").text
            wrong: versions.Content = {"settings": {"quotas": {"preemption_delay": -1}}, "limits": {}, "declared": {}}
            draft = activation.draft_by(pool.database, lambda _: wrong, actor="tune", reason="").id
            refused = operator.post(f"/v1/policies/{draft}/activate", json={})
            assert (refused.status_code, refused.json()["code"]) == (409, "policy_unusable")
    assert "leasehold_gateway_policy_version 1.0" in text


def test_a_version_that_a_process_cannot_use_changes_nothing_there(pool: Pool) -> None:
    pool.database.run(lambda c: rate(c, "a"))
    seen: list[InForce] = []
    follower = Follower(pool.database, PoolSettings(), seen.append)
    follower.run_once()
    wrong = {"quotas": {"preemption_delay": -1}}
    pool.database.run(lambda c: versions.note_change(c, actor="ann", reason="", settings=wrong))
    for _ in range(2):
        follower.run_once()
    # So does a process that starts now, or whose file is another one.
    begun = pool.database.run(lambda c: look(c, PoolSettings(), None))
    assert (begun.version, begun.refused) == (1, 2)
    for content in ("7", '{"assigners": 7}', '{"canary": {"policy": 99, "cohorts": []}}'):
        pool.change(f"UPDATE policies SET content = jsonb_build_object('settings', jsonb '{content}') WHERE id = 2")
        begun = pool.database.run(lambda c: look(c, PoolSettings(), None))
        assert (begun.version, begun.refused) == (1, 2), content
    assert rolled_back(pool) == 1
    follower.run_once()
    assert [(each.version, each.refused, each.absent) for each in seen] == [
        (None, None, ()), (1, None, ("priority-age",)), (1, 2, ("priority-age",)), (1, None, ("priority-age",)),
    ]  # fmt: skip
    assert (seen[2].error or "").startswith("policy 2 cannot be used here: preemption_delay: ")
