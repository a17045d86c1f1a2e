"""The operators' command line: classes and levels, cohorts, quotas and instances, rates and advice; what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from leasehold.errors import BadInput

from assigner.admission.ordering import OrderingSettings
from assigner.config import loading
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from schema.accounting import rates
from schema.requests import JobRequest
from tests.support.pool import Pool, completed
from tests.support.tenancy import Tenancy

Good = Callable[[str], str]
Operate = Callable[..., tuple[int, str]]
#: What operators have changed, which a refused command must leave as it is.
STORED = """
SELECT (SELECT count(*) FROM audit) AS acts, (SELECT count(*) FROM quotas) AS quotas,
    (SELECT count(*) FROM cohorts) AS cohorts, (SELECT count(*) FROM instances) AS instances,
    (SELECT count(*) FROM counters) AS counters, (SELECT count(*) FROM usage_meters) AS meters,
    (SELECT array_agg(s.*::text ORDER BY s.name) FROM service_levels s) AS levels,
    (SELECT s::text FROM scheduling s) AS policy
"""


# What is refused, and what the one line says.
REFUSED = [
    ("class set nightly --pionts", "there is no option '--pionts'; did you mean '--points'?"),
    ("class set nightly -5 --pionts", "'--pionts' is more than this command takes"),
    ("class set --pionts -5", "there is no option '--pionts'"),
    ("class set -x 5", "there is no option '-x'"),
    ("class set nightly 5 --points 5", "give at most one of: POINTS, --points"),
    ("class set nightly -1000", "POINTS: must be greater than or equal to -900"),
    ("class set nightly -5.5", "POINTS: '-5.5' is not a whole number"),
    ("class set nightly none", "POINTS: 'none' is not a whole number"),
    ("class set nightly", "POINTS: is missing"),
    ("limit owner set ci ann -1", "COST: must be greater than or equal to 0"),
    ("rule window set w --start 8 --end 9 --meter plan", "request: --usage-threshold goes with a meter: set both or"),
    ("rule window set w --start 8 --end 8", "--end: a window that ends as it starts is never open"),
    ("rule window set w --start 8 --end 9 --type Bad", "--type: 'Bad' is not a name"),
    ("rule service-level set slow --points 5 --timeout soon", "--timeout: 'soon' is not a duration, such as 90m"),
    ("queue-limit set nightly none", "MAX_QUEUED: 'none' is not a whole number"),
    ("limit instance-queue set 5 --instance nosuch", "instance: there is no instance 'nosuch'"),
    ("limit instance-queue set -1", "MAX_QUEUED: must be greater than or equal to 0"),
    ("limit instance-queue rm", "instance-queue-limit: there is no default"),
    ("limit ceiling set", "give at least one of: --default-timeout, --max-timeout, --max-queue-age"),
    ("limit ceiling set --max-timeout 0", "--max-timeout: must be greater than 0"),
    ("limit ceiling set --max-timeout 1min --default-timeout 1m1s", "--default-timeout: must be at most 60"),
    ("limit ceiling set --max-queue-age 1m --instance nosuch", "instance: there is no instance 'nosuch'"),
    ("limit ceiling rm --label quick", "ceiling: label:quick has none"),
    ("rule submit set --owner-penalty 5", "--owner-penalty: means nothing without --owner-cost"),
    ("rule submit set --owner-cost -1", "--owner-cost: must be greater than or equal to 0"),
    ("rule submit set --any-command --command sh", "give at most one of: --command, --any-command"),
    ("rule submit rm --instance default", "submit-rule: 'default' has none"),
    ("limit report set nosuch tokens 5", "instance: there is no instance 'nosuch'"),
    ("limit report set ci tokens -5", "AMOUNT: must be greater than or equal to 0"),
    ("limit report rm ci tokens", "report-ceiling: 'ci/tokens' is not set"),
    ("lock set ci Tree 1", "lock: 'Tree' is not a name"),
    ("quota show ci --cohort ..", "--cohort: '..' is not a name"),
    ("rule window show absent", "window: there is no 'absent'"),
    ("rule service-level set gold --points 50 --timeout 99999999999", "--timeout: must be less than or equal to"),
    *(
        (f"rule service-level set gold --points 50 --timeout {bad}", f"--timeout: '{bad}' is not a duration")
        for bad in ("-1", "-1h", "nan", "inf", "1e30")
    ),
    ("rule service-level set gold --points 50", "--timeout: is missing: there is no service level 'gold' yet"),
    ("rule service-level set gold --timeout 60", "--points: is missing: there is no service level 'gold' yet"),
    ("rule service-level set gold", "give at least one of: --points, --timeout"),
    ("scheduling set --starvation 0", "--starvation: must be greater than 0"),
    ("scheduling set --max-queue-size 0", "--max-queue-size: must be greater than 0"),
    ("scheduling set --max-queue-size 1e3", "--max-queue-size: '1e3' is neither a whole number nor 'none'"),
    ("limit class set nosuch 3", "class: there is no class 'nosuch'"),
    ("limit class set critical 1.5", "JOBS: '1.5' is neither a whole number nor 'none'"),
    ("limit class set critical -1", "JOBS: must be greater than or equal to 0"),
    ("limit class set critical -1", "JOBS: must be greater than or equal to 0"),
    ("limit reserve set critical 3", "JOBS: can be kept only of a limit: set one with `pool-limit set"),
    ("limit reserve set critical 0", "JOBS: must be greater than or equal to 1"),
    ("limit reserve set critical none", "JOBS: 'none' is not a whole number"),
    ("limit reserve set nosuch 3", "class: there is no class 'nosuch'"),
    ("limit reserve rm critical", "class: nothing is kept for 'critical'"),
    ("lock set tree 5", "SLOTS: is missing: leasehold lock set [OPTIONS] INSTANCE LOCK "),
    ("lock rm tree", "LOCK: is missing: leasehold lock rm [OPTIONS] INSTANCE LOCK"),
    ("instance pause default", "there is no command 'instance pause'; did you mean `leasehold pause set instance`?"),
    ("class set critical -2000", "POINTS: must be greater than or equal to -900"),
    ("limit owner set nosuch bob 5", "instance: there is no instance 'nosuch'"),
    ("limit owner set nosuch bob 5", "instance: there is no instance 'nosuch'"),
    ("limit project set nosuch site 5", "instance: there is no instance 'nosuch'"),
    ("lock set nosuch tree 5", "instance: there is no instance 'nosuch'"),
    ("limit owner set default bob -5", "COST: must be greater than or equal to 0"),
    ("limit owner set default bob 1e40", "COST: must be less than or equal to 1000000000000"),
    ("instance set ci --lock tree=1 --lock tree=2", "--lock: names 'tree' twice"),
    (
        "rule meter set plan --used 1 --limit 4 --resets-at 2020-01-01T00:00:00Z",
        "--resets-at: must be at most a day ago",
    ),
    ("rule meter forecast --class nosuch", "class: there is no job class 'nosuch'"),
    # Tenants
    ("quota set team-a", "give at least one of: --min, --max"),
    ("quota set team-a --min -1", "--min: must be greater than or equal to 0"),
    ("quota set team-a --create --min 1 --max 0", "--min: must not be more than the maximum of 0"),
    ("quota set team-a --create --min 1 --max 0 --plan", "--min: must not be more than the maximum of 0"),
    ("quota set team-a --plan", "give at least one of: --min, --max"),
    ("cohort set linux --plan", "there is no option '--plan'"),
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
    ("instance set team-a --lock tree=2 --no-share", "share: is false, which means nothing together with a part of a"),
    ("pool-limit set", "give at least one of: --max-concurrent, --budget"),
    ("instance set team-a --pool Builds", "--pool: 'Builds' is not a name"),
    ("instance set Team --no-pool", "name: 'Team' is not a name"),
    # Rates and advice
    ("rate set Claude --per-second 1", "resource: 'Claude' is not a name"),
    ("rate set claude/ --per-second 1", "resource: '' is not a name"),
    ("rate set claude --per-second 0", "--per-second: must be greater than or equal to 0.000000001"),
    ("rate set claude 5/sec", "RATE: '5/sec' is not a rate, such as 5/s, 300/min or 9000/h"),
    ("rate set claude 5 --burst 2", "RATE: '5' is not a rate"),
    ("rate rm claude foo", "'foo' is more than this command takes: leasehold rate rm [OPTIONS] CLASS[/MODEL]"),
    ("rate show claude 5/s", "'5/s' is more than this command takes"),
    ("rate set claude --per-second nan", "--per-second: must be a finite number"),
    ("rate set claude --per-second 1 --burst 0", "--burst: must be greater than or equal to 1"),
    ("rate rm claude", "rate: 'claude' has none"),
    ("rule backpressure set", "give exactly one of: --stop, --delay"),
    ("rule backpressure set --stop --delay 1", "give exactly one of: --stop, --delay"),
    ("rule backpressure set Claude --stop", "resource_class: 'Claude' is not a name"),
    ("rule backpressure set --delay 4000", "--delay: must be less than or equal to 3600"),
    ("rule backpressure rm", "backpressure: nothing is advised for all jobs"),
    # What holds for all classes
    ("scheduling set --high 70", "levels: must have critical < high < normal"),
    ("scheduling set", "give at least one of: --project-points"),
    ("class set Random 5", "name: 'Random' is not a name"),
    *((f"{it} --reason {'x' * 501}", "--reason: is 501 bytes long") for it in ("cohort rm x", "quota rm x")),
]


def test_a_plan_tells_whom_a_change_would_affect_and_changes_nothing(pool: Pool, good: Callable[[str], str]) -> None:
    good("quota set vision --create --min 1 --max 5")
    pool.submit(3, instance="vision")
    pool.bot(capacity=9)
    pool.assigner().run_once()
    told = good("quota set vision --min 0 --max 1 --plan")
    assert "in use above the maximum, units: nothing starts until they are given back" in told
    assert "vision would start nothing until 2 units are back" in told
    assert "1 instance would be affected; nothing was changed" in told
    assert good("quota list").split()[-4:] == ["3", "1", "5", "5"]
    assert "share that is due" in good("instance set vision --weight 2 --plan")
    assert json.loads(good("quota set vision --min 1 --plan --json"))["affected"] == []
    assert json.loads(good("instance list --json"))[0]["weight"] is None


def submitted(pool: Pool, **fields: Any) -> str:
    (job,) = pool.submit(**JobRequest(command=["true"], **fields).normal())
    return job


def test_what_is_wrong_is_refused_in_one_line_and_negative_numbers_are_arguments(operate: Operate, pool: Pool) -> None:
    before = pool.row(STORED)
    for line, said in REFUSED:
        code, told = operate(*line.split())
        assert (code, told.count("\n"), told.startswith("error: "), said in told) == (2, 1, True, True), (
            f"{line}: {told}"
        )
    assert pool.row(STORED) == before


def test_the_table_shows_both_directions_and_a_change_reaches_what_waits(good: Good, pool: Pool) -> None:
    shown = {
        each["name"]: (each["points"], each["priority"], each["level"])
        for each in json.loads(good("class list --json"))
    }
    assert shown["critical"] == (100, 0, "critical")
    assert shown["background"] == (10, 90, "low")
    assert "serious_project" in good("class list")
    job = submitted(pool, job_class="random")
    assert good("class set random 55") == "random has 55 points: priority 45; 1 waiting job changed\n"
    assert (pool.job(job).priority, pool.job(job).rank) == (45, 45)
    good("class set nightly 5")
    assert pool.job(submitted(pool, job_class="nightly")).priority == 95


def test_a_service_level_can_be_changed_and_shown(good: Good, pool: Pool) -> None:
    job = submitted(pool, service_level="economy")
    said = good("rule service-level set economy --points 30 --timeout 15m")
    assert said == "economy has 30 points: priority 70, timeout 900 s; 1 waiting job changed\n"
    assert (pool.job(job).priority, pool.job(job).timeout_seconds) == (70, 1800)
    shown = {each["name"]: each for each in json.loads(good("rule service-level list --json"))}
    assert shown["economy"]["timeout_seconds"] == 900
    assert "premium" in good("rule service-level list")
    assert good("rule service-level set premium --points 90").startswith(
        "premium has 90 points: priority 10, timeout 7200 s"
    )
    said = good("rule service-level set premium --timeout 1h")
    assert said.startswith("premium has 90 points: priority 10, timeout 3600 s")


def test_what_holds_for_all_classes_is_set_and_what_is_not_given_stays(good: Good, pool: Pool) -> None:
    good("scheduling set --starvation 30m --max-queue-size 5000 --high 30")
    shown = json.loads(good("scheduling show --json"))
    assert (shown["starvation_seconds"], shown["max_queue_size"]) == (1800, 5000)
    assert (shown["critical"], shown["high"], shown["normal"]) == (0, 30, 60)
    good("scheduling set --starvation none --max-queue-size none")
    shown = json.loads(good("scheduling show --json"))
    assert (shown["starvation_seconds"], shown["max_queue_size"], shown["high"]) == (None, None, 30)
    actions = {row.action for row in pool.rows("SELECT action FROM audit WHERE action <> 'token.create'")}
    assert actions == {"scheduling.set"}


def test_commands_of_a_thing_set_what_belongs_to_it_and_say_so(good: Good, operate: Operate) -> None:
    for line, said in (
        ("quota set team-a --max 0 --create", "team-a has a minimum of 0 and a maximum of 0"),
        ("limit owner set team-a ann 2", "owner ann of team-a may cost 2"),
        ("limit project set team-a site 0", "project site of team-a may cost 0"),
        ("limit project set team-a site none", "project site of team-a may cost any amount"),
        ("quota rm team-a", "team-a has no quota in default"),
        ("instance set team-a --pool builds", "team-a is of pool builds"),
        ("instance set team-a --no-pool", "team-a is of no pool"),
        (
            "instance set team-a --weight 3 --budget 10.5 --lock tree=2",
            "the share of team-a is set: budget 10.5, weight 3, locks tree 2",
        ),
        ("instance set team-a --budget none --unit tokens", "the share of team-a is set: budget none, unit tokens"),
        ("rate set api 300/min", "api starts 5 jobs per second, 1 at once"),
        ("pause set task:mail", "task mail is paused; no queued job and no schedule has this task now"),
        ("pause rm task:mail", "task mail is resumed"),
        ("lock set team-a tree --slots 3", "tree of team-a may be held by 3 jobs at once"),
        (
            "rate set claude_cli/opus --per-second 0.5 --burst 3",
            "claude_cli/opus starts 0.5 jobs per second, 3 at once",
        ),
        ("rule backpressure set --stop --for 60", "assigners start no jobs of any class"),
        ("rule backpressure set codex --delay 2", "assigners wait 2 s after a start of codex"),
    ):
        assert good(line) == f"{said}\n"
    share = {"pool": None, "weight": 3.0, "unit": "tokens", "budget": None}
    assert share.items() <= listed(good, "instance")["team-a"].items()
    advised = [(each["resource_class"], each["allowed"]) for each in json.loads(good("rule backpressure list --json"))]
    assert advised == [(None, False), ("codex", True)]
    assert good("rule backpressure rm") == "nothing is advised for all jobs\n"
    assert good("instance set team-a --no-share") == "team-a has no share\n"
    assert "'team-a' has no share of the pool" in operate("instance", "set", "team-a", "--no-share")[1]
    assert operate("quota", "rm", "team-a") == (2, "error: quota: 'team-a' has none in cohort 'default'\n")


def test_a_class_that_is_limited_leaves_room_for_the_others(good: Good, pool: Pool) -> None:
    good("limit class set background 2")
    found = {each["name"]: each["jobs"] for each in json.loads(good("class list --json"))}
    assert (found["background"], found["critical"]) == (2, None)
    line = next(each for each in good("class list").splitlines() if each.startswith("background"))
    assert line.split()[-2:] == ["0", "2"]
    for _ in range(4):
        submitted(pool, job_class="background")
    pool.bot(capacity=3)
    pool.assigner().run_once()
    assert pool.row("SELECT count(*) AS jobs FROM live").jobs == 2
    urgent = submitted(pool, job_class="critical")
    pool.assigner().run_once()
    assert pool.job(urgent).state == "leased"


def test_what_was_estimated_is_compared_with_what_was(good: Good, pool: Pool) -> None:
    for estimate in (10, 20, 40):
        submitted(pool, job_class="random", estimated_seconds=estimate, deadline_seconds=5 * estimate)
    bot = pool.bot(capacity=3)
    pool.assigner().run_once()
    bot.sync(*(completed(lease) for lease in bot.take()))
    pool.change("UPDATE jobs SET started_at = created_at, finished_at = created_at + interval '60 seconds'")
    (shown,) = json.loads(good("class report --json"))
    assert shown == {"name": "random", "jobs": 3, "estimated": 3, "ratio": 3.0, "dated": 3, "late": 1}
    assert "random" in good("class report")


# Cohorts, quotas and instances


def listed(good: Good, kind: str) -> dict[str, dict[str, Any]]:
    return {each.get("name") or each["instance"]: each for each in json.loads(good(f"{kind} list --json"))}


def test_what_is_not_given_of_a_quota_stays(good: Good, pool: Pool) -> None:
    good("quota set team-a --min 2 --create")
    said = good("quota set team-a --max 5 --reason ask")
    assert said == "team-a has a minimum of 2 and a maximum of 5\n"
    found = listed(good, "quota")["team-a"]
    assert (found["min_quota"], found["max_quota"], found["usage"]) == (2, 5, 0)
    told = json.loads(good("quota set team-a --max none --json"))
    assert told == {"cohort": "default", "instance": "team-a", "min": 2, "max": None}
    assert "team-a" in good("quota list")
    details = pool.row("SELECT details, actor FROM audit WHERE action = 'quota.set' ORDER BY id OFFSET 1 LIMIT 1")
    (token,) = pool.rows("SELECT id FROM tokens")
    assert (details.actor, details.details["reason"]) == (f"operator:{token.id}", "ask")
    assert details.details["before"] == {"min": 2, "max": None}


def test_a_cohort_keeps_what_is_not_given_and_can_lose_its_labels(good: Good, pool: Pool) -> None:
    pool.submit(label="arm")
    good("cohort set linux --label linux --label arm --position 3")
    good("cohort set linux --reclaim-min any")
    found = listed(good, "cohort")
    assert list(found) == ["linux", "default"]
    assert {key: found["linux"][key] for key in ("labels", "position", "reclaim_min")} == {
        "labels": ["arm", "linux"], "position": 3, "reclaim_min": "any",
    }  # fmt: skip
    assert pool.row("SELECT cohort FROM jobs").cohort == found["linux"]["id"]
    assert "arm linux" in good("cohort list")
    good("cohort set linux --no-labels")
    assert listed(good, "cohort")["linux"]["labels"] == []
    assert pool.row("SELECT cohort FROM jobs").cohort == 0
    assert json.loads(good("cohort rm linux --json")) == {"name": "linux", "removed": True}
    assert list(listed(good, "cohort")) == ["default"]


def test_a_cohort_that_is_used_is_not_removed(good: Good, operate: Operate, pool: Pool) -> None:
    good("cohort set gpus --label gpu")
    Tenancy(pool).quota("team-a", maximum=1, cohort="gpus")
    assert operate("cohort", "rm", "gpus") == (2, "error: cohort 'gpus' still has quotas\n")
    good("quota rm team-a --cohort gpus")
    pool.submit(label="gpu")
    pool.bot(labels=["gpu"])
    pool.assigner().run_once()
    assert operate("cohort", "rm", "gpus") == (2, "error: cohort 'gpus' still has live leases\n")
    assert pool.row("SELECT c.name FROM bots b JOIN cohorts c ON c.id = b.cohort").name == "gpus"


# Rates and advice, by commands and in the configuration


CHECKERS = """
class Limits:
    def is_rate_limited(self, resource_class, model):
        return True

