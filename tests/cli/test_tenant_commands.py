"""The operator's command line for cohorts, quotas and instances, run in the test's own process."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import Pool
from tests.support.tenancy import Tenancy

Answer = Callable[..., Any]

# What is refused, and how the line begins that says so.
WRONG = [
    ("quota set team-a", "give at least one of: --min, --max"),
    ("quota set team-a --min -1", "--min: must be greater than or equal to 0"),
    ("quota set team-a --create --min 1 --max 0", "--min: must not be more than the maximum of 0"),
    ("quota set team-a --max many", "--max: 'many' is neither a whole number nor 'none'"),
    ("quota set team-a --max 9999999999", "--max: must be less than or equal to 1000000000"),
    ("quota set Team --min 1", "instance: 'Team' is not a name"),
    ("quota set team-a --create --min 1 --cohort absent", "cohort: no cohort 'absent'"),
    ("quota rm team-a --cohort absent", "quota: 'team-a' has none in cohort 'absent'"),
    ("cohort set Linux", "name: 'Linux' is not a name"),
    ("cohort set linux --label linux --no-labels", "give at most one of: --label, --no-labels"),
    ("cohort set linux --position -1", "--position: must be greater than or equal to 0"),
    ("cohort set linux --reclaim-min some", "--reclaim-min: must be one of lower_priority_only, any"),
    (f"cohort set linux --label {'x' * 65}", "--label: is 65 bytes long, at most 64 are allowed"),
    ("cohort set default --label linux", "--label: the default cohort has no labels and comes last"),
    ("cohort set default --position 1", "--position: the default cohort has no labels and comes last"),
    ("cohort rm default", "name: the default cohort cannot be removed"),
    ("cohort rm absent", "cohort: no cohort 'absent'"),
    ("instance set team-a --pool a --no-pool", "give at most one of: --pool, --no-pool"),
    ("instance set team-a --weight -1", "--weight: must be greater than or equal to 0"),
    ("instance set team-a --weight heavy", "--weight: 'heavy' is neither a number nor 'none'"),
    ("instance set team-a --budget inf", "--budget: must be a finite number"),
    ("instance set team-a --slots 1.5", "--slots: '1.5' is neither a whole number nor 'none'"),
    ("instance set team-a --lock tree", "--lock: 'tree' is not NAME=SLOTS"),
    (
        "instance set team-a --lock tree=2 --no-share",
        "share: is false, which means nothing together with a part of a share",
    ),
    ("instance limit-all", "give at least one of: --max-concurrent, --budget"),
    ("instance set team-a --pool Builds", "--pool: 'Builds' is not a name"),
    ("instance set Team --no-pool", "name: 'Team' is not a name"),
]


@pytest.fixture
def good(operate: Answer) -> Answer:
    def call(*arguments: str) -> str:
        code, said = operate(*arguments)
        assert code == 0, said
        return str(said)

    return call


@pytest.fixture
def refused(operate: Answer) -> Answer:
    def call(*arguments: str) -> str:
        code, said = operate(*arguments)
        assert code == 2, said
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return str(said).removeprefix("error: ").rstrip()

    return call


def listed(good: Answer, kind: str) -> dict[str, dict[str, Any]]:
    return {each.get("name") or each["instance"]: each for each in json.loads(good(kind, "list", "--json"))}


def test_what_is_not_given_of_a_quota_stays(good: Answer, pool: Pool) -> None:
    good("quota", "set", "team-a", "--min", "2", "--create")
    said = good("quota", "set", "team-a", "--max", "5", "--reason", "ask")
    assert said == "team-a has a minimum of 2 and a maximum of 5\n"
    found = listed(good, "quota")["team-a"]
    assert (found["min_quota"], found["max_quota"], found["usage"]) == (2, 5, 0)
    told = json.loads(good("quota", "set", "team-a", "--max", "none", "--json"))
    assert told == {"cohort": "default", "instance": "team-a", "min": 2, "max": None}
    assert "team-a" in good("quota", "list")
    details = pool.row("SELECT details, actor FROM audit WHERE action = 'quota.set' ORDER BY id OFFSET 1 LIMIT 1")
    (token,) = pool.rows("SELECT id FROM tokens")
    assert (details.actor, details.details["reason"]) == (f"operator:{token.id}", "ask")
    assert details.details["before"] == {"min": 2, "max": None}


def test_a_removed_quota_is_gone_and_cannot_be_removed_twice(good: Answer, refused: Answer, pool: Pool) -> None:
    good("quota", "set", "team-a", "--max", "0", "--create")
    pool.submit(instance="team-a")
    pool.bot()
    pool.assigner().run_once()
    assert pool.rows("SELECT FROM live") == []
    assert good("quota", "rm", "team-a") == "team-a has no quota in default\n"
    pool.assigner().run_once()
    assert len(pool.rows("SELECT FROM live")) == 1
    assert refused("quota", "rm", "team-a") == "quota: 'team-a' has none in cohort 'default'"
    done = [row.action for row in pool.rows("SELECT action FROM audit ORDER BY id")][1:]
    assert done == ["instance.set", "quota.set", "quota.rm"]


def test_wrong_input_is_refused_in_one_line_and_writes_nothing(refused: Answer, pool: Pool) -> None:
    for arguments, said in WRONG:
        assert refused(*arguments.split()).startswith(said), arguments
    for table, rows in {"audit": 1, "quotas": 0, "cohorts": 1, "instances": 0}.items():
        assert pool.row(f"SELECT count(*) AS n FROM {table}").n == rows, table


def test_a_reason_that_is_too_long_is_refused(refused: Answer) -> None:
    for command in (["cohort", "rm", "x"], ["quota", "rm", "x"], ["instance", "set", "x", "--no-pool"]):
        assert refused(*command, "--reason", "x" * 501).startswith("--reason: is 501 bytes long")


def test_a_cohort_keeps_what_is_not_given_and_can_lose_its_labels(good: Answer, pool: Pool) -> None:
    pool.submit(label="arm")
    good("cohort", "set", "linux", "--label", "linux", "--label", "arm", "--position", "3")
    good("cohort", "set", "linux", "--reclaim-min", "any")
    found = listed(good, "cohort")
    assert list(found) == ["linux", "default"]
    assert {key: found["linux"][key] for key in ("labels", "position", "reclaim_min")} == {
        "labels": ["arm", "linux"], "position": 3, "reclaim_min": "any",
    }  # fmt: skip
    assert pool.row("SELECT cohort FROM jobs").cohort == found["linux"]["id"]
    assert "arm linux" in good("cohort", "list")
    good("cohort", "set", "linux", "--no-labels")
    assert listed(good, "cohort")["linux"]["labels"] == []
    assert pool.row("SELECT cohort FROM jobs").cohort == 0
    assert json.loads(good("cohort", "rm", "linux", "--json")) == {"name": "linux", "removed": True}
    assert list(listed(good, "cohort")) == ["default"]


def test_a_cohort_that_is_used_is_not_removed(good: Answer, refused: Answer, pool: Pool) -> None:
    good("cohort", "set", "gpus", "--label", "gpu")
    Tenancy(pool).quota("team-a", maximum=1, cohort="gpus")
    assert refused("cohort", "rm", "gpus") == "cohort 'gpus' still has quotas"
    good("quota", "rm", "team-a", "--cohort", "gpus")
    pool.submit(label="gpu")
    pool.bot(labels=["gpu"])
    pool.assigner().run_once()
    assert refused("cohort", "rm", "gpus") == "cohort 'gpus' still has live leases"
    assert pool.row("SELECT c.name FROM bots b JOIN cohorts c ON c.id = b.cohort").name == "gpus"


def test_an_instance_is_of_one_pool_only_and_can_leave_it(good: Answer) -> None:
    assert good("instance", "set", "team-a", "--pool", "builds") == "team-a is of pool builds\n"
    good("instance", "set", "team-a", "--pool", "tests")
    found = json.loads(good("instance", "list", "--json"))
    assert [(each["name"], each["pool"]) for each in found if each["name"] == "team-a"] == [("team-a", "tests")]
    assert "tests" in good("instance", "list")
    assert good("instance", "set", "team-a", "--no-pool") == "team-a is of no pool\n"
    assert listed(good, "instance")["team-a"]["pool"] is None


def test_the_share_of_an_instance_is_set_shown_and_taken_away(good: Answer, refused: Answer) -> None:
    share = ["--weight", "3", "--budget", "10.5", "--max-concurrent", "4", "--lock", "tree=2"]
    assert json.loads(good("instance", "set", "team-a", *share, "--json")) == {
        **{"name": "team-a", "credit_weight": 3.0, "budget": 10.5, "max_concurrent": 4, "locks": {"tree": 2}}
    }
    said = good("instance", "set", "team-a", "--budget", "none", "--unit", "tokens")
    assert said == "the share of team-a is set\n"
    (row,) = [one for one in json.loads(good("instance", "list", "--json")) if one["name"] == "team-a"]
    shown = {"credit_weight": 3.0, "unit": "tokens", "budget": None, "max_concurrent": 4.0}
    assert {key: row[key] for key in shown} == shown
    assert "weight" in good("instance", "list").splitlines()[0]
    good("instance", "limit-all", "--budget", "100", "--max-concurrent", "none")
    assert good("instance", "set", "team-a", "--no-share") == "team-a has no share\n"
    assert "'team-a' has no share of the pool" in refused("instance", "set", "team-a", "--no-share")
