"""Everything that operators set: each resource has its routes, its commands and its place in the documents, and can be
set, listed, shown and removed over HTTP, by its operator's name."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from leasehold.client import Client
from leasehold.errors import BadInput, Conflict

from assigner.cli.main import cli
from assigner.config import loading
from assigner.operator_resources.declaration import Irremovable, Resource
from assigner.operator_resources.registry import RESOURCES, resource
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from schema.policy import priority_classes, time_windows
from schema.policy.time_windows import WindowTerms
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from tests.support.pool import Pool, completed
from tests.support.race import Race, outcome
from tests.support.servers import Served

Answer = Callable[..., tuple[int, str]]
ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "ops" / "docs" / "operations.md"


# What sets a thing, its keys on the command line, what its row then holds, and a heading that names a unit.
ROUND_TRIPS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "instance": ("set ci --pool builds", "ci", {"name": "ci", "pool": "builds"}, "max (units)"),
    "account": ("set ci --weight 2 --lock tree=3", "ci", {"name": "ci", "weight": 2.0}, "slots (jobs)"),
    "cohort": ("set gpus --label gpu", "gpus", {"name": "gpus", "labels": ["gpu"]}, "labels"),
    "quota": ("set ci --max 4", "ci", {"instance": "ci", "min_quota": 0, "max_quota": 4}, "max (units)"),
    "owner-quota": ("set ci ann 2.5", "ci ann", {"instance": "ci", "owner": "ann", "cost": 2.5}, "max (cost)"),
    "project-quota": ("set ci site 0", "ci site", {"instance": "ci", "project": "site", "cost": 0.0}, "max (cost)"),
    "pool-limit": ("set --budget 9 --max-concurrent 8", "", {"budget": {"used": 0.0, "most": 9.0}}, "max concurrent"),
    "lock": ("set ci tree 3", "ci tree", {"instance": "ci", "lock": "tree", "slots": 3.0}, "slots (jobs)"),
    "rate": ("set cli/opus --per-second 0.5", "cli/opus", {"resource": "cli/opus", "per_second": 0.5}, "per second"),
    "backpressure": ("set cli --delay 2", "cli", {"resource_class": "cli", "allowed": True, "delay": 2.0}, "delay (s)"),
    "meter": ("set plan --used 1 --limit 4", "plan", {"name": "plan", "used": 1.0, "percent": 25.0}, "percent"),
    "queue-limit": ("set a/b..c 5", "a/b..c", {"label": "a/b..c", "max_queued": 5}, "max queued (jobs)"),
    "instance-queue-limit": ("set 7 --instance ci", "--instance ci", {"max_queued": 7}, "max queued (jobs)"),
    "ceiling": (
        "set --instance ci --label a/b --default-timeout 15m --max-timeout 2h",
        "--instance ci --label a/b",
        {"instance": "ci", "label": "a/b", "default_timeout": 900.0, "max_timeout": 7200.0, "max_queue_age": None},
        "max queue age (s)",
    ),
    "submit-rule": (
        "set --instance ci --command make --command sh --property-key os --owner-cost 10 --owner-penalty 30",
        "--instance ci",
        {"commands": ["make", "sh"], "property_keys": ["os"], "owner_cost": 10.0, "owner_penalty": 30},
        "owner cost (cost)",
    ),
    "report-ceiling": ("set ci tokens 1000.5", "ci tokens", {"amount": 1000.5}, "amount (of the unit)"),
    "window": (
        "set night --start 20 --end 8 --type random --type nightly --meter plan --usage-threshold 80",
        "night",
        {"name": "night", "start": 20, "types": ["random", "nightly"], "usage_threshold": 80.0},
        "threshold (%)",
    ),
    "class": ("set nightly -5", "nightly", {"name": "nightly", "points": -5, "priority": 105}, "limit (jobs)"),
    "class-limit": ("set random 2", "random", {"name": "random", "jobs": 2.0}, "limit (jobs)"),
    "class-reserve": ("set random 2", "random", {"name": "random", "jobs": 2, "running": 0.0}, "kept (jobs)"),
    "service-level": ("set slow --points -10 --timeout 2h", "slow", {"timeout_seconds": 7200.0}, "timeout (s)"),
    "pause": ("set label a/b", "label a/b", {"kind": "label", "name": "a/b", "reason": "why"}, "since"),
    "scheduling": ("set --starvation 30m", "", {"starvation_seconds": 1800.0, "high": 40}, "starvation (s)"),
}
FILE = """
[fair_share]
budget = 100.0