class Wrong:
    def is_rate_limited(self):
        return True

class Pressure:
    def can_start(self):
        return False, 0.0
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package that offers checkers."""
    module = f"checkers_{uuid4().hex}"
    found = tmp_path / f"{module}-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(
        f"[leasehold.rate_limit_checkers]\nours = {module}:Limits\nwrong = {module}:Wrong\n"
        f"[leasehold.backpressure_checkers]\nours = {module}:Pressure\n"
    )
    (tmp_path / f"{module}.py").write_text(CHECKERS)
    monkeypatch.syspath_prepend(tmp_path)


def loaded(tmp_path: Path, text: str) -> PoolSettings:
    path = tmp_path / "leasehold.toml"
    path.write_text(text)
    return loading.load(path, PoolSettings, {})


def test_the_configuration_names_rates_and_unset_takes_one_away(pool: Pool, tmp_path: Path) -> None:
    declare(pool.database, loaded(tmp_path, '[[rates]]\nresource = "a/b"\nper_second = 2.0\nburst = 4\n'))
    declare(pool.database, loaded(tmp_path, '[[rates]]\nresource = "a/b"\nper_second = 2.0\nburst = 4\n'))
    (found,) = pool.database.run(rates.rates)
    assert (found.resource, found.per_second, found.burst) == ("a/b", 2, 4)
    declare(pool.database, loaded(tmp_path, ""))
    assert len(pool.database.run(rates.rates)) == 1, "what is not named stays"
    declare(pool.database, loaded(tmp_path, '[[rates]]\nresource = "a/b"\n'))
    assert pool.database.run(rates.rates) == []
    assert [row.actor for row in pool.rows("SELECT actor FROM audit")] == ["config", "config"]


def test_the_configuration_says_how_graphs_share(tmp_path: Path) -> None:
    found = loaded(tmp_path, '[ordering]\nkind = "graph"\nmax_concurrent = 8\n').ordering
    assert found == OrderingSettings(kind="graph", max_concurrent=8, overage_penalty=20.0, max_per_graph=2.0)
    with pytest.raises(BadInput, match=r"ordering\.kind: 'graphs' is not an order: there are 'graph', 'rank', 'score'"):
        loaded(tmp_path, '[ordering]\nkind = "graphs"\n')
    with pytest.raises(BadInput, match="rates: 'a' is declared twice"):
        loaded(tmp_path, '[[rates]]\nresource = "a"\n[[rates]]\nresource = "a"\n')


def test_checkers_are_entry_points_and_what_is_none_is_refused(package: None, tmp_path: Path) -> None:
    found = loaded(tmp_path, '[checkers]\nrate_limit = "ours"\nbackpressure = "ours"\n').checkers
    assert found.limits.is_rate_limited("a", None) is True
    assert found.pressure.can_start() == (False, 0.0)
    assert loaded(tmp_path, "").checkers.pressure.can_start() == (True, 0.0)
    with pytest.raises(BadInput, match=r"'our' is not a checker: there are 'none', 'ours', 'wrong'; did you mean"):
        loaded(tmp_path, '[checkers]\nrate_limit = "our"\n')
    with pytest.raises(BadInput, match=r"has no is_rate_limited\(resource_class, model\)"):
        loaded(tmp_path, '[checkers]\nrate_limit = "wrong"\n')