[[cohorts]]
name = "gpus"
labels = ["gpu"]

[[queues]]
label = "nightly"
max_queued = 5

[[rates]]
resource = "cli/opus"
per_second = 2.0

[[rates]]
resource = "api-*"
per_second = 2.0

[[windows]]
name = "night"
start = 20
end = 8

[[instances]]
name = "ci"
pool = "builds"
locks = { tree = 2, "customer-*" = 3 }
quotas = { gpus = { min = 1 } }
"""


# What the file declares, and the key of it that a refusal names.
DECLARED = [
    ("pool-limit set --budget 5", "[fair_share]"),
    ("cohort set gpus --label other", "[[cohorts]]"),
    ("cohort rm gpus", "[[cohorts]]"),
    ("queue-limit set nightly 6", "[[queues]]"),
    ("queue-limit rm nightly", "[[queues]]"),
    ("rate set cli/opus --per-second 1", "[[rates]]"),
    ("rate rm cli/opus", "[[rates]]"),
    ("rule window set night --start 1 --end 2", "[[windows]]"),
    ("rule window rm night", "[[windows]]"),
    ("instance set ci --pool other", "[[instances]]"),
    ("instance set ci --weight 3", "[[instances]]"),
    ("instance set ci --no-share", "[[instances]]"),
    ("lock set ci tree 9", "[[instances]]"),
    ("lock rm ci customer-*", "[[instances]]"),
    ("rate set api-* --per-second 1", "[[rates]]"),
    ("quota set ci --cohort gpus --max 3", "[[instances]]"),
    ("quota rm ci --cohort gpus", "[[instances]]"),
]


# What it says nothing of.
FREE = [
    "pool-limit set --max-concurrent 5",
    "cohort set cpus --label cpu",
    "queue-limit set daily 6",
    "rate set cli --per-second 1",
    "rule window set day --start 8 --end 20",
    "instance set qa --pool other --weight 2",
    "lock set ci forest 9",
    "instance drain ci",
    "quota set ci --max 3",
]


def configured(pool: Pool, tmp_path: Path, written: str) -> None:
    """An assigner process starts with this file."""
    path = tmp_path / "leasehold.toml"
    path.write_text(written)
    declare(pool.database, loading.load(path, PoolSettings, {}))


def acts(pool: Pool) -> list[Any]:
    return pool.rows("SELECT action, actor, details FROM audit WHERE action <> 'token.create' ORDER BY id")


def missing(each: Resource[Any], routes: dict[str, set[str]], commands: click.Group | None, document: str) -> list[str]:
    """Where somebody who adds a resource still has to write something."""
    item = "/v1" + each.item_path
    found = [] if "get" in routes.get(f"/v1/{each.plural}", set()) else [f"GET /v1/{each.plural}: assigner/api/"]
    found += [
        f"{method} {item}: assigner/api/resources.py"
        for method in ("get", each.set.method.lower(), "delete")
        if method not in routes.get(item, set())
    ]
    known = set() if commands is None else set(commands.commands)
    found += [
        f"leasehold {each.words} {command}: assigner/cli/operations.py"
        for command in ("list", "show", "set", "rm")
        if each.words and command not in known
    ]
    row = rf"^\| `{re.escape(each.words or 'instance')}` \|.*`/v1/{re.escape(each.plural)}`"
    found += [] if re.search(row, document, re.MULTILINE) else [f"a row for `{each.words}`: {DOCUMENT.name}"]
    found += [] if each.name in ROUND_TRIPS else [f"a round trip of {each.name}: tests/api/{Path(__file__).name}"]
    return found


def test_every_resource_has_its_routes_its_commands_its_document_and_its_test(served: Served) -> None:
    paths = served.described()["paths"]
    routes = {path: set(ways) for path, ways in paths.items()}
    for each in RESOURCES:
        commands: click.Command | None = cli
        for word in each.words.split():
            commands = (
                commands.get_command(click.Context(commands), word) if isinstance(commands, click.Group) else None
            )
        assert isinstance(commands, click.Group), each.words
        assert missing(each, routes, commands, DOCUMENT.read_text()) == []
    assert len(missing(resource("rate"), {}, None, "")) == 9


def test_whatever_has_a_unit_says_so_in_the_description_of_the_routes(served: Served) -> None:
    schemas = served.described()["components"]["schemas"]
    for each in RESOURCES:
        for model in {each.row.__name__, each.set.model.__name__}:
            for name, field in schemas[model]["properties"].items():
                kinds = {part.get("type") for part in [field, *field.get("anyOf", ())]}
                if kinds & {"number", "integer"}:
                    assert field.get("description"), f"{model}.{name} does not say what it is, and in which unit"
    assert schemas["Rate"]["properties"]["per_second"]["unit"] == "jobs per second"
    assert "(jobs per second)" in schemas["Rate"]["properties"]["per_second"]["description"]


def test_what_is_set_is_shown_and_removed_by_its_name(good: Callable[[str], str], operate: Answer, pool: Pool) -> None:
    for declared in RESOURCES:
        name, before = declared.words, len(acts(pool))
        line, keys, expected, heading = ROUND_TRIPS[declared.name]
        if not name:
            continue
        good(f"{name} {line} --reason why")
        listed = json.loads(good(f"{name} list --json"))
        rows = listed if isinstance(listed, list) else [listed]
        assert any(expected.items() <= row.items() for row in rows), rows
        shown = json.loads(good(f"{name} show {keys} --json"))
        assert expected.items() <= shown.items()
        assert heading in good(f"{name} list")
        assert heading in good(f"{name} show {keys}")
        code, said = operate(*name.split(), "rm", *keys.split(), "--reason", "over")
        if isinstance(declared.remove, Irremovable):
            assert (code, said) == (2, f"error: {declared.name}: cannot be removed: {declared.remove.reason}\n")
        else:
            assert code == 0, said
            code, said = operate(*name.split(), "rm", *keys.split())
            assert (code, said.startswith("error: ")) == (2, True)
        (token,) = pool.rows("SELECT id FROM tokens")
        done = acts(pool)[before:]
        assert {row.actor for row in done} == {f"operator:{token.id}"}
        assert done[0].details["reason"] == "why"
        if not isinstance(declared.remove, Irremovable):
            assert done[-1].details["reason"] == "over"


def test_what_the_configuration_declares_is_changed_there_alone(
    good: Callable[[str], str], operate: Answer, operator: httpx.Client, pool: Pool, tmp_path: Path
) -> None:
    configured(pool, tmp_path, FILE)
    before = len(acts(pool))
    for line, place in DECLARED:
        code, said = operate(*line.split())
        assert (code, said.count("\n")) == (2, 1), f"{line}: {said}"
        assert f"is declared in the configuration: change {place} there" in said
    assert len(acts(pool)) == before
    refused = operator.put("/v1/rates/cli/opus", json={"per_second": 1})
    assert (refused.status_code, refused.json()["code"]) == (409, "declared")
    # A cycle that draws tokens of such a rate would fail, or one that divides by such a weight.
    assert operator.put("/v1/rates/tiny", json={"per_second": 5e-324}).status_code == 422
    assert operator.patch("/v1/instances/tiny", json={"weight": 5e-324}).status_code in (400, 422)
    assert operator.put("/v1/instances/ci", json={"pool": None}).status_code == 409
    for line in FREE:
        good(line)
    configured(pool, tmp_path, "")
    for line in (
        "rate set cli/opus --per-second 1",
        "quota rm ci --cohort gpus",
        "cohort rm gpus",
        "instance set ci --no-pool",
    ):
        good(line)


def test_windows_of_operators_outlast_the_configuration(good: Callable[[str], str], pool: Pool, tmp_path: Path) -> None:
    good("rule window set day --start 8 --end 20")
    configured(pool, tmp_path, FILE)
    assert [each.settings.name for each in pool.database.run(time_windows.read).windows] == ["day", "night"]
    configured(pool, tmp_path, "")
    assert [each.settings.name for each in pool.database.run(time_windows.read).windows] == ["day"]


def test_the_limits_of_the_default_instance_may_be_set_before_its_first_job(good: Callable[[str], str]) -> None:
    assert good("limit owner set default bob 5") == "owner bob of default may cost 5\n"
    assert good("lock set default tree 2") == "tree of default may be held by 2 jobs at once\n"


def test_the_list_of_instances_is_whole_however_many_there_are(good: Callable[[str], str], pool: Pool) -> None:
    pool.change("INSERT INTO instances (name) SELECT 'i' || lpad(n::text, 4, '0') FROM generate_series(1, 1500) n")
    names = [each["name"] for each in json.loads(good("instance list --json"))]
    assert names == sorted(names)
    assert len(names) == 1500


def submitted(pool: Pool, **fields: Any) -> str:
    (job,) = pool.submit(**JobRequest(command=["true"], **fields).normal())
    return job


def test_a_class_is_removed_only_when_no_job_has_it(good: Callable[[str], str], operate: Answer, pool: Pool) -> None:
    good("class set nightly 5")
    good("rule service-level set slow --points 5 --timeout 60")
    jobs = [submitted(pool, job_class="nightly"), submitted(pool, service_level="slow", job_class="background")]
    bot = pool.bot(capacity=2)
    for _ in ("queued", "leased"):
        for name, noun in (("class rm nightly", "class"), ("rule service-level rm slow", "service level")):
            code, said = operate(*name.split())
            assert (code, said) == (2, f"error: {noun} '{name.split()[-1]}' is used by unfinished jobs\n")
        assert operate("class", "rm", "background")[0] == 2
        pool.assigner().run_once()
    assert {pool.job(job).state for job in jobs} == {"leased"}
    bot.sync(*(completed(work) for work in bot.take()))
    good("class rm nightly")
    good("rule service-level rm slow")
    assert "nightly" not in good("class list")
    with pytest.raises(BadInput, match="there is no job class 'nightly'"):
        submitted(pool, job_class="nightly")


def remove_class(pool: Pool) -> None:
    pool.database.run(lambda c: priority_classes.remove_classes(c, ["random"], actor="test"))


def test_a_class_is_not_removed_under_a_submit_that_is_not_committed_yet(pool: Pool, race: Race) -> None:
    with race.first() as ahead:
        submitted(ahead, job_class="random")
        removed = race.second(partial(remove_class, pool), behind=ahead)
        ahead.commit()
        with pytest.raises(Conflict, match="is used by unfinished jobs"):
            outcome(removed)
    assert pool.row("SELECT count(*) AS n FROM job_classes WHERE name = 'random'").n == 1


def test_a_submit_behind_the_removal_of_its_class_is_refused(pool: Pool, race: Race) -> None:
    with race.first() as ahead:
        remove_class(ahead)
        late = race.second(lambda: submitted(pool, job_class="random"), behind=ahead)
        ahead.commit()
        with pytest.raises(BadInput, match="there is no job class 'random'"):
            outcome(late)
    assert pool.rows("SELECT FROM jobs") == []


def test_a_lock_that_nobody_has_set_has_one_slot(good: Callable[[str], str], operate: Answer, pool: Pool) -> None:
    good("lock set default tree 2")
    jobs = [submitted(pool, locks=["tree"]) for _ in range(3)]
    pool.bot(capacity=5)
    pool.assigner().run_once()
    assert sorted(pool.job(job).state for job in jobs) == ["leased", "leased", "queued"]
    assert good("lock rm default tree") == "what was set for tree of default is removed\n"
    (lock,) = json.loads(good("lock list --json"))
    assert (lock["used"], lock["slots"]) == (2, 1)
    assert operate("lock", "rm", "default", "tree")[0] == 2
    good("lock set default t* 3")
    good("rate set api-* --per-second 5 --burst 2")
    assert [lock["lock"] for lock in json.loads(good("lock list --json"))] == ["t*"], "a pattern stands for its locks"
    lock = json.loads(good("lock show default tree --json"))
    assert (lock["slots"], lock["pattern"]) == (3, "t*")
    assert json.loads(good("lock show default t* --json"))["keys"] == 1
    assert json.loads(good("rate list --json")) == [json.loads(good("rate show api-* --json"))]
    for wrong in (["lock", "set", "default", "*", "2"], ["rate", "set", "a*b", "--per-second", "1"]):
        code, said = operate(*wrong)
        assert (code, said.count("\n")) == (2, 1), said
    good("lock rm default t*")
    good("rate rm api-*")


def test_a_window_that_an_operator_makes_closes_the_pool_to_other_classes(pool: Pool) -> None:
    job = submitted(pool, job_class="random")
    terms = WindowTerms(start=0, end=24, types=("critical",))
    pool.database.run(lambda c: time_windows.put_windows(c, {"all-day": terms}, actor="test"))
    pool.bot()
    pool.assigner().run_once()
    assert pool.job(job).state == "queued"
    pool.database.run(lambda c: time_windows.remove_windows(c, ["all-day"], actor="test"))
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"
    assert pool.database.run(lambda c: c.execute(Statement("SELECT count(*) FROM windows")).scalar_one()) == 0


# Instances that are not there.


MISSPELT = [
    each for each in RESOURCES if each.words and any(part == "ci" for part in ROUND_TRIPS[each.name][0].split())
]


def misspelt(each: Resource[Any]) -> list[str]:
    return [*each.words.split(), *("visoin" if part == "ci" else part for part in ROUND_TRIPS[each.name][0].split())]


def test_nothing_is_set_for_an_instance_that_is_not_there(
    good: Callable[[str], str], operate: Answer, operator: httpx.Client, pool: Pool
) -> None:
    good("instance set vision")
    before = acts(pool)
    wanted = [each for each in MISSPELT if each.name != "instance"]
    assert {each.name for each in wanted} >= {"quota", "owner-quota", "lock", "ceiling", "report-ceiling"}
    for each in wanted:
        code, said = operate(*misspelt(each))
        assert (code, said.count("\n")) == (2, 1), f"{each.name}: {said}"
        assert "there is no instance 'visoin'; did you mean 'vision'? (--create, over HTTP create=true, makes" in said
    for line in ("instance show visoin", "instance drain visoin", "instance undrain visoin"):
        assert "there is no instance 'visoin'; did you mean 'vision'?" in operate(*line.split())[1]
    for path in ("quotas/default/visoin", "instances/visoin/account"):
        assert operator.put(f"/v1/{path}", json={}).status_code == 404
    assert operator.post("/v1/quotas/default/visoin/effect", json={"min": 1}).status_code == 404
    assert acts(pool) == before
    assert [row.name for row in pool.rows("SELECT name FROM instances")] == ["vision"]
    assert pool.rows("SELECT FROM counters WHERE name LIKE '%visoin%'") == []


def test_an_instance_is_made_by_its_own_command_or_where_it_is_asked_for(
    good: Callable[[str], str], operator: httpx.Client, pool: Pool
) -> None:
    assert good("instance set vision") == "instance vision is there\n"
    good("instance set vision")
    for number, each in enumerate(each for each in MISSPELT if each.name != "instance"):
        line = " ".join(misspelt(each)).replace("visoin", f"new-{number}")
        good(f"{line} --create --reason why")
    assert operator.put("/v1/quotas/default/newer?create=true", json={}).status_code == 200
    good("quota set default --max 3")
    made = [row for row in acts(pool) if row.action == "instance.set"]
    assert len(made) == number + 3
    assert {row.details["reason"] for row in made[1:-1]} == {"why"}


def test_a_program_of_an_operator_pauses_and_resumes(operate: Answer, pool: Pool, served: Served) -> None:
    with Client(served.url, served.token("operator"), chance=pool.chance) as client:
        client.operators.pause("label", "a/b.c d", reason="full")
        client.operators.pause("task", "shop.charge", instance="default")
        found = [(each["kind"], each["name"], each["instance"], each["reason"]) for each in client.operators.pauses()]
        assert found == [("label", "a/b.c d", "*", "full"), ("task", "shop.charge", "default", "")]
        client.operators.resume("label", "a/b.c d")
    for wrong in ("set job 7", "set schedule nightly", "set label a --instance nobody", "rm label a", "set label"):
        code, said = operate("pause", *wrong.split())
        assert (code, "error: " in said or "Error: " in said) == (2, True), said
